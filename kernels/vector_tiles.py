"""The tiles of tiles.py where the processor has no matrix unit: the same instructions out of vector registers.

A product of tiles is sixteen times sixteen steps of one word of A, in all lanes, times a row of B. Where the processor
multiplies pairs of bfloat16 (AVX512-BF16) a step is one instruction, else two multiply-adds of float32.

Tiles 0 to 3 are sums: they lie on the stack of the kernel that names them. Tiles 4 to 7 are factors: they stay where
they were loaded from, so that memory must not change before they are multiplied. B's rows lie LINE bytes apart.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Code generators get Numba's builder and types, which have no annotations.

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from numba.core import cgutils

from niwaki.kernels.jit import compiles_for_this_processor
from niwaki.kernels.simd import FLOATS, INTS, in_all_lanes

ROWS = 16
WORDS = 16
LINE = 64
NUM_SUMS = 4  # tiles that are sums; those behind them are factors

BYTE, WORD, LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
POINTER = BYTE.as_pointer()
SUMS = ir.ArrayType(FLOATS, ROWS)


@cache
def multiplies_pairs() -> bool:
    """Whether the processor has an instruction for sixteen sums of two products of bfloat16 each. Where it has, `_step`
    is written in it: so the first call, which comes before any kernel is compiled or read from disk, tells LLVM how to
    read that."""
    features = llvm.get_host_cpu_features()
    has_instruction = bool(features.get("avx512bf16")) and compiles_for_this_processor()
    if has_instruction:
        llvm.initialize_native_asmparser()
    return has_instruction


@cache
def rounds_by_instruction() -> bool:
    """Whether numbers are rounded to bfloat16 by the instruction for it (AVX512-BF16), which makes a zero of what is
    too small to be a normal number, and else gives the same bits. Not beside a matrix unit, where nobody timed it."""
    return multiplies_pairs() and not torch.cpu._is_amx_tile_supported()


def clear(builder, tile: int) -> None:
    zero = ir.Constant(FLOATS, None)
    for row in _rows_of(builder, tile):
        builder.store(zero, row)


def load(builder, tile: int, memory, stride) -> None:
    """`memory`: where row 0 begins; `stride`: bytes from row to row."""
    if tile >= NUM_SUMS:
        builder.store(memory, _place_of(builder, tile))
        builder.store(stride, _stride_of(builder, tile))
        return
    for number, row in enumerate(_rows_of(builder, tile)):
        builder.store(builder.load(_at(builder, memory, stride, number), align=4), row)


def store(builder, tile: int, memory, stride) -> None:
    for number, row in enumerate(_rows_of(builder, tile)):
        builder.store(builder.load(row), _at(builder, memory, stride, number), align=4)


def multiply(builder, c: int, a: int, b: int) -> None:
    """c += a b."""
    sums = builder.bitcast(_sums_of(builder, c), POINTER)
    first, second = (builder.load(_place_of(builder, tile)) for tile in (a, b))
    builder.call(_product(builder.module), [sums, first, builder.load(_stride_of(builder, a)), second])


def _at(builder, memory, stride, row: int):
    offset = builder.mul(stride, LONG(row))
    return builder.bitcast(builder.gep(memory, [offset]), FLOATS.as_pointer())


def _slot(builder, kind, name: str):
    """A variable of this kind, one for each name in a kernel."""
    entry = builder.function.entry_basic_block
    found = next((one for one in entry.instructions if one.name == name), None)
    if found is None:
        with builder.goto_entry_block():
            found = builder.alloca(kind, name=name)
        found.align = LINE
    return found


def _sums_of(builder, tile: int):
    return _slot(builder, SUMS, f"niwaki.sums.{tile}")


def _rows_of(builder, tile: int):
    sums = _sums_of(builder, tile)
    return [builder.gep(sums, [WORD(0), WORD(row)], inbounds=True) for row in range(ROWS)]


def _place_of(builder, tile: int):
    return _slot(builder, POINTER, f"niwaki.factor.{tile}")


def _stride_of(builder, tile: int):
    return _slot(builder, LONG, f"niwaki.stride.{tile}")


def _product(module):
    """The function (sums, a, bytes between rows of a, b) that adds a product of tiles; one in each module."""
    function, builder = function_of(module, "niwaki_product", [POINTER, POINTER, LONG, POINTER])
    if builder is None:
        return function
    sums, a, stride, b = function.args
    entry = builder.block
    loop = function.append_basic_block("loop")
    done = function.append_basic_block("done")
    places = lines_from(builder, sums, ROWS)
    before = [builder.load(place, align=LINE) for place in places]
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(LONG)
    totals = [builder.phi(FLOATS) for _ in places]
    line = builder.gep(b, [builder.mul(step, LONG(LINE))], inbounds=True)
    pairs = builder.load(builder.bitcast(line, INTS.as_pointer()), align=4)
    of_a = RowsOf(builder, builder.gep(a, [builder.mul(step, LONG(4))], inbounds=True), stride)
    after = [add_products(builder, total, of_a, row, pairs) for row, total in enumerate(totals)]
    next_step = builder.add(step, LONG(1))
    step.add_incoming(LONG(0), entry)
    step.add_incoming(next_step, loop)
    for total, first, last in zip(totals, before, after, strict=True):
        total.add_incoming(first, entry)
        total.add_incoming(last, loop)
    builder.cbranch(builder.icmp_unsigned("<", next_step, LONG(WORDS)), loop, done)

    builder.position_at_end(done)
    for place, last in zip(places, after, strict=True):
        builder.store(last, place, align=LINE)
    builder.ret_void()
    return function


def function_of(module, name: str, kinds):
    """The function of that name, and where to write it, or None where the module has it."""
    if name in module.globals:
        return module.globals[name], None
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")  # kernels get half as long, and are as quick
    for argument in function.args:
        if argument.type == POINTER:
            argument.add_attribute("noalias")
    return function, ir.IRBuilder(function.append_basic_block("entry"))


def lines_from(builder, first, count: int):
    """Pointers to so many vectors that follow one another."""
    return [
        builder.bitcast(builder.gep(first, [LONG(line * LINE)], inbounds=True), FLOATS.as_pointer())
        for line in range(count)
    ]


class RowsOf:
    """Where the rows of A have the word at hand: row r at r strides, as processors address it."""

    def __init__(self, builder, first, stride):
        ninth = builder.gep(first, [builder.mul(stride, LONG(8))])
        self._bases = (first, ninth)
        self._odd = {odd: builder.mul(stride, LONG(odd)) for odd in (1, 3, 5, 7)}

    def of(self, row: int):
        """A base, a step, and how often it is added to the base: 0, 1, 2, 4."""
        base, rest = self._bases[row // 8], row % 8
        times = next(times for times in (4, 2, 1) if rest % times == 0)
        return base, self._odd[rest // times or 1], times if rest else 0


def add_products(builder, total, rows, row: int, pairs):
    """total + the products of both halves of the words: that of `row`, in all lanes, and `pairs`."""
    base, step, times = rows.of(row)
    if multiplies_pairs():
        # LLVM's own instruction would load the words ahead into vectors, for which it then has no registers.
        address = f"($2,$3,{times})" if times else "($2)"
        kind = ir.FunctionType(FLOATS, [FLOATS, POINTER, LONG, INTS])
        text = f"vdpbf16ps {address}{{1to16}}, $4, $0"
        return builder.call(
            ir.InlineAsm(kind, text, "=v,0,r,r,v,~{memory}", side_effect=True), [total, base, step, pairs]
        )
    address = builder.gep(base, [builder.mul(step, LONG(times))])
    word = in_all_lanes(builder, builder.load(builder.bitcast(address, WORD.as_pointer()), align=4))
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOATS, [FLOATS] * 3), "llvm.fma.v16f32")
    half, upper = ir.Constant(INTS, [16] * WORDS), ir.Constant(INTS, [-(2**16)] * WORDS)
    for x, y in (
        [builder.shl(each, half) for each in (word, pairs)],
        [builder.and_(each, upper) for each in (word, pairs)],
    ):
        total = builder.call(fused, [builder.bitcast(x, FLOATS), builder.bitcast(y, FLOATS), total])
    return total
