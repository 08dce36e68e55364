"""Tiles by vectors: both ways of stepping against the formula, and the product that goes by them against torch's."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import numba
import numpy as np
import pytest
import torch

from niwaki.kernels import few_pairs, jit, linear, linear_tiles, simd_formats, vector_tiles
from niwaki.kernels.few_pairs import AT_ONCE, MAX_ROWS, MIN_PARALLEL_ELEMENTS
from niwaki.kernels.linear_tiles import MIN_PARALLEL_PRODUCTS, ROWS_AT_ONCE
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import NumbaOps, array_of
from niwaki.kernels.simd_memory import load16, store_bfloat16, store_pair
from niwaki.kernels.tiles import LINE, clear, has_matrix_unit, load_tile, multiply, store_tile
from niwaki.kernels.vector_tiles import multiplies_pairs

by_vectors = pytest.mark.skipif(has_matrix_unit(), reason="this CPU has tiles of its own")
by_pairs = pytest.mark.skipif(
    has_matrix_unit() or not multiplies_pairs(), reason="this CPU does not multiply pairs, or has tiles"
)


def products(a: np.ndarray, stride: int, b: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
    """after = before + a b, twice over, in two tiles of sums."""
    load_tile(0, before, 0, LINE)
    clear(1)
    load_tile(4, a, 0, stride)
    load_tile(6, b, 0, LINE)
    multiply(0, 4, 6)
    multiply(1, 4, 6)
    multiply(1, 4, 6)
    store_tile(0, after, 0, 2 * LINE)
    store_tile(1, after, 16, 2 * LINE)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return array_of(Operand.of(tensor.contiguous())).reshape(-1)


@by_vectors
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_product_of_tiles_is_what_the_formula_says(is_plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_plain:  # as on a processor that multiplies float32 alone
        monkeypatch.setattr(vector_tiles, "multiplies_pairs", lambda: False)
    kernel: Callable[..., None] = numba.njit(products)  # compiled here, not read from disk
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn((16, 48), generator=generator).bfloat16()  # of whose rows a tile holds the first 32
    b = torch.randn((32, 16), generator=generator).bfloat16()
    pairs = b.view(16, 2, 16).transpose(1, 2)  # word n of row k: rows 2k and 2k + 1 of b, column n
    before = torch.randn((16, 16), generator=generator)
    after = np.empty((16, 32), np.float32)
    kernel(bits(wide), 96, bits(pairs), before.numpy().reshape(-1), after.reshape(-1))
    product = wide[:, :32].double() @ b.double()
    assert np.allclose(after[:, :16], (before + product).numpy(), atol=1e-5)
    assert np.allclose(after[:, 16:], (2 * product).numpy(), atol=1e-5)


@by_pairs
@pytest.mark.parametrize(
    "rows", [*range(1, MAX_ROWS + 2), 15, 16, 17, 26, 30, 32, 35, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 1]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 1120), (176, 64), (32, 2048)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_by_pairs_is_torchs(rows: int, outputs: int, inputs: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn((rows, inputs), generator=generator).bfloat16()
    weight = torch.randn((outputs, inputs), generator=generator).div_(inputs**0.5).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16() if has_bias else None
    out = torch.full((rows + 1, outputs), 7.0, dtype=torch.bfloat16)
    takes = few_pairs.takes_few if rows <= MAX_ROWS else linear_tiles.takes
    assert takes(array_of(Operand.of(x)), array_of(Operand.of(weight)))
    added = None if bias is None else Operand.of(bias)
    NumbaOps().linear(Operand.of(x), Operand.of(weight), added, Operand.of(out[:rows]))
    exact = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    assert torch.allclose(out[:rows].double(), exact, rtol=2**-8, atol=1e-5)
    assert bool((out[rows] == 7.0).all())


@pytest.mark.parametrize("rows", [3, MAX_ROWS + 8])
def test_rows_that_lie_apart_are_multiplied_as_those_side_by_side(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn((rows, 192), generator=generator).bfloat16()
    weight = torch.randn((32, 64), generator=generator).div_(8).bfloat16()
    out = torch.empty((rows, 32), dtype=torch.bfloat16)
    NumbaOps().linear(Operand.of(wide[:, 64:128]), Operand.of(weight), None, Operand.of(out))
    assert torch.allclose(out.double(), wide[:, 64:128].double() @ weight.double().t(), rtol=2**-8, atol=1e-5)


@by_pairs
def test_a_row_of_few_gets_the_same_bits_whoever_stands_beside_it() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((MAX_ROWS, 416), generator=generator).bfloat16()
    weight = torch.randn((48, 416), generator=generator).bfloat16()
    outs = []
    for first in range(MAX_ROWS):
        for last in range(first + 1, MAX_ROWS + 1):
            out = torch.empty((MAX_ROWS, 48), dtype=torch.bfloat16)
            NumbaOps().linear(Operand.of(x[first:last]), Operand.of(weight), None, Operand.of(out[first:last]))
            outs.append((first, last, out))
    whole = next(out for first, last, out in outs if last - first == MAX_ROWS)
    assert all(torch.equal(out[first:last], whole[first:last]) for first, last, out in outs)


@by_pairs
@pytest.mark.parametrize("rows", [AT_ONCE - 3, MAX_ROWS, 32, 5 * ROWS_AT_ONCE])
def test_threads_change_no_product_by_pairs(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((rows, 1024), generator=generator).bfloat16()
    assert MIN_PARALLEL_PRODUCTS // 32 > MIN_PARALLEL_ELEMENTS
    weight = torch.randn((MIN_PARALLEL_PRODUCTS // 32768 // 16 * 16 + 48, 1024), generator=generator).bfloat16()
    outs = []
    before = jit.get_num_threads()
    try:
        for threads in (1, 2):
            jit.set_num_threads(threads)
            out = torch.empty((rows, len(weight)), dtype=torch.bfloat16)
            NumbaOps().linear(Operand.of(x), Operand.of(weight), None, Operand.of(out))
            outs.append(out)
    finally:
        jit.set_num_threads(before)
    assert torch.equal(*outs)


@pytest.mark.parametrize("rows", [1, 9, 64, 65, 200])
def test_without_products_of_bfloat16_they_go_by_float32(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor of AVX2 alone, where torch's own take five times as long."""
    monkeypatch.setattr(linear, "multiplies_halves", lambda: False)
    monkeypatch.setattr(few_pairs, "multiplies_pairs", lambda: False)
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, lambda *args, **kwargs: pytest.fail("the slow product"))
    few = Mock(wraps=linear.linear_few_rows)
    monkeypatch.setattr("niwaki.kernels.ops.linear_few_rows", few)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn((rows, 96), generator=generator).bfloat16()
    weight = torch.randn((48, 96), generator=generator).div_(96**0.5).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16()
    out = torch.empty((rows, 48), dtype=torch.bfloat16)
    NumbaOps().linear(Operand.of(x), Operand.of(weight), Operand.of(bias), Operand.of(out))
    exact = x.double() @ weight.double().t() + bias.double()
    assert torch.allclose(out.double(), exact, rtol=2**-8, atol=1e-5)
    assert few.called == (rows <= linear.MAX_ROWS_BESIDE_SLOW)


@by_pairs
def test_numbers_are_rounded_by_instruction_as_by_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sign and exponent of a normal number, with halves that are ties, just beside them, or neither; and NaN."""
    upper = np.arange(0x0080, 0x7F80, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits_of = np.concatenate([sign | each for each in upper[:, None] | lower for sign in (0, np.uint32(1 << 31))])
    numbers = np.concatenate([bits_of, np.full(16, 0x7FC00000, np.uint32)]).view(np.float32)
    numbers = numbers[: len(numbers) // 32 * 32]
    found = []
    for by_instruction in (True, False):
        monkeypatch.setattr(simd_formats, "rounds_by_instruction", lambda is_so=by_instruction: is_so)
        pairs, singles = (np.zeros(len(numbers), np.uint16) for _ in range(2))
        numba.njit(round_all)(numbers, pairs, singles)
        found.append((pairs, singles))
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    expected = torch.from_numpy(numbers.copy()).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(found[0][1][:-32], expected[:-32])


def round_all(numbers: np.ndarray, pairs: np.ndarray, singles: np.ndarray) -> None:
    for i in range(0, numbers.shape[0], 32):
        store_pair(pairs, i, load16(numbers, i), load16(numbers, i + 16))
        store_bfloat16(singles, i, load16(numbers, i))
        store_bfloat16(singles, i + 16, load16(numbers, i + 16))
