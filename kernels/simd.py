"""Sixteen float32 at once, inside Numba kernels: values that LLVM keeps in registers.

LLVM's own vectoriser prefers half of a 512-bit register, and sums each product of two rows by itself; these kernels
hold eight sums at a time. Nothing here names a processor: where registers are shorter, LLVM splits the vectors. How
they come from memory and go back: simd_memory.py; other formats: simd_formats.py.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import cast

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from niwaki.kernels.jit import compiles_for_this_processor
from niwaki.kernels.numeric import LN2_HIGH, LN2_LOW, LOG2_E

LANES = 16
ROUNDING = 1.5 * 2**23
# 2**x for x from 0 to 1, at most 1e-7 of it away, and 1 for 0: least squares, weighted until the peaks were equal.
OF_REST = (1.0, 0.693151312, 0.24016445, 0.0557999131, 0.00901703031, 0.00186713007)
OF_REST_ROUGHLY = (1.0, 0.695116699, 0.227645263, 0.077066794)  # the same, at most 9e-5 of it away

FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)


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
        return in_all_lanes(builder, context.cast(builder, args[0], signature.args[0], types.float32))

    return VECTOR(value), generate


@intrinsic
def _multiply_add(typing, a, b, c):
    """a b + c in every lane."""

    def generate(context, builder, signature, args):
        return fused(builder, *args)

    return VECTOR(a, b, c), generate


@intrinsic
def _add(typing, a, b):
    """a + b in every lane."""
    return VECTOR(a, b), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def _times(typing, a, b):
    """a b in every lane."""
    return VECTOR(a, b), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def _minus(typing, a, b):
    """a - b in every lane."""
    return VECTOR(a, b), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def _silu(typing, x):
    """x / (1 + e^-x) in every lane."""

    def generate(context, builder, signature, args):
        x = args[0]
        is_negative = builder.fcmp_ordered("<", x, _constant(0.0))
        power = _exponential(builder, builder.select(is_negative, x, builder.fneg(x)))
        over = builder.select(is_negative, power, _constant(1.0))
        under = builder.fadd(power, _constant(1.0))
        if splits_numbers():
            # From 1 to 2: a guess that is right to 14 bits, and a step of Newton's, take a third of a division's time.
            guess = _spelt(builder, "vrcp14ps $1, $0", under)
            error = fused(builder, builder.fneg(under), guess, _constant(1.0))
            return builder.fmul(x, builder.fmul(over, fused(builder, guess, error, guess)))
        return builder.fmul(x, builder.fdiv(over, under))

    return VECTOR(x), generate


@intrinsic
def _larger(typing, a, b):
    """The larger of both in every lane; a where b is NaN."""

    def generate(context, builder, signature, args):
        return higher(builder, *args)

    return VECTOR(a, b), generate


@intrinsic
def _where_less(typing, a, b, x, y):
    """x in the lanes where a < b, y in the others."""

    def generate(context, builder, signature, args):
        a, b, x, y = args
        return builder.select(builder.fcmp_ordered("<", a, b), x, y)

    return VECTOR(a, b, x, y), generate


@intrinsic
def _is_any_less(typing, a, b):
    """Whether a < b in any lane."""

    def generate(context, builder, signature, args):
        lanes = builder.bitcast(builder.fcmp_ordered("<", *args), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", lanes, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(a, b), generate


@intrinsic
def _exp16(typing, x):
    """e**x in every lane for x <= 0, to the precision of `numeric.exp_f32`; NaN stays NaN."""

    def generate(context, builder, signature, args):
        return _exponential(builder, args[0])

    return VECTOR(x), generate


@intrinsic
def _largest_lane(typing, a):
    """The largest lane of `a`, which holds no NaN."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [FLOATS])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fmax.v16f32")
        return builder.call(reduce, args, fastmath=("nnan",))

    return types.float32(a), generate


@intrinsic
def _sum_of_lanes(typing, a):
    """The sum of the lanes, in the order that suits the processor."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), FLOATS])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(reduce, [ir.Constant(ir.FloatType(), 0.0), *args], fastmath=("reassoc",))

    return types.float32(a), generate


@intrinsic(prefer_literal=True)
def _swapped(typing, a, width):
    """Lane i of `a` in lane i xor `width`, a literal power of two below LANES."""
    if not isinstance(width, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, args):
        order = [lane ^ width.literal_value for lane in range(LANES)]
        return builder.shuffle_vector(args[0], args[0], ir.Constant(INTS, order))

    return VECTOR(a, width), generate


@intrinsic
def _apart(typing, a, b):
    """Of the lanes of `a` and then `b` the even ones, and the odd ones."""

    def generate(context, builder, signature, args):
        orders = (range(0, 2 * LANES, 2), range(1, 2 * LANES, 2))
        pair = [builder.shuffle_vector(*args, ir.Constant(INTS, list(order))) for order in orders]
        return context.make_tuple(builder, signature.return_type, pair)

    return types.UniTuple(VECTOR, 2)(a, b), generate


@intrinsic
def _between(typing, a, b):
    """The other way round: of which the lanes of `a` are the even ones and those of `b` the odd ones."""

    def generate(context, builder, signature, args):
        pair = [
            builder.shuffle_vector(
                *args, ir.Constant(INTS, [first + lane // 2 + lane % 2 * LANES for lane in range(LANES)])
            )
            for first in (0, LANES // 2)
        ]
        return context.make_tuple(builder, signature.return_type, pair)

    return types.UniTuple(VECTOR, 2)(a, b), generate


@intrinsic
def _quarters_apart(typing, a, b):
    """Of the quarters of `a` and then `b`, four lanes each, the even ones and the odd ones."""

    def generate(context, builder, signature, args):
        orders = ([4 * quarter + i for quarter in range(odd, 8, 2) for i in range(4)] for odd in range(2))
        pair = [builder.shuffle_vector(*args, ir.Constant(INTS, order)) for order in orders]
        return context.make_tuple(builder, signature.return_type, pair)

    return types.UniTuple(VECTOR, 2)(a, b), generate


@intrinsic
def _quarters_between(typing, a, b):
    """The other way round: of which the quarters of `a` are the even ones and those of `b` the odd ones."""

    def generate(context, builder, signature, args):
        orders = (
            [4 * quarter + i + of for quarter in range(first, first + 2) for of in (0, LANES) for i in range(4)]
            for first in (0, 2)
        )
        pair = [builder.shuffle_vector(*args, ir.Constant(INTS, order)) for order in orders]
        return context.make_tuple(builder, signature.return_type, pair)

    return types.UniTuple(VECTOR, 2)(a, b), generate


@intrinsic
def _as_halves(typing, x):
    """Words whose lower halves are x, rounded to bfloat16, and words whose upper halves are; the other halves are 0."""

    def generate(context, builder, signature, args):
        rounded = builder.add(builder.bitcast(args[0], INTS), ir.Constant(INTS, [0x8000] * LANES))
        low = builder.lshr(rounded, ir.Constant(INTS, [16] * LANES))
        high = builder.and_(rounded, ir.Constant(INTS, [0xFFFF0000] * LANES))
        pair = [builder.bitcast(each, FLOATS) for each in (low, high)]
        return context.make_tuple(builder, signature.return_type, pair)

    return types.UniTuple(VECTOR, 2)(x), generate


@intrinsic
def _exp2_16(typing, x):
    """2**x in every lane for x <= 0: 1 for 0, and with a relative error below 4e-6 down to 2**-126. What is less may be
    anything from 0 to there. NaN stays NaN."""

    def generate(context, builder, signature, args):
        if splits_numbers():
            return power_of_two(builder, args[0], OF_REST)
        return _power_by_parts(builder, args[0])

    return VECTOR(x), generate


@intrinsic
def _exp2_roughly(typing, x):
    """As `exp2_16`, with a relative error below 1e-4 where `splits_numbers`."""

    def generate(context, builder, signature, args):
        if splits_numbers():
            return power_of_two(builder, args[0], OF_REST_ROUGHLY)
        return _power_by_parts(builder, args[0])

    return VECTOR(x), generate


@cache
def splits_numbers() -> bool:
    """Whether the processor takes a number's fraction, and multiplies by the power of what is left, in an instruction
    each (AVX512-DQ). The first call, which comes before any kernel is compiled or read from disk, tells LLVM how to
    read them."""
    has_both = bool(llvm.get_host_cpu_features().get("avx512dq")) and compiles_for_this_processor()
    if has_both:
        llvm.initialize_native_asmparser()
    return has_both


splits_numbers()  # a kernel from the disk may hold them, and be compiled into one that is not there


def power_of_two(builder, x, of_rest):
    """2**x in every lane, by instructions that there are where `splits_numbers`."""
    rest = _spelt(builder, "vreduceps $$1, $1, $0", x)  # 0 to 1 above the next whole number below
    power = _constant(of_rest[-1])
    for factor in of_rest[-2::-1]:
        power = fused(builder, power, rest, _constant(factor))
    return _spelt(builder, "vscalefps $2, $1, $0", power, x)


def _power_by_parts(builder, x):
    """2**x in every lane, as `_exp2_16`, by instructions that all have."""
    lowest = _constant(-126.0)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    shifted = builder.fadd(x, _constant(ROUNDING))
    r = builder.fsub(x, builder.fsub(shifted, _constant(ROUNDING)))
    power = _constant(math.log(2) ** 5 / 120)
    for degree in (4, 3, 2, 1, 0):
        power = fused(builder, power, r, _constant(math.log(2) ** degree / math.factorial(degree)))
    exponent = builder.shl(builder.bitcast(shifted, INTS), ir.Constant(INTS, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(power, INTS), exponent), FLOATS)


def _spelt(builder, text, *values):
    """The instruction, of vectors."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * len(values))
    return builder.call(ir.InlineAsm(kind, text, ",".join(["=v"] + ["v"] * len(values))), values)


def _constant(value):
    return ir.Constant(FLOATS, [value] * LANES)


def fused(builder, a, b, c):
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.v16f32"), [a, b, c])


def in_all_lanes(builder, value, lanes=LANES):
    vector = ir.VectorType(value.type, lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _exponential(builder, x):
    """As `_exp16`."""
    lowest = _constant(-87.0)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    # Added to 1.5 x 2**23, a number is rounded to an integer, which then stands in the lowest bits.
    shifted = fused(builder, x, _constant(float(LOG2_E)), _constant(ROUNDING))
    n = builder.fsub(shifted, _constant(ROUNDING))
    r = fused(builder, n, _constant(-float(LN2_HIGH)), x)
    r = fused(builder, n, _constant(-float(LN2_LOW)), r)
    power = _constant(1 / 720)
    for factor in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        power = fused(builder, power, r, _constant(factor))
    exponent = builder.shl(builder.bitcast(shifted, INTS), ir.Constant(INTS, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(power, INTS), exponent), FLOATS)


def added(builder, a, b):
    return builder.fadd(a, b)


def higher(builder, a, b):
    """The larger in every lane; a where b is NaN."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def fold(builder, a, b, width, combine=added):
    """In each run of 2 x width lanes: first a's halves as one, then those of b. Half of each stays in place."""
    in_a = [lane // width % 2 == 0 for lane in range(LANES)]
    kept = [lane if is_a else LANES + lane for lane, is_a in enumerate(in_a)]
    moved = [lane + width if is_a else LANES + lane - width for lane, is_a in enumerate(in_a)]
    return combine(builder, *(builder.shuffle_vector(a, b, ir.Constant(INTS, lanes)) for lanes in (kept, moved)))


zeros = cast("Callable[[], Vector]", _zeros)
splat = cast("Callable[[np.float32], Vector]", _splat)
multiply_add = cast("Callable[[Vector, Vector, Vector], Vector]", _multiply_add)
add = cast("Callable[[Vector, Vector], Vector]", _add)
minus = cast("Callable[[Vector, Vector], Vector]", _minus)
times = cast("Callable[[Vector, Vector], Vector]", _times)
silu = cast("Callable[[Vector], Vector]", _silu)
larger = cast("Callable[[Vector, Vector], Vector]", _larger)
is_any_less = cast("Callable[[Vector, Vector], bool]", _is_any_less)
where_less = cast("Callable[[Vector, Vector, Vector, Vector], Vector]", _where_less)
exp16 = cast("Callable[[Vector], Vector]", _exp16)
largest_lane = cast("Callable[[Vector], np.float32]", _largest_lane)
sum_of_lanes = cast("Callable[[Vector], np.float32]", _sum_of_lanes)
exp2_16 = cast("Callable[[Vector], Vector]", _exp2_16)
exp2_roughly = cast("Callable[[Vector], Vector]", _exp2_roughly)
swapped = cast("Callable[[Vector, int], Vector]", _swapped)
apart = cast("Callable[[Vector, Vector], tuple[Vector, Vector]]", _apart)
between = cast("Callable[[Vector, Vector], tuple[Vector, Vector]]", _between)
quarters_apart = cast("Callable[[Vector, Vector], tuple[Vector, Vector]]", _quarters_apart)
quarters_between = cast("Callable[[Vector, Vector], tuple[Vector, Vector]]", _quarters_between)
as_halves = cast("Callable[[Vector], tuple[Vector, Vector]]", _as_halves)
