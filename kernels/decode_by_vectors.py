"""Single queries over paged keys (paged_decode.py) by vectors.

Within a block two heads of a group are scored against four keys at a time, eight sums of sixteen lanes (simd.py), and
mixed from MIXED keys before their sums go back to memory. A bfloat16 pool is read as uint16 and shifted to float32.
Pages lie anywhere, which the processor cannot foresee: scoring a key asks memory for its value and for a later key, a
few lines at a time, since a core waits for no more than a dozen at once. Where the processor multiplies pairs of
bfloat16, pair_attention.py does both. Inner functions get whole arrays and where to begin in them, for Numba counts the
references to each slice of an array, which takes a part of the time that a block does.
"""

from __future__ import annotations

import math

import numpy as np

from niwaki.kernels.checks import SCALE_BYTES
from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import exp_f32, store
from niwaki.kernels.operand import Array
from niwaki.kernels.pair_attention import HEADS, LEAST, RUN, SCORED, STRIP, mix_pairs, score_pairs, weigh_pairs
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.simd import (
    LANES,
    exp16,
    larger,
    largest_lane,
    multiply_add,
    quarters_apart,
    quarters_between,
    splat,
    sum_of_lanes,
    zeros,
)
from niwaki.kernels.simd_memory import (
    element_at,
    float_at,
    load16,
    load_alike,
    load_pair,
    load_part,
    place_in_pair,
    prefetch,
    splat_at,
    store16,
    store_pair,
    sum_eight,
)
from niwaki.kernels.simd_stores import store_both_bfloat16
from niwaki.kernels.vector_tiles import multiplies_pairs

BLOCK = 64  # keys between two rescalings of the running sum
MIXED = 32  # keys mixed in registers
AHEAD = 16  # keys between the one that is scored and the one that is asked for
IN_PAIRS = multiplies_pairs()  # bfloat16 by pair_attention.py
RUNS = BLOCK // RUN
LINE = 64  # bytes that memory gives at a time


@jit()
def decode_by_vectors(
    q: Array, k_pool: Array, v_pool: Array, page_table: Int32s, token: Int32s, table_row: Int32s, length: Int32s,
    first_key: Int32s, partial_mixed: Array, partial_lse: Array, sinks: Array, out: Array, scale: float, window: int,
    chunk: int, soft_cap: float, first_item: int, last_item: int,
) -> None:  # fmt: skip
    """Work items first_item to last_item, numbered query x kv_heads + head; those of one query are done together."""
    page_size, kv_heads = k_pool.shape[1:3]
    heads, head_dim = q.shape[1:]
    group = heads // kv_heads
    width = kv_heads * k_pool.shape[3]  # elements of a token's keys, with their scales where they have some
    is_half = q.itemsize == 2
    is_small = k_pool.itemsize == 1
    cap = np.float32(soft_cap)
    is_capped = soft_cap < math.inf
    whole = head_dim // (2 * LANES) * (2 * LANES)
    padded = (head_dim + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
    in_pairs = IN_PAIRS and is_half and not is_small and head_dim % STRIP == 0
    q_strides = (q.strides[0] // q.itemsize, q.strides[1] // q.itemsize)
    out_strides = (out.strides[0] // out.itemsize, out.strides[1] // out.itemsize)
    by = splat(np.float32(scale))
    query = np.zeros(heads * padded, np.float32)  # each head in the order of pairs, as the sums
    mixed = np.zeros(heads * padded, np.float32)  # sum of weight x value so far
    weights = np.empty(heads * BLOCK, np.float32)  # of the block at hand: scores, then their exponentials
    halves = np.empty(heads * BLOCK, np.uint16)  # of pairs: the exponentials
    in_lanes = np.zeros(heads * LANES, np.float32)  # of pairs: what they sum to, but for a block read before
    highest = np.empty(heads, np.float32)
    total = np.empty(heads, np.float32)
    at = np.zeros(2 * BLOCK, np.int64)  # where the keys of the block begin in the pool, and those of the next one
    asks, gap = np.zeros(RUNS * kv_heads, np.int64), 0
    k = k_pool.reshape(-1)
    v = v_pool.reshape(-1)
    before = partial_mixed.reshape(-1)
    item = first_item
    block, end = 0, 0
    if item < last_item:
        block, end = first_block(item // kv_heads, length, first_key, window, chunk)
        _place(page_table, table_row[item // kv_heads], block, end - block, page_size, width, at)
    block_of_next, end_of_next = block, end
    while item < last_item:
        i = item // kv_heads
        first_head = item % kv_heads
        last_head = min(kv_heads, first_head + last_item - item)
        item += last_head - first_head
        for h in range(first_head * group, last_head * group):
            source = token[i] * q_strides[0] + h * q_strides[1]
            for d in range(0, padded, 2 * LANES):
                place = h * padded + d
                if not in_pairs:
                    if d < whole:
                        low, high = load_pair(q, source + d)
                    else:
                        low, high = load_part(q, source + d, head_dim - d)
                    store16(query, place, multiply_add(low, by, zeros()))
                    store16(query, place + LANES, multiply_add(high, by, zeros()))
                low, high = zeros(), zeros()
                if first_key[i] > 0 and d < whole:
                    line = (np.int64(token[i]) * heads + h) * head_dim + d
                    if in_pairs:
                        low, high = quarters_apart(load16(before, line), load16(before, line + LANES))
                    else:
                        low, high = load_alike(before, line, q)
                store16(mixed, place, low)
                store16(mixed, place + LANES, high)
            if first_key[i] > 0:
                for d in range(whole, head_dim):
                    mixed[h * padded + place_in_pair(d, is_half)] = partial_mixed[token[i], h, d]
            # Weights that sum to e^lse, seen from e^lse, sum to 1.
            highest[h] = partial_lse[token[i], h] if first_key[i] > 0 else LEAST
            total[h] = np.float32(1.0) if first_key[i] > 0 else np.float32(0.0)
            store16(in_lanes, h * LANES, splat(total[h] / np.float32(LANES)))
        seen = int(np.int64(length[i]))
        while block < seen:
            count = end - block
            for j in range(BLOCK):
                at[j] = at[BLOCK + j]
            block, end = end, min(end + BLOCK, seen)
            if block < seen:
                _place(page_table, table_row[i], block, end - block, page_size, width, at)
            elif item < last_item:  # the first block of the next query is asked for with this one's last
                block_of_next, end_of_next = first_block(item // kv_heads, length, first_key, window, chunk)
                _place(
                    page_table, table_row[item // kv_heads], block_of_next, end_of_next - block_of_next, page_size,
                    width, at
                )  # fmt: skip
            if in_pairs:
                gap = _ask_in_a_row(at, first_head, last_head, kv_heads, head_dim, asks)
                _score_in_pairs(
                    q, token[i] * q_strides[0], q_strides[1], k, at, asks, gap, count, first_head, last_head, group,
                    head_dim, scale, weights
                )  # fmt: skip
            else:
                _score(query, k, v, at, count, first_head, last_head, group, head_dim, weights)
            if is_small:
                _scale(weights, count, k, at, kv_heads * head_dim, first_head, last_head, group)
            if is_capped:
                for h in range(first_head * group, last_head * group):
                    for j in range(h * BLOCK, h * BLOCK + count):  # tanh(x) = 1 - 2 / (e^2x + 1)
                        power = exp_f32(np.float32(2.0) * weights[j] / cap)
                        weights[j] = cap - np.float32(2.0) * cap / (power + np.float32(1.0))
            if in_pairs:
                weigh_pairs(
                    weights, halves, count, first_head * group, last_head * group, BLOCK, highest, in_lanes, mixed,
                    padded
                )  # fmt: skip
                _mix_in_pairs(halves, count, v, at, asks, gap, first_head, last_head, group, head_dim, mixed)
                continue
            for h in range(first_head * group, last_head * group):
                first, last = h * BLOCK, h * BLOCK + count
                top, sum_of_block = _exponentials(weights, first, last, highest[h])
                shrink = exp_f32(highest[h] - top)
                highest[h] = top
                total[h] = total[h] * shrink + sum_of_block
                if shrink != np.float32(1.0):
                    for d in range(h * padded, h * padded + padded):
                        mixed[d] *= shrink
            if is_small:
                _scale(weights, count, v, at, kv_heads * head_dim, first_head, last_head, group)
            for first in range(0, count, MIXED):
                last = min(first + MIXED, count)
                _mix(weights, first, last, v, at, first_head, last_head, group, head_dim, mixed)
        block, end = block_of_next, end_of_next
        for h in range(first_head * group, last_head * group):
            if in_pairs:
                total[h] = sum_of_lanes(load16(in_lanes, h * LANES))
            if sinks.shape[0]:
                total[h] += exp_f32(sinks[h] - highest[h])
            inverse = np.float32(1.0) / total[h]
            target = token[i] * out_strides[0] + h * out_strides[1]
            for d in range(0, whole, 2 * LANES):
                low = multiply_add(load16(mixed, h * padded + d), splat(inverse), zeros())
                high = multiply_add(load16(mixed, h * padded + d + LANES), splat(inverse), zeros())
                if in_pairs:
                    low, high = quarters_between(low, high)
                    store_both_bfloat16(out, target + d, low, high)
                else:
                    store_pair(out, target + d, low, high)
            for d in range(whole, head_dim):
                place = h * padded + place_in_pair(d, is_half)
                out[token[i], h, d] = store(mixed[place] * inverse, q[0, 0, 0])


@jit()
def first_block(i: int, length: Int32s, first_key: Int32s, window: int, chunk: int) -> tuple[int, int]:
    """Where the first block of keys that query `i` reads begins, and ends. Blocks start at multiples of BLOCK, whatever
    the window: a row's sums do not depend on where it was cut."""
    seen, read = int(np.int64(length[i])), int(np.int64(first_key[i]))
    block = max(read, seen - window, (seen - 1) // chunk * chunk)
    return block, min(block // BLOCK * BLOCK + BLOCK, seen)


@jit()
def _place(page_table: Int32s, row: int, block: int, count: int, page_size: int, width: int, at: Int64s) -> None:
    """at[BLOCK + j] = the element of the pool where key `block` + j of the row begins, or the last."""
    page = block // page_size
    offset = block % page_size
    j = 0
    while j < count:
        base = (np.int64(page_table[row, page]) * page_size + offset) * width
        stop = min(count, j + page_size - offset)
        for key in range(j, stop):
            at[BLOCK + key] = base + (key - j) * width
        j, page, offset = stop, page + 1, 0
    for key in range(count, BLOCK):
        at[BLOCK + key] = at[BLOCK + count - 1]


@jit()
def _score(
    query: Float32s, k: Array, v: Array, at: Int64s, count: int, first_head: int, last_head: int, group: int,
    head_dim: int, weights: Float32s,
) -> None:  # fmt: skip
    """weights[h x BLOCK + j] = the score of key j, up to a multiple of four keys, for every head of the kv heads."""
    whole = head_dim // (2 * LANES) * (2 * LANES)
    padded = (head_dim + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
    size = head_dim + (SCALE_BYTES if k.itemsize == 1 else 0)  # asks for the scales behind the last head, too
    for j in range(0, count, 4):
        own0, own1, own2, own3 = (
            element_at(at, j), element_at(at, j + 1), element_at(at, j + 2), element_at(at, j + 3)
        )  # fmt: skip
        next0, next1, next2, next3 = (
            element_at(at, j + AHEAD), element_at(at, j + AHEAD + 1),
            element_at(at, j + AHEAD + 2), element_at(at, j + AHEAD + 3),
        )  # fmt: skip
        for head in range(first_head, last_head):
            base = head * head_dim
            for d in range(base, base + size, LINE // k.itemsize):
                prefetch(v, own0 + d)
                prefetch(v, own1 + d)
                prefetch(v, own2 + d)
                prefetch(v, own3 + d)
                prefetch(k, next0 + d)
                prefetch(k, next1 + d)
                prefetch(k, next2 + d)
                prefetch(k, next3 + d)
            for h in range(head * group, head * group + group, 2):
                other = min(h + 1, head * group + group - 1)  # in a group of odd size the last head goes with itself
                a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zeros()
                for d in range(0, padded, 2 * LANES):
                    x, x_high = load16(query, h * padded + d), load16(query, h * padded + d + LANES)
                    y, y_high = load16(query, other * padded + d), load16(query, other * padded + d + LANES)
                    e = base + d
                    if d < whole:
                        low0, high0 = load_pair(k, own0 + e)
                        low1, high1 = load_pair(k, own1 + e)
                        low2, high2 = load_pair(k, own2 + e)
                        low3, high3 = load_pair(k, own3 + e)
                    else:
                        low0, high0 = load_part(k, own0 + e, head_dim - d)
                        low1, high1 = load_part(k, own1 + e, head_dim - d)
                        low2, high2 = load_part(k, own2 + e, head_dim - d)
                        low3, high3 = load_part(k, own3 + e, head_dim - d)
                    a0 = multiply_add(high0, x_high, multiply_add(low0, x, a0))
                    b0 = multiply_add(high0, y_high, multiply_add(low0, y, b0))
                    a1 = multiply_add(high1, x_high, multiply_add(low1, x, a1))
                    b1 = multiply_add(high1, y_high, multiply_add(low1, y, b1))
                    a2 = multiply_add(high2, x_high, multiply_add(low2, x, a2))
                    b2 = multiply_add(high2, y_high, multiply_add(low2, y, b2))
                    a3 = multiply_add(high3, x_high, multiply_add(low3, x, a3))
                    b3 = multiply_add(high3, y_high, multiply_add(low3, y, b3))
                sum_eight(weights, h * BLOCK + j, other * BLOCK + j, a0, a1, a2, a3, b0, b1, b2, b3)


@jit()
def _score_in_pairs(
    q: Array, asked: int, step: int, k: Array, at: Int64s, asks: Int64s, gap: int, count: int, first_head: int,
    last_head: int, group: int, head_dim: int, scale: float, weights: Float32s,
) -> None:  # fmt: skip
    """The same, up to a multiple of RUN keys, of the query from q[asked] on, whose heads are `step` elements apart."""
    runs, calls = (count + RUN - 1) // RUN, (group + SCORED - 1) // SCORED
    for head in range(first_head, last_head):
        for call in range(calls):  # of as many heads each as can be
            h, behind = head * group + group * call // calls, head * group + group * (call + 1) // calls
            score_pairs(
                k, head * head_dim, at, 0, asks, (head - first_head) * RUNS, gap, q, asked + h * step, step,
                head_dim // STRIP, weights, h * BLOCK, BLOCK, scale, runs, behind - h
            )  # fmt: skip


@jit()
def _mix_in_pairs(
    halves: Array, count: int, v: Array, at: Int64s, asks: Int64s, gap: int, first_head: int, last_head: int,
    group: int, head_dim: int, mixed: Float32s,
) -> None:  # fmt: skip
    """mixed += weight x value of the block's keys, for every head of the kv heads; the weights of bfloat16."""
    for head in range(first_head, last_head):
        for h in range(head * group, (head + 1) * group, HEADS):
            mix_pairs(
                v, head * head_dim, at, 0, asks, (head - first_head) * RUNS, gap, (count + 1) // 2, halves, h * BLOCK,
                BLOCK, mixed, h * head_dim, head_dim, head_dim // STRIP, min(HEADS, (head + 1) * group - h)
            )  # fmt: skip


@jit()
def _ask_in_a_row(at: Int64s, first_head: int, last_head: int, kv_heads: int, head_dim: int, asks: Int64s) -> int:
    """asks[RUNS x n + r] = from where in the pool memory is asked for RUN keys of the next block, with run r of the
    n-th of these heads. Returns how far from each other those lie.

    Of all heads a key has no gaps, and memory is asked for it as it lies: with each head for some of the keys.
    """
    heads, n = last_head - first_head, 0
    for run in range(0, BLOCK, RUN):
        for part in range(heads):
            begin = part * RUN * head_dim if heads == kv_heads else (first_head + part) * head_dim
            asks[n] = at[BLOCK + run] + begin
            n += 1
    return head_dim if heads == kv_heads else kv_heads * head_dim


@jit()
def _scale(
    weights: Float32s, count: int, pool: Array, at: Int64s, numbers: int, first_head: int, last_head: int, group: int
) -> None:
    """The weights of each key times its scale, or its value's, behind the `numbers` of a token in the pool."""
    for head in range(first_head, last_head):
        for j in range(count):
            scale = float_at(pool, element_at(at, j) + numbers + head * SCALE_BYTES)
            for h in range(head * group, head * group + group):
                weights[h * BLOCK + j] *= scale


@jit()
def _exponentials(weights: Float32s, first: int, last: int, highest: np.float32) -> tuple[np.float32, np.float32]:
    """weights[first:last] = e^(weight - top). Returns top, the largest of them and `highest`, and their sum.

    What follows up to a multiple of LANES is overwritten.
    """
    end = first + (last - first + LANES - 1) // LANES * LANES
    for j in range(last, end):
        weights[j] = LEAST
    tops = splat(highest)
    for j in range(first, end, LANES):
        tops = larger(tops, load16(weights, j))
    top = largest_lane(tops)
    one, minus_top, total = splat(np.float32(1.0)), splat(-top), zeros()
    for j in range(first, end, LANES):
        power = exp16(multiply_add(load16(weights, j), one, minus_top))
        store16(weights, j, power)
        total = multiply_add(power, one, total)
    return top, sum_of_lanes(total)


@jit()
def _mix(
    weights: Float32s, first: int, last: int, v: Array, at: Int64s, first_head: int, last_head: int, group: int,
    head_dim: int, mixed: Float32s,
) -> None:  # fmt: skip
    """mixed += weight x value of keys first to last of the block, for every head of the kv heads."""
    whole = head_dim // (2 * LANES) * (2 * LANES)
    padded = (head_dim + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
    for head in range(first_head, last_head):
        for h in range(head * group, head * group + group, 2):
            other = min(h + 1, head * group + group - 1)
            for d in range(0, padded, 2 * LANES):
                e = head * head_dim + d
                a, b = h * padded + d, other * padded + d
                a_low, a_high = load16(mixed, a), load16(mixed, a + LANES)
                b_low, b_high = load16(mixed, b), load16(mixed, b + LANES)
                for j in range(first, last):
                    if d < whole:
                        low, high = load_pair(v, element_at(at, j) + e)
                    else:
                        low, high = load_part(v, element_at(at, j) + e, head_dim - d)
                    x, y = splat_at(weights, h * BLOCK + j), splat_at(weights, other * BLOCK + j)
                    a_low, a_high = multiply_add(low, x, a_low), multiply_add(high, x, a_high)
                    b_low, b_high = multiply_add(low, y, b_low), multiply_add(high, y, b_high)
                store16(mixed, a, a_low)
                store16(mixed, a + LANES, a_high)
                store16(mixed, b, b_low)
                store16(mixed, b + LANES, b_high)
