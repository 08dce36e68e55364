"""Whatever ends a program, its pages come back to the engine, and the cache's books are right."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

import pytest

import niwaki as nw
from niwaki.lang.state import State
from tests.lang.waiting import PATIENCE, press_ctrl_c, wait_until

if TYPE_CHECKING:
    from niwaki.runtime.api import Constraint
    from niwaki.runtime.constraints import CompiledConstraint
    from niwaki.runtime.engine import Engine


@nw.function
def long_forks(s: State) -> list[State]:
    s += "A long story about a tree that grew near the old river."
    forks = s.fork(3)
    forks += lambda i: f"\n{i}:" + nw.gen("x", max_tokens=3000, ignore_eos=True)
    forks.join()
    s += nw.gen("y", max_tokens=3000, ignore_eos=True)
    return list(forks)


def engine_is_idle(engine: Engine) -> bool:
    gc.collect()
    stats = engine.stats()
    return not (stats["requests_running"] or stats["requests_waiting"] or stats["pages_held"])


def by_the_clock(engine: Engine) -> State:
    return long_forks.run(backend=engine, timeout=0.3)


def by_a_gens_clock(engine: Engine) -> State:
    @nw.function
    def f(s: State) -> None:
        s += "A long story." + nw.gen("x", max_tokens=3000, ignore_eos=True, timeout=0.3)

    return f.run(backend=engine)


def by_cancel(engine: Engine) -> State:
    state = long_forks.run(backend=engine)
    state.cancel()
    return state


@pytest.mark.parametrize("end", [by_the_clock, by_a_gens_clock, by_cancel])
def test_pages_come_back_from_what_was_ended(bundled_engine: Engine, end: Callable[[Engine], State]) -> None:
    state = end(bundled_engine)
    wait_until(lambda: engine_is_idle(bundled_engine))  # the state is still held, and nobody has read it
    bundled_engine.backend.check()
    assert isinstance(state.error(), nw.TimedOut | nw.Cancelled)


def test_pages_come_back_from_a_cancelled_arun(bundled_engine: Engine) -> None:
    async def main() -> None:
        task = asyncio.create_task(long_forks.arun(backend=bundled_engine))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until(lambda: engine_is_idle(bundled_engine))
    bundled_engine.backend.check()


def test_pages_come_back_where_streams_are_left_in_the_middle(bundled_engine: Engine) -> None:
    @nw.function
    def f(s: State) -> None:
        s += "A long story." + nw.gen("x", max_tokens=3000, ignore_eos=True)
        s += "Its words: " + nw.gen("y", dtype=list[str], max_tokens=3000)

    async def main() -> None:
        state = f.stream(backend=bundled_engine)
        async for piece in state.text_async_iter("x"):
            assert piece
            break
        waiting = asyncio.ensure_future(anext(state.stream_value("y")))
        async with aclosing(state.text_async_iter()) as pieces:
            assert await anext(pieces)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert asyncio.all_tasks() == {asyncio.current_task()}
        state.cancel()

    asyncio.run(main())
    wait_until(lambda: engine_is_idle(bundled_engine))
    bundled_engine.backend.check()


@pytest.mark.parametrize("is_batch", [False, True])
def test_pages_come_back_after_ctrl_c(bundled_engine: Engine, is_batch: bool) -> None:
    @nw.function
    def f(s: State, number: int) -> None:
        s += f"Story {number}."
        forks = s.fork(3)
        forks += lambda i: f"\n{i}:" + nw.gen("x", max_tokens=3000, ignore_eos=True)
        next(forks[0].text_iter("x"))  # it is in the middle
        if number == 0:
            threading.Thread(target=press_ctrl_c).start()
        forks.join()
        s.sync()

    rows = [(number,) for number in range(4)]
    run = partial(f.run_batch, rows, num_threads=4) if is_batch else partial(f.run, 0)
    with pytest.raises(KeyboardInterrupt):
        run(backend=bundled_engine)
    wait_until(lambda: engine_is_idle(bundled_engine))
    bundled_engine.backend.check()


def test_pages_come_back_from_two_hundred_programs_on_threads(bundled_engine: Engine) -> None:
    all_inside = threading.Barrier(200)  # every one of them has begun before any of them goes on

    @nw.function
    def f(s: State, number: int) -> None:
        all_inside.wait(PATIENCE)
        s += f"Item {number}. First: " + nw.gen("first", max_tokens=2)
        s += f" after {s['first']}: " + nw.gen("second", max_tokens=2)
        forks = s.fork(1)
        forks += " Third: " + nw.gen("third", max_tokens=2)
        forks.join()

    rows = [(number,) for number in range(200)]
    states = f.run_batch(rows, num_threads=200, backend=bundled_engine, ignore_eos=True)
    assert all(isinstance(state, State) and isinstance(state["third"], list) for state in states)
    del states
    wait_until(lambda: engine_is_idle(bundled_engine))
    bundled_engine.backend.check()


def test_what_is_cancelled_while_its_constraint_compiles_never_reaches_the_engine(
    bundled_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = bundled_engine.backend._compilations._compiler
    compile_one = compiler.compile
    gate, is_compiling = threading.Event(), threading.Event()

    def compile_when_told(constraint: Constraint) -> CompiledConstraint:
        is_compiling.set()
        assert gate.wait(PATIENCE)
        return compile_one(constraint)

    monkeypatch.setattr(compiler, "compile", compile_when_told)

    @nw.function
    async def f(s: State) -> None:
        s += "A" + nw.gen("x", regex="[b-y]{900}", max_tokens=1000)
        assert await asyncio.to_thread(is_compiling.wait, PATIENCE)
        s.cancel()

    steps = bundled_engine.stats()["generated_tokens"]
    with pytest.raises(nw.Cancelled):
        f.run(backend=bundled_engine)["x"]
    gate.set()
    wait_until(lambda: engine_is_idle(bundled_engine))
    assert bundled_engine.stats()["generated_tokens"] == steps
