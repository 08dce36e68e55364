"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * (weight + offset), with the residual sum x += delta before it on request.

Zhang and Sennrich, arXiv 1910.07467. One program a row (or a block of a row, for queries and keys); computed in
float32, rounded once; the sum is rounded to the row's type first, as the residual stream keeps it. The references are
`rms_norm_torch` and `qk_norm_torch` of kernels/rms_norm.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from niwaki.kernels.triton.launch import FLOATS, block_of, check, check_width, launch, warps_for


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, offset: float = 0.0) -> None:
    """out[t] = norm(x[t]) * (weight + offset); x, out [tokens, width], weight [width], one dtype. `out` may be `x`."""
    _check_rows("rms_norm", x, weight, out)
    _run(x, x, weight, eps, out, offset, has_delta=False)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, offset: float = 0.0
) -> None:
    """x += delta, then out = norm(x) * (weight + offset). Shapes as in `rms_norm`."""
    _check_rows("add_rms_norm", x, weight, out)
    check("add_rms_norm", "delta", delta, x.shape, x.dtype, x.device)
    _run(x, delta, weight, eps, out, offset, has_delta=True)


def qk_norm(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_width: int,
    k_width: int,
    eps: float,
    offset: float = 0.0,
) -> None:
    """In place, blocks of len(q_weight) columns of the queries and of len(k_weight) columns of the keys.

    qkv [tokens, q_width + 2 x k_width].
    """
    check("qk_norm", "qkv", qkv, (None, q_width + 2 * k_width), FLOATS, qkv.device)
    for name, weight, width in (("q_weight", q_weight, q_width), ("k_weight", k_weight, k_width)):
        check("qk_norm", name, weight, (None,), qkv.dtype, qkv.device)
        if width % len(weight):
            raise ValueError(f"qk_norm: {name} of {len(weight)} does not divide a width of {width}")
        check_width("qk_norm", len(weight))
    q_blocks, k_blocks = q_width // len(q_weight), k_width // len(k_weight)
    block = block_of(max(len(q_weight), len(k_weight)))
    launch(
        _qk_norm,
        (len(qkv), q_blocks + k_blocks),
        qkv, q_weight, k_weight, eps, offset, q_blocks, q_width, len(q_weight), len(k_weight), qkv.stride(0),
        BLOCK=block,
        num_warps=warps_for(block),
    )  # fmt: skip


def _check_rows(kernel: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    check(kernel, "x", x, out.shape, FLOATS, x.device)
    check(kernel, "out", out, (None, None), x.dtype, x.device)
    check(kernel, "weight", weight, (x.shape[1],), x.dtype, x.device)
    check_width(kernel, x.shape[1])


def _run(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    offset: float,
    *,
    has_delta: bool,
) -> None:
    block = block_of(x.shape[1])
    launch(
        _rms_norm,
        (len(x),),
        x, delta, weight, out, eps, offset, x.shape[1], x.stride(0), delta.stride(0), out.stride(0),
        BLOCK=block,
        HAS_DELTA=has_delta,
        num_warps=warps_for(block),
    )  # fmt: skip


@triton.jit
def _rms_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    eps,
    offset,
    width,
    x_stride,
    delta_stride,
    out_stride,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_stride + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out_ptr + row * out_stride + at, (wide * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _qk_norm(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    offset,
    q_blocks,
    q_width,
    q_block_width,
    k_block_width,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    is_query = block < q_blocks
    width = tl.where(is_query, q_block_width, k_block_width)
    first = tl.where(is_query, block * q_block_width, q_width + (block - q_blocks) * k_block_width)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(qkv_ptr + row * stride + first + at, mask=inside, other=0.0).to(tl.float32)
    q_weight = tl.load(q_weight_ptr + at, mask=inside & is_query, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + at, mask=inside & (block >= q_blocks), other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    turned = x * scale * (q_weight + k_weight + offset)
    tl.store(qkv_ptr + row * stride + first + at, turned.to(qkv_ptr.dtype.element_ty), mask=inside)
