"""The logits of a step, bfloat16: as float32, and where they are highest without that.

By the caller's thread alone while they are few: torch divides 32 rows of 8,192 among its threads, and to wake one of
these behind a step takes longer than the whole conversion (see crew.py).
"""

from __future__ import annotations

import numpy as np
import torch

from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import load
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.ops import array_of
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int64s

MOST = 2_000_000  # numbers; of more torch's threads pay
INFINITY = np.uint16(0x7F80)  # of the positive
END = np.uint16(0x8000)  # of the bits above these all are of negative numbers
MINUS_INFINITY = np.uint16(0xFF80)  # of the bits above these all are NaN


def float_logits(logits: torch.Tensor) -> torch.Tensor:
    """float32 of bfloat16 [rows, vocab], contiguous, on the CPU; others as they are."""
    if logits.dtype != torch.bfloat16:
        return logits
    if logits.numel() > MOST:
        return logits.float()
    out = torch.empty(logits.shape, dtype=torch.float32)
    _convert(array_of(Operand.of(logits)).reshape(-1), out.numpy().reshape(-1))
    return out


def highest(logits: torch.Tensor) -> tuple[Array, Int64s]:
    """The logits [rows, vocab], bfloat16 or float32, on the CPU, and where each row is highest, as NumPy's argmax finds
    it. Those of bfloat16 are its bits where that was found without float32.

    As integers the bits of positive numbers are in their order, and above those of all others. So where every row's
    highest is one, and no number is a negative NaN, argmax of integers is that of numbers. 32 rows of 8,192 take 18 us
    this way and 48 by way of float32, out of cold caches 32 and 98 (one core of Zen 4, 24 November 2026).
    """
    if logits.dtype == torch.bfloat16:
        bits = array_of(Operand.of(logits))
        best: Int64s = bits.view(np.int16).argmax(axis=1)
        if _are_positive(bits, best, END) and bits.max(initial=np.uint16(0)) <= MINUS_INFINITY:
            return bits, best
    values = float_logits(logits).numpy()
    return values, values.argmax(axis=1)


def finite_highest(logits: torch.Tensor) -> Int64s | None:
    """Where each row is highest, as `highest` finds it; None where one of these logits is not finite."""
    if logits.dtype == torch.bfloat16:
        bits = array_of(Operand.of(logits))
        best: Int64s = bits.view(np.int16).argmax(axis=1)
        if _are_positive(bits, best, INFINITY) and bits.max(initial=np.uint16(0)) <= MINUS_INFINITY:
            return best
    values, best = highest(logits)
    tops = values[np.arange(len(best)), best]
    is_finite = tops < INFINITY if values.dtype == np.uint16 else np.isfinite(tops)
    return best if is_finite.all() else None


@jit()
def _are_positive(bits: Array, best: Int64s, end: np.uint16) -> bool:
    """And below `end`."""
    found = True
    for row in range(best.shape[0]):
        found = found and 0 < bits[row, best[row]] < end
    return found


@jit()
def _convert(x: Array, out: Float32s) -> None:
    for i in range(x.shape[0]):
        out[i] = load(x[i])
