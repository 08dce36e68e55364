"""A client that goes takes its work along, streamed or not; the others get exactly what they asked for."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import httpx2
import pytest
from starlette.types import Message

from niwaki.runtime.engine import Engine
from niwaki.runtime.link.wake import together, wake
from niwaki.runtime.server.sse import EventStream
from tests.lang.waiting import wait_until
from tests.runtime.server.conftest import held, nobody_waits, wait_until_idle

LONG = {"prompt": "the cat", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


def test_a_stream_that_is_closed_stops_generating(client: httpx2.Client, engine: Engine) -> None:
    before = engine.stats()["generated_tokens"]
    with held(engine):
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
        wait_until(lambda: nobody_waits(client))
    wait_until_idle(engine)
    assert engine.stats()["generated_tokens"] - before < 16


def test_a_client_that_does_not_wait_stops_its_whole_answer(client: httpx2.Client, engine: Engine) -> None:
    before = engine.stats()["generated_tokens"]
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 500, "n": 8, "ignore_eos": True}}
    with held(engine):
        with pytest.raises(httpx2.ReadTimeout):
            client.post("/generate", json=body, timeout=httpx2.Timeout(60, read=0.15))
        wait_until(lambda: nobody_waits(client))
    wait_until_idle(engine)
    assert engine.stats()["generated_tokens"] - before < 16 * 16


def test_thirty_clients_of_whom_a_third_leave_harm_nobody(url: str, engine: Engine) -> None:
    draw = random.Random(11)
    prompts = [f"the cat sat {'on the mat ' * draw.randint(0, 8)}{index}" for index in range(30)]
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}

    async def one(client: httpx2.AsyncClient, index: int) -> str | None:
        asked = body | {"prompt": prompts[index], "stream": index % 2 == 0}
        if index % 3 == 0:  # leaves: before, in, or after the first token
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    client.post("/v1/completions", json=asked | {"max_tokens": 400}), 0.02 * (index % 5)
                )
            return None
        answer = await client.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        if index % 2:
            return str(answer.json()["choices"][0]["text"])
        pieces = [line for line in answer.text.split("\n") if line.startswith("data: {")]
        return "".join(httpx2.Response(200, text=piece[6:]).json()["choices"][0]["text"] for piece in pieces)

    async def all_of_them() -> list[str | None]:
        limits = httpx2.Limits(max_connections=40)
        async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, index) for index in range(30)))

    answers = asyncio.run(all_of_them())
    alone = engine.generate(prompts, {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True})
    assert isinstance(alone, list)
    for answer, expected in zip(answers, alone, strict=True):
        assert answer is None or answer == expected["text"]
    assert sum(answer is not None for answer in answers) == 20


def test_a_client_that_reads_nothing_is_given_up() -> None:
    finished: list[bool] = []

    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b"data: {}\n\n"

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # its buffers are full

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("it never leaves")

    stream = EventStream(chunks(), lambda: finished.append(True), stalled_seconds=0.02)
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), 30))
    assert finished == [True]


def test_a_slow_stream_is_no_stalled_one() -> None:
    """Pieces that come far apart, each taken at once: only what is not taken counts."""
    sent: list[bytes] = []

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(3):
            await asyncio.sleep(0.05)
            yield b"data: %d\n\n" % number

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("it never leaves")

    stream = EventStream(chunks(), lambda: None, stalled_seconds=0.02)
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), 30))
    assert sent[1:] == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", b""]


def test_who_ends_behind_the_server_wakes_nobody() -> None:
    loop = asyncio.new_event_loop()
    told: list[int] = []
    wake(loop, lambda: told.append(1))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    wake(loop, lambda: told.append(2))
    with together:
        wake(loop, lambda: told.append(3))
    assert told == [1]
