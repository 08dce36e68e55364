"""Scalars inside Numba kernels: bfloat16 held as its 16 bits, and an exponential that vectorises.

Every kernel computes in float32. An array is either float32, or uint16 holding bfloat16; `load` and `store` hide
which, at compile time.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from niwaki.kernels.jit import REDUCTION, jit
from niwaki.kernels.operand import Array

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)  # ln 2 in two parts, so that x - n ln 2 keeps all its bits
LN2_LOW = np.float32(-2.12194440e-4)


def load(value: np.float32 | np.uint16) -> np.float32:
    """One element as float32. (This body is for plain Python; kernels get the overload below.)"""
    if isinstance(value, np.uint16):
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return value


# Numba compares the signatures of an overload and of what it returns, annotations included: hence no types here.
@overload(load)
def _load(value):  # type: ignore[no-untyped-def]
    if isinstance(value, types.Integer):
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


def store(value: np.float32, like: np.float32 | np.uint16) -> np.float32 | np.uint16:
    """A float32 as an element of the kind of `like`: bfloat16 rounds to nearest even, NaN stays NaN."""
    if isinstance(like, np.uint16):
        return _round_to_bfloat16(value)
    return value


@overload(store)
def _store(value, like):  # type: ignore[no-untyped-def]
    if isinstance(like, types.Integer):
        return lambda value, like: _round_to_bfloat16(value)
    return lambda value, like: value


@jit()
def _round_to_bfloat16(value: np.float32) -> np.uint16:
    bits = np.float32(value).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding a NaN whose low bits are all ones would carry into the sign and give a zero.
    return np.uint16(rounded if value == value else np.uint32(0x7FC0))


@jit()
def exp_f32(x: np.float32) -> np.float32:
    """e**x in float32, relative error below 5e-7 on [-87, 88], clamped outside; no call, so loops over it vectorise.

    Range reduction to |r| <= ln 2 / 2 and a polynomial of degree 6 (Taylor coefficients are near enough to the best at
    this width); the power of two is put together in the exponent's bits.
    """
    clamped = np.float32(88.0) if x > np.float32(88.0) else x
    clamped = np.float32(-87.0) if clamped < np.float32(-87.0) else clamped
    n = np.floor(clamped * LOG2_E + np.float32(0.5))
    r = clamped - n * LN2_HIGH - n * LN2_LOW
    p = np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    result: np.float32 = p * power
    return result


@jit(fastmath=REDUCTION)
def dot(a: Array, b: Array) -> np.float32:
    """Sum of products over the length of `a`; `b`, at least as long, may be bfloat16."""
    result = np.float32(0.0)
    for i in range(a.shape[0]):
        result += a[i] * load(b[i])
    return result
