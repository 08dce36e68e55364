"""Sums of values for the few queries of a stack that are left (stack_by_pairs.py), in the instruction of AVX512-BF16.

Lanes are columns of values, so that a query takes four products for two keys of 64 columns, and no lane is empty. One
load of two keys' values serves all queries at hand. Meanwhile memory is asked for keys and values that come next.
"""

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
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd import FLOATS, INTS, LANES, VECTOR, Vector, in_all_lanes
from niwaki.kernels.simd_memory import ask_for, element_pointer
from niwaki.kernels.vector_tiles import LINE, LONG, POINTER, WORD, function_of, multiplies_pairs

AT_ONCE = 4  # queries, whose sums are in registers
COLUMNS = 64  # at once
REST = LANES // 2  # queries whose weights lie side by side
RUN = 16  # keys that lie one behind the other: stack_by_tiles.py


@intrinsic
def _add_to_few(typing, sums, at, apart, values, place, step, weights, weight, pairs, queries, k, v, asks, ask, gap):
    """sums[at + r x apart:] += COLUMNS columns of the values of 2 x `pairs` keys, each times its weight for query r, of
    `queries` <= AT_ONCE.

    values[place]: the words of the first two keys' columns, those of the next two `step` elements behind;
    weights[weight + r]: the word of query r's weights of the first two keys, that of the next two REST behind. Of both
    pools k and v memory is asked, into the second cache, for as many columns of as many keys, of RUN keys from each of
    asks[ask:] on, `gap` elements apart; for none where that is 0.
    """
    kinds = (sums, at, apart, values, place, step, weights, weight, pairs, queries, k, v, asks, ask, gap)

    def generate(context, builder, signature, args):
        if not multiplies_pairs():
            return context.get_dummy_value()
        starts = [
            builder.bitcast(element_pointer(context, builder, signature, args, first), POINTER) for first in (0, 3, 6)
        ]
        pools = [
            builder.bitcast(context.make_array(kinds[i])(context, builder, args[i]).data, POINTER) for i in (10, 11)
        ]
        places = builder.bitcast(element_pointer(context, builder, signature, args, 12), POINTER)
        apart, step, pairs, queries, gap = (
            context.cast(builder, args[i], kinds[i], types.int64) for i in (2, 5, 8, 9, 14)
        )
        for number in range(1, AT_ONCE + 1):
            with builder.if_then(builder.icmp_unsigned("==", queries, LONG(number))):
                builder.call(_sums_of(builder.module, number), [*starts, *pools, places, apart, step, pairs, gap])
        return context.get_dummy_value()

    return types.void(*kinds), generate


def _sums_of(module, queries: int):
    """The function (sums, values, weights, keys, values in their pool, asks, apart, step, pairs, gap)."""
    name = f"niwaki_sums_of_few_{queries}"
    function, builder = function_of(module, name, [POINTER] * 6 + [LONG] * 4)
    if builder is None:
        return function
    sums, values, weights, *pools, asks, apart, step, pairs, gap = function.args
    entry = builder.block
    loop, asking, products, done = (
        function.append_basic_block(each) for each in ("pairs", "asking", "products", "done")
    )
    places = [
        builder.gep(sums, [builder.add(builder.mul(apart, LONG(4 * r)), LONG(line * LINE))])
        for r in range(queries)
        for line in range(COLUMNS // LANES)
    ]
    before = [builder.load(builder.bitcast(place, FLOATS.as_pointer()), align=4) for place in places]
    step, gap = builder.mul(step, LONG(4)), builder.mul(gap, LONG(2))
    builder.branch(loop)

    builder.position_at_end(loop)
    pair = builder.phi(LONG)
    totals = [builder.phi(FLOATS) for _ in places]
    builder.cbranch(builder.icmp_unsigned("!=", gap, LONG(0)), asking, products)

    builder.position_at_end(asking)
    number = builder.mul(builder.udiv(pair, LONG(RUN // 2)), LONG(8))
    start = builder.load(builder.bitcast(builder.gep(asks, [number]), LONG.as_pointer()))
    behind = builder.mul(gap, builder.mul(builder.and_(pair, LONG(RUN // 2 - 1)), LONG(2)))
    first = builder.add(builder.mul(start, LONG(2)), behind)
    for pool in pools:
        for key in range(2):
            for line in range(2 * COLUMNS // LINE):
                offset = builder.add(first, LONG(line * LINE))
                ask_for(builder, builder.gep(pool, [builder.add(offset, gap) if key else offset]), level=2)
    builder.branch(products)

    builder.position_at_end(products)
    row = builder.gep(values, [builder.mul(step, pair)])
    words = [
        builder.load(builder.bitcast(builder.gep(row, [LONG(line * LINE)]), INTS.as_pointer()), align=4)
        for line in range(COLUMNS // LANES)
    ]
    of_pair = builder.gep(weights, [builder.mul(pair, LONG(4 * REST))])
    after = []
    for r in range(queries):
        weight = _in_all_lanes(builder, builder.gep(of_pair, [LONG(4 * r)]))
        for line, word in enumerate(words):
            after.append(_multiplied(builder, weight, word, totals[len(words) * r + line]))
    following = builder.add(pair, LONG(1))
    pair.add_incoming(LONG(0), entry)
    pair.add_incoming(following, products)
    for total, first_sum, latest in zip(totals, before, after, strict=True):
        total.add_incoming(first_sum, entry)
        total.add_incoming(latest, products)
    builder.cbranch(builder.icmp_unsigned("<", following, pairs), loop, done)

    builder.position_at_end(done)
    for place, last in zip(places, after, strict=True):
        builder.store(last, builder.bitcast(place, FLOATS.as_pointer()), align=4)
    builder.ret_void()
    return function


def _in_all_lanes(builder, pointer):
    kind = ir.FunctionType(INTS, [POINTER])
    return builder.call(ir.InlineAsm(kind, "vpbroadcastd ($1), $0", "=v,r,~{memory}", side_effect=True), [pointer])


def _multiplied(builder, a, b, total):
    kind = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $2, $3, $0", "=v,0,v,v", side_effect=True), [total, a, b])


@intrinsic
def _store_rest(typing, array, index, a, b):
    """Word r of the eight from array[index] on = lane r of `a` and, in the upper half, lane REST + r, rounded to
    bfloat16 as `store_pairs` does; of the eight behind them the same of `b`."""
    halves = ir.VectorType(ir.IntType(16), 2 * LANES)

    def generate(context, builder, signature, args):
        half = ir.Constant(INTS, [0x8000] * LANES)
        a, b = (builder.bitcast(builder.add(builder.bitcast(each, INTS), half), halves) for each in args[2:])
        order = [of + 2 * (r + upper) + 1 for of in (0, 2 * LANES) for r in range(REST) for upper in (0, REST)]
        words = builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, 2 * LANES), order))
        pointer = builder.bitcast(element_pointer(context, builder, signature, args), halves.as_pointer())
        builder.store(words, pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, index, VECTOR, VECTOR), generate


@intrinsic
def _two_keys(typing, key):
    """`key` in the first REST lanes, the next one in the others."""
    ahead = [0.0] * REST + [1.0] * (LANES - REST)

    def generate(context, builder, signature, args):
        first = context.cast(builder, args[0], signature.args[0], types.float32)
        return builder.fadd(in_all_lanes(builder, first), ir.Constant(FLOATS, ahead))

    return VECTOR(key), generate


Adding = Callable[
    [Float32s, int, int, Float32s, int, int, Float32s, int, int, int, Array, Array, Int64s, int, int], None
]
add_to_few = cast("Adding", _add_to_few)
two_keys = cast("Callable[[np.float32], Vector]", _two_keys)
store_rest = cast("Callable[[Array, int, Vector, Vector], None]", _store_rest)
