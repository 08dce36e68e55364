"""Products of a few rows with tiles by vectors (vector_tiles.py), whose sums stay in registers for all inputs that
share their scales: what coded.py multiplies with where there is no matrix unit.

Eight rows times two tiles are sixteen sums, enough to keep the multipliers busy. Meanwhile memory is asked for codes
that come later: these are read in bursts, before each product, and memory would rest between them.
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
from niwaki.kernels.simd import FLOATS, INTS, fused
from niwaki.kernels.simd_memory import ask_for, element_pointer
from niwaki.kernels.tiles import has_matrix_unit
from niwaki.kernels.vector_tiles import (
    LINE,
    LONG,
    POINTER,
    ROWS,
    WORDS,
    RowsOf,
    add_products,
    function_of,
    lines_from,
)

FEW = (1, 2, 4, 8)  # rows for which there is a product of their own


@intrinsic
def _multiply_group(
    typing, total, at, sums, before, a, row, b, place, scales, scale, later, ask, asked, steps, begins, ends, rows
):  # fmt: skip
    """total[at + 32 r + n] += scales[scale + n] x sum over k of a[row + 32 r + k] B[k, n], for `rows` <= 8 rows of 32
    elements and the 32 columns of two tiles that follow one another from b[place] on; and so on for `steps` steps, of
    which each has its rows a tile behind those of the one before.

    Sums begin with those from sums[before] on, unless this `begins` with zeros, and unless it `ends` they go there
    alone. Every sum is what `multiply` in tiles.py makes of it, bit for bit. As many rows are touched as the next of
    FEW says. With each of a step's sixteen words memory is asked, into the second cache, for `asked` bytes of what lies
    from later[ask] on. Where there is a matrix unit this does nothing.
    """
    kinds = (
        total, at, sums, before, a, row, b, place, scales, scale, later, ask, asked, steps, begins, ends, rows
    )  # fmt: skip

    def generate(context, builder, signature, args):
        if has_matrix_unit():
            return context.get_dummy_value()
        starts = [
            builder.bitcast(element_pointer(context, builder, signature, args, first), POINTER)
            for first in range(0, 12, 2)
        ]
        numbers = [context.cast(builder, args[i], kinds[i], types.int64) for i in range(12, 17)]
        height, before = numbers.pop(), 0
        for number in FEW:
            is_in = builder.and_(
                builder.icmp_signed(">", height, LONG(before)), builder.icmp_signed("<=", height, LONG(number))
            )
            with builder.if_then(is_in):
                builder.call(_group(builder.module, number), [*starts, *numbers])
            before = number
        return context.get_dummy_value()

    return types.void(*kinds), generate


def _group(module, rows: int):
    """The function (total, sums, a, b, scales, later, asked, steps, begins, ends) for so many rows; one in a module."""
    kinds = [POINTER] * 6 + [LONG] * 4
    function, builder = function_of(module, f"niwaki_group_of_{rows}_rows", kinds)
    if builder is None:
        return function
    total, sums, a, b, scales, later, asked, steps, begins, ends = function.args
    entry = builder.block
    outer, inner, following, done, kept, scaled, finished = (
        function.append_basic_block(each)
        for each in ("steps", "words", "following", "done", "kept", "scaled", "finished")
    )
    places = lines_from(builder, sums, 2 * rows)
    nothing, is_new = ir.Constant(FLOATS, None), builder.icmp_unsigned("!=", begins, LONG(0))
    before = [builder.select(is_new, nothing, builder.load(place, align=LINE)) for place in places]
    builder.branch(outer)

    builder.position_at_end(outer)
    number, lines_of_a, lines_of_b, asks = builder.phi(LONG), *(builder.phi(POINTER) for _ in range(3))
    so_far = [builder.phi(FLOATS) for _ in places]
    builder.branch(inner)

    builder.position_at_end(inner)
    word = builder.phi(LONG)
    sums_of_words = [builder.phi(FLOATS) for _ in places]
    own = builder.gep(lines_of_a, [builder.mul(word, LONG(4))], inbounds=True)
    line = builder.gep(lines_of_b, [builder.mul(word, LONG(LINE))], inbounds=True)
    pairs = [
        builder.load(builder.bitcast(builder.gep(line, [LONG(at)], inbounds=True), INTS.as_pointer()), align=4)
        for at in (0, ROWS * LINE)
    ]
    ask_for(builder, builder.gep(asks, [builder.mul(word, asked)]), level=2)
    of_a = RowsOf(builder, own, LONG(LINE))
    after = [add_products(builder, sum_, of_a, i // 2, pairs[i % 2]) for i, sum_ in enumerate(sums_of_words)]
    next_word = builder.add(word, LONG(1))
    word.add_incoming(LONG(0), outer)
    word.add_incoming(next_word, inner)
    builder.cbranch(builder.icmp_unsigned("<", next_word, LONG(WORDS)), inner, following)

    builder.position_at_end(following)
    next_number = builder.add(number, LONG(1))
    number.add_incoming(LONG(0), entry)
    number.add_incoming(next_number, following)
    lengths = LONG(ROWS * LINE), LONG(2 * ROWS * LINE), builder.mul(asked, LONG(WORDS))
    for here, start, length in zip((lines_of_a, lines_of_b, asks), (a, b, later), lengths, strict=True):
        here.add_incoming(start, entry)
        here.add_incoming(builder.gep(here, [length]), following)
    for sum_, first, of_words, last in zip(so_far, before, sums_of_words, after, strict=True):
        sum_.add_incoming(first, entry)
        sum_.add_incoming(last, following)
        of_words.add_incoming(sum_, outer)
        of_words.add_incoming(last, inner)
    builder.cbranch(builder.icmp_unsigned("<", next_number, steps), outer, done)

    builder.position_at_end(done)
    builder.cbranch(builder.icmp_unsigned("!=", ends, LONG(0)), scaled, kept)
    builder.position_at_end(kept)
    for place, last in zip(places, after, strict=True):
        builder.store(last, place, align=LINE)
    builder.branch(finished)
    builder.position_at_end(scaled)
    by = [builder.load(place, align=4) for place in lines_from(builder, scales, 2)]
    for i, (place, last) in enumerate(zip(lines_from(builder, total, 2 * rows), after, strict=True)):
        builder.store(fused(builder, last, by[i % 2], builder.load(place, align=4)), place, align=4)
    builder.branch(finished)
    builder.position_at_end(finished)
    builder.ret_void()
    return function


Groups = Callable[
    [Float32s, int, Float32s, int, Array, int, Array, int, Float32s, int, Array, int, int, int, bool, bool, int], None
]
multiply_group = cast("Groups", _multiply_group)
