"""Who closes his side of a connection behind a whole request is answered; who is gone stops his work, as ever."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct

import httpx2
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from niwaki.runtime.engine import Engine
from niwaki.runtime.server import half_closed
from niwaki.runtime.server.heads import heads_within
from niwaki.runtime.server.straight import straight_to
from tests.lang.waiting import PATIENCE, wait_until
from tests.runtime.server.conftest import held, nobody_waits, wait_until_idle
from tests.runtime.server.test_slow_heads import connected

LONG = {"prompt": "the cat", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
QUICK = {"prompt": "the cat", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


def asked(body: object, version: str = "1.1") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


def rest(client: socket.socket) -> bytes:
    came = b""
    while piece := client.recv(65536):
        came += piece
    return came


@pytest.mark.parametrize("streams", [False, True])
def test_who_sends_no_more_is_answered(client: httpx2.Client, url: str, streams: bool) -> None:
    body = {**QUICK, "stream": streams}
    whole = client.post("/v1/completions", json=body)
    with connected(url) as half:
        half.sendall(asked(body))
        half.shutdown(socket.SHUT_WR)
        came = rest(half)  # to the end: the server closes its side, too
    while came.startswith(half_closed.CONTINUE):
        came = came.removeprefix(half_closed.CONTINUE)
    head, _, content = came.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    if streams:
        assert content.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        texts = [json.loads(line[6:]) for line in content.split(b"\n") if line.startswith(b"data: {")]
        told = [json.loads(line[6:]) for line in whole.text.split("\n") if line.startswith("data: {")]
        assert [one["choices"] for one in texts] == [one["choices"] for one in told]
    else:
        assert json.loads(content)["choices"] == whole.json()["choices"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("waits", [False, True], ids=["before anything came", "once it was asked whether it listens"])
def test_who_sends_no_more_and_then_goes_stops_his_work(
    client: httpx2.Client, engine: Engine, url: str, streams: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_closed, "ASK_SECONDS", 0.02)
    before = engine.stats()["generated_tokens"]
    with held(engine):
        with connected(url) as half:
            half.sendall(asked({**LONG, "stream": streams}))
            half.shutdown(socket.SHUT_WR)
            if waits:
                assert half.recv(len(half_closed.CONTINUE))
        wait_until(lambda: nobody_waits(client))
    wait_until_idle(engine)
    assert engine.stats()["generated_tokens"] - before < 16


@pytest.mark.parametrize("sent", [asked(QUICK)[:-3], b""], ids=["half a request", "nothing"])
def test_who_has_asked_nothing_and_sends_no_more_is_let_go(url: str, sent: bytes) -> None:
    with connected(url) as half:
        half.sendall(sent)
        half.shutdown(socket.SHUT_WR)
        assert rest(half) == b""


def test_who_cannot_be_asked_is_taken_for_gone(client: httpx2.Client, engine: Engine, url: str) -> None:
    with held(engine), connected(url) as half:
        half.sendall(asked(LONG, "1.0"))
        half.shutdown(socket.SHUT_WR)
        assert rest(half) == b""
        wait_until(lambda: nobody_waits(client))


async def _over_a_socket(app: object, *, resets: bool) -> bytes:
    """What a client of one request hears that sends no more, or closes with a reset once its answer has begun."""
    protocol = heads_within(PATIENCE)
    made = uvicorn.Config(app, log_config=None)  # type: ignore[arg-type]  # an ASGI application
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(made, uvicorn.server.ServerState(), {}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    if not resets:
        writer.write_eof()
        came = await reader.read()
    else:
        came = await reader.readuntil(b"begun")
        kept = writer.get_extra_info("socket")
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    writer.close()
    server.close()
    return came


def test_a_stream_that_pauses_is_filled_with_what_clients_pass_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_closed, "ASK_SECONDS", 0.001)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        straight = straight_to(scope)
        assert straight is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.1)  # no stream of events so far: nothing may come between
        straight.pause = b":\n\n"
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"data: x\n\n"})

    came = asyncio.run(asyncio.wait_for(_over_a_socket(app, resets=False), PATIENCE))
    head, _, body = came.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body.startswith(b"3\r\n:\n\n\r\n")
    assert body.replace(b"3\r\n:\n\n\r\n", b"") == b"9\r\ndata: x\n\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("goes_straight", [True, False])
def test_what_is_written_to_who_is_gone_is_no_noise_in_the_log(
    caplog: pytest.LogCaptureFixture, goes_straight: bool
) -> None:
    async def run() -> None:
        over = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            straight = straight_to(scope)
            assert straight is not None
            await send({"type": "http.response.start", "status": 200, "headers": []})
            straight(b"begun")
            gone = asyncio.ensure_future(_gone(receive))
            while not gone.done():
                for _ in range(20):  # in one round of the loop, as when steps of the engine were waiting
                    if not goes_straight:
                        await send({"type": "http.response.body", "body": b"more", "more_body": True})
                    elif not straight(b"more"):
                        break
                await asyncio.sleep(0)
            over.set()

        await _over_a_socket(app, resets=True)
        await over.wait()

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
