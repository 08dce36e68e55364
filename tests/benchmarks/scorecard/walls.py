"""Bodies and conversations: B4 and I4 of the scorecard. Each gives lines of (what, figure, whether it holds)."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.benchmarks.scorecard.load import Line, asked, crowd, timed_stream
from tests.benchmarks.scorecard.wire import (
    COMPLETIONS,
    SETTLING_SECONDS,
    Answer,
    Gone,
    Server,
    Wire,
    percentile,
    server,
)

NUM_TURNS = 10


async def b4(amount: int) -> list[Line]:
    """`amount` slow sockets, and bodies and heads that are too large."""
    with server() as host:
        await host.ask("POST", COMPLETIONS, asked("The cat", 8))

        async def others(seconds: float) -> list[float]:
            gaps: list[float] = []
            wire = await Wire.open(host)
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                gaps += (await timed_stream(wire, asked("The cat", 32, stream=True)))[1]
            wire.close()
            return gaps

        await others(2)
        alone = await others(6)
        before = host.memory()
        told: dict[str, str] = {}
        grown: dict[str, float] = {}

        def weigh(name: str) -> None:
            grown[name] = round((host.memory() - before) / 2**20, 1)

        bodies = {
            # All else is right with it: what refuses it is its head, and not what it lacks.
            "64 KiB of head": ({"x_long": "x" * 2**16}, json.dumps(asked("x", 1)).encode()),
            "a body above 4 MiB": ({}, b'{"prompt": "' + b"x" * 2**22 + b'"}'),
            "a body of 4 MiB": ({}, json.dumps(asked("x" * (2**22 - 200), 1)).encode()),
            "gzip bomb": ({"content_encoding": "gzip"}, gzip.compress(b" " * 2**26)),
            "foreign host": ({"host": "evil.example"}, json.dumps(asked("x", 1)).encode()),
            "empty host": ({"host": ""}, json.dumps(asked("x", 1)).encode()),
        }
        for name, (headers, body) in bodies.items():
            for _ in range(5):
                told[name] = await status_of(host, body, headers)
            weigh(name)
        told["1-byte chunks"] = await chunked(host, json.dumps(asked("The cat", 2)).encode())
        told["1-byte chunks without end"] = await chunked(host, b"[" * 5_000)
        slow = [await Wire.open(host) for _ in range(amount)]
        for number, one in enumerate(slow):
            request = one.request("POST", COMPLETIONS, asked("x", 1))
            one.writer.write(request[: 1 + number % len(request[:-1])])
        await asyncio.sleep(1)
        weigh("slow sockets")
        beside = await others(6)
        ended = await asyncio.wait_for(asyncio.gather(*map(end_of, slow)), 90)
        weigh("their ends")
        alone += await others(6)
        await host.idle()
        after = await host.standing()
    expected = {
        "64 KiB of head": "431",
        "a body above 4 MiB": "413",
        "a body of 4 MiB": "400",
        "gzip bomb": "415",
        "foreign host": "400",
        "empty host": "400",
        "1-byte chunks": "200",
        "1-byte chunks without end": "400",
    }
    ratio = percentile(beside, 99) / percentile(alone, 99)
    return [
        ("statuses", str(told), told == expected),
        (f"how {amount} slow sockets ended", str(dict(Counter(ended))), set(ended) <= {"408", "closed"}),
        ("MiB more behind each", str(grown), max(grown.values()) < 50),
        ("p99 of another stream beside the slow ones, over alone", f"{ratio:.2f}", ratio < 1.2),
        ("behind it", str(after), after.running == 0),
    ]


async def status_of(host: Server, body: bytes, headers: dict[str, str]) -> str:
    wire = await Wire.open(host)
    try:
        return str((await wire.ask("POST", COMPLETIONS, body, **headers)).status)
    except (Gone, ConnectionError):
        return "closed"
    finally:
        wire.close()


async def chunked(host: Server, body: bytes) -> str:
    """A body a byte a chunk."""
    wire = await Wire.open(host)
    head = wire.request("POST", COMPLETIONS, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    wire.writer.write(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    return await end_of(wire)


async def end_of(wire: Wire) -> str:
    try:
        return str((await wire.answer()).status)
    except Gone:
        return "closed"
    finally:
        wire.close()


# -- I4 ---------------------------------------------------------------------------------------------------------------


class Talk:
    """One client's session, and what it was acknowledged."""

    def __init__(self, host: Server, session: str, draw: random.Random, said: Counter[str], wrong: list[str]) -> None:
        self._host, self._draw, self._said, self._wrong = host, draw, said, wrong
        self._path = f"/v1/sessions/{session}"
        self._acknowledged: list[str] = []

    async def turn(self, text: str) -> None:
        kind = self._draw.random()
        if kind < 0.3:
            await self._cut_off(text)
        elif kind < 0.4:
            await self._two_at_once(text)
        elif kind < 0.5:
            await self._delete_in_flight(text)
        else:
            await self._whole(text, is_sent_again=kind > 0.8)

    async def check(self) -> None:
        messages = (await self._host.ask("GET", self._path)).json["messages"]
        assert isinstance(messages, list)
        found = [message["content"] for message in messages if message["role"] == "user"]
        if found != self._acknowledged or len(messages) != 2 * len(found):
            self._wrong.append(f"{self._path}: {found} are not {self._acknowledged}")

    async def _whole(self, text: str, *, is_sent_again: bool) -> None:
        key = text.replace(" ", "-")
        wire = await Wire.open(self._host)
        while True:  # who was cut off just now is still being let go of
            answer = await wire.ask("POST", f"{self._path}/chat/completions", self._body(text), idempotency_key=key)
            if answer.status != 409:
                break
            self._said["409, asked again"] += 1
            await asyncio.sleep(0.005)
        self._count("a turn", answer)
        self._acknowledged.append(text)
        if is_sent_again:
            again = await wire.ask("POST", f"{self._path}/chat/completions", self._body(text), idempotency_key=key)
            self._count("sent again", again, 409)
        wire.close()

    async def _cut_off(self, text: str) -> None:
        """Before it could be whole, streamed or not."""
        wire = await Wire.open(self._host)
        body = {**self._body(text, 2000), "stream": self._draw.random() < 0.5}
        wire.writer.write(wire.request("POST", f"{self._path}/chat/completions", body))
        await asyncio.sleep(self._draw.random() * 0.2)
        wire.close()
        self._said["cut off"] += 1

    async def _two_at_once(self, text: str) -> None:
        wires = [await Wire.open(self._host) for _ in range(2)]
        for number, wire in enumerate(wires):
            body = self._body(f"{text} {number}")
            wire.writer.write(wire.request("POST", f"{self._path}/chat/completions", body))
        for number, wire in enumerate(wires):
            answer = await wire.answer()
            self._said[f"two at once: {answer.status}"] += 1
            if answer.status == 200:
                self._acknowledged.append(f"{text} {number}")
            wire.close()

    async def _delete_in_flight(self, text: str) -> None:
        await self._whole(f"{text} before", is_sent_again=False)  # so that nobody else is in it
        wire = await Wire.open(self._host)
        wire.writer.write(wire.request("POST", f"{self._path}/chat/completions", self._body(text, 100, stream=True)))
        _, head = await wire.head()
        pieces = wire.pieces(head)
        await anext(pieces)
        self._count("deleted in flight", await self._host.ask("DELETE", self._path), 409)
        async for _ in pieces:
            pass
        self._acknowledged.append(text)
        wire.close()

    def _body(self, text: str, max_tokens: int = 12, **more: object) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "ignore_eos": True, **more}

    def _count(self, what: str, answer: Answer, wanted: int = 200) -> None:
        self._said[f"{what}: {answer.status}"] += 1
        if answer.status != wanted:
            self._wrong.append(f"{what}: {answer.status} {answer.body!r:.200}")


async def i4(amount: int) -> list[Line]:
    """`amount` sessions of ten turns: cut off, sent twice, deleted in flight, and let go of after a second."""
    draw = random.Random(4)
    said: Counter[str] = Counter()
    wrong: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        server("--session-seconds", "1", sessions=f"sqlite:///{Path(folder) / 'sessions.db'}") as host,
    ):
        await host.ask("POST", COMPLETIONS, asked("The cat", 4))  # nothing is counted before the first step
        await host.idle()
        pages = (await host.standing()).pages

        async def one(number: int) -> None:
            session = str((await host.ask("POST", "/v1/sessions", {})).json["id"])
            talk = Talk(host, session, draw, said, wrong)
            for step in range(NUM_TURNS):
                await talk.turn(f"{number} {step}")
            await talk.check()

        await crowd(16, one, amount)
        await host.idle()
        await asyncio.sleep(2 + SETTLING_SECONDS)  # the places of a second are given up
        after, numbers = await host.standing(), await host.numbers()
    return [
        (f"what {amount} x {NUM_TURNS} turns were told", str(dict(sorted(said.items()))), True),
        ("histories that are not what was acknowledged, wrong statuses", str(wrong[:5]), not wrong),
        ("pages before; behind it", f"{pages:g} {after}", pages == after.pages and after.running == 0),
        ("answers with 500", str(numbers.get("500", 0)), not numbers.get("500", 0)),
    ]
