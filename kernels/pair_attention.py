"""The inner loops of paged_decode.py for bfloat16, in the instruction of AVX512-BF16 (`multiplies_pairs` in
vector_tiles.py): products of pairs, with nothing widened, for up to HEADS heads that share each loaded key.

Scores: a key's pairs of columns times a query's give sixteen sums, which are folded with those of fifteen other keys
into the scores of sixteen keys in lanes. Values: the rows of two keys are laid into each other, so that a word holds
both keys' value of a column and meets the word of their two weights, rounded to bfloat16.

One core of an EPYC, cycles for a key and its value of 64 columns, 23 November 2026: of three heads 15 where they are
near (46 by paged_decode.py's own loops), of two 10 (43). What comes later is asked into the second cache.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from niwaki.kernels.operand import Array
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd import FLOATS, INTS, LANES, fold, in_all_lanes
from niwaki.kernels.simd_memory import ask_for, element_pointer
from niwaki.kernels.vector_tiles import LINE, LONG, POINTER, WORD, multiplies_pairs

HEADS = 4  # whose sums are in registers at once
RUN = 16  # keys scored at once
STRIP = 64  # columns mixed at once, and of which a head must have a multiple
HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


@intrinsic
def _score_pairs(
    typing, k, own, same, later, gap, at, first, q, query, step, strips, scores, place, block, scale, heads
):
    """scores[place + h x block + i] = scale x the product of key first + i, k[at[first + i] + own:], and head h of a
    query, q[query + h x step:], for RUN keys and `heads` <= HEADS heads of `strips` x STRIP columns. Meanwhile memory
    is asked for as much of RUN later keys, of the first from same[later] on, of each other `gap` elements further."""
    kinds = (k, own, same, later, gap, at, first, q, query, step, strips, scores, place, block, scale, heads)

    def generate(context, builder, signature, args):
        starts = _starts(context, builder, signature, args, (0, 2, 5, 7, 11))
        by = context.cast(builder, args[14], scale, types.float32)
        count, asked, *numbers = (context.cast(builder, args[i], kinds[i], types.int64) for i in (15, 4, 9, 10, 13))
        _call(builder, _scores_of, count, asked, numbers[1], [*starts, by, *numbers])
        return context.get_dummy_value()

    return types.void(*kinds), generate


def _scores_of(module, heads: int, has_gaps: bool):
    """The function (keys, later, places, queries, scores, scale, step, strips, block, gap)."""
    name = f"niwaki_scores_of_pairs_{heads}{'_apart' if has_gaps else ''}"
    if name in module.globals:
        return module.globals[name]
    function = _internal(module, name, [POINTER] * 5 + [ir.FloatType()] + [LONG] * 4)
    keys, later, places, queries, scores, scale, step, strips, block, gap = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    of_query = [builder.gep(queries, [builder.mul(step, LONG(2 * h))]) for h in range(heads)]
    quarters = []  # of each quarter of the keys, for every head the sums of four keys, folded
    for quarter in range(4):
        own = [_row(builder, keys, places, 4 * quarter + i) for i in range(4)]
        before = builder.block
        loop, done = (function.append_basic_block(f"{each}.{quarter}") for each in ("strips", "folded"))
        builder.branch(loop)
        builder.position_at_end(loop)
        strip = builder.phi(LONG)
        totals = [[builder.phi(FLOATS) for _ in own] for _ in range(heads)]
        sums = totals
        for line in range(STRIP // (2 * LANES)):
            column = builder.add(builder.mul(strip, LONG(2 * STRIP)), LONG(line * LINE))
            asked = [_vector(builder, builder.gep(of, [column])) for of in of_query]
            words = [_vector(builder, builder.gep(row, [column])) for row in own]
            lines = builder.gep(
                later, [builder.mul(builder.add(builder.mul(strips, LONG(quarter)), strip), LONG(8 * LINE))]
            )
            for i in range(4):
                place = builder.gep(lines, [LONG((4 * line + i) * LINE)])
                if has_gaps:
                    row = builder.gep(later, [builder.mul(gap, LONG(2 * (4 * quarter + i)))])
                    place = builder.gep(row, [column])
                ask_for(builder, place, level=2)
            sums = [
                [_multiplied(builder, key, query, so_far) for key, so_far in zip(words, of_head, strict=True)]
                for query, of_head in zip(asked, sums, strict=True)
            ]
        following = builder.add(strip, LONG(1))
        strip.add_incoming(LONG(0), before)
        strip.add_incoming(following, loop)
        for phis, lasts in zip(totals, sums, strict=True):
            for phi, last in zip(phis, lasts, strict=True):
                phi.add_incoming(ir.Constant(FLOATS, None), before)
                phi.add_incoming(last, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, strips), loop, done)
        builder.position_at_end(done)
        quarters.append([fold(builder, fold(builder, a, b, 1), fold(builder, c, d, 1), 2) for a, b, c, d in sums])
    by = in_all_lanes(builder, scale)
    for h in range(heads):
        low, high = (fold(builder, quarters[i][h], quarters[i + 1][h], 4) for i in (0, 2))
        place = builder.gep(scores, [builder.mul(block, LONG(4 * h))])
        value = builder.fmul(fold(builder, low, high, 8), by)
        builder.store(value, builder.bitcast(place, FLOATS.as_pointer()), align=4)
    builder.ret_void()
    return function


@intrinsic
def _mix_pairs(
    typing, v, own, same, later, gap, at, first, pairs, weights, weight, block, mixed, place, padded, strips, heads
):
    """mixed[place + h x padded:] += the values of 2 x `pairs` keys, v[at[first + i] + own:], each times its weight for
    head h, weights[weight + h x block + i], bfloat16; `heads` <= HEADS heads of `strips` x STRIP columns, whose sums
    are in the order of `load_pair`. Meanwhile memory is asked for as much of as many later values, as by `score_pairs`.
    """
    kinds = (v, own, same, later, gap, at, first, pairs, weights, weight, block, mixed, place, padded, strips, heads)

    def generate(context, builder, signature, args):
        starts = _starts(context, builder, signature, args, (0, 2, 5, 8, 11))
        count, asked, *numbers = (context.cast(builder, args[i], kinds[i], types.int64) for i in (15, 4, 7, 10, 13, 14))
        _call(builder, _mixture_of, count, asked, numbers[3], [*starts, *numbers])
        return context.get_dummy_value()

    return types.void(*kinds), generate


def _mixture_of(module, heads: int, has_gaps: bool):
    """The function (values, later, places, weights, mixed, pairs, block, padded, strips, gap)."""
    name = f"niwaki_mixture_of_pairs_{heads}{'_apart' if has_gaps else ''}"
    if name in module.globals:
        return module.globals[name]
    function = _internal(module, name, [POINTER] * 5 + [LONG] * 5)
    values, later, places, weights, mixed, pairs, block, padded, strips, gap = function.args
    entry, outer, inner, following, finished = (
        function.append_basic_block(each) for each in ("entry", "strips", "pairs", "following", "finished")
    )
    builder = ir.IRBuilder(entry)
    of_weights = [builder.gep(weights, [builder.mul(block, LONG(2 * h))]) for h in range(heads)]
    of_mixed = [builder.gep(mixed, [builder.mul(padded, LONG(4 * h))]) for h in range(heads)]
    builder.branch(outer)

    builder.position_at_end(outer)
    strip = builder.phi(LONG)
    strip.add_incoming(LONG(0), entry)
    offset = builder.mul(strip, LONG(4 * STRIP))
    sums_at = [
        [builder.gep(of, [builder.add(offset, LONG(line * LINE))]) for line in range(STRIP // LANES)] for of in of_mixed
    ]
    before = [[_vector(builder, at, FLOATS) for at in of] for of in sums_at]
    builder.branch(inner)

    builder.position_at_end(inner)
    pair = builder.phi(LONG)
    totals = [[builder.phi(FLOATS) for _ in of] for of in sums_at]
    two = builder.gep(places, [builder.mul(pair, LONG(16))])
    rows = [_row(builder, values, two, number) for number in range(2)]
    lines = builder.gep(later, [builder.add(builder.mul(strip, LONG(32 * LINE)), builder.mul(pair, LONG(4 * LINE)))])
    for i in range(4):
        place = builder.gep(lines, [LONG(i * LINE)])
        if has_gaps:
            row = builder.gep(later, [builder.mul(gap, builder.add(builder.mul(pair, LONG(4)), LONG(i // 2 * 2)))])
            place = builder.gep(row, [builder.add(builder.mul(strip, LONG(2 * STRIP)), LONG(i % 2 * LINE))])
        ask_for(builder, place, level=2)
    pieces = []
    for line in range(STRIP // (2 * LANES)):
        column = builder.add(builder.mul(strip, LONG(2 * STRIP)), LONG(line * LINE))
        a, b = (_vector(builder, builder.gep(row, [column]), HALVES) for row in rows)
        for odd in range(2):
            order = [lane // 2 * 2 + odd + lane % 2 * 2 * LANES for lane in range(2 * LANES)]
            laid = builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, 2 * LANES), order))
            pieces.append(builder.bitcast(laid, INTS))
    after = []
    for of, so_far in zip(of_weights, totals, strict=True):
        at = builder.bitcast(builder.gep(of, [builder.mul(pair, LONG(4))]), WORD.as_pointer())
        both = in_all_lanes(builder, builder.load(at, align=2))
        after.append([_multiplied(builder, both, each, sum_) for each, sum_ in zip(pieces, so_far, strict=True)])
    next_pair = builder.add(pair, LONG(1))
    pair.add_incoming(LONG(0), outer)
    pair.add_incoming(next_pair, inner)
    for phis, firsts, lasts in zip(totals, before, after, strict=True):
        for phi, first, last in zip(phis, firsts, lasts, strict=True):
            phi.add_incoming(first, outer)
            phi.add_incoming(last, inner)
    builder.cbranch(builder.icmp_unsigned("<", next_pair, pairs), inner, following)

    builder.position_at_end(following)
    for ats, lasts in zip(sums_at, after, strict=True):
        for at, last in zip(ats, lasts, strict=True):
            builder.store(last, builder.bitcast(at, FLOATS.as_pointer()), align=4)
    next_strip = builder.add(strip, LONG(1))
    strip.add_incoming(next_strip, following)
    builder.cbranch(builder.icmp_unsigned("<", next_strip, strips), outer, finished)
    builder.position_at_end(finished)
    builder.ret_void()
    return function


def _starts(context, builder, signature, args, arrays):
    """Pointers to where the arrays at these places in `args` begin: their index stands behind each."""
    return [builder.bitcast(element_pointer(context, builder, signature, args, i), POINTER) for i in arrays]


def _call(builder, function_of, heads, gap, strips, args):
    """Of the functions, two for each number of heads, that for `heads`; none without the instruction. To ask for keys
    between which nothing lies takes fewer registers, and a tenth less time of three heads."""
    if not multiplies_pairs():
        return
    has_gaps = builder.icmp_unsigned("!=", gap, builder.mul(strips, LONG(STRIP)))
    for number in range(1, HEADS + 1):
        with (
            builder.if_then(builder.icmp_unsigned("==", heads, LONG(number))),
            builder.if_else(has_gaps) as (apart, in_a_row),
        ):
            with apart:
                builder.call(function_of(builder.module, number, True), [*args, gap])
            with in_a_row:
                builder.call(function_of(builder.module, number, False), [*args, gap])


def _internal(module, name, kinds):
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")  # kernels get shorter, and are as quick
    return function


def _row(builder, pool, places, number: int):
    """Where the element of the pool lies that the number of this place tells."""
    place = builder.load(builder.bitcast(builder.gep(places, [LONG(8 * number)]), LONG.as_pointer()))
    return builder.gep(pool, [builder.mul(place, LONG(2))])


def _vector(builder, pointer, kind=INTS):
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=2)


def _multiplied(builder, a, b, total):
    """total + the products of both halves of the words, in every lane."""
    kind = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $2, $3, $0", "=v,0,v,v"), [total, a, b])


score_pairs = cast(
    "Callable[[Array, int, Array, int, int, Int64s, int, Array, int, int, int, Float32s, int, int, float, int], None]",
    _score_pairs,
)
mix_pairs = cast(
    "Callable[[Array, int, Array, int, int, Int64s, int, int, Array, int, int, Float32s, int, int, int, int], None]",
    _mix_pairs,
)
