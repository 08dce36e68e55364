"""Turn the new queries and keys by their positions, and write keys and values to their slots: one pass over the fused
projection.

Rotary embedding (Su et al., arXiv 2104.09864) in the halves convention: with c, s = cos, sin of the position,
(a, b) -> (a c - b s, b c + a s) for channel i and channel i + rotated / 2. One program a token and up to 16 heads. A
pool in FP8 (e4m3, up to 448) holds key / k_scale and value / v_scale, a scale for each kv head.

The reference is `rope_store_kv_torch` of kernels/store_kv.py, with `quantized_torch` here for FP8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from niwaki.kernels.store_kv import stored_heads
from niwaki.kernels.triton.launch import CACHED, FLOATS, block_of, ceil_div, check, launch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
HEADS_AT_ONCE = 16


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
    positions, slots int32 [tokens], checked where the plan was made; a token with a slot below 0 is left alone. A
    v_pool of no pages: keys are their own values, and `qkv` has no columns for these.
    """
    name, device = "rope_store_kv", qkv.device
    check(name, "qkv", qkv, (None, None), FLOATS, device)
    check(name, "k_pool", k_pool, (None,) * 4, CACHED, device, contiguous=True)
    pages = len(k_pool) if len(v_pool) else 0
    check(name, "v_pool", v_pool, (pages, *k_pool.shape[1:]), k_pool.dtype, device, contiguous=True)
    kv_heads, head_dim = k_pool.shape[2:]
    stored = stored_heads(k_pool, v_pool)
    heads = qkv.shape[1] // head_dim - stored
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
    block_heads = min(block_of(heads + stored), HEADS_AT_ONCE)
    launch(
        _rope_store_kv,
        (len(qkv), ceil_div(heads + stored, block_heads)),
        qkv, cos, sin, positions, slots, k_pool, v_pool, k_scale, v_scale, heads, kv_heads, half, qkv.stride(0),
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_H=block_of(half),
        BLOCK_D=block_of(head_dim),
        IS_FP8=k_pool.dtype == FP8,
        HAS_VALUES=len(v_pool) > 0,
        num_warps=4,
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
    BLOCK_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        is_query = head < heads
        is_key = (head >= heads) & (head < heads + kv_heads)
        is_value = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads) & HAS_VALUES
        kv_head = tl.where(is_value, head - heads - kv_heads, head - heads)
        row_ptr = qkv_ptr + token * stride + head * HEAD_DIM
        target = (slot * kv_heads + kv_head) * HEAD_DIM

        at = tl.arange(0, BLOCK_H)
        inside = at < half
        position = tl.load(position_ptr + token).to(tl.int64)
        c = tl.load(cos_ptr + position * half + at, mask=inside, other=1.0)[None, :]
        s = tl.load(sin_ptr + position * half + at, mask=inside, other=0.0)[None, :]
        is_turned = (is_query | is_key) & inside[None, :]
        first = tl.load(row_ptr + at[None, :], mask=is_turned, other=0.0).to(tl.float32)
        second = tl.load(row_ptr + half + at[None, :], mask=is_turned, other=0.0).to(tl.float32)
        turned_first = first * c - second * s
        turned_second = second * c + first * s
        in_query = is_query & inside[None, :]
        tl.store(row_ptr + at[None, :], turned_first.to(qkv_ptr.dtype.element_ty), mask=in_query)
        tl.store(row_ptr + half + at[None, :], turned_second.to(qkv_ptr.dtype.element_ty), mask=in_query)

        d = tl.arange(0, BLOCK_D)
        is_rest = is_key & ((d >= 2 * half) & (d < HEAD_DIM))[None, :]
        is_whole = is_value & (d < HEAD_DIM)[None, :]
        rest = tl.load(row_ptr + d[None, :], mask=is_rest | is_whole, other=0.0).to(tl.float32)
        if IS_FP8:
            k_scale = tl.load(k_scale_ptr + kv_head, mask=is_key, other=1.0)
            v_scale = tl.load(v_scale_ptr + kv_head, mask=is_value, other=1.0)
            turned_first = _clamped(turned_first / k_scale)
            turned_second = _clamped(turned_second / k_scale)
            rest = _clamped(rest / (k_scale * v_scale))
        in_key = is_key & inside[None, :]
        key_ptr = k_pool_ptr + target
        tl.store(key_ptr + at[None, :], turned_first.to(k_pool_ptr.dtype.element_ty), mask=in_key)
        tl.store(key_ptr + half + at[None, :], turned_second.to(k_pool_ptr.dtype.element_ty), mask=in_key)
        tl.store(key_ptr + d[None, :], rest.to(k_pool_ptr.dtype.element_ty), mask=is_rest)
        tl.store(v_pool_ptr + target + d[None, :], rest.to(v_pool_ptr.dtype.element_ty), mask=is_whole)


@triton.jit
def _clamped(x):
    return tl.minimum(tl.maximum(x, -448.0), 448.0)
