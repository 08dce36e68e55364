"""A stack of queries (tile_attention.py) by the matrix unit (tiles.py), with sixteen queries in the lanes.

Everything is turned, so that a key's scores lie side by side:

    scores = keys queries^T            tiles of sixteen keys and sixteen queries
    weights = 2^(scores - top)         by vectors; scores are in units of ln 2
    mixed = mixed + values^T weights   tiles of sixteen columns and sixteen queries

Then nothing is added up, compared or told across lanes; keys go to the unit as they lie, and weights as they come. Only
values are turned, once for all queries.

The unit works beside the vectors where neither waits for the other, and instructions are in flight only within a few
hundred: so while STEP keys are weighed, in between, those after them are scored and those before them mixed. Powers of
two are good to 9e-5, where bfloat16 keeps 4e-3. Fewer instructions for them, by a table, take as long.

A query's `top` is the highest score of one step before, and rises only where a step's weights, seen from it, sum to
more than MOST: so the highest need seldom be looked for, and seldom is anything rescaled. Steps begin at multiples of
STEP and no query's sums see another query, so a result depends on nothing but the query and its keys.

One core of a Xeon with AMX, 26 November 2026, alone, us for stack_by_tiles.py and this: 148 tokens of niwaki-tiny
behind 4,000 keys 1,494 and 961, 15 of them 292 and 223; docs/tree-attention.md has more.
"""

from __future__ import annotations

import math

import numpy as np

from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import exp_f32
from niwaki.kernels.operand import Array
from niwaki.kernels.pair_attention import LEAST
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int32s
from niwaki.kernels.simd import (
    LANES,
    Vector,
    add,
    apart,
    between,
    exp2_16,
    is_any_less,
    larger,
    minus,
    splat,
    times,
    where_less,
    zeros,
)
from niwaki.kernels.simd_memory import element_at, load16, prefetch, store16, store_pair, transpose16
from niwaki.kernels.simd_stores import turn_pairs, weigh_two
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

STEP = 2 * RUN  # keys that are weighed together: a weight of each run in a word
# Keys that all queries go over before the next: with their values a third of the nearest cache, or more. Where queries
# and keys are many, their sums come from the second cache, and more keys have them come less often: 148 tokens behind
# 4,000 keys take 0.93 (niwaki-tiny) and 0.92 (L60) of the time, but 15 tokens 1.11 and 1.06 (medians of five runs in
# turn, alone, 27 November 2026), and W7 1.02, whose prefixes have 384 keys: nobody asks for the first group ahead.
GROUP, LARGE_GROUP = 128, 512
MANY_BLOCKS, MANY_KEYS = 8, 2048
ASKED = 8  # keys that are asked for together, at least
UNIT = 8  # numbers
MOST = np.float32(256.0)  # that the weights of a step may sum to
KEPT = 4  # tiles of columns: so many stay in the unit while a query goes over a group


@jit()
def attend_in_lanes(
    q: Array, k_pool: Array, v_pool: Array, pages: Int32s, tokens: Int32s, ends: Int32s, first_key: int,
    partial_mixed: Float32s, partial_lse: Float32s, sinks: Array, out: Array, is_partial: bool, scale: float,
    window: int, chunk: int, soft_cap: float, shape: Bytes, first_head: int, last_head: int,
) -> None:  # fmt: skip
    """As `attend_by_tiles`."""
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    heads = q.shape[1]
    group = heads // kv_heads
    slices = head_dim // SLICE
    columns = head_dim // LANES
    width = kv_heads * head_dim
    factor = np.float32(scale) * LOG2_E
    by = splat(factor)
    queries = tokens.shape[0] * group
    blocks = (queries + ROWS - 1) // ROWS  # of queries
    are_many = blocks >= MANY_BLOCKS and pages.shape[0] * page_size >= MANY_KEYS
    together = LARGE_GROUP if are_many else GROUP
    steps = together // STEP
    k, v = k_pool.reshape(-1), v_pool.reshape(-1)
    flat, lses = partial_mixed.reshape(-1), partial_lse.reshape(-1)
    at_once = min(last_head - first_head, max(1, STATE // (blocks * (slices + columns) * TILE)))
    stacks = at_once * blocks
    # Of each block of queries: themselves, [slices] tiles of pairs of columns by queries, and their sums, [slices, even
    # or odd] tiles of columns by queries.
    asked = np.empty(stacks * slices * TILE + LANES, np.float32)
    mixed = np.empty(stacks * columns * TILE + LANES, np.float32)
    total = np.empty(stacks * LANES, np.float32)
    highest = np.empty(stacks * LANES, np.float32)
    low = np.zeros(blocks * LANES, np.float32)  # the first key that each query sees
    high = np.zeros(blocks * LANES, np.float32)  # behind the last
    # Of a head's group of keys: [steps, runs, slices] tiles of them by pairs of columns, and [steps, slices, even or
    # odd] of columns by pairs of keys.
    keys = np.empty(at_once * steps * 2 * slices * TILE + LANES, np.float32)
    values = np.empty(at_once * steps * columns * TILE + LANES, np.float32)
    scores = np.empty(2 * STEP * LANES + LANES, np.float32)  # [two steps, keys, queries]
    weights = np.zeros(2 * TILE + LANES, np.float32)  # [two steps, keys of a run, queries]
    room = np.empty(columns * TILE + LANES, np.float32)
    asked0, mixed0, keys0, values0 = aligned(asked), aligned(mixed), aligned(keys), aligned(values)
    scores0, weights0, room0 = aligned(scores), aligned(weights), aligned(room)
    reach = np.empty((blocks, 4), np.int64)  # of a block of queries: the lowest and highest of `low`, and of `high`
    # Of each query, for the first of the group's heads in q, among all [tokens, heads], and in out.
    source, line_of, target_of = np.empty(queries, np.int64), np.empty(queries, np.int64), np.empty(queries, np.int64)
    to_head, to_out = q.strides[1] // 2, out.strides[1] // 2
    # What a group of keys has to do: stacks one behind the other, and of each the steps that it sees. Of every such
    # unit: its block of queries, its first key, and where its queries, keys, values, sums and tops begin.
    units = np.empty(stacks * steps * UNIT, np.int64)
    r = 0
    for i in range(tokens.shape[0]):  # counted up, not divided: a division takes as long as what is done to a query
        token, behind = np.int64(tokens[i]), np.int64(ends[i])
        before = max(behind - window, (behind - 1) // chunk * chunk, first_key)
        for h in range(group):
            block = r // ROWS
            source[r], line_of[r] = token * (q.strides[0] // 2) + h * to_head, token * heads + h
            target_of[r] = token * (out.strides[0] // 2) + h * to_out
            low[r], high[r] = before, behind
            if r % ROWS == 0:
                reach[block, 0], reach[block, 1], reach[block, 2], reach[block, 3] = before, before, behind, behind
            reach[block, 0], reach[block, 1] = min(reach[block, 0], before), max(reach[block, 1], before)
            reach[block, 2], reach[block, 3] = min(reach[block, 2], behind), max(reach[block, 3], behind)
            r += 1
    start, end = reach[0, 0], reach[0, 3]
    for block in range(1, blocks):
        start, end = min(start, reach[block, 0]), max(end, reach[block, 3])
    configure(shape)
    for head in range(first_head, last_head, at_once):
        num_heads = min(at_once, last_head - head)
        for stack in range(num_heads * blocks):
            rows, first_own = stack % blocks * ROWS, (head + stack // blocks) * group
            count = min(ROWS, queries - rows)
            for r in range(count, ROWS):
                for s in range(slices):
                    store16(room, room0 + s * TILE + r * LANES, zeros())
            for r in range(count):
                place = element_at(source, rows + r) + first_own * to_head
                for s in range(slices):
                    store16(room, room0 + s * TILE + r * LANES, load16(q, place + s * SLICE))
            for s in range(slices):
                transpose16(room, room0 + s * TILE, LANES, asked, asked0 + (stack * slices + s) * TILE)
            # Weights that sum to e^lse, seen from e^lse, sum to 1.
            store16(total, stack * LANES, splat(np.float32(1.0 if first_key > 0 else 0.0)))
            store16(highest, stack * LANES, splat(LEAST))
            if first_key > 0:
                for r in range(count):
                    line = element_at(line_of, rows + r) + first_own
                    highest[stack * LANES + r] = lses[line] * LOG2_E
                    for c in range(0, columns, 2):
                        place = line * head_dim + c * LANES
                        even, odd = apart(load16(flat, place), load16(flat, place + LANES))
                        store16(room, room0 + c * TILE + r * LANES, even)
                        store16(room, room0 + (c + 1) * TILE + r * LANES, odd)
                for c in range(columns):
                    transpose16(room, room0 + c * TILE, LANES, mixed, mixed0 + (stack * columns + c) * TILE)
            else:
                for i in range(columns * ROWS):
                    store16(mixed, mixed0 + stack * columns * TILE + i * LANES, zeros())
        base = start // RUN * RUN // STEP * STEP
        while base < end:
            last = min((base // together + 1) * together, end)
            count = 0
            for own in range(num_heads):
                for block in range(blocks):
                    stack, seen_to = own * blocks + block, min(reach[block, 3], last)
                    for step in range(max(0, reach[block, 0] - base) // STEP, (seen_to - base + STEP - 1) // STEP):
                        unit, place = count * UNIT, own * steps + step
                        units[unit], units[unit + 1] = block, base + step * STEP
                        units[unit + 2] = asked0 + stack * slices * TILE
                        units[unit + 3] = keys0 + place * 2 * slices * TILE
                        units[unit + 4] = values0 + place * columns * TILE
                        units[unit + 5], units[unit + 6] = mixed0 + stack * columns * TILE, stack * LANES
                        count += 1
            if count == 0:
                base = last
                continue
            _lay_out(
                k, v, pages, base, last, first_key, page_size, width, head * head_dim, num_heads, slices, steps,
                keys, keys0, values, values0, room, room0
            )  # fmt: skip
            already, left = 0, min(together, end - last)  # of the keys of the next group
            values_before, mixed_before = element_at(units, 4), element_at(units, 5)
            clear(4)
            clear(5)
            _score(asked, element_at(units, 2), keys, element_at(units, 3), 0, slices)
            store_tile(4, scores, scores0, LINE)
            store_tile(5, scores, scores0 + TILE, LINE)
            for r in range(ROWS):  # before the first there is nothing to mix
                store16(weights, weights0 + TILE + r * LANES, zeros())
            if columns == KEPT:
                _load_sums(mixed, mixed_before)
            for number in range(count):
                unit, following = number * UNIT, min(number + 1, count - 1) * UNIT
                block, key = element_at(units, unit), element_at(units, unit + 1)
                values_now, mixed_now = element_at(units, unit + 4), element_at(units, unit + 5)
                line = element_at(units, unit + 6)
                ask_to = left if number + 1 == count else left * (number + 1) // count // ASKED * ASKED
                if ask_to > already:
                    _ask_for(
                        k, v, pages, last - first_key + already, last - first_key + ask_to, page_size, width,
                        head * head_dim, num_heads * head_dim
                    )  # fmt: skip
                    already = ask_to
                these, others = number % 2 * TILE, (1 - number % 2) * TILE
                now = scores0 + 2 * these
                if soft_cap < math.inf:
                    cap_scores(scores, now, STEP * LANES // BLOCK, np.float32(scale), np.float32(soft_cap))
                if reach[block, 1] > key or min(reach[block, 2], last) < key + STEP:
                    _hide(scores, now, key, low, high, block * LANES)
                if columns != KEPT:
                    _load_sums(mixed, mixed_before)
                top = load16(highest, line)
                less = minus(zeros(), top)
                sums = _go_on(
                    asked, element_at(units, following + 2), keys, element_at(units, following + 3), slices,
                    scores, now, scores0 + 2 * others, by, less, weights, weights0 + these, weights0 + others, values,
                    values_before
                )  # fmt: skip
                if columns != KEPT:
                    _store_sums(mixed, mixed_before)
                    for c in range(KEPT, columns, KEPT):
                        _load_sums(mixed, mixed_before + c * TILE)
                        _mix(weights, weights0 + others, values, values_before + c * TILE)
                        _store_sums(mixed, mixed_before + c * TILE)
                if mixed_now != mixed_before and columns == KEPT:
                    _store_sums(mixed, mixed_before)
                    _load_sums(mixed, mixed_now)
                if is_any_less(splat(MOST), sums):
                    if columns == KEPT:
                        _store_sums(mixed, mixed_now)
                    sums = _rise(
                        scores, now, by, top, sums, highest, line, total, weights, weights0 + these, mixed,
                        mixed_now, columns * ROWS
                    )  # fmt: skip
                    if columns == KEPT:
                        _load_sums(mixed, mixed_now)
                store16(total, line, add(load16(total, line), sums))
                values_before, mixed_before = values_now, mixed_now
            others = (1 - count % 2) * TILE
            if columns == KEPT:
                _mix(weights, weights0 + others, values, values_before)
                _store_sums(mixed, mixed_before)
            else:
                for c in range(0, columns, KEPT):
                    _load_sums(mixed, mixed_before + c * TILE)
                    _mix(weights, weights0 + others, values, values_before + c * TILE)
                    _store_sums(mixed, mixed_before + c * TILE)
            base = last
        for stack in range(num_heads * blocks):
            rows, first_own = stack % blocks * ROWS, (head + stack // blocks) * group
            for c in range(columns):
                transpose16(mixed, mixed0 + (stack * columns + c) * TILE, LANES, room, room0 + c * TILE)
            for r in range(min(ROWS, queries - rows)):
                line = element_at(line_of, rows + r) + first_own
                top_of_row, sum_of_row = highest[stack * LANES + r], total[stack * LANES + r]
                if is_partial:
                    lses[line] = top_of_row * LN_2 + np.log(sum_of_row)
                elif sinks.shape[0]:
                    sum_of_row += exp_f32(sinks[first_own + (rows + r) % group] - top_of_row * LN_2)
                inverse = splat(np.float32(1.0) / sum_of_row)
                target = element_at(target_of, rows + r) + first_own * to_out
                for c in range(0, columns, 2):
                    even = times(load16(room, room0 + c * TILE + r * LANES), inverse)
                    odd = times(load16(room, room0 + (c + 1) * TILE + r * LANES), inverse)
                    if is_partial:
                        lower, upper = between(even, odd)
                        store16(flat, line * head_dim + c * LANES, lower)
                        store16(flat, line * head_dim + (c + 1) * LANES, upper)
                    else:
                        store_pair(out, target + c * LANES, even, odd)
    release()


@jit()
def _lay_out(
    k: Array, v: Array, pages: Int32s, base: int, last: int, first_key: int, page_size: int, width: int, offset: int,
    num_heads: int, slices: int, steps: int, keys: Float32s, keys0: int, values: Float32s, values0: int,
    room: Float32s, room0: int,
) -> None:  # fmt: skip
    """Keys `base` to `last` of some heads, and their values. What of the steps lies outside, or before `first_key`, is
    zeros, which spoil no product.

    What lies side by side in a page is read so: memory answers twice as fast as when the pages are gone through for
    each head.
    """
    at = np.empty(2, np.int64)
    for step in range((last - base + STEP - 1) // STEP):
        is_whole = True
        for run in range(2):
            key = base + step * STEP + run * RUN
            there = max(0, min(RUN, last - key)) if key >= first_key else 0
            is_whole = is_whole and there == RUN
            at[run] = 0
            if there:
                place = key - first_key
                at[run] = (np.int64(pages[place // page_size]) * page_size + place % page_size) * width + offset
            for own in range(num_heads):
                tiles = keys0 + ((own * steps + step) * 2 + run) * slices * TILE
                for r in range(there):
                    row = element_at(at, run) + r * width + own * slices * SLICE
                    for s in range(slices):
                        store16(keys, tiles + s * TILE + r * LANES, load16(k, row + s * SLICE))
                for r in range(there, RUN):
                    for s in range(slices):
                        store16(keys, tiles + s * TILE + r * LANES, zeros())
        one, two = element_at(at, 0), element_at(at, 1)
        for column in range(num_heads * slices):
            own, s = column // slices, column % slices
            target = values0 + ((own * steps + step) * slices + s) * 2 * TILE
            if is_whole:
                turn_pairs(v, one + column * SLICE, width, two + column * SLICE, values, target)
                continue
            for run in range(2):
                key = base + step * STEP + run * RUN
                there = max(0, min(RUN, last - key)) if key >= first_key else 0
                for r in range(RUN):
                    row = element_at(at, run) + r * width + column * SLICE
                    store16(room, room0 + (run * RUN + r) * LANES, load16(v, row) if r < there else zeros())
            turn_pairs(room, room0, LANES, room0 + TILE, values, target)


@jit()
def _ask_for(
    k: Array, v: Array, pages: Int32s, first: int, last: int, page_size: int, width: int, offset: int, columns: int
) -> None:
    """Keys `first` to `last` and their values, so that they come while those before them are multiplied: some with
    each unit, since a core waits for at most sixteen lines at a time, and at the seventeenth does nothing else."""
    for key in range(first, last):
        at = (int(np.int64(pages[key // page_size])) * page_size + key % page_size) * width + offset
        for column in range(0, columns, SLICE):
            prefetch(k, at + column)
            prefetch(v, at + column)


@jit(inline=True)
def _go_on(
    asked: Float32s, next_asked: int, keys: Float32s, next_keys: int, slices: int, scores: Float32s, now: int,
    following: int, by: Vector, less: Vector, weights: Float32s, these: int, before: int, values: Float32s,
    values_before: int,
) -> Vector:  # fmt: skip
    """Weights of the scores from `now` on, and in between the scores of the keys that follow, and the weights before
    times their values. Gives the sum of each query's weights."""
    clear(4)
    clear(5)
    _score(asked, next_asked, keys, next_keys, 2, slices)
    sums, more = zeros(), zeros()
    load_tile(7, asked, next_asked, LINE)
    load_tile(6, keys, next_keys, LINE)
    multiply(4, 6, 7)
    sums = weigh_two(scores, now, by, less, weights, these, sums)
    more = weigh_two(scores, now + LANES, by, less, weights, these + LANES, more)
    load_tile(6, keys, next_keys + slices * TILE, LINE)
    multiply(5, 6, 7)
    sums = weigh_two(scores, now + 2 * LANES, by, less, weights, these + 2 * LANES, sums)
    more = weigh_two(scores, now + 3 * LANES, by, less, weights, these + 3 * LANES, more)
    load_tile(7, asked, next_asked + TILE, LINE)
    load_tile(6, keys, next_keys + TILE, LINE)
    multiply(4, 6, 7)
    sums = weigh_two(scores, now + 4 * LANES, by, less, weights, these + 4 * LANES, sums)
    more = weigh_two(scores, now + 5 * LANES, by, less, weights, these + 5 * LANES, more)
    load_tile(6, keys, next_keys + (slices + 1) * TILE, LINE)
    multiply(5, 6, 7)
    sums = weigh_two(scores, now + 6 * LANES, by, less, weights, these + 6 * LANES, sums)
    more = weigh_two(scores, now + 7 * LANES, by, less, weights, these + 7 * LANES, more)
    load_tile(7, weights, before, LINE)
    load_tile(6, values, values_before, LINE)
    multiply(0, 6, 7)
    sums = weigh_two(scores, now + 8 * LANES, by, less, weights, these + 8 * LANES, sums)
    more = weigh_two(scores, now + 9 * LANES, by, less, weights, these + 9 * LANES, more)
    load_tile(6, values, values_before + TILE, LINE)
    multiply(1, 6, 7)
    sums = weigh_two(scores, now + 10 * LANES, by, less, weights, these + 10 * LANES, sums)
    more = weigh_two(scores, now + 11 * LANES, by, less, weights, these + 11 * LANES, more)
    load_tile(6, values, values_before + 2 * TILE, LINE)
    multiply(2, 6, 7)
    sums = weigh_two(scores, now + 12 * LANES, by, less, weights, these + 12 * LANES, sums)
    more = weigh_two(scores, now + 13 * LANES, by, less, weights, these + 13 * LANES, more)
    load_tile(6, values, values_before + 3 * TILE, LINE)
    multiply(3, 6, 7)
    sums = weigh_two(scores, now + 14 * LANES, by, less, weights, these + 14 * LANES, sums)
    more = weigh_two(scores, now + 15 * LANES, by, less, weights, these + 15 * LANES, more)
    store_tile(4, scores, following, LINE)
    store_tile(5, scores, following + TILE, LINE)
    return add(sums, more)


@jit(inline=True)
def _score(asked: Float32s, asked0: int, keys: Float32s, keys0: int, first: int, slices: int) -> None:
    """To tiles 4 and 5, the scores of a run each, from slice `first` on."""
    for s in range(first, slices):
        load_tile(7, asked, asked0 + s * TILE, LINE)
        load_tile(6, keys, keys0 + s * TILE, LINE)
        multiply(4, 6, 7)
        load_tile(6, keys, keys0 + (slices + s) * TILE, LINE)
        multiply(5, 6, 7)


@jit(inline=True)
def _mix(weights: Float32s, weights0: int, values: Float32s, values0: int) -> None:
    """Tiles 0 to 3 += values x weights."""
    load_tile(7, weights, weights0, LINE)
    load_tile(6, values, values0, LINE)
    multiply(0, 6, 7)
    load_tile(6, values, values0 + TILE, LINE)
    multiply(1, 6, 7)
    load_tile(6, values, values0 + 2 * TILE, LINE)
    multiply(2, 6, 7)
    load_tile(6, values, values0 + 3 * TILE, LINE)
    multiply(3, 6, 7)


@jit(inline=True)
def _load_sums(mixed: Float32s, place: int) -> None:
    load_tile(0, mixed, place, LINE)
    load_tile(1, mixed, place + TILE, LINE)
    load_tile(2, mixed, place + 2 * TILE, LINE)
    load_tile(3, mixed, place + 3 * TILE, LINE)


@jit(inline=True)
def _store_sums(mixed: Float32s, place: int) -> None:
    store_tile(0, mixed, place, LINE)
    store_tile(1, mixed, place + TILE, LINE)
    store_tile(2, mixed, place + 2 * TILE, LINE)
    store_tile(3, mixed, place + 3 * TILE, LINE)


@jit()
def _hide(scores: Float32s, scores0: int, key: int, low: Float32s, high: Float32s, rows: int) -> None:
    """HIDDEN for whom a key of the step lies outside of what it sees."""
    hidden, first, end = splat(HIDDEN), load16(low, rows), load16(high, rows)
    for i in range(STEP):
        place, at = scores0 + i * LANES, splat(np.float32(key + i))
        seen = where_less(at, end, load16(scores, place), hidden)
        store16(scores, place, where_less(at, first, hidden, seen))


@jit()
def _rise(
    scores: Float32s, now: int, by: Vector, top: Vector, sums: Vector, highest: Float32s, line: int, total: Float32s,
    weights: Float32s, these: int, mixed: Float32s, mixed0: int, lines: int,
) -> Vector:  # fmt: skip
    """The step's weights anew, seen from its highest score by those queries whose weights sum to more than MOST; what
    was summed before is rescaled to that. Gives the sums of the weights."""
    largest = load16(scores, now)
    for i in range(1, STEP):
        largest = larger(largest, load16(scores, now + i * LANES))
    risen = where_less(splat(MOST), sums, times(largest, by), top)
    shrink = exp2_16(minus(top, risen))
    store16(highest, line, risen)
    store16(total, line, times(load16(total, line), shrink))
    for i in range(lines):
        store16(mixed, mixed0 + i * LANES, times(load16(mixed, mixed0 + i * LANES), shrink))
    sums, less = zeros(), minus(zeros(), risen)
    for i in range(RUN):
        sums = weigh_two(scores, now + i * LANES, by, less, weights, these + i * LANES, sums)
    return sums
