"""A matrix product in bfloat16 for few rows, in the instruction of AVX512-BF16: out = x W^T + bias, W as in a
checkpoint.

linear_tiles.py has a row of x in each lane, so sixteen rows cost as much as one. Here the lanes are inputs: a line of W
and a line of x, 32 inputs each, give sixteen sums of two products, and what the lanes hold is added up at the end. Up
to nine rows go together, with two or four outputs, so that all sums are in registers; each line of W is read once for
them, and where x has more rows, again from the nearest cache. Meanwhile memory is asked for the outputs that come next.

Nine rows at once, since that is a step with eight guesses; more than nine go by eight, which is as quick or quicker
than ten or twelve at once. What writes the sums is compiled into the loop: the call, with five arrays, took 3 to 7 % of
a product of 256 inputs.

No sum depends on which other rows there are.

On one core of an EPYC (Zen 4, 23 November 2026, others at work on the machine, too), us for linear.py, linear_tiles.py,
torch.mm and this, W read out of the third cache:

    rows            1               2               4               8               12
    [1920, 384]     37/114/-/27     64/114/-/28     83/115/-/37     154/115/-/66    -/116/-/95
    [2048, 1024]    83/302/180/81   -               203/303/224/100 453/304/296/166 -/306/370/253
    [1024, 2048]    86/436/238/98   154/413/218/101 270/424/267/134 737/419/345/260 -/412/408/345
    [1024, 2816]    111/410/251/125 -               498/412/291/177 979/413/407/329 -/414/503/458
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from niwaki.kernels.checks import check_product
from niwaki.kernels.jit import for_any_thread, get_num_threads, jit
from niwaki.kernels.numeric import load
from niwaki.kernels.operand import Array
from niwaki.kernels.partial import Float32s
from niwaki.kernels.simd import FLOATS, INTS, LANES, add, fold
from niwaki.kernels.simd_memory import ask_for, element_pointer, load16, store_bfloat16
from niwaki.kernels.tiles import has_matrix_unit
from niwaki.kernels.vector_tiles import LINE, LONG, POINTER, RowsOf, multiplies_pairs

AT_ONCE = 9  # rows whose sums are in registers together
OF_MORE = 8  # of them, where there are more
MAX_ROWS = 12  # above, linear_tiles.py is as fast
SLICE = 32  # inputs of a line
SUMS = 24  # in registers at once

# Elements of W from which threads pay, as in linear.py.
MIN_PARALLEL_ELEMENTS = 4_000_000


def fits_pairs(x: Array, weight: Array) -> bool:
    """Whether this product can go by pairs, here or in linear_tiles.py, and nothing else is quicker."""
    outputs, inputs = weight.shape
    fits = inputs % SLICE == 0 and outputs % LANES == 0 and x.dtype == np.uint16
    return fits and multiplies_pairs() and not has_matrix_unit()


def takes_few(x: Array, weight: Array) -> bool:
    """Whether `linear_few_pairs` can do this product, and is the quickest to."""
    return len(x) <= MAX_ROWS and fits_pairs(x, weight)


def linear_few_pairs(x: Array, weight: Array, bias: Array | None, out: Array) -> None:
    """x [rows, inputs], weight [outputs, inputs], bias [outputs], out [rows, outputs]; bfloat16, rows contiguous.

    A product that `takes_few` allows.
    """
    bias = check_product("linear_few_pairs", np.dtype(np.uint16), x, weight, bias, out)
    threads = get_num_threads()
    if threads == 1 or weight.size < MIN_PARALLEL_ELEMENTS:
        _all_columns(x, weight, bias, out, 0, len(weight))
    else:
        _columns_parallel(x, weight, bias, out, threads)


@jit(parallel=True)
def _columns_parallel(x: Array, weight: Array, bias: Array, out: Array, parts: int) -> None:
    blocks = weight.shape[0] // LANES
    for part in prange(parts):
        columns_by_pairs(x, weight, bias, out, blocks * part // parts * LANES, blocks * (part + 1) // parts * LANES)


@jit()
def columns_by_pairs(x: Array, weight: Array, bias: Array, out: Array, first: int, last: int) -> None:
    """Outputs `first` to `last`, multiples of LANES, of all rows."""
    outputs, inputs = weight.shape
    flat_x, flat, flat_out = x.reshape(-1), weight.reshape(-1), out.reshape(-1)
    scratch = np.zeros((AT_ONCE + 1) * LANES, np.float32)
    for output in range(first, last, LANES):
        put_few(flat_x, 0, x.shape[0], flat, bias, flat_out, output, inputs, outputs, scratch)


@jit(inline=True)
def put_few(
    x: Array, first: int, last: int, weight: Array, bias: Array, out: Array, output: int, inputs: int, outputs: int,
    scratch: Float32s,
) -> None:  # fmt: skip
    """LANES outputs from `output` on, of rows `first` to `last`. Of one dimension each: x [rows, inputs], weight
    [outputs, inputs], out [rows, outputs]; scratch: (AT_ONCE + 1) x LANES, with zeros at the end where there is no
    bias."""
    offset = AT_ONCE * LANES
    for i in range(LANES if bias.shape[0] else 0):
        scratch[offset + i] = load(bias[output + i])
    row = first
    while row < last:
        count = last - row if last - row <= AT_ONCE else OF_MORE
        sum_rows(scratch, 0, x, row * inputs, weight, output * inputs, inputs * 2, inputs // SLICE, count)
        for r in range(count):
            value = add(load16(scratch, r * LANES), load16(scratch, offset))
            store_bfloat16(out, (row + r) * outputs + output, value)
        row += count


_all_columns = for_any_thread(columns_by_pairs)


@intrinsic
def _sum_rows(typing, sums, at, x, row, weight, output, stride, slices, rows):
    """sums[at + r x LANES + j] = the product of row r of x and output j, for `rows` <= AT_ONCE rows from x[row] on and
    LANES outputs from weight[output] on; all lie `stride` bytes apart, `slices` lines each."""
    kinds = (sums, at, x, row, weight, output, stride, slices, rows)

    def generate(context, builder, signature, args):
        starts = [
            builder.bitcast(element_pointer(context, builder, signature, args, first), POINTER) for first in (0, 2, 4)
        ]
        numbers = [context.cast(builder, args[i], kinds[i], types.int64) for i in (6, 7)]
        count = context.cast(builder, args[8], rows, types.int64)
        for number in range(1, AT_ONCE + 1) if multiplies_pairs() else ():
            with builder.if_then(builder.icmp_unsigned("==", count, LONG(number))):
                builder.call(_function(builder.module, number), [*starts, *numbers])
        return context.get_dummy_value()

    return types.void(*kinds), generate


def _function(module, rows: int):
    """The function (sums, x, weight, stride, slices); one in each module."""
    name = f"niwaki_sums_of_rows_{rows}"
    if name in module.globals:
        return module.globals[name]
    outputs = 4 if 4 * rows <= SUMS else 2  # together: rows of W read side by side
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER] * 3 + [LONG] * 2), name)
    function.linkage = "internal"
    function.attributes.add("noinline")  # kernels get shorter, and are as quick
    sums, x, weight, stride, slices = function.args
    entry, outer, inner, done, finished = (
        function.append_basic_block(each) for each in ("entry", "outputs", "slices", "done", "finished")
    )
    builder = ir.IRBuilder(entry)
    following = builder.gep(weight, [builder.mul(stride, LONG(LANES))])  # the outputs that come next
    builder.branch(outer)

    builder.position_at_end(outer)
    group, words, asked = builder.phi(LONG), builder.phi(POINTER), builder.phi(POINTER)
    builder.branch(inner)

    builder.position_at_end(inner)
    number, ask = builder.phi(LONG), builder.phi(POINTER)
    totals = [builder.phi(FLOATS) for _ in range(rows * outputs)]
    column = builder.mul(number, LONG(LINE))
    own = RowsOf(builder, builder.gep(words, [column]), stride)
    lines = [_line(builder, own.of(o)) for o in range(outputs)]
    of_x = RowsOf(builder, builder.gep(x, [column]), stride)
    after = []
    for r in range(rows):
        value = _line(builder, of_x.of(r))
        after += [_multiplied(builder, line, value, totals[r * outputs + o]) for o, line in enumerate(lines)]
    for i in range(outputs):  # the first cache is small: with these in it, 8 rows from memory take a third longer
        ask_for(builder, builder.gep(ask, [LONG(i * LINE)]), level=2)
    next_number, next_ask = builder.add(number, LONG(1)), builder.gep(ask, [LONG(outputs * LINE)])
    for phi, start, latest in ((number, LONG(0), next_number), (ask, asked, next_ask)):
        phi.add_incoming(start, outer)
        phi.add_incoming(latest, inner)
    for total, latest in zip(totals, after, strict=True):
        total.add_incoming(ir.Constant(FLOATS, None), outer)
        total.add_incoming(latest, inner)
    builder.cbranch(builder.icmp_unsigned("<", next_number, slices), inner, done)

    builder.position_at_end(done)
    folded = after + [ir.Constant(FLOATS, None)] * (-len(after) % LANES)
    for width in (1, 2, 4, 8):
        folded = [fold(builder, a, b, width) for a, b in zip(folded[::2], folded[1::2], strict=True)]
    for r in range(rows):
        vector, lane = folded[r * outputs // LANES], r * outputs % LANES
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), outputs), list(range(lane, lane + outputs)))
        part = builder.shuffle_vector(vector, vector, lanes)
        place = builder.gep(sums, [builder.add(builder.mul(group, LONG(4)), LONG(r * LINE))])
        builder.store(part, builder.bitcast(place, part.type.as_pointer()), align=4)
    next_group = builder.add(group, LONG(outputs))
    next_words = builder.gep(words, [builder.mul(stride, LONG(outputs))])
    for phi, start, latest in ((group, LONG(0), next_group), (words, weight, next_words), (asked, following, next_ask)):
        phi.add_incoming(start, entry)
        phi.add_incoming(latest, done)
    builder.cbranch(builder.icmp_unsigned("<", next_group, LONG(LANES)), outer, finished)
    builder.position_at_end(finished)
    builder.ret_void()
    return function


# Written out, because LLVM would keep the place of each row in a register of its own.


def _line(builder, read):
    """A line of 32 inputs."""
    base, step, times = read
    address = f"($1,$2,{times})" if times else "($1)"
    kind = ir.FunctionType(INTS, [POINTER, LONG])
    text = f"vmovdqu64 {address}, $0"
    return builder.call(ir.InlineAsm(kind, text, "=v,r,r,~{memory}", side_effect=True), [base, step])


def _multiplied(builder, a, b, total):
    """total + the products of both halves of the words, in every lane."""
    kind = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $2, $3, $0", "=v,0,v,v"), [total, a, b])


sum_rows = cast("Callable[[Float32s, int, Array, int, Array, int, int, int, int], None]", _sum_rows)
