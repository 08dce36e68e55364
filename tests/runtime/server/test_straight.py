"""Pieces that go straight to the connection arrive as ASGI would bring them, and wait where it would wait."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Sequence

import httpx2
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from niwaki.runtime.api import Delta, FinishReason, Generation, Output
from niwaki.runtime.server.feed import Feed, Piece
from niwaki.runtime.server.heads import heads_within
from niwaki.runtime.server.metrics import Metrics
from niwaki.runtime.server.sse import EventStream, Frame, chunk_event
from niwaki.runtime.server.straight import straight_to
from tests.lang.waiting import PATIENCE
from tests.runtime.server.test_slow_heads import Wire

PIECES = [b"data: 1\n\n", b"", "data: 東京\n\n".encode()]


def wired(pieces: AsyncIterator[bytes], stalled_seconds: float = PATIENCE) -> tuple[H11Protocol, Wire]:
    """A connection whose requests are answered with these pieces."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(pieces, lambda: None, stalled_seconds)(scope, receive, send)

    protocol = heads_within(PATIENCE)(uvicorn.Config(app, log_config=None), ServerState(), {})
    wire = Wire()
    protocol.connection_made(wire)
    return protocol, wire


async def each() -> AsyncIterator[bytes]:
    for piece in PIECES:
        yield piece


async def until(wire: Wire, what: bytes) -> None:
    while what not in wire.written:
        await asyncio.sleep(0)


def body_of(request: bytes, end: bytes) -> bytes:
    async def run() -> bytes:
        protocol, wire = wired(each())
        protocol.data_received(request)
        await until(wire, end)
        return wire.written.partition(b"\r\n\r\n")[2]

    return asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_pieces_are_chunks_and_an_empty_one_is_not_the_end() -> None:
    body = body_of(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"0\r\n\r\n")
    assert body == b"9\r\n%b\r\ne\r\n%b\r\n0\r\n\r\n" % (PIECES[0], PIECES[2])


def test_who_knows_no_chunks_gets_none() -> None:
    assert body_of(b"GET / HTTP/1.0\r\nhost: x\r\n\r\n", PIECES[2]) == PIECES[0] + PIECES[2]


def test_an_answer_without_a_body_gets_none() -> None:
    async def run() -> bytes:
        protocol, wire = wired(each())
        protocol.data_received(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
        while not protocol.cycle.response_complete:
            await asyncio.sleep(0)
        return wire.written

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE)).endswith(b"\r\n\r\n")


def test_a_connection_that_takes_no_more_is_waited_for_and_given_up_in_time() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"data: x\n\n"
            await asyncio.sleep(0)

    async def run() -> tuple[int, int]:
        protocol, wire = wired(endless(), stalled_seconds=0.05)
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(wire, b"data: x")
        protocol.pause_writing()  # what the transport says when its buffer is full
        full = len(wire.written)
        await wire.closed.wait()
        return full, len(wire.written)

    full, at_the_end = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert at_the_end == full


def test_nothing_is_written_before_its_head_or_to_who_is_gone() -> None:
    said: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        straight = straight_to(scope)
        assert straight is not None
        said.append(straight(b"early"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        said.append(straight(b"in time"))
        await receive()
        await receive()  # the end
        said.append(straight(b"late"))

    async def run() -> bytes:
        protocol = heads_within(PATIENCE)(uvicorn.Config(app, log_config=None), ServerState(), {})
        wire = Wire()
        protocol.connection_made(wire)
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(wire, b"in time")
        protocol.connection_lost(None)
        while len(said) < 3:
            await asyncio.sleep(0)
        return wire.written

    assert b"early" not in asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert said == [False, True, False]


@pytest.mark.parametrize("text", ["", "plain", 'quotes " and \\', "東京", "a\x85b\u2028c\u2029", "\x00", "data: \n\n"])
def test_an_event_around_its_text_is_the_event_with_the_text(text: str) -> None:
    def event(said: str) -> bytes:
        return chunk_event({"model": "a \x00 name", "delta": {"content": said}, "usage": None})

    assert Frame(event).around(text) == event(text)


class Ready:
    """A feed that is read in a task, and whose pieces may be written where they come while `takes`."""

    def __init__(self, size: int = 1) -> None:
        self.takes = True
        self.fault: Exception | None = None
        self.written: list[str] = []  # where they came
        self.read: list[str] = []  # by the task
        self.generations = [Generation() for _ in range(size)]
        self.feed = Feed(size, Metrics(dict))
        self.feed.lead(self._write)
        for generation in self.generations:
            self.feed.add(generation)
        self.reading = asyncio.ensure_future(self._read())

    def push(self, *texts: str) -> None:
        for text in texts:
            for generation in self.generations:
                generation.push(Delta(text, (7,)))

    def end(self) -> None:
        for generation in self.generations:
            generation.succeed((Output("", (7, 7, 7), FinishReason("length"), 1, 0),))

    def _write(self, pieces: Sequence[Piece]) -> bool:
        if self.fault is not None:
            raise self.fault
        if self.takes:
            self.written += [piece.delta.text for piece in pieces]
        return self.takes

    async def _read(self) -> None:
        async for events in self.feed.batches():
            self.read += [one.delta.text if isinstance(one, Piece) else type(one).__name__ for one in events]


def test_while_its_reader_waits_a_piece_is_written_where_it_comes() -> None:
    async def run() -> Ready:
        ready = Ready()
        await asyncio.sleep(0)
        ready.push("a", "b")  # no turn for the reader between them
        assert ready.written == ["a", "b"]
        ready.push("c")
        ready.end()
        await ready.reading
        return ready

    ready = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert (ready.written, ready.read) == (["a", "b", "c"], ["Ended"])
    assert ready.feed.num_tokens == 1 + 3  # of the prompt, and the answer's


def test_pieces_that_cannot_be_written_at_once_go_to_the_reader_and_keep_their_order() -> None:
    async def run() -> Ready:
        ready = Ready()
        ready.push("a")  # he does not wait yet
        await asyncio.sleep(0)
        ready.takes = False
        ready.push("b")
        ready.takes = True
        ready.push("c")  # he has been woken for "b", and not looked yet
        assert ready.written == []
        while "c" not in ready.read:
            await asyncio.sleep(0)
        ready.push("d")
        ready.end()
        await ready.reading
        return ready

    ready = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert (ready.written, ready.read) == (["d"], ["a", "b", "c", "Ended"])


def test_the_pieces_of_several_generations_go_to_the_reader_together() -> None:
    async def run() -> Ready:
        ready = Ready(size=2)
        await asyncio.sleep(0)
        ready.push("a")
        ready.end()
        await ready.reading
        return ready

    ready = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert (ready.written, ready.read) == ([], ["a", "a", "Ended", "Ended"])


def test_pieces_of_an_engine_on_another_thread_are_written_once_each() -> None:
    async def run() -> Ready:
        ready = Ready()

        def generate() -> None:
            for number in range(200):
                ready.push(str(number))
            ready.end()

        thread = threading.Thread(target=generate)
        thread.start()
        await ready.reading
        thread.join()
        return ready

    ready = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert sorted([*ready.written, *ready.read[:-1]], key=int) == [str(number) for number in range(200)]
    assert ready.read[-1] == "Ended"


def test_a_fault_in_writing_a_piece_is_its_readers_and_not_whoever_brings_it() -> None:
    async def run() -> None:
        ready = Ready()
        await asyncio.sleep(0)
        ready.fault = ValueError("the shape's own")
        ready.push("a")
        ready.push("b")
        with pytest.raises(ValueError, match="the shape's own"):
            await ready.reading

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}], ids=["text", "more than text"])
@pytest.mark.parametrize("how", ["answered", "closed", "left"])
def test_requests_that_are_over_leave_nothing_for_pythons_garbage(
    client: httpx2.Client, url: str, how: str, more: dict[str, int]
) -> None:
    """On a connection that stays open, on one that is closed then, on one that is closed in the middle of a stream."""
    asked = {"prompt": "the cat", "max_tokens": 3 if how != "left" else 500, "ignore_eos": True, **more}

    def ask(stream: bool) -> None:
        if how == "answered":
            client.post("/v1/completions", json={**asked, "stream": stream})
            return
        with httpx2.Client(base_url=url, timeout=60) as mine:
            if how == "closed":
                mine.post("/v1/completions", json={**asked, "stream": stream})
                return
            with mine.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
                next(answer.iter_bytes())

    gc.collect()
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        for stream in (False, True) * 4:
            ask(stream)
            client.get("/health")
        for _ in range(10):  # by then the server has heard of each end
            client.get("/health")
        gc.collect()
        left = {
            type(one) for one in gc.garbage if type(one).__module__.startswith(("uvicorn.", "niwaki.runtime.server"))
        }
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == set()
