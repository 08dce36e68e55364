"""Numbers of 4 and 8 bits as bfloat16, 32 at a time, inside Numba kernels (see simd.py for the vectors)."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from niwaki.kernels.operand import Array
from niwaki.kernels.simd import INTS, LANES
from niwaki.kernels.simd_formats import of_e4m3, whole_numbers
from niwaki.kernels.simd_memory import ask_for, element_pointer
from niwaki.kernels.tiles import has_matrix_unit
from niwaki.kernels.vector_tiles import rounds_by_instruction

AHEAD = 8192  # bytes between what is read and what memory is asked for
BYTE, LONG = ir.IntType(8), ir.IntType(64)
BYTES = ir.VectorType(ir.IntType(8), LANES)
BYTES_OF_LINE = ir.VectorType(ir.IntType(8), 64)
WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)


@intrinsic
def _widen(typing, codes, step, zeros, zero, target, place):
    """target[place : place + 1024], bfloat16, = step `step` of the codes: 32 vectors of 32 numbers.

    codes, of 1,024 numbers a step: int8, or e4m3 as uint8, in the order of `bytes_in_order`; or numbers of 4 bits, one
    of each of four vectors: in uint16 whole ones, less the zero of their output; in int16 e2m1, times 2^(zero - 127), a
    zero of 2 to 252. zeros[zero + i] is for elements 2i and 2i + 1 of the first sixteen vectors, zeros[zero + 16 + i]
    for those of the others.
    """
    kind = codes.dtype
    size, vectors = (256, _of_words) if kind.bitwidth == 16 else (1024, _of_bytes)

    def generate(context, builder, signature, args):
        step = builder.mul(context.cast(builder, args[1], signature.args[1], types.intp), LONG(size))
        source = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [step])
        bytes_ = builder.bitcast(source, BYTE.as_pointer())
        # Bytes are asked for while vectors multiply (group_products.py): so many at once hold the core up.
        for line in range(0, size * kind.bitwidth // 8, 64) if kind.bitwidth == 16 or has_matrix_unit() else ():
            ask_for(builder, builder.gep(bytes_, [LONG(AHEAD + line)]))
        into = builder.bitcast(element_pointer(context, builder, signature, args, 4), INTS.as_pointer())
        first_zero = element_pointer(context, builder, signature, args, 2)
        for number, words in enumerate(vectors(builder, bytes_, kind.signed, first_zero)):
            builder.store(words, builder.gep(into, [LONG(number)]), align=2)
        return context.get_dummy_value()

    return types.void(codes, step, zeros, zero, target, place), generate


def bytes_in_order(codes: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits [..., 32 vectors, 32], int8 or e4m3 as uint8, as `widen` wants them, with as many elements.

    Of each vector the sixteen even elements before the odd ones. Or, where they are looked up, of each two vectors
    quarters in turn, and signs beside magnitudes, of which 0 with a sign stands for -128.
    """
    if not looks_up():
        return codes.view(*codes.shape[:-1], LANES, 2).transpose(-2, -1)
    if codes.dtype == torch.int8:
        codes = torch.where(codes < 0, -codes | -128, codes)  # -128 is its own negative
    return codes.view(*codes.shape[:-2], LANES, 2, 4, 8).transpose(-3, -2)


@cache
def looks_up() -> bool:
    """Whether numbers of 8 bits are looked up, 64 at a time, in tables of 128 (AVX512-VBMI). Not beside a matrix unit,
    where nobody timed it."""
    return rounds_by_instruction() and bool(llvm.get_host_cpu_features().get("avx512vbmi"))


def _of_bytes(builder, source, is_whole, first_zero):
    if looks_up():
        yield from _looked_up(builder, source, is_whole)
        return
    source = builder.bitcast(source, BYTES.as_pointer())
    for vector in range(32):
        places = (builder.gep(source, [LONG(2 * vector + half)]) for half in range(2))
        pair = (builder.sext(builder.load(place, align=1), INTS) for place in places)
        even, odd = ((whole_numbers if is_whole else of_e4m3)(builder, each) for each in pair)
        # Numbers of so few bits end in zeros: nothing is to be rounded.
        low = builder.lshr(builder.bitcast(even, INTS), ir.Constant(INTS, [16] * LANES))
        yield builder.or_(low, builder.and_(builder.bitcast(odd, INTS), ir.Constant(INTS, [0xFFFF0000] * LANES)))


def _looked_up(builder, source, is_whole):
    """Both bytes of a bfloat16 by the seven bits of a magnitude, the upper one for either sign."""
    numbers = _magnitudes(is_whole)
    lower, upper = (
        [ir.Constant(BYTES_OF_LINE, half.tolist()) for half in table.reshape(2, 64)] for table in _halves(numbers)
    )
    numbers[0] = 128 if is_whole else 0
    negative = [ir.Constant(BYTES_OF_LINE, half.tolist()) for half in _halves(-numbers)[1].reshape(2, 64)]
    kind = ir.FunctionType(BYTES_OF_LINE, [BYTES_OF_LINE] * 3)
    look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpermi2var.qi.512")
    source = builder.bitcast(source, BYTES_OF_LINE.as_pointer())
    for line in range(16):
        codes = builder.load(builder.gep(source, [LONG(line)]), align=1)
        low, high, high_below = (
            builder.call(look_up, [table[0], codes, table[1]]) for table in (lower, upper, negative)
        )
        high = builder.select(builder.icmp_signed("<", codes, ir.Constant(BYTES_OF_LINE, [0] * 64)), high_below, high)
        for half in range(2):
            order = [16 * quarter + 8 * half + i + of for quarter in range(4) for i in range(8) for of in (0, 64)]
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), 64), order)
            yield builder.bitcast(builder.shuffle_vector(low, high, lanes), INTS)


def _magnitudes(is_whole):
    """Float32 [128]: of each magnitude of int8, or of e4m3, whose NaN is read as 480."""
    if is_whole:
        return np.arange(128, dtype=np.float32)
    exponent, fraction = np.arange(128) // 8, np.arange(128) % 8
    numbers = np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - 7), fraction / 8 * 2.0**-6)
    return numbers.astype(np.float32)


def _halves(numbers):
    """The lower and the upper bytes of float32 as bfloat16, which holds them."""
    words = numbers.view(np.uint32) >> 16
    return (words & 255).astype(np.uint8), (words >> 8).astype(np.uint8)


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
