"""Put the parts of an attention together by their log-sum-exp: out = sum_i 2^(lse_i - m) out_i / sum_i 2^(lse_i - m),
m = max_i lse_i. A head's sink (kernels/rule.py) is a part more, of no value.

One program a query and head, which takes 16 parts at a time, so parts are added in an order that hangs on their number
alone; empty ones behind the others change nothing. Used by split decoding and by tree attention.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from niwaki.kernels.operand import Operand
from niwaki.kernels.triton.fold import LOG2_E
from niwaki.kernels.triton.launch import FLOATS, block_of, check, launch

PARTS_AT_ONCE = 16


def merge_parts(
    parts: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor | int,
    token: torch.Tensor,
    out: torch.Tensor,
    sinks: Operand | None = None,
) -> None:
    """out[token[i]] = the merge of parts bounds[i] to bounds[i + 1]; 0 where all of them are empty.

    parts float32 [parts, heads, head_dim], lse float32 [parts, heads] to base 2, -inf: an empty part, whose values
    count for nothing. bounds int32 [queries + 1], or how many parts each query has, one behind the other; token int32
    [queries], out [tokens, heads, head_dim].
    """
    name, device = "merge_parts", out.device
    check(name, "out", out, (None, None, None), FLOATS, device)
    _, heads, head_dim = out.shape
    check(name, "parts", parts, (None, heads, head_dim), torch.float32, device, contiguous=True)
    check(name, "lse", lse, (len(parts), heads), torch.float32, device, contiguous=True)
    check(name, "token", token, (None,), torch.int32, device, contiguous=True)
    is_even = isinstance(bounds, int)
    if isinstance(bounds, int):
        if len(parts) != bounds * len(token):
            raise ValueError(f"{name}: {len(parts)} parts are not {bounds} for each of {len(token)} queries")
    else:
        check(name, "bounds", bounds, (len(token) + 1,), torch.int32, device, contiguous=True)
    launch(
        _merge_parts,
        (len(token), heads),
        parts, lse, token if is_even else bounds, token, out, checked_sinks(name, sinks, out), heads,
        bounds if is_even else 0, out.stride(0), out.stride(1),
        IS_EVEN=is_even,
        HAS_SINKS=sinks is not None,
        HEAD_DIM=head_dim,
        BLOCK_D=block_of(head_dim),
        BLOCK_PARTS=PARTS_AT_ONCE,
        num_warps=4,
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


@triton.jit(do_not_specialize=["parts_each"])
def _merge_parts(
    part_ptr,
    lse_ptr,
    bounds_ptr,
    token_ptr,
    out_ptr,
    sink_ptr,
    heads,
    parts_each,
    out_stride_t,
    out_stride_h,
    IS_EVEN: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    query = tl.program_id(0)
    head = tl.program_id(1)
    if IS_EVEN:
        begin = query * parts_each
        end = begin + parts_each
    else:
        begin = tl.load(bounds_ptr + query)
        end = tl.load(bounds_ptr + query + 1)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    highest = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(begin, end, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        at = part.to(tl.int64) * heads + head
        lse = tl.load(lse_ptr + at, mask=part < end, other=-float("inf"))
        is_read = (lse > -float("inf"))[:, None] & (d < HEAD_DIM)[None, :]
        values = tl.load(part_ptr + at[:, None] * HEAD_DIM + d[None, :], mask=is_read, other=0.0)
        higher = tl.maximum(highest, tl.max(lse, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(lse - shift)
        shrink = tl.exp2(highest - shift)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = higher
    if HAS_SINKS:
        total += tl.exp2(tl.load(sink_ptr + head) * LOG2_E - highest)
    out = acc / tl.where(total > 0.0, total, 1.0)
    out_at = tl.load(token_ptr + query).to(tl.int64) * out_stride_t + head * out_stride_h + d
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
