"""What one step's attention needs to know about its ragged batch; made once a step, used by every layer.

Knows counts, positions and page ids; never sees a query or a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from niwaki.kernels.jit import jit
from niwaki.kernels.segments import Costs, Int32s, Int64s, find_segments

if TYPE_CHECKING:
    from niwaki.kernels.triton.plan import DevicePlan

# A row of at most this many new tokens goes through the decode kernel, each token a query of its own that sees one
# key more than the one before; longer rows gather their keys and go through dense attention. See bench_kernels.py.
MAX_DECODE_TOKENS = 8
# ... and of at most so many where longer rows read their pages in tiles: L15 then takes, for a row of 4 or 8 tokens
# behind 3,900 keys, 9.5 and 10.5 ms instead of 12.4 and 17.8, for 32 rows of 8 behind 300, 27 instead of 35.
MAX_DECODE_BESIDE_TILES = 3
# ... and where stacks go by pairs of bfloat16, in half of the lanes where that is enough. Rows of three tokens take
# 0.71 to 0.93 of their attention's time so behind 300 keys and more, 0.87 to 1.13 behind 48; rows of two 0.78 to 0.93
# and 0.96 to 1.11 where three heads share a key, but 1.0 to 1.6 where two do (niwaki-tiny, L15, L60; 1, 8 and 32 rows,
# one thread of an EPYC, Zen 4, 28 November 2026, medians of 21 in turn).
MAX_DECODE_BESIDE_PAIRS = 2


@dataclass(frozen=True, slots=True)
class Span:
    """One row of the batch: `count` new tokens after `start` cached ones, in the pages `page_ids`."""

    start: int
    count: int
    page_ids: Sequence[int] | Int32s


@dataclass(frozen=True, slots=True)
class Spans:
    """All rows of a batch as arrays. Who runs the same rows step after step keeps them, and changes in place where they
    start, and which pages they hold behind those that several share."""

    starts: Int64s  # [rows]
    counts: Int64s  # [rows]
    table: Int32s  # [rows, at least the widest], padded with 0
    held: Int64s  # [rows] pages of each row

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Spans:
        return cls.of_columns(
            [span.start for span in spans], [span.count for span in spans], [span.page_ids for span in spans]
        )

    @classmethod
    def of_columns(
        cls, starts: Sequence[int], counts: Sequence[int], page_ids: Sequence[Sequence[int] | Int32s]
    ) -> Spans:
        """Of what many `Span` would say, without making them."""
        held = list(map(len, page_ids))
        table = np.zeros((len(held), max(held, default=0) or 1), np.int32)
        for row, ids in enumerate(page_ids):
            table[row, : held[row]] = ids
        return cls(np.array(starts, np.int64), np.array(counts, np.int64), table, np.array(held, np.int64))


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
class FlatRows:
    """The rows of many tokens as numbers."""

    numbers: Int64s  # [rows, 5]: first token, tokens, cached ones, row of the table, first key that is not shared
    table: Int32s

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, page_size: int) -> tuple[PrefillRow, ...]:
        return tuple(
            PrefillRow(first, count, start, self.table[row, : _pages_for(start + count, page_size)], first_key)
            for first, count, start, row, first_key in self.numbers.tolist()
        )


@dataclass(frozen=True, slots=True)
class FlatSegments:
    """Segments as numbers, ancestors first."""

    numbers: Int64s  # [segments, 5]: row of the table, first page, end page, first of its tokens, end of its tokens
    tokens: Int32s  # of all segments
    table: Int32s

    def __len__(self) -> int:
        return len(self.numbers)

    def segments(self, page_size: int) -> tuple[Segment, ...]:
        return tuple(
            Segment(self.table[row, first:end], self.tokens[begin:stop], first * page_size)
            for row, first, end, begin, stop in self.numbers.tolist()
        )


@dataclass(frozen=True)
class Shared:
    """The batch as a tree: the segments, and what each row then reads by itself."""

    page_size: int
    flat: FlatSegments
    decode: DecodeQueries
    long: FlatRows

    @property
    def longest(self) -> int:
        """Keys that any query sees: under a sliding window shorter than this, the rows read all by themselves."""
        long = self.long.numbers[:, 1] + self.long.numbers[:, 2]
        return max(int(self.decode.length.max(initial=0)), int(long.max(initial=0)))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return self.flat.segments(self.page_size)

    @cached_property
    def prefill(self) -> tuple[PrefillRow, ...]:
        return self.long.rows(self.page_size)


@dataclass(frozen=True)
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
    long: FlatRows
    shared: Shared | None = None
    on_device: DevicePlan | None = None  # the same batch as GPU kernels read it

    @cached_property
    def prefill(self) -> tuple[PrefillRow, ...]:
        return self.long.rows(self.page_size)


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
    num_queries, num_long = num_tokens, 0
    if num_rows and int(counts.max()) > longest_paged:
        is_long = counts > longest_paged
        num_queries -= int(counts[is_long].sum())
        num_long = int(is_long.sum())
    queries = DecodeQueries(
        np.empty(num_queries, np.int32),
        np.empty(num_queries, np.int32),
        np.empty(num_queries, np.int32),
        np.zeros(num_queries, np.int32),
    )
    long = FlatRows(np.zeros((num_long, 5), np.int64), table)
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
            long.numbers,
        )
    )
    if bad_row < num_rows:
        _explain(rows, bad_row, page_size, num_pages)
    shared = None
    if costs is not None and num_rows > 1:
        segments = find_segments(
            table, starts // page_size, counts, page_size=page_size, longest_paged=longest_paged, costs=costs
        )
        if len(segments):
            first_key = segments.row_end * np.int32(page_size)
            numbers = long.numbers.copy()
            numbers[:, 4] = first_key[numbers[:, 3]]
            shared = Shared(
                page_size,
                FlatSegments(
                    *_with_tokens(segments.first_page, segments.end_page, segments.bounds, segments.rows, counts), table
                ),
                replace(queries, first_key=first_key[queries.table_row]),
                FlatRows(numbers, table),
            )
    return AttentionPlan(num_tokens, page_size, num_pages, positions, slots, table, queries, long, shared)


def next_plan(plan: AttentionPlan, rows: Spans, *, num_pages: int, longest_paged: int) -> AttentionPlan:
    """The plan of a later step of the very spans of `plan`, as many tokens each. That one is used up: its arrays are
    filled anew. What rows share need not be looked for again: a page that one of them has filled since is its own.

    Raises:
        ValueError: as `make_plan`.
    """
    decode, page_size = plan.decode, plan.page_size
    bad_row = int(
        _fill(
            rows.starts,
            rows.counts,
            rows.held,
            rows.table,
            page_size,
            num_pages,
            plan.positions,
            plan.slots,
            decode.token,
            decode.table_row,
            decode.length,
            longest_paged,
            plan.long.numbers,
        )
    )
    if bad_row < len(rows):
        _explain(rows, bad_row, page_size, num_pages)
    shared = plan.shared
    if len(plan.long):  # what was made of its numbers is not that of these
        plan.__dict__.pop("prefill", None)
    if len(plan.long) and shared is not None:
        shared.long.numbers[:, 2] = plan.long.numbers[:, 2]
        shared.__dict__.pop("prefill", None)
    return plan


@jit()
def _with_tokens(
    first_page: Int32s, end_page: Int32s, bounds: Int32s, rows: Int32s, counts: Int64s
) -> tuple[Int64s, Int32s]:
    """The numbers and tokens of `FlatSegments`."""
    firsts = np.empty(counts.shape[0], np.int64)
    token = 0
    for row in range(counts.shape[0]):
        firsts[row] = token
        token += counts[row]
    total = 0
    for row in rows:
        total += counts[row]
    numbers = np.empty((first_page.shape[0], 5), np.int64)
    tokens = np.empty(total, np.int32)
    at = 0
    for i in range(first_page.shape[0]):
        numbers[i, 0], numbers[i, 1], numbers[i, 2], numbers[i, 3] = rows[bounds[i]], first_page[i], end_page[i], at
        for row in rows[bounds[i] : bounds[i + 1]]:
            for token in range(firsts[row], firsts[row] + counts[row]):
                tokens[at] = token
                at += 1
        numbers[i, 4] = at
    return numbers, tokens


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
    long: Int64s,
) -> int:
    """Fill the arrays from `positions` on, and of `long`, the numbers of `FlatRows`, all but where what is shared ends.
    Returns the first row that is invalid, or the number of rows."""
    num_rows: int = starts.shape[0]
    token = 0
    query = 0
    longs = 0
    for row in range(num_rows):
        start = starts[row]
        count = counts[row]
        if start < 0 or count < 1 or held[row] * page_size < start + count:
            return row
        for index in range(held[row]):
            if table[row, index] < 0 or table[row, index] >= num_pages:
                return row
        if count > longest_paged:
            long[longs, 0], long[longs, 1], long[longs, 2], long[longs, 3] = token, count, start, row
            longs += 1
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
