"""A matrix product with weights laid out for the CPU's matrix unit (tiles.py): out = x W^T + bias, bfloat16.

Rows of x go through in blocks of 32, two tiles, against sixteen outputs at a time, one tile more: two products for each
32 columns. The weights lie in the order in which they are read, so a step streams them once; rows are read where they
lie, if there are enough for a tile and they have no odd columns. A row's result does not depend on the rows beside it.

Beside oneDNN's product with weights in its own order, which had served before, on one core of a Xeon with AMX, 22
November 2026, time of oneDNN / time of an earlier version of this, on copies of the weights that no cache holds:

    rows              1      8      16     32
    [640, 384]      2.3    3.0    2.1    1.8
    [1920, 384]     1.8    1.6    1.6    1.6
    [384, 960]      2.1    2.2    2.0    1.6
    [4096, 1024]    1.3    1.3    1.4    1.2

Many rows, one core, 26 November 2026, TFLOP/s: an earlier version multiplied L15's four products at 0.74 to 1.01, of 64
to 2,048 rows, torch at 0.37 to 0.53 (64 rows), 1.17 to 1.29 (512) and 1.32 to 1.57 (2,048), alone. The unit does 2.1 of
such numbers, and 2.9 of zeros, so benchmarks want numbers. Sums of 12 steps lose a fifth on their way out of the tiles,
in every order of the stores that was tried.

For seconds at a time a core is slow at loads of tiles between products, while products alone, and vectors, go on as
before: four loads and four products into four sums, which use all eight tiles, then take 119 ns instead of 28. What
takes long is to load a tile while many others hold something, as if there were few places to load one to: with 6 tiles
in use a product takes 19 ns, with 4 or 5 it takes 15 to 17, with 8 it takes 30, and 7 in all cases otherwise. So four
are in use here, though x is read twice as often, on such a core and for few rows; many rows on another core go by
packed_rows.py, with eight. Which it is a core is asked before each product that is worth it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import prange

from niwaki.kernels.checks import check_arrays
from niwaki.kernels.jit import for_any_thread, get_num_threads, jit
from niwaki.kernels.numeric import store
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.packed_rows import BLOCK, TILE, WIDE, blocks_of_rows, has_room, places_of
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd import LANES, silu, times
from niwaki.kernels.simd_memory import load16, store16, store_bfloat16
from niwaki.kernels.simd_stores import rounded, store_both_bfloat16, store_rounded
from niwaki.kernels.tiles import (
    LINE,
    ROWS,
    WHOLE,
    Bytes,
    aligned,
    clear,
    configure,
    has_matrix_unit,
    load_tile,
    multiply,
    release,
    store_tile,
)
from niwaki.kernels.vector_tiles import multiplies_pairs

# Of weights that stay in a core's cache while rows pass them, and of these rows: it holds both. Rows of 500,000 bytes
# took 1.1 to 1.5 times as long on [512, 1536], [5632, 1024] and [1024, 2816], of 1,600,000 bytes 1.0 to 1.2 times.
CHUNK_BYTES = 500_000
ROWS_BYTES = 800_000

LEAST_QUICK = 1000  # sets of four products, 28 us, from which on to ask how to do them costs 3 % at most
ROUNDS = multiplies_pairs()  # whether the processor, and whoever told Numba of it, has an instruction for that

# Products (rows x inputs x outputs) from which threads pay: about a millisecond for one.
MIN_PARALLEL_PRODUCTS = 500_000_000


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights [outputs, inputs] as tiles [outputs / 16, inputs / 32, 16 pairs of inputs, 16 outputs, 2], filled up with
    zeros to whole blocks of 32 outputs; bias float32 [outputs / 32 x 32]."""

    weight: Operand
    bias: Operand
    inputs: int
    outputs: int

    def forward(self, x: Operand, out: Operand) -> None:
        """x [rows, inputs] bfloat16; out [rows, outputs], bfloat16 or float32. Rows contiguous."""
        rows, result, weight, bias = x.array, out.array, self.weight.array, self.bias.array
        assert rows is not None
        assert result is not None
        assert weight is not None
        assert bias is not None
        check_arrays("packed_linear", rows.dtype, x=(rows, (len(result), self.inputs)))
        if result.shape[1] != self.outputs:
            raise ValueError(f"packed_linear: out must have {self.outputs} columns, got {result.shape[1]}")
        blocks = len(bias) // WIDE
        threads = min(get_num_threads(), blocks)
        if threads == 1 or len(rows) * self.inputs * self.outputs < MIN_PARALLEL_PRODUCTS:
            _all_columns(rows, weight, bias, result, 0, WHOLE, 0, blocks)
        else:
            _columns_parallel(rows, weight, bias, result, WHOLE, np.linspace(0, blocks, threads + 1).astype(np.int64))


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear | None:
    """None where this CPU has no matrix unit, or the weights are not bfloat16 on it. `weight` is not kept."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not has_matrix_unit():
        return None
    outputs, inputs = weight.shape
    blocks, depth = -(-outputs // WIDE), -(-inputs // WIDE)
    whole = torch.nn.functional.pad(weight, (0, depth * WIDE - inputs, 0, blocks * WIDE - outputs))
    tiles = whole.view(2 * blocks, ROWS, depth, LANES, 2).permute(0, 2, 3, 1, 4).contiguous().view(-1)
    added = torch.zeros(blocks * WIDE)
    if bias is not None:
        added[:outputs] = bias.float()
    return PackedLinear(Operand.of(tiles), Operand.of(added), inputs, outputs)


@jit(parallel=True)
def _columns_parallel(x: Array, weight: Array, bias: Array, out: Array, shape: Bytes, bounds: Int64s) -> None:
    for part in prange(bounds.shape[0] - 1):
        columns_of(x, weight, bias, out, 0, shape, bounds[part], bounds[part + 1])


@jit()
def columns_of(
    x: Array, weight: Array, bias: Array, out: Array, gates: int, shape: Bytes, first_block: int, last_block: int
) -> None:
    """Columns WIDE x first_block to WIDE x last_block of out. With `gates` above 0, so many tiles of sixteen outputs
    are gates, the ups come behind them, and a block is sixteen columns of out: silu(gate) x up (silu_mul.py)."""
    rows, inputs = x.shape
    depth = (inputs + WIDE - 1) // WIDE
    group = max(1, CHUNK_BYTES // (depth * TILE * 4))
    chunk = max(WIDE, ROWS_BYTES // (depth * WIDE * 2) // WIDE * WIDE)
    is_laid = rows < ROWS or inputs < depth * WIDE  # or tiles would hold more than x
    tiles = (min(rows, chunk) + ROWS - 1) // ROWS if is_laid else 0
    laid = np.zeros(tiles * depth * TILE + WIDE, np.uint16)
    sums = np.empty(2 * BLOCK + LANES, np.float32)  # of two blocks, [32 rows, 32 outputs] each
    laid0, sums0, stride = aligned(laid), aligned(sums), x.strides[0] // x.itemsize
    has_bias = False
    for block in range(first_block, last_block):
        one, other, _ = places_of(block, gates)
        for i in range(LANES):
            has_bias |= bias[one * LANES + i] != 0 or bias[other * LANES + i] != 0
    work = rows // WIDE * depth * (last_block - first_block)
    is_quick = ROUNDS and out.itemsize == 2 and not is_laid and work >= LEAST_QUICK
    configure(shape)
    is_quick = is_quick and has_room(sums, sums0)
    for first in range(0, rows, chunk):
        count = min(chunk, rows - first)
        whole = count // WIDE * WIDE if is_quick else 0
        if is_laid:
            lay_rows(x, first, count, laid, laid0)
        # Weights of a group stay near while all rows pass.
        for begin in range(first_block, last_block, group):
            end = min(begin + group, last_block)
            quick_end = end if gates else max(begin, min(end, out.shape[1] // WIDE))  # of those that lie in out
            if whole:
                blocks_of_rows(
                    x, weight, bias, has_bias, out, first, first + whole, begin, quick_end, gates, sums, sums0
                )  # fmt: skip
            for row in range(0, count, WIDE):
                # Where rows lie as they came, the last tiles begin sooner: some rows are then computed again.
                top, low, is_tall = row, row + ROWS, count - row > ROWS
                if not is_laid:
                    top, low = top if is_tall else count - ROWS, min(low, count - ROWS)
                for block in range(quick_end if row < whole else begin, end):
                    one, other, column = places_of(block, gates)
                    if is_laid:
                        here = laid0 + top * depth * WIDE
                        _product(
                            laid, here, here + depth * TILE, TILE, LINE, is_tall, weight, one, other, depth, bias,
                            has_bias, sums, sums0
                        )  # fmt: skip
                    else:
                        here = (first + top) * stride
                        _product(
                            x, here, here + (low - top) * stride, WIDE, stride * 2, is_tall, weight, one, other, depth,
                            bias, has_bias, sums, sums0
                        )  # fmt: skip
                    for half in range(2 if is_tall else 1):
                        tile, row_of_tile = sums0 + half * ROWS * WIDE, low if half else top
                        place, number = first + row_of_tile, min(ROWS, count - row_of_tile)
                        if gates:
                            put_gated(sums, tile, out, place, number, column)
                        elif ROUNDS and column + WIDE <= out.shape[1] and out.itemsize == 2:
                            put_whole(sums, tile, out, place, number, column)
                        else:
                            put_sums(sums, tile, out, place, number, column)
    release()


_all_columns = for_any_thread(columns_of)


@jit()
def lay_rows(x: Array, first: int, count: int, laid: Array, laid0: int) -> None:
    """laid [tiles, depth, 16 rows, 32 columns] from laid0 on = rows first to first + count of x."""
    inputs = x.shape[1]
    depth = (inputs + WIDE - 1) // WIDE
    stride = x.strides[0] // x.itemsize
    for row in range(count):
        place = laid0 + row // ROWS * depth * TILE + row % ROWS * WIDE
        source = (first + row) * stride
        for k in range(inputs // WIDE):
            store16(laid, place + k * TILE, load16(x, source + k * WIDE))
        for d in range(inputs // WIDE * WIDE, inputs):
            laid[place + d // WIDE * TILE + d % WIDE] = x[first + row, d]


@jit(inline=True)
def _product(
    x: Array, top: int, low: int, step: int, line: int, is_tall: bool, weight: Array, one: int, other: int, depth: int,
    bias: Array, has_bias: bool, sums: Float32s, sums0: int,
) -> None:  # fmt: skip
    """sums [32 rows, 32 outputs] of the sixteen rows that begin at x[top] and, where `is_tall`, of those at x[low];
    outputs of tiles `one` and `other`. Rows of a tile lie `line` bytes apart, tiles of the next columns `step`
    elements."""
    if is_tall:
        for half in range(2):
            number = other if half else one
            column, here = half * LANES, number * depth * TILE
            if has_bias:
                load_tile(0, bias, number * LANES, 0)  # the same in each row
                load_tile(1, bias, number * LANES, 0)
            else:
                clear(0)
                clear(1)
            for k in range(depth):
                load_tile(3, weight, here + k * TILE, LINE)
                load_tile(2, x, top + k * step, line)
                multiply(0, 2, 3)
                load_tile(2, x, low + k * step, line)
                multiply(1, 2, 3)
            store_tile(0, sums, sums0 + column, WIDE * 4)
            store_tile(1, sums, sums0 + ROWS * WIDE + column, WIDE * 4)
        return
    if has_bias:
        load_tile(0, bias, one * LANES, 0)
        load_tile(1, bias, other * LANES, 0)
    else:
        clear(0)
        clear(1)
    for k in range(depth):
        load_tile(2, x, top + k * step, line)
        load_tile(3, weight, (one * depth + k) * TILE, LINE)
        multiply(0, 2, 3)
        load_tile(3, weight, (other * depth + k) * TILE, LINE)
        multiply(1, 2, 3)
    store_tile(0, sums, sums0, WIDE * 4)
    store_tile(1, sums, sums0 + LANES, WIDE * 4)


@jit(inline=True)
def put_whole(sums: Float32s, place: int, out: Array, first: int, count: int, output: int) -> None:
    """As `put_sums`, where there are so many outputs, in bfloat16."""
    stride = out.strides[0] // out.itemsize
    for r in range(count):
        source = place + r * WIDE
        low, high = load16(sums, source), load16(sums, source + LANES)
        store_both_bfloat16(out, (first + r) * stride + output, low, high)


@jit()
def put_gated(sums: Float32s, place: int, out: Array, first: int, count: int, column: int) -> None:
    """out[first + r, column : column + 16] = silu(gate) x up of row r of the sums, which are gates, then ups."""
    stride = out.strides[0] // out.itemsize
    for r in range(count):
        source, target = place + r * WIDE, (first + r) * stride + column
        gate, up = load16(sums, source), load16(sums, source + LANES)
        if ROUNDS:
            store_rounded(out, target, times(silu(rounded(gate)), rounded(up)))
        else:
            store_bfloat16(out, target, times(silu(gate), up))


@jit()
def put_sums(sums: Float32s, place: int, out: Array, first: int, count: int, output: int) -> None:
    """out[first + r, output : output + 32] = row r of the sums, as far as there are outputs."""
    outputs = out.shape[1]
    stride = out.strides[0] // out.itemsize
    for half in range(2):
        column = output + half * LANES
        for r in range(count):
            source = place + r * WIDE + half * LANES
            if column + LANES > outputs:
                for j in range(outputs - column):
                    out[first + r, column + j] = store(sums[source + j], out[0, 0])
            elif out.itemsize == 4:
                store16(out, (first + r) * stride + column, load16(sums, source))
            else:
                store_bfloat16(out, (first + r) * stride + column, load16(sums, source))
