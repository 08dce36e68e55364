"""The logits of a step, bfloat16, as float32.

By the caller's thread alone while they are few: torch divides 32 rows of 8,192 among its threads, and to wake one of
these behind a step takes longer than the whole conversion (see crew.py).
"""

from __future__ import annotations

import torch

from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import load
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.ops import array_of
from niwaki.kernels.partial import Float32s

MOST = 2_000_000  # numbers; of more torch's threads pay


def float_logits(logits: torch.Tensor) -> torch.Tensor:
    """float32 of bfloat16 [rows, vocab], contiguous, on the CPU."""
    if logits.numel() > MOST:
        return logits.float()
    out = torch.empty(logits.shape, dtype=torch.float32)
    _convert(array_of(Operand.of(logits)).reshape(-1), out.numpy().reshape(-1))
    return out


@jit()
def _convert(x: Array, out: Float32s) -> None:
    for i in range(x.shape[0]):
        out[i] = load(x[i])
