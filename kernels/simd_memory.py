"""Sixteen float32 at once (simd.py) from memory and back, inside Numba kernels: loads that widen bfloat16, and stores.

Indices are not checked, or counted from the end when negative, which takes as long as the arithmetic.

Memory is read two vectors at a time. Of bfloat16 that is one load: its even elements are the lower halves of sixteen
32-bit words and its odd ones the upper, so a shift and a mask widen them. What such a pair is multiplied with or added
to must lie in the same order, which `place_in_pair` tells; for float32 it is the natural one.

    total = zeros()
    for d in range(0, head_dim, 2 * LANES):
        low, high = load_pair(keys, at + d)
        total = multiply_add(high, load16(query, d + LANES), multiply_add(low, load16(query, d), total))
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
from numba.extending import intrinsic

from niwaki.kernels.jit import jit
from niwaki.kernels.operand import Array
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd import FLOATS, INTS, LANES, VECTOR, Vector, added, fold, higher, in_all_lanes
from niwaki.kernels.simd_formats import narrow, narrow_pair, upper_half, widening

PAIR = types.UniTuple(VECTOR, 2)


@intrinsic
def _splat_at(typing, array, index):
    """array[index] in every lane."""

    def generate(context, builder, signature, args):
        return in_all_lanes(builder, builder.load(element_pointer(context, builder, signature, args)))

    return VECTOR(array, index), generate


@intrinsic
def _element_at(typing, array, index):
    """array[index]."""

    def generate(context, builder, signature, args):
        return builder.load(element_pointer(context, builder, signature, args))

    return array.dtype(array, index), generate


@intrinsic
def _float_at(typing, array, index):
    """The float32 whose first byte is array[index]; array of bytes."""

    def generate(context, builder, signature, args):
        pointer = builder.bitcast(element_pointer(context, builder, signature, args), ir.FloatType().as_pointer())
        return builder.load(pointer, align=1)

    return types.float32(array, index), generate


@intrinsic
def _put_float(typing, array, index, value):
    """The other way round."""

    def generate(context, builder, signature, args):
        pointer = builder.bitcast(element_pointer(context, builder, signature, args), ir.FloatType().as_pointer())
        builder.store(args[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, index, types.float32), generate


@intrinsic
def _load16(typing, array, index):
    """array[index : index + 16]; array float32, of one dimension, contiguous and long enough."""

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature, args)
        return builder.load(builder.bitcast(pointer, FLOATS.as_pointer()), align=4)

    return VECTOR(array, index), generate


@intrinsic
def _load_pair(typing, array, index):
    """array[index : index + 32] as two vectors: of bfloat16 and bytes the even elements and the odd ones, of float32
    the first sixteen and the others.

    array: float32, bfloat16 as uint16, int8, or e4m3 as uint8, of one dimension and contiguous.
    """
    widen, words = widening(array.dtype)

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature, args)
        if widen is not None:
            pair = widen(builder, builder.load(builder.bitcast(pointer, words.as_pointer()), align=1))
        else:
            vectors = builder.bitcast(pointer, FLOATS.as_pointer())
            second = builder.gep(vectors, [ir.Constant(ir.IntType(64), 1)])
            pair = [builder.load(vector, align=4) for vector in (vectors, second)]
        return context.make_tuple(builder, signature.return_type, pair)

    return PAIR(array, index), generate


@intrinsic
def _load_alike(typing, array, index, like):
    """array[index : index + 32], float32, in the order in which `load_pair` gives the elements of `like`."""
    is_half = isinstance(like.dtype, types.Integer)

    def generate(context, builder, signature, args):
        vectors = builder.bitcast(element_pointer(context, builder, signature, args), FLOATS.as_pointer())
        second = builder.gep(vectors, [ir.Constant(ir.IntType(64), 1)])
        pair = [builder.load(vector, align=4) for vector in (vectors, second)]
        if is_half:
            orders = (range(0, 2 * LANES, 2), range(1, 2 * LANES, 2))
            pair = [builder.shuffle_vector(*pair, ir.Constant(INTS, list(order))) for order in orders]
        return context.make_tuple(builder, signature.return_type, pair)

    return PAIR(array, index, like), generate


@intrinsic
def _load_part(typing, array, index, left):
    """`load_pair` of the first `left` < 32 elements: zeros from there on, and that memory is not touched."""
    widen, words = widening(array.dtype)
    element = ir.FloatType() if widen is None else ir.IntType(array.dtype.bitwidth)
    lanes, bits = ir.VectorType(element, 2 * LANES), ir.VectorType(ir.IntType(1), 2 * LANES)
    name = f"v32{'f' if widen is None else 'i'}{array.dtype.bitwidth}"

    def generate(context, builder, signature, args):
        vector = builder.bitcast(element_pointer(context, builder, signature, args), lanes.as_pointer())
        left = context.cast(builder, args[2], signature.args[2], types.int32)
        numbers = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), list(range(2 * LANES)))
        mask = builder.icmp_signed("<", numbers, in_all_lanes(builder, left, 2 * LANES))
        align = ir.Constant(ir.IntType(32), array.dtype.bitwidth // 8)
        kind = ir.FunctionType(lanes, [lanes.as_pointer(), ir.IntType(32), bits, lanes])
        read = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.{name}.p0")
        value = builder.call(read, [vector, align, mask, ir.Constant(lanes, None)])
        if widen is not None:
            pair = widen(builder, builder.bitcast(value, words))
        else:
            halves = (range(LANES), range(LANES, 2 * LANES))
            pair = [builder.shuffle_vector(value, value, ir.Constant(INTS, list(half))) for half in halves]
        return context.make_tuple(builder, signature.return_type, pair)

    return PAIR(array, index, left), generate


@intrinsic
def _store16(typing, array, index, value):
    """array[index : index + 16] = value; array float32, of one dimension, contiguous and long enough."""

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature, args)
        builder.store(args[2], builder.bitcast(pointer, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def _store_bfloat16(typing, array, index, value):
    """array[index : index + 16] = value, rounded to bfloat16; array uint16."""
    halves = ir.VectorType(ir.IntType(16), LANES)

    def generate(context, builder, signature, args):
        pointer = builder.bitcast(element_pointer(context, builder, signature, args), halves.as_pointer())
        builder.store(narrow(builder, args[2]), pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def _store_pair(typing, array, index, low, high):
    """What `load_pair` reads, the other way; rounded to bfloat16 where the array is uint16."""
    is_half = isinstance(array.dtype, types.Integer)

    def generate(context, builder, signature, args):
        low, high = args[2:]
        pointer = element_pointer(context, builder, signature, args)
        if is_half:
            builder.store(narrow_pair(builder, low, high), builder.bitcast(pointer, INTS.as_pointer()), align=2)
        else:
            vectors = builder.bitcast(pointer, FLOATS.as_pointer())
            builder.store(low, vectors, align=4)
            builder.store(high, builder.gep(vectors, [ir.Constant(ir.IntType(64), 1)]), align=4)
        return context.get_dummy_value()

    return types.void(array, index, low, high), generate


@intrinsic
def _store_pairs(typing, array, index, low, high):
    """Word i of the 64 bytes from array[index] on = low[i] and, in the upper half, high[i], rounded to bfloat16."""

    def generate(context, builder, signature, args):
        half = ir.Constant(INTS, [0x8000] * LANES)  # between two neighbours, the larger: an instruction instead of four
        low, high = (builder.add(builder.bitcast(value, INTS), half) for value in args[2:])
        words = builder.or_(upper_half(builder, low), builder.and_(high, ir.Constant(INTS, [0xFFFF0000] * LANES)))
        pointer = builder.bitcast(element_pointer(context, builder, signature, args), INTS.as_pointer())
        builder.store(words, pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, index, low, high), generate


@intrinsic
def _store_between(typing, array, index, stride, a, b):
    """The sixteen words from array[index] on, and those from array[index + stride] on: half word i of a beside that of
    b, i from 0 to 31; array of 32-bit elements."""
    halves = ir.VectorType(ir.IntType(16), 2 * LANES)

    def generate(context, builder, signature, args):
        a, b = (builder.bitcast(value, halves) for value in args[3:])
        first = element_pointer(context, builder, signature, args)
        second = builder.gep(first, [context.cast(builder, args[2], signature.args[2], types.intp)])
        for part, place in enumerate((first, second)):
            order = [lane // 2 + LANES * part + lane % 2 * 2 * LANES for lane in range(2 * LANES)]
            mixed = builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order))
            builder.store(mixed, builder.bitcast(place, halves.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, index, stride, a, b), generate


@intrinsic
def _transpose16(typing, source, index, stride, target, place):
    """Word [c, r] of the tile from target[place] on = word c of the 64 bytes from source[index + stride x r] on."""

    def generate(context, builder, signature, args):
        into = builder.bitcast(element_pointer(context, builder, signature, args, 3), INTS.as_pointer())
        for row, value in enumerate(turned(context, builder, signature, args)):
            builder.store(value, builder.gep(into, [ir.Constant(ir.IntType(64), row)]), align=4)
        return context.get_dummy_value()

    return types.void(source, index, stride, target, place), generate


@intrinsic
def _transpose16_apart(typing, source, index, stride, target, place, apart):
    """The same tile with its rows `apart` elements from each other."""

    def generate(context, builder, signature, args):
        into = element_pointer(context, builder, signature, args, 3)
        step = context.cast(builder, args[5], signature.args[5], types.intp)
        for row, value in enumerate(turned(context, builder, signature, args)):
            here = builder.gep(into, [builder.mul(step, ir.Constant(ir.IntType(64), row))])
            builder.store(value, builder.bitcast(here, INTS.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(source, index, stride, target, place, apart), generate


def turned(context, builder, signature, args):
    """The rows of the tile that `_transpose16` reads, turned."""
    quarters = ir.VectorType(ir.IntType(32), 4)
    starts = _row_pointers(context, builder, signature, args, quarters)

    def piece(row, column):
        place = builder.gep(starts[row], [ir.Constant(ir.IntType(64), column)])
        return builder.load(place, align=2)

    def mixed(a, b, order):
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order)))

    def beside(a, b, width, upper):
        """Of each four words of a and of b the lower or upper half, in turns of `width` words."""
        order = []
        for first in range(0, LANES, 4):
            for word in range(first + 2 * upper, first + 2 * upper + 2, width):
                order += [*range(word, word + width), *range(LANES + word, LANES + word + width)]
        return mixed(a, b, order)

    rows = []
    for column in range(4):  # a quarter of a row comes from memory to where it belongs: half as much is left to move
        parts = []
        for row in range(4):
            low, high = (mixed(piece(first, column), piece(first + 4, column), range(8)) for first in (row, row + 8))
            parts.append(mixed(low, high, range(LANES)))
        for upper in range(2):
            a, b = beside(parts[0], parts[1], 1, upper), beside(parts[2], parts[3], 1, upper)
            rows += [beside(a, b, 2, 0), beside(a, b, 2, 1)]
    return rows


def _row_pointers(context, builder, signature, args, kind):
    """Pointers to vectors of this kind: to sixteen rows of args[0], from element args[1] on, args[2] elements apart."""
    first = element_pointer(context, builder, signature, args)
    step = context.cast(builder, args[2], signature.args[2], types.intp)
    starts = [builder.gep(first, [builder.mul(step, ir.Constant(ir.IntType(64), row))]) for row in range(LANES)]
    return [builder.bitcast(start, kind.as_pointer()) for start in starts]


@intrinsic(prefer_literal=True)
def _largest_of_rows(typing, array, index, stride, vectors):
    """In lane r the largest of the 16 x `vectors` numbers from array[index + stride x r] on."""
    return _reduced(array, index, stride, vectors, higher)


@intrinsic(prefer_literal=True)
def _sum_of_rows(typing, array, index, stride, vectors):
    """In lane r the sum of the same."""
    return _reduced(array, index, stride, vectors, added)


def _reduced(array, index, stride, vectors, combine):
    if not isinstance(vectors, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, args):
        rows = []
        for pointer in _row_pointers(context, builder, signature, args, FLOATS):
            places = [builder.gep(pointer, [ir.Constant(ir.IntType(64), i)]) for i in range(vectors.literal_value)]
            values = [builder.load(place, align=4) for place in places]
            while len(values) > 1:
                values = [combine(builder, *values[i : i + 2]) for i in range(0, len(values), 2)]
            rows += values
        for width in (8, 4, 2, 1):  # row r and row r + width become one, of which lanes with that bit are the second's
            rows = [fold(builder, rows[r], rows[r + width], width, combine) for r in range(width)]
        return rows[0]

    return VECTOR(array, index, stride, vectors), generate


@intrinsic
def _sum_eight(typing, array, index, other, a0, a1, a2, a3, b0, b1, b2, b3):
    """array[index : index + 4] = the sums of the lanes of a0 to a3, array[other : other + 4] = those of b0 to b3."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        a, b = args[3:7], args[7:11]
        both = [fold(builder, x, y, 8) for x, y in zip(a, b, strict=True)]
        even, odd = fold(builder, both[0], both[2], 4), fold(builder, both[1], both[3], 4)
        folded = fold(builder, even, odd, 2)  # lane 8 x (a or b) + 2 x (0 to 3), and half of each sum beside it
        beside = builder.shuffle_vector(folded, folded, ir.Constant(INTS, [lane ^ 1 for lane in range(LANES)]))
        sums = builder.fadd(folded, beside)
        for number, first in ((1, 0), (2, 8)):
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), 4), [first, first + 2, first + 4, first + 6])
            four = builder.shuffle_vector(sums, sums, lanes)
            start = context.cast(builder, args[number], signature.args[number], types.intp)
            builder.store(four, builder.bitcast(builder.gep(data, [start]), four.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, index, other, a0, a1, a2, a3, b0, b1, b2, b3), generate


@intrinsic
def _prefetch(typing, array, index):
    """Ask for the cache line of array[index], which need not exist, into the second cache."""

    def generate(context, builder, signature, args):
        ask_for(builder, element_pointer(context, builder, signature, args), level=2)
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def _prefetch_to_write(typing, array, index):
    """As `prefetch`, of a line that will be written."""

    def generate(context, builder, signature, args):
        ask_for(builder, element_pointer(context, builder, signature, args), to_write=True)
        return context.get_dummy_value()

    return types.void(array, index), generate


def ask_for(builder, pointer, to_write=False, level=1):
    """Ask memory for the cache line there, into the core's first cache or the second: what is asked for long before it
    is needed drives out of the small first one what is at hand, and itself. Keys in random pages that are asked into
    the second are read in 0.6 to 0.7 of the time, in float32 in 0.4 (one core of an EPYC, Zen 4, 23 November 2026)."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = (ir.Constant(number, flag) for flag in (int(to_write), 4 - level, 1))  # data
    builder.call(ask, [builder.bitcast(pointer, byte), *flags])


def element_pointer(context, builder, signature, args, first=0):
    """Pointer to element args[first + 1] of array args[first]."""
    data = context.make_array(signature.args[first])(context, builder, args[first]).data
    index = context.cast(builder, args[first + 1], signature.args[first + 1], types.intp)
    return builder.gep(data, [index])


@jit()
def place_in_pair(index: int, is_half: bool) -> int:
    """Where element `index` of a row lies when its pairs of vectors are stored one behind the other; `is_half`: of
    bfloat16 or bytes."""
    if not is_half:
        return index
    within = index % (2 * LANES)
    return index - within + within % 2 * LANES + within // 2


splat_at = cast("Callable[[Array, int], Vector]", _splat_at)
element_at = cast("Callable[[Int64s, int], int]", _element_at)
float_at = cast("Callable[[Array, int], np.float32]", _float_at)
put_float = cast("Callable[[Array, int, np.float32], None]", _put_float)
load16 = cast("Callable[[Array, int], Vector]", _load16)
load_pair = cast("Callable[[Array, int], tuple[Vector, Vector]]", _load_pair)
load_alike = cast("Callable[[Array, int, Array], tuple[Vector, Vector]]", _load_alike)
load_part = cast("Callable[[Array, int, int], tuple[Vector, Vector]]", _load_part)
store16 = cast("Callable[[Array, int, Vector], None]", _store16)
sum_eight = cast("Callable[[Array, int, int, *tuple[Vector, ...]], None]", _sum_eight)
store_pair = cast("Callable[[Array, int, Vector, Vector], None]", _store_pair)
store_bfloat16 = cast("Callable[[Array, int, Vector], None]", _store_bfloat16)
store_pairs = cast("Callable[[Array, int, Vector, Vector], None]", _store_pairs)
store_between = cast("Callable[[Array, int, int, Vector, Vector], None]", _store_between)
transpose16 = cast("Callable[[Array, int, int, Array, int], None]", _transpose16)
transpose16_apart = cast("Callable[[Array, int, int, Array, int, int], None]", _transpose16_apart)
largest_of_rows = cast("Callable[[Array, int, int, int], Vector]", _largest_of_rows)
sum_of_rows = cast("Callable[[Array, int, int, int], Vector]", _sum_of_rows)
prefetch = cast("Callable[[Array, int], None]", _prefetch)
prefetch_to_write = cast("Callable[[Array, int], None]", _prefetch_to_write)
