"""What one step's attention needs to know about its ragged batch; made once a step, used by every layer.

Knows counts, positions and page ids; never sees a query or a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from niwaki.kernels.jit import jit
from niwaki.kernels.segments import Costs, Int32s, Int64s, Segments, find_segments

if TYPE_CHECKING:
    from niwaki.kernels.triton.plan import DevicePlan

# A row of at most this many new tokens goes through the decode kernel, each token a query of its own that sees one
# key more than the one before; longer rows gather their keys and go through dense attention. See bench_kernels.py.
MAX_DECODE_TOKENS = 8
# ... and of at most so many where longer rows read their pages in tiles: L15 then takes, for a row of 4 or 8 tokens
# behind 3,900 keys, 9.5 and 10.5 ms instead of 12.4 and 17.8, for 32 rows of 8 behind 300, 27 instead of 35.
MAX_DECODE_BESIDE_TILES = 3


@dataclass(frozen=True, slots=True)
class Span:
    """One row of the batch: `count` new tokens after `start` cached ones, in the pages `page_ids`."""

    start: int
    count: int
    page_ids: Sequence[int] | Int32s


@dataclass(frozen=True, slots=True)
class Spans:
    """All rows of a batch as arrays. Who runs the same rows step after step keeps them, and changes them in place."""

    starts: Int64s  # [rows]
    counts: Int64s  # [rows]
    table: Int32s  # [rows, at least the widest], padded with 0
    held: Int64s  # [rows] pages of each row

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Spans:
        widest = max((len(span.page_ids) for span in spans), default=0)
        table = np.zeros((len(spans), max(widest, 1)), np.int32)
        held = np.empty(len(spans), np.int64)
        for row, span in enumerate(spans):
            held[row] = len(span.page_ids)
            table[row, : held[row]] = span.page_ids
        starts = np.fromiter([span.start for span in spans], np.int64, len(spans))
        counts = np.fromiter([span.count for span in spans], np.int64, len(spans))
        return cls(starts, counts, table, held)


@dataclass(frozen=True, slots=True)
class DecodeQueries:
    """Single queries over paged keys. Query i is token `token[i]`; it sees the first `length[i]` keys of table row
    `table_row[i]`, its own key being the last. Those before `first_key[i]` are not read: they come from segments."""

    token: Int32s  # [queries]
    table_row: Int32s  # [queries]
    length: Int32s  # [queries]
    first_key: Int32s  # [queries]


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Tokens `first` to `first + count` of the batch over the first `start + count` keys of their pages, causally.

    Those before `first_key`, the start of a page, are not read: they come from segments.
    """

    first: int
    count: int
    start: int
    page_ids: Int32s
    first_key: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Pages that several rows share, read once for all of `tokens`: every one of them sees all of its keys."""

    page_ids: Int32s
    tokens: Int32s  # [queries]
    first_key: int  # position of the first of its keys: where that is 0, there is nothing before to merge with


@dataclass(frozen=True, slots=True)
class Shared:
    """The batch as a tree: the segments, ancestors first, and what each row then reads by itself."""

    segments: tuple[Segment, ...]
    decode: DecodeQueries
    prefill: tuple[PrefillRow, ...]
    longest: int  # keys that any query sees: under a sliding window shorter than this, the rows read all by themselves


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where each token's key and value go, and which rows take which path. Keys are stored before attention reads.

    `decode` and `prefill` are the whole batch row by row; `shared` is the same batch with what is common read once, or
    None where that does not pay.
    """

    num_tokens: int
    page_size: int
    num_pages: int
    positions: Int64s  # [tokens] position in its own sequence
    slots: Int64s  # [tokens] page id x page size + offset, where its key and value go
    page_table: Int32s  # [rows, widest], padded with 0, which is never read
    decode: DecodeQueries
    prefill: tuple[PrefillRow, ...]
    shared: Shared | None = None
    on_device: DevicePlan | None = None  # the same batch as GPU kernels read it


def make_plan(
    spans: Sequence[Span] | Spans,
    *,
    page_size: int,
    num_pages: int,
    longest_paged: int = MAX_DECODE_TOKENS,
    costs: Costs | None = None,
) -> AttentionPlan:
    """Lay out one step. Rows of more than `longest_paged` tokens are prefill rows. With `costs`, pages that rows share
    are read once where that pays.

    Raises:
        ValueError: a span is empty, its pages do not cover its tokens, or a page id is outside the pool. Kernels
            address memory by these numbers unchecked, so nothing gets past here.
    """
    rows = spans if isinstance(spans, Spans) else Spans.of(spans)
    num_rows, starts, counts, table = len(rows), rows.starts, rows.counts, rows.table
    num_tokens = int(counts.sum())
    positions = np.empty(num_tokens, np.int64)
    slots = np.empty(num_tokens, np.int64)
    all_decode = num_rows == 0 or int(counts.max()) <= longest_paged
    num_queries = num_tokens if all_decode else int(counts[counts <= longest_paged].sum())
    queries = DecodeQueries(
        np.empty(num_queries, np.int32),
        np.empty(num_queries, np.int32),
        np.empty(num_queries, np.int32),
        np.zeros(num_queries, np.int32),
    )
    bad_row = int(
        _fill(
            starts,
            counts,
            rows.held,
            table,
            page_size,
            num_pages,
            positions,
            slots,
            queries.token,
            queries.table_row,
            queries.length,
            longest_paged,
        )
    )
    if bad_row < num_rows:
        _explain(rows, bad_row, page_size, num_pages)
    prefill: tuple[PrefillRow, ...] = ()
    if not all_decode:
        firsts = np.cumsum(counts) - counts
        prefill = tuple(
            PrefillRow(
                int(firsts[row]),
                int(counts[row]),
                int(starts[row]),
                table[row, : _pages_for(int(starts[row] + counts[row]), page_size)],
            )
            for row in np.flatnonzero(counts > longest_paged)
        )
    shared = None
    if costs is not None and num_rows > 1:
        segments = find_segments(
            table, starts // page_size, counts, page_size=page_size, longest_paged=longest_paged, costs=costs
        )
        if len(segments):
            first_key = segments.row_end * np.int32(page_size)
            shared = Shared(
                _as_tokens(segments, table, counts, page_size),
                replace(queries, first_key=first_key[queries.table_row]),
                tuple(
                    replace(row, first_key=int(first_key[index]))
                    for row, index in zip(prefill, np.flatnonzero(counts > longest_paged), strict=True)
                ),
                int((starts + counts).max()),
            )
    return AttentionPlan(num_tokens, page_size, num_pages, positions, slots, table, queries, prefill, shared)


def _as_tokens(segments: Segments, table: Int32s, counts: Int64s, page_size: int) -> tuple[Segment, ...]:
    """The segments, with the tokens of their rows."""
    firsts = np.cumsum(counts) - counts
    found = []
    for i in range(len(segments)):
        rows = segments.rows[segments.bounds[i] : segments.bounds[i + 1]]
        first, end = int(segments.first_page[i]), int(segments.end_page[i])
        found.append(Segment(table[rows[0], first:end], _tokens_of(rows, firsts, counts), first * page_size))
    return tuple(found)


@jit()
def _tokens_of(rows: Int32s, firsts: Int64s, counts: Int64s) -> Int32s:
    total = 0
    for row in rows:
        total += counts[row]
    tokens = np.empty(total, np.int32)
    at = 0
    for row in rows:
        for token in range(firsts[row], firsts[row] + counts[row]):
            tokens[at] = token
            at += 1
    return tokens


def _pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _explain(rows: Spans, row: int, page_size: int, num_pages: int) -> None:
    start, count, held = int(rows.starts[row]), int(rows.counts[row]), int(rows.held[row])
    if start < 0 or count < 1:
        raise ValueError(
            f"row {row} must have at least one new token at a position >= 0, got {count} tokens at {start}"
        )
    needed = _pages_for(start + count, page_size)
    if held < needed:
        raise ValueError(
            f"row {row} needs {needed} pages of {page_size} for {start} cached and {count} new tokens, got {held}"
        )
    raise ValueError(f"row {row} names a page outside the pool of {num_pages}: {rows.table[row, :held].tolist()}")


@jit()
def _fill(
    starts: Int64s,
    counts: Int64s,
    held: Int64s,
    table: Int32s,
    page_size: int,
    num_pages: int,
    positions: Int64s,
    slots: Int64s,
    query_token: Int32s,
    query_row: Int32s,
    query_length: Int32s,
    longest_paged: int,
) -> int:
    """Fill the arrays from `positions` on. Returns the first row that is invalid, or the number of rows."""
    num_rows: int = starts.shape[0]
    token = 0
    query = 0
    for row in range(num_rows):
        start = starts[row]
        count = counts[row]
        if start < 0 or count < 1 or held[row] * page_size < start + count:
            return row
        for index in range(held[row]):
            if table[row, index] < 0 or table[row, index] >= num_pages:
                return row
        for position in range(start, start + count):
            positions[token] = position
            slots[token] = np.int64(table[row, position // page_size]) * page_size + position % page_size
            if count <= longest_paged:
                query_token[query] = token
                query_row[query] = row
                query_length[query] = position + 1
                query += 1
            token += 1
    return num_rows
