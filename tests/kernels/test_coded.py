"""Weights of few bits: products with their codes are products with what the codes mean."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from niwaki.kernels import jit
from niwaki.kernels.calls import call_at
from niwaki.kernels.coded import GROUP, Coded, CodedLinear, by_tiles, coded, coded_linear, stacked_codes
from niwaki.kernels.coded_line import KERNEL, X, line_of
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import array_of
from niwaki.kernels.segments import Int64s
from niwaki.kernels.tiles import WHOLE, has_matrix_unit, has_tiles

needs_tiles = pytest.mark.skipif(not has_tiles(), reason="this CPU has no bfloat16 tiles")
KINDS = ("int8", "int8-zeros", "int4", "e4m3", "e2m1")


def drawn(kind: str, outputs: int, inputs: int, group: int) -> Coded:
    """Every number that the kind has, scales from 0.5 to 1.5; of e2m1 powers of two, 2^-14 to 2."""
    generator = torch.Generator().manual_seed(0)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    groups = -(-inputs // group)
    scales = torch.rand(outputs, groups, generator=generator) + 0.5
    match kind:
        case "int4":
            zeros = whole(0, 16, outputs, groups).to(torch.int16)
            return Coded(whole(0, 15, outputs, inputs).to(torch.int8), scales, zeros, group, 4)
        case "e4m3":
            bits = whole(0, 253, outputs, inputs).to(torch.uint8)
            bits[bits == 127] = 0  # a NaN, as 255 is
            return Coded(bits.view(torch.float8_e4m3fn), scales, None, group, 8)
        case "e2m1":
            powers = torch.ldexp(torch.ones(outputs, groups), whole(-14, 1, outputs, groups))
            return Coded(whole(0, 15, outputs, inputs).to(torch.uint8), powers, None, group, 4)
        case "int8-zeros":
            zeros = whole(-3, 3, outputs, groups).to(torch.int16)
            return Coded(whole(-124, 123, outputs, inputs).to(torch.int8), scales, zeros, group, 8)
    return Coded(whole(-128, 127, outputs, inputs).to(torch.int8), scales, None, group, 8)


def product(linear: CodedLinear, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(len(x), linear.outputs, dtype=dtype)
    linear.forward(Operand.of(x), Operand.of(out))
    return out


def rows_of(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()


@needs_tiles
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(7, 5, 7), (70, 33, 70), (96, 64, 32), (320, 100, 128)])
def test_a_product_with_codes_is_the_product_with_what_they_mean(
    kind: str, inputs: int, outputs: int, group: int
) -> None:
    weight, bias = drawn(kind, outputs, inputs, group), torch.linspace(-1, 1, outputs)
    for added in (None, bias):
        linear = coded_linear(weight, added)
        assert linear is not None
        for rows in (1, 16, 17, 32, 33, 70):
            x = rows_of(rows, inputs)
            expected = x.double() @ weight.matrix().double().t() + (0 if added is None else added.double())
            assert (product(linear, x) - expected).abs().max() < 1e-6 * expected.abs().max()
            rounded = product(linear, x, torch.bfloat16).double()
            assert torch.allclose(rounded, expected, rtol=2**-8, atol=1e-6 * float(expected.abs().max()))


@needs_tiles
def test_no_row_depends_on_the_rows_beside_it_or_on_threads() -> None:
    linear = coded_linear(drawn("int4", 700, 1000, 128), None)
    assert linear is not None
    x = rows_of(900, 1000)  # more rows than are laid out at once, and work for two threads
    whole = product(linear, x)
    before = jit.get_num_threads()
    try:
        jit.set_num_threads(2)
        assert torch.equal(product(linear, x), whole)
    finally:
        jit.set_num_threads(before)
    for row in (0, 15, 16, 33, 899):
        assert torch.equal(product(linear, x[row : row + 1])[0], whole[row])
    for count in (2, 3, 5, 8, 9, 39):  # of few rows, or with few behind the last whole tile
        assert torch.equal(product(linear, x[:count]), whole[:count])


@needs_tiles
@pytest.mark.skipif(has_matrix_unit(), reason="this CPU does not multiply codes by vectors")
@pytest.mark.parametrize(("inputs", "group"), [(70, 70), (320, 64), (640, 640)])
def test_what_goes_by_vectors_gets_the_sums_of_tiles_bit_for_bit(inputs: int, group: int) -> None:
    for kind in ("int8", "int4"):
        linear = coded_linear(drawn(kind, 70, inputs, group), torch.linspace(-1, 1, 70))
        assert linear is not None
        for rows in (1, 7, 16, 30, 70):
            x, out = rows_of(rows, inputs), np.empty((rows, 70), np.float32)
            by_tiles(
                array_of(Operand.of(x)), linear.codes, linear.scales, linear.zeros, linear.bias, linear.span,
                linear.zero_span, out, WHOLE, 0, 3
            )  # fmt: skip
            assert torch.equal(product(linear, x), torch.from_numpy(out))


@jit.jit()
def call_line(line: Int64s, rows: int, out: int, first: int, last: int) -> None:
    call_at(line[KERNEL], line.ctypes.data, rows, out, first, last)


@needs_tiles
@pytest.mark.parametrize("kind", KINDS)
def test_a_line_of_a_step_writes_its_blocks_and_no_others(kind: str) -> None:
    linear = coded_linear(drawn(kind, 100, 320, 64), torch.linspace(-1, 1, 100))
    assert linear is not None
    for rows in (1, 5, 40):
        x = rows_of(rows, 320)
        out, wanted = torch.full((rows, 100), 7.0).bfloat16(), product(linear, x, torch.bfloat16)
        line = np.array(line_of(linear), np.int64)
        line[X] = x.data_ptr()
        call_line(line, rows, out.data_ptr(), 1, 3)
        assert torch.equal(out[:, 32:96], wanted[:, 32:96])
        assert (out[:, :32] == 7).all()
        assert (out[:, 96:] == 7).all()
        call_line(line, rows, out.data_ptr(), 3, 5)  # there are four blocks, the last of them not whole
        assert torch.equal(out[:, 32:], wanted[:, 32:])


WITHOUT_AVX512 = """
import llvmlite.binding as llvm
import torch
from niwaki.kernels import jit

found = llvm.get_host_cpu_features()
llvm.get_host_cpu_features = lambda: {name: has and not name.startswith("avx512") for name, has in found.items()}
torch.cpu._is_amx_tile_supported = lambda: False
jit.compiles_for_this_processor = lambda: True  # it is told below which one this is

from tests.kernels import test_coded

for kind in ("int4", "e2m1", "int8-zeros", "e4m3"):
    test_coded.test_a_product_with_codes_is_the_product_with_what_they_mean(kind, 96, 64, 32)
"""


@needs_tiles
def test_codes_are_widened_without_avx512_too() -> None:
    """In a process of its own: where LLVM has no instruction for what a kernel asks, it ends the process."""
    older = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_AVX512],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
        env={**os.environ, **older, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr[-1000:]


@needs_tiles
def test_what_has_no_kernel_is_told() -> None:
    assert coded_linear(drawn("int4", 8, 96, 48), None) is None  # a group ends inside a tile
    wide = drawn("int8-zeros", 8, 64, 64)
    assert wide.zeros is not None
    assert coded_linear(replace(wide, zeros=wide.zeros + 200), None) is None
    powers = drawn("e2m1", 8, 64, 32)
    assert coded_linear(replace(powers, scales=powers.scales * 3), None) is None
    assert coded_linear(replace(powers, scales=-powers.scales), None) is None
    assert coded_linear(replace(powers, scales=torch.full_like(powers.scales, 2.0**126)), None) is None


@needs_tiles
@pytest.mark.parametrize("power", [125, -120])
def test_powers_of_two_are_exact_up_to_the_ends_of_bfloat16(power: int) -> None:
    one = Coded(torch.arange(16, dtype=torch.uint8).repeat(2)[None], torch.full((1, 1), 2.0**power), None, 32, 4)
    linear = coded_linear(one, None)
    assert linear is not None
    assert torch.equal(product(linear, torch.eye(32).bfloat16())[:, 0], one.matrix()[0])


@needs_tiles
def test_what_weighs_less_than_any_sum_holds_is_near_nothing() -> None:
    """A group of zeros may have any scale."""
    linear = coded_linear(replace(drawn("e2m1", 8, 64, 32), scales=torch.zeros(8, 2)), None)
    assert linear is not None
    assert product(linear, rows_of(3, 64)).abs().max() < 1e-33


@needs_tiles
def test_operands_of_another_shape_are_refused() -> None:
    linear = coded_linear(drawn("int8", 8, 64, 64), None)
    assert linear is not None
    with pytest.raises(ValueError, match="coded_linear"):
        product(linear, rows_of(2, 63))
    with pytest.raises(ValueError, match="out must have 8 columns, got 9"):
        linear.forward(Operand.of(rows_of(2, 64)), Operand.of(torch.empty(2, 9)))


def test_eight_bits_are_at_most_half_a_step_off() -> None:
    matrix = rows_of(40, 100).float()
    matrix[3] = 0
    codes = coded(matrix, "int8")
    assert (codes.matrix() - matrix).abs().max(1).values.sub(codes.scales[:, 0] / 2).max() < 1e-6
    assert torch.equal(codes.matrix()[3], matrix[3])


def test_four_bits_are_nearer_than_steps_over_the_whole_range() -> None:
    matrix = rows_of(40, 2 * GROUP + 10).float()
    matrix[3] = 0
    got = coded(matrix, "int4").matrix()
    for first in range(0, matrix.shape[1], GROUP):
        part = slice(first, first + GROUP)
        low = matrix[:, part].amin(1, keepdim=True).clamp_max(0)
        step = ((matrix[:, part].amax(1, keepdim=True).clamp_min(0) - low) / 15).clamp_min(1e-12)
        plain = ((matrix[:, part] / step + (-low / step).round()).round().clamp(0, 15) - (-low / step).round()) * step
        error, plain_error = ((each - matrix[:, part]).square().sum(1) for each in (got[:, part], plain))
        assert (error <= plain_error * 1.0001).all()
    assert torch.equal(got[3], matrix[3])


def test_codes_are_stacked_where_they_are_grouped_alike() -> None:
    a, b = drawn("int4", 8, 64, 32), drawn("int4", 3, 64, 32)
    stacked = stacked_codes([a, b])
    assert stacked is not None
    assert torch.equal(stacked.matrix(), torch.cat((a.matrix(), b.matrix())))
    assert stacked_codes([a, drawn("int4", 3, 64, 64)]) is None
    assert stacked_codes([a, drawn("int8", 3, 64, 32)]) is None


def test_rows_of_codes_are_rows_of_what_they_mean() -> None:
    weight = drawn("int4", 8, 64, 32)
    turned = weight.of_rows(lambda rows: rows.flip(0))
    assert torch.equal(turned.matrix(), weight.matrix().flip(0))
