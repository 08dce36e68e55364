"""More than fits: L2 and L3 of the scorecard. Each gives lines of (what, figure, whether it holds)."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from asyncio.subprocess import PIPE
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.benchmarks.scorecard.load import Line, asked, new_ids, timed_stream
from tests.benchmarks.scorecard.wire import COMPLETIONS, Server, Wire, ms, percentile, server

# -- L2 ---------------------------------------------------------------------------------------------------------------

RUNNING, QUEUED = 32, 64
NUM_PAIRS = 5
WINDOW_SECONDS = 10.0
NUM_TOKENS = 64  # of an answer: at four times the rate 2,000 connections are asked on often enough to stay open


@dataclass(slots=True)
class Offer:
    """What came of requests at a rate."""

    good: int = 0  # answered before the window was over
    refusals: list[float] = field(default_factory=list)  # seconds until each was told
    most: int = 0  # in flight, as the server has it
    unasked: int = 0  # no client was idle


class Clients:
    """So many of them, each with a connection that it keeps while the server does; who was idle longest asks next."""

    def __init__(self, host: Server, size: int) -> None:
        self._host = host
        self._draw = random.Random(2)
        self._idle: deque[Wire | None] = deque([None] * size)

    async def closed_loop(self, size: int, seconds: float) -> float:
        """Requests a second that are answered to `size` clients who ask again at once."""
        until = time.perf_counter() + seconds
        good = 0

        async def one() -> None:
            nonlocal good
            while time.perf_counter() < until:
                assert await self._ask() == 200
                good += time.perf_counter() < until

        await asyncio.gather(*(one() for _ in range(size)))
        return good / seconds

    async def offer(self, rate: float) -> Offer:
        """Ask `rate` times a second, however long the answers take."""
        found = Offer()
        at = time.perf_counter()
        until = at + WINDOW_SECONDS

        async def one() -> None:
            if not self._idle:
                found.unasked += 1
                return
            began = time.perf_counter()
            status = await self._ask()
            ended = time.perf_counter()
            if status == 200:
                found.good += ended < until
            else:
                assert status == 503, status
                found.refusals.append(ended - began)

        async def watch() -> None:
            while True:
                found.most = max(found.most, int((await self._host.numbers())["niwaki_sequences_in_flight"]))
                await asyncio.sleep(0.25)

        watching = asyncio.ensure_future(watch())
        running = []
        while (at := at + self._draw.expovariate(rate)) < until:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            running.append(asyncio.ensure_future(one()))
        await asyncio.gather(*running)
        watching.cancel()
        return found

    async def _ask(self) -> int:
        wire = self._idle.popleft() or await Wire.open(self._host)
        answer = await wire.ask("POST", COMPLETIONS, asked(new_ids(self._draw, 24), NUM_TOKENS))
        self._idle.append(wire)
        return answer.status

    def close(self) -> None:
        for wire in self._idle:
            if wire is not None:
                wire.close()


async def l2(amount: int) -> list[Line]:
    """`amount` clients, who ask at the rate that closed loops were answered at just before, and at four times that."""
    rates: list[tuple[float, float, float]] = []
    refusals: list[float] = []
    most = connections = unasked = 0
    with server("--max-running-requests", str(RUNNING), "--max-queued", str(QUEUED)) as host:
        clients = Clients(host, amount)
        await clients.closed_loop(RUNNING + QUEUED // 2, 3)
        for _ in range(NUM_PAIRS):
            capacity = await clients.closed_loop(RUNNING + QUEUED // 2, 5)
            at_one = await clients.offer(capacity)
            at_four = await clients.offer(4 * capacity)
            connections = max(connections, host.process.num_fds())
            rates.append((capacity, at_one.good / WINDOW_SECONDS, at_four.good / WINDOW_SECONDS))
            refusals += at_four.refusals
            most = max(most, at_one.most, at_four.most)
            unasked += at_one.unasked + at_four.unasked
        clients.close()
        await host.idle()
        after = await host.standing()
    ratios = sorted(at_four / at_one for _, at_one, at_four in rates)
    slow = percentile(refusals, 99)
    median = ms(percentile(refusals, 50))
    return [
        (
            "goodput at 4x over 1x, the median of",
            str([round(ratio, 2) for ratio in ratios]),
            ratios[NUM_PAIRS // 2] >= 0.95,
        ),
        ("requests/s in closed loops, at 1x, at 4x", str([tuple(round(one) for one in row) for row in rates]), True),
        (f"{len(refusals)} refusals: p50 {median}, p99", ms(slow), slow < 0.05),
        (f"in flight, of {RUNNING + QUEUED}", str(most), most <= RUNNING + QUEUED),
        (f"descriptors that the server held for {amount} clients", str(connections), True),
        ("requests that no client was free for", str(unasked), not unasked),
        ("behind it", str(after), after.running == 0),
    ]


# -- L3 ---------------------------------------------------------------------------------------------------------------

NUM_STREAMS = 2  # in a row, alone and then beside the others, in each round


async def l3(amount: int) -> list[Line]:
    """A short stream alone, and beside others that ask again as soon as they were answered, `amount` rounds each."""
    draw = random.Random(3)
    lines: list[Line] = []

    with server("--kv-tokens", "131072") as host:
        for name, kinds in (
            ("18 long prefills and 11 short requests", ["long"] * 18 + ["short"] * 11),
            ("4 requests of n=8, logprobs=20", ["wide"] * 4),
        ):
            await streams(host, draw)
            alone, beside = Times(), Times()
            for _ in range(amount):
                alone.add(await streams(host, draw))
                async with asking(host, kinds):
                    beside.add(await streams(host, draw))
            gap = percentile(beside.gaps, 99) / percentile(alone.gaps, 99)
            said = f"{ms(percentile(alone.gaps, 99))} to {ms(percentile(beside.gaps, 99))}: {gap:.1f}x"
            lines.append((f"beside {name}: p99 between tokens", said, gap < 3))
            for percent in (50, 99):
                first = percentile(beside.firsts, percent) / percentile(alone.firsts, percent)
                said = (
                    f"{ms(percentile(alone.firsts, percent))} to {ms(percentile(beside.firsts, percent))}: {first:.1f}x"
                )
                lines.append((f"beside {name}: p{percent} to the first token", said, first < 5))
        await host.idle()
        after = await host.standing()
    return [*lines, ("behind it", str(after), after.running == 0)]


@dataclass(slots=True)
class Times:
    """Of streams: seconds to the first token, and between the others."""

    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, other: Times) -> None:
        self.firsts += other.firsts
        self.gaps += other.gaps


async def streams(host: Server, draw: random.Random) -> Times:
    found = Times()
    wire = await Wire.open(host)
    for _ in range(NUM_STREAMS):
        first, gaps = await timed_stream(wire, asked(new_ids(draw, 16), 48, stream=True))
        found.add(Times([first], gaps))
    wire.close()
    return found


@asynccontextmanager
async def asking(host: Server, kinds: Sequence[str]) -> AsyncIterator[None]:
    """A client for each of them, which asks again as soon as it was answered: in a process of its own, as what they
    write and read would keep the stream's own client from looking."""
    command = [sys.executable, "-m", "tests.benchmarks.scorecard.neighbours", str(host.port), *kinds]
    started = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert started.stdin is not None
    assert started.stdout is not None
    assert await started.stdout.readline() == b"asking\n"
    await asyncio.sleep(0.5)
    yield
    started.stdin.close()
    assert await started.wait() == 0
