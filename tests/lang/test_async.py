"""`async def` programs: the same core, no thread of their own, and nothing that stops the loop they share."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import psutil
import pytest

import niwaki as nw
from niwaki.lang.async_batch import run_rows_async
from niwaki.lang.state import State

if TYPE_CHECKING:
    from niwaki.runtime.api import Constraint
    from niwaki.runtime.constraints import CompiledConstraint
    from niwaki.runtime.engine import Engine

STORY = "Once upon a time there was a tree, and it grew."


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


def answers(threads: int = 1, delay: float = 0.0) -> nw.ScriptedBackend:
    script: dict[str | re.Pattern[str], str] = {"Moral: ": "grow", "Title: ": "A Tree", "": STORY}
    return nw.ScriptedBackend(script, threads=threads, delay=delay)


@pytest.fixture
def backend() -> Iterator[nw.ScriptedBackend]:
    scripted = answers()
    yield scripted
    scripted.shutdown()


def wait_until(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(2000):
        if condition():
            return
        gc.collect()
        done.wait(0.005)
    raise AssertionError("it never came true")


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
        assert gate.wait(10)
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
    assert f.run(backend=backend, timeout=20).ret_value == "late"
    backend.shutdown()


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

    async def main() -> list[State | Exception]:
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


def test_async_programs_on_the_bundled_model(bundled_engine: Engine) -> None:
    async def main() -> list[State | Exception]:
        return await nw.function(three_gens_and_a_fork).arun_batch(
            [(i,) for i in range(48)], concurrency=48, backend=bundled_engine, ignore_eos=True
        )

    before = threading.active_count()
    states = asyncio.run(main())
    assert threading.active_count() <= before + 1
    assert [type(state) for state in states] == [State] * 48
    del states
    wait_until(lambda: bundled_engine.stats()["pages_held"] == 0)
    bundled_engine.backend.check()


def test_a_constraint_that_an_async_program_needs_is_compiled_off_its_loop(
    bundled_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = bundled_engine.backend._compiler
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
            await f.arun(r"(a)\1", backend=bundled_engine)
        assert "in program f, test_async.py" in caught.value.__notes__[0]

    asyncio.run(main())
    assert threads
    assert threading.current_thread() not in threads


# -- batches ----------------------------------------------------------------------------------------------------------


@nw.function
async def pick(s: State, i: int) -> int:
    s += f"{i}: " + nw.gen("x")
    if i % 3 == 1:
        raise ValueError(f"row {i}")
    await s.get("x")
    return i


def outcomes(results: list[State | Exception]) -> list[object]:
    return [result.ret_value if isinstance(result, State) else str(result) for result in results]


def test_a_batch_keeps_the_order_and_the_errors_of_its_rows(backend: nw.ScriptedBackend) -> None:
    async def main() -> list[State | Exception]:
        return await pick.arun_batch(({"i": i} for i in range(7)), concurrency=3, backend=backend)

    assert outcomes(asyncio.run(main())) == [0, "row 1", 2, 3, "row 4", 5, 6]


@pytest.mark.parametrize("generator_style", [False, True])
def test_run_batch_of_an_async_program_needs_no_loop(backend: nw.ScriptedBackend, generator_style: bool) -> None:
    rows = [(i,) for i in range(5)]
    results = list(
        pick.run_batch(rows, backend=backend, generator_style=True)
        if generator_style
        else pick.run_batch(rows, backend=backend)
    )
    assert outcomes(results) == [0, "row 1", 2, 3, "row 4"]


def test_a_batch_of_def_programs_can_be_awaited(backend: nw.ScriptedBackend) -> None:
    @nw.function
    def f(s: State, i: int) -> object:
        s += f"{i}: " + nw.gen("x")
        return s["x"]

    async def main() -> list[State | Exception]:
        return await f.arun_batch([(1,), ("no", "such row"), (3,)], backend=backend)

    first, second, third = asyncio.run(main())
    assert outcomes([first, third]) == [STORY, STORY]
    assert isinstance(second, nw.ProgramError)


def test_on_error_raise_raises_the_first_error_and_cancels_the_rest(backend: nw.ScriptedBackend) -> None:
    cancelled: list[int] = []

    @nw.function
    async def f(s: State, i: int) -> None:
        if i == 0:
            raise ValueError("first")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(i)
            raise

    async def main() -> None:
        await f.arun_batch([(i,) for i in range(4)], on_error="raise", backend=backend)

    with pytest.raises(ValueError, match="first"):
        asyncio.run(main())
    assert sorted(cancelled) == [1, 2, 3]


def test_a_batch_can_be_left_early() -> None:
    backend = answers(threads=2, delay=0.001)
    begun = []

    @nw.function
    async def f(s: State, i: int) -> int:
        begun.append(i)
        s += nw.gen("x")
        await s.get("x")
        return i

    async def main() -> None:
        async with aclosing(f.arun_batch(((i,) for i in range(1000)), concurrency=4, backend=backend)) as batch:
            async for result in batch:
                assert isinstance(result, State)
                break
        assert len(asyncio.all_tasks()) == 1  # no row outlives its batch

    asyncio.run(main())
    assert len(begun) <= 4 * 5
    wait_until(lambda: backend.num_open_branches == 0)
    backend.shutdown()


def test_a_batch_reads_its_rows_lazily_and_runs_no_more_than_asked() -> None:
    num_read = num_running = most_running = 0
    furthest_ahead = 0

    def rows() -> Iterator[int]:
        nonlocal num_read
        for i in range(200):
            num_read += 1
            yield i

    async def run_one(i: int) -> int:
        nonlocal num_running, most_running
        num_running += 1
        most_running = max(most_running, num_running)
        for _ in range(i % 7):
            await asyncio.sleep(0)
        num_running -= 1
        return i

    async def main() -> list[int | Exception]:
        nonlocal furthest_ahead
        seen: list[int | Exception] = []
        async for result in run_rows_async(run_one, rows(), concurrency=5):
            furthest_ahead = max(furthest_ahead, num_read - len(seen))
            seen.append(result)
        return seen

    assert asyncio.run(main()) == list(range(200))
    assert most_running == 5
    assert furthest_ahead <= 4 * 5


def test_rows_that_raise_fail_the_batch_after_what_was_read_before() -> None:
    def rows() -> Iterator[int]:
        yield from range(3)
        raise OSError("the file is gone")

    async def run_one(i: int) -> int:
        await asyncio.sleep(0)
        return i

    async def main() -> None:
        results = aiter(run_rows_async(run_one, rows(), concurrency=2))
        assert [await anext(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="the file is gone"):
            await anext(results)

    asyncio.run(main())


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.5])
def test_a_concurrency_that_is_none_is_refused_at_once(concurrency: int, backend: nw.ScriptedBackend) -> None:
    with pytest.raises(nw.ConfigError, match="concurrency must be a whole number of at least 1"):
        pick.arun_batch([], concurrency=concurrency, backend=backend)


def test_a_batch_that_nobody_awaits_warns_and_one_runs_only_once(backend: nw.ScriptedBackend) -> None:
    with pytest.warns(RuntimeWarning, match="never awaited"):
        pick.arun_batch([(0,)], backend=backend)

    async def main() -> None:
        batch = pick.arun_batch([(0,)], backend=backend)
        await batch
        with pytest.raises(nw.ProgramError, match="a batch runs once"):
            await batch

    asyncio.run(main())
    assert len(backend.calls) == 1


# -- streams ----------------------------------------------------------------------------------------------------------


@nw.function
def qa(s: State, question: str) -> None:
    s += nw.user(question)
    s += nw.assistant(nw.gen("answer"))
    s += nw.gen("after")


@nw.function
async def aqa(s: State, question: str) -> None:
    s += nw.user(question)
    s += nw.assistant(nw.gen("answer"))
    await s.get("answer")
    s += nw.gen("after")


@pytest.mark.parametrize("program", [qa, aqa], ids=["def", "async def"])
@pytest.mark.parametrize("name", [None, "answer", "after"])
def test_the_pieces_of_an_async_stream_add_up(program: nw.Program, name: str | None) -> None:
    backend = answers(delay=0.0005)

    async def main() -> None:
        state = program.stream("What grew?", backend=backend, timeout=20)
        pieces = [piece async for piece in state.text_async_iter(name)]
        late = [piece async for piece in state.text_async_iter(name)]
        await state.wait()
        whole = state.text() if name is None else state[name]
        assert "".join(pieces) == whole == "".join(late)
        assert len(pieces) > 3
        assert all(pieces)

    asyncio.run(main())
    backend.shutdown()


def test_each_piece_tells_of_its_own_tokens(bundled_engine: Engine) -> None:
    async def main() -> list[tuple[str, dict[str, object]]]:
        state = qa.run("What grew?", stream=True, backend=bundled_engine, return_logprob=True, temperature=0,
                       max_new_tokens=24, ignore_eos=True)  # fmt: skip
        return [pair async for pair in state.text_async_iter("answer", return_meta_data=True)]

    pairs = asyncio.run(main())
    assert pairs
    num_tokens = 0
    for text, meta in pairs:
        assert text
        logprobs = meta["output_token_logprobs"]
        assert isinstance(logprobs, list)
        num_tokens += len(logprobs)
        assert meta["output_token_logprobs_length"] == num_tokens == meta["completion_tokens"]
    assert 0 < num_tokens <= 24


def test_pieces_without_log_probabilities_count_their_tokens() -> None:
    async def main() -> None:
        backend = nw.ScriptedBackend(["one two three", "x"])
        state = await qa.arun("?", backend=backend)
        metas = [meta async for _, meta in state.text_async_iter("answer", return_meta_data=True)]
        assert metas == [{"completion_tokens": 3}]

    asyncio.run(main())


def test_an_async_stream_may_be_left_at_any_piece() -> None:
    backend = answers(delay=0.0005)

    async def main() -> None:
        state = qa.stream("What grew?", backend=backend, timeout=20)
        async for _ in state.text_async_iter():
            break
        async with aclosing(state.text_async_iter("answer")) as pieces:
            assert await anext(pieces)
        waiting = asyncio.ensure_future(anext(state.text_async_iter("after")))
        await asyncio.sleep(0)
        waiting.cancel()  # while it waits
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await state.wait()
        assert state["after"] == STORY

    asyncio.run(main())
    backend.shutdown()


def test_several_variables_are_streamed_at_once() -> None:
    backend = answers(delay=0.0005)

    async def read(state: State, name: str | None) -> str:
        return "".join([piece async for piece in state.text_async_iter(name)])

    async def main() -> None:
        state = aqa.stream("What grew?", backend=backend, timeout=20)
        answer, after, whole = await asyncio.gather(read(state, "answer"), read(state, "after"), read(state, None))
        assert answer == after == STORY
        assert whole == state.text()

    asyncio.run(main())
    backend.shutdown()


def test_an_error_comes_out_of_an_async_stream_after_the_text_before_it() -> None:
    @nw.function
    async def f(s: State) -> None:
        s += "before" + nw.gen("x")
        await s.get("x")

    async def main() -> None:
        state = f.stream(backend=nw.ScriptedBackend([nw.GenerationError("on fire")]))
        pieces = state.text_async_iter()
        assert await anext(pieces) == "before"
        with pytest.raises(nw.GenerationError, match="on fire"):
            await anext(pieces)
        with pytest.raises(nw.GenerationError, match="on fire"):
            await anext(state.text_async_iter("x"))

    asyncio.run(main())


def test_an_async_program_streams_to_a_thread_that_has_no_loop() -> None:
    backend = answers(delay=0.0005)
    state = aqa.stream("What grew?", backend=backend, timeout=20)
    assert "".join(state.text_iter()) == state.text()
    assert state["after"] == STORY
    backend.shutdown()


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
        await asyncio.to_thread(begun.wait, 10)
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
        assert gate.wait(10)
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
