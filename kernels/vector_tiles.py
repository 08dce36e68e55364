"""The tiles of tiles.py where the processor has no matrix unit: the same instructions out of vector registers.

A product of tiles is sixteen times sixteen steps of one word of A, in all lanes, times a row of B. Where the processor
multiplies pairs of bfloat16 (AVX512-BF16) a step is one instruction, else two multiply-adds of float32.

Tiles 0 to 3 are sums: they lie on the stack of the kernel that names them. Tiles 4 to 7 are factors: they stay where
they were loaded from, so that memory must not change before they are multiplied, and their rows lie LINE bytes apart.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Code generators get Numba's builder and types, which have no annotations.

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from niwaki.kernels.simd import FLOATS, INTS

ROWS = 16
WORDS = 16
LINE = 64
NUM_SUMS = 4  # tiles that are sums; those behind them are factors

BYTE, WORD, LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
POINTER = BYTE.as_pointer()
SUMS = ir.ArrayType(FLOATS, ROWS)


class _Halves(ir.Type):
    """LLVM's <32 x bfloat>, which llvmlite has no name for."""

    def _to_string(self):
        return "<32 x bfloat>"

    def __eq__(self, other):
        return isinstance(other, _Halves)

    def __hash__(self):
        return hash(_Halves)


HALVES = _Halves()


@cache
def multiplies_pairs() -> bool:
    """Whether the processor has an instruction for sixteen sums of two products of bfloat16 each."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512bf16") and features.get("avx512f"))


def clear(builder, tile: int) -> None:
    zero = ir.Constant(FLOATS, None)
    for row in _rows_of(builder, tile):
        builder.store(zero, row)


def load(builder, tile: int, memory, stride) -> None:
    """`memory`: where row 0 begins; `stride`: bytes from row to row."""
    if tile >= NUM_SUMS:
        builder.store(memory, _place_of(builder, tile))
        return
    for number, row in enumerate(_rows_of(builder, tile)):
        builder.store(builder.load(_at(builder, memory, stride, number), align=4), row)


def store(builder, tile: int, memory, stride) -> None:
    for number, row in enumerate(_rows_of(builder, tile)):
        builder.store(builder.load(row), _at(builder, memory, stride, number), align=4)


def multiply(builder, c: int, a: int, b: int) -> None:
    """c += a b."""
    sums = builder.bitcast(_sums_of(builder, c), POINTER)
    factors = [builder.load(_place_of(builder, tile)) for tile in (a, b)]
    builder.call(_product(builder.module), [sums, *factors])


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


def _product(module):
    """The function (sums, a, b) that adds a product of tiles; one in each module."""
    name = "niwaki_product_of_tiles"
    found = module.globals.get(name)
    if found is not None:
        return found
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER] * 3), name)
    function.linkage = "internal"
    sums, a, b = function.args
    for pointer in function.args:
        pointer.add_attribute("noalias")
    entry = function.append_basic_block("entry")
    loop = function.append_basic_block("loop")
    done = function.append_basic_block("done")
    builder = ir.IRBuilder(entry)
    places = [
        builder.bitcast(builder.gep(sums, [LONG(row * LINE)], inbounds=True), FLOATS.as_pointer())
        for row in range(ROWS)
    ]
    before = [builder.load(place, align=LINE) for place in places]
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(LONG)
    totals = [builder.phi(FLOATS) for _ in range(ROWS)]
    row_of_b = builder.gep(b, [builder.mul(step, LONG(LINE))], inbounds=True)
    pairs = builder.load(builder.bitcast(row_of_b, INTS.as_pointer()), align=4)
    column = builder.gep(a, [builder.mul(step, LONG(4))], inbounds=True)
    after = []
    for row, total in enumerate(totals):
        address = builder.gep(column, [LONG(row * LINE)], inbounds=True)
        word = builder.load(builder.bitcast(address, WORD.as_pointer()), align=4)
        after.append(_step(builder, total, _everywhere(builder, word), pairs))
    following = builder.add(step, LONG(1))
    step.add_incoming(LONG(0), entry)
    step.add_incoming(following, loop)
    for total, first, last in zip(totals, before, after, strict=True):
        total.add_incoming(first, entry)
        total.add_incoming(last, loop)
    builder.cbranch(builder.icmp_unsigned("<", following, LONG(WORDS)), loop, done)
    builder.position_at_end(done)
    for place, last in zip(places, after, strict=True):
        builder.store(last, place, align=LINE)
    builder.ret_void()
    return function


def _everywhere(builder, word):
    one = builder.insert_element(ir.Constant(INTS, ir.Undefined), word, WORD(0))
    return builder.shuffle_vector(one, ir.Constant(INTS, ir.Undefined), ir.Constant(INTS, None))


def _step(builder, total, word, pairs):
    """total + the products of both halves of the words."""
    if multiplies_pairs():
        kind = ir.FunctionType(FLOATS, [FLOATS, HALVES, HALVES])
        dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(dot, [total, builder.bitcast(word, HALVES), builder.bitcast(pairs, HALVES)])
    half, upper = ir.Constant(INTS, [16] * WORDS), ir.Constant(INTS, [-(2**16)] * WORDS)
    fused = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(FLOATS, [FLOATS] * 3), "llvm.fma.v16f32"
    )
    for parts in ([builder.and_(each, upper) for each in (word, pairs)], [builder.shl(each, half) for each in (word, pairs)]):
        x, y = (builder.bitcast(part, FLOATS) for part in parts)
        total = builder.call(fused, [x, y, total])
    return total
