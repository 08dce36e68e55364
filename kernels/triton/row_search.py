"""One row of logits, searched without being sorted: the passes that sample.py draws a token with.

A row is its float32 values from `row_ptr` on and their number, and where `has_mask` a mask from `mask_ptr` on: bit
t % 32 of its int32 word t // 32 allows token t, and the value of one that it forbids is -inf. A *key* is a float's bits
as a whole number of the same order. The *weight* of a value is e^(scale x (value - highest)), `highest` being the
highest value that is allowed.

Nothing is sorted. "The highest key whose weight (or count), counted from above, reaches a goal" is found by trying 3
keys a pass, which leaves a quarter of them: 16 passes for all there are. A pass keeps a sum, or a maximum, for each of
BLOCK lanes, and puts the lanes together at its end alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(values):
    """int32: a whole number of the same order as the float32."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def masked_block(row_ptr, mask_ptr, has_mask, at, vocab):
    """Values of a block; -inf beyond the row and where the mask says no."""
    values = tl.load(row_ptr + at, mask=at < vocab, other=-float("inf"))
    word = tl.load(mask_ptr + at // 32, mask=(at < vocab) & has_mask, other=-1)
    return tl.where(((word >> (at % 32)) & 1) != 0, values, -float("inf"))


@triton.jit
def weight_of(values, highest, scale):
    x = (values - highest) * scale
    return tl.where(x > -87.0, tl.exp(x), 0.0)  # as on the CPU: less than e^-87 is nothing


@triton.jit
def reached(
    row_ptr, mask_ptr, has_mask, length, highest, scale, goal, low, high,
    BLOCK: tl.constexpr, UNROLLED: tl.constexpr, BY_COUNT: tl.constexpr, IS_STRICT: tl.constexpr,
):  # fmt: skip
    """The highest key in [low, high) for which the weight of all tokens at or above it, or their number, reaches the
    goal (passes it, if strict); `low` where none does. Sums of more terms are never smaller: rounding keeps order."""
    lanes = tl.arange(0, BLOCK)
    while high - low > 1:
        width = high - low
        first = (low + width // 4).to(tl.int32)
        second = (low + width // 2).to(tl.int32)
        third = (low + width * 3 // 4).to(tl.int32)
        at_first = tl.zeros((BLOCK,), tl.float32)
        at_second = tl.zeros((BLOCK,), tl.float32)
        at_third = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, length, BLOCK * UNROLLED):
            for part in tl.static_range(UNROLLED):
                values = masked_block(row_ptr, mask_ptr, has_mask, start + part * BLOCK + lanes, length)
                if BY_COUNT:
                    parts = tl.where(values > -float("inf"), 1.0, 0.0)
                else:
                    parts = weight_of(values, highest, scale)
                keys = key_of(values)
                at_first += tl.where(keys >= first, parts, 0.0)
                at_second += tl.where(keys >= second, parts, 0.0)
                at_third += tl.where(keys >= third, parts, 0.0)
        if IS_STRICT:
            first_passes = _total(at_first) > goal
            second_passes = _total(at_second) > goal
            third_passes = _total(at_third) > goal
        else:
            first_passes = _total(at_first) >= goal
            second_passes = _total(at_second) >= goal
            third_passes = _total(at_third) >= goal
        high = tl.where(third_passes, high, third.to(tl.int64))
        high = tl.where(second_passes, high, second.to(tl.int64))
        high = tl.where(first_passes, high, first.to(tl.int64))
        low = tl.where(first_passes, first.to(tl.int64), low)
        low = tl.where(second_passes, second.to(tl.int64), low)
        low = tl.where(third_passes, third.to(tl.int64), low)
    return low


@triton.jit
def _total(lanes):
    return tl.sum(lanes.to(tl.float64), 0)


@triton.jit
def at_key(
    row_ptr, mask_ptr, has_mask, length, highest, scale, key, BLOCK: tl.constexpr, UNROLLED: tl.constexpr
):  # fmt: skip
    """Weight and number of the tokens above `key`, and the number of those equal to it."""
    lanes = tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, length, BLOCK * UNROLLED):
        for part in tl.static_range(UNROLLED):
            values = masked_block(row_ptr, mask_ptr, has_mask, start + part * BLOCK + lanes, length)
            keys = key_of(values)
            is_token = values > -float("inf")
            weight += tl.where(keys > key, weight_of(values, highest, scale), 0.0)
            above += (is_token & (keys > key)).to(tl.int32)
            equal += (is_token & (keys == key)).to(tl.int32)
    return _total(weight), tl.sum(above, 0).to(tl.int64), tl.sum(equal, 0).to(tl.int64)


@triton.jit
def least_with(row_ptr, mask_ptr, has_mask, length, highest, scale, least, BLOCK: tl.constexpr, UNROLLED: tl.constexpr):
    """The lowest key of the tokens that weigh at least so much, or the most."""
    lanes = tl.arange(0, BLOCK)
    lowest = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, length, BLOCK * UNROLLED):
        for part in tl.static_range(UNROLLED):
            values = masked_block(row_ptr, mask_ptr, has_mask, start + part * BLOCK + lanes, length)
            is_kept = (weight_of(values, highest, scale).to(tl.float64) >= least) | (values == highest)
            lowest = tl.minimum(lowest, tl.where(is_kept, key_of(values), 2147483647))
    return tl.min(lowest, 0).to(tl.int64)


@triton.jit
def draw_all(row_ptr, mask_ptr, has_mask, vocab, highest, scale, goal, BLOCK: tl.constexpr):
    """The first token, by index, at which the running weight passes the goal; else the last that has weight."""
    before = tl.full((), 0.0, tl.float64)
    base = before  # the weight before the block that begins at `begin`, in which the goal is passed
    begin = tl.full((), 0, tl.int32)
    is_passed = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mass = _total(weight_of(masked_block(row_ptr, mask_ptr, has_mask, at, vocab), highest, scale))
        is_next = (is_passed == 0) & (mass > 0.0)
        base = tl.where(is_next, before, base)
        begin = tl.where(is_next, tl.min(at, 0), begin)
        before += mass
        is_passed = tl.where(before > goal, 1, is_passed)
    at = begin + tl.arange(0, BLOCK)
    weights = weight_of(masked_block(row_ptr, mask_ptr, has_mask, at, vocab), highest, scale)
    running = base + tl.cumsum(weights.to(tl.float64), 0)
    some = weights > 0.0
    hit = tl.min(tl.where(some & (running > goal), at, 2147483647), 0).to(tl.int64)
    last = tl.max(tl.where(some, at, -1), 0).to(tl.int64)
    return tl.where(hit < 2147483647, hit, last)


@triton.jit
def nth_of_key(row_ptr, mask_ptr, has_mask, length, key, number, BLOCK: tl.constexpr):
    """The index of the token that has `number` others of the same key before it."""
    token = tl.full((), -1, tl.int64)
    before = tl.full((), 0, tl.int64)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_equal = key_of(masked_block(row_ptr, mask_ptr, has_mask, at, length)) == key
        rank = before + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        token = tl.maximum(token, tl.max(tl.where(is_equal & (rank == number), at, -1), 0).to(tl.int64))
        before += tl.sum(is_equal.to(tl.int32), 0)
    return token


@triton.jit
def key_of_many(lane_best, RANK: tl.constexpr):
    """The highest key that is not above the maximum of RANK lanes."""
    keys = key_of(lane_best)
    low = tl.full((), -2147483648, tl.int64)
    high = tl.full((), 2147483647, tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = tl.sum((keys >= middle).to(tl.int32), 0) >= RANK
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def put_side_by_side(
    row_ptr, mask_ptr, has_mask, vocab, key, value_ptr, id_ptr, BLOCK: tl.constexpr, MOST: tl.constexpr
):
    """The tokens that are not below `key`, in the order of their ids; how many there are, of which MOST are kept."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = masked_block(row_ptr, mask_ptr, has_mask, at, vocab)
        is_one = (key_of(values) >= key) & (values > -float("inf"))
        place = count + tl.cumsum(is_one.to(tl.int32), 0) - 1
        tl.store(value_ptr + place, values, mask=is_one & (place < MOST))
        tl.store(id_ptr + place, at, mask=is_one & (place < MOST))
        count += tl.sum(is_one.to(tl.int32), 0)
    tl.debug_barrier()  # what one thread has written others read
    return count
