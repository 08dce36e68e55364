"""The gate of a Llama MLP: out = silu(gate) * up, silu(g) = g / (1 + e^-g)."""

from __future__ import annotations

import numpy as np
import torch

from niwaki.kernels.checks import check_arrays
from niwaki.kernels.jit import for_any_thread, jit
from niwaki.kernels.numeric import exp_f32, load, store
from niwaki.kernels.operand import Array
from niwaki.kernels.simd import LANES, silu, times
from niwaki.kernels.simd_memory import load_pair, store_pair


def silu_mul(gate_up: Array, out: Array) -> None:
    """gate_up [tokens, 2 x width], gates first; out [tokens, width]; one dtype, rows contiguous."""
    check_arrays("silu_mul", out.dtype, gate_up=(gate_up, (out.shape[0], 2 * out.shape[1])), out=(out, out.shape))
    _silu_mul(gate_up, out)


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """The reference of `silu_mul`, on any device."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@jit()
def silu_mul_rows(gate_up: Array, out: Array) -> None:
    width = out.shape[1]
    whole = width // (2 * LANES) * (2 * LANES)
    stride, out_stride = gate_up.strides[0] // gate_up.itemsize, out.strides[0] // out.itemsize
    for t in range(out.shape[0]):
        for i in range(0, whole, 2 * LANES):
            low, high = load_pair(gate_up, t * stride + i)
            up_low, up_high = load_pair(gate_up, t * stride + width + i)
            store_pair(out, t * out_stride + i, times(silu(low), up_low), times(silu(high), up_high))
        for i in range(whole, width):
            gate = load(gate_up[t, i])
            up = load(gate_up[t, width + i])
            out[t, i] = store(gate / (np.float32(1.0) + exp_f32(-gate)) * up, gate_up[0, 0])


_silu_mul = for_any_thread(silu_mul_rows)
