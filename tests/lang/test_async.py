"""`async def` programs: the same core, no thread of their own, and nothing that stops the loop they share."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import psutil
import pytest

import niwaki as nw
from niwaki.lang.state import State
from tests.lang.story import STORY, answers
from tests.lang.waiting import PATIENCE, wait_until

if TYPE_CHECKING:
    from niwaki.runtime.api import Constraint
    from niwaki.runtime.constraints import CompiledConstraint
    from niwaki.runtime.engine import Engine


@nw.function
async def tell(s: State, name: str = "oak") -> str:
    s += f"Story of {name}: " + nw.gen("story")
    story = await s.get("story")
    forks = s.fork(2)
    forks += [" Moral: ", " Title: "]
    forks += nw.gen("end")
    forks.join()
    await s.wait()
    assert s["story"] == story  # everything is there: sync reads answer at once
    return str(story)


@pytest.fixture
def backend() -> Iterator[nw.ScriptedBackend]:
    scripted = answers()
    yield scripted
    scripted.shutdown()


# -- running ----------------------------------------------------------------------------------------------------------


def test_an_async_program_awaits_its_values(backend: nw.ScriptedBackend) -> None:
    state = asyncio.run(tell.arun(backend=backend))
    assert state["story"] == STORY == state.ret_value
    assert state["end"] == ["grow", "A Tree"]
    assert state.text() == f"Story of oak: {STORY}"


def test_run_runs_an_async_program_where_no_loop_runs(backend: nw.ScriptedBackend) -> None:
    state = tell.run("elm", backend=backend)
    assert state["end"] == ["grow", "A Tree"]
    assert state.text().startswith("Story of elm: ")
    assert tell(backend=backend)["story"] == STORY


def test_a_def_program_can_be_awaited_too(backend: nw.ScriptedBackend) -> None:
    threads = set()

    @nw.function
    def f(s: State) -> object:
        threads.add(threading.current_thread())
        s += nw.gen("x")
        return s["x"]

    async def main() -> State:
        return await f.arun(backend=backend)

    assert asyncio.run(main()).ret_value == STORY
    assert threading.main_thread() not in threads


def test_arun_returns_when_everything_has_run(backend: nw.ScriptedBackend) -> None:
    @nw.function
    async def f(s: State) -> None:
        s += nw.gen("x")

    async def main() -> object:
        return (await f.arun(backend=backend))["x"]  # would be refused if it had to wait

    assert asyncio.run(main()) == STORY


def test_the_body_runs_on_the_loop_that_awaits_it(backend: nw.ScriptedBackend) -> None:
    loops: list[object] = []

    @nw.function
    async def f(s: State) -> None:
        loops.append(asyncio.get_running_loop())
        s += nw.gen("x")
        await s.get("x")
        loops.append(threading.current_thread())

    async def main() -> None:
        await f.arun(backend=backend)
        assert loops == [asyncio.get_running_loop(), threading.current_thread()]

    asyncio.run(main())


def test_a_program_inside_an_async_one_is_part_of_its_run(backend: nw.ScriptedBackend) -> None:
    @nw.function
    async def outer(s: State) -> None:
        inner = await tell.arun("ash")
        s["story"] = inner["story"]

    @nw.function
    def around(s: State) -> None:
        s["story"] = outer.run()["story"]  # from a def program: a loop of its own

    assert outer.run(backend=backend)["story"] == STORY
    assert around.run(backend=backend)["story"] == STORY


# -- errors -----------------------------------------------------------------------------------------------------------


def test_arun_raises_what_the_state_failed_with_and_names_the_line() -> None:
    @nw.function
    async def f(s: State) -> None:
        s += "boom" + nw.gen("x")  # nobody reads it

    with pytest.raises(nw.GenerationError, match="on fire") as caught:
        asyncio.run(f.arun(backend=nw.ScriptedBackend([nw.GenerationError("on fire")])))
    assert 's += "boom" + nw.gen("x")' in caught.value.__notes__[0]


def test_an_error_in_an_async_body_comes_out_of_arun_and_run() -> None:
    seen: list[State] = []

    @nw.function
    async def f(s: State) -> None:
        seen.append(s)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(f.arun(backend=answers()))
    with pytest.raises(ValueError, match="no"):
        f.run(backend=answers())
    for state in seen:
        with pytest.raises(ValueError, match="no"):
            state.text()
    assert len(seen) == 2


def test_an_async_body_may_catch_the_error_of_a_fork() -> None:
    @nw.function
    async def f(s: State) -> str:
        forks = s.fork(2)
        forks += ["boom", "fine"]
        forks += nw.gen("x")
        try:
            await forks[0].get("x")
        except nw.GenerationError:
            return str(await forks[1].get("x"))
        return "no error"

    backend = nw.ScriptedBackend({"boom": nw.GenerationError("on fire"), "": "ok"}, threads=1)
    assert f.run(backend=backend).ret_value == "ok"
    backend.shutdown()


def test_an_unknown_variable_raises_at_once(backend: nw.ScriptedBackend) -> None:
    @nw.function
    async def f(s: State) -> None:
        await s.get("nothing")

    with pytest.raises(nw.UnknownVariable, match="no variable 'nothing'"):
        f.run(backend=backend)


def test_a_read_that_would_stop_the_loop_is_refused() -> None:
    gate = threading.Event()

    def answer(prompt: str) -> str:
        assert gate.wait(PATIENCE)
        return "late"

    @nw.function
    async def f(s: State) -> object:
        s += nw.gen("x")
        with pytest.raises(nw.ProgramError, match=r'write await s\.get\("x"\)'):
            s["x"]
        with pytest.raises(nw.ProgramError, match=r"await s\.wait\(\)"):
            s.text()
        gate.set()
        return await s.get("x")  # the state itself is well

    backend = nw.ScriptedBackend(answer, threads=1)
    assert f.run(backend=backend, timeout=PATIENCE).ret_value == "late"
    backend.shutdown()


@pytest.mark.parametrize(
    "read",
    [
        lambda state: state["reply"],
        lambda state: state.text(),
        lambda state: list(state.text_iter()),
        lambda state: list(state.stream_value("reply")),
    ],
)
def test_a_read_of_a_stream_that_would_stop_the_loop_before_it_begins_is_refused(
    read: Callable[[State], object],
) -> None:
    """The body is a task, and none begins before the code that started it waits."""

    @nw.function
    async def f(s: State) -> None:
        s += nw.gen("reply")

    async def main() -> str:
        state = f.stream(backend=nw.ScriptedBackend(["hello"]), timeout=PATIENCE)
        with pytest.raises(nw.ProgramError, match=r"await s\.wait\(\)"):
            read(state)
        return "".join([piece async for piece in state.text_async_iter()])

    assert asyncio.run(main()) == "hello"


def test_running_a_def_program_on_the_loop_of_an_async_one_is_refused(backend: nw.ScriptedBackend) -> None:
    @nw.function
    def inner(s: State) -> None:
        s += nw.gen("x")

    @nw.function
    async def outer(s: State) -> None:
        inner.run()

    with pytest.raises(nw.ProgramError, match=r"write await inner\.arun\(\.\.\.\)"):
        outer.run(backend=backend)


def test_run_and_run_batch_of_an_async_program_are_refused_where_a_loop_runs(backend: nw.ScriptedBackend) -> None:
    async def main() -> None:
        with pytest.raises(nw.ProgramError, match=r"write await tell\.arun\(\.\.\.\)"):
            tell.run(backend=backend)
        with pytest.raises(nw.ProgramError, match=r"write await tell\.arun_batch\(\.\.\.\)"):
            tell.run_batch([{}], backend=backend)

    asyncio.run(main())
    assert not backend.calls


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_a_program_with_yield_is_refused(kind: str) -> None:
    def generator(s: State) -> Iterator[int]:
        yield 1

    async def async_generator(s: State) -> AsyncIterator[int]:
        yield 1

    with pytest.raises(nw.ProgramError, match="without yield"):
        nw.function(generator if kind == "generator" else async_generator)


# -- many at once -----------------------------------------------------------------------------------------------------


async def three_gens_and_a_fork(s: State, i: int) -> None:
    s += f"Item {i}. First: " + nw.gen("first", max_tokens=3)
    await s.get("first")
    s += " Second: " + nw.gen("second", max_tokens=3)
    forks = s.fork(1)
    forks += " Third: " + nw.gen("third", max_tokens=3)
    forks.join()
    await s.get("third")


def test_two_thousand_async_programs_at_once_take_no_thread_each_and_little_memory() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "one two", threads=2)
    num_threads: list[int] = []
    num_inside = 0
    most_inside = 0
    all_inside = asyncio.Event()

    @nw.function
    async def program(s: State, i: int) -> None:
        nonlocal num_inside, most_inside
        num_inside += 1
        most_inside = max(most_inside, num_inside)
        if num_inside == 2000:
            all_inside.set()
        await all_inside.wait()  # every one of them has begun before any of them goes on
        await three_gens_and_a_fork(s, i)
        num_threads.append(threading.active_count())
        num_inside -= 1

    async def main() -> list[State[None] | Exception]:
        return await program.arun_batch([(i,) for i in range(2000)], concurrency=2000, backend=backend)

    before = threading.active_count()
    memory = psutil.Process().memory_info().rss
    states = asyncio.run(main())
    grown = psutil.Process().memory_info().rss - memory  # with every state still there
    assert most_inside == 2000
    assert max(num_threads) <= before + 2  # the closer of branches, and none else: the backend's two were there before
    assert grown < 256e6
    assert all(isinstance(state, State) and state["third"] == ["one two"] for state in states)
    assert len(backend.calls) == 6000
    del states
    wait_until(lambda: backend.num_open_branches == 0)
    backend.shutdown()


def test_a_hundred_async_programs_on_the_bundled_model(bundled_engine: Engine) -> None:
    async def main() -> list[State[None] | Exception]:
        return await nw.function(three_gens_and_a_fork).arun_batch(
            [(i,) for i in range(100)], concurrency=100, backend=bundled_engine, ignore_eos=True
        )

    before = threading.active_count()
    states = asyncio.run(main())
    assert threading.active_count() <= before + 1
    assert [type(state) for state in states] == [State] * 100
    del states
    wait_until(lambda: bundled_engine.stats()["pages_held"] == 0)
    bundled_engine.backend.check()


def test_a_constraint_that_an_async_program_needs_is_compiled_off_its_loop(
    bundled_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = bundled_engine.backend._compilations._compiler
    compile_one = compiler.compile
    threads: list[threading.Thread] = []

    def compile_and_tell(constraint: Constraint) -> CompiledConstraint:
        threads.append(threading.current_thread())
        return compile_one(constraint)

    monkeypatch.setattr(compiler, "compile", compile_and_tell)

    @nw.function
    async def f(s: State, regex: str) -> object:
        s += "Year: " + nw.gen("x", regex=regex, max_tokens=8)
        return await s.get("x")

    async def main() -> None:
        assert re.fullmatch("qz[0-9]", str((await f.arun("qz[0-9]", backend=bundled_engine)).ret_value))
        with pytest.raises(nw.ConstraintError) as caught:
            await f.arun(r"(qz)\1", backend=bundled_engine)  # one that no other test asks this engine for
        assert "in program f, test_async.py" in caught.value.__notes__[0]

    asyncio.run(main())
    assert threads
    assert threading.current_thread() not in threads


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_cancelling_arun_cancels_the_state_and_its_forks() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "word " * 1000, threads=3, delay=0.01)
    states: list[State] = []
    begun = asyncio.Event()

    @nw.function
    async def f(s: State) -> None:
        forks = s.fork(2)
        forks += "go" + nw.gen("x", max_tokens=100_000)
        states.extend([s, *forks])
        begun.set()
        await forks[0].get("x")

    async def main() -> None:
        task = asyncio.create_task(f.arun(backend=backend))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    for state in states:
        with pytest.raises(nw.Cancelled, match="program f was cancelled"):
            state.text()
    states.clear()
    wait_until(lambda: backend.num_open_branches == 0)
    backend.shutdown()


def test_cancelling_the_arun_of_a_def_program_ends_its_body_too() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "word " * 1000, threads=1, delay=0.01)
    ends: list[BaseException] = []
    begun = threading.Event()

    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", max_tokens=100_000)
        begun.set()
        try:
            s["x"]
        except BaseException as error:
            ends.append(error)
            raise

    async def main() -> None:
        task = asyncio.create_task(f.arun(backend=backend))
        await asyncio.to_thread(begun.wait, PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until(lambda: bool(ends))
    assert isinstance(ends[0], nw.Cancelled)
    backend.shutdown()


def test_a_wait_that_is_given_up_leaves_the_state_well() -> None:
    gate = threading.Event()

    def answer(prompt: str) -> str:
        assert gate.wait(PATIENCE)
        return "late"

    @nw.function
    async def f(s: State) -> object:
        s += nw.gen("x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.get("x"), 0.01)
        gate.set()
        return await s.get("x")

    backend = nw.ScriptedBackend(answer, threads=1)
    assert f.run(backend=backend).ret_value == "late"
    backend.shutdown()
