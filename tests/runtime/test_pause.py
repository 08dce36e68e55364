from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Batch, Row
from niwaki.runtime.loop.pause import Pause


def test_others_wait_for_the_next_pause_but_not_for_ever() -> None:
    pause = Pause()
    states = [pause.is_on]
    with pause:
        pause.wait()
        states.append(pause.is_on)
    states.append(pause.is_on)
    pause.wait()  # ends
    assert states == [True, True, False]


def test_there_is_a_pause_while_the_model_computes_and_while_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []
    between: list[bool] = []
    with Engine(kv_tokens=2048) as engine:
        core = engine.backend._core
        forward = core._runner.forward

        def watched(rows: Sequence[Row] | Batch) -> torch.Tensor:
            inside.append(core.pause.is_on)
            return forward(rows)

        monkeypatch.setattr(core._runner, "forward", watched)
        engine.backend.after_step = lambda: between.append(core.pause.is_on)
        engine.generate("one two", {"max_new_tokens": 4, "ignore_eos": True})
        late = time.monotonic() + 30
        while not core.pause.is_on:
            assert time.monotonic() < late
            time.sleep(0.001)
    assert len(inside) >= 2
    assert all(inside)
    assert not any(between)
