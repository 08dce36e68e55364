"""How long a connection may take to say what it asks, how large its head may be, and what it is told where that is no
HTTP. uvicorn waits for the rest of a request's head for ever, and refuses in a form of its own."""

from __future__ import annotations

import asyncio
import sys

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.half_closed import HalfClosedProtocol
from niwaki.runtime.server.straight import lead_straight

MAX_HEAD_BYTES = 64 * 2**10
TOO_LARGE = 431


def check_head(scope: Scope) -> None:
    """Of a request that was read. h11 measures a head only while it waits for more of it, and what comes in one piece
    may be four times as large.

    Raises:
        ApiError: it is too large.
    """
    size = len(f"{scope['method']}  HTTP/1.1\r\n\r\n") + len(scope["raw_path"]) + len(scope["query_string"])
    if size + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEAD_BYTES:
        raise _too_large()


def _too_large() -> ApiError:
    return ApiError(TOO_LARGE, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")


def heads_within(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, which closes a connection that has no whole request this long after it was opened, or after
    the first byte behind its last answer. Who has begun one is told so: 408."""

    class Protocol(HalfClosedProtocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            lead_straight(self)
            self._head_timer = self.loop.call_later(seconds, self._end)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget_timer()  # from here on the body has its own limit, and the answer
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(seconds, self._end)

        def send_400_response(self, msg: str) -> None:
            """What came is no HTTP: uvicorn's own way is plain text, and an exception behind an answer that has begun,
            such as to a body that was too long already."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                error = sys.exc_info()[1]  # h11's, which uvicorn handles here
                if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == TOO_LARGE:
                    self._refuse(b"431 Request Header Fields Too Large", _too_large())
                else:
                    refusal = ApiError(400, "this is no valid HTTP request", code="invalid_http")
                    self._refuse(b"400 Bad Request", refusal)
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_timer()
            super().connection_lost(exc)

        def _forget_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _end(self) -> None:
            if self.transport.is_closing():
                return
            if self.conn.trailing_data[0]:  # half a head; the bytes of a body that nobody wants any more are not kept
                refusal = ApiError(408, f"the request's head did not arrive within {seconds:g} s")
                self._refuse(b"408 Request Timeout", refusal)
            self.transport.close()

        def _refuse(self, status: bytes, refusal: ApiError) -> None:
            content = refusal.content()
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
                % (status, len(content), content)
            )

    return Protocol
