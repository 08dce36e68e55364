"""From logits to tokens on the device: mask, temperature, top-k, top-p, min-p and the draw in one kernel, a program a
row; penalties, bias and forbidden tokens in another before it.

The rules and the random numbers are those of runtime/sampler.py: the number for (seed, position) is SplitMix64's
finalizer over both, so a row draws the same token on either device unless a sum rounds across its edge. Tokens stand in
the order of their value, equal ones by index; top-k, top-p and min-p each keep a head of that order, and the token
drawn is the first at which the running weight passes number x weight kept.

Nothing is sorted. A head of the order is (T, R): all tokens above the key T and the first R of those equal to it, where
the key is the float's bits as a whole number of the same order. "The highest key whose weight (or count), counted from
above, reaches a goal" is found by trying 8 keys a pass: 11 passes over the row narrow 2^32 keys to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from niwaki.kernels.triton.bitmask import apply_bitmask_torch
from niwaki.kernels.triton.launch import ceil_div, check, launch

NO_TOKEN = -1  # the mask and the forbidden tokens leave none
NOT_FINITE = -2  # a logit is NaN or infinite
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row is drawn. On the device of the logits."""

    scale: torch.Tensor  # float32 [rows] 1 / temperature; 0: the highest token
    top_p: torch.Tensor  # float64 [rows]
    min_p: torch.Tensor  # float64 [rows]
    top_k: torch.Tensor  # int64 [rows]; at least the vocabulary: off
    seed: torch.Tensor  # int64 [rows]
    position: torch.Tensor  # int64 [rows]
    mask_of: torch.Tensor  # int32 [rows] its mask, below 0: none
    masks: torch.Tensor  # int32 [masks, ceil(vocab / 32)]


@dataclass(frozen=True, slots=True)
class Changes:
    """What changes logits before they are drawn from: tokens of row i from bounds[i] to bounds[i + 1], each once."""

    bounds: torch.Tensor  # int32 [rows + 1]
    token: torch.Tensor  # int32 [changes], within the vocabulary
    count: torch.Tensor  # int32 [changes] times in the output
    is_seen: torch.Tensor  # int32 [changes] 1: in the prompt or the output, for the repetition penalty
    bias: torch.Tensor  # float32 [changes]; -inf: forbidden
    penalties: torch.Tensor  # float32 [rows, 3] repetition, frequency, presence


def change_logits(logits: torch.Tensor, changes: Changes) -> None:
    """In place, logits float32 [rows, vocab]: of a token that was seen, x / repetition above 0 and x * repetition below
    (Keskar et al., arXiv 1909.05858); minus count x frequency + presence where count > 0; plus bias."""
    name, device = "change_logits", logits.device
    check(name, "logits", logits, (None, None), torch.float32, device)
    rows = len(logits)
    check(name, "bounds", changes.bounds, (rows + 1,), torch.int32, device, contiguous=True)
    check(name, "token", changes.token, (None,), torch.int32, device, contiguous=True)
    for label, tensor in (("count", changes.count), ("is_seen", changes.is_seen)):
        check(name, label, tensor, changes.token.shape, torch.int32, device, contiguous=True)
    check(name, "bias", changes.bias, changes.token.shape, torch.float32, device, contiguous=True)
    check(name, "penalties", changes.penalties, (rows, 3), torch.float32, device, contiguous=True)
    launch(
        _change_logits,
        (rows,),
        logits, changes.bounds, changes.token, changes.count, changes.is_seen, changes.bias, changes.penalties,
        logits.stride(0),
        BLOCK=256,
        num_warps=4,
    )  # fmt: skip


def sample_rows(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """A token id for each row of logits float32 [rows, vocab], or NO_TOKEN or NOT_FINITE: int64 [rows]."""
    name, device = "sample_rows", logits.device
    check(name, "logits", logits, (None, None), torch.float32, device)
    rows, vocab = logits.shape
    for label, tensor, dtype in (
        ("scale", draws.scale, torch.float32),
        ("top_p", draws.top_p, torch.float64),
        ("min_p", draws.min_p, torch.float64),
        ("top_k", draws.top_k, torch.int64),
        ("seed", draws.seed, torch.int64),
        ("position", draws.position, torch.int64),
        ("mask_of", draws.mask_of, torch.int32),
    ):
        check(name, label, tensor, (rows,), dtype, device, contiguous=True)
    check(name, "masks", draws.masks, (None, ceil_div(vocab, 32)), torch.int32, device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    launch(
        _sample_rows,
        (rows,),
        logits, draws.scale, draws.top_p, draws.min_p, draws.top_k, draws.seed, draws.position, draws.mask_of,
        draws.masks, out, vocab, logits.stride(0), draws.masks.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return out


def sample_rows_torch(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The reference of `sample_rows`: sorts, and adds in float64."""
    vocab = logits.shape[1]
    masked = logits.clone()
    apply_bitmask_torch(masked, draws.masks, draws.mask_of)
    tokens = []
    for i, row in enumerate(masked):
        scale, highest = float(draws.scale[i]), row.max()
        if not torch.isfinite(logits[i].max()):
            tokens.append(NOT_FINITE)
        elif not torch.isfinite(highest):
            tokens.append(NO_TOKEN)
        elif scale == 0.0:
            tokens.append(int(torch.nonzero(row == highest)[0]))
        else:
            scaled = (row - highest) * scale
            weights = torch.where(scaled > -87.0, scaled.exp(), 0.0).double()
            top_k, top_p, min_p = int(draws.top_k[i]), float(draws.top_p[i]), float(draws.min_p[i])
            ids = torch.arange(vocab, device=row.device)
            if top_k < vocab or top_p < 1.0 or min_p > 0.0:
                ids = row.sort(descending=True, stable=True).indices[: min(top_k, vocab)]
                running = weights[ids].cumsum(0)
                needed = int((running < top_p * running[-1]).sum()) + 1 if top_p < 1.0 else len(ids)
                kept = max(1, int((weights[ids] >= min_p).sum()))
                ids = ids[: min(needed, kept)]
            running = weights[ids].cumsum(0)
            number = uniform_torch(int(draws.seed[i]), int(draws.position[i]))
            tokens.append(int(ids[min(int((running <= number * running[-1]).sum()), len(ids) - 1)]))
    return torch.tensor(tokens, device=logits.device)


def uniform_torch(seed: int, position: int) -> float:
    """The reference of `uniform`, in Python's whole numbers."""
    stride, all_bits = 0x9E3779B97F4A7C15, 2**64 - 1

    def mixed(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & all_bits
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & all_bits
        return state ^ (state >> 31)

    state = mixed((seed + stride) & all_bits) + (position + 1) * stride
    return float((mixed(state & all_bits) >> 11) * 2.0**-53)


@triton.jit
def _change_logits(
    logits_ptr, bounds_ptr, token_ptr, count_ptr, seen_ptr, bias_ptr, penalty_ptr, stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(penalty_ptr + 3 * row)
    frequency = tl.load(penalty_ptr + 3 * row + 1)
    presence = tl.load(penalty_ptr + 3 * row + 2)
    end = tl.load(bounds_ptr + row + 1)
    for start in range(tl.load(bounds_ptr + row), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < end
        target = logits_ptr + row * stride + tl.load(token_ptr + at, mask=inside, other=0)
        x = tl.load(target, mask=inside, other=0.0)
        is_seen = tl.load(seen_ptr + at, mask=inside, other=0) != 0
        x = tl.where(is_seen, tl.where(x > 0.0, x / repetition, x * repetition), x)
        count = tl.load(count_ptr + at, mask=inside, other=0)
        x = tl.where(count > 0, x - (count.to(tl.float32) * frequency + presence), x)
        tl.store(target, x + tl.load(bias_ptr + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def uniform(seed, position):
    """A number in [0, 1) with 53 random bits, as `uniform` of runtime/sampler.py."""
    stride = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = _mixed(seed.to(tl.uint64) + stride) + (position.to(tl.uint64) + 1) * stride
    return (_mixed(state) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _mixed(state):
    state = (state ^ (state >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return state ^ (state >> 31)


@triton.jit
def _key_of(values):
    """int64, from 0: a whole number of the same order as the float32."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _value_of(key):
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _masked(row_ptr, mask_ptr, has_mask, at, vocab):
    """Values of a block; -inf beyond the row and where the mask says no."""
    values = tl.load(row_ptr + at, mask=at < vocab, other=-float("inf"))
    word = tl.load(mask_ptr + at // 32, mask=(at < vocab) & has_mask, other=-1)
    return tl.where(((word >> (at % 32)) & 1) != 0, values, -float("inf"))


@triton.jit
def _weight(values, highest, scale):
    x = (values - highest) * scale
    return tl.where(x > -87.0, tl.exp(x), 0.0)  # as on the CPU: less than e^-87 is nothing


@triton.jit
def _reached(
    row_ptr, mask_ptr, has_mask, vocab, highest, scale, goal, low, high,
    BLOCK: tl.constexpr, BY_COUNT: tl.constexpr, IS_STRICT: tl.constexpr,
):  # fmt: skip
    """The highest key in [low, high) for which the weight of all tokens at or above it, or their number, reaches the
    goal (passes it, if strict); `low` where none does. Sums of more terms are never smaller: rounding keeps order."""
    eighth = tl.arange(0, 8)
    while high - low > 1:
        width = high - low
        keys = low + width * (eighth + 1).to(tl.int64) // 9
        sums = tl.zeros((8,), tl.float64)
        for start in range(0, vocab, BLOCK):
            values = _masked(row_ptr, mask_ptr, has_mask, start + tl.arange(0, BLOCK), vocab)
            if BY_COUNT:
                parts = tl.where(values > -float("inf"), 1.0, 0.0)
            else:
                parts = _weight(values, highest, scale)
            is_above = _key_of(values)[:, None] >= keys[None, :]
            sums += tl.sum(tl.where(is_above, parts[:, None], 0.0), 0).to(tl.float64)
        if IS_STRICT:
            passed = tl.sum((sums > goal).to(tl.int64), 0)
        else:
            passed = tl.sum((sums >= goal).to(tl.int64), 0)
        high = tl.where(passed == 8, high, low + width * (passed + 1) // 9)
        low = low + width * passed // 9
    return low


@triton.jit
def _at_key(row_ptr, mask_ptr, has_mask, vocab, highest, scale, key, BLOCK: tl.constexpr):
    """Weight and number of the tokens above `key`, and the number of those equal to it."""
    weight = tl.full((), 0.0, tl.float64)
    above = tl.full((), 0, tl.int64)
    equal = tl.full((), 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        values = _masked(row_ptr, mask_ptr, has_mask, start + tl.arange(0, BLOCK), vocab)
        keys = _key_of(values)
        is_token = values > -float("inf")
        weight += tl.sum(tl.where(keys > key, _weight(values, highest, scale), 0.0), 0).to(tl.float64)
        above += tl.sum((is_token & (keys > key)).to(tl.int64), 0)
        equal += tl.sum((is_token & (keys == key)).to(tl.int64), 0)
    return weight, above, equal


@triton.jit
def _draw_all(row_ptr, mask_ptr, has_mask, vocab, highest, scale, goal, BLOCK: tl.constexpr):
    """The first token, by index, at which the running weight passes the goal; else the last that has weight."""
    before = tl.full((), 0.0, tl.float64)
    token = tl.full((), -1, tl.int64)
    is_found = tl.full((), 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weights = _weight(_masked(row_ptr, mask_ptr, has_mask, at, vocab), highest, scale)
        running = before + tl.cumsum(weights.to(tl.float64), 0)
        some = weights > 0.0
        hit = tl.min(tl.where(some & (running > goal), at, 2147483647), 0).to(tl.int64)
        last = tl.max(tl.where(some, at, -1), 0).to(tl.int64)
        is_hit = hit < 2147483647
        token = tl.where(is_found == 1, token, tl.where(is_hit, hit, tl.maximum(token, last)))
        is_found = tl.where(is_hit, 1, is_found)
        before += tl.sum(weights, 0).to(tl.float64)
    return token


@triton.jit
def _nth_of_key(row_ptr, mask_ptr, has_mask, vocab, key, number, BLOCK: tl.constexpr):
    """The index of the token that has `number` others of the same key before it."""
    token = tl.full((), -1, tl.int64)
    before = tl.full((), 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_equal = _key_of(_masked(row_ptr, mask_ptr, has_mask, at, vocab)) == key
        rank = before + tl.cumsum(is_equal.to(tl.int64), 0) - 1
        token = tl.maximum(token, tl.max(tl.where(is_equal & (rank == number), at, -1), 0).to(tl.int64))
        before += tl.sum(is_equal.to(tl.int64), 0)
    return token


@triton.jit
def _sample_rows(
    logits_ptr,
    scale_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    seed_ptr,
    position_ptr,
    mask_of_ptr,
    mask_ptr,
    out_ptr,
    vocab,
    stride,
    mask_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    mask_of = tl.load(mask_of_ptr + row).to(tl.int64)
    has_mask = mask_of >= 0
    mask_ptr += tl.maximum(mask_of, 0) * mask_stride

    highest = -float("inf")
    token = tl.full((), -1, tl.int64)  # NO_TOKEN
    faults = tl.full((), 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        raw = tl.load(row_ptr + at, mask=at < vocab, other=-float("inf"))
        faults += tl.sum(((raw != raw) | (raw == float("inf"))).to(tl.int64), 0)
        values = _masked(row_ptr, mask_ptr, has_mask, at, vocab)
        best = tl.max(values, 0)
        where = tl.min(tl.where(values == best, at, 2147483647), 0).to(tl.int64)
        token = tl.where(best > highest, where, token)
        highest = tl.maximum(highest, best)
    scale = tl.load(scale_ptr + row)
    if faults > 0:
        token = tl.full((), -2, tl.int64)  # NOT_FINITE
    elif (token >= 0) & (scale > 0.0):
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        number = uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        whole = tl.full((), 0, tl.int64)
        total, count, _ = _at_key(row_ptr, mask_ptr, has_mask, vocab, highest, scale, whole - 1, BLOCK)
        if (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0):
            above_all = _key_of(highest) + 1
            key = whole  # the head of the order that is kept: all above `key`, and `ties` of those equal to it
            ties = count
            mass = total
            if top_k < vocab:
                key = _reached(
                    row_ptr, mask_ptr, has_mask, vocab, highest, scale, tl.minimum(top_k, count).to(tl.float64),
                    whole, above_all, BLOCK, True, False,
                )  # fmt: skip
                mass, above, _ = _at_key(row_ptr, mask_ptr, has_mask, vocab, highest, scale, key, BLOCK)
                ties = tl.minimum(top_k, count) - above
                mass += ties.to(tl.float64) * _weight(_value_of(key), highest, scale).to(tl.float64)
            if top_p < 1.0:
                goal = top_p * mass
                found = _reached(
                    row_ptr, mask_ptr, has_mask, vocab, highest, scale, goal, key, above_all, BLOCK, False, False
                )
                over, _, equal = _at_key(row_ptr, mask_ptr, has_mask, vocab, highest, scale, found, BLOCK)
                weight = _weight(_value_of(found), highest, scale).to(tl.float64)
                needed = tl.ceil((goal - over) / tl.where(weight > 0.0, weight, 1.0)).to(tl.int64)
                needed = tl.minimum(tl.maximum(needed, 1), tl.where(found == key, tl.minimum(ties, equal), equal))
                key = found
                ties = needed
            if min_p > 0.0:
                least = above_all
                for start in range(0, vocab, BLOCK):
                    values = _masked(row_ptr, mask_ptr, has_mask, start + tl.arange(0, BLOCK), vocab)
                    is_kept = (_weight(values, highest, scale).to(tl.float64) >= min_p) | (values == highest)
                    least = tl.minimum(least, tl.min(tl.where(is_kept, _key_of(values), above_all), 0))
                ties = tl.where(least > key, count, ties)
                key = tl.maximum(least, key)
            over, _, equal = _at_key(row_ptr, mask_ptr, has_mask, vocab, highest, scale, key, BLOCK)
            ties = tl.minimum(ties, equal)
            goal = number * (over + ties.to(tl.float64) * _weight(_value_of(key), highest, scale).to(tl.float64))
            drawn = _reached(
                row_ptr, mask_ptr, has_mask, vocab, highest, scale, goal, key, above_all, BLOCK, False, True
            )
            over, _, equal = _at_key(row_ptr, mask_ptr, has_mask, vocab, highest, scale, drawn, BLOCK)
            weight = _weight(_value_of(drawn), highest, scale).to(tl.float64)
            place = tl.floor((goal - over) / tl.where(weight > 0.0, weight, 1.0)).to(tl.int64)
            most = tl.where(drawn == key, ties, equal) - 1
            place = tl.minimum(tl.maximum(place, 0), most)
            token = _nth_of_key(row_ptr, mask_ptr, has_mask, vocab, drawn, place, BLOCK)
        else:
            token = _draw_all(row_ptr, mask_ptr, has_mask, vocab, highest, scale, number * total, BLOCK)
    tl.store(out_ptr + row, token)
