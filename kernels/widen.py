"""Numbers of 4 and 8 bits as bfloat16, 32 at a time, inside Numba kernels (see simd.py for the vectors)."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from niwaki.kernels.operand import Array
from niwaki.kernels.simd import INTS, LANES
from niwaki.kernels.simd_formats import of_e4m3, whole_numbers
from niwaki.kernels.simd_memory import ask_for, element_pointer

AHEAD = 8192  # bytes between what is read and what memory is asked for
BYTE, LONG = ir.IntType(8), ir.IntType(64)
BYTES = ir.VectorType(ir.IntType(8), LANES)
WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)


@intrinsic
def _widen(typing, codes, step, zeros, zero, target, place):
    """target[place : place + 1024], bfloat16, = step `step` of the codes: 32 vectors of 32 numbers.

    codes, of 1,024 numbers a step: int8, or e4m3 as uint8, of each vector the sixteen even elements before the odd
    ones; or numbers of 4 bits, one of each of four vectors: in uint16 whole ones, less the zero of their output; in
    int16 e2m1, times 2^(zero - 127), a zero of 2 to 252. zeros[zero + i] is for elements 2i and 2i + 1 of the first
    sixteen vectors, zeros[zero + 16 + i] for those of the others.
    """
    kind = codes.dtype
    size, vectors = (256, _of_words) if kind.bitwidth == 16 else (1024, _of_bytes)

    def generate(context, builder, signature, args):
        step = builder.mul(context.cast(builder, args[1], signature.args[1], types.intp), LONG(size))
        source = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [step])
        bytes_ = builder.bitcast(source, BYTE.as_pointer())
        for line in range(0, size * kind.bitwidth // 8, 64):
            ask_for(builder, builder.gep(bytes_, [LONG(AHEAD + line)]))
        into = builder.bitcast(element_pointer(context, builder, signature, args, 4), INTS.as_pointer())
        first_zero = element_pointer(context, builder, signature, args, 2)
        for number, words in enumerate(vectors(builder, bytes_, kind.signed, first_zero)):
            builder.store(words, builder.gep(into, [LONG(number)]), align=2)
        return context.get_dummy_value()

    return types.void(codes, step, zeros, zero, target, place), generate


def _of_bytes(builder, source, is_whole, first_zero):
    source = builder.bitcast(source, BYTES.as_pointer())
    for vector in range(32):
        places = (builder.gep(source, [LONG(2 * vector + half)]) for half in range(2))
        pair = (builder.sext(builder.load(place, align=1), INTS) for place in places)
        even, odd = ((whole_numbers if is_whole else of_e4m3)(builder, each) for each in pair)
        # Numbers of so few bits end in zeros: nothing is to be rounded.
        low = builder.lshr(builder.bitcast(even, INTS), ir.Constant(INTS, [16] * LANES))
        yield builder.or_(low, builder.and_(builder.bitcast(odd, INTS), ir.Constant(INTS, [0xFFFF0000] * LANES)))


def _of_words(builder, source, is_e2m1, first_zero):
    meant = _times_power if is_e2m1 else _less_zero
    source, first_zero = (builder.bitcast(each, of.as_pointer()) for each, of in ((source, WORDS), (first_zero, BYTES)))
    for half in range(2):
        zero = builder.zext(builder.load(builder.gep(first_zero, [LONG(half)]), align=1), INTS)
        zero = builder.bitcast(builder.or_(zero, builder.shl(zero, ir.Constant(INTS, [16] * LANES))), WORDS)
        for vector in range(16 * half, 16 * half + 16):
            words = builder.load(builder.gep(source, [LONG(vector // 4)]), align=2)
            code = builder.and_(builder.lshr(words, _all(vector % 4 * 4)), _all(15))
            yield builder.bitcast(meant(builder, code, zero), INTS)


def _less_zero(builder, code, zero):
    number = builder.sub(code, zero)
    if llvm.get_host_cpu_features().get("avx512bw"):
        kind = ir.FunctionType(WORDS, [WORDS, WORDS])
        look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
        return builder.call(look_up, [ir.Constant(WORDS, NUMBERS), number])
    sixteen = ir.Constant(INTS, [16] * LANES)
    pair = builder.bitcast(number, INTS)
    low = whole_numbers(builder, builder.ashr(builder.shl(pair, sixteen), sixteen))
    high = whole_numbers(builder, builder.ashr(pair, sixteen))
    low = builder.lshr(builder.bitcast(low, INTS), sixteen)
    high = builder.and_(builder.bitcast(high, INTS), ir.Constant(INTS, [0xFFFF0000] * LANES))
    return builder.bitcast(builder.or_(low, high), WORDS)


def _times_power(builder, code, zero):
    """0, 0.5, 1, 1.5, 2, 3, 4 and 6, of which 0.5 alone has an exponent that does not stand in its code."""
    magnitude = builder.and_(code, _all(7))
    placed = builder.select(builder.icmp_unsigned("==", magnitude, _all(1)), _all(0), builder.shl(magnitude, _all(6)))
    scaled = builder.add(placed, builder.sub(builder.shl(zero, _all(7)), _all(1 << 7)))
    scaled = builder.select(builder.icmp_unsigned("==", magnitude, _all(0)), _all(0), scaled)
    return builder.or_(scaled, builder.shl(builder.and_(code, _all(8)), _all(12)))


def _all(value):
    return ir.Constant(WORDS, [value] * 2 * LANES)


# The instruction looks at five bits of each index: 0 to 15, then -16 to -1, in bfloat16.
NUMBERS = [int(bits) >> 16 for bits in np.array([*range(16), *range(-16, 0)], np.float32).view(np.uint32)]
widen = cast("Callable[[Array, int, Array, int, Array, int], None]", _widen)
