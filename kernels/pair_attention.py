"""The inner loops of paged_decode.py for bfloat16, in the instruction of AVX512-BF16 (`multiplies_pairs` in
vector_tiles.py): products of pairs, with nothing widened, for several heads that share each loaded key.

Scores: a key's pairs of columns times a query's give sixteen sums, which are folded with those of fifteen other keys
into the scores of sixteen keys in lanes. The folds of four keys are written between the products of the next four, and
stay there: LLVM would put them last, where the multipliers wait for them. Values: the rows of two keys are laid into
each other, so that a word holds both keys' value of a column and meets the word of their two weights, rounded to
bfloat16. Both lay out within quarters of a vector, which takes the processor two thirds of the time of permuting all of
it. Meanwhile memory is asked for the block after, into the second cache.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import LOG2_E, exp_f32
from niwaki.kernels.operand import Array
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd import (
    FLOATS,
    INTS,
    LANES,
    Vector,
    add,
    exp2_16,
    in_all_lanes,
    is_any_less,
    larger,
    largest_lane,
    minus,
    splat,
    times,
    zeros,
)
from niwaki.kernels.simd_memory import ask_for, element_pointer, load16, store16
from niwaki.kernels.simd_stores import store_both_bfloat16
from niwaki.kernels.vector_tiles import LINE, LONG, POINTER, WORD, multiplies_pairs

SCORED = 3  # heads that are scored at once
HEADS = 4  # whose sums of values are in registers at once
RUN = 16  # keys scored at once
FOLDED = 4  # of which the first sums are in registers at once
STRIP = 64  # columns mixed at once, and of which a head must have a multiple
LEAST = np.float32(-1e30)  # stands for the score of a key that is not there
MOST = np.float32(256.0)  # that the weights of every sixteenth key of a block may sum to
HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
QUARTERS = ("vshuff32x4 $$0x88,", "vshuff32x4 $$0xDD,")  # the even ones of two vectors, and the odd ones
# Which words become one with which: of quarters of vectors the first and third, the even and odd; then quarters.
FOLDS = (("vunpcklps", "vunpckhps"), ("vunpcklpd", "vunpckhpd"), QUARTERS, QUARTERS)


@intrinsic
def _score_pairs(
    typing, k, own, at, first, asks, ask, gap, q, query, step, strips, scores, place, block, scale, runs, heads
):  # fmt: skip
    """scores[place + h x block + i] = scale x the product of key i, k[at[first + i] + own:], and head h of a query,
    q[query + h x step:], for `runs` x RUN keys and `heads` <= SCORED heads of `strips` x STRIP columns. With run r
    memory is asked for as much of RUN later keys, of the first from k[asks[ask + r]] on, of each other `gap` elements
    further."""
    kinds = (k, own, at, first, asks, ask, gap, q, query, step, strips, scores, place, block, scale, runs, heads)

    def generate(context, builder, signature, args):
        starts = _starts(context, builder, signature, args, (0, 2, 4, 7, 11))
        by = context.cast(builder, args[14], scale, types.float32)
        numbers = [context.cast(builder, args[i], kinds[i], types.int64) for i in (1, 6, 9, 10, 13, 15)]
        count = context.cast(builder, args[16], heads, types.int64)
        _call(builder, _scores_of, SCORED, count, [*starts, by, *numbers])
        return context.get_dummy_value()

    return types.void(*kinds), generate


def _scores_of(module, heads: int):
    """The function (keys, places, asks, queries, scores, scale, own, gap, step, strips, block, runs)."""
    name = f"niwaki_scores_of_pairs_{heads}"
    if name in module.globals:
        return module.globals[name]
    function = _internal(module, name, [POINTER] * 5 + [ir.FloatType()] + [LONG] * 6)
    keys, places, asks, queries, scores, scale, own, gap, step, strips, block, runs = function.args
    entry, outer, done = (function.append_basic_block(each) for each in ("entry", "runs", "done"))
    builder = ir.IRBuilder(entry)
    pool = builder.gep(keys, [builder.mul(own, LONG(-2))])
    of_query = [builder.gep(queries, [builder.mul(step, LONG(2 * h))]) for h in range(heads)]
    by = in_all_lanes(builder, scale)
    last_column = builder.mul(builder.sub(strips, LONG(1)), LONG(2 * STRIP))
    gap = builder.mul(gap, LONG(2))
    builder.branch(outer)

    builder.position_at_end(outer)
    run = builder.phi(LONG)
    run.add_incoming(LONG(0), entry)
    here = builder.gep(places, [builder.mul(run, LONG(8 * RUN))])
    later = _row(builder, pool, builder.gep(asks, [builder.mul(run, LONG(8))]), 0)
    folding = _Folding(builder, heads)

    def products(own, asked, column, sums, step_of_folding):
        """`sums` and the products of a strip of these keys: both its lines of each key times those of each head."""
        for line in range(STRIP // (2 * LANES)):
            lines = [_vector(builder, builder.gep(of, [builder.add(column, LONG(line * LINE))])) for of in of_query]
            after: list[list[object]] = [[] for _ in lines]
            for i, key in enumerate(own):
                words = _loaded(builder, builder.gep(key, [column]), line * LINE)
                ask_for(builder, builder.gep(asked[i], [builder.add(column, LONG(line * LINE))]), level=2)
                for h, query in enumerate(lines):
                    after[h].append(_in_turn(builder, "vdpbf16ps $2, $3, $0", "=v,0,v,v", sums[h][i], words, query))
                    step_of_folding()
            sums = after
        return sums

    for four in range(0, RUN, FOLDED):
        own = [_row(builder, keys, here, four + i) for i in range(FOLDED)]
        asked = [builder.gep(later, [builder.mul(gap, LONG(i))]) for i in range(FOLDED)]
        later = builder.gep(later, [builder.mul(gap, LONG(FOLDED))])
        before = builder.block
        loop, last = (function.append_basic_block(f"{each}.{four}") for each in ("strips", "last"))
        builder.cbranch(builder.icmp_unsigned(">", strips, LONG(1)), loop, last)
        nothing = [[ir.Constant(FLOATS, None)] * FOLDED] * heads

        builder.position_at_end(loop)
        column = builder.phi(LONG)
        so_far = [[builder.phi(FLOATS) for _ in own] for _ in range(heads)]
        sums = products(own, asked, column, so_far, lambda: None)
        following = builder.add(column, LONG(2 * STRIP))
        column.add_incoming(LONG(0), before)
        column.add_incoming(following, loop)
        _incoming(so_far, nothing, before)
        _incoming(so_far, sums, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, last_column), loop, last)

        builder.position_at_end(last)
        of_others = [[builder.phi(FLOATS) for _ in own] for _ in range(heads)]
        _incoming(of_others, nothing, before)
        _incoming(of_others, sums, loop)
        sums = products(own, asked, last_column, of_others, folding.step)
        for i in range(FOLDED):
            for h in range(heads):
                folding.add(h, 0, sums[h][i])
    target = builder.gep(scores, [builder.mul(run, LONG(4 * RUN))])
    for h, total in enumerate(folding.totals()):
        place = builder.gep(target, [builder.mul(block, LONG(4 * h))])
        builder.store(builder.fmul(total, by), builder.bitcast(place, FLOATS.as_pointer()), align=4)
    next_run = builder.add(run, LONG(1))
    run.add_incoming(next_run, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", next_run, runs), outer, done)
    builder.position_at_end(done)
    builder.ret_void()
    return function


class _Folding:
    """The sums of each head's vectors of sixteen keys, two becoming one four times: an instruction at a time."""

    def __init__(self, builder, heads: int) -> None:
        self._builder = builder
        self._waiting: list[list[object]] = [[None] * (len(FOLDS) + 1) for _ in range(heads)]  # of 1, 2, 4, 8, 16 keys
        self._folds: deque[Iterator[None]] = deque()

    def add(self, head: int, level: int, value) -> None:
        """A vector of 2**level keys, with the next of as many."""
        other = self._waiting[head][level]
        if other is None:
            self._waiting[head][level] = value
            return
        self._waiting[head][level] = None
        self._folds.append(self._fold(head, level, other, value))

    def step(self) -> None:
        """Write the next instruction, if there is one."""
        while self._folds:
            for _ in self._folds[0]:
                return
            self._folds.popleft()

    def totals(self):
        """Of each head, when all is added."""
        while self._folds:
            self.step()
        return [waiting[-1] for waiting in self._waiting]

    def _fold(self, head: int, level: int, a, b) -> Iterator[None]:
        halves = []
        for name in FOLDS[level]:
            halves.append(_in_turn(self._builder, f"{name} $2, $1, $0", "=v,v,v", a, b))
            yield
        self.add(head, level + 1, _in_turn(self._builder, "vaddps $2, $1, $0", "=v,v,v", *halves))
        yield


@jit()
def weigh_pairs(
    scores: Float32s, halves: Array, count: int, first: int, last: int, block: int, highest: Float32s, sums: Float32s,
    mixed: Float32s, padded: int,
) -> None:  # fmt: skip
    """halves[h x block : h x block + count] = e^(score - highest[h]) for heads first to last, as bfloat16, and zeros up
    to a multiple of 2 x LANES. Lane l of the LANES sums of a head gets what every sixteenth key weighs.

    `highest`, of a block before, rises where weights, seen from it, are large, and all that was summed shrinks with it.
    """
    end = (count + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
    for h in range(first, last):
        row, line = h * block, h * LANES
        for j in range(row + count, row + end):
            scores[j] = LEAST
        total = splat(np.float32(math.inf))
        if highest[h] > LEAST:
            total = _powers(scores, row, row + end, highest[h], halves)
        if is_any_less(splat(MOST), total):
            tops = splat(highest[h])
            for j in range(row, row + end, LANES):
                tops = larger(tops, load16(scores, j))
            top = largest_lane(tops)
            shrink = splat(exp_f32(highest[h] - top))
            highest[h] = top
            store16(sums, line, times(load16(sums, line), shrink))
            for place in range(h * padded, (h + 1) * padded, LANES):
                store16(mixed, place, times(load16(mixed, place), shrink))
            total = _powers(scores, row, row + end, top, halves)
        store16(sums, line, add(load16(sums, line), total))


@jit(inline=True)
def _powers(scores: Float32s, first: int, end: int, top: np.float32, halves: Array) -> Vector:
    """halves[first:end] = e^(score - top). Returns the sums of every sixteenth, before they are rounded."""
    less, factor, even, odd = splat(top), splat(LOG2_E), zeros(), zeros()
    for j in range(first, end, 2 * LANES):
        low = exp2_16(times(minus(load16(scores, j), less), factor))
        high = exp2_16(times(minus(load16(scores, j + LANES), less), factor))
        store_both_bfloat16(halves, j, low, high)
        even, odd = add(even, low), add(odd, high)
    return add(even, odd)


@intrinsic
def _mix_pairs(
    typing, v, own, at, first, asks, ask, gap, pairs, weights, weight, block, mixed, place, padded, strips, heads
):  # fmt: skip
    """mixed[place + h x padded:] += the values of 2 x `pairs` keys, v[at[first + i] + own:], each times its weight for
    head h, weights[weight + h x block + i], bfloat16; `heads` <= HEADS heads of `strips` x STRIP columns, whose sums
    are in the order of `quarters_apart`. Meanwhile memory is asked for later values, as by `score_pairs`."""
    kinds = (v, own, at, first, asks, ask, gap, pairs, weights, weight, block, mixed, place, padded, strips, heads)

    def generate(context, builder, signature, args):
        starts = _starts(context, builder, signature, args, (0, 2, 4, 8, 11))
        numbers = [context.cast(builder, args[i], kinds[i], types.int64) for i in (1, 6, 7, 10, 13, 14)]
        count = context.cast(builder, args[15], heads, types.int64)
        _call(builder, _mixture_of, HEADS, count, [*starts, *numbers])
        return context.get_dummy_value()

    return types.void(*kinds), generate


def _mixture_of(module, heads: int):
    """The function (values, places, asks, weights, mixed, own, gap, pairs, block, padded, strips)."""
    name = f"niwaki_mixture_of_pairs_{heads}"
    if name in module.globals:
        return module.globals[name]
    function = _internal(module, name, [POINTER] * 5 + [LONG] * 6)
    values, places, asks, weights, mixed, own, gap, pairs, block, padded, strips = function.args
    entry, outer, inner, following, finished = (
        function.append_basic_block(each) for each in ("entry", "strips", "pairs", "following", "finished")
    )
    builder = ir.IRBuilder(entry)
    pool = builder.gep(values, [builder.mul(own, LONG(-2))])
    of_weights = [builder.gep(weights, [builder.mul(block, LONG(2 * h))]) for h in range(heads)]
    of_mixed = [builder.gep(mixed, [builder.mul(padded, LONG(4 * h))]) for h in range(heads)]
    gap = builder.mul(gap, LONG(2))
    builder.branch(outer)

    builder.position_at_end(outer)
    strip = builder.phi(LONG)
    strip.add_incoming(LONG(0), entry)
    offset, column = builder.mul(strip, LONG(4 * STRIP)), builder.mul(strip, LONG(2 * STRIP))
    sums_at = [
        [builder.gep(of, [builder.add(offset, LONG(line * LINE))]) for line in range(STRIP // LANES)] for of in of_mixed
    ]
    before = [[_vector(builder, at, FLOATS) for at in of] for of in sums_at]
    builder.branch(inner)

    builder.position_at_end(inner)
    pair = builder.phi(LONG)
    totals = [[builder.phi(FLOATS) for _ in of] for of in sums_at]
    two = builder.gep(places, [builder.mul(pair, LONG(16))])
    rows = [builder.gep(_row(builder, values, two, number), [column]) for number in range(2)]
    later = _row(builder, pool, builder.gep(asks, [builder.mul(builder.udiv(pair, LONG(RUN // 2)), LONG(8))]), 0)
    behind = builder.mul(builder.and_(pair, LONG(RUN // 2 - 1)), LONG(2))
    first = builder.gep(later, [builder.add(builder.mul(gap, behind), column)])
    for row in (first, builder.gep(first, [gap])):
        for line in range(STRIP // (2 * LANES)):
            ask_for(builder, builder.gep(row, [LONG(line * LINE)]), level=2)
    pieces = []
    for line in range(STRIP // (2 * LANES)):
        a, b = (_vector(builder, builder.gep(row, [LONG(line * LINE)]), HALVES) for row in rows)
        for upper in range(2):  # of each quarter
            order = [
                8 * quarter + 4 * upper + i + of for quarter in range(4) for i in range(4) for of in (0, 2 * LANES)
            ]
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
    _incoming(totals, before, outer)
    _incoming(totals, after, inner)
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


def _call(builder, function_of, most, heads, args):
    """Of the functions, one for each number of heads, that for `heads`; none without the instruction."""
    if not multiplies_pairs():
        return
    for number in range(1, most + 1):
        with builder.if_then(builder.icmp_unsigned("==", heads, LONG(number))):
            builder.call(function_of(builder.module, number), args)


def _internal(module, name, kinds):
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")  # kernels get shorter, and are as quick
    return function


def _incoming(phis, values, block) -> None:
    for of_phis, of_values in zip(phis, values, strict=True):
        for phi, value in zip(of_phis, of_values, strict=True):
            phi.add_incoming(value, block)


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


def _in_turn(builder, text, constraints, *values):
    """The instruction, of vectors, behind those that were written so before."""
    kind = ir.FunctionType(FLOATS, [value.type for value in values])
    return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), values)


def _loaded(builder, pointer, offset: int):
    """The same, of a load: LLVM would load keys ahead, for which it then has no registers."""
    kind = ir.FunctionType(INTS, [POINTER])
    text = f"vmovdqu64 {offset}($1), $0"
    return builder.call(ir.InlineAsm(kind, text, "=v,r,~{memory}", side_effect=True), [pointer])


Scoring = Callable[
    [Array, int, Int64s, int, Int64s, int, int, Array, int, int, int, Float32s, int, int, float, int, int], None
]
Mixing = Callable[[Array, int, Int64s, int, Int64s, int, int, int, Array, int, int, Float32s, int, int, int, int], None]
score_pairs = cast("Scoring", _score_pairs)
mix_pairs = cast("Mixing", _mix_pairs)
