"""Clients that have closed their side of a connection and still listen, as `nc -N` and some proxies do.

They are answered: that nothing more comes does not say that nothing is wanted. But TCP tells the same of clients that
are gone, until these are sent something, which they answer with a reset. So who waits is sent, now and then, what means
nothing in HTTP or in a stream of events.
"""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.h11_impl import H11Protocol

from niwaki.runtime.server.straight import straight_to

ASK_SECONDS = 1.0  # a proxy that only copies learns with the second one that nobody is behind it
# A reset is looked for this soon, and half as often each time: who is near and gone stops his work within a step.
FIRST_LOOK_SECONDS, LAST_LOOK_SECONDS = 0.001, 0.05
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # any number of them may come before an answer


class HalfClosedProtocol(H11Protocol):
    """uvicorn's protocol, which takes every client that sends no more for gone. So does this one where it cannot ask:
    behind TLS, which ends both sides at once, and in HTTP/1.0, which has nothing without a meaning."""

    _next_look: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's says nothing, which is False
        """Nothing more comes. True: the answer is still to be sent."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if self.scheme == "https" or self.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        if self._next_look is None:
            self._look(FIRST_LOOK_SECONDS, self.loop.time())
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)

    def _look(self, seconds: float, asks_at: float) -> None:
        """Ask at this time, see whether it was reset, and look again behind so many seconds."""
        if self.cycle.response_complete or self.transport.is_closing():
            return
        now = self.loop.time()
        if now >= asks_at:
            asks_at = now + ASK_SECONDS
            self._ask()
        # Nobody reads from this socket any more, so asyncio would learn of it with the next piece only. On one machine
        # the reset is there when the question was written.
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        self._next_look = self.loop.call_later(seconds, self._look, min(2 * seconds, LAST_LOOK_SECONDS), asks_at)

    def _ask(self) -> None:
        if not self.cycle.response_started:
            self.transport.write(CONTINUE)
            return
        straight = straight_to(self.scope)
        if straight is not None and straight.pause:
            straight(straight.pause)
