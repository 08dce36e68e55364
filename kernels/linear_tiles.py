"""A matrix product in bfloat16 where vectors stand for the matrix unit: out = x W^T + bias. W lies as in a checkpoint.

The innermost loops are pair_products.py's: lanes are rows of x, so x is laid out in pairs of inputs by rows, and the
sums are turned back as they are stored. Rows go ROWS_AT_ONCE at a time: laid out, they stay in the nearest cache but
one while W passes by. Up to MAX_ROWS behind the last whole group go by few_pairs.py.

On one core of an EPYC with AVX512-BF16 (23 November 2026, least of 60), us for torch.mm / linear.py / this:

    rows              16           32         64         96         512
    [512, 256]        26/39/18     35/-/25    52/-/43    69/-/63    297/-/309
    [1408, 256]       51/96/37     76/-/59    121/-/109  166/-/159  782/-/813
    [256, 704]        31/44/22     45/-/32    67/-/57    92/-/83    407/-/410
    [1024, 1024]      127/460/105  203/-/151  333/-/289  465/-/430  2280/-/2276
    [2048, 2048]      458/2621/439 761/-/601  1351/-/1164 1968/-/1784 9597/-/9608
    [1024, 2816]      315/1667/241 525/-/394  881/-/764  1267/-/1176 6554/-/6487
"""

from __future__ import annotations

import numpy as np
from numba import prange

from niwaki.kernels.checks import check_product
from niwaki.kernels.few_pairs import AT_ONCE, MAX_ROWS, fits_pairs, put_few
from niwaki.kernels.jit import for_any_thread, get_num_threads, jit
from niwaki.kernels.numeric import load
from niwaki.kernels.operand import Array
from niwaki.kernels.pair_products import OUTPUTS, sum_of_one, sum_of_two, sum_of_two_and_ask
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd import LANES, multiply_add, splat
from niwaki.kernels.simd_memory import load16, prefetch_to_write, store16, store_pair, transpose16, transpose16_apart
from niwaki.kernels.tiles import ROWS, aligned

SLICE = 32  # inputs that a row of a tile holds
TILE = 256  # words
TALL = 2 * ROWS  # outputs that go together
APART = 4 * TILE  # bytes from the sums of a group of rows to those of the next
ROWS_AT_ONCE = 64

# Products (rows x inputs x outputs) from which threads pay, as in packed.py.
MIN_PARALLEL_PRODUCTS = 500_000_000
NOTHING_LATER = np.empty(0, np.int64)


def takes(x: Array, weight: Array) -> bool:
    """Whether `linear_tiles` can do this product, and is the quickest to."""
    return len(x) > MAX_ROWS and fits_pairs(x, weight)


def linear_tiles(x: Array, weight: Array, bias: Array | None, out: Array) -> None:
    """x [rows, inputs], weight [outputs, inputs], bias [outputs], out [rows, outputs]; bfloat16, rows contiguous.

    A product that `takes` allows.
    """
    bias = check_product("linear_tiles", np.dtype(np.uint16), x, weight, bias, out)
    threads = get_num_threads()
    if threads == 1 or len(x) * weight.size < MIN_PARALLEL_PRODUCTS:
        _all_units(x, weight, bias, out, 1, 0, units_of(len(x), len(weight), 1))
    else:
        _units_parallel(x, weight, bias, out, threads)


@jit()
def units_of(rows: int, outputs: int, parts: int) -> int:
    """How many units a product is divided into, for so many to share at least, where it can be."""
    return blocks_of(rows) * ranges_of(rows, outputs, parts)


@jit()
def blocks_of(rows: int) -> int:
    return (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE


@jit()
def ranges_of(rows: int, outputs: int, parts: int) -> int:
    """Ranges of outputs that are a unit each, for every block of rows. One, where there are blocks enough: who takes
    one lays its rows out."""
    blocks = blocks_of(rows)
    return min((parts + blocks - 1) // blocks, (outputs + TALL - 1) // TALL)


@jit(parallel=True)
def _units_parallel(x: Array, weight: Array, bias: Array, out: Array, parts: int) -> None:
    units = units_of(x.shape[0], weight.shape[0], parts)
    for part in prange(parts):
        _units(x, weight, bias, out, parts, units * part // parts, units * (part + 1) // parts)


@jit()
def _units(x: Array, weight: Array, bias: Array, out: Array, parts: int, first: int, last: int) -> None:
    rows, outputs = x.shape[0], weight.shape[0]
    ranges, block = ranges_of(rows, outputs, parts), -1
    laid = np.empty(0, np.float32)
    for unit in range(first, last):
        if unit // ranges != block:
            block = unit // ranges
            laid = lay_pairs(x[block * ROWS_AT_ONCE : (block + 1) * ROWS_AT_ONCE])
        columns_of(laid, x, weight, bias, out, block, unit % ranges, ranges, NOTHING_LATER, 0, 0, 0, 0)


_all_units = for_any_thread(_units)


@jit()
def _rows_in_lanes(rows: int) -> int:
    """Of a block of rows: those that fill a group of 16, or most of it. The others are quicker by few_pairs.py."""
    whole = rows // ROWS * ROWS
    return whole if rows - whole <= MAX_ROWS else rows


@jit()
def lay_pairs(x: Array) -> Float32s:
    """x [rows, inputs] as tiles [group of 16 rows, SLICE of inputs] of pairs of inputs by rows, from the first place on
    that is `aligned`; as many rows as go in lanes."""
    rows, inputs = _rows_in_lanes(x.shape[0]), x.shape[1]
    depth = inputs // SLICE
    flat = x.reshape(-1)
    laid = np.empty((rows + ROWS - 1) // ROWS * depth * TILE + LANES, np.float32)
    laid0 = aligned(laid)
    whole = rows // ROWS * ROWS
    for row in range(0, whole, ROWS):
        for k in range(depth):
            transpose16(flat, row * inputs + k * SLICE, inputs, laid, laid0 + (row // ROWS * depth + k) * TILE)
    if whole < rows:
        last = np.zeros(TILE, np.float32)
        for k in range(depth):
            for row in range(whole, rows):
                store16(last, (row - whole) * LANES, load16(flat, row * inputs + k * SLICE))
            transpose16(last, 0, LANES, laid, laid0 + (whole // ROWS * depth + k) * TILE)
    return laid


@jit()
def columns_of(
    laid: Float32s, x: Array, weight: Array, bias: Array, all_out: Array, block: int, number: int, ranges: int,
    asks: Int64s, keys: int, values: int, ask: int, end_ask: int,
) -> None:  # fmt: skip
    """Range `number` of so many `ranges` of outputs, for the block of rows of x that `lay_pairs` laid out. Inputs are a
    multiple of SLICE, outputs of ROWS. Meanwhile memory is asked for pieces `ask` to `end_ask` of later.py."""
    out = all_out[block * ROWS_AT_ONCE : (block + 1) * ROWS_AT_ONCE]
    flat_x = x[block * ROWS_AT_ONCE : (block + 1) * ROWS_AT_ONCE].reshape(-1)
    all_rows, rows = out.shape[0], _rows_in_lanes(out.shape[0])
    outputs, inputs = weight.shape
    depth = inputs // SLICE
    groups = (rows + ROWS - 1) // ROWS  # of rows of x
    flat, flat_out, out_stride = weight.reshape(-1), out.reshape(-1), out.strides[0] // out.itemsize
    sums = np.empty(4 * TILE + LANES, np.float32)  # [half of the outputs, group of two] tiles of outputs by rows
    pairs, turned = np.empty(2 * TILE, np.uint16), np.empty(TILE, np.float32)
    laid0, sums0 = aligned(laid), aligned(sums)
    scratch = np.zeros((AT_ONCE + 1) * LANES, np.float32)
    stride, step_ahead = inputs * 2, TALL * inputs * 2
    steps = (outputs + TALL - 1) // TALL
    for step in range(steps * number // ranges, steps * (number + 1) // ranges):
        output = step * TALL
        is_tall = output + ROWS < outputs
        for group in range(0, groups, 2):
            at, sides = laid0 + group * depth * TILE, min(2, groups - group)
            ahead = step_ahead if group == 0 else 0
            first = group * ROWS * out_stride + output
            for some in range(output, output + (TALL if is_tall else ROWS), OUTPUTS):
                place = sums0 + ((some - output) // ROWS * 2 * ROWS + some % ROWS) * LANES
                for row in range(some - output, min(some - output + OUTPUTS, rows - group * ROWS)):
                    prefetch_to_write(flat_out, first + row * out_stride)  # else each waits for the one before
                if sides == 2 and ask < end_ask:
                    is_value = ask >= asks.shape[0]
                    own = ask - asks.shape[0] if is_value else ask
                    pieces = min(depth, (end_ask if is_value else min(end_ask, asks.shape[0])) - ask)
                    sum_of_two_and_ask(
                        sums, place, APART, flat, some * inputs, stride, laid, at, depth, ahead, asks, own,
                        values if is_value else keys, pieces
                    )  # fmt: skip
                    ask += pieces
                elif sides == 2:
                    sum_of_two(sums, place, APART, flat, some * inputs, stride, laid, at, depth, ahead)
                else:
                    sum_of_one(sums, place, APART, flat, some * inputs, stride, laid, at, depth, ahead)
            for side in range(sides):
                row = (group + side) * ROWS
                _put(sums, sums0 + side * TILE, pairs, turned, bias, out, row, min(ROWS, rows - row), output, is_tall)
        for some in range(output, min(output + TALL, outputs) if rows < all_rows else output, LANES):
            put_few(flat_x, rows, all_rows, flat, bias, flat_out, some, inputs, outputs, scratch)


@jit(inline=True)
def _put(
    sums: Array, place: int, pairs: Array, turned: Float32s, bias: Array, out: Array, first_row: int, rows: int,
    output: int, is_tall: bool,
) -> None:  # fmt: skip
    """out[first_row + r, output + j] = sum [j, r], of 32 outputs or 16."""
    halves, one = 2 if is_tall else 1, splat(np.float32(1.0))
    for half in range(halves):
        tile = place + half * 2 * TILE
        for j in range(LANES if bias.shape[0] else 0):
            offset = splat(load(bias[output + half * ROWS + j]))
            store16(sums, tile + j * LANES, multiply_add(load16(sums, tile + j * LANES), one, offset))
        for j in range(0, ROWS, 2):
            low, high = load16(sums, tile + j * LANES), load16(sums, tile + (j + 1) * LANES)
            store_pair(pairs, (half * ROWS + j) * LANES, low, high)
    stride = out.strides[0] // out.itemsize
    first = first_row * stride + output
    if is_tall and rows == ROWS:
        transpose16_apart(pairs, 0, 2 * LANES, out, first, stride)
        return
    transpose16(pairs, 0, 2 * LANES, turned, 0)
    if is_tall:
        words = out.reshape(-1).view(np.float32)
        for r in range(rows):
            store16(words, (first + r * stride) // 2, load16(turned, r * LANES))
        return
    halves_of = turned.view(np.uint16)
    for r in range(rows):
        for j in range(ROWS):
            out[first_row + r, output + j] = halves_of[r * 2 * LANES + j]
