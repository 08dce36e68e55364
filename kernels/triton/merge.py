"""Put the parts of an attention together by their log-sum-exp: out = sum_i 2^(lse_i - m) out_i / sum_i 2^(lse_i - m),
m = max_i lse_i. A head's sink (kernels/rule.py) is a part more, of no value.

Parts are added in their order, one program a query and up to 4 heads. Used by split decoding and by tree attention.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from niwaki.kernels.operand import Operand
from niwaki.kernels.triton.fold import LOG2_E
from niwaki.kernels.triton.launch import FLOATS, block_of, ceil_div, check, launch

HEADS_AT_ONCE = 4


def merge_parts(
    parts: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    token: torch.Tensor,
    out: torch.Tensor,
    sinks: Operand | None = None,
) -> None:
    """out[token[i]] = the merge of parts bounds[i] to bounds[i + 1]; 0 where all of them are empty.

    parts float32 [parts, heads, head_dim], lse float32 [parts, heads] to base 2, -inf: an empty part, whose values
    count for nothing. bounds int32 [queries + 1], token int32 [queries], out [tokens, heads, head_dim].
    """
    name, device = "merge_parts", out.device
    check(name, "out", out, (None, None, None), FLOATS, device)
    _, heads, head_dim = out.shape
    check(name, "parts", parts, (None, heads, head_dim), torch.float32, device, contiguous=True)
    check(name, "lse", lse, (len(parts), heads), torch.float32, device, contiguous=True)
    check(name, "token", token, (None,), torch.int32, device, contiguous=True)
    check(name, "bounds", bounds, (len(token) + 1,), torch.int32, device, contiguous=True)
    block_heads = min(block_of(heads), HEADS_AT_ONCE)
    launch(
        _merge_parts,
        (len(token), ceil_div(heads, block_heads)),
        parts, lse, bounds, token, out, checked_sinks(name, sinks, out), heads, out.stride(0), out.stride(1),
        HAS_SINKS=sinks is not None,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_D=block_of(head_dim),
        num_warps=1,
    )  # fmt: skip


def checked_sinks(kernel: str, sinks: Operand | None, heads_of: torch.Tensor) -> torch.Tensor:
    """The sinks for the heads of [tokens, heads, head_dim]; where there are none, something to pass instead."""
    if sinks is None:
        return heads_of
    check(kernel, "sinks", sinks.tensor, (heads_of.shape[1],), torch.float32, heads_of.device, contiguous=True)
    return sinks.tensor


def merge_parts_torch(
    parts: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    token: torch.Tensor,
    out: torch.Tensor,
    sinks: Operand | None = None,
) -> None:
    """The reference of `merge_parts`."""
    for i, target in enumerate(token.tolist()):
        of_query = slice(int(bounds[i]), int(bounds[i + 1]))
        weights = torch.exp2(lse[of_query] - lse[of_query].amax(0))  # NaN where all are -inf
        total = weights.sum(0)
        if sinks is not None:
            total = total + torch.exp2(sinks.tensor / math.log(2.0) - lse[of_query].amax(0))
        mixed = (torch.nan_to_num(weights / total)[..., None] * parts[of_query].nan_to_num()).sum(0)
        out[target] = mixed.to(out.dtype)


@triton.jit
def _merge_parts(
    part_ptr,
    lse_ptr,
    bounds_ptr,
    token_ptr,
    out_ptr,
    sink_ptr,
    heads,
    out_stride_t,
    out_stride_h,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    query = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_D)
    is_head = head < heads
    inside = is_head[:, None] & (d < HEAD_DIM)[None, :]
    token = tl.load(token_ptr + query).to(tl.int64)
    acc = tl.zeros((BLOCK_HEADS, BLOCK_D), tl.float32)
    highest = tl.full((BLOCK_HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    zero = tl.full((), 0, tl.int64)  # counters of loops are whole numbers of Python to the interpreter
    for part in range(tl.load(bounds_ptr + query), tl.load(bounds_ptr + query + 1)):
        at = (part + zero) * heads + head
        lse = tl.load(lse_ptr + at, mask=is_head, other=-float("inf"))
        values = tl.load(part_ptr + at[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
        values = tl.where((lse > -float("inf"))[:, None], values, 0.0)
        higher = tl.maximum(highest, lse)
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(lse - shift)
        shrink = tl.exp2(highest - shift)
        acc = acc * shrink[:, None] + values * weight[:, None]
        total = total * shrink + weight
        highest = higher
    if HAS_SINKS:
        total += tl.exp2(tl.load(sink_ptr + head, mask=is_head, other=0.0) * LOG2_E - highest)
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = token * out_stride_t + head[:, None] * out_stride_h + d[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
