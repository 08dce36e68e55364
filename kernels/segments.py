"""Which pages the rows of a batch have in common: the part of the radix tree that a step walks, found in page tables.

A *segment* is a run of pages that stands at the same place in the tables of two or more rows; segments nest, as the
nodes of the tree do. Whether reading one once for all its rows pays is decided here too, by a linear model of the two
ways. Knows numbers only: no torch, no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from niwaki.kernels.jit import jit
from niwaki.kernels.order import stable_order

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Costs:
    """Nanoseconds of one layer's attention, each way. A *pair* is one query token and one key, all heads of them."""

    paged_pair: float  # a short row reads its keys by itself
    dense_pair: float  # stacked queries, or a long row, in one product
    key: float  # gathering a key and its value into a block
    query: float  # stacking a query, and merging what it got from one segment
    segment: float  # launches
    key_again: float | None = None  # `key` for a long row alone, as others have just read it; None: the same


@dataclass(frozen=True, slots=True)
class Segments:
    """Segment i is the pages `first_page[i]` to `end_page[i]` of the tables of rows[bounds[i]:bounds[i + 1]].

    Ancestors stand before descendants, and the segments of a row cover its first `row_end[row]` pages without a gap.
    """

    first_page: Int32s  # [segments]
    end_page: Int32s  # [segments]
    bounds: Int32s  # [segments + 1]
    rows: Int32s
    row_end: Int32s  # [rows of the batch], in pages

    def __len__(self) -> int:
        return len(self.first_page)


def find_segments(
    table: Int32s, shareable: Int64s, counts: Int64s, *, page_size: int, longest_paged: int, costs: Costs
) -> Segments:
    """The segments worth reading once.

    table [rows, widest]: page ids. shareable [rows]: so many pages at the start of a row's table hold only keys that
    each of its queries sees. counts [rows]: its queries; rows of at most `longest_paged` go key by key.

    Where a segment does not pay, those below it start where it would have; where none does, the rows read it alone.
    """
    row_end = np.zeros(len(table), np.int32)
    again = costs.key if costs.key_again is None else costs.key_again
    weights = np.array((costs.paged_pair, costs.dense_pair, costs.key, costs.query, costs.segment, again), np.float64)
    first_page, end_page, bounds, rows = _find(table, shareable, counts, page_size, longest_paged, weights, row_end)
    return Segments(first_page, end_page, bounds, rows, row_end)


@jit()
def _find(
    table: Int32s,
    shareable: Int64s,
    counts: Int64s,
    page_size: int,
    longest_paged: int,
    weights: npt.NDArray[np.float64],
    row_end: Int32s,
) -> tuple[Int32s, Int32s, Int32s, Int32s]:
    num_rows = table.shape[0]
    order = np.empty(num_rows, np.int64)
    for row in range(num_rows):
        order[row] = row
    first_page = np.empty(num_rows, np.int32)  # a tree with n leaves has fewer than n inner nodes
    end_page = np.empty(num_rows, np.int32)
    bounds = np.zeros(num_rows + 1, np.int32)
    rows = np.empty(2 * num_rows, np.int32)
    found = 0
    # Groups still to be divided: order[low:high] agree on the pages before `depth`, and read those from `start` on.
    stack = np.empty((num_rows + 1, 4), np.int64)
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = 0, num_rows, 0, 0
    waiting = 1 if num_rows > 1 else 0
    while waiting:
        waiting -= 1
        low, high, depth, start = stack[waiting, 0], stack[waiting, 1], stack[waiting, 2], stack[waiting, 3]
        heads, members = np.empty(high - low, np.int64), np.empty(high - low, np.int64)
        for i in range(low, high):
            row = order[i]
            members[i - low] = row
            heads[i - low] = table[row, depth] if shareable[row] > depth else -1
        ranks = stable_order(heads)
        for i in range(high - low):
            order[low + i] = members[ranks[i]]
        begin = low
        while begin < high:
            head = heads[ranks[begin - low]]
            stop = begin + 1
            while stop < high and heads[ranks[stop - low]] == head:
                stop += 1
            if head >= 0 and stop - begin > 1:
                end = _common_end(table, shareable, order[begin:stop], depth)
                next_start = start
                if _pays(order[begin:stop], counts, (end - start) * page_size, longest_paged, weights):
                    used = bounds[found]
                    if used + stop - begin > rows.shape[0]:
                        more = np.empty(2 * (used + stop - begin), np.int32)
                        for i in range(used):
                            more[i] = rows[i]
                        rows = more
                    for i in range(begin, stop):
                        rows[used + i - begin] = order[i]
                        row_end[order[i]] = end
                    first_page[found] = start
                    end_page[found] = end
                    found += 1
                    bounds[found] = used + stop - begin
                    next_start = end
                if stop - begin > 2:  # of two, nothing is common behind where they part
                    stack[waiting, 0], stack[waiting, 1], stack[waiting, 2] = begin, stop, end
                    stack[waiting, 3] = next_start
                    waiting += 1
            begin = stop
    return first_page[:found], end_page[:found], bounds[: found + 1], rows[: bounds[found]]


@jit()
def _common_end(table: Int32s, shareable: Int64s, members: Int64s, depth: int) -> int:
    """The first page behind `depth` at which the rows part."""
    end = shareable[members[0]]
    for row in members:
        end = min(end, shareable[row])
    leader = table[members[0]]
    for row in members[1:]:
        page = depth
        while page < end and table[row, page] == leader[page]:
            page += 1
        end = page
    return int(end)


@jit()
def _pays(members: Int64s, counts: Int64s, keys: int, longest_paged: int, weights: npt.NDArray[np.float64]) -> bool:
    """Whether one dense product for all members costs less than each of them reading `keys` by itself."""
    paged_pair, dense_pair, key, query, segment = weights[0], weights[1], weights[2], weights[3], weights[4]
    again = weights[5]
    apart = 0.0
    queries = 0
    for row in members:
        count = counts[row]
        queries += count
        apart += keys * (count * paged_pair if count <= longest_paged else again + count * dense_pair)
    together = segment + keys * key + queries * (query + keys * dense_pair)
    return bool(together < apart)
