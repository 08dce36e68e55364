from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

import pytest
import torch

from niwaki.runtime.checkpoint.tokenizer import Tokenizer
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


class Never(threading.Event):
    """It is not set in the time that anybody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.num_waits += 1
        return False


def test_who_waits_often_is_kept_once_between_two_pauses_and_the_engines_thread_never() -> None:
    pause = Pause()
    waited = pause._is_on = Never()

    def wait_often(count: int) -> None:
        for _ in range(count):
            pause.wait()

    def others(count: int) -> int:
        thread = threading.Thread(target=wait_often, args=(count,))
        thread.start()
        thread.join()
        return waited.num_waits

    with pause:
        assert others(3) == 0
    pause.wait()
    assert waited.num_waits == 0
    assert others(3) == 1
    with pause:
        pass
    assert others(3) == 2


def test_what_is_put_between_two_pauses_comes_as_the_next_begins() -> None:
    pause = Pause()
    jobs: SimpleQueue[int] = SimpleQueue()
    with pause:
        pass
    pause.hold_back(partial(jobs.put, 1))
    pause.hold_back(partial(jobs.put, 2))
    assert jobs.empty()
    with pause:
        assert [jobs.get_nowait(), jobs.get_nowait()] == [1, 2]
    with pause:
        assert jobs.empty()


def test_whoever_works_out_a_forced_text_waits_before_each_text_that_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    wait, encode = Pause.wait, Tokenizer.plain_ids

    def waited(own: Pause) -> None:
        done.append("wait")
        wait(own)

    def encoded(own: Tokenizer, text: str) -> list[int]:
        done.append("encode")
        return encode(own, text)

    monkeypatch.setattr(Pause, "wait", waited)
    monkeypatch.setattr(Tokenizer, "plain_ids", encoded)
    schema = '{"type": "object", "properties": {"unheard": {"type": "string"}}, "required": ["unheard"]}'
    with Engine(kv_tokens=2048) as engine:
        engine.generate("As JSON: ", {"json_schema": schema, "max_new_tokens": 20})
    before = {done[place - 1] for place, what in enumerate(done) if what == "encode"}
    assert done.count("encode") > 30
    assert before == {"wait"}


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
