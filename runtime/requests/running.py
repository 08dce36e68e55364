"""What a call of `Engine.generate` started: waits for it, on a thread or an event loop, and makes the results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from niwaki.runtime.api import Delta, EngineStopped, Generation, RequestError, SamplingParams
from niwaki.runtime.requests.results import Result, result_of

ENGINE = "niwaki-engine"  # the name of the thread that steps
WAITS_FOR_ITSELF = "a callback of the engine, or a type's validator, cannot wait for the engine itself"


@dataclass(frozen=True, slots=True)
class Running:
    """A generation and its params for each prompt."""

    generations: list[Generation]
    params: Sequence[SamplingParams]
    logits_from: int | None
    is_batch: bool

    def cancel(self) -> None:
        for generation in self.generations:
            with suppress(EngineStopped):
                generation.cancel()

    def results(self) -> Result | list[Result]:
        """Waits for all. Raises what one failed with; the others are cancelled then, and where the waiting ends."""
        try:
            self._wait()
            failed = next((one.error() for one in self.generations if one.error() is not None), None)
            if failed is not None:
                raise failed
        except BaseException:
            self.cancel()
            raise
        results = [
            result_of(output, one, self.logits_from)
            for generation, one in zip(self.generations, self.params, strict=True)
            for output in generation.result()
        ]
        return results if self.is_batch or self.params[0].n > 1 else results[0]

    async def results_async(self) -> Result | list[Result]:
        """`results` without blocking the event loop. Cancelling the task ends what was started."""
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(is_over.set)

        try:
            if self.generations:
                self._tell_end(tell)
                await is_over.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.results()

    def stream(self) -> Iterator[Result]:
        """Of the one prompt: results whose text grows, and the whole one at last. Who lets it go ends what was started,
        also where nothing of it was read."""
        results = self._stream()
        next(results)
        return results

    def _stream(self) -> Iterator[Result]:
        """As `stream`, behind one result that only begins it: what is let go before has no end of its own."""
        text, ids = "", list[int]()
        (generation,) = self.generations
        try:
            yield _grown("", [])
            if not generation.is_done:
                _demand_another_thread()
            for delta in generation.deltas():
                text += delta.text
                ids += delta.token_ids
                yield _grown(text, ids)
            yield self._first()
        finally:
            generation.cancel()  # a reader that stops early stops the generation; after the end this does nothing

    async def stream_async(self) -> AsyncIterator[Result]:
        """`stream` without blocking the event loop."""
        results = self._stream_async()
        await anext(results)
        return results

    async def _stream_async(self) -> AsyncIterator[Result]:
        """As `_stream`."""
        loop = asyncio.get_running_loop()
        (generation,) = self.generations
        arrived: asyncio.Queue[Delta | None] = asyncio.Queue()

        def tell(item: Delta | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        generation.add_delta_callback(tell)
        generation.add_done_callback(lambda: tell(None))
        text, ids = "", list[int]()
        try:
            yield _grown("", [])
            while (delta := await arrived.get()) is not None:
                text += delta.text
                ids += delta.token_ids
                yield _grown(text, ids)
            yield self._first()
        finally:
            generation.cancel()

    def _first(self) -> Result:
        return result_of(self.generations[0].result()[0], self.params[0], self.logits_from)

    def _wait(self) -> None:
        """Until all are done, or one has failed. To wait for each in turn is to be woken, and to want the interpreter
        while the engine has it, for many of them."""
        is_over = threading.Event()
        self._tell_end(is_over.set)
        if self.generations and not is_over.is_set():
            _demand_another_thread()
            is_over.wait()

    def _tell_end(self, tell: Callable[[], object]) -> None:
        """When all are done, or one has failed; on any thread, perhaps more than once."""
        done: list[Generation] = []

        def note(generation: Generation) -> None:
            done.append(generation)
            if len(done) == len(self.generations) or generation.error() is not None:
                tell()

        for generation in self.generations:
            generation.add_done_callback(partial(note, generation))


def _demand_another_thread() -> None:
    """Raises RequestError: on the engine's own nobody can wait for it."""
    if threading.current_thread().name == ENGINE:
        raise RequestError(WAITS_FOR_ITSELF)


def _grown(text: str, ids: Sequence[int]) -> Result:
    return {"text": text, "output_ids": list(ids), "meta_info": {"completion_tokens": len(ids)}}
