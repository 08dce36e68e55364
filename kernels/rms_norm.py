"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * (weight + offset), the residual sum first on request.

The offset is 1 in Gemma's checkpoints, which store weight - 1, and 0 in all others: added here, in float32, because a
bfloat16 sum would round away most of such a weight.

Computed in float32, rounded once. On the CPU one Numba call replaces six torch operators of 2 to 5 us each.
"""

from __future__ import annotations

import numpy as np
import torch

from niwaki.kernels.checks import check_arrays
from niwaki.kernels.jit import for_any_thread, jit
from niwaki.kernels.numeric import load, store
from niwaki.kernels.operand import Array
from niwaki.kernels.simd import LANES, add, multiply_add, splat, sum_of_lanes, times, zeros
from niwaki.kernels.simd_memory import load_pair, store_pair

PAIR = 2 * LANES  # elements that are loaded together


def rms_norm(x: Array, weight: Array, eps: float, out: Array, offset: float = 0.0) -> None:
    """out[t] = norm(x[t]) * (weight + offset); x, out [tokens, width], weight [width], one dtype, rows contiguous.

    `out` may be `x`.
    """
    check_arrays("rms_norm", out.dtype, x=(x, out.shape), weight=(weight, out.shape[1:]), out=(out, x.shape))
    rms_norm_rows(x, weight, np.float32(eps), offset, out)


def add_rms_norm(x: Array, delta: Array, weight: Array, eps: float, out: Array, offset: float = 0.0) -> None:
    """x += delta, then out = norm(x) * (weight + offset). Shapes as in `rms_norm`; x is rounded, then normalised."""
    check_arrays(
        "add_rms_norm",
        out.dtype,
        x=(x, out.shape),
        delta=(delta, out.shape),
        weight=(weight, out.shape[1:]),
        out=(out, x.shape),
    )
    _add_rms_norm(x, delta, weight, np.float32(eps), offset, out)


def qk_norm(
    qkv: Array, q_weight: Array, k_weight: Array, q_width: int, k_width: int, eps: float, offset: float = 0.0
) -> None:
    """Normalise, in place, the queries and keys of a fused projection, before they are turned.

    qkv [tokens, q_width + 2 x k_width]. Blocks of len(q_weight) columns are normalised each by itself: one head, as in
    Qwen 3, or all of them together, as in OLMo 2. Likewise the keys.
    """
    check_arrays(
        "qk_norm",
        qkv.dtype,
        qkv=(qkv, (len(qkv), q_width + 2 * k_width)),
        q_weight=(q_weight, q_weight.shape[:1]),
        k_weight=(k_weight, k_weight.shape[:1]),
    )
    if q_width % len(q_weight) or k_width % len(k_weight):
        raise ValueError(
            f"qk_norm: weights of {len(q_weight)} and {len(k_weight)} do not divide widths of {q_width} and {k_width}"
        )
    qk_norm_rows(qkv, q_weight, k_weight, q_width, k_width, np.float32(eps), offset)


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """The reference of `rms_norm`, on any device; over the last dimension."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)).to(x.dtype)


def qk_norm_torch(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_width: int,
    k_width: int,
    eps: float,
    offset: float = 0.0,
) -> None:
    """The reference of `qk_norm`, on any device."""
    for part, weight in ((qkv[:, :q_width], q_weight), (qkv[:, q_width : q_width + k_width], k_weight)):
        blocks = part.view(len(part), -1, len(weight))
        part.copy_(rms_norm_torch(blocks, weight, eps, offset).flatten(-2))


@jit()
def rms_norm_rows(x: Array, weight: Array, eps: np.float32, offset: float, out: Array) -> None:
    width = x.shape[1]
    stride = x.strides[0] // x.itemsize
    for t in range(x.shape[0]):
        squares = zeros()
        for i in range(0, width // PAIR * PAIR, PAIR):
            low, high = load_pair(x, t * stride + i)
            squares = multiply_add(high, high, multiply_add(low, low, squares))
        _scale(x, t, sum_of_lanes(squares), weight, eps, offset, out)


@jit()
def add_rms_norm_rows(x: Array, delta: Array, weight: Array, eps: np.float32, offset: float, out: Array) -> None:
    width = x.shape[1]
    whole = width // PAIR * PAIR
    stride, delta_stride = x.strides[0] // x.itemsize, delta.strides[0] // delta.itemsize
    for t in range(x.shape[0]):
        squares = zeros()
        for i in range(0, whole, PAIR):
            low, high = load_pair(x, t * stride + i)
            more, above = load_pair(delta, t * delta_stride + i)
            store_pair(x, t * stride + i, add(low, more), add(high, above))
            low, high = load_pair(x, t * stride + i)
            squares = multiply_add(high, high, multiply_add(low, low, squares))
        for i in range(whole, width):
            x[t, i] = store(load(x[t, i]) + load(delta[t, i]), weight[0])
        _scale(x, t, sum_of_lanes(squares), weight, eps, offset, out)


_add_rms_norm = for_any_thread(add_rms_norm_rows)


@jit()
def _scale(x: Array, t: int, total: np.float32, weight: Array, eps: np.float32, offset: float, out: Array) -> None:
    """Row t of `out` = x normalised; `total` has the squares but for those behind the last whole pair."""
    width = x.shape[1]
    whole = width // PAIR * PAIR
    stride, out_stride = x.strides[0] // x.itemsize, out.strides[0] // out.itemsize
    for i in range(whole, width):
        value = load(x[t, i])
        total += value * value
    scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
    by, plus = splat(scale), splat(np.float32(offset))
    for i in range(0, whole, PAIR):
        low, high = load_pair(x, t * stride + i)
        weight_low, weight_high = load_pair(weight, i)
        low = times(times(low, by), add(weight_low, plus))
        high = times(times(high, by), add(weight_high, plus))
        store_pair(out, t * out_stride + i, low, high)
    for i in range(whole, width):
        out[t, i] = store(load(x[t, i]) * scale * (load(weight[i]) + np.float32(offset)), weight[0])


@jit()
def qk_norm_rows(
    qkv: Array, q_weight: Array, k_weight: Array, q_width: int, k_width: int, eps: np.float32, offset: float
) -> None:
    for t in range(qkv.shape[0]):
        _norm_blocks(qkv[t, :q_width], q_weight, eps, offset)
        _norm_blocks(qkv[t, q_width : q_width + k_width], k_weight, eps, offset)


@jit()
def _norm_blocks(row: Array, weight: Array, eps: np.float32, offset: float) -> None:
    width = weight.shape[0]
    plus = np.float32(offset)
    for first in range(0, row.shape[0], width):
        total = np.float32(0.0)
        for i in range(first, first + width):
            value = load(row[i])
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            row[first + i] = store(load(row[first + i]) * scale * (load(weight[i]) + plus), weight[0])
