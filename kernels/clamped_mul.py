"""The gate of a GPT-OSS expert: out = (up + 1) x g / (1 + e^(-alpha g)), with the gate g cut off above `limit`, and up
at -limit and limit. (OpenAI's gpt-oss model card, arXiv 2508.10925; alpha is 1.702, limit 7.)"""

from __future__ import annotations

import numpy as np
import torch

from niwaki.kernels.checks import check_arrays
from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import exp_f32, load, store
from niwaki.kernels.operand import Array


def clamped_mul(gate_up: Array, out: Array, alpha: float, limit: float) -> None:
    """gate_up [tokens, 2 x width], gates first; out [tokens, width]; one dtype, rows contiguous."""
    check_arrays("clamped_mul", out.dtype, gate_up=(gate_up, (out.shape[0], 2 * out.shape[1])), out=(out, out.shape))
    _clamped_mul(gate_up, out, np.float32(alpha), np.float32(limit))


def clamped_mul_torch(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The reference of `clamped_mul`, on any device."""
    gate, up = gate_up.float().chunk(2, -1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)).to(gate_up.dtype)


@jit()
def _clamped_mul(gate_up: Array, out: Array, alpha: np.float32, limit: np.float32) -> None:
    width = out.shape[1]
    one = np.float32(1.0)
    for t in range(out.shape[0]):
        for i in range(width):
            gate = load(gate_up[t, i])
            up = load(gate_up[t, width + i])
            gate = limit if gate > limit else gate
            up = limit if up > limit else up
            up = -limit if up < -limit else up
            out[t, i] = store(gate / (one + exp_f32(-alpha * gate)) * (up + one), gate_up[0, 0])
