"""The matrix unit of x86 processors (AMX) inside Numba kernels: eight tiles of sixteen rows of sixteen 32-bit words.

A and B hold pairs of bfloat16 in their words, C float32:

    C[m, n] += sum over k of A[m, 2k] B[k, 2n] + A[m, 2k + 1] B[k, 2n + 1]

(Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, "Programming with Intel AMX"). So B's words are
two rows of a matrix, one above the other, or, with half of each word of A zero, one row of twice the columns.

Tiles are named by literal numbers, as registers are. A product takes 8 ns here, whatever the tiles hold; loading a tile
whose rows begin at multiples of 64 bytes takes 3.4 ns, and of any others 22 ns. Indices are not checked.

Other processors do the same with vectors (vector_tiles.py), so tiles 0 to 3 take sums only, and the others factors.
B's rows lie LINE bytes apart, and factors are multiplied before what they were loaded from changes.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from niwaki.kernels import vector_tiles
from niwaki.kernels.jit import compiles_for_this_processor, jit
from niwaki.kernels.operand import Array
from niwaki.kernels.simd_memory import element_pointer
from niwaki.kernels.vector_tiles import multiplies_pairs

Bytes = npt.NDArray[np.uint8]

ROWS = 16
WORDS = 16
LINE = 64  # bytes: a row of a tile, and what rows should be aligned to

BYTE, LONG = ir.IntType(8), ir.IntType(64)
POINTER = BYTE.as_pointer()


@cache
def has_matrix_unit() -> bool:
    """Whether this process may use the matrix unit on bfloat16: asks the system for it the first time."""
    return bool(torch.cpu._is_amx_tile_supported()) and bool(torch.cpu._init_amx())


@cache
def has_tiles() -> bool:
    """Whether kernels may use tiles: of the matrix unit, or else by vectors where those multiply and add at once.

    Not by vectors beside a matrix unit that the system keeps from this process: both kinds of code have one place on
    the disk.
    """
    has_fused = bool(llvm.get_host_cpu_features().get("fma")) and compiles_for_this_processor()
    by_vectors = multiplies_pairs() or has_fused
    return has_matrix_unit() or (by_vectors and not torch.cpu._is_amx_tile_supported())


def whole_tiles() -> Bytes:
    """What `configure` wants: all eight tiles in full size."""
    shape = np.zeros(64, np.uint8)
    shape[0] = 1  # the only palette there is
    shape[16:32].view(np.uint16)[:] = LINE
    shape[48:56] = ROWS
    return shape


WHOLE = whole_tiles()


def _call(builder, name, kinds, values):
    kind = ir.FunctionType(ir.VoidType(), kinds)
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


def _tiles(*numbers):
    """The literal types of tile numbers as constants, or None where one is no literal."""
    if all(isinstance(number, types.IntegerLiteral) for number in numbers):
        return [BYTE(number.literal_value) for number in numbers]
    return None


@intrinsic
def _configure(typing, shape):
    """Give every tile of this thread the size that `shape` says, and zeros."""

    def generate(context, builder, signature, args):
        if has_matrix_unit():
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            _call(builder, "ldtilecfg", [POINTER], [builder.bitcast(data, POINTER)])
        return context.get_dummy_value()

    return types.void(shape), generate


@intrinsic
def _release(typing):
    """Forget all tiles, so that others find the unit as they left it."""

    def generate(context, builder, signature, args):
        if has_matrix_unit():
            _call(builder, "tilerelease", [], [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def _clear(typing, tile):
    tiles = _tiles(tile)

    def generate(context, builder, signature, args):
        if has_matrix_unit():
            _call(builder, "tilezero", [BYTE], tiles)
        else:
            vector_tiles.clear(builder, tiles[0].constant)
        return context.get_dummy_value()

    return None if tiles is None else (types.void(tile), generate)


@intrinsic(prefer_literal=True)
def _load_tile(typing, tile, array, index, stride):
    """Row r of the tile = the 64 bytes from `stride` x r bytes behind array[index] on."""
    return _move("tileloadd64", vector_tiles.load, tile, array, index, stride)


@intrinsic(prefer_literal=True)
def _load_tile_once(typing, tile, array, index, stride):
    """As `_load_tile`, of what is not read again soon: the nearest cache keeps what it has."""
    return _move("tileloaddt164", vector_tiles.load, tile, array, index, stride)


@intrinsic(prefer_literal=True)
def _store_tile(typing, tile, array, index, stride):
    """The other way round."""
    return _move("tilestored64", vector_tiles.store, tile, array, index, stride)


def _move(name, by_vectors, tile, array, index, stride):
    tiles = _tiles(tile)

    def generate(context, builder, signature, args):
        pointer = builder.bitcast(element_pointer(context, builder, signature, args, 1), POINTER)
        step = context.cast(builder, args[3], signature.args[3], types.int64)
        if has_matrix_unit():
            _call(builder, name, [BYTE, POINTER, LONG], [*tiles, pointer, step])
        else:
            by_vectors(builder, tiles[0].constant, pointer, step)
        return context.get_dummy_value()

    return None if tiles is None else (types.void(tile, array, index, stride), generate)


@intrinsic(prefer_literal=True)
def _multiply(typing, c, a, b):
    """c += a b."""
    tiles = _tiles(c, a, b)

    def generate(context, builder, signature, args):
        if has_matrix_unit():
            _call(builder, "tdpbf16ps", [BYTE] * 3, tiles)
        else:
            vector_tiles.multiply(builder, *(tile.constant for tile in tiles))
        return context.get_dummy_value()

    return None if tiles is None else (types.void(c, a, b), generate)


@jit()
def aligned(array: Array) -> int:
    """The first element of `array`, which is of one dimension, whose address is a multiple of LINE."""
    return int(-array.ctypes.data % LINE) // array.itemsize


configure = cast("Callable[[Bytes], None]", _configure)
release = cast("Callable[[], None]", _release)
clear = cast("Callable[[int], None]", _clear)
load_tile = cast("Callable[[int, Array, int, int], None]", _load_tile)
load_tile_once = cast("Callable[[int, Array, int, int], None]", _load_tile_once)
store_tile = cast("Callable[[int, Array, int, int], None]", _store_tile)
multiply = cast("Callable[[int, int, int], None]", _multiply)
