"""Sixteen float32 (simd.py) out of bfloat16 or bytes, and into bfloat16: values in registers, as LLVM's instructions.

For the intrinsics that bring them from memory and back (simd_memory.py), and may do something to them on the way.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# LLVM's builder and Numba's types have no annotations.

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types

from niwaki.kernels.simd import FLOATS, INTS, LANES
from niwaki.kernels.vector_tiles import rounds_by_instruction


def widening(kind):
    """What makes two vectors of 32 numbers of this kind, the even ones and the odd ones, of sixteen words that hold
    them side by side, and the type of those: words of 32 bits, of bytes 16. Twice None, where they are float32."""
    if isinstance(kind, types.Float):
        return None, None
    if kind.bitwidth == 16:
        return _widen, INTS
    return partial(_widen_bytes, whole_numbers if kind.signed else of_e4m3), ir.VectorType(ir.IntType(16), LANES)


def whole_numbers(builder, words):
    """Sixteen 32-bit words as float32."""
    return builder.sitofp(words, FLOATS)


def of_e4m3(builder, words):
    """Sixteen e4m3 (OCP, "8-bit floating point specification", 2023; its NaN is read as 480) that were widened to words
    as signed bytes. Exponents of float32 are larger by 120: the bits, put in place, are the number times 2**-120."""
    placed = builder.shl(words, ir.Constant(INTS, [20] * LANES))
    bits = builder.and_(placed, ir.Constant(INTS, [0x87F00000] * LANES))
    return builder.fmul(builder.bitcast(bits, FLOATS), ir.Constant(FLOATS, [2.0**120] * LANES))


def narrow(builder, value):
    """Sixteen bfloat16, rounded."""
    halves = ir.VectorType(ir.IntType(16), LANES)
    if rounds_by_instruction():
        kind = ir.FunctionType(ir.VectorType(ir.IntType(32), LANES // 2), [FLOATS])
        return builder.bitcast(builder.call(ir.InlineAsm(kind, "vcvtneps2bf16 $1, $0", "=v,v"), [value]), halves)
    return builder.trunc(upper_half(builder, _rounded(builder, value)), halves)


def narrow_pair(builder, low, high):
    """Words of two bfloat16, rounded: `low` in their lower halves, `high` in the upper."""
    if rounds_by_instruction():
        spelt = ir.InlineAsm(ir.FunctionType(INTS, [FLOATS] * 2), "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v")
        both = builder.bitcast(builder.call(spelt, [low, high]), ir.VectorType(ir.IntType(16), 2 * LANES))
        order = [lane // 2 + lane % 2 * LANES for lane in range(2 * LANES)]
        between = builder.shuffle_vector(both, both, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order))
        return builder.bitcast(between, INTS)
    upper = builder.and_(_rounded(builder, high), ir.Constant(INTS, [0xFFFF0000] * LANES))
    return builder.or_(upper_half(builder, _rounded(builder, low)), upper)


def upper_half(builder, bits):
    """Of each 32-bit word, as one."""
    return builder.lshr(bits, ir.Constant(INTS, [16] * LANES))


def _widen(builder, words):
    """Of 32 bfloat16 in 16 words, the even ones and the odd ones: bfloat16 bits are the upper half of float32's."""
    even = builder.shl(words, ir.Constant(INTS, [16] * LANES))
    odd = builder.and_(words, ir.Constant(INTS, [0xFFFF0000] * LANES))
    return [builder.bitcast(each, FLOATS) for each in (even, odd)]


def _widen_bytes(of_byte, builder, words):
    """Of 32 bytes in 16 words, the even ones and the odd ones."""
    wide = builder.sext(words, INTS)
    low = builder.shl(wide, ir.Constant(INTS, [24] * LANES))
    pair = (builder.ashr(low, ir.Constant(INTS, [24] * LANES)), builder.ashr(wide, ir.Constant(INTS, [8] * LANES)))
    return [of_byte(builder, each) for each in pair]


def _rounded(builder, value):
    """Bits whose upper halves are the value as bfloat16, rounded to nearest even.

    NaN stays NaN: its lower half is zero, as it comes from bfloat16 or from the processor itself.
    """
    bits = builder.bitcast(value, INTS)
    last = builder.and_(upper_half(builder, bits), ir.Constant(INTS, [1] * LANES))
    return builder.add(builder.add(bits, ir.Constant(INTS, [0x7FFF] * LANES)), last)
