"""A product with weights of few bits as a line of layers.py: its blocks are shared among the threads of a step.

A line of it names the kernel that reads its kind of codes, so that `layers.work` need not be compiled with all of them.
"""

from __future__ import annotations

import numpy as np

from niwaki.kernels.atomics import row_at, rows_at
from niwaki.kernels.calls import Called, address_of
from niwaki.kernels.coded import CodedLinear, columns_of
from niwaki.kernels.jit import jit
from niwaki.kernels.operand import Array
from niwaki.kernels.packed_rows import WIDE
from niwaki.kernels.tiles import WHOLE

# Of a line, behind its kind and whether it is of the wanted tokens only.
X, CODES, OUT, INPUTS, OUTPUTS, BIAS, SCALES, ZEROS, SPANS, KERNEL = range(2, 12)
WIDTH = 12
BASE = 1 << 20  # of the digits of SPANS: columns of tiles that share scales, and that share zeros

# Kinds of memory.
INT8S, UINT8S = np.empty(0, np.int8), np.empty(0, np.uint8)
INT16S, UINT16S = np.empty(0, np.int16), np.empty(0, np.uint16)
INT64S, FLOATS = np.empty(0, np.int64), np.empty(0, np.float32)


def line_of(product: CodedLinear) -> list[int]:
    """A line from the codes on; `X` and `OUT` are left to who writes it. The product has to live as long."""
    numbers = [0] * WIDTH
    arrays = {CODES: product.codes, BIAS: product.bias, SCALES: product.scales, ZEROS: product.zeros}
    for place, array in arrays.items():
        numbers[place] = array.ctypes.data
    numbers[INPUTS], numbers[OUTPUTS] = product.inputs, product.outputs
    numbers[SPANS] = product.span + BASE * product.zero_span
    numbers[KERNEL] = address_of(KERNELS[product.codes.dtype])
    return numbers


@jit(inline=True)
def _columns(place: int, rows: int, out: int, first: int, last: int, like: Array) -> None:
    """Blocks `first` to `last` of the line at `place`, of the codes' kind; out [rows, outputs] bfloat16."""
    line = row_at(place, WIDTH, INT64S)
    inputs, outputs = line[INPUTS], line[OUTPUTS]
    blocks, depth = (outputs + WIDE - 1) // WIDE, (inputs + WIDE - 1) // WIDE
    span, zero_span = line[SPANS] % BASE, line[SPANS] // BASE
    groups, zero_groups = (depth + span - 1) // span, (depth + zero_span - 1) // zero_span
    has_words = like.itemsize == 2  # of four numbers
    columns_of(
        rows_at(line[X], rows, inputs, UINT16S),
        row_at(line[CODES], blocks * depth * WIDE * WIDE // (4 if has_words else 1), like),
        row_at(line[SCALES], blocks * groups * WIDE, FLOATS),
        row_at(line[ZEROS], blocks * zero_groups * WIDE if has_words else 0, UINT8S),
        row_at(line[BIAS], blocks * WIDE, FLOATS),
        span, zero_span, rows_at(out, rows, outputs, UINT16S), WHOLE, first, min(last, blocks),
    )  # fmt: skip


@jit()
def _int8(place: int, rows: int, out: int, first: int, last: int) -> None:
    _columns(place, rows, out, first, last, INT8S)


@jit()
def _e4m3(place: int, rows: int, out: int, first: int, last: int) -> None:
    _columns(place, rows, out, first, last, UINT8S)


@jit()
def _int4(place: int, rows: int, out: int, first: int, last: int) -> None:
    _columns(place, rows, out, first, last, UINT16S)


@jit()
def _e2m1(place: int, rows: int, out: int, first: int, last: int) -> None:
    _columns(place, rows, out, first, last, INT16S)


KERNELS: dict[np.dtype[np.generic], Called] = {
    np.dtype(np.int8): _int8,
    np.dtype(np.uint8): _e4m3,
    np.dtype(np.uint16): _int4,
    np.dtype(np.int16): _e2m1,
}
