"""Sums of products of pairs of bfloat16, kept in registers: the innermost loops of linear_tiles.py, in the instruction
of AVX512-BF16 (`multiplies_pairs` in vector_tiles.py).

Each word of W, a pair of inputs, is multiplied with the pairs of sixteen rows of x at once, so the sums come out in
lanes and nothing is added across a vector. One word serves two groups of sixteen rows: of eight outputs that makes
sixteen sums, enough to keep both multipliers busy, and one load for two products. Of a single group, even and odd words
are summed apart. Of eight rows of a group vectors are half as long, of which the multipliers take two at once.
Meanwhile memory is asked for the rows of W that come next; they lie too far apart to be guessed.

One core of an EPYC, 24 MiB of W [outputs, 1024] read once, 23 November 2026, GFLOP/s for 8 / 16 / 32 / 64 / 192 rows by
linear_tiles.py: 177 / 366 / 447 / 449 / 442, by torch.mm: 125 / 194 / 263 / 343 / 421. These loops alone, W
[outputs, 384], 16 / 32 / 64 rows: 442 / 494 / 497; not asking ahead 243 / 440 / 464.
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
from niwaki.kernels.simd import FLOATS, INTS, LANES
from niwaki.kernels.simd_memory import ask_for, element_pointer
from niwaki.kernels.vector_tiles import LINE, LONG, POINTER, ROWS, WORDS, RowsOf, multiplies_pairs

TILE = ROWS * LINE  # bytes
HALF, HALF_INTS = ir.VectorType(ir.FloatType(), LANES // 2), ir.VectorType(ir.IntType(32), LANES // 2)
OUTPUTS = 8  # at once of two groups
SUMS = 16  # in registers at once
ASKED = WORDS * LINE  # bytes


@intrinsic
def _sum_of_one(typing, sums, at, apart, weight, place, stride, laid, laid_at, slices, ahead):
    """As `sum_of_two`, of one group."""
    return _call(1, OUTPUTS, sums, at, apart, weight, place, stride, laid, laid_at, slices, ahead)


@intrinsic
def _sum_of_two(typing, sums, at, apart, weight, place, stride, laid, laid_at, slices, ahead):
    """The products of eight outputs with two groups of sixteen rows, 32 `slices` inputs each: a line of sums for each
    output from sums[at] on, those of the second group `apart` bytes behind.

    weight[place]: the first output's word 0, that of the next lies `stride` bytes behind; laid[laid_at]: the first
    group's tiles, as `lay_pairs` lays them, the second's behind them. Both places of float32 are multiples of LINE.
    Memory is asked for the words of W that lie `ahead` bytes behind.
    """
    return _call(2, OUTPUTS, sums, at, apart, weight, place, stride, laid, laid_at, slices, ahead)


@intrinsic
def _sum_of_two_and_ask(
    typing, sums, at, apart, weight, place, stride, laid, laid_at, slices, ahead, asks, ask, pool, count
):  # fmt: skip
    """As `sum_of_two`. With slice i memory is also asked, into the second cache, for ASKED bytes from the address
    pool + asks[ask + min(i, count - 1)] on."""
    kinds = (sums, at, apart, weight, place, stride, laid, laid_at, slices, ahead, asks, ask, pool, count)

    def generate(context, builder, signature, args):
        if not multiplies_pairs():
            return context.get_dummy_value()
        starts = [
            builder.bitcast(element_pointer(context, builder, signature, args, i), POINTER) for i in (0, 3, 6, 10)
        ]
        numbers = [context.cast(builder, args[i], kinds[i], types.int64) for i in (2, 5, 8, 9, 12, 13)]
        sums, weight, laid, asks = starts
        apart, stride, slices, ahead, pool, count = numbers
        function = _function(builder.module, 2, OUTPUTS, False, True)
        builder.call(function, [sums, apart, weight, stride, laid, slices, ahead, asks, pool, count])
        return context.get_dummy_value()

    return types.void(*kinds), generate


@intrinsic
def _sum_of_tall(typing, sums, at, apart, weight, place, stride, laid, laid_at, slices, ahead):
    """As `sum_of_two`, of sixteen outputs and one group: bit for bit the same sums."""
    return _call(1, 2 * OUTPUTS, sums, at, apart, weight, place, stride, laid, laid_at, slices, ahead)


@intrinsic
def _sum_of_half(typing, sums, at, apart, weight, place, stride, laid, laid_at, slices, ahead):
    """As `sum_of_tall`, of the first eight rows of a group: bit for bit the same sums of them, half a line for each
    output."""
    return _call(0, 2 * OUTPUTS, sums, at, apart, weight, place, stride, laid, laid_at, slices, ahead)


@intrinsic
def _add_to_two(typing, sums, at, apart, weight, place, step, laid, laid_at, slices, first, one, second, two, ahead):
    """As `sum_of_two`, added to what is there. The first words of all outputs lie side by side, the next ones `step`
    bytes behind them. Memory is asked, into the second cache, for sixteen lines from first[one] on with the first
    slice and for as many from second[two] on with each further, `ahead` bytes from one to the next."""
    return _call(
        2, OUTPUTS, sums, at, apart, weight, place, step, laid, laid_at, slices, first, one, second, two, ahead
    )


@intrinsic
def _add_to_tall(typing, sums, at, apart, weight, place, step, laid, laid_at, slices, first, one, second, two, ahead):
    """As `add_to_two`, of sixteen outputs and one group: bit for bit the same sums. Asks for twice as many lines, two
    that follow one another each time."""
    return _call(
        1, 2 * OUTPUTS, sums, at, apart, weight, place, step, laid, laid_at, slices, first, one, second, two, ahead
    )


def _call(groups: int, outputs: int, *kinds):
    """Nothing without the instruction: what names these functions is compiled everywhere, and run where it is there."""

    def generate(context, builder, signature, args):
        if not multiplies_pairs():
            return context.get_dummy_value()
        sums, weight, laid = (
            builder.bitcast(element_pointer(context, builder, signature, args, first), POINTER) for first in (0, 3, 6)
        )
        apart, stride, slices = (context.cast(builder, args[i], signature.args[i], types.int64) for i in (2, 5, 8))
        last = [context.cast(builder, args[-1], signature.args[-1], types.int64)]
        if goes_on := len(args) > 10:
            last += [
                builder.bitcast(element_pointer(context, builder, signature, args, first), POINTER) for first in (9, 11)
            ]
        function = _function(builder.module, groups, outputs, goes_on)
        builder.call(function, [sums, apart, weight, stride, laid, slices, *last])
        return context.get_dummy_value()

    return types.void(*kinds), generate


def _function(module, groups: int, outputs: int, goes_on: bool, asks: bool = False):
    """The function (sums, apart, weight, stride or step, laid, slices, ahead, and what is asked for by those that add);
    one in each module. Of no whole group: of eight rows."""
    name = f"niwaki_{'add' if goes_on else 'sum'}_of_pairs_{groups}_{outputs}{'_and_asks' * asks}"
    if name in module.globals:
        return module.globals[name]
    floats, ints, line_of_sums = (FLOATS, INTS, LINE) if groups else (HALF, HALF_INTS, LINE // 2)
    groups = max(groups, 1)
    chains = SUMS // (groups * outputs)
    kinds = [POINTER, LONG, POINTER, LONG, POINTER, LONG, LONG]
    kinds += [POINTER, POINTER] * goes_on + [POINTER, LONG, LONG] * asks
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")  # kernels get shorter, and are as quick
    sums, apart, weight, distance, laid, slices, ahead, *asked = function.args
    stride, step = (LONG(4), distance) if goes_on else (distance, LONG(4))  # from output to output, word to word
    entry, outer, inner, following, done = (
        function.append_basic_block(each) for each in ("entry", "slices", "words", "following", "done")
    )
    builder = ir.IRBuilder(entry)
    places = [
        builder.gep(sums, [builder.add(builder.mul(apart, LONG(group)), LONG(output * line_of_sums))])
        for group in range(groups)
        for output in range(outputs)
    ]
    before = [ir.Constant(floats, None)] * (SUMS)
    if goes_on:
        before = [_load(builder, place, floats) for place in places]
    builder.branch(outer)

    builder.position_at_end(outer)
    number, words, pairs = builder.phi(LONG), builder.phi(POINTER), builder.phi(POINTER)
    lines = builder.phi(POINTER) if goes_on else None
    so_far = [builder.phi(floats) for _ in range(SUMS)]  # of the second group or of odd words from `outputs` on
    if asks:
        offsets, pool, count = asked
        last = builder.sub(count, LONG(1))
        place = builder.select(builder.icmp_unsigned("<", number, last), number, last)
        offset = builder.load(builder.bitcast(builder.gep(offsets, [builder.mul(place, LONG(8))]), LONG.as_pointer()))
        later = builder.inttoptr(builder.add(pool, offset), POINTER)
    builder.branch(inner)

    builder.position_at_end(inner)
    word = builder.phi(LONG)
    totals = [builder.phi(floats) for _ in range(SUMS)]
    behind = builder.mul(slices, LONG(TILE))  # the second group
    if lines is not None:
        line = builder.gep(lines, [builder.mul(word, ahead)])
        for number_of_line in range(outputs // OUTPUTS):
            ask_for(builder, builder.gep(line, [LONG(number_of_line * LINE)]), level=2)
    else:
        row = builder.and_(builder.udiv(word, LONG(chains)), LONG(outputs - 1))  # a line of each row in every slice
        ask_for(builder, builder.gep(words, [builder.add(builder.mul(row, stride), ahead)]))
        if asks:
            ask_for(builder, builder.gep(later, [builder.mul(word, LONG(LINE))]), level=2)
    after = []
    for chain in range(chains):
        here = builder.add(word, LONG(chain))
        line = builder.gep(pairs, [builder.mul(here, LONG(LINE))], inbounds=True)
        own = [_load(builder, builder.gep(line, [builder.mul(behind, LONG(group))]), ints) for group in range(groups)]
        rows = RowsOf(builder, builder.gep(words, [builder.mul(here, step)], inbounds=True), stride)
        if groups == 1:
            of_chain = totals[chain * outputs : (chain + 1) * outputs]
            after += [_multiplied_from(builder, rows.of(r), own[0], total) for r, total in enumerate(of_chain)]
            continue
        second = []
        for r in range(outputs):
            value = _in_all_lanes_from(builder, rows.of(r))
            after.append(_multiplied(builder, value, own[0], totals[r]))
            second.append(_multiplied(builder, value, own[1], totals[outputs + r]))
        after += second
    next_word = builder.add(word, LONG(chains))
    word.add_incoming(LONG(0), outer)
    word.add_incoming(next_word, inner)
    for total, first, latest in zip(totals, so_far, after, strict=True):
        total.add_incoming(first, outer)
        total.add_incoming(latest, inner)
    builder.cbranch(builder.icmp_unsigned("<", next_word, LONG(WORDS)), inner, following)

    builder.position_at_end(following)
    next_number = builder.add(number, LONG(1))
    for here, start, length in ((words, weight, builder.mul(step, LONG(WORDS))), (pairs, laid, LONG(TILE))):
        here.add_incoming(start, entry)
        here.add_incoming(builder.gep(here, [length], inbounds=True), following)
    number.add_incoming(LONG(0), entry)
    number.add_incoming(next_number, following)
    if lines is not None:
        lines.add_incoming(asked[0], entry)
        lines.add_incoming(asked[1], following)
    for total, first, latest in zip(so_far, before, after, strict=True):
        total.add_incoming(first, entry)
        total.add_incoming(latest, following)
    builder.cbranch(builder.icmp_unsigned("<", next_number, slices), outer, done)

    builder.position_at_end(done)
    if chains == 2:
        after = [builder.fadd(even, odd) for even, odd in zip(after[:outputs], after[outputs:], strict=True)]
    for place, value in zip(places, after, strict=True):
        builder.store(value, builder.bitcast(place, floats.as_pointer()), align=line_of_sums)
    builder.ret_void()
    return function


def _load(builder, pointer, kind=INTS):
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=LINE)


# Written out, because LLVM would load words ahead, for which it then has no registers.


def _multiplied_from(builder, read, pairs, total):
    """total + products of the word at `read`, in all lanes, and `pairs`."""
    base, step, times = read
    address = f"($2,$3,{times})" if times else "($2)"
    kind = ir.FunctionType(total.type, [total.type, POINTER, LONG, pairs.type])
    text = f"vdpbf16ps {address}{{1to{pairs.type.count}}}, $4, $0"
    return builder.call(ir.InlineAsm(kind, text, "=v,0,r,r,v,~{memory}", side_effect=True), [total, base, step, pairs])


def _in_all_lanes_from(builder, read):
    base, step, times = read
    address = f"($1,$2,{times})" if times else "($1)"
    kind = ir.FunctionType(INTS, [POINTER, LONG])
    return builder.call(
        ir.InlineAsm(kind, f"vpbroadcastd {address}, $0", "=v,r,r,~{memory}", side_effect=True), [base, step]
    )


def _multiplied(builder, word, pairs, total):
    kind = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $2, $3, $0", "=v,0,v,v", side_effect=True), [total, word, pairs])


Sum = Callable[[Array, int, int, Array, int, int, Array, int, int, int], None]
Asking = Callable[[Array, int, int, Array, int, int, Array, int, int, int, Array, int, int, int], None]
Addition = Callable[[Array, int, int, Array, int, int, Array, int, int, Array, int, Array, int, int], None]
sum_of_one = cast("Sum", _sum_of_one)
sum_of_two = cast("Sum", _sum_of_two)
sum_of_two_and_ask = cast("Asking", _sum_of_two_and_ask)
sum_of_tall = cast("Sum", _sum_of_tall)
sum_of_half = cast("Sum", _sum_of_half)
add_to_two = cast("Addition", _add_to_two)
add_to_tall = cast("Addition", _add_to_tall)
