"""Many clients: L1, L6, L7 and F5 of the scorecard. Each gives lines of (what, figure, whether it holds)."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import pairwise

from tests.benchmarks.scorecard.wire import (
    COMPLETIONS,
    SETTLING_SECONDS,
    Json,
    Server,
    Wire,
    ms,
    percentile,
    server,
)

Line = tuple[str, str, bool]

PROMPTS = [f"{name} the {animal} said: I have {count} " for name in ("Lena", "Otto", "Mia", "Ben", "Ida")
           for animal in ("cat", "dog", "mouse", "horse") for count in (3, 17)]  # fmt: skip
LEFT_TOKENS = 800  # that those who leave ask for: what ran on would be seen


def asked(prompt: object, max_tokens: int, **more: object) -> Json:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def new_ids(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(300, 2000) for _ in range(length)]


async def crowd(size: int, work: Callable[[int], Awaitable[None]], amount: int) -> None:
    """`work` for each number below `amount`, `size` at once."""
    numbers = iter(range(amount))

    async def one() -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*(one() for _ in range(size)))


# -- L1 ---------------------------------------------------------------------------------------------------------------


async def leave(host: Server, draw: random.Random) -> None:
    """Ask for much and go: before it was all sent, in the prefill, or while it decodes."""
    when = draw.choice(("before", "prefill", "decode"))
    prompt: object = new_ids(draw, 600) if when == "prefill" else draw.choice(PROMPTS)
    streams = draw.random() < 0.5
    wire = await Wire.open(host)
    try:
        request = wire.request("POST", COMPLETIONS, asked(prompt, LEFT_TOKENS, stream=streams))
        if when == "before":
            wire.writer.write(request[: draw.randrange(1, len(request))])
            await asyncio.sleep(draw.random() * 0.01)
            return
        wire.writer.write(request)
        if when == "prefill":
            await asyncio.sleep(draw.random() * 0.02)
        elif streams:
            with suppress(asyncio.IncompleteReadError):
                _, head = await wire.head()
                async for _ in wire.pieces(head):
                    if draw.random() < 0.3:
                        break
        else:
            await asyncio.sleep(0.02 + draw.random() * 0.1)
    finally:
        if draw.random() < 0.5:
            wire.writer.transport.abort()  # a reset; else an orderly end
        wire.close()


async def l1(amount: int) -> list[Line]:
    draw = random.Random(1)
    with server("--deterministic", "--kv-tokens", "32768") as host:
        lengths = [draw.randrange(4, 40) for _ in PROMPTS]
        expected = [
            (await host.ask("POST", COMPLETIONS, asked(prompt, length))).text
            for prompt, length in zip(PROMPTS, lengths, strict=True)
        ]
        wrong: list[str] = []
        left = 0

        async def one(number: int) -> None:
            nonlocal left
            if draw.random() < 0.3:
                left += 1
                await leave(host, draw)
                return
            which = draw.randrange(len(PROMPTS))
            body = asked(PROMPTS[which], lengths[which], stream=draw.random() < 0.5)
            answer = await host.ask("POST", COMPLETIONS, body)
            if answer.status != 200 or answer.text != expected[which]:
                wrong.append(f"{answer.status} {which}")

        await crowd(32, one, min(300, amount))  # the pools of threads are as large as they get
        await host.idle()
        await asyncio.sleep(SETTLING_SECONDS)
        before = await host.standing()
        await crowd(32, one, amount)
        ran_on = await host.idle()
        await asyncio.sleep(SETTLING_SECONDS)
        after, numbers = await host.standing(), await host.numbers()
        streams = [await Wire.open(host) for _ in range(32)]
        for wire in streams:
            wire.writer.write(wire.request("POST", COMPLETIONS, asked(draw.choice(PROMPTS), 3000, stream=True)))
        for wire in streams:
            _, head = await wire.head()
            await anext(wire.pieces(head))
        for wire in streams:
            wire.close()
        all_gone = await host.idle()
    return [
        (f"wrong or failed answers of {amount - left + 300} that stayed ({left} left)", str(wrong[:3]), not wrong),
        ("nothing ran any more after the last of them", ms(ran_on), ran_on < SETTLING_SECONDS),
        ("32 streams of 3,000 tokens cut off at once: nothing ran after", ms(all_gone), all_gone < SETTLING_SECONDS),
        ("pages, running, descriptors, threads before and after", f"{before} {after}", before == after),
        ("answers with 500", str(numbers.get("500", 0)), not numbers.get("500", 0)),
    ]


# -- L6 ---------------------------------------------------------------------------------------------------------------

NUM_SAMPLES = 400  # of memory, along a soak


async def l6(amount: int) -> list[Line]:
    """A soak: `amount` requests of 1 to 4 tokens, from 16 clients."""
    draw = random.Random(6)
    took: list[float] = []
    memory: list[tuple[int, int]] = []  # bytes after so many requests
    used: list[float] = []  # processor seconds, at the start and behind each tenth
    num_asked = 0
    with server("--kv-tokens", "16384") as host:

        async def one() -> None:
            nonlocal num_asked
            wire = await Wire.open(host)
            while num_asked < amount:
                num_asked += 1
                body = asked(f"{draw.choice(PROMPTS)}{draw.randrange(10**6)}", draw.randrange(1, 5))
                began = time.perf_counter()
                answer = await wire.ask("POST", COMPLETIONS, body)
                took.append(time.perf_counter() - began)
                assert answer.status == 200, answer
                if len(took) % (amount // NUM_SAMPLES) == 0:
                    memory.append((len(took), host.memory()))
                if len(took) % (amount // 10) == 0:
                    used.append(host.processor_seconds())
            wire.close()

        used.append(host.processor_seconds())
        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(16)))
        rate = len(took) / (time.perf_counter() - began)
        await host.idle()
        after = await host.standing()
    # Behind a third of them the pool, the tree and the C library's own reserves are as large as they get.
    slope = slope_of([one for one in memory if one[0] > amount // 3])
    tenth = len(took) // 10
    p99s = [percentile(took[start : start + tenth], 99) for start in range(0, 10 * tenth, tenth)]
    return [
        (f"{len(took)} requests, {rate:.0f} a second; bytes more a request", f"{slope:.1f}", slope < 20),
        ("MiB along them", str([round(size / 2**20) for _, size in memory[:: NUM_SAMPLES // 10]]), True),
        ("p99 of the last tenth over the first", f"{p99s[-1] / p99s[0]:.2f}", p99s[-1] <= 1.1 * p99s[0]),
        ("p99 of each tenth", ", ".join(map(ms, p99s)), True),
        (
            "processor time a request, of each tenth",
            ", ".join(ms((later - before) / tenth) for before, later in pairwise(used)),
            True,
        ),
        ("behind it", str(after), after.running == 0),
    ]


def slope_of(points: Sequence[tuple[int, int]]) -> float:
    """Of the line that fits them best."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


# -- L7 ---------------------------------------------------------------------------------------------------------------


async def timed_stream(wire: Wire, body: Json) -> tuple[float, list[float]]:
    """Seconds to the first token, and between the others."""
    began = last = time.perf_counter()
    wire.writer.write(wire.request("POST", COMPLETIONS, body))
    _, head = await wire.head()
    first, between = 0.0, []
    async for _ in wire.pieces(head):
        now = time.perf_counter()
        if first:
            between.append(now - last)
        else:
            first = now - began
        last = now
    return first, between


async def l7(amount: int) -> list[Line]:
    """Idle for `amount` seconds."""
    draw = random.Random(7)
    with server() as host:

        async def one(number: int) -> None:
            await host.ask("POST", COMPLETIONS, asked(new_ids(draw, 60), 20))

        await crowd(16, one, 400)
        await host.idle()
        await asyncio.sleep(SETTLING_SECONDS)
        before = host.processor_seconds()
        await asyncio.sleep(amount)
        share = (host.processor_seconds() - before) / amount
    return [(f"of a core, {amount} s idle", f"{share:.2%}", share < 0.01)]


# -- F5 ---------------------------------------------------------------------------------------------------------------


def narrow() -> socket.socket:
    """Of a client far away: on this machine alone the system would take megabytes of an answer that nobody reads."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    return made


async def f5(amount: int) -> list[Line]:
    """`amount` clients that read a byte a second of a long stream."""
    draw = random.Random(5)
    with server("--kv-tokens", "65536") as host:

        async def others(seconds: float) -> list[float]:
            gaps: list[float] = []
            until = time.perf_counter() + seconds
            wire = await Wire.open(host)
            while time.perf_counter() < until:
                gaps += (await timed_stream(wire, asked(new_ids(draw, 16), 32, stream=True)))[1]
            wire.close()
            return gaps

        async def trickle() -> None:
            with narrow() as made:
                made.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(made, ("127.0.0.1", host.port))
                body = asked(new_ids(draw, 8), 580, stream=True, stream_options={"continuous_usage_stats": True})
                await loop.sock_sendall(made, host.request("POST", COMPLETIONS, body))
                with suppress(OSError):
                    while await loop.sock_recv(made, 1):
                        await asyncio.sleep(1)

        async def calm() -> None:
            """Until nothing is computed, written or sent any more."""
            await host.idle(60)
            while True:
                before = host.processor_seconds()
                await asyncio.sleep(1)
                if host.processor_seconds() - before < 0.05:
                    return

        await others(3)
        alone = await others(8)
        before = host.process.memory_info().rss
        slow = [asyncio.ensure_future(trickle()) for _ in range(amount)]
        await asyncio.sleep(1)
        await calm()
        stalled = time.perf_counter()
        waiting = (await host.numbers())["niwaki_sequences_in_flight"]
        beside = await others(8)
        grown = (host.process.memory_info().rss - before) / amount
        while (await host.numbers())["niwaki_sequences_in_flight"] and time.perf_counter() - stalled < 75:
            await asyncio.sleep(0.5)
        cut = time.perf_counter() - stalled
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        alone += await others(8)
        await host.idle()
        after = await host.standing()
    ratio = percentile(beside, 99) / percentile(alone, 99)
    said = f"{ms(percentile(alone, 99))}, {ms(percentile(beside, 99))}: {ratio:.2f}"
    return [
        (f"in flight when all was computed, of {amount}", f"{waiting:g}", waiting == amount),
        ("p99 between the tokens of another stream, alone and beside them", said, ratio < 1.2),
        ("memory of the API's process a client", f"{grown / 2**20:.2f} MiB", grown <= 2**20),
        ("cut off this long behind their stall", f"{cut:.1f} s", cut < 62),
        ("behind it", str(after), after.running == 0),
    ]
