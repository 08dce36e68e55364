"""From logits to tokens on the device: mask, temperature, top-k, top-p, min-p and the draw in one kernel, a program a
row; penalties, bias and forbidden tokens in another before it (penalties.py).

The rules and the random numbers are those of runtime/sampling: the number for (seed, position) is SplitMix64's
finalizer over both, so a row draws the same token on either device unless a sum rounds across its edge. Tokens stand in
the order of their value, equal ones by index; top-k, top-p and min-p each keep a head of that order, and the token
drawn is the first at which the running weight passes number x weight kept.

Nothing is sorted (row_search.py). A head of the order is (T, R): all tokens above the key T and the first R of those
equal to it. Most heads are short, so the tokens from a key on, of which the lanes' maxima tell how many there are, some
1,500, are put side by side first; where what is kept ends among them, they are searched instead of the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from niwaki.kernels.triton.bitmask import apply_bitmask_torch
from niwaki.kernels.triton.launch import block_of, ceil_div, check, launch
from niwaki.kernels.triton.row_search import (
    at_key,
    draw_all,
    key_of,
    key_of_many,
    least_with,
    masked_block,
    nth_of_key,
    put_side_by_side,
    reached,
    value_of,
    weight_of,
)

NO_TOKEN = -1  # the mask and the forbidden tokens leave none
NOT_FINITE = -2  # a logit is NaN or infinite
BLOCK = 2048
UNROLLED = 4  # blocks that are asked for at once
CANDIDATES = 4096  # tokens that are put side by side, at most
RANK = 1024  # of the lanes so many have one of them


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
    block = min(block_of(vocab), BLOCK)
    is_long = vocab > CANDIDATES
    shape = (rows, CANDIDATES) if is_long else (0, 0)
    values = torch.empty(shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    launch(
        _sample_rows,
        (rows,),
        logits, draws.scale, draws.top_p, draws.min_p, draws.top_k, draws.seed, draws.position, draws.mask_of,
        draws.masks, values, ids, out, vocab, logits.stride(0), draws.masks.stride(0),
        BLOCK=block,
        UNROLLED=1 if vocab <= block else UNROLLED,
        CANDIDATES=CANDIDATES if is_long else 0,
        RANK=min(RANK, block // 2),
        num_warps=min(16, max(1, block // 128)),
    )  # fmt: skip
    return out


def sample_rows_torch(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The reference of `sample_rows`: sorts, and adds in float64."""
    return torch.tensor([_drawn_torch(row) for row in _kept_torch(logits, draws)], device=logits.device)


def misses_torch(logits: torch.Tensor, draws: Draws, tokens: torch.Tensor) -> torch.Tensor:
    """How far from each token its random number fell, as a share of the weight that is kept: 0 where that is the
    token's, infinite where the token cannot be drawn. float64 [rows]. A sum in another order rounds across an edge
    sometimes: of a row of 128,256 tokens, each some 1e-5 of the weight, an edge is always near."""
    misses = []
    for row, token in zip(_kept_torch(logits, draws), tokens.tolist(), strict=True):
        if isinstance(row, int):
            misses.append(0.0 if token == row else float("inf"))
            continue
        place = torch.nonzero(row.ids == token)
        if not len(place):
            misses.append(float("inf"))
            continue
        running = row.running / row.running[-1]
        end = float(running[int(place[0])])
        begin = float(running[int(place[0]) - 1]) if int(place[0]) else 0.0
        misses.append(max(begin - row.number, row.number - end, 0.0))
    return torch.tensor(misses, dtype=torch.float64, device=logits.device)


@dataclass(frozen=True, slots=True)
class Kept:
    ids: torch.Tensor  # int64, the tokens of a row that may be drawn, in their order
    running: torch.Tensor  # float64, their weights counted up
    number: float  # random, of [0, 1)


def _drawn_torch(row: Kept | int) -> int:
    if isinstance(row, int):
        return row
    return int(row.ids[min(int((row.running <= row.number * row.running[-1]).sum()), len(row.ids) - 1)])


def _kept_torch(logits: torch.Tensor, draws: Draws) -> Iterator[Kept | int]:
    """Of each row what may be drawn; its token where that hangs on no number."""
    vocab = logits.shape[1]
    masked = logits.clone()
    apply_bitmask_torch(masked, draws.masks, draws.mask_of)
    for i, row in enumerate(masked):
        scale, highest = float(draws.scale[i]), row.max()
        if not torch.isfinite(logits[i].max()):
            yield NOT_FINITE
        elif not torch.isfinite(highest):
            yield NO_TOKEN
        elif scale == 0.0:
            yield int(torch.nonzero(row == highest)[0])
        else:
            scaled = (row - highest) * scale
            weights = torch.where(scaled > -87.0, scaled.exp(), 0.0).double()
            top_k, top_p, min_p = int(draws.top_k[i]), float(draws.top_p[i]), float(draws.min_p[i])
            ids = torch.arange(vocab, device=row.device)
            count = int(row.isfinite().sum())
            choosable = count if int(draws.mask_of[i]) >= 0 and 2 * count < vocab else vocab
            if top_k < choosable or top_p < 1.0 or min_p > 0.0:
                ids = row.sort(descending=True, stable=True).indices[: min(top_k, vocab)]
                running = weights[ids].cumsum(0)
                needed = int((running < top_p * running[-1]).sum()) + 1 if top_p < 1.0 else len(ids)
                kept = max(1, int((weights[ids] >= min_p).sum()))
                ids = ids[: min(needed, kept)]
            yield Kept(ids, weights[ids].cumsum(0), uniform_torch(int(draws.seed[i]), int(draws.position[i])))


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
def uniform(seed, position):
    """A number in [0, 1) with 53 random bits, as `uniform` of runtime/sampling/sampler.py."""
    stride = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = _mixed(seed.to(tl.uint64) + stride) + (position.to(tl.uint64) + 1) * stride
    return (_mixed(state) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _mixed(state):
    state = (state ^ (state >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return state ^ (state >> 31)


# Rows of arrays of 8 bytes: whether they are aligned to 16 hangs on how many there are, and a batch of an odd number
# shall not wait for another kernel to be compiled.
BY_ROW = ["top_p_ptr", "min_p_ptr", "top_k_ptr", "seed_ptr", "position_ptr"]


@triton.jit(do_not_specialize_on_alignment=BY_ROW)
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
    value_ptr,
    id_ptr,
    out_ptr,
    VOCAB: tl.constexpr,
    stride,
    mask_stride,
    BLOCK: tl.constexpr,
    UNROLLED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    RANK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    mask_of = tl.load(mask_of_ptr + row).to(tl.int64)
    has_mask = mask_of >= 0
    mask_ptr += tl.maximum(mask_of, 0) * mask_stride

    lanes = tl.arange(0, BLOCK)
    lane_best = tl.full((BLOCK,), -float("inf"), tl.float32)
    lane_token = tl.zeros((BLOCK,), tl.int32)
    faults = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCAB, BLOCK * UNROLLED):
        for part in tl.static_range(UNROLLED):
            at = start + part * BLOCK + lanes
            raw = tl.load(row_ptr + at, mask=at < VOCAB, other=-float("inf"))
            faults |= ((raw != raw) | (raw == float("inf"))).to(tl.int32)
            values = masked_block(row_ptr, mask_ptr, has_mask, at, VOCAB)
            lane_token = tl.where(values > lane_best, at, lane_token)
            lane_best = tl.where(values > lane_best, values, lane_best)
    highest = tl.max(lane_best, 0)
    first = tl.min(tl.where(lane_best == highest, lane_token, 2147483647), 0).to(tl.int64)
    token = tl.where(highest > -float("inf"), first, -1)  # NO_TOKEN
    scale = tl.load(scale_ptr + row)
    if tl.max(faults, 0) > 0:
        token = tl.full((), -2, tl.int64)  # NOT_FINITE
    elif (token >= 0) & (scale > 0.0):
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        number = uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        whole = tl.full((), -2139095041, tl.int64)  # the key of -inf
        total, count, _ = at_key(row_ptr, mask_ptr, has_mask, VOCAB, highest, scale, whole, BLOCK, UNROLLED)
        # As the CPU's sampler, to which a row of few allowed tokens is a short one.
        choosable = tl.where(has_mask & (2 * count < VOCAB), count, VOCAB)
        if (top_k < choosable) | (top_p < 1.0) | (min_p > 0.0):
            above_all = key_of(highest).to(tl.int64) + 1
            key = whole  # the head of the order that is kept: all above `key`, and `ties` of those equal to it
            ties = count
            mass = total
            length = tl.full((), VOCAB, tl.int32)
            is_short = row < 0
            if CANDIDATES > 0:
                value_ptr += row * CANDIDATES
                id_ptr += row * CANDIDATES
                lowest = key_of_many(lane_best, RANK)
                some = put_side_by_side(
                    row_ptr, mask_ptr, has_mask, VOCAB, lowest, value_ptr, id_ptr, BLOCK * UNROLLED, CANDIDATES
                )
                if some <= CANDIDATES:
                    among, _, _ = at_key(
                        value_ptr, mask_ptr, row < 0, some, highest, scale, whole, BLOCK, UNROLLED
                    )  # fmt: skip
                    has_top_k = (top_k <= some) | (some == count)
                    has_top_p = (top_k >= choosable) & (top_p < 1.0) & (among >= top_p * total)
                    is_likely = weight_of(value_of(lowest), highest, scale).to(tl.float64) >= min_p
                    has_min_p = (top_k >= choosable) & (min_p > 0.0) & (is_likely == 0)
                    is_short = has_top_k | has_top_p | has_min_p
                    # Where it ends behind them, what min_p keeps ends before it.
                    top_p = tl.where(has_top_k | has_top_p | (is_short == 0), top_p, 1.0)
                if is_short:
                    row_ptr = value_ptr
                    has_mask = row < 0
                    length = some
                    key = tl.maximum(lowest, whole)
            if top_k < choosable:
                key = reached(
                    row_ptr, mask_ptr, has_mask, length, highest, scale, tl.minimum(top_k, count).to(tl.float64),
                    key, above_all, BLOCK, UNROLLED, True, False,
                )  # fmt: skip
                mass, above, _ = at_key(row_ptr, mask_ptr, has_mask, length, highest, scale, key, BLOCK, UNROLLED)
                ties = tl.minimum(top_k, count) - above
                mass += ties.to(tl.float64) * weight_of(value_of(key), highest, scale).to(tl.float64)
            if top_p < 1.0:
                goal = top_p * mass
                found = reached(
                    row_ptr, mask_ptr, has_mask, length, highest, scale, goal, key, above_all, BLOCK, UNROLLED,
                    False, False,
                )  # fmt: skip
                over, _, equal = at_key(
                    row_ptr, mask_ptr, has_mask, length, highest, scale, found, BLOCK, UNROLLED
                )  # fmt: skip
                weight = weight_of(value_of(found), highest, scale).to(tl.float64)
                needed = tl.ceil((goal - over) / tl.where(weight > 0.0, weight, 1.0)).to(tl.int64)
                needed = tl.minimum(tl.maximum(needed, 1), tl.where(found == key, tl.minimum(ties, equal), equal))
                key = found
                ties = needed
            if min_p > 0.0:
                least = least_with(
                    row_ptr, mask_ptr, has_mask, length, highest, scale, min_p, BLOCK, UNROLLED
                )  # fmt: skip
                ties = tl.where(least > key, count, ties)
                key = tl.maximum(least, key)
            over, _, equal = at_key(row_ptr, mask_ptr, has_mask, length, highest, scale, key, BLOCK, UNROLLED)
            ties = tl.minimum(ties, equal)
            goal = number * (over + ties.to(tl.float64) * weight_of(value_of(key), highest, scale).to(tl.float64))
            drawn = reached(
                row_ptr, mask_ptr, has_mask, length, highest, scale, goal, key, above_all, BLOCK, UNROLLED, False, True
            )
            over, _, equal = at_key(row_ptr, mask_ptr, has_mask, length, highest, scale, drawn, BLOCK, UNROLLED)
            weight = weight_of(value_of(drawn), highest, scale).to(tl.float64)
            place = tl.floor((goal - over) / tl.where(weight > 0.0, weight, 1.0)).to(tl.int64)
            most = tl.where(drawn == key, ties, equal) - 1
            place = tl.minimum(tl.maximum(place, 0), most)
            token = nth_of_key(row_ptr, mask_ptr, has_mask, length, drawn, place, BLOCK * UNROLLED)
            if is_short:
                token = tl.load(id_ptr + token).to(tl.int64)
        else:
            token = draw_all(row_ptr, mask_ptr, has_mask, VOCAB, highest, scale, number * total, BLOCK * UNROLLED)
    tl.store(out_ptr + row, token)
