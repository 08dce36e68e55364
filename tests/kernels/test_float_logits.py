"""Logits as float32: what torch makes of them, bit by bit."""

from __future__ import annotations

import pytest
import torch

from niwaki.kernels import float_logits as module
from niwaki.kernels.float_logits import float_logits


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
