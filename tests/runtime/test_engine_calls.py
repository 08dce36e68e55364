"""Calls of `Engine.generate`: what token ids may be, and that nothing of a call that failed goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from niwaki.runtime.api import CapacityError, GenerationError, RequestError
from niwaki.runtime.constraints.protocol import MaskRow
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Batch, Runner
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.sampler import SampleRow
from tests.toy import make_model

PROMPT = list(range(5, 14))
LONG = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(make_model(tmp_path / "toy"), kv_tokens=1024) as engine:
        yield engine


def wait_until_idle(engine: Engine) -> None:
    engine.backend.check()  # behind all that was handed over before
    end = time.monotonic() + 60
    while engine.stats()["requests_running"] or engine.stats()["requests_waiting"]:
        assert time.monotonic() < end, "something still runs"
        time.sleep(0.001)


@pytest.mark.parametrize(
    "ids",
    [[1, 2.5], [[1.5, 2]], [["3"]], [[True, False]], [[5, None]], [[5, 2**70]], [[2**63]], [[-1, 5]], [[2**31 + 1]]],
)
def test_token_ids_are_whole_numbers(engine: Engine, ids: list[int]) -> None:
    with pytest.raises(RequestError, match="input_ids must be"):
        engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})


@pytest.mark.parametrize("ids", [5, {1: 2}, {1}, iter([1]), object()])
def test_token_ids_that_are_no_list_are_refused(engine: Engine, ids: list[int]) -> None:
    with pytest.raises(RequestError, match="input_ids must be a list"):
        engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})


def stop_before_step(monkeypatch: pytest.MonkeyPatch, number: int) -> threading.Event:
    """Steps from that one on, the first is 0, begin when the event is set."""
    goes_on, forward, begun = threading.Event(), Runner.forward, list[None]()

    def held(self: Runner, rows: Batch) -> torch.Tensor:
        begun.append(None)
        if len(begun) > number:
            goes_on.wait(60)
        return forward(self, rows)

    monkeypatch.setattr(Runner, "forward", held)
    return goes_on


def test_of_a_call_that_is_refused_nothing_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = stop_before_step(monkeypatch, 0)
    with pytest.raises(CapacityError):
        engine.generate(input_ids=[*[PROMPT] * 70, [5] * 2000], sampling_params=LONG)
    goes_on.set()
    wait_until_idle(engine)
    assert engine.stats()["finished"] == 0


def test_a_stream_that_is_let_go_before_it_was_read_ends_in_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = stop_before_step(monkeypatch, 1)
    stream = engine.generate(input_ids=PROMPT, sampling_params=LONG, stream=True)
    del stream

    async def let_go() -> None:
        stream = await engine.async_generate(input_ids=PROMPT, sampling_params=LONG, stream=True)
        del stream

    asyncio.run(let_go())
    goes_on.set()
    wait_until_idle(engine)
    assert engine.stats()["finished"] == 0


def test_keys_and_positions_of_another_type_are_refused_by_name(engine: Engine) -> None:
    for given in ({None: 1}, {3: 1}):
        with pytest.raises(RequestError, match=r"None|3"):
            engine.generate("a", given)  # type: ignore[arg-type]  # what types would tell
    for position in ("x", 1.5, True, None):
        with pytest.raises(RequestError, match="logprob_start_len must be a whole number"):
            engine.generate("a", return_logprob=True, logprob_start_len=position)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize("is_async", [False, True])
def test_when_one_of_many_fails_the_others_are_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    goes_on = stop_before_step(monkeypatch, 1)
    sample_row, drawn = Request.sample_row, list[None]()

    def breaks_once(self: Request, mask: MaskRow | None, end_ids: frozenset[int]) -> SampleRow:
        drawn.append(None)
        if len(drawn) == 1:
            raise RuntimeError("a bug")
        return sample_row(self, mask, end_ids)

    monkeypatch.setattr(Request, "sample_row", breaks_once)
    asked: dict[str, object] = {"input_ids": [[5], [6], [7]], "sampling_params": LONG}

    def generate() -> object:
        return asyncio.run(engine.async_generate(**asked)) if is_async else engine.generate(**asked)  # type: ignore[call-overload]  # what types would tell

    with pytest.raises(GenerationError, match="a bug"):
        generate()
    goes_on.set()
    wait_until_idle(engine)
    assert engine.stats()["finished"] == 0


def test_whose_event_loop_is_closed_before_the_engine_is_done_is_told_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = stop_before_step(monkeypatch, 0)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.async_generate(input_ids=PROMPT, sampling_params=LONG), 0.01)

    asyncio.run(give_up())
    goes_on.set()
    wait_until_idle(engine)
    assert not caplog.messages
