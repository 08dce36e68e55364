"""A stack of queries (tile_attention.py) by tiles of vectors (tiles.py); a matrix unit has stack_in_lanes.py.

Of each head's keys and values a block of BLOCK is laid out as the unit wants it, and all queries go over it, sixteen at
a time:

    scores = queries keys^T        tiles of sixteen queries and sixteen keys
    weights = 2^(scores - top)     by vectors; scores are in units of ln 2
    mixed = mixed + weights values

Blocks begin at multiples of BLOCK and no query's sums see another query, so a result depends on nothing but the query
and its keys. Keys that only some of a block's queries see score HIDDEN for the others: their weights are at most 2^-126
beside a largest of 1.
"""

from __future__ import annotations

import math

import numpy as np

from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import exp_f32
from niwaki.kernels.operand import Array
from niwaki.kernels.pair_attention import LEAST
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.simd import LANES, exp2_16, larger, multiply_add, splat, zeros
from niwaki.kernels.simd_memory import (
    element_at,
    largest_of_rows,
    load16,
    prefetch,
    splat_at,
    store16,
    store_between,
    store_bfloat16,
    store_pairs,
    sum_of_rows,
    transpose16,
)
from niwaki.kernels.simd_stores import put_outside
from niwaki.kernels.tiles import (
    LINE,
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

BLOCK = 64  # keys between two rescalings: four tiles of them
RUN = 16  # keys that lie one behind the other: a tile of them
SLICE = 32  # columns of a query or a key that a row of a tile holds
TILE = 256  # words
HIDDEN = np.float32(-math.inf)  # a finite score, times any factor, could be rounded to one above the highest
STATE = 1 << 16  # words of queries and their sums that one pass over the keys may have: far from all of a core's cache
LOG2_E = np.float32(math.log2(math.e))
LN_2 = np.float32(math.log(2))


@jit()
def attend_by_tiles(
    q: Array, k_pool: Array, v_pool: Array, pages: Int32s, tokens: Int32s, ends: Int32s, first_key: int,
    partial_mixed: Float32s, partial_lse: Float32s, sinks: Array, out: Array, is_partial: bool, scale: float,
    window: int, chunk: int, soft_cap: float, shape: Bytes, first_head: int, last_head: int,
) -> None:  # fmt: skip
    """Heads `first_head` to `last_head` of `tile_attention`: of keys and values, and so the queries of their groups."""
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    heads = q.shape[1]
    group = heads // kv_heads
    slices = head_dim // SLICE
    columns = head_dim // LANES
    width = kv_heads * head_dim
    factor = np.float32(scale) * LOG2_E
    queries = tokens.shape[0] * group
    blocks = (queries + ROWS - 1) // ROWS  # of queries
    k, v, flat = k_pool.reshape(-1), v_pool.reshape(-1), partial_mixed.reshape(-1)
    at_once = min(last_head - first_head, max(1, STATE // (blocks * (slices + columns + 1) * TILE)))
    stacks = at_once * blocks
    # Of each block of queries: themselves, [slices] tiles, and their sums, [columns] tiles of [queries, 16 columns].
    asked = np.zeros(stacks * slices * TILE + LANES, np.float32)
    mixed = np.zeros(stacks * columns * TILE + LANES, np.float32)
    total = np.zeros(stacks * TILE, np.float32)  # [queries, 16]: a query's sum of weights is that of its lanes
    highest = np.empty(stacks * ROWS, np.float32)
    low = np.zeros(blocks * ROWS, np.int64)  # the first key that each query sees
    high = np.zeros(blocks * ROWS, np.int64)  # behind the last
    # Of a head's block of keys: tiles [run, slice] of pairs of columns by keys, and [half, columns] of pairs of keys.
    keys = np.empty(at_once * 4 * slices * TILE + LANES, np.float32)
    values = np.empty(at_once * 2 * columns * TILE + LANES, np.float32)
    scores = np.empty(2 * ROWS * BLOCK + LANES, np.float32)  # [queries, keys] of two stacks
    weights = np.empty(2 * TILE + LANES, np.float32)  # [half, queries, 16]: of key i and of key i + 16 in one word
    shrink = np.empty(ROWS, np.float32)
    asked0, mixed0, keys0, values0 = aligned(asked), aligned(mixed), aligned(keys), aligned(values)
    scores0, weights0 = aligned(scores), aligned(weights)
    at = np.zeros(4, np.int64)  # where the runs of the block of keys begin in the pool
    reach = np.empty((blocks, 4), np.int64)  # of a block of queries: the lowest and highest of `low`, and of `high`
    r = 0
    for each in ends:
        end = int(np.int64(each))
        first = max(end - window, (end - 1) // chunk * chunk, first_key)
        for _ in range(group):
            block = r // ROWS
            low[r], high[r] = first, end
            if r % ROWS == 0:
                reach[block] = first, first, end, end
            reach[block, 0], reach[block, 1] = min(reach[block, 0], first), max(reach[block, 1], first)
            reach[block, 2], reach[block, 3] = min(reach[block, 2], end), max(reach[block, 3], end)
            r += 1
    start, end = reach[:, 0].min(), reach[:, 3].max()
    configure(shape)
    for head in range(first_head, last_head, at_once):
        num_heads = min(at_once, last_head - head)
        # Queries are counted up, not divided into tokens and heads: a division takes as long as what is done to one.
        for own in range(num_heads):
            r = 0
            for token in tokens:
                for h in range((head + own) * group, (head + own + 1) * group):
                    stack, row = own * blocks + r // ROWS, r % ROWS
                    source = token * (q.strides[0] // 2) + h * (q.strides[1] // 2)
                    for s in range(slices):
                        store16(
                            asked, asked0 + (stack * slices + s) * TILE + row * LANES, load16(q, source + s * SLICE)
                        )
                    # Weights that sum to e^lse, seen from e^lse, sum to 1.
                    before = (np.int64(token) * heads + h) * head_dim
                    for c in range(columns):
                        value = load16(flat, before + c * LANES) if first_key > 0 else zeros()
                        store16(mixed, mixed0 + (stack * columns + c) * TILE + row * LANES, value)
                    line = stack * ROWS + row
                    store16(total, line * LANES, zeros())
                    total[line * LANES] = np.float32(1.0) if first_key > 0 else np.float32(0.0)
                    highest[line] = partial_lse[token, h] * LOG2_E if first_key > 0 else LEAST
                    r += 1
        for own in range(num_heads):
            highest[own * blocks * ROWS + queries : (own + 1) * blocks * ROWS] = LEAST
        first = start // RUN * RUN
        while first < end:
            last = min(first // BLOCK * BLOCK + BLOCK, end)
            _lay_out(
                k, v, pages, first - first_key, last - first_key, page_size, width, head * head_dim, num_heads, slices,
                at, keys, keys0, values, values0
            )  # fmt: skip
            ask_for_block(
                k, v, pages, last - first_key, min(last + BLOCK, end) - first_key, page_size, width, head * head_dim,
                num_heads * head_dim
            )  # fmt: skip
            # Scores are one stack ahead of their weights: the unit makes them while vectors weigh those before.
            waiting, place = -1, scores0
            for stack in range(num_heads * blocks + 1):
                before, place_before = waiting, place
                if stack < num_heads * blocks:
                    own, block = stack // blocks, stack % blocks
                    rows = block * ROWS
                    count = min(ROWS, queries - rows)
                    if reach[block, 0] >= last or reach[block, 3] <= first:
                        continue
                    waiting, place = stack, 2 * scores0 + ROWS * BLOCK - place
                    own_keys = keys0 + own * 4 * slices * TILE
                    _score(asked, asked0 + stack * slices * TILE, keys, own_keys, slices, scores, place)
                    if reach[block, 1] > first or min(reach[block, 2], last) < first + BLOCK:
                        for r in range(count):
                            begin_at, end_at = low[rows + r] - first, min(high[rows + r], last) - first
                            for j in range(0, BLOCK, RUN):
                                put_outside(scores, place + r * BLOCK + j, begin_at - j, end_at - j, HIDDEN)
                    if soft_cap < math.inf:
                        cap_scores(scores, place, count, np.float32(scale), np.float32(soft_cap))
                if before >= 0:
                    sums = mixed0 + before * columns * TILE
                    _weigh(
                        scores, place_before, factor, highest, before * ROWS, total, shrink, weights, weights0,
                        mixed, sums, columns
                    )  # fmt: skip
                    own_values = values0 + before // blocks * 2 * columns * TILE
                    _mix(weights, weights0, values, own_values, mixed, sums, columns)
            first = last
        for own in range(num_heads):
            r = 0
            for token in tokens:
                for h in range((head + own) * group, (head + own + 1) * group):
                    stack, row = own * blocks + r // ROWS, r % ROWS
                    if row == 0:
                        store16(shrink, 0, sum_of_rows(total, stack * TILE, LANES, 1))
                    top = highest[stack * ROWS + row]
                    sum_of_row = shrink[row]
                    if is_partial:
                        partial_lse[token, h] = top * LN_2 + np.log(sum_of_row)
                    elif sinks.shape[0]:
                        sum_of_row += exp_f32(sinks[h] - top * LN_2)
                    inverse = splat(np.float32(1.0) / sum_of_row)
                    for c in range(columns):
                        place = mixed0 + (stack * columns + c) * TILE + row * LANES
                        value = multiply_add(load16(mixed, place), inverse, zeros())
                        if is_partial:
                            store16(flat, (np.int64(token) * heads + h) * head_dim + c * LANES, value)
                        else:
                            target = token * (out.strides[0] // 2) + h * (out.strides[1] // 2) + c * LANES
                            store_bfloat16(out, target, value)
                    r += 1
    release()


@jit()
def _lay_out(
    k: Array, v: Array, pages: Int32s, first: int, last: int, page_size: int, width: int, offset: int, num_heads: int,
    slices: int, at: Int64s, keys: Float32s, keys0: int, values: Float32s, values0: int,
) -> None:  # fmt: skip
    """Keys `first` to `last` of some heads, and their values; zeros, which spoil no product, for the rest of the block.

    What lies side by side in a page is read so: memory answers twice as fast as when the pages are gone through for
    each head.
    """
    runs = (last - first + RUN - 1) // RUN
    for run in range(runs):
        key = first + run * RUN
        at[run] = (np.int64(pages[key // page_size]) * page_size + key % page_size) * width + offset
        for own in range(num_heads):
            for s in range(slices):
                place = keys0 + ((own * 4 + run) * slices + s) * TILE
                transpose16(k, element_at(at, run) + (own * slices + s) * SLICE, width, keys, place)
    for half in range(2):
        low, high = element_at(at, 2 * half), element_at(at, 2 * half + 1)
        key = first + half * 2 * RUN
        for row in range(RUN):
            for own in range(num_heads):
                for s in range(slices):
                    column = row * width + (own * slices + s) * SLICE
                    a = load16(v, low + column) if key + row < last else zeros()
                    b = load16(v, high + column) if key + RUN + row < last else zeros()
                    place = values0 + ((own * 2 + half) * slices + s) * 2 * TILE + row * LANES
                    store_between(values, place, TILE, a, b)


@jit()
def ask_for_block(
    k: Array, v: Array, pages: Int32s, first: int, last: int, page_size: int, width: int, offset: int, columns: int
) -> None:
    """Keys `first` to `last` and their values, so that they come while those before them are multiplied."""
    for run in range(first, last, RUN):
        at = (int(np.int64(pages[run // page_size])) * page_size + run % page_size) * width + offset
        for row in range(min(RUN, last - run)):
            for column in range(0, columns, SLICE):
                prefetch(k, at + row * width + column)
                prefetch(v, at + row * width + column)


@jit()
def _score(
    asked: Float32s, place: int, keys: Float32s, keys0: int, slices: int, scores: Float32s, scores0: int
) -> None:
    """scores [sixteen queries, BLOCK]."""
    clear(0)
    clear(1)
    clear(2)
    clear(3)
    for s in range(slices):
        load_tile(4, asked, place + s * TILE, LINE)
        load_tile(5, keys, keys0 + s * TILE, LINE)
        multiply(0, 4, 5)
        load_tile(6, keys, keys0 + (slices + s) * TILE, LINE)
        multiply(1, 4, 6)
        load_tile(5, keys, keys0 + (2 * slices + s) * TILE, LINE)
        multiply(2, 4, 5)
        load_tile(6, keys, keys0 + (3 * slices + s) * TILE, LINE)
        multiply(3, 4, 6)
    store_tile(0, scores, scores0, BLOCK * 4)
    store_tile(1, scores, scores0 + RUN, BLOCK * 4)
    store_tile(2, scores, scores0 + 2 * RUN, BLOCK * 4)
    store_tile(3, scores, scores0 + 3 * RUN, BLOCK * 4)


@jit()
def cap_scores(scores: Float32s, scores0: int, count: int, scale: np.float32, cap: np.float32) -> None:
    for j in range(scores0, scores0 + count * BLOCK):  # tanh(x) = 1 - 2 / (e^2x + 1)
        if scores[j] > LEAST:
            power = exp_f32(np.float32(2.0) * scores[j] * scale / cap)
            scores[j] = (cap - np.float32(2.0) * cap / (power + np.float32(1.0))) / scale


@jit()
def _weigh(
    scores: Float32s, scores0: int, factor: np.float32, highest: Float32s, rows: int, total: Float32s,
    shrink: Float32s, weights: Float32s, weights0: int, mixed: Float32s, mixed0: int, columns: int,
) -> None:  # fmt: skip
    """The block's weights, seen from the highest score so far; what was summed before is rescaled to that."""
    by = splat(factor)
    before = load16(highest, rows)
    top = larger(before, multiply_add(largest_of_rows(scores, scores0, BLOCK, 4), by, zeros()))
    minus_one = splat(np.float32(-1.0))
    store16(shrink, 0, exp2_16(multiply_add(top, minus_one, before)))
    store16(highest, rows, top)
    for r in range(ROWS):
        if shrink[r] != np.float32(1.0):
            less = splat_at(shrink, r)
            place = (rows + r) * LANES
            store16(total, place, multiply_add(load16(total, place), less, zeros()))
            for c in range(columns):
                place = mixed0 + c * TILE + r * LANES
                store16(mixed, place, multiply_add(load16(mixed, place), less, zeros()))
    one = splat(np.float32(1.0))
    for r in range(ROWS):
        minus_top = splat(-highest[rows + r])
        row = scores0 + r * BLOCK
        first = exp2_16(multiply_add(load16(scores, row), by, minus_top))
        second = exp2_16(multiply_add(load16(scores, row + RUN), by, minus_top))
        third = exp2_16(multiply_add(load16(scores, row + 2 * RUN), by, minus_top))
        fourth = exp2_16(multiply_add(load16(scores, row + 3 * RUN), by, minus_top))
        store_pairs(weights, weights0 + r * LANES, first, second)
        store_pairs(weights, weights0 + TILE + r * LANES, third, fourth)
        sums = multiply_add(first, one, load16(total, (rows + r) * LANES))
        sums = multiply_add(fourth, one, multiply_add(third, one, multiply_add(second, one, sums)))
        store16(total, (rows + r) * LANES, sums)


@jit()
def _mix(
    weights: Float32s, weights0: int, values: Float32s, values0: int, mixed: Float32s, place: int, columns: int
) -> None:
    """mixed += weights x values, four tiles of columns at a time."""
    load_tile(4, weights, weights0, LINE)
    load_tile(5, weights, weights0 + TILE, LINE)
    for c in range(0, columns, 4):
        load_tile(0, mixed, place + c * TILE, LINE)
        load_tile(1, mixed, place + (c + 1) * TILE, LINE)
        load_tile(2, mixed, place + (c + 2) * TILE, LINE)
        load_tile(3, mixed, place + (c + 3) * TILE, LINE)
        load_tile(6, values, values0 + c * TILE, LINE)
        multiply(0, 4, 6)
        load_tile(7, values, values0 + (c + 1) * TILE, LINE)
        multiply(1, 4, 7)
        load_tile(6, values, values0 + (c + 2) * TILE, LINE)
        multiply(2, 4, 6)
        load_tile(7, values, values0 + (c + 3) * TILE, LINE)
        multiply(3, 4, 7)
        load_tile(6, values, values0 + (columns + c) * TILE, LINE)
        multiply(0, 5, 6)
        load_tile(7, values, values0 + (columns + c + 1) * TILE, LINE)
        multiply(1, 5, 7)
        load_tile(6, values, values0 + (columns + c + 2) * TILE, LINE)
        multiply(2, 5, 6)
        load_tile(7, values, values0 + (columns + c + 3) * TILE, LINE)
        multiply(3, 5, 7)
        store_tile(0, mixed, place + c * TILE, LINE)
        store_tile(1, mixed, place + (c + 1) * TILE, LINE)
        store_tile(2, mixed, place + (c + 2) * TILE, LINE)
        store_tile(3, mixed, place + (c + 3) * TILE, LINE)
