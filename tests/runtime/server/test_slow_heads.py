"""Who does not say what it asks is not waited for, who says it in no HTTP is told so, and who did is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import httpx2
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.heads import MAX_HEAD_BYTES, heads_within
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import PATIENCE

QUICK = ServerConfig(port=0, head_seconds=0.2)
READY = b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n"


def connected(url: str) -> socket.socket:
    address = httpx2.URL(url)
    return socket.create_connection((address.host, address.port or 0), timeout=PATIENCE)


@pytest.mark.parametrize("head", [b"", b"GET /rea", b"GET /ready HTTP/1.1\r\nhost: localh"])
def test_a_connection_without_a_whole_head_is_closed(engine: Engine, head: bytes) -> None:
    with serving(engine, QUICK) as url, connected(url) as slow, contextlib.suppress(ConnectionError):
        slow.sendall(head)
        while slow.recv(4096):  # a timeout where the server does not close
            pass


def test_one_byte_now_and_then_gains_no_time(engine: Engine) -> None:
    over = threading.Event()
    with serving(engine, QUICK) as url, connected(url) as slow:

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not over.wait(0.02):
                    slow.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with contextlib.suppress(ConnectionError):
                slow.recv(4096)  # the answer or the end: there is one, else this times out
        finally:
            over.set()
            dripping.join()


class Wire(asyncio.Transport):
    """What a server writes, and whether it closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed.set()

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Answering:
    """An application that answers when it is let."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def wired(app: Answering, seconds: float) -> tuple[H11Protocol, Wire]:
    made = heads_within(seconds)(uvicorn.Config(app, log_config=None), ServerState(), {})
    wire = Wire()
    made.connection_made(wire)
    return made, wire


def test_half_a_head_is_told_why_it_ends() -> None:
    async def run() -> bytes:
        protocol, wire = wired(Answering(), 0.05)
        protocol.data_received(READY[:-2])
        await wire.closed.wait()
        return wire.written

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["error"]["message"] == "the request's head did not arrive within 0.05 s"


def test_a_request_that_is_whole_may_take_its_time_and_the_next_one_is_timed_again() -> None:
    async def run() -> None:
        app = Answering()
        protocol, wire = wired(app, 0.05)
        protocol.data_received(READY)
        await asyncio.sleep(0.1)
        assert not wire.closed.is_set(), "its head was there in time"
        app.release.set()
        while not wire.written.endswith(b"ok"):
            await asyncio.sleep(0)
        protocol.data_received(READY[:9])
        await wire.closed.wait()
        assert b"HTTP/1.1 408 " in wire.written

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_what_still_comes_of_a_body_behind_its_answer_is_no_next_request() -> None:
    async def run() -> bytes:
        app = Answering()
        app.release.set()
        protocol, wire = wired(app, 0.05)
        protocol.data_received(READY[:-2].replace(b"GET", b"POST") + b"content-length: 9\r\n\r\n")
        while not wire.written.endswith(b"ok"):
            await asyncio.sleep(0)
        protocol.data_received(b"12")
        await wire.closed.wait()
        return wire.written

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE)).count(b"HTTP/1.1 ") == 1


NO_HTTP = {
    "of another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "without a host": b"GET /ready HTTP/1.1\r\n\r\n",
    "of two lengths": READY[:-2] + b"content-length: 3\r\ncontent-length: 5\r\n\r\nabc",
    "of a length below 0": READY[:-2] + b"content-length: -5\r\n\r\n",
    "in a chunk of no size": READY[:-2].replace(b"GET", b"POST") + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP)
def test_what_is_no_http_is_refused_in_the_form_of_all_errors(engine: Engine, sent: bytes) -> None:
    with serving(engine, ServerConfig(port=0)) as url, connected(url) as client:
        client.sendall(sent)
        answer = b""
        while came := client.recv(4096):
            answer += came
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"connection: close" in head
    assert json.loads(body)["error"] == {
        "message": "this is no valid HTTP request",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_http",
    }


def test_what_is_no_http_behind_an_answer_that_has_begun_ends_the_connection_alone() -> None:
    async def run() -> bytes:
        app = Answering()
        app.release.set()
        protocol, wire = wired(app, PATIENCE)
        protocol.data_received(READY[:-2].replace(b"GET", b"POST") + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        while not wire.written.endswith(b"ok"):
            await asyncio.sleep(0)
        protocol.data_received(b"zz\r\n")
        await wire.closed.wait()
        return wire.written

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE)).count(b"HTTP/1.1 ") == 1


LARGE = READY[:-2] + b"x-long: %b\r\n\r\n" % (b"x" * 70_000)


@pytest.mark.parametrize("sent", [LARGE, LARGE[:-9], READY + LARGE], ids=["in one piece", "half", "behind another"])
def test_a_head_that_is_too_large_is_told_so(engine: Engine, sent: bytes) -> None:
    with serving(engine, ServerConfig(port=0)) as url, connected(url) as client:
        client.sendall(sent)
        if sent.startswith(READY[:-2] + b"\r\n"):
            assert answer_of(client)[0] == 200
        status, answer = answer_of(client)
    assert status == 431
    assert answer["error"] == {
        "message": "the request's head is larger than 65536 bytes",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_a_head_may_have_64_kib(engine: Engine) -> None:
    head = READY[:-2] + b"x-long: \r\n\r\n"
    with serving(engine, ServerConfig(port=0)) as url:
        for size, expected in ((MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431)):
            with connected(url) as client:
                client.sendall(head.replace(b"x-long: ", b"x-long: " + b"x" * (size - len(head))))
                assert answer_of(client)[0] == expected


def answer_of(client: socket.socket) -> tuple[int, dict[str, object]]:
    """The next one of a connection that stays open."""
    came = b""
    while b"\r\n\r\n" not in came:
        came += client.recv(1)
    headers = dict(line.split(b": ") for line in came.split(b"\r\n")[1:-2])
    body, size = b"", int(headers[b"content-length"])
    while len(body) < size:
        body += client.recv(size - len(body))
    told = json.loads(body)
    assert isinstance(told, dict)
    return int(came.split()[1]), told
