"""Batches that are made of a steady one for a single step: with pieces of prompts behind it, with guesses behind its
tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from niwaki.kernels.plan import Spans
from niwaki.runtime.forward.runner import Batch, Row
from niwaki.runtime.options.limits import TokenIds


def with_pieces(batch: Batch, pieces: Sequence[Row], page_size: int) -> Batch:
    """`pieces`: of prompts, whose logits nobody wants."""
    spans, count = batch.spans, len(batch.spans)
    ends = [-(-row.end // page_size) for row in pieces]
    more = Spans.of_columns(
        [row.start for row in pieces],
        [len(row.token_ids) for row in pieces],
        [row.page_ids[:end] for row, end in zip(pieces, ends, strict=True)],
    )
    table = np.zeros((count + len(pieces), max(spans.table.shape[1], more.table.shape[1])), np.int32)
    table[:count, : spans.table.shape[1]] = spans.table
    table[count:, : more.table.shape[1]] = more.table
    together = Spans(
        np.concatenate([spans.starts, more.starts]),
        np.concatenate([spans.counts, more.counts]),
        table,
        np.concatenate([spans.held, more.held]),
    )
    ids = np.concatenate([batch.token_ids, *(row.token_ids for row in pieces)])
    return Batch(ids, together, np.arange(count), as_computed=True)


def with_guesses(batch: Batch, guesses: Sequence[TokenIds], last: Batch | None = None) -> Batch:
    """`guesses`: of what follows each row's token, maybe nothing. The logits of all are wanted. `last`: what was made
    before of these rows' arrays, whose spans are those of guesses as long again."""
    counts = [1 + len(guess) for guess in guesses]
    spans = batch.spans if last is None else last.spans
    if spans.table is not batch.spans.table or spans.counts.tolist() != counts:
        rows = batch.spans
        spans = Spans(rows.starts, np.array(counts, np.int64), rows.table, rows.held)
    ids = [part for place, guess in enumerate(guesses) for part in (batch.token_ids[place : place + 1], guess)]
    return Batch(np.concatenate(ids), spans, None, as_computed=True)
