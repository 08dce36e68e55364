"""Blocks of 32 rows through packed weights (packed.py) on the matrix unit: 32 rows by 32 outputs at a time.

Four sums stand in the unit, two tiles of rows by two of outputs, so four products need four loads. Rows stay in the
nearest cache, and weights, which come from the second, are told to leave them there. While the products of one block
are made, the sums of the block before are rounded and written: else the unit would wait for that.

One core of a Xeon with AMX, 27 November 2026, alone, TFLOP/s of packed.py's other way, which had served before, and of
this, of weights that the second cache does not hold (two runs of each in turn, the better; the unit does 2.3):

    rows              64            256
    [1024, 512]       0.97  1.09    1.26  1.78
    [3072, 512]       0.93  1.09    1.26  1.78
    [512, 1536]       0.88  1.02    1.03  1.37
    [1920, 384]       0.93  1.07    1.34  1.72
    [384, 960]        0.83  0.96    1.05  1.54
    [5632, 1024]      0.85  1.07    1.03  1.53
    [1024, 2816]      0.94  1.11    1.04  1.29

The hint alone makes 1.89 of 1.52 for [3072, 512] in a loop in C (256 rows); both operands through the nearest cache
are more than it holds.
"""

from __future__ import annotations

from niwaki.kernels.atomics import cycles
from niwaki.kernels.jit import jit
from niwaki.kernels.operand import Array
from niwaki.kernels.partial import Float32s
from niwaki.kernels.simd import LANES, silu, times
from niwaki.kernels.simd_memory import load16
from niwaki.kernels.simd_stores import rounded, store_both_bfloat16, store_rounded
from niwaki.kernels.tiles import LINE, ROWS, clear, load_tile, load_tile_once, multiply, store_tile

WIDE = 32  # rows, outputs, and columns of x that go together
TILE = 512  # bfloat16
BLOCK = WIDE * WIDE  # sums
TRIED, SLOWER = 8, 1.5  # four products so many times; where eight tiles take more, four are quicker in all


@jit()
def blocks_of_rows(
    x: Array, weight: Array, bias: Array, has_bias: bool, out: Array, first: int, last: int, begin: int, end: int,
    gates: int, sums: Float32s, sums0: int,
) -> None:  # fmt: skip
    """out[first : last], as blocks `begin` to `end` of packed.py's `columns_of` write it; of whole blocks of rows and
    outputs, inputs a multiple of WIDE, out bfloat16. `sums`: room for two blocks from sums0 on, aligned."""
    depth = x.shape[1] // WIDE
    stride, pitch = x.strides[0] // x.itemsize, out.strides[0] // out.itemsize
    each = 2  # rows of the block before that are written with each step of this one
    while each * depth < WIDE:
        each *= 2
    now, before, target = sums0, sums0 + BLOCK, 0
    waiting = 0  # rows of the block before that are not written yet
    for row in range(first, last, WIDE):
        top, low = row * stride, (row + ROWS) * stride
        for block in range(begin, end):
            number, other, column = places_of(block, gates)
            here, beside = number * depth * TILE, other * depth * TILE
            if has_bias:
                load_tile(0, bias, number * LANES, 0)  # the same in each row
                load_tile(1, bias, number * LANES, 0)
                load_tile(2, bias, other * LANES, 0)
                load_tile(3, bias, other * LANES, 0)
            else:
                clear(0)
                clear(1)
                clear(2)
                clear(3)
            for k in range(depth):
                load_tile(4, x, top + k * WIDE, stride * 2)
                load_tile_once(6, weight, here + k * TILE, LINE)
                multiply(0, 4, 6)
                load_tile(5, x, low + k * WIDE, stride * 2)
                multiply(1, 5, 6)
                if waiting > 0:
                    waiting -= each
                    for r in range(waiting, waiting + each):
                        put_row(sums, before + r * WIDE, out, target + r * pitch, gates)
                load_tile_once(7, weight, beside + k * TILE, LINE)
                multiply(2, 4, 7)
                multiply(3, 5, 7)
            store_tile(0, sums, now, WIDE * 4)
            store_tile(1, sums, now + ROWS * WIDE, WIDE * 4)
            store_tile(2, sums, now + LANES, WIDE * 4)
            store_tile(3, sums, now + ROWS * WIDE + LANES, WIDE * 4)
            now, before = before, now
            target, waiting = row * pitch + column, WIDE
    for r in range(waiting):
        put_row(sums, before + r * WIDE, out, target + r * pitch, gates)


@jit(inline=True)
def places_of(block: int, gates: int) -> tuple[int, int, int]:
    """Of a block: its two tiles of outputs, and the first column of out that comes of them."""
    if gates:
        return block, gates + block, block * LANES
    return 2 * block, 2 * block + 1, block * WIDE


@jit(inline=True)
def put_row(sums: Float32s, source: int, out: Array, target: int, gates: int) -> None:
    """A row of a block, to out[target] and those behind it."""
    low, high = load16(sums, source), load16(sums, source + LANES)
    if gates:
        store_rounded(out, target, times(silu(rounded(low)), rounded(high)))  # as from kernel to kernel
    else:
        store_both_bfloat16(out, target, low, high)


@jit()
def has_room(sums: Float32s, sums0: int) -> bool:
    """Whether products with eight tiles in use go as quickly as with four, about, on this core at this moment: see
    packed.py. Takes half a microsecond. Tiles are configured, and hold nothing; `sums` as above, of any numbers."""
    for _ in range(2):  # the first time to have all at hand
        start = cycles()
        for _ in range(TRIED):
            load_tile(4, sums, sums0, LINE)
            load_tile(6, sums, sums0 + TILE, LINE)
            multiply(0, 4, 6)
            load_tile(5, sums, sums0, LINE)
            multiply(1, 5, 6)
            load_tile(7, sums, sums0 + TILE, LINE)
            multiply(2, 4, 7)
            multiply(3, 5, 7)
        middle = cycles()
        for _ in range(2 * TRIED):
            load_tile(3, sums, sums0, LINE)
            load_tile(2, sums, sums0 + TILE, LINE)
            multiply(0, 2, 3)
            load_tile(2, sums, sums0, LINE)
            multiply(1, 2, 3)
        end = cycles()
    return middle - start <= SLOWER * (end - middle)
