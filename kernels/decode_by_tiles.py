"""Single queries over paged keys (paged_decode.py) by the matrix unit (tiles.py), which reads keys and values in place.

Of a query the heads of a group, some `heads` of them, are few beside sixteen, so tiles that have a row or a column for
each are narrow, and both products take keys and values as they lie in their pages:

    scores [16 keys, heads] = keys queries^T          a key's words are pairs of columns, as A wants them
    mixed [2 heads, 16 words] += weights values       a value's words as rows of B: half of each of A's words is zero

so that the upper rows of `mixed` are the even columns and the lower ones the odd. Between the two the scores lie
key by key, sixteen numbers in a vector whatever `heads` is: lane l is that of head l mod `heads`.

Nothing is laid out anew but the values of a run of keys of which some are hidden: zero times whatever lies there would
not be zero. A block is asked for, run by run, while the one before is multiplied.
"""

from __future__ import annotations

import numpy as np

from niwaki.kernels.decode_by_vectors import BLOCK, LINE, first_block
from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import exp_f32
from niwaki.kernels.operand import Array
from niwaki.kernels.pair_attention import LEAST
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.simd import (
    LANES,
    Vector,
    add,
    apart,
    as_halves,
    between,
    exp2_16,
    larger,
    minus,
    multiply_add,
    splat,
    swapped,
    times,
    zeros,
)
from niwaki.kernels.simd_memory import element_at, load16, load_alike, prefetch, splat_at, store16, store_pair
from niwaki.kernels.stack_by_tiles import HIDDEN, LN_2, LOG2_E, RUN, SLICE, TILE
from niwaki.kernels.tiles import (
    ROWS,
    Bytes,
    aligned,
    clear,
    configure,
    load_tile,
    multiply,
    release,
    store_tile,
)

MOST = 8  # heads at once: twice as many rows are a tile
RUNS = BLOCK // RUN


@jit()
def decode_by_tiles(
    q: Array, k_pool: Array, v_pool: Array, page_table: Int32s, token: Int32s, table_row: Int32s, length: Int32s,
    first_key: Int32s, partial_mixed: Array, partial_lse: Array, sinks: Array, out: Array, scale: float, window: int,
    chunk: int, soft_cap: float, first_item: int, last_item: int,
) -> None:  # fmt: skip
    """As `decode_by_vectors`, of bfloat16 in pages of whole runs, heads of an even number of slices; `soft_cap` is not
    looked at."""
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    heads = q.shape[1]
    group = heads // kv_heads
    parts = (group + MOST - 1) // MOST  # of a group
    wide = 1  # heads of a part, as powers of two
    while wide < min(group, MOST):
        wide *= 2
    slices = head_dim // SLICE
    width = kv_heads * head_dim
    size_asked, size_mixed = slices * ROWS * wide, slices * 2 * wide * LANES
    q_strides = q.strides[0] // 2, q.strides[1] // 2
    out_strides = out.strides[0] // 2, out.strides[1] // 2
    factor = splat(np.float32(scale) * LOG2_E)
    k, v, before = k_pool.reshape(-1), v_pool.reshape(-1), partial_mixed.reshape(-1)
    stacks = kv_heads * parts
    # Of each part: its queries, [slices, pairs of columns, heads], and its sums, [slices, even or odd, heads, 16].
    asked = np.zeros(stacks * size_asked + 2 * LANES, np.float32)
    mixed = np.zeros(stacks * size_mixed + LANES, np.float32)
    highest = np.empty(stacks * LANES, np.float32)
    total = np.empty(stacks * LANES, np.float32)
    scores = np.empty(BLOCK * wide + LANES, np.float32)  # [keys, heads]
    weights = np.empty(2 * BLOCK * wide + LANES, np.float32)  # [runs, lower or upper half, heads, 16 keys]
    room = np.empty(2 * TILE, np.float32)
    shrink = np.empty(LANES, np.float32)
    seen_values = np.zeros(slices * TILE + LANES, np.float32)  # of a run of which some are hidden: [slices, keys, 16]
    asked0, mixed0, scores0 = aligned(asked), aligned(mixed), aligned(scores)
    weights0, values0 = aligned(weights), aligned(seen_values)
    at, later = np.zeros(RUNS, np.int64), np.zeros(RUNS, np.int64)  # where runs begin in the pool: these, the next
    configure(_shape(wide))
    item = first_item
    block, end, start_of_next, end_of_next = 0, 0, 0, 0
    if item < last_item:
        block, end = first_block(item // kv_heads, length, first_key, window, chunk)
        _place(page_table, table_row[item // kv_heads], block, end, page_size, width, later)
        offset, columns = item % kv_heads * head_dim, min(kv_heads, last_item - item) * head_dim
        _ask_for_rows(k, later, 0, _runs(block, end) * RUN, width, offset, columns)
        _ask_for_rows(v, later, 0, _runs(block, end) * RUN, width, offset, columns)
    while item < last_item:
        i = item // kv_heads
        first_head = item % kv_heads
        last_head = min(kv_heads, first_head + last_item - item)
        item += last_head - first_head
        got = first_key[i] > 0
        for stack in range(first_head * parts, last_head * parts):
            h = stack // parts * group + stack % parts * MOST
            count = min(MOST, group - stack % parts * MOST)
            source = token[i] * q_strides[0] + h * q_strides[1]
            _lay_out(q, source, q_strides[1], count, wide, slices, room, asked, asked0 + stack * size_asked)
            for lane in range(LANES):
                is_there = got and lane % wide < count
                # Weights that sum to e^lse, seen from e^lse, sum to 1.
                highest[stack * LANES + lane] = partial_lse[token[i], h + lane % wide] * LOG2_E if is_there else LEAST
                total[stack * LANES + lane] = np.float32(1.0) if is_there and lane < wide else np.float32(0.0)
            for n in range(wide):
                for s in range(slices):
                    low, high = zeros(), zeros()
                    if got and n < count:
                        low, high = load_alike(before, (np.int64(token[i]) * heads + h + n) * head_dim + s * SLICE, q)
                    place = mixed0 + stack * size_mixed + (s * 2 * wide + n) * LANES
                    store16(mixed, place, low)
                    store16(mixed, place + wide * LANES, high)
        seen, lowest = int(np.int64(length[i])), block
        block = block // RUN * RUN
        while block < seen:
            for run in range(RUNS):
                at[run] = later[run]
            runs, start_of_next, end_of_next = _runs(block, end), end, min(end + BLOCK, seen)
            next_runs = 0
            if end < seen:
                _place(page_table, table_row[i], end, end_of_next, page_size, width, later)
                next_runs = _runs(end, end_of_next)
            elif item < last_item:  # the first block of the next query is asked for with this one's last
                start_of_next, end_of_next = first_block(item // kv_heads, length, first_key, window, chunk)
                _place(page_table, table_row[item // kv_heads], start_of_next, end_of_next, page_size, width, later)
                next_runs = _runs(start_of_next, end_of_next)
            # Rows of the next block are asked for a few at a time: a core waits for no more than a dozen lines at once.
            offset, columns = first_head * head_dim, (last_head - first_head) * head_dim
            rows, times_asked, of_keys, of_values = next_runs * RUN, runs * (last_head - first_head) * parts, 0, 0
            for stack in range(first_head * parts, last_head * parts):
                own = stack // parts * head_dim
                queries = asked0 + stack * size_asked
                for run in range(0, runs, 2):
                    number = (stack - first_head * parts) * runs + min(run + 2, runs)
                    _ask_for_rows(k, later, of_keys, rows * number // times_asked, width, offset, columns)
                    of_keys = rows * number // times_asked
                    here, there = element_at(at, run) + own, element_at(at, min(run + 1, runs - 1)) + own
                    clear(0)
                    clear(1)
                    for s in range(slices):
                        load_tile(4, asked, queries + s * ROWS * wide, 4 * wide)
                        load_tile(6, k, here + s * SLICE, 2 * width)
                        multiply(0, 6, 4)
                        load_tile(7, k, there + s * SLICE, 2 * width)
                        multiply(1, 7, 4)
                    place = scores0 + run * RUN * wide
                    store_tile(0, scores, place, 4 * wide)
                    if run + 1 < runs:
                        store_tile(1, scores, place + RUN * wide, 4 * wide)
                for j in range((lowest - block) * wide):
                    scores[scores0 + j] = HIDDEN
                for j in range((end - block) * wide, runs * RUN * wide):
                    scores[scores0 + j] = HIDDEN
                _weigh(
                    scores, scores0, runs, wide, factor, highest, total, stack * LANES, shrink, room, weights, weights0
                )
                sums = mixed0 + stack * size_mixed
                for n in range(wide):
                    if shrink[n] != np.float32(1.0):
                        less = splat_at(shrink, n)
                        for s in range(2 * slices):
                            place = sums + (s * wide + n) * LANES
                            store16(mixed, place, times(load16(mixed, place), less))
                for s in range(0, slices, 2):
                    first, second = sums + s * 2 * wide * LANES, sums + (s + 1) * 2 * wide * LANES
                    load_tile(2, mixed, first, LINE)
                    load_tile(3, mixed, second, LINE)
                    for run in range(runs):
                        if s == 0:
                            number = (stack - first_head * parts) * runs + run + 1
                            _ask_for_rows(v, later, of_values, rows * number // times_asked, width, offset, columns)
                            of_values = rows * number // times_asked
                        load_tile(5, weights, weights0 + run * 2 * wide * RUN, LINE)
                        key = block + run * RUN
                        if key >= lowest and key + RUN <= end:
                            place = element_at(at, run) + own + s * SLICE
                            load_tile(6, v, place, 2 * width)
                            multiply(2, 5, 6)
                            load_tile(7, v, place + SLICE, 2 * width)
                            multiply(3, 5, 7)
                        else:
                            for row in range(RUN):
                                place = element_at(at, run) + row * width + own + s * SLICE
                                a, b = zeros(), zeros()
                                if lowest <= key + row < end:
                                    a, b = load16(v, place), load16(v, place + SLICE)
                                store16(seen_values, values0 + row * LANES, a)
                                store16(seen_values, values0 + TILE + row * LANES, b)
                            load_tile(6, seen_values, values0, LINE)
                            multiply(2, 5, 6)
                            load_tile(7, seen_values, values0 + TILE, LINE)
                            multiply(3, 5, 7)
                    store_tile(2, mixed, first, LINE)
                    store_tile(3, mixed, second, LINE)
            block, lowest, end = end, 0, min(end + BLOCK, seen)
        block, end = start_of_next, end_of_next
        for stack in range(first_head * parts, last_head * parts):
            h = stack // parts * group + stack % parts * MOST
            store16(shrink, 0, _over_heads(load16(total, stack * LANES), wide))
            for n in range(min(MOST, group - stack % parts * MOST)):
                sum_of_weights = shrink[n]
                if sinks.shape[0]:
                    sum_of_weights += exp_f32(sinks[h + n] - highest[stack * LANES + n] * LN_2)
                inverse = splat(np.float32(1.0) / sum_of_weights)
                for s in range(slices):
                    place = mixed0 + stack * size_mixed + (s * 2 * wide + n) * LANES
                    low, high = load16(mixed, place), load16(mixed, place + wide * LANES)
                    target = token[i] * out_strides[0] + (h + n) * out_strides[1] + s * SLICE
                    store_pair(out, target, times(low, inverse), times(high, inverse))
    release()


@jit()
def _shape(wide: int) -> Bytes:
    """Tiles 0 and 1 are sums of scores, 2 and 3 of values, 4 queries, 5 weights, 6 and 7 keys or values."""
    shape = np.zeros(64, np.uint8)
    shape[0] = 1
    for tile in range(8):
        shape[16 + 2 * tile], shape[48 + tile] = LINE, ROWS
    shape[16] = shape[18] = shape[24] = 4 * wide
    shape[50] = shape[51] = shape[53] = 2 * wide
    return shape


@jit()
def _runs(block: int, end: int) -> int:
    """Of the keys `block` to `end`, whose first run may begin before them."""
    return (end - block // RUN * RUN + RUN - 1) // RUN


@jit()
def _place(page_table: Int32s, row: int, block: int, end: int, page_size: int, width: int, at: Int64s) -> None:
    """at[run] = the element of the pool where that run of keys `block` to `end` of the row begins."""
    key = block // RUN * RUN
    for run in range(_runs(block, end)):
        at[run] = (np.int64(page_table[row, key // page_size]) * page_size + key % page_size) * width
        key += RUN


@jit(inline=True)
def _ask_for_rows(pool: Array, at: Int64s, first: int, last: int, width: int, offset: int, columns: int) -> None:
    """Rows `first` to `last` of the runs of keys that begin at these places in the pool, so many columns of them."""
    for row in range(first, last):
        begin = element_at(at, row // RUN) + row % RUN * width + offset
        for column in range(begin, begin + columns, SLICE):
            prefetch(pool, column)


@jit()
def _lay_out(
    q: Array, source: int, step: int, count: int, wide: int, slices: int, room: Float32s, asked: Float32s, place: int
) -> None:
    """asked[place:] = [slices, 16 pairs of columns, `wide` heads] of `count` heads that lie `step` elements apart."""
    for s in range(slices):
        here, there = 0, TILE
        for n in range(wide):
            words = load16(q, source + n * step + s * SLICE) if n < count else zeros()
            store16(room, here + n * LANES, words)
        half = wide // 2
        width = 1
        while width < wide:  # head by head becomes pair by pair
            for n in range(half):
                low, high = between(load16(room, here + n * LANES), load16(room, here + (half + n) * LANES))
                store16(room, there + 2 * n * LANES, low)
                store16(room, there + (2 * n + 1) * LANES, high)
            here, there, width = there, here, 2 * width
        for n in range(wide):
            store16(asked, place + (s * wide + n) * LANES, load16(room, here + n * LANES))


@jit()
def _weigh(
    scores: Float32s, scores0: int, runs: int, wide: int, factor: Vector, highest: Float32s, total: Float32s, line: int,
    shrink: Float32s, room: Float32s, weights: Float32s, weights0: int,
) -> None:  # fmt: skip
    """The block's weights, seen from the highest score so far, and what earlier sums shrink by."""
    tops = splat(LEAST)
    for j in range(scores0, scores0 + runs * wide * LANES, LANES):
        tops = larger(tops, load16(scores, j))
    tops = larger(tops, swapped(tops, 8))
    if wide <= 4:
        tops = larger(tops, swapped(tops, 4))
    if wide <= 2:
        tops = larger(tops, swapped(tops, 2))
    if wide == 1:
        tops = larger(tops, swapped(tops, 1))
    before = load16(highest, line)
    top = larger(before, times(tops, factor))
    less = exp2_16(minus(before, top))
    store16(highest, line, top)
    store16(shrink, 0, less)
    minus_top = minus(zeros(), top)
    sums = times(load16(total, line), less)
    half = wide // 2
    for run in range(runs):
        here, there = 0, TILE
        for j in range(wide):
            weight = exp2_16(multiply_add(load16(scores, scores0 + (run * wide + j) * LANES), factor, minus_top))
            sums = add(sums, weight)
            store16(room, here + j * LANES, weight)
        width = 1
        while width < wide:  # key by key becomes head by head
            for j in range(half):
                even, odd = apart(load16(room, here + 2 * j * LANES), load16(room, here + (2 * j + 1) * LANES))
                store16(room, there + j * LANES, even)
                store16(room, there + (half + j) * LANES, odd)
            here, there, width = there, here, 2 * width
        place = weights0 + run * 2 * wide * LANES
        for n in range(wide):
            low, high = as_halves(load16(room, here + n * LANES))
            store16(weights, place + n * LANES, low)
            store16(weights, place + (wide + n) * LANES, high)
    store16(total, line, sums)


@jit()
def _over_heads(sums: Vector, wide: int) -> Vector:
    """In each lane the sum of the lanes of its head."""
    sums = add(sums, swapped(sums, 8))
    if wide <= 4:
        sums = add(sums, swapped(sums, 4))
    if wide <= 2:
        sums = add(sums, swapped(sums, 2))
    if wide == 1:
        sums = add(sums, swapped(sums, 1))
    return sums
