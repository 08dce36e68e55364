"""Logits as float32: what torch makes of them, bit by bit; and where they are highest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from niwaki.kernels import float_logits as module
from niwaki.kernels.float_logits import finite_highest, float_logits, highest


@pytest.mark.parametrize("shape", [(1, 8192), (3, 401), (5, 16), (0, 32)])
@pytest.mark.parametrize("most", [0, module.MOST])
def test_every_number_is_what_torch_makes_of_it(
    shape: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", most)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    if len(logits):
        logits[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    wide = float_logits(logits)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.view(torch.int32), logits.float().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_highest_is_where_argmax_of_float32_finds_it(dtype: torch.dtype) -> None:
    logits = torch.randn((64, 401), generator=torch.Generator().manual_seed(4)).to(dtype)  # many are equal in bfloat16
    values, best = highest(logits)
    assert values.dtype == (np.uint16 if dtype == torch.bfloat16 else np.float32)
    assert best.tolist() == logits.float().numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "row",
    [
        [-3.0, -1.0, -2.0],
        [-1.0, -0.0, 0.0],
        [-1.0, 0.0, -0.0],
        [-float("inf")] * 3,
        [1.0, float("inf"), 2.0],
        [1.0, float("nan"), float("inf")],
        [float("inf"), 1.0, -float("nan")],
        [2.0, -float("nan"), 3.0],
        [-2.0, -1.0, -float("nan")],
    ],
)
def test_rows_whose_bits_are_in_another_order_have_their_highest_too(row: list[float]) -> None:
    rows = np.array([[1.0, 3.0, 2.0], row, [3.0, 2.0, 1.0]], np.float32)
    bits = (rows.view(np.uint32) >> 16).astype(np.uint16)  # torch would make every NaN a positive one
    logits = torch.from_numpy(bits).view(torch.bfloat16)
    values, best = highest(logits)
    assert best.tolist() == rows.argmax(axis=1).tolist()
    found = values[1, best[1]]
    told = found if values.dtype == np.float32 else np.uint32(np.uint32(found) << 16).view(np.float32)
    assert np.array_equal(told, rows[1, best[1]], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_whose_highest_is_not_finite_is_told(dtype: torch.dtype, bad: float) -> None:
    logits = torch.randn((4, 33), generator=torch.Generator().manual_seed(5)).to(dtype)
    found = finite_highest(logits)
    assert found is not None
    assert found.tolist() == highest(logits)[1].tolist()
    logits[2] = bad
    assert finite_highest(logits) is None
