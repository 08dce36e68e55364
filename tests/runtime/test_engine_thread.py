"""What is done on the engine's thread may fail: those who wait are told, and the engine goes on."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from niwaki.runtime.api import Cancelled, GenerationError, RequestError, SamplingParams, Segment
from niwaki.runtime.engine import Engine
from niwaki.runtime.kv.kv_pages import KVPages
from niwaki.runtime.loop.core import EngineCore
from tests.runtime.server.conftest import held
from tests.toy import make_model

IDS = np.arange(5, 14, dtype=np.int32)
SHORT = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(make_model(tmp_path / "toy"), kv_tokens=1024) as engine:
        yield engine


def break_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    whole: Callable[..., object] = getattr(owner, name)
    broken: list[str] = []

    def once(*args: object, **options: object) -> object:
        if not broken:
            broken.append(name)
            raise RuntimeError("a bug")
        return whole(*args, **options)

    monkeypatch.setattr(owner, name, once)
    return broken


def wait_for(event: threading.Event) -> None:
    event.wait(60)


def goes_on(engine: Engine) -> None:
    (output,) = engine.backend.start(IDS, SHORT).result(timeout=60)
    assert len(output.token_ids) == 4
    assert engine.backend.is_alive
    engine.backend.check()
    assert engine.stats()["pages_held"] == 0


def test_a_request_that_cannot_be_taken_in_is_told_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    break_once(monkeypatch, EngineCore, "_land_and_settle")
    with pytest.raises(GenerationError, match="a bug"):
        engine.backend.start(IDS, SHORT).result(timeout=60)
    goes_on(engine)


def test_a_cancel_that_fails_leaves_nobody_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(engine):  # it runs on until it is cancelled
        running = engine.backend.start(IDS, LONG)
        broken = break_once(monkeypatch, EngineCore, "abort")
        running.cancel()
    with pytest.raises(GenerationError, match="a bug"):
        running.result(timeout=60)
    assert broken
    goes_on(engine)


@pytest.mark.parametrize("name", ["flush", "outline"])
def test_whoever_asks_between_steps_is_told_what_failed(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_once(monkeypatch, KVPages, name)
    with pytest.raises(RuntimeError, match="a bug"):
        engine.backend.flush() if name == "flush" else engine.backend.outline(10)
    goes_on(engine)


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine, path: engine.flush_cache(),
        lambda engine, path: engine.tree(),
        lambda engine, path: engine.save_cache(path),
        lambda engine, path: engine.load_cache(path),
        lambda engine, path: list(engine.generate(input_ids=[5, 6], sampling_params={}, stream=True)),
    ],
)
def test_a_callback_that_would_wait_for_the_engine_is_refused_and_holds_nobody_up(
    engine: Engine, ask: Callable[[Engine, Path], object], tmp_path: Path
) -> None:
    told: list[Exception] = []
    is_over = threading.Event()

    def call_back() -> None:
        try:
            ask(engine, tmp_path / "saved")
        except Exception as error:
            told.append(error)
        is_over.set()

    with held(engine, steps=1):  # else it may be done before, and then who adds it is called back himself
        engine.backend.start(IDS, SHORT).add_done_callback(call_back)
    assert is_over.wait(60)
    assert [type(error) for error in told] == [RequestError]
    goes_on(engine)


def test_a_demotion_that_fails_harms_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine.backend.start(IDS, LONG)
    broken = break_once(monkeypatch, KVPages, "demote")
    engine.backend.demote(engine.backend.open())
    assert len(running.result(timeout=60)[0].token_ids) == 400
    goes_on(engine)  # behind the demotion
    assert broken


def test_what_is_over_needs_no_collector_of_cycles(engine: Engine) -> None:
    goes_on(engine)  # who compiles a kernel leaves cycles that hold the frames of the step
    engine.backend.score(engine.backend.open(), [Segment("a")], ["b"]).result(timeout=60)
    gc.disable()
    try:
        over = engine.backend.start(IDS, SHORT)
        read = engine.backend.start(IDS, SHORT)
        assert sum(len(delta.token_ids) for delta in read.deltas(timeout=60)) == 4
        ended, may_go_on = threading.Event(), threading.Event()
        engine.backend.after_step = partial(wait_for, may_go_on)
        cancelled = engine.backend.start(IDS, LONG)
        cancelled.add_done_callback(ended.set)
        cancelled.cancel()
        may_go_on.set()
        assert ended.wait(60)
        assert isinstance(cancelled.error(), Cancelled)
        scored = engine.backend.score(engine.backend.open(), [Segment("a")], ["b"])
        assert over.result(timeout=60)
        assert scored.result(timeout=60)
        left = [weakref.ref(one) for one in (over, read, cancelled, scored)]
        engine.shutdown()  # its thread holds nothing any more
        del over, read, cancelled, scored
        assert [one() for one in left] == [None] * 4
    finally:
        gc.enable()
