"""Streams for `async for`: pieces that add up, of one variable or of all, late or left early."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import niwaki as nw
from niwaki.lang.meta import PieceInfo
from niwaki.lang.program import Program
from niwaki.lang.state import State
from tests.lang.story import STORY, answers
from tests.lang.waiting import PATIENCE

if TYPE_CHECKING:
    from niwaki.runtime.engine import Engine


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
@pytest.mark.parametrize(("name", "before"), [(None, 1), ("answer", 0), ("after", 14)])
def test_the_pieces_of_an_async_stream_add_up(program: Program, name: str | None, before: int) -> None:
    """`before`: times that the model waits with nothing for this reader to read: before each of a story's 13 tokens and
    behind the last one."""
    may_go_on = threading.Semaphore(1 + before)

    def wait() -> float:
        assert may_go_on.acquire(timeout=PATIENCE)
        return 0.0

    backend = answers(threads=1, delay=wait)

    async def main() -> None:
        state = program.stream("What grew?", backend=backend, timeout=PATIENCE)
        pieces = []
        async for piece in state.text_async_iter(name):
            pieces.append(piece)
            may_go_on.release()  # not before: who reads late gets several words as one piece
        may_go_on.release(100)
        late = [piece async for piece in state.text_async_iter(name)]
        await state.wait()
        whole = state.text() if name is None else state[name]
        assert "".join(pieces) == whole == "".join(late)
        assert len(pieces) > 3
        assert all(pieces)

    asyncio.run(main())
    backend.shutdown()


def test_each_piece_tells_of_its_own_tokens(bundled_engine: Engine) -> None:
    async def main() -> list[tuple[str, PieceInfo]]:
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
    may_go_on = threading.Event()

    def answer(prompt: str) -> str:
        if STORY in prompt:
            assert may_go_on.wait(PATIENCE)
        return STORY

    backend = nw.ScriptedBackend(answer, threads=1, delay=0.0005)

    async def main() -> None:
        state = qa.stream("What grew?", backend=backend, timeout=PATIENCE)
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
        may_go_on.set()
        await state.wait()
        assert state["after"] == STORY

    asyncio.run(main())
    backend.shutdown()


def test_several_variables_are_streamed_at_once() -> None:
    backend = answers(delay=0.0005)

    async def read(state: State, name: str | None) -> str:
        return "".join([piece async for piece in state.text_async_iter(name)])

    async def main() -> None:
        state = aqa.stream("What grew?", backend=backend, timeout=PATIENCE)
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
    state = aqa.stream("What grew?", backend=backend, timeout=PATIENCE)
    assert "".join(state.text_iter()) == state.text()
    assert state["after"] == STORY
    backend.shutdown()
