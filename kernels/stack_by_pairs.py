"""A stack of queries (tile_attention.py) in the instruction of AVX512-BF16, by the loops of pair_products.py.

Queries lie in the lanes, two groups of sixteen at a time, so that nothing is added or compared across a vector, and
one word of a key serves both groups. Eight queries or fewer that are left take half of the lanes, by themselves:

    scores [keys, queries] = keys queries^T           the keys' words from where they lie in their pages
    weights = 2^(scores - top)                        top [queries], in units of ln 2
    mixed [columns, queries] = mixed + values^T weights

Of eight queries or fewer a vector holds the scores of two keys, and what is mixed is [queries, columns], with columns
in the lanes (few_queries.py): bit for bit the same sums.

A query's `top` is the highest score of a block before, and rises where a block's weights, seen from it, sum to more
than MOST; then what was summed before is rescaled (as in stack_in_lanes.py, of which are the powers of two, too, good
to 9e-5). Only the values of a block are laid out anew, those of two keys into each other. Blocks and what hidden keys
weigh are those of stack_by_tiles.py.

The block after is asked for into the second cache by the loops that multiply values, a line with each word: as many at
once as a block has, some 256, hold the core up, for it waits for no more than two dozen. Scoring asks for the next
eight keys into the first.

One core of an EPYC (Zen 4), 28 November 2026, seconds of the thread beside other work, medians of 21 in turn with the
version before, which asked for a block at once, looked for the highest score of each and took powers to 4e-6: behind
4,000 keys out of memory 15 tokens take 0.91 (niwaki-tiny), 0.80 (L15), 0.87 (L60) and 0.83 (L3000) of the time, 148
tokens 0.96, 0.94, 0.95 and 0.99. Of the time of 15 tokens of niwaki-tiny, keys near, products take 0.78 (their limit is
0.73), weights took 0.14, laying values out 0.04 and asking 0.03.

Half of the lanes for the scores of a rest, the same in turn with all of them, keys near and out of memory (medians of
11; niwaki-tiny, two queries a token): 4 tokens take 0.74 and 0.85 of the time, 10 tokens 0.84 and 0.83, 17 tokens 0.89
and 0.91, 20 tokens 0.89 and 0.88, 33 tokens 0.94 and 0.92. Two keys in a vector and columns in the lanes, in turn with
half of the lanes for all of it (medians of 21 and 25): 3 tokens take 0.82 to 0.88, 4 tokens 0.89 to 0.95, 10 tokens
0.90 and 0.84, 17 tokens 0.90 to 0.92 and 0.91 to 0.93, 20 tokens 0.96 to 1.01, 33 tokens 0.94 to 0.95.
"""

from __future__ import annotations

import math

import numpy as np

from niwaki.kernels.few_queries import AT_ONCE, COLUMNS, REST, add_to_few, store_rest, two_keys
from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import exp_f32
from niwaki.kernels.operand import Array
from niwaki.kernels.pair_attention import LEAST
from niwaki.kernels.pair_products import (
    OUTPUTS,
    add_to_tall,
    add_to_two,
    sum_of_half,
    sum_of_tall,
    sum_of_two,
)
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.simd import (
    LANES,
    Vector,
    add,
    exp2_16,
    exp2_roughly,
    is_any_less,
    larger,
    minus,
    multiply_add,
    splat,
    swapped,
    times,
    where_less,
    zeros,
)
from niwaki.kernels.simd_memory import (
    element_at,
    load16,
    splat_at,
    store16,
    store_between,
    store_bfloat16,
    store_pairs,
    transpose16,
)
from niwaki.kernels.stack_by_tiles import (
    BLOCK,
    HIDDEN,
    LN_2,
    LOG2_E,
    RUN,
    SLICE,
    STATE,
    TILE,
    cap_scores,
)
from niwaki.kernels.tiles import ROWS, Bytes, aligned

LINE = 4 * LANES  # bytes
PAIRS = BLOCK // 2  # of keys
RUNS = BLOCK // RUN  # of keys
MOST = np.float32(256.0)  # that the weights of a block may sum to
SCORES = BLOCK * LANES  # words of a group's scores


@jit()
def attend_by_pairs(
    q: Array, k_pool: Array, v_pool: Array, pages: Int32s, tokens: Int32s, ends: Int32s, first_key: int,
    partial_mixed: Float32s, partial_lse: Float32s, sinks: Array, out: Array, is_partial: bool, scale: float,
    window: int, chunk: int, soft_cap: float, shape: Bytes, first_head: int, last_head: int,
) -> None:  # fmt: skip
    """As `attend_by_tiles`; `shape` is not needed."""
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    heads = q.shape[1]
    group = heads // kv_heads
    slices = head_dim // SLICE
    width = kv_heads * head_dim
    factor = splat(np.float32(scale) * LOG2_E)
    hidden = splat(HIDDEN)
    queries = tokens.shape[0] * group
    blocks = (queries + ROWS - 1) // ROWS  # of queries
    rest_from = blocks - 1 if 0 < queries % ROWS <= REST else blocks  # a last block that half the lanes hold
    k, v = k_pool.reshape(-1), v_pool.reshape(-1)
    flat, lses = partial_mixed.reshape(-1), partial_lse.reshape(-1)
    at_once = min(last_head - first_head, max(1, STATE // (blocks * ((slices + 1) * TILE + head_dim * LANES))))
    stacks = at_once * blocks
    # Of each block of queries: themselves, [slices] tiles of pairs of columns by queries, and their sums, [columns,
    # queries], but of a rest [queries, columns].
    asked = np.empty(stacks * slices * TILE + LANES, np.float32)
    mixed = np.empty(stacks * head_dim * LANES + LANES, np.float32)
    total = np.empty(stacks * LANES, np.float32)
    highest = np.empty(stacks * LANES, np.float32)
    low = np.zeros(blocks * LANES, np.float32)  # the first key that each query sees
    high = np.zeros(blocks * LANES, np.float32)  # behind the last
    values = np.empty(PAIRS * at_once * head_dim + LANES, np.float32)  # [pairs of keys, heads, columns]
    # [two blocks of queries, keys, queries], and of a rest [keys, REST queries]; then the same by pairs of keys
    scores = np.empty(2 * SCORES + LANES, np.float32)
    weights = np.empty(2 * PAIRS * LANES + LANES, np.float32)
    gathered, turned = np.empty(TILE, np.float32), np.empty(head_dim * LANES, np.float32)
    asked0, mixed0, values0 = aligned(asked), aligned(mixed), aligned(values)
    scores0, weights0 = aligned(scores), aligned(weights)
    # Where the runs of the block of keys begin in the pool, those of the next, and columns of these, which are asked
    # for with a rest alone.
    at = np.zeros(3 * RUNS, np.int64)
    reach = np.empty((blocks, 4), np.int64)  # of a block of queries: the lowest and highest of `low`, and of `high`
    # Of each query, for the first of the group's heads in q, among all [tokens, heads], and in out.
    source, line_of, target_of = np.empty(queries, np.int64), np.empty(queries, np.int64), np.empty(queries, np.int64)
    to_head, to_out = q.strides[1] // 2, out.strides[1] // 2
    for r in range(queries):
        block, token, h = r // ROWS, np.int64(tokens[r // group]), r % group
        source[r], line_of[r] = token * (q.strides[0] // 2) + h * to_head, token * heads + h
        target_of[r] = token * (out.strides[0] // 2) + h * to_out
        behind = np.int64(ends[r // group])
        before = max(behind - window, (behind - 1) // chunk * chunk, first_key)
        low[r], high[r] = before, behind
        if r % ROWS == 0:
            reach[block, 0], reach[block, 1], reach[block, 2], reach[block, 3] = before, before, behind, behind
        reach[block, 0], reach[block, 1] = min(reach[block, 0], before), max(reach[block, 1], before)
        reach[block, 2], reach[block, 3] = min(reach[block, 2], behind), max(reach[block, 3], behind)
    if rest_from < blocks:  # of two keys side by side
        for r in range(rest_from * LANES, rest_from * LANES + REST):
            low[r + REST], high[r + REST] = low[r], high[r]
    start, end = reach[0, 0], reach[0, 3]
    for block in range(1, blocks):
        start, end = min(start, reach[block, 0]), max(end, reach[block, 3])
    for head in range(first_head, last_head, at_once):
        num_heads = min(at_once, last_head - head)
        to_pair = num_heads * head_dim * 4
        for stack in range(num_heads * blocks):
            own, rows = stack // blocks, stack % blocks * ROWS
            count, first_own = min(ROWS, queries - rows), (head + own) * group
            for r in range(ROWS):
                store16(gathered, r * LANES, zeros())
            for s in range(slices):
                for r in range(count):
                    store16(
                        gathered, r * LANES, load16(q, element_at(source, rows + r) + first_own * to_head + s * SLICE)
                    )
                transpose16(gathered, 0, LANES, asked, asked0 + (stack * slices + s) * TILE)
            # Weights that sum to e^lse, seen from e^lse, sum to 1.
            store16(total, stack * LANES, splat(np.float32(1.0 if first_key > 0 else 0.0)))
            store16(highest, stack * LANES, splat(LEAST))
            if first_key > 0:
                for r in range(count):
                    highest[stack * LANES + r] = lses[line_of[rows + r] + first_own] * LOG2_E
                if rows == rest_from * ROWS:
                    for r in range(REST):
                        highest[stack * LANES + REST + r] = highest[stack * LANES + r]
            if rows == rest_from * ROWS:
                for r in range(count):
                    line, target = element_at(line_of, rows + r) + first_own, mixed0 + stack * head_dim * LANES
                    for c in range(0, head_dim, LANES):
                        was = load16(flat, line * head_dim + c) if first_key > 0 else zeros()
                        store16(mixed, target + r * head_dim + c, was)
                continue
            for c in range(0, head_dim, LANES):
                if first_key > 0:
                    for r in range(count):
                        line = element_at(line_of, rows + r) + first_own
                        store16(gathered, r * LANES, load16(flat, line * head_dim + c))
                    transpose16(gathered, 0, LANES, mixed, mixed0 + (stack * head_dim + c) * LANES)
                else:
                    for column in range(c, c + LANES):
                        store16(mixed, mixed0 + (stack * head_dim + column) * LANES, zeros())
        first = int(start // RUN * RUN)
        last = int(min(first // BLOCK * BLOCK + BLOCK, end))
        _place(pages, first - first_key, last - first_key, page_size, width, head * head_dim, at)
        while first < end:
            for run in range(RUNS):
                at[run] = at[RUNS + run]
            end_of_next, is_first = int(min(last + BLOCK, end)), first_key == 0 and first <= start
            _place(pages, last - first_key, end_of_next - first_key, page_size, width, head * head_dim, at)
            _lay_out(v, at, last - first, width, num_heads * slices, values, values0)
            for own in range(num_heads):
                block, sides = 0, 0
                while block + sides < blocks:
                    block += sides
                    sides = min(2, rest_from - block) if block < rest_from else 1
                    is_half = block == rest_from
                    stack = own * blocks + block
                    is_hidden = reach[block, 0] >= last or reach[block, 3] <= first
                    if sides == 2:
                        is_hidden = is_hidden and (reach[block + 1, 0] >= last or reach[block + 1, 3] <= first)
                    if is_hidden:
                        continue
                    laid = asked0 + stack * slices * TILE
                    seen = min(last, max(reach[block, 3], reach[block + sides - 1, 3]))  # by any of both sides
                    halves = (seen - first + 2 * RUN - 1) // (2 * RUN)
                    for i in range(0, halves * 2 * RUN, RUN):
                        target = scores0 + i * (REST if is_half else LANES)
                        if first + i >= seen:
                            for j in range(RUN // 2 if is_half else sides * RUN):
                                store16(scores, target + j // RUN * SCORES + j % RUN * LANES, hidden)
                            continue
                        place = at[i // RUN] + own * head_dim
                        following = at[i // RUN + 1] + own * head_dim
                        if is_half:
                            sum_of_half(
                                scores, target, 0, k, place, width * 2, asked, laid, slices, (following - place) * 2
                            )  # fmt: skip
                            continue
                        if sides == 1:
                            sum_of_tall(
                                scores, target, 0, k, place, width * 2, asked, laid, slices, (following - place) * 2
                            )  # fmt: skip
                            continue
                        for j in range(0, RUN, OUTPUTS):
                            ahead = OUTPUTS * width if j == 0 else following - place - OUTPUTS * width
                            sum_of_two(
                                scores, target + j * LANES, SCORES * 4, k, place + j * width, width * 2, asked, laid,
                                slices, ahead * 2
                            )  # fmt: skip
                    sums, pairs = mixed0 + stack * head_dim * LANES, values0 + own * head_dim
                    if is_half:
                        line = block * LANES
                        if reach[block, 1] > first or reach[block, 2] < first + BLOCK or last < first + BLOCK:
                            lowest, past = load16(low, line), load16(high, line)
                            for j in range(halves * RUN):
                                keys_there = two_keys(np.float32(first + 2 * j))
                                score = where_less(keys_there, past, load16(scores, scores0 + j * LANES), hidden)
                                score = where_less(keys_there, lowest, hidden, score)
                                store16(scores, scores0 + j * LANES, score)
                        if soft_cap < math.inf:
                            cap_scores(scores, scores0, REST, np.float32(scale), np.float32(soft_cap))
                        count = queries - block * ROWS
                        _weigh_rest(
                            scores, scores0, halves, factor, is_first, highest, total, stack * LANES, weights,
                            weights0, mixed, sums, count, head_dim, gathered
                        )  # fmt: skip
                        parts = (count + AT_ONCE - 1) // AT_ONCE
                        for part in range(parts):  # of as many queries each as can be
                            r, behind = count * part // parts, count * (part + 1) // parts
                            gap = width if block == 0 and part == 0 else 0
                            for c in range(0, head_dim, COLUMNS):
                                for run in range(RUNS):
                                    at[2 * RUNS + run] = at[RUNS + run] + own * head_dim + c
                                add_to_few(
                                    mixed, sums + r * head_dim + c, head_dim, values, pairs + c,
                                    num_heads * head_dim, weights, weights0 + r, halves * RUN, behind - r, k, v, at,
                                    2 * RUNS, gap
                                )  # fmt: skip
                        continue
                    for side in range(sides):
                        here, line = scores0 + side * SCORES, (block + side) * LANES
                        reached = reach[block + side]
                        if reached[1] > first or reached[2] < first + BLOCK or last < first + BLOCK:
                            lowest, past = load16(low, line), load16(high, line)
                            all_see = 0 if reached[1] > first else max(min(reached[2], last) - first, 0)
                            for j in range(all_see, halves * 2 * RUN):
                                key_there = splat(np.float32(first + j))
                                score = hidden
                                if first + j < last:
                                    score = where_less(key_there, past, load16(scores, here + j * LANES), hidden)
                                    score = where_less(key_there, lowest, hidden, score)
                                store16(scores, here + j * LANES, score)
                        if soft_cap < math.inf:
                            cap_scores(scores, here, ROWS, np.float32(scale), np.float32(soft_cap))
                        _weigh(
                            scores, here, halves, factor, is_first, highest, total, (stack + side) * LANES, weights,
                            weights0 + side * halves * TILE, mixed, mixed0 + (stack + side) * head_dim * LANES,
                            head_dim
                        )  # fmt: skip
                    step = OUTPUTS * (3 - sides)
                    ask_step = width * 2 if block == 0 else 0
                    for c in range(0, head_dim, step):
                        target, place = sums + c * LANES, pairs + c
                        number = c // step
                        line = own * head_dim + number // RUNS * SLICE * (3 - sides)
                        there = at[RUNS + number % RUNS] + line if block == 0 else at[RUNS]
                        if sides == 2:
                            add_to_two(
                                mixed, target, head_dim * LINE, values, place, to_pair, weights, weights0, halves,
                                k, there, v, there, ask_step
                            )  # fmt: skip
                        else:
                            add_to_tall(
                                mixed, target, 0, values, place, to_pair, weights, weights0, halves, k, there, v,
                                there, ask_step
                            )  # fmt: skip
            first, last = last, end_of_next
        for stack in range(num_heads * blocks):
            own, rows = stack // blocks, stack % blocks * ROWS
            count, first_own = min(ROWS, queries - rows), (head + own) * group
            for r in range(count):
                line = stack * LANES + r
                if is_partial:
                    lses[line_of[rows + r] + first_own] = highest[line] * LN_2 + np.log(total[line])
                elif sinks.shape[0]:
                    total[line] += exp_f32(sinks[first_own + (rows + r) % group] - highest[line] * LN_2)
                total[line] = np.float32(1.0) / total[line]
            by_columns = rows == rest_from * ROWS
            for c in range(0, 0 if by_columns else head_dim, LANES):
                transpose16(mixed, mixed0 + (stack * head_dim + c) * LANES, LANES, turned, c * LANES)
            for r in range(count):
                inverse = splat_at(total, stack * LANES + r)
                line = (element_at(line_of, rows + r) + first_own) * head_dim
                target = element_at(target_of, rows + r) + first_own * to_out
                for c in range(0, head_dim, LANES):
                    value = load16(turned, c * LANES + r * LANES)
                    if by_columns:
                        value = load16(mixed, mixed0 + stack * head_dim * LANES + r * head_dim + c)
                    value = times(value, inverse)
                    if is_partial:
                        store16(flat, line + c, value)
                    else:
                        store_bfloat16(out, target + c, value)


@jit()
def _place(pages: Int32s, first: int, last: int, page_size: int, width: int, offset: int, at: Int64s) -> None:
    """at[RUNS:] = where the runs of keys `first` to `last` begin in the pool."""
    for run in range((last - first + RUN - 1) // RUN):
        key = first + run * RUN
        at[RUNS + run] = (np.int64(pages[key // page_size]) * page_size + key % page_size) * width + offset


@jit()
def _lay_out(v: Array, at: Int64s, count: int, width: int, slices: int, values: Float32s, values0: int) -> None:
    """The values of `count` keys, of so many slices of columns side by side, runs of them from `at` on; zeros, which
    spoil no product, for the rest of the block."""
    for pair in range(PAIRS):
        key = 2 * pair
        place = element_at(at, key // RUN) + key % RUN * width
        for s in range(slices):
            a, b = zeros(), zeros()
            if key < count:
                a = load16(v, place + s * SLICE)
                if key + 1 < count:
                    b = load16(v, place + width + s * SLICE)
            store_between(values, values0 + (pair * slices + s) * SLICE, LANES, a, b)


@jit()
def _weigh(
    scores: Float32s, scores0: int, halves: int, factor: Vector, is_first: bool, highest: Float32s, total: Float32s,
    line: int, weights: Float32s, weights0: int, mixed: Float32s, mixed0: int, columns: int,
) -> None:  # fmt: skip
    """The weights of so many halves of a block, seen from `highest`; `is_first`: nothing was seen before."""
    top = load16(highest, line)
    sums = splat(np.float32(math.inf))
    if not is_first:
        sums = _powers(scores, scores0, halves, factor, minus(zeros(), top), weights, weights0)
    if is_any_less(splat(MOST), sums):
        a, b = splat(LEAST), splat(LEAST)
        for at in range(scores0, scores0 + halves * 2 * TILE, 2 * LANES):
            a, b = larger(a, load16(scores, at)), larger(b, load16(scores, at + LANES))
        risen = where_less(splat(MOST), sums, larger(top, times(larger(a, b), factor)), top)
        shrink = exp2_16(minus(top, risen))
        store16(highest, line, risen)
        store16(total, line, times(load16(total, line), shrink))
        for column in range(0 if is_first else columns):
            place = mixed0 + column * LANES
            store16(mixed, place, times(load16(mixed, place), shrink))
        sums = _powers(scores, scores0, halves, factor, minus(zeros(), risen), weights, weights0)
    store16(total, line, add(load16(total, line), sums))


@jit(inline=True)
def _powers(
    scores: Float32s, scores0: int, halves: int, factor: Vector, less: Vector, weights: Float32s, weights0: int
) -> Vector:  # fmt: skip
    """The weights, and the sum of each query's."""
    even, odd = zeros(), zeros()
    for pair in range(halves * LANES):
        at = scores0 + 2 * pair * LANES
        first = exp2_roughly(multiply_add(load16(scores, at), factor, less))
        second = exp2_roughly(multiply_add(load16(scores, at + LANES), factor, less))
        store_pairs(weights, weights0 + pair * LANES, first, second)
        even, odd = add(even, first), add(odd, second)
    return add(even, odd)


@jit()
def _weigh_rest(
    scores: Float32s, scores0: int, halves: int, factor: Vector, is_first: bool, highest: Float32s, total: Float32s,
    line: int, weights: Float32s, weights0: int, mixed: Float32s, mixed0: int, count: int, columns: int,
    scratch: Float32s,
) -> None:  # fmt: skip
    """As `_weigh`, of at most REST queries, of which a vector holds the scores of two keys, and whose sums lie by
    columns: bit for bit the same."""
    top = load16(highest, line)
    sums = splat(np.float32(math.inf))
    if not is_first:
        sums = _powers_of_rest(scores, scores0, halves, factor, minus(zeros(), top), weights, weights0)
    if is_any_less(splat(MOST), sums):
        both = splat(LEAST)
        for at in range(scores0, scores0 + halves * TILE, LANES):
            both = larger(both, load16(scores, at))
        risen = larger(top, times(larger(both, swapped(both, REST)), factor))
        risen = where_less(splat(MOST), sums, risen, top)
        store16(highest, line, risen)
        shrink = exp2_16(minus(top, risen))
        store16(total, line, times(load16(total, line), shrink))
        if not is_first:
            store16(scratch, 0, shrink)
            for r in range(count):
                by = splat_at(scratch, r)
                for place in range(mixed0 + r * columns, mixed0 + (r + 1) * columns, LANES):
                    store16(mixed, place, times(load16(mixed, place), by))
        sums = _powers_of_rest(scores, scores0, halves, factor, minus(zeros(), risen), weights, weights0)
    store16(total, line, add(load16(total, line), sums))


@jit(inline=True)
def _powers_of_rest(
    scores: Float32s, scores0: int, halves: int, factor: Vector, less: Vector, weights: Float32s, weights0: int
) -> Vector:  # fmt: skip
    """The weights, and twice the sum of each query's: those of even keys and of odd ones are summed apart."""
    apart = zeros()
    for two in range(halves * LANES // 2):  # pairs of keys
        at = scores0 + 2 * two * LANES
        first = exp2_roughly(multiply_add(load16(scores, at), factor, less))
        second = exp2_roughly(multiply_add(load16(scores, at + LANES), factor, less))
        store_rest(weights, weights0 + two * LANES, first, second)
        apart = add(add(apart, first), second)
    return add(apart, swapped(apart, REST))
