"""Pieces of a stream, straight to their connection: ASGI's way there, through six functions and h11, took a third of
their time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

EXTENSION = "niwaki.straight"


class WriteStraight(Protocol):
    """Of one answer that has begun, and whose length nobody told."""

    pause: bytes  # what says nothing in its body, and may stand between any two pieces; empty: nothing may

    def __call__(self, piece: bytes) -> bool:
        """Send more of its body, without waiting. False: it was not sent, as the connection takes no more for now or is
        closed; ASGI's `send` waits for it."""
        ...


def straight_to(scope: Mapping[str, object]) -> WriteStraight | None:
    """The way to the connection of a request, where it has one."""
    extensions = scope.get("extensions")
    found: WriteStraight | None = extensions.get(EXTENSION) if isinstance(extensions, dict) else None
    return found


def lead_straight(protocol: H11Protocol) -> None:
    """From now on the applications behind this connection are given the way to it."""
    app = protocol.app
    # A connection that held itself would be garbage, when it is closed, that a collection has to find: 37 objects each.
    connection = weakref.ref(protocol)

    async def led(scope: Scope, receive: Receive, send: Send) -> None:
        found = connection()
        if found is None or scope["type"] != "http":
            await app(scope, receive, send)
            return
        # Others get no chunks: HTTP/1.0 knows none, and an answer to HEAD has no body. A request has its own: the next
        # one is not read before this one is answered.
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["extensions"] = {EXTENSION: _InChunks(found.cycle)}
        transport = found.transport
        del found

        async def send_unless_lost(message: Message) -> None:
            if transport.is_closing():  # uvicorn learns of it in the loop's next round; asyncio warns of writes before
                await asyncio.sleep(0)
            await send(message)

        try:
            await app(scope, receive, send_unless_lost)
        finally:
            # It holds the cycle, and that the scope: left there, a request is garbage that a collection has to find,
            # those that were running at the one before a full one. That was 330 bytes a request, 23 MB in all.
            scope.pop("extensions", None)

    protocol.app = led


class _InChunks:
    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.pause = b""
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write
        self._is_closing = cycle.transport.is_closing

    def __call__(self, piece: bytes) -> bool:
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.response_started:
            return False
        if self._is_closing():
            return False
        if piece:  # none would be the end
            self._write(b"%x\r\n%b\r\n" % (len(piece), piece))  # as h11 writes it, whose state a piece does not change
        return True
