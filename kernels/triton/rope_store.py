"""Turn the new queries and keys by their positions, and write keys and values to their slots: one pass over the fused
projection.

Rotary embedding (Su et al., arXiv 2104.09864) in the halves convention: with c, s = cos, sin of the position,
(a, b) -> (a c - b s, b c + a s) for channel i and channel i + rotated / 2. One program a token and up to 16 heads. Of a
pool of 8 bits (kernels/small_kv.py) it finds the scale of each key, turned, and of each value, and stores both.

The reference is `rope_store_kv_torch` of kernels/store_kv.py, with `narrowed_torch` of kernels/small_kv.py for 8 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from niwaki.kernels.checks import SCALE_BYTES
from niwaki.kernels.small_kv import LARGEST, is_small
from niwaki.kernels.store_kv import stored_heads
from niwaki.kernels.triton.launch import FLOATS, block_of, ceil_div, check, launch
from niwaki.kernels.triton.small import check_pool, numbers_of, scale_at, scales_of

HEADS_AT_ONCE = 16
TINY = tl.constexpr(1e-12)  # a scale of zeros


def rope_store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """Turn the queries in `qkv` in place; store the turned keys, and the values, at `slots`.

    qkv [tokens, (heads + 2 kv_heads) x head_dim]. cos, sin float32 [positions, rotated / 2]. k_pool, v_pool
    [pages, page_size, kv_heads, head_dim], contiguous, of qkv's dtype or of 8 bits. positions, slots int32 [tokens],
    checked where the plan was made; a token with a slot below 0 is left alone. A v_pool of no pages: keys are their own
    values, and `qkv` has no columns for these.
    """
    name, device = "rope_store_kv", qkv.device
    check(name, "qkv", qkv, (None, None), FLOATS, device)
    kv_heads, size = k_pool.shape[2:]
    head_dim = size - SCALE_BYTES if is_small(k_pool) else size
    check_pool(name, "k_pool", k_pool, head_dim, qkv.dtype, device)
    pages = len(k_pool) if len(v_pool) else 0
    check(name, "v_pool", v_pool, (pages, *k_pool.shape[1:]), k_pool.dtype, device, contiguous=True)
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
    block_heads = min(block_of(heads + stored), HEADS_AT_ONCE)
    launch(
        _rope_store_kv,
        (len(qkv), ceil_div(heads + stored, block_heads)),
        qkv, cos, sin, positions, slots, numbers_of(k_pool), numbers_of(v_pool), scales_of(k_pool), scales_of(v_pool),
        heads, kv_heads, half, qkv.stride(0), k_pool.stride(1),
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_H=block_of(half),
        BLOCK_D=block_of(head_dim),
        LARGEST=LARGEST.get(k_pool.dtype, 0.0),
        IS_WHOLE=k_pool.dtype == torch.int8,
        HAS_VALUES=len(v_pool) > 0,
        num_warps=4,
    )  # fmt: skip


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
    token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,  # 0: the pool is not of 8 bits
    IS_WHOLE: tl.constexpr,
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
        target = slot * token_stride + kv_head * HEAD_DIM

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
        if LARGEST > 0.0:  # the rows of a head hold nothing but what is stored
            flaw = tl.sum(turned_first * 0.0, 1) + tl.sum(turned_second * 0.0, 1) + tl.sum(rest * 0.0, 1)
            largest = tl.maximum(tl.max(tl.abs(turned_first), 1), tl.max(tl.abs(turned_second), 1))
            scale = tl.maximum(tl.maximum(largest, tl.max(tl.abs(rest), 1)), TINY) / LARGEST
            scale = (scale + flaw)[:, None]  # NaN where a number is none
            turned_first, turned_second, rest = turned_first / scale, turned_second / scale, rest / scale
            if IS_WHOLE:
                turned_first, turned_second = tl.floor(turned_first + 0.5), tl.floor(turned_second + 0.5)
                rest = tl.floor(rest + 0.5)
            scale_target = slot * (token_stride // 4) + scale_at(kv_heads, kv_head, HEAD_DIM)
            tl.store(k_scale_ptr + scale_target, scale, mask=is_key)
            tl.store(v_scale_ptr + scale_target, scale, mask=is_value)
        in_key = is_key & inside[None, :]
        key_ptr = k_pool_ptr + target
        tl.store(key_ptr + at[None, :], turned_first.to(k_pool_ptr.dtype.element_ty), mask=in_key)
        tl.store(key_ptr + half + at[None, :], turned_second.to(k_pool_ptr.dtype.element_ty), mask=in_key)
        tl.store(key_ptr + d[None, :], rest.to(k_pool_ptr.dtype.element_ty), mask=is_rest)
        tl.store(v_pool_ptr + target + d[None, :], rest.to(v_pool_ptr.dtype.element_ty), mask=is_whole)
