"""Rotate the new queries and keys, and write the new keys and values to their slots in the paged pool.

One pass over the fused projection: in torch this is about a dozen operators, 60 us a layer for one token; here 1 us.
"""

from __future__ import annotations

import numpy as np
import torch

from niwaki.kernels.checks import check_arrays
from niwaki.kernels.jit import for_any_thread, jit
from niwaki.kernels.numeric import load, store
from niwaki.kernels.operand import Array
from niwaki.kernels.rope import rotate_torch
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd import LANES, add, minus, times
from niwaki.kernels.simd_memory import load16, load_alike, load_pair, store16, store_pair


def rope_store_kv(
    qkv: Array,
    cos: Array,
    sin: Array,
    positions: Int64s,
    slots: Int64s,
    k_pool: Array,
    v_pool: Array,
) -> None:
    """Turn the queries in `qkv` in place; store the turned keys, and the values, at `slots`.

    qkv [tokens, (heads + 2 kv_heads) x head_dim]: queries, keys, values. cos, sin float32 [positions, rotated / 2]:
    the first `rotated` <= head_dim channels of a head are turned, the others stay as they are.
    k_pool, v_pool [pages, page_size, kv_heads, head_dim], contiguous, of qkv's dtype; a v_pool of no pages: keys are
    their own values, and qkv has no columns for these. positions, slots int64 [tokens], taken from an `AttentionPlan`,
    which has checked the slots; positions are checked here against the tables.
    """
    check_arrays(
        "rope_store_kv",
        qkv.dtype,
        qkv=(qkv, qkv.shape),
        k_pool=(k_pool, (len(k_pool), *v_pool.shape[1:])),
        v_pool=(v_pool, (len(k_pool) if len(v_pool) else 0, *k_pool.shape[1:])),
    )
    check_arrays(
        "rope_store_kv",
        np.dtype(np.float32),
        cos=(cos, sin.shape),
        sin=(sin, (len(sin), min(sin.shape[1], k_pool.shape[3] // 2))),
    )
    kv_heads, head_dim = k_pool.shape[2:]
    if qkv.shape[1] % head_dim or qkv.shape[1] <= stored_heads(k_pool, v_pool) * head_dim:
        raise ValueError(f"rope_store_kv: qkv of width {qkv.shape[1]} does not fit {kv_heads} kv heads of {head_dim}")
    if not (positions.shape == slots.shape == qkv.shape[:1]):
        raise ValueError(f"rope_store_kv: {len(qkv)} tokens, but {len(positions)} positions and {len(slots)} slots")
    if not _rope_store_kv(qkv, cos, sin, positions, slots, k_pool, v_pool):
        raise ValueError(f"rope_store_kv: position {positions.max()} is beyond the {len(cos)} positions of the model")


def stored_heads(k_pool: Array | torch.Tensor, v_pool: Array | torch.Tensor) -> int:
    """Heads of a token in `qkv` that are stored: of keys, and of values where there are any."""
    return int(k_pool.shape[2]) * (2 if len(v_pool) else 1)


def store_kv_torch(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> None:
    """Write k, v [tokens, kv_heads, head_dim] at slots int64 [tokens]: the reference of the store."""
    k_pool.view(-1, *k_pool.shape[2:]).index_copy_(0, slots, k)
    if len(v_pool):
        v_pool.view(-1, *v_pool.shape[2:]).index_copy_(0, slots, v)


def rope_store_kv_torch(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """The reference of `rope_store_kv`, on any device."""
    kv_heads, head_dim = k_pool.shape[2:]
    heads = qkv.shape[1] // head_dim - stored_heads(k_pool, v_pool)
    by_head = qkv.view(len(qkv), -1, head_dim)
    q, k, v = by_head[:, :heads], by_head[:, heads : heads + kv_heads], by_head[:, heads + kv_heads :]
    q.copy_(rotate_torch(q, cos, sin, positions))
    store_kv_torch(rotate_torch(k, cos, sin, positions), v, slots, k_pool, v_pool)


@jit()
def rope_store_rows(
    qkv: Array,
    cos: Array,
    sin: Array,
    positions: Int64s,
    slots: Int64s,
    k_pool: Array,
    v_pool: Array,
) -> bool:
    """False, with nothing written, where a position lies outside the tables."""
    kv_heads, head_dim = k_pool.shape[2:]
    half = cos.shape[1]
    has_values = v_pool.shape[0] > 0
    heads = qkv.shape[1] // head_dim - (2 if has_values else 1) * kv_heads
    num_tokens = qkv.shape[0]
    for t in range(num_tokens):
        if positions[t] < 0 or positions[t] >= cos.shape[0]:
            return False
    whole = half // (2 * LANES) * (2 * LANES)
    line = LANES * 4 // qkv.itemsize  # elements that are copied at once
    lines = head_dim // line * line
    stride, turns = qkv.strides[0] // qkv.itemsize, cos.strides[0] // cos.itemsize
    keys, values = k_pool.reshape(-1), v_pool.reshape(-1)
    for t in range(num_tokens):
        c, s = cos[positions[t]], sin[positions[t]]
        angles = positions[t] * turns
        for head in range(heads):
            first = head * head_dim
            _turn(qkv, t * stride + first, qkv, t * stride + first, cos, sin, angles, whole, half)
            for i in range(first + whole, first + half):
                a, b = load(qkv[t, i]), load(qkv[t, i + half])
                qkv[t, i] = store(a * c[i - first] - b * s[i - first], qkv[0, 0])
                qkv[t, i + half] = store(b * c[i - first] + a * s[i - first], qkv[0, 0])
        for head in range(kv_heads):
            first = (heads + head) * head_dim
            place = (slots[t] * kv_heads + head) * head_dim
            _turn(qkv, t * stride + first, keys, place, cos, sin, angles, whole, half)
            for i in range(whole, half):
                a, b = load(qkv[t, first + i]), load(qkv[t, first + half + i])
                keys[place + i] = store(a * c[i] - b * s[i], qkv[0, 0])
                keys[place + half + i] = store(b * c[i] + a * s[i], qkv[0, 0])
            for i in range(2 * half, head_dim):
                keys[place + i] = qkv[t, first + i]
            if has_values:
                first += kv_heads * head_dim
                for i in range(0, lines, line):
                    store16(values, place + i, load16(qkv, t * stride + first + i))
                for i in range(lines, head_dim):
                    values[place + i] = qkv[t, first + i]
    return True


@jit()
def turn_rows(q: Array, head_dim: int, cos: Array, sin: Array, positions: Int64s, tokens: Int64s, qkv: Array) -> None:
    """qkv[tokens[r]] begins with the queries q[r], turned by that token's position. Positions are in the tables."""
    half = cos.shape[1]
    whole = half // (2 * LANES) * (2 * LANES)
    stride, width, turns = qkv.strides[0] // qkv.itemsize, q.shape[1], cos.strides[0] // cos.itemsize
    for r in range(q.shape[0]):
        token = tokens[r]
        c, s = cos[positions[token]], sin[positions[token]]
        for first in range(0, width, head_dim):
            place, target = r * width + first, token * stride + first
            _turn(q, place, qkv, target, cos, sin, positions[token] * turns, whole, half)
            for i in range(first + whole, first + half):
                a, b = load(q[r, i]), load(q[r, i + half])
                qkv[token, i] = store(a * c[i - first] - b * s[i - first], q[0, 0])
                qkv[token, i + half] = store(b * c[i - first] + a * s[i - first], q[0, 0])
            for i in range(first + 2 * half, first + head_dim):
                qkv[token, i] = q[r, i]


_rope_store_kv = for_any_thread(rope_store_rows)


@jit()
def _turn(
    source: Array, first: int, target: Array, place: int, cos: Array, sin: Array, angles: int, whole: int, half: int
) -> None:
    """Turn channels 0 to `whole` - 1 with those from `half` on. All places count elements from an array's start."""
    for i in range(0, whole, 2 * LANES):
        a, a_above = load_pair(source, first + i)
        b, b_above = load_pair(source, first + half + i)
        c, c_above = load_alike(cos, angles + i, source)
        s, s_above = load_alike(sin, angles + i, source)
        low, above = minus(times(a, c), times(b, s)), minus(times(a_above, c_above), times(b_above, s_above))
        store_pair(target, place + i, low, above)
        low, above = add(times(b, c), times(a, s)), add(times(b_above, c_above), times(a_above, s_above))
        store_pair(target, place + half + i, low, above)
