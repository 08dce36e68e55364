"""A matrix product for the rows of a batch that decodes: out = x W^T + bias, bfloat16, where vectors stand for the
matrix unit (vector_tiles.py). W lies as in a checkpoint.

Each word of W, a pair of inputs, is multiplied with the pairs of sixteen rows at once, so the sums come out in lanes
and nothing is added across a vector. x is laid out for that; the sums are turned back as they are stored.

On one core of an EPYC with AVX512-BF16 (23 November 2026, least of 60), us for torch.mm / linear.py / this:

    rows              8            16           32         64         96         256
    [512, 256]        23/26/15     27/50/14     36/-/25    53/-/49    72/-/73    162/-/196
    [1408, 256]       41/48/37     53/138/37    79/-/67    127/-/134  175/-/198  414/-/520
    [256, 704]        28/19/18     34/39/17     46/-/31    70/-/60    96/-/92    214/-/233
    [1024, 1024]      95/108/89    133/475/94   209/-/178  343/-/340  485/-/510  1195/-/1360
"""

from __future__ import annotations

import numpy as np
from numba import prange

from niwaki.kernels.checks import check_arrays
from niwaki.kernels.jit import for_any_thread, get_num_threads, jit
from niwaki.kernels.numeric import load
from niwaki.kernels.operand import Array
from niwaki.kernels.partial import Float32s
from niwaki.kernels.simd import LANES
from niwaki.kernels.simd_memory import load16, store_bfloat16, transpose16
from niwaki.kernels.tiles import (
    LINE,
    ROWS,
    aligned,
    clear,
    has_matrix_unit,
    multiply_along,
    store_tile,
)
from niwaki.kernels.vector_tiles import multiplies_pairs

SLICE = 32  # inputs that a row of a tile holds
TILE = 256  # words
TALL = 2 * ROWS  # outputs that go together, and rows of x


MIN_ROWS, MAX_ROWS = 6, 32  # outside of these linear.py or torch is as fast

# Products (rows x inputs x outputs) from which threads pay, as in packed.py.
MIN_PARALLEL_PRODUCTS = 500_000_000


def takes(x: Array, weight: Array) -> bool:
    """Whether `linear_tiles` can do this product, and is the quickest to."""
    outputs, inputs = weight.shape
    # Rows of W that lie a multiple of 4096 bytes apart push each other out of the nearest cache.
    fits = inputs % SLICE == 0 and outputs % ROWS == 0 and inputs % 2048 != 0 and x.dtype == np.uint16
    return fits and MIN_ROWS <= len(x) <= MAX_ROWS and multiplies_pairs() and not has_matrix_unit()


def linear_tiles(x: Array, weight: Array, bias: Array | None, out: Array) -> None:
    """x [rows, inputs], weight [outputs, inputs], bias [outputs], out [rows, outputs]; bfloat16, rows contiguous.

    A product that `takes` allows.
    """
    outputs, inputs = weight.shape
    bias = weight[:0, 0] if bias is None else bias
    check_arrays(
        "linear_tiles",
        np.dtype(np.uint16),
        x=(x, (out.shape[0], inputs)),
        weight=(weight, weight.shape),
        bias=(bias, (outputs if len(bias) else 0,)),
        out=(out, (x.shape[0], outputs)),
    )
    blocks = -(-outputs // TALL)
    threads = min(get_num_threads(), blocks)
    if threads == 1 or len(x) * weight.size < MIN_PARALLEL_PRODUCTS:
        _all_columns(x, weight, bias, out, 0, blocks)
    else:
        _columns_parallel(x, weight, bias, out, threads)


@jit(parallel=True)
def _columns_parallel(x: Array, weight: Array, bias: Array, out: Array, parts: int) -> None:
    blocks = (weight.shape[0] + TALL - 1) // TALL
    for part in prange(parts):
        _columns(x, weight, bias, out, blocks * part // parts, blocks * (part + 1) // parts)


@jit()
def _columns(x: Array, weight: Array, bias: Array, out: Array, first_block: int, last_block: int) -> None:
    """Outputs TALL x first_block to TALL x last_block. Inputs are a multiple of SLICE, outputs of ROWS."""
    columns_of(lay_pairs(x), weight, bias, out, first_block, last_block)


@jit()
def lay_pairs(x: Array) -> Float32s:
    """x [rows, inputs] as tiles [group of 16 rows, SLICE of inputs] of pairs of inputs by rows, from the first place on
    that is `aligned`."""
    rows, inputs = x.shape
    depth = inputs // SLICE
    flat = x.reshape(-1)
    laid = np.empty((rows + ROWS - 1) // ROWS * depth * TILE + LANES, np.float32)
    laid0 = aligned(laid)
    whole = rows // ROWS * ROWS
    for row in range(0, whole, ROWS):
        for k in range(depth):
            transpose16(flat, row * inputs + k * SLICE, inputs, laid, laid0 + (row // ROWS * depth + k) * TILE)
    if whole < rows:
        last = np.zeros(ROWS * inputs, x.dtype)
        last[: (rows - whole) * inputs] = flat[whole * inputs :]
        for k in range(depth):
            transpose16(last, k * SLICE, inputs, laid, laid0 + (whole // ROWS * depth + k) * TILE)
    return laid


@jit()
def columns_of(laid: Float32s, weight: Array, bias: Array, out: Array, first_block: int, last_block: int) -> None:
    """As `_columns`, of the rows that `lay_pairs` laid out."""
    rows = out.shape[0]
    outputs, inputs = weight.shape
    depth = inputs // SLICE
    groups = (rows + ROWS - 1) // ROWS  # of rows of x
    flat = weight.reshape(-1)
    sums = np.empty(4 * TILE + LANES, np.float32)  # [half of the outputs, group of two] tiles of outputs by rows
    turned = np.empty(TILE, np.float32)
    laid0, sums0 = aligned(laid), aligned(sums)
    for block in range(first_block, last_block):
        output = block * TALL
        is_tall = output + ROWS < outputs
        for group in range(0, groups, 2):
            is_wide = group + 1 < groups
            _product(
                flat, output * inputs, inputs, is_tall, laid, laid0 + group * depth * TILE, depth, is_wide, sums, sums0
            )
            for half in range(2):
                for side in range(2):
                    if (half == 0 or is_tall) and (side == 0 or is_wide):
                        first = output + half * ROWS
                        place = sums0 + (2 * half + side) * TILE
                        _put(sums, place, turned, bias, out, (group + side) * ROWS, rows, first)


_all_columns = for_any_thread(_columns)


@jit()
def _product(
    weight: Array, place: int, inputs: int, is_tall: bool, laid: Array, laid0: int, depth: int, is_wide: bool,
    sums: Array, sums0: int,
) -> None:  # fmt: skip
    """Sums [2 x 16 outputs, 2 x 16 rows]; of the second sixteen outputs where `is_tall`, rows where `is_wide`."""
    clear(0)
    clear(1)
    clear(2)
    clear(3)
    stride, step, below = inputs * 2, SLICE * 2, TILE * 4
    multiply_along(0, weight, place, stride, step, laid, laid0, below, depth)
    if is_wide:
        multiply_along(1, weight, place, stride, step, laid, laid0 + depth * TILE, below, depth)
    if is_tall:
        second = place + ROWS * inputs
        multiply_along(2, weight, second, stride, step, laid, laid0, below, depth)
        if is_wide:
            multiply_along(3, weight, second, stride, step, laid, laid0 + depth * TILE, below, depth)
    store_tile(0, sums, sums0, LINE)
    store_tile(1, sums, sums0 + TILE, LINE)
    store_tile(2, sums, sums0 + 2 * TILE, LINE)
    store_tile(3, sums, sums0 + 3 * TILE, LINE)


@jit()
def _put(
    sums: Array, place: int, turned: Array, bias: Array, out: Array, first_row: int, rows: int, output: int
) -> None:
    """out[first_row + r, output : output + 16] = column r of the tile of sums."""
    transpose16(sums, place, LANES, turned, 0)
    stride = out.strides[0] // out.itemsize
    for j in range(LANES if bias.shape[0] else 0):
        offset = load(bias[output + j])
        for r in range(ROWS):
            turned[r * LANES + j] += offset
    for r in range(min(ROWS, rows - first_row)):
        store_bfloat16(out, (first_row + r) * stride + output, load16(turned, r * LANES))
