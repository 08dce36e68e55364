"""A matrix product with weights of few bits: out = x W^T + bias, where W[o, i] = scale[o, g] (code[o, i] - zero[o, g]).

g = i // group: a scale for each `group` inputs of an output. Codes have 4 or 8 bits and stay so in memory, for with few
rows a product takes as long as reading its weights. They are widened to bfloat16, which holds such whole numbers
exactly, a block of 32 outputs at a time, just before the matrix unit (tiles.py, packed.py) takes them; the sums of a
group are multiplied by its scales in float32. So nothing is rounded but the weights, when they got their codes, and a
row's result does not depend on the rows beside it.

On one core of a Xeon with AMX, 22 November 2026, weights that no cache near the core holds, [5632, 1024], us:

    rows                                     1      8     32
    bfloat16 (packed.py)                  1947   1645   1343
    8 bits                                 965    924   1163
    4 bits, groups of 64                   657    604    934
    torch._weight_int8pack_mm             1447   2751   7809
    aten._weight_int4pack_mm_for_cpu       534   1676   6552

256 rows of [1536, 512]: 1367 in bfloat16, 1162 and 1182 here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import prange

from niwaki.kernels.checks import check_arrays
from niwaki.kernels.group_products import FEW, multiply_group
from niwaki.kernels.jit import for_any_thread, get_num_threads, jit
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.packed import MIN_PARALLEL_PRODUCTS, lay_rows, put_sums
from niwaki.kernels.packed_rows import TILE, WIDE
from niwaki.kernels.partial import Float32s
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd import LANES, multiply_add
from niwaki.kernels.simd_memory import load16, store16
from niwaki.kernels.tiles import (
    LINE,
    ROWS,
    WHOLE,
    Bytes,
    aligned,
    clear,
    configure,
    has_matrix_unit,
    has_tiles,
    load_tile,
    multiply,
    release,
    store_tile,
)
from niwaki.kernels.widen import AHEAD, bytes_in_order, widen

GROUP = 64  # inputs that share a scale where this file finds codes of 4 bits
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's range that are tried
TINY = 1e-12  # a scale of zeros
E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
MAX_EXPONENT = 252  # plus 127: any number of e2m1 times that power is a bfloat16, too
ROWS_AT_ONCE = 1024  # that get their codes: bounds the memory it takes
NEAR = 4  # steps of wide weights that a core keeps nearest
MOST = 64  # rows whose sums by vectors stay near while a block's weights pass
CHUNK_BYTES = 500_000  # of rows that pass a block's weights


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix in few bits, or a stack of such, one for each expert: whole numbers, and what they mean."""

    codes: torch.Tensor  # [..., outputs, inputs]: int8, of 4 bits from 0 to 15; float8_e4m3fn; or uint8, e2m1 (E2M1)
    scales: torch.Tensor  # float32 [..., outputs, groups]
    zeros: torch.Tensor | None  # int16 [..., outputs, groups]; none of e2m1
    group: int  # inputs that share a scale; the last group may be smaller
    bits: int

    def matrix(self, group_of: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [..., outputs, inputs]. group_of int64 [inputs]: where groups do not follow one another."""
        if group_of is None:
            group_of = torch.arange(self.codes.shape[-1], device=self.codes.device) // self.group
        numbers = torch.tensor(E2M1, device=self.codes.device)[self.codes.int()] if self.is_e2m1 else self.codes.float()
        if self.zeros is not None:
            numbers -= self.zeros.float()[..., group_of]
        return numbers.mul_(self.scales[..., group_of])

    @property
    def is_e2m1(self) -> bool:
        return self.codes.dtype == torch.uint8

    def exponents(self, most: int) -> torch.Tensor | None:
        """Of scales that are powers of two: uint8 [..., outputs, groups], plus 127, from 2 to `most`; None where there
        are others. Smaller ones become 2: what weighs less than 2^-122 is lost in any sum."""
        bits = self.scales.clamp(min=2.0**-125).view(torch.int32)
        is_power = not (bits & 0x7FFFFF).any() and int(bits.max()) >> 23 <= most and bool((self.scales >= 0).all())
        return (bits >> 23).to(torch.uint8) if is_power else None

    def of_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Coded:
        """Its rows otherwise: in another order, or fewer; or one matrix of a stack."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros)


def coded(matrix: torch.Tensor, kind: str) -> Coded:
    """The nearest in "int8" or "fp8" (e4m3), with a scale for each output, or in "int4", with a scale and a zero for
    each GROUP inputs."""
    make = {"int8": _of_8_bits, "fp8": _of_e4m3, "int4": _of_4_bits}[kind]
    joined = stacked_codes([make(part) for part in torch.split(matrix, ROWS_AT_ONCE)])
    assert joined is not None, "they are grouped alike"
    return joined


def _of_8_bits(matrix: torch.Tensor) -> Coded:
    rows = matrix.float()
    scales = rows.abs().amax(1, keepdim=True).clamp_min_(TINY) / 127
    return Coded((rows / scales).round_().to(torch.int8), scales, None, rows.shape[1], 8)


def _of_e4m3(matrix: torch.Tensor) -> Coded:
    rows = matrix.float()
    scales = rows.abs().amax(1, keepdim=True).clamp_min_(TINY) / 448
    return Coded((rows / scales).to(torch.float8_e4m3fn), scales, None, rows.shape[1], 8)


def _of_4_bits(matrix: torch.Tensor) -> Coded:
    """Ends of a group are cut off as far as that lessens its squared error."""
    outputs, inputs = matrix.shape
    groups = _filled(matrix.float(), outputs, -(-inputs // GROUP) * GROUP).view(outputs, -1, GROUP)
    low, high = groups.amin(2, keepdim=True).clamp_max_(0), groups.amax(2, keepdim=True).clamp_min_(0)
    best = torch.full_like(low, torch.inf)
    scales, zeros, codes = torch.empty_like(low), torch.empty_like(low), torch.empty_like(groups)
    for share in SHARES:
        scale = ((high - low) * (share / 15)).clamp_min_(TINY)
        zero = (-low * share / scale).round_()
        code = (groups / scale + zero).round_().clamp_(0, 15)
        error = ((code - zero) * scale - groups).square_().sum(2, keepdim=True)
        is_better = error < best
        for kept, new in ((best, error), (scales, scale), (zeros, zero), (codes, code)):
            torch.where(is_better, new, kept, out=kept)
    whole = codes.to(torch.int8).view(outputs, -1)[:, :inputs]
    return Coded(whole, scales.squeeze(2), zeros.squeeze(2).to(torch.int16), GROUP, 4)


def stacked_codes(parts: Sequence[Coded]) -> Coded | None:
    """Their rows one below the other; None where they are grouped differently."""
    first = parts[0]
    if any((one.group, one.bits, one.zeros is None) != (first.group, first.bits, first.zeros is None) for one in parts):
        return None
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
    )


@dataclass(frozen=True, slots=True)
class CodedLinear:
    """Codes in the order in which they are read, filled up with zeros to whole blocks.

    codes of 8 bits: int8, or uint8 for e4m3, [blocks, depth, 32 vectors, 16 even and 16 odd elements]; of 4: uint16, or
    int16 for e2m1, [blocks, depth, 8, 32 words], whose word holds an element of four vectors. A vector is a line of a
    weight tile of packed.py. Scales of e2m1 are powers of two, which change no digit of a bfloat16: weights are widened
    with them, from exponents that stand in place of zeros, and all sums of an output share a scale of 1.
    """

    codes: Array
    scales: Float32s  # [blocks x groups x 32 outputs]
    zeros: Bytes  # [blocks x groups of zeros x 32 outputs]; none of 8 bits
    bias: Float32s  # [blocks x 32]
    span: int  # columns of tiles that share scales
    zero_span: int  # that share zeros
    inputs: int
    outputs: int

    def forward(self, x: Operand, out: Operand) -> None:
        """x [rows, inputs] bfloat16; out [rows, outputs], bfloat16 or float32. Rows contiguous."""
        rows, result = x.array, out.array
        assert rows is not None
        assert result is not None
        check_arrays("coded_linear", np.dtype(np.uint16), x=(rows, (len(result), self.inputs)))
        if result.shape[1] != self.outputs:
            raise ValueError(f"coded_linear: out must have {self.outputs} columns, got {result.shape[1]}")
        blocks = len(self.bias) // WIDE
        spans = self.span, self.zero_span
        args = (rows, self.codes, self.scales, self.zeros, self.bias, *spans, result, WHOLE)
        threads = min(get_num_threads(), blocks)
        if threads == 1 or len(rows) * self.inputs * self.outputs < MIN_PARALLEL_PRODUCTS:
            _all_columns(*args, 0, blocks)
        else:
            _columns_parallel(*args, np.linspace(0, blocks, threads + 1).astype(np.int64))


def coded_linear(weight: Coded, bias: torch.Tensor | None) -> CodedLinear | None:
    """None where this CPU has no tiles, groups are no multiples of 32 inputs, numbers less their zeros do not
    fit 8 bits, or scales of e2m1 are no powers of two. `weight` is not kept."""
    outputs, inputs = weight.codes.shape
    is_whole = weight.group >= inputs or weight.group % WIDE == 0
    if not has_tiles() or weight.codes.device.type != "cpu" or not is_whole:
        return None
    numbers = weight.codes if weight.bits == 4 else _without_zeros(weight)
    exponents = weight.exponents(MAX_EXPONENT) if weight.is_e2m1 else None
    if numbers is None or (weight.is_e2m1 and exponents is None):
        return None
    blocks, depth = -(-outputs // WIDE), -(-inputs // WIDE)
    whole = _filled(numbers, blocks * WIDE, depth * WIDE)
    lines = whole.view(blocks, 2, ROWS, depth, LANES, 2).permute(0, 3, 1, 4, 2, 5).reshape(blocks, depth, -1, WIDE)
    of_zeros = weight.zeros if exponents is None else exponents
    if of_zeros is not None and weight.bits == 4:
        words = lines.view(blocks, depth, -1, 4, WIDE)
        codes = words[..., 0, :].to(torch.int16)
        for place in range(1, 4):
            codes |= words[..., place, :].to(torch.int16) << 4 * place
        codes = codes if weight.is_e2m1 else codes.view(torch.uint16)
        zeros = _by_block(of_zeros, blocks).to(torch.uint8)
    else:
        codes = bytes_in_order(lines)
        zeros = torch.empty(0, dtype=torch.uint8)
    added = torch.zeros(blocks * WIDE)
    if bias is not None:
        added[:outputs] = bias.float()
    zero_span = depth if weight.group >= inputs else weight.group // WIDE
    return CodedLinear(
        codes.flatten().numpy(),
        np.ones(blocks * WIDE, np.float32) if weight.is_e2m1 else _by_block(weight.scales, blocks).flatten().numpy(),
        zeros.flatten().numpy(),
        added.numpy(),
        depth if weight.is_e2m1 else zero_span,
        zero_span,
        inputs,
        outputs,
    )


def _without_zeros(weight: Coded) -> torch.Tensor | None:
    """Numbers of 8 bits less their zeros, int8, or the bits of e4m3 as uint8."""
    if weight.codes.dtype == torch.float8_e4m3fn:
        return weight.codes.view(torch.uint8)
    if weight.zeros is None:
        return weight.codes
    group_of = torch.arange(weight.codes.shape[1]) // weight.group
    numbers = weight.codes - weight.zeros[:, group_of]
    return None if int(numbers.min()) < -128 or int(numbers.max()) > 127 else numbers.to(torch.int8)


def _filled(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def _by_block(values: torch.Tensor, blocks: int) -> torch.Tensor:
    """[outputs, groups] -> [blocks, groups, 32 outputs]."""
    return _filled(values, blocks * WIDE, values.shape[1]).view(blocks, WIDE, -1).transpose(1, 2).contiguous()


@jit()
def by_tiles(
    x: Array, codes: Array, scales: Float32s, zeros: Bytes, bias: Float32s, span: int,
    zero_span: int, out: Array, shape: Bytes, first_block: int, last_block: int,
) -> None:  # fmt: skip
    """Outputs WIDE x first_block to WIDE x last_block, on the matrix unit."""
    rows, inputs = x.shape
    depth = (inputs + WIDE - 1) // WIDE
    groups, zero_groups = (depth + span - 1) // span, (depth + zero_span - 1) // zero_span
    chunk = max(WIDE, CHUNK_BYTES // (depth * WIDE * 2) // WIDE * WIDE)
    tiles = (min(rows, chunk) + ROWS - 1) // ROWS
    laid = np.zeros(tiles * depth * TILE + WIDE, np.uint16)
    wide = np.empty(depth * 2 * TILE + WIDE, np.uint16)
    sums = np.empty(2 * WIDE * WIDE + LANES, np.float32)  # of a group, and of the one before: [32 rows, 32 outputs]
    total = np.empty(WIDE * WIDE, np.float32)
    laid0, wide0, sums0 = aligned(laid), aligned(wide), aligned(sums)
    configure(shape)
    for first in range(0, rows, chunk):
        count = min(chunk, rows - first)
        kept = depth if count > WIDE else min(depth, NEAR)  # steps whose wide weights stay for further rows
        lay_rows(x, first, count, laid, laid0)
        for block in range(first_block, last_block):
            for row in range(0, count, WIDE):
                here = laid0 + row // ROWS * depth * TILE
                height = min(WIDE, count - row)
                is_tall = height > ROWS
                for r in range(0, height * WIDE, WIDE):
                    store16(total, r, load16(bias, block * WIDE))
                    store16(total, r + LANES, load16(bias, block * WIDE + LANES))
                for g in range(groups):
                    scale = (block * groups + g) * WIDE
                    here_sums = sums0 + g % 2 * WIDE * WIDE
                    clear(0)
                    clear(1)
                    clear(2)
                    clear(3)
                    for k in range(g * span, min(g * span + span, depth)):
                        place = wide0 + k % kept * 2 * TILE
                        if row == 0:
                            zero = (block * zero_groups + k // zero_span) * WIDE
                            widen(codes, block * depth + k, zeros, zero, wide, place)
                        top = here + k * TILE
                        _multiply_step(laid, top, top + depth * TILE, LINE, is_tall, wide, place)
                    if g > 0:  # while the matrix unit is at work
                        _add_scaled(sums, sums0 + (g - 1) % 2 * WIDE * WIDE, scales, scale - WIDE, total, height)
                    _store_products(is_tall, sums, here_sums)
                scale = (block * groups + groups - 1) * WIDE
                _add_scaled(sums, sums0 + (groups - 1) % 2 * WIDE * WIDE, scales, scale, total, height)
                put_sums(total, 0, out, first + row, height, block * WIDE)
    release()


@jit()
def by_vectors(
    x: Array, codes: Array, scales: Float32s, zeros: Bytes, bias: Float32s, span: int,
    zero_span: int, out: Array, shape: Bytes, first_block: int, last_block: int,
) -> None:  # fmt: skip
    """The same by vectors, bit for bit: a few rows at a time, whose sums of a group stay in registers."""
    rows, inputs = x.shape
    depth = (inputs + WIDE - 1) // WIDE
    groups, zero_groups = (depth + span - 1) // span, (depth + zero_span - 1) // zero_span
    asked = WIDE * WIDE // LANES if codes.itemsize == 1 else 0  # with each word of the first rows
    chunk = max(MOST, CHUNK_BYTES // (depth * WIDE * 2) // MOST * MOST)
    tiles = (min(rows, chunk) + ROWS - 1) // ROWS
    laid = np.zeros(tiles * depth * TILE + WIDE, np.uint16)
    wide = np.empty(depth * 2 * TILE + WIDE, np.uint16)
    sums = np.empty(2 * MOST * WIDE + LANES, np.float32)  # of a group, and of those before it: [MOST, 32 outputs]
    laid0, wide0, sums0 = aligned(laid), aligned(wide), aligned(sums)
    total0 = sums0 + MOST * WIDE
    for first in range(0, rows, chunk):
        count = min(chunk, rows - first)
        is_kept = count > MOST  # wide weights stay for further rows
        lay_rows(x, first, count, laid, laid0)
        for block in range(first_block, last_block):
            for row in range(0, count, MOST):
                height = min(MOST, count - row)
                for r in range(total0, total0 + height * WIDE, WIDE):
                    store16(sums, r, load16(bias, block * WIDE))
                    store16(sums, r + LANES, load16(bias, block * WIDE + LANES))
                for g in range(groups):
                    begin, end = g * span, min(g * span + span, depth)
                    for k in range(begin, end, NEAR):
                        steps = min(NEAR, end - k)
                        place = wide0 + (k if is_kept else 0) * 2 * TILE
                        for step in range(k, k + steps if row == 0 else k):
                            zero = (block * zero_groups + step // zero_span) * WIDE
                            widen(codes, block * depth + step, zeros, zero, wide, place + (step - k) * 2 * TILE)
                        for r in range(row, row + height, FEW[-1]):
                            line = (r - row) * WIDE
                            multiply_group(
                                sums, total0 + line, sums, sums0 + line, laid,
                                laid0 + (r // ROWS * depth + k) * TILE + r % ROWS * WIDE, wide, place, scales,
                                (block * groups + g) * WIDE, codes,
                                (block * depth + k) * WIDE * WIDE + AHEAD if r == 0 and asked else 0,
                                asked if r == 0 else 0, steps, k == begin, k + steps == end,
                                min(FEW[-1], row + height - r)
                            )  # fmt: skip
                put_sums(sums, total0, out, first + row, height, block * WIDE)


columns_of = by_tiles if has_matrix_unit() else by_vectors


@jit(parallel=True)
def _columns_parallel(
    x: Array, codes: Array, scales: Float32s, zeros: Bytes, bias: Float32s, span: int,
    zero_span: int, out: Array, shape: Bytes, bounds: Int64s,
) -> None:  # fmt: skip
    for part in prange(bounds.shape[0] - 1):
        columns_of(x, codes, scales, zeros, bias, span, zero_span, out, shape, bounds[part], bounds[part + 1])


_all_columns = for_any_thread(columns_of)


@jit(inline=True)
def _multiply_step(x: Array, top: int, low: int, line: int, is_tall: bool, weight: Array, there: int) -> None:
    """Tiles 0 to 3 += 32 rows x 32 outputs of 32 columns: sixteen rows at x[top] and, where `is_tall`, sixteen at
    x[low], which lie `line` bytes apart. The first weights are read twice, so that six tiles are in use: packed.py says
    why."""
    load_tile(4, x, top, line)
    load_tile(5, weight, there, LINE)
    multiply(0, 4, 5)
    load_tile(5, weight, there + TILE, LINE)
    multiply(1, 4, 5)
    if is_tall:
        load_tile(4, x, low, line)
        multiply(3, 4, 5)
        load_tile(5, weight, there, LINE)
        multiply(2, 4, 5)


@jit(inline=True)
def _store_products(is_tall: bool, sums: Float32s, sums0: int) -> None:
    """Tiles 0 to 3 to sums [32 rows, 32 outputs]; of the second sixteen rows only where `is_tall`."""
    store_tile(0, sums, sums0, WIDE * 4)
    store_tile(1, sums, sums0 + LANES, WIDE * 4)
    if is_tall:
        store_tile(2, sums, sums0 + ROWS * WIDE, WIDE * 4)
        store_tile(3, sums, sums0 + ROWS * WIDE + LANES, WIDE * 4)


@jit(inline=True)
def _add_scaled(sums: Float32s, place: int, scales: Float32s, scale: int, total: Float32s, height: int) -> None:
    """total += the sums of a group, each output's times its scale."""
    low, high = load16(scales, scale), load16(scales, scale + LANES)
    for r in range(0, height * WIDE, WIDE):
        store16(total, r, multiply_add(load16(sums, place + r), low, load16(total, r)))
        store16(total, r + LANES, multiply_add(load16(sums, place + r + LANES), high, load16(total, r + LANES)))
