"""Sixteen float32 at once, inside Numba kernels: values that LLVM keeps in registers, and loads that widen bfloat16.

LLVM's own vectoriser prefers half of a 512-bit register, and sums each product of two rows by itself; these kernels
hold eight sums at a time. Nothing here names a processor: where registers are shorter, LLVM splits the vectors.

    total = zeros()
    for d in range(0, head_dim, LANES):
        total = multiply_add(load16(keys, at + d, head_dim - d), load16(query, d, head_dim - d), total)
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from niwaki.kernels.operand import Array

LANES = 16

FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)
BITS = ir.VectorType(ir.IntType(1), LANES)


class Vector(types.Type):
    """The Numba type of sixteen float32."""

    def __init__(self) -> None:
        super().__init__("Vector16")


VECTOR = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, FLOATS)


@intrinsic
def _zeros(typing):
    """Sixteen zeros."""
    return VECTOR(), lambda context, builder, signature, args: ir.Constant(FLOATS, None)


@intrinsic
def _splat(typing, value):
    """The value in every lane."""

    def generate(context, builder, signature, args):
        return _in_all_lanes(builder, context.cast(builder, args[0], signature.args[0], types.float32))

    return VECTOR(value), generate


@intrinsic
def _multiply_add(typing, a, b, c):
    """a b + c in every lane."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.v16f32"), args)

    return VECTOR(a, b, c), generate


@intrinsic
def _load16(typing, array, index, left):
    """array[index : index + 16] as float32; from lane `left` on zeros, and that memory is not touched.

    array: float32, or bfloat16 as uint16, of one dimension and contiguous.
    """
    is_half = isinstance(array.dtype, types.Integer)
    lanes = HALVES if is_half else FLOATS
    name = "v16i16" if is_half else "v16f32"

    def generate(context, builder, signature, args):
        vector = builder.bitcast(_element(context, builder, signature, args), lanes.as_pointer())
        align = 2 if is_half else 4
        loaded = cgutils.alloca_once(builder, lanes)
        left = context.cast(builder, args[2], signature.args[2], types.int32)
        is_whole = builder.icmp_signed(">=", left, ir.Constant(ir.IntType(32), LANES))
        with builder.if_else(is_whole, likely=True) as (whole, part):
            with whole:
                builder.store(builder.load(vector, align=align), loaded)
            with part:
                numbers = ir.Constant(INTS, list(range(LANES)))
                mask = builder.icmp_signed("<", numbers, _in_all_lanes(builder, left))
                kind = ir.FunctionType(lanes, [lanes.as_pointer(), ir.IntType(32), BITS, lanes])
                read = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.{name}.p0")
                zero = ir.Constant(lanes, None)
                builder.store(builder.call(read, [vector, ir.Constant(ir.IntType(32), align), mask, zero]), loaded)
        value = builder.load(loaded)
        return _widen(builder, value) if is_half else value

    return VECTOR(array, index, left), generate


@intrinsic
def _store16(typing, array, index, value):
    """array[index : index + 16] = value; array float32, of one dimension, contiguous and long enough."""

    def generate(context, builder, signature, args):
        pointer = _element(context, builder, signature, args)
        builder.store(args[2], builder.bitcast(pointer, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def _sum_four(typing, array, index, a, b, c, d):
    """array[index : index + 4] = the sums of the lanes of a, b, c and d; array float32."""

    def generate(context, builder, signature, args):
        _, _, a, b, c, d = args
        quarters = _fold(builder, _fold(builder, a, b, 8), _fold(builder, c, d, 8), 4)
        pairs = _fold(builder, quarters, quarters, 2)
        sums = _fold(builder, pairs, pairs, 1)
        four = builder.shuffle_vector(sums, sums, ir.Constant(ir.VectorType(ir.IntType(32), 4), [0, 1, 2, 3]))
        pointer = _element(context, builder, signature, args)
        builder.store(four, builder.bitcast(pointer, four.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, index, a, b, c, d), generate


@intrinsic
def _prefetch(typing, array, index):
    """Ask for the cache line of array[index], which need not exist."""

    def generate(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.bitcast(_element(context, builder, signature, args), byte)
        builder.call(ask, [pointer, *(ir.Constant(number, flag) for flag in (0, 3, 1))])  # read, keep, data
        return context.get_dummy_value()

    return types.void(array, index), generate


def _element(context, builder, signature, args):
    """Pointer to element args[1] of array args[0]."""
    array = signature.args[0]
    data = context.make_array(array)(context, builder, args[0]).data
    index = context.cast(builder, args[1], signature.args[1], types.intp)
    return builder.gep(data, [index])


def _in_all_lanes(builder, value):
    vector = ir.VectorType(value.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def _widen(builder, halves):
    """bfloat16 bits are the upper half of float32's."""
    wide = builder.zext(halves, INTS)
    return builder.bitcast(builder.shl(wide, ir.Constant(INTS, [16] * LANES)), FLOATS)


def _fold(builder, a, b, width):
    """Add the second half of each run of 2 x width lanes to the first: of a, then of b."""
    firsts = [lane for lane in range(2 * LANES) if lane // width % 2 == 0]
    picked = [
        builder.shuffle_vector(a, b, ir.Constant(INTS, [lane + offset for lane in firsts])) for offset in (0, width)
    ]
    return builder.fadd(*picked, flags=("reassoc", "contract"))


zeros = cast("Callable[[], Vector]", _zeros)
splat = cast("Callable[[np.float32], Vector]", _splat)
multiply_add = cast("Callable[[Vector, Vector, Vector], Vector]", _multiply_add)
load16 = cast("Callable[[Array, int, int], Vector]", _load16)
store16 = cast("Callable[[Array, int, Vector], None]", _store16)
sum_four = cast("Callable[[Array, int, Vector, Vector, Vector, Vector], None]", _sum_four)
prefetch = cast("Callable[[Array, int], None]", _prefetch)
