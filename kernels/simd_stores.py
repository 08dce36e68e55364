"""Stores of sixteen float32 (simd.py) that do something to them on the way. Indices are not checked."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from niwaki.kernels.operand import Array
from niwaki.kernels.partial import Float32s
from niwaki.kernels.simd import (
    FLOATS,
    INTS,
    LANES,
    OF_REST_ROUGHLY,
    VECTOR,
    Vector,
    fused,
    in_all_lanes,
    power_of_two,
)
from niwaki.kernels.simd_formats import narrow
from niwaki.kernels.simd_memory import element_pointer, turned
from niwaki.kernels.vector_tiles import multiplies_pairs

ALL = ir.VectorType(ir.IntType(32), 2 * LANES)


@intrinsic
def _put_outside(typing, array, index, first, end, value):
    """array[index + i] = value for those i of 0 to 15 that are below `first`, or not below `end`; array float32."""

    def generate(context, builder, signature, args):
        pointer = builder.bitcast(element_pointer(context, builder, signature, args), FLOATS.as_pointer())
        lanes = ir.Constant(INTS, list(range(LANES)))
        first, end = (in_all_lanes(builder, context.cast(builder, args[n], types.int64, types.int32)) for n in (2, 3))
        is_inside = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, end))
        kept = builder.select(is_inside, builder.load(pointer, align=4), in_all_lanes(builder, args[4]))
        builder.store(kept, pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, index, types.int64, types.int64, types.float32), generate


@intrinsic
def _weigh_two(typing, scores, index, factor, less, weights, place, sums):
    """Word i of weights[place : place + 16] = w[i] and, in the upper half, v[i], rounded to bfloat16: powers of two, of
    a factor + less for a = scores[index : index + 16] and of b factor + less for those 256 further on, to 9e-5. Both
    arrays float32. Gives sums + w + v. Where `splits_numbers`."""

    def generate(context, builder, signature, args):
        factor, less, sums = args[2], args[3], args[6]
        first = builder.bitcast(element_pointer(context, builder, signature, args), FLOATS.as_pointer())
        second = builder.gep(first, [ir.Constant(ir.IntType(64), LANES)])
        a, b = (builder.load(each, align=4) for each in (first, second))
        powers = [power_of_two(builder, fused(builder, each, factor, less), OF_REST_ROUGHLY) for each in (a, b)]
        half = ir.Constant(INTS, [0x8000] * LANES)  # as in `store_pairs`
        low, high = (builder.add(builder.bitcast(each, INTS), half) for each in powers)
        low = builder.lshr(low, ir.Constant(INTS, [16] * LANES))
        words = builder.or_(low, builder.and_(high, ir.Constant(INTS, [0xFFFF0000] * LANES)))
        target = element_pointer(context, builder, signature, args, 4)
        builder.store(words, builder.bitcast(target, INTS.as_pointer()), align=4)
        kind = ir.FunctionType(FLOATS, [FLOATS] * 2)
        at_once = ir.InlineAsm(kind, "vaddps $2, $1, $0", "=v,v,v", side_effect=True)
        for power in powers:  # LLVM would keep all of a caller's till its end, and has not so many registers
            sums = builder.call(at_once, [sums, power])
        return sums

    return VECTOR(scores, index, factor, less, weights, place, sums), generate


@intrinsic
def _turn_pairs(typing, source, index, stride, other, target, place):
    """Words [c, r] of the tiles from target[place] on and from target[place + 256] on: numbers 2 c and 2 c + 1 of the
    32 from source[index + stride x r] on, each beside that from source[other + stride x r] on, in the upper half;
    source of bfloat16, target of 32-bit elements."""

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature, args, 4)
        into = builder.bitcast(pointer, INTS.as_pointer())
        start = context.cast(builder, args[3], signature.args[3], signature.args[1])
        a, b = (turned(context, builder, signature, [args[0], each, args[2]]) for each in (args[1], start))
        kind = ir.FunctionType(INTS, [INTS])
        up, down = (ir.InlineAsm(kind, f"vps{way}ld $$16, $1, $0", "=v,v") for way in "lr")
        lower, upper = (ir.Constant(INTS, [mask] * LANES) for mask in (0xFFFF, 0xFFFF0000))
        for row, (x, y) in enumerate(zip(a, b, strict=True)):  # spelt: LLVM would take two shuffles, which are scarce
            even = builder.or_(builder.and_(x, lower), builder.call(up, [y]))
            odd = builder.or_(builder.call(down, [x]), builder.and_(y, upper))
            for tile, value in enumerate((even, odd)):
                number = ir.Constant(ir.IntType(64), tile * LANES + row)
                builder.store(value, builder.gep(into, [number]), align=4)
        return context.get_dummy_value()

    return types.void(source, index, stride, other, target, place), generate


@intrinsic
def _store_both_bfloat16(typing, array, index, low, high):
    """array[index : index + 32] = the sixteen of low, then those of high, rounded to bfloat16 by an instruction of
    AVX512-BF16, which makes a zero of what is too small to be a normal number; array uint16. Without that instruction,
    as `store_bfloat16` rounds: what names this is compiled there too."""

    def generate(context, builder, signature, args):
        pointer = builder.bitcast(element_pointer(context, builder, signature, args), INTS.as_pointer())
        if multiplies_pairs():
            kind = ir.FunctionType(INTS, [FLOATS, FLOATS])
            words = builder.call(ir.InlineAsm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v"), args[2:])
        else:
            low, high = (narrow(builder, value) for value in args[2:])
            words = builder.bitcast(builder.shuffle_vector(low, high, ir.Constant(ALL, list(range(2 * LANES)))), INTS)
        builder.store(words, pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, index, low, high), generate


@intrinsic
def _store_rounded(typing, array, index, value):
    """array[index : index + 16] = value, as `store_both_bfloat16` rounds it."""
    halves = ir.VectorType(ir.IntType(32), LANES // 2)

    def generate(context, builder, signature, args):
        words = builder.bitcast(_in_half(builder, args[2]), halves)
        pointer = builder.bitcast(element_pointer(context, builder, signature, args), halves.as_pointer())
        builder.store(words, pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def _rounded(typing, value):
    """The value as `store_rounded` would store it."""

    def generate(context, builder, signature, args):
        wide = builder.zext(_in_half(builder, args[0]), INTS)
        return builder.bitcast(builder.shl(wide, ir.Constant(INTS, [16] * LANES)), FLOATS)

    return VECTOR(value), generate


def _in_half(builder, value):
    """Sixteen bfloat16, rounded as `_store_both_bfloat16` tells."""
    if not multiplies_pairs():
        return narrow(builder, value)
    kind = ir.FunctionType(ir.VectorType(ir.IntType(32), LANES // 2), [FLOATS])
    words = builder.call(ir.InlineAsm(kind, "vcvtneps2bf16 $1, $0", "=v,v"), [value])
    return builder.bitcast(words, ir.VectorType(ir.IntType(16), LANES))


put_outside = cast("Callable[[Array, int, int, int, np.float32], None]", _put_outside)
store_both_bfloat16 = cast("Callable[[Array, int, Vector, Vector], None]", _store_both_bfloat16)
rounded = cast("Callable[[Vector], Vector]", _rounded)
store_rounded = cast("Callable[[Array, int, Vector], None]", _store_rounded)
weigh_two = cast("Callable[[Float32s, int, Vector, Vector, Float32s, int, Vector], Vector]", _weigh_two)
turn_pairs = cast("Callable[[Array, int, int, int, Array, int], None]", _turn_pairs)
