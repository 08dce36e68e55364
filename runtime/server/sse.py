"""Streams to clients, and how it is noticed that a client has gone: its work must stop, streamed or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Self, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from niwaki.runtime.server.errors import ClientGone
from niwaki.runtime.server.straight import WriteStraight, straight_to

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
# A client that takes nothing for so long holds a place in the queue that others wait for.
STALLED_SECONDS = 60.0
COMMENT = b":\n\n"  # clients pass it over
MARK = "\x00"  # stands for a text that is told later
LINE_ENDS = tuple((sign.encode(), f"\\u{ord(sign):04x}".encode()) for sign in "\x85\u2028\u2029")


class Way:
    """Past a stream's task to its client, for whoever knows that the task waits. Closed until the stream has begun."""

    straight: WriteStraight | None = None

    def is_free(self) -> bool:
        return self.straight is not None and self.straight(b"")

    def write(self, chunk: bytes) -> None:
        """While it is free."""
        assert self.straight is not None
        self.straight(chunk)


class EventStream(Response):
    """Server-sent events out of `chunks`. `finish` is called once, however it ends: read, cut off or failed. What goes
    by `way` is none of the chunks."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        finish: Callable[[], None],
        stalled_seconds: float = STALLED_SECONDS,
        way: Way | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._finish = finish
        self._stalled_seconds = stalled_seconds
        self._way = way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send, straight_to(scope)))
        except (ClientGone, TimeoutError):  # the server closes the connection
            return
        finally:
            self._finish()

    async def _send_all(self, send: Send, straight: WriteStraight | None) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if straight is not None:
            straight.pause = COMMENT
        if self._way is not None:
            self._way.straight = straight
        with _Patience(self._stalled_seconds) as patience:
            async for chunk in self._chunks:
                if straight is not None and straight(chunk):
                    continue
                patience.begin()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                patience.end()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Patience:
    """Cancels its task, which sees a TimeoutError, when one thing that it does takes `seconds`.

    What `asyncio.timeout` does; but that makes a timer for every piece of a stream, which took a fifth of its time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._began: float | None = None  # None: nothing is done that may take too long
        self._is_over = False
        self._timer = self._loop.call_later(seconds, self._look)

    def begin(self) -> None:
        self._began = self._loop.time()

    def end(self) -> None:
        self._began = None

    def _look(self) -> None:
        now = self._loop.time()
        ends = (now if self._began is None else self._began) + self._seconds
        if ends > now:
            self._timer = self._loop.call_at(ends, self._look)
        elif self._task is not None:
            self._is_over = True
            self._task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._timer.cancel()
        # A cancelled task holds its error, that the frame, that this: garbage that only a collection would find.
        task, self._task = self._task, None
        if self._is_over and task is not None and kind is asyncio.CancelledError:
            task.uncancel()
            raise TimeoutError


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Wait for `work`, or for the client to close the connection; then the work is cancelled.

    Call it after the body was read. Raises ClientGone.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: bytes) -> bytes:
    """Of JSON. What only some take for the end of a line is escaped: clients that split text as Python does (httpx's
    `iter_lines`) would cut the event there."""
    return b"data: " + _in_one_line(data) + b"\n\n"


def _in_one_line(data: bytes) -> bytes:
    for sign, escape in LINE_ENDS:
        if sign in data:
            data = data.replace(sign, escape)
    return data


class Frame:
    """Events that differ in one text: written once, then that text alone each time."""

    def __init__(self, event_of: Callable[[str], bytes]) -> None:
        """`event_of` writes the event with a text; the same each time but for it."""
        # The last place where it stands: what comes before may be a client's own, such as a model's name.
        self._before, _, self._after = event_of(MARK).rpartition(_encoder.encode(MARK))

    def around(self, text: str) -> bytes:
        written = _encoder.encode(text)
        return self._before + (written if text.isascii() else _in_one_line(written)) + self._after


def chunk_event(content: Mapping[str, object]) -> bytes:
    """Of what is told once a token, with a quick encoder that knows no integers beyond 64 bits."""
    return event(_encoder.encode(content))


_encoder = msgspec.json.Encoder()
