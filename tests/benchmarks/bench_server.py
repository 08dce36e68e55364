"""W15: many clients over HTTP, streams of a mix: few-shot classification (W1), JSON (W8), chat (W11).

    python -m tests.benchmarks.bench_server                        # our server, started for it
    python -m tests.benchmarks.bench_server --peer http://host:8000/v1 --peer-model NAME   # side by side with another

Clients are closed loops: each asks again when it was answered. Sides take turns, A/B/A/B; what counts is the ratio of
requests a second under the limit of the time to the first token at its 95th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil

Json = dict[str, object]

NUM_SHARED, NUM_OWN = 512, 48  # of W1's prompts, in tokens; less where the context is shorter
FIRST_ID, LAST_ID = 300, 2000
TURNS = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 24},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 2},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Tally:
    """What one run of all clients saw, in seconds."""

    seconds: float = 0.0
    num_done: int = 0
    num_answered: int = 0  # with those that had no text: random weights choose tokens that write none
    num_failed: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.num_done / self.seconds

    def is_within(self, limit: float) -> bool:
        return percentile(self.first, 95) <= limit


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    url: str  # of its /v1
    model: str


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else 0.0


# ---------------------------------------------------------------------------------------------------------------
# What clients ask
# ---------------------------------------------------------------------------------------------------------------


def few_shot(draw: random.Random, scale: float) -> Json:
    shared = random.Random(15)
    ids = [shared.randint(FIRST_ID, LAST_ID) for _ in range(int(NUM_SHARED * scale))]
    ids += [draw.randint(FIRST_ID, LAST_ID) for _ in range(int(NUM_OWN * scale))]
    return {"prompt": ids, "max_tokens": 1, "ignore_eos": True}


def extraction(draw: random.Random, scale: float) -> Json:
    text = f"Hi, I am Lena, {draw.randint(20, 90)}, from Dresden. Number {draw.randint(0, 10**6)}."
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    return {"messages": [{"role": "user", "content": text}], "response_format": form, "max_tokens": int(120 * scale)}


def question(draw: random.Random) -> Json:
    return {"role": "user", "content": " ".join(f"word{draw.randint(0, 99)}" for _ in range(12))}


async def client(side: Side, http: httpx2.AsyncClient, number: int, until: float, scale: float, tally: Tally) -> None:
    """One client: kinds in turn, and a conversation of TURNS questions that grows by what was answered."""
    draw = random.Random(number)
    base: Json = {"model": side.model, "stream": True, "temperature": 0, "seed": number}
    turn = number
    while time.perf_counter() < until:
        turn += 1
        if turn % 3 == 0:
            await ask(side, http, "/completions", base | few_shot(draw, scale), tally)
        elif turn % 3 == 1:
            await ask(side, http, "/chat/completions", base | extraction(draw, scale), tally)
        else:
            said: list[Json] = []
            for _ in range(TURNS):
                said.append(question(draw))
                asked = base | {"messages": said, "max_tokens": draw.randint(4, 8), "ignore_eos": True}
                said.append({"role": "assistant", "content": await ask(side, http, "/chat/completions", asked, tally)})
                if time.perf_counter() > until:
                    return


async def ask(side: Side, http: httpx2.AsyncClient, page: str, body: Json, tally: Tally) -> str:
    """One streamed request; the text of its answer."""
    began = last = time.perf_counter()
    texts: list[str] = []
    is_first = True
    async for text in pieces(http, side.url + page, body):
        if text is None:
            tally.num_failed += 1
            return ""
        now = time.perf_counter()
        (tally.first if is_first else tally.between).append(now - last)
        last, is_first = now, False
        texts.append(text)
    tally.num_answered += 1
    if time.perf_counter() - began > 0 and not is_first:
        tally.num_done += 1
    return "".join(texts)


async def pieces(http: httpx2.AsyncClient, url: str, body: Json) -> AsyncIterator[str | None]:
    """The texts of a stream as they come; None where it failed."""
    try:
        async with http.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                yield None
                return
            async for line in lines(answer):
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        yield None
                        return
                    for choice in event["choices"]:
                        text = choice.get("text") or choice.get("delta", {}).get("content")
                        if text:
                            yield str(text)
    except httpx2.HTTPError:
        yield None


async def lines(answer: httpx2.Response) -> AsyncIterator[str]:
    """httpx's own would be cut at signs that only Python takes for the end of a line."""
    rest = b""
    async for came in answer.aiter_bytes():
        *whole, rest = (rest + came).split(b"\n")
        for line in whole:
            yield line.decode()


async def load(side: Side, num_clients: int, seconds: float, scale: float) -> Tally:
    tally = Tally()
    limits = httpx2.Limits(max_connections=num_clients)
    async with httpx2.AsyncClient(timeout=300, limits=limits) as http:
        began = time.perf_counter()
        clients = (client(side, http, n, began + seconds, scale, tally) for n in range(num_clients))
        await asyncio.gather(*clients)
        tally.seconds = time.perf_counter() - began
    return tally


# ---------------------------------------------------------------------------------------------------------------
# Our server, and the run
# ---------------------------------------------------------------------------------------------------------------


@contextmanager
def our_server(model: Path | None, *options: str) -> Iterator[tuple[Side, psutil.Process]]:
    """`niwaki serve` in a process of its own."""
    command = [sys.executable, "-m", "niwaki", "serve", "--port", "0", "--sessions", "sqlite://", *options]
    command += [] if model is None else ["--model", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            words = server.stdout.readline().split()
            yield Side(" ".join(["niwaki", *options]), f"{words[-1]}/v1", words[2]), psutil.Process(server.pid)
        finally:
            server.terminate()


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def report(name: str, tallies: Sequence[Tally], limit: float) -> str:
    first = [value for tally in tallies for value in tally.first]
    between = [value for tally in tallies for value in tally.between]
    figures = [f"{percentile(values, p) * 1000:.0f}" for values in (first, between) for p in (50, 95, 99)]
    failed = sum(tally.num_failed for tally in tallies)
    rate = statistics.median(tally.rate for tally in tallies)
    within = "within" if all(tally.is_within(limit) for tally in tallies) else "over"
    return (
        f"{name:<24} {rate:7.2f} requests/s   first token p50/p95/p99 {'/'.join(figures[:3])} ms ({within} {limit:g} s)"
        f"   between {'/'.join(figures[3:])} ms   failed {failed}"
    )


def run(sides: Sequence[Side], pairs: int, load_once: Callable[[Side], Tally]) -> Mapping[str, list[Tally]]:
    """Warm each side up, then let them take turns, the order turned round every time."""
    found: dict[str, list[Tally]] = {side.name: [] for side in sides}
    for side in sides:
        load_once(side)
    for pair in range(pairs):
        for side in sides if pair % 2 == 0 else reversed(sides):
            found[side.name].append(load_once(side))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="for our server; the bundled one without it")
    add("--peer", help="another server's /v1, which serves a model of the same shape")
    add("--peer-model", default="default")
    add("--clients", type=int, default=32)
    add("--seconds", type=float, default=20.0, help="of one side's turn")
    add("--pairs", type=int, default=5)
    add("--scale", type=float, default=1.0, help="of prompts and answers, for models of a short context")
    add("--limit", type=float, default=2.0, help="seconds to the first token, at the 95th percentile")
    given = parser.parse_args(argv)
    with our_server(given.model) as (ours, process):
        second = [Side("peer", given.peer, given.peer_model)] if given.peer else []
        before = processor_seconds(process)
        found = run(
            [ours, *second],
            given.pairs,
            lambda side: asyncio.run(load(side, given.clients, given.seconds, given.scale)),
        )
        used = processor_seconds(process) - before
        tallies = found[ours.name]
        used *= given.pairs / (given.pairs + 1)  # but for the turn that warms it up
        answered = max(1, sum(tally.num_answered for tally in tallies))
        events = sum(len(tally.first) + len(tally.between) for tally in tallies)
    print(
        f"W15, {given.clients} clients, {given.pairs} x {given.seconds:g} s, {os.cpu_count()} processors, "
        f"{platform.machine()}; our API process: {used / answered * 1e3:.1f} ms of processor time a request, which "
        f"has {events / answered:.1f} events with text"
    )
    for name, of_side in found.items():
        if not all(tally.num_done for tally in of_side):
            print(f"{name} left a whole turn without an answer", file=sys.stderr)
            return 1
        print(report(name, of_side, given.limit))
    if second:
        ratios = [a.rate / b.rate for a, b in zip(tallies, found["peer"], strict=True)]
        print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); aim: 2")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
