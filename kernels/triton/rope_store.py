"""Turn the new queries and keys by their positions, and write keys and values to their slots: one pass over the fused
projection.

Rotary embedding (Su et al., arXiv 2104.09864) in the halves convention: with c, s = cos, sin of the position,
(a, b) -> (a c - b s, b c + a s) for channel i and channel i + rotated / 2. One program a token and head. A pool in
FP8 (e4m3, up to 448) holds key / k_scale and value / v_scale, a scale for each kv head.

The reference is `rope_store_kv_torch` of kernels/store_kv.py, with `quantized_torch` here for FP8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from niwaki.kernels.triton.launch import CACHED, FLOATS, block_of, check, launch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def rope_store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Turn the queries in `qkv` in place; store the turned keys, and the values, at `slots`.

    qkv [tokens, (heads + 2 kv_heads) x head_dim]. cos, sin float32 [positions, rotated / 2]. k_pool, v_pool
    [pages, page_size, kv_heads, head_dim], contiguous, of qkv's dtype, or in FP8 with scales float32 [kv_heads].
    positions, slots int32 [tokens], checked where the plan was made; a token with a slot below 0 is left alone.
    """
    name, device = "rope_store_kv", qkv.device
    check(name, "qkv", qkv, (None, None), FLOATS, device)
    check(name, "k_pool", k_pool, (None,) * 4, CACHED, device, contiguous=True)
    check(name, "v_pool", v_pool, k_pool.shape, k_pool.dtype, device, contiguous=True)
    kv_heads, head_dim = k_pool.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if qkv.shape[1] % head_dim or heads < 1:
        raise ValueError(f"{name}: qkv of width {qkv.shape[1]} does not fit {kv_heads} kv heads of {head_dim}")
    check(name, "cos", cos, (None, None), torch.float32, device, contiguous=True)
    check(name, "sin", sin, cos.shape, torch.float32, device, contiguous=True)
    half = cos.shape[1]
    if 2 * half > head_dim:
        raise ValueError(f"{name}: tables for {2 * half} channels are wider than heads of {head_dim}")
    for label, index in (("positions", positions), ("slots", slots)):
        check(name, label, index, (len(qkv),), torch.int32, device, contiguous=True)
    k_scale, v_scale = check_scales(name, k_pool, qkv.dtype, k_scale, v_scale)
    launch(
        _rope_store_kv,
        (len(qkv), heads + 2 * kv_heads),
        qkv, cos, sin, positions, slots, k_pool, v_pool, k_scale, v_scale, heads, kv_heads, half, qkv.stride(0),
        HEAD_DIM=head_dim,
        BLOCK_H=block_of(half),
        BLOCK_D=block_of(head_dim),
        IS_FP8=k_pool.dtype == FP8,
        num_warps=1,
    )  # fmt: skip


def check_scales(
    kernel: str,
    k_pool: torch.Tensor,
    dtype: torch.dtype,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of an FP8 pool; for another pool, which has the dtype of the queries, something to pass instead."""
    if k_pool.dtype == FP8:
        if k_scale is None or v_scale is None:
            raise ValueError(f"{kernel}: a pool in FP8 needs k_scale and v_scale")
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            check(kernel, name, scale, (k_pool.shape[2],), torch.float32, k_pool.device, contiguous=True)
        return k_scale, v_scale
    if k_pool.dtype != dtype:
        raise TypeError(f"{kernel}: a pool of {k_pool.dtype} does not fit queries of {dtype}; FP8 does, or the same")
    if k_scale is not None or v_scale is not None:
        raise ValueError(f"{kernel}: scales belong to a pool in FP8, this one is {k_pool.dtype}")
    return k_pool, k_pool


def quantized_torch(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [tokens, kv_heads, head_dim] / scale [kv_heads] in FP8, values beyond its range at its ends."""
    return (x.float() / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)


@triton.jit
def _rope_store_kv(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scale_ptr,
    v_scale_ptr,
    heads,
    kv_heads,
    half,
    stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        row_ptr = qkv_ptr + token * stride + head * HEAD_DIM
        if head < heads + kv_heads:
            at = tl.arange(0, BLOCK_H)
            inside = at < half
            position = tl.load(position_ptr + token).to(tl.int64)
            c = tl.load(cos_ptr + position * half + at, mask=inside, other=1.0)
            s = tl.load(sin_ptr + position * half + at, mask=inside, other=0.0)
            first = tl.load(row_ptr + at, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(row_ptr + half + at, mask=inside, other=0.0).to(tl.float32)
            turned_first = first * c - second * s
            turned_second = second * c + first * s
            if head < heads:
                tl.store(row_ptr + at, turned_first.to(qkv_ptr.dtype.element_ty), mask=inside)
                tl.store(row_ptr + half + at, turned_second.to(qkv_ptr.dtype.element_ty), mask=inside)
            else:
                kv_head = head - heads
                key_ptr = k_pool_ptr + (slot * kv_heads + kv_head) * HEAD_DIM
                d = tl.arange(0, BLOCK_D)
                is_rest = (d >= 2 * half) & (d < HEAD_DIM)
                rest = tl.load(row_ptr + d, mask=is_rest, other=0.0).to(tl.float32)
                if IS_FP8:
                    scale = tl.load(k_scale_ptr + kv_head)
                    turned_first = _clamped(turned_first / scale)
                    turned_second = _clamped(turned_second / scale)
                    rest = _clamped(rest / scale)
                tl.store(key_ptr + at, turned_first.to(k_pool_ptr.dtype.element_ty), mask=inside)
                tl.store(key_ptr + half + at, turned_second.to(k_pool_ptr.dtype.element_ty), mask=inside)
                tl.store(key_ptr + d, rest.to(k_pool_ptr.dtype.element_ty), mask=is_rest)
        else:
            kv_head = head - heads - kv_heads
            d = tl.arange(0, BLOCK_D)
            value = tl.load(row_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            if IS_FP8:
                value = _clamped(value / tl.load(v_scale_ptr + kv_head))
            value_ptr = v_pool_ptr + (slot * kv_heads + kv_head) * HEAD_DIM
            tl.store(value_ptr + d, value.to(v_pool_ptr.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _clamped(x):
    return tl.minimum(tl.maximum(x, -448.0), 448.0)
