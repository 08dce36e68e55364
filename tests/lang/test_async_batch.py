"""`arun_batch`: rows on the event loop, in order, lazily, and gone when nobody wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import niwaki as nw
from niwaki.lang.async_batch import run_rows_async
from niwaki.lang.state import State
from tests.lang.story import STORY, answers
from tests.lang.waiting import wait_until

if TYPE_CHECKING:
    pass


@pytest.fixture
def backend() -> Iterator[nw.ScriptedBackend]:
    scripted = answers()
    yield scripted
    scripted.shutdown()


@nw.function
async def pick(s: State, i: int) -> int:
    s += f"{i}: " + nw.gen("x")
    if i % 3 == 1:
        raise ValueError(f"row {i}")
    await s.get("x")
    return i


def outcomes(results: Sequence[State | Exception]) -> list[object]:
    return [result.ret_value if isinstance(result, State) else str(result) for result in results]


def test_a_batch_keeps_the_order_and_the_errors_of_its_rows(backend: nw.ScriptedBackend) -> None:
    async def main() -> list[State[int] | Exception]:
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

    async def main() -> list[State[object] | Exception]:
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
