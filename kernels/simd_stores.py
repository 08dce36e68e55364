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
from niwaki.kernels.simd import FLOATS, INTS, LANES, Vector, in_all_lanes
from niwaki.kernels.simd_memory import element_pointer


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
def _store_both_bfloat16(typing, array, index, low, high):
    """array[index : index + 32] = the sixteen of low, then those of high, rounded to bfloat16 by an instruction of
    AVX512-BF16, which makes a zero of what is too small to be a normal number; array uint16."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(INTS, [FLOATS, FLOATS])
        words = builder.call(ir.InlineAsm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v"), args[2:])
        pointer = builder.bitcast(element_pointer(context, builder, signature, args), INTS.as_pointer())
        builder.store(words, pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, index, low, high), generate


put_outside = cast("Callable[[Array, int, int, int, np.float32], None]", _put_outside)
store_both_bfloat16 = cast("Callable[[Array, int, Vector, Vector], None]", _store_both_bfloat16)
