"""Many rows through one coroutine function on one event loop: bounded concurrency, results in order, no threads.

The twin of `batch.run_rows`. Knows neither programs nor backends.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Generic, Literal, TypeVar

from niwaki.lang.batch import WINDOW, check_batch
from niwaki.lang.batch_places import as_one_async_batch
from niwaki.lang.behind import Behind, Keep
from niwaki.runtime.api import Cancelled, ProgramError

RowT = TypeVar("RowT")
ResultT = TypeVar("ResultT")

DEFAULT_ASYNC_CONCURRENCY = 256  # rows in flight cost no thread; this is as many requests as an engine runs at once


class Batch(Generic[ResultT]):
    """Results in the order of their rows: `await batch` for a list, `async for result in batch` for one by one.

    Nothing runs before one of the two. Ending an `async for` early cancels the rows that still run, at the latest when
    the batch is let go; `await batch.aclose()` does so at once.
    """

    def __init__(self, results: AsyncGenerator[ResultT | Exception, None]) -> None:
        self._results = results
        self._is_begun = False

    def __await__(self) -> Generator[object, None, list[ResultT | Exception]]:
        return self._all().__await__()

    def __aiter__(self) -> AsyncIterator[ResultT | Exception]:
        if self._is_begun:
            raise ProgramError("a batch runs once; keep its list, or call arun_batch again")
        self._is_begun = True
        return self._results

    async def aclose(self) -> None:
        await self._results.aclose()

    def __del__(self) -> None:
        if not self._is_begun:  # as for a coroutine that nobody awaited
            warnings.warn("a batch was made but never awaited, so no row has run", RuntimeWarning, stacklevel=2)

    async def _all(self) -> list[ResultT | Exception]:
        return [result async for result in self]


def run_rows_async(
    run_one: Callable[[RowT], Awaitable[ResultT]],
    rows: Iterable[RowT],
    *,
    concurrency: int = DEFAULT_ASYNC_CONCURRENCY,
    on_error: Literal["return", "raise"] = "return",
    keep: Keep[ResultT] | None = None,
) -> AsyncGenerator[ResultT | Exception, None]:
    """Await `run_one` for every row, at most `concurrency` at once, and yield the results in the order of the rows.

    A row that raises yields its exception and the others go on; with on_error="raise" the first such exception, in
    row order, is raised instead. `rows` is read lazily, at most `WINDOW * concurrency` rows ahead of the oldest
    unfinished one. When `rows` itself raises, what was read before is finished and yielded first. Closing the batch
    cancels the rows that run. To an engine all rows are one program. `keep` is as of `run_rows`.

    Raises:
        ConfigError: concurrency is below 1, or on_error is unknown. Raised at once, not at the first result.
    """
    check_batch("concurrency", concurrency, on_error)
    results = _run_ordered(as_one_async_batch(run_one), rows, concurrency, Behind(keep))
    return _raise_errors(results) if on_error == "raise" else results


def iterate_on_a_loop(results: AsyncGenerator[ResultT | Exception, None]) -> Iterator[ResultT | Exception]:
    """The results for a caller without an event loop. Its rows run while the caller waits for the next one."""

    async def next_result() -> ResultT | Exception | None:
        return await anext(results, None)

    with asyncio.Runner() as runner:
        try:
            while (result := runner.run(next_result())) is not None:
                yield result
        finally:
            runner.run(results.aclose())


async def _run_ordered(
    run_one: Callable[[RowT], Awaitable[ResultT]], rows: Iterable[RowT], concurrency: int, behind: Behind[ResultT]
) -> AsyncGenerator[ResultT | Exception, None]:
    window: deque[asyncio.Task[ResultT | Exception]] = deque()
    running: set[asyncio.Task[ResultT | Exception]] = set()
    has_ended = asyncio.Event()
    source = iter(rows)
    source_error: Exception | None = None
    is_exhausted = False
    num_read = 0

    def end(number: int, task: asyncio.Task[ResultT | Exception]) -> None:
        running.discard(task)
        behind.has_ended(number)
        has_ended.set()

    try:
        while True:
            while not is_exhausted and len(running) < concurrency and len(window) < WINDOW * concurrency:
                try:
                    row = next(source)
                except StopIteration:
                    is_exhausted = True
                    break
                except Exception as error:  # kept until the rows before it are out
                    source_error, is_exhausted = error, True
                    break
                task = asyncio.ensure_future(_attempt(run_one, row))
                window.append(task)
                running.add(task)
                task.add_done_callback(partial(end, num_read))
                num_read += 1
            if not window:
                break
            if window[0].done():
                behind.gives_next()
                yield window.popleft().result()
                continue
            has_ended.clear()
            try:
                async with asyncio.timeout(behind.patience()):
                    await has_ended.wait()
            except TimeoutError:
                behind.keep(lambda place: window[place].result())
        if source_error is not None:
            raise source_error
    finally:
        left = list(running)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)  # no row outlives its batch


async def _attempt(run_one: Callable[[RowT], Awaitable[ResultT]], row: RowT) -> ResultT | Exception:
    try:
        return await run_one(row)
    except Exception as error:  # the row's own outcome
        return error
    except SystemExit as stop:  # a program that calls sys.exit() fails its own row, not the batch
        return ProgramError(f"the program raised SystemExit({stop.code!r})")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the batch is being closed
            raise
        return Cancelled("the row's program was cancelled from inside")


async def _raise_errors(
    results: AsyncGenerator[ResultT | Exception, None],
) -> AsyncGenerator[ResultT | Exception, None]:
    try:
        async for result in results:
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        await results.aclose()
