"""A mixture of experts: route each token to its top k, one grouped product over the tokens of each expert, and the sum.

route: weights = softmax(scores), the k highest, divided by their sum on request (Shazeer et al., arXiv 1701.06538).
grouped_linear: a token's choices are sorted by expert, and a program takes BLOCK_M choices of one expert times BLOCK_N
columns; tiles are found as in ragged attention, so nothing waits for the host (as MegaBlocks, arXiv 2211.15841, argues
for). combine: sum over a token's choices of weight x result, in float32, in the order of the choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from niwaki.kernels.triton.launch import FLOATS, block_of, ceil_div, check, dot_dtype, dot_precision, launch, warps_for
from niwaki.kernels.triton.paged_attention import row_of_tile
from niwaki.kernels.triton.tuning import Tuning, tuning_for

FEW_CHOICES = 16  # choices an expert up to which the small tile is taken


def route(scores: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, renormalise: bool) -> None:
    """weights float32, chosen int32 [tokens, k] of scores [tokens, experts]: best first, of equals the lower number."""
    name, device = "route", scores.device
    check(name, "scores", scores, (None, None), FLOATS, device)
    tokens, experts = scores.shape
    check(name, "weights", weights, (tokens, None), torch.float32, device, contiguous=True)
    check(name, "chosen", chosen, weights.shape, torch.int32, device, contiguous=True)
    if not 1 <= weights.shape[1] <= experts:
        raise ValueError(f"{name}: {weights.shape[1]} experts a token cannot be chosen from {experts}")
    launch(
        _route,
        (tokens,),
        scores, weights, chosen, experts, scores.stride(0),
        PER_TOKEN=weights.shape[1],
        BLOCK=block_of(experts),
        RENORMALISE=renormalise,
        num_warps=1,
    )  # fmt: skip


def route_torch(scores: torch.Tensor, per_token: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of `route`: weights, and chosen int64."""
    weights, chosen = scores.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, :per_token], chosen[:, :per_token]
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), chosen


def sorted_choices(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """order int32 [tokens x k]: the choices (token x k + place) by expert; bounds int32 [experts + 1]: where each
    expert's begin. No number comes back to the host."""
    by_expert, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts + 1, dtype=by_expert.dtype, device=chosen.device)
    return order.int(), torch.searchsorted(by_expert, numbers).int()


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    bounds: torch.Tensor,
    out: torch.Tensor,
    *,
    per_row: int,
    tuning: Tuning | None = None,
) -> None:
    """out[c] = weight[expert of c] x[c // per_row] for every choice c. x [rows, inputs], weight [experts, outputs,
    inputs], out [choices, outputs]; `per_row`: choices of a row of x (k for tokens, 1 for choices)."""
    name, device = "grouped_linear", x.device
    check(name, "x", x, (None, None), FLOATS, device)
    check(name, "weight", weight, (None, None, x.shape[1]), x.dtype, device, contiguous=True)
    experts, outputs, inputs = weight.shape
    check(name, "order", order, (len(x) * per_row,), torch.int32, device, contiguous=True)
    check(name, "bounds", bounds, (experts + 1,), torch.int32, device, contiguous=True)
    check(name, "out", out, (len(order), outputs), x.dtype, device)
    kind = "moe_few" if len(order) <= FEW_CHOICES * experts else "moe"
    chosen = tuning or tuning_for(kind, device, inputs=inputs, outputs=outputs)
    launch(
        _grouped_linear,
        (len(order) // chosen.block_m + experts, ceil_div(outputs, chosen.block_n)),
        x, weight, order, bounds, out, experts, outputs, inputs, per_row, x.stride(0), out.stride(0),
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        DOT=dot_dtype(x.dtype),
        PRECISION=dot_precision(x.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )  # fmt: skip


def grouped_linear_torch(x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, per_row: int) -> torch.Tensor:
    """The reference of `grouped_linear`, from the expert of each choice."""
    experts = chosen.flatten().tolist()
    rows = [x[c // per_row].float() @ weight[expert].float().t() for c, expert in enumerate(experts)]
    return torch.stack(rows).to(x.dtype)


def combine(results: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = sum over j of weights[t, j] x results[t x k + j]; results [tokens x k, width], out [tokens, width]."""
    name, device = "combine", out.device
    check(name, "out", out, (None, None), FLOATS, device)
    check(name, "weights", weights, (len(out), None), torch.float32, device, contiguous=True)
    check(name, "results", results, (weights.numel(), out.shape[1]), out.dtype, device)
    block = min(block_of(out.shape[1]), 1024)
    launch(
        _combine,
        (len(out), ceil_div(out.shape[1], block)),
        results, weights, out, weights.shape[1], out.shape[1], results.stride(0), out.stride(0),
        BLOCK=block,
        num_warps=warps_for(block),
    )  # fmt: skip


@triton.jit
def _route(
    score_ptr,
    weight_ptr,
    chosen_ptr,
    experts,
    stride,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    scores = tl.load(score_ptr + token * stride + expert, mask=expert < experts, other=-float("inf")).to(tl.float32)
    highest = tl.max(scores, 0)
    all_exps = tl.sum(tl.exp(scores - highest), 0)
    left = scores
    total = 0.0
    for _ in tl.static_range(PER_TOKEN):
        best = tl.max(left, 0)
        total += tl.exp(best - highest)
        taken = tl.min(tl.where((left == best) & (expert < experts), expert, BLOCK), 0)
        left = tl.where(expert == taken, -float("inf"), left)
    left = scores
    for place in tl.static_range(PER_TOKEN):
        best = tl.max(left, 0)
        # Of scores that are NaN none is the best: the last one is taken, not one that is not there.
        taken = tl.min(tl.where((left == best) & (expert < experts), expert, experts - 1), 0)
        left = tl.where(expert == taken, -float("inf"), left)
        weight = tl.exp(best - highest) / (total if RENORMALISE else all_exps)
        tl.store(weight_ptr + token * PER_TOKEN + place, weight)
        tl.store(chosen_ptr + token * PER_TOKEN + place, taken)


@triton.jit
def choices_of_tile(bounds_ptr, tile, experts, BLOCK_M: tl.constexpr):
    """The expert of the tile, where its choices begin in their order, and where those of the expert end."""
    expert = row_of_tile(bounds_ptr, tile, experts, BLOCK_M)
    first = tl.load(bounds_ptr + expert)
    at = (tile - first // BLOCK_M - expert) * BLOCK_M + first
    end = tl.load(bounds_ptr + expert + 1)
    return expert, at, end


@triton.jit
def _grouped_linear(
    x_ptr,
    weight_ptr,
    order_ptr,
    bounds_ptr,
    out_ptr,
    experts,
    outputs,
    INPUTS: tl.constexpr,
    per_row,
    x_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    expert, at, end = choices_of_tile(bounds_ptr, tl.program_id(0), experts, BLOCK_M)
    if at < end:
        m = at + tl.arange(0, BLOCK_M)
        choice = tl.load(order_ptr + m, mask=m < end, other=0).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_row = x_ptr + (choice // per_row) * x_stride
        weight_row = weight_ptr + (expert.to(tl.int64) * outputs + n) * INPUTS
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            inside = start + k < INPUTS
            x = tl.load(x_row[:, None] + start + k[None, :], mask=(m < end)[:, None] & inside[None, :], other=0.0)
            w = tl.load(
                weight_row[None, :] + start + k[:, None], mask=(n < outputs)[None, :] & inside[:, None], other=0.0
            )
            acc = tl.dot(x.to(DOT), w.to(DOT), acc, input_precision=PRECISION)
        target = out_ptr + choice[:, None] * out_stride + n[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < outputs)[None, :])


@triton.jit
def _combine(
    result_ptr, weight_ptr, out_ptr, PER_TOKEN: tl.constexpr, width, result_stride, out_stride, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(PER_TOKEN):
        choice = token * PER_TOKEN + j
        weight = tl.load(weight_ptr + choice)
        values = tl.load(result_ptr + choice * result_stride + at, mask=at < width, other=0.0).to(tl.float32)
        total += weight * values
    tl.store(out_ptr + token * out_stride + at, total.to(out_ptr.dtype.element_ty), mask=at < width)
