"""The gate of a Gemma MLP: out = gelu(gate) * up, with the tanh form of GELU (arXiv 1606.08415).

g/2 (1 + tanh(u)) with u = sqrt(2 / pi) (g + 0.044715 g^3) is g / (1 + e^-2u): one exponential, as in silu_mul.py.
"""

from __future__ import annotations

import numpy as np
import torch

from niwaki.kernels.checks import check_arrays
from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import exp_f32, load, store
from niwaki.kernels.operand import Array

TWICE_ROOT_TWO_OVER_PI = np.float32(1.5957691216057308)
CUBIC = np.float32(0.044715)


def gelu_mul(gate_up: Array, out: Array) -> None:
    """gate_up [tokens, 2 x width], gates first; out [tokens, width]; one dtype, rows contiguous."""
    check_arrays("gelu_mul", out.dtype, gate_up=(gate_up, (out.shape[0], 2 * out.shape[1])), out=(out, out.shape))
    _gelu_mul(gate_up, out)


def gelu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """The reference of `gelu_mul`, on any device."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


@jit()
def _gelu_mul(gate_up: Array, out: Array) -> None:
    width = out.shape[1]
    for t in range(out.shape[0]):
        for i in range(width):
            gate = load(gate_up[t, i])
            up = load(gate_up[t, width + i])
            twice_u = TWICE_ROOT_TWO_OVER_PI * (gate + CUBIC * gate * gate * gate)
            out[t, i] = store(gate / (np.float32(1.0) + exp_f32(-twice_u)) * up, gate_up[0, 0])
