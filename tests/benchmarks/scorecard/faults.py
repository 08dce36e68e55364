"""Signals: F1 to F4 of the scorecard. Each gives lines of (what, figure, whether it holds)."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from tests.benchmarks.bench_sessions import roomy
from tests.benchmarks.scorecard.load import Line, asked, new_ids
from tests.benchmarks.scorecard.wire import COMPLETIONS, Answer, Gone, Server, Wire, ms, server
from tests.benchmarks.shapes import model_folder

IN_FLIGHT = 200
LONG = 3500  # tokens: more than any of them gets before it is cut off
DRAIN_SECONDS = 3.0
PREFILL_TOKENS = 60_000, 85_000  # of L60: the second where the first takes no minute


class Asker:
    """A request that takes long, streamed or not, and what its client was told."""

    def __init__(self, wire: Wire, streams: bool) -> None:
        self._wire = wire
        self._streams = streams
        self.said = "nothing"
        self.heard = b""
        self.at = 0.0

    async def ask(self, body: dict[str, object]) -> None:
        try:
            answer = await self._wire.ask("POST", COMPLETIONS, {**body, "stream": self._streams})
        except Gone:
            self.said = "a closed connection"
        else:
            self.said, self.heard = _told(answer), answer.body
        self.at = time.perf_counter()
        self._wire.close()


def _told(answer: Answer) -> str:
    if answer.status != 200:
        return f"{answer.status}" if "error" in answer.json else "an answer without error"
    if b'"error"' in answer.body:
        return "an event" if answer.body.endswith(b"data: [DONE]\n\n") else "an event without end"
    return "answer" if answer.body.endswith((b"data: [DONE]\n\n", b"}")) else "half an answer"


async def under_load(
    host: Server, size: int, max_tokens: int, draw: random.Random
) -> list[tuple[Asker, asyncio.Task[None]]]:
    askers = [Asker(await Wire.open(host), number % 2 == 0) for number in range(size)]
    body = dict(asked("", max_tokens))
    found = [(asker, asyncio.ensure_future(asker.ask({**body, "prompt": new_ids(draw, 20)}))) for asker in askers]
    while (await host.numbers())["niwaki_sequences_in_flight"] < size:
        early = [asker.heard[:200] for asker, task in found if task.done()]
        assert not early, f"{len(early)} of {size} ended at once: {early[0]!r}; {Path(host.errors).read_text()}"
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    return found


async def f1(amount: int) -> list[Line]:
    """The engine is killed `amount` times with IN_FLIGHT requests in flight."""
    draw = random.Random(11)
    said: Counter[str] = Counter()
    slowest, back = 0.0, []
    began = time.perf_counter()
    with server("--max-restarts", str(amount), "--kv-tokens", "65536") as host:
        start_seconds = time.perf_counter() - began
        for _ in range(amount):
            running = await under_load(host, IN_FLIGHT, LONG, draw)
            killed = time.perf_counter()
            host.engine.kill()
            _, late = await asyncio.wait([task for _, task in running], timeout=10)
            for task in late:
                task.cancel()
            said.update(asker.said for asker, _ in running)
            slowest = max([slowest, *(asker.at - killed for asker, _ in running)])
            while (await host.ask("GET", "/ready")).status != 200:
                await asyncio.sleep(0.05)
            answer = await host.ask("POST", COMPLETIONS, asked("The cat", 4))
            assert answer.status == 200, answer
            back.append(time.perf_counter() - killed)
        await host.idle()
        standing = await host.standing()
    return [
        (f"what {amount} x {IN_FLIGHT} were told", str(dict(said)), set(said) <= {"503", "an event"}),
        ("the last of them after", ms(slowest), slowest <= 2),
        (
            f"answered again after, load time {start_seconds:.1f} s",
            f"{max(back):.1f} s",
            max(back) <= 5 + start_seconds,
        ),
        ("behind it", str(standing), standing.running == 0),
    ]


async def f2(amount: int) -> list[Line]:
    """The API's process is killed."""
    draw = random.Random(12)
    ended, gone, refused = [], [], 0
    for _ in range(amount):
        with server() as host:
            running = await under_load(host, 20, LONG, draw)
            engine = host.engine
            host.process.kill()
            host.process.wait(10)
            began = time.perf_counter()
            with socket.socket() as again:
                again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server's own has it
                try:
                    again.bind(("127.0.0.1", host.port))
                    again.listen()
                except OSError:
                    refused += 1
            with suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
                while engine.status() != psutil.STATUS_ZOMBIE and time.perf_counter() - began < 10:
                    await asyncio.sleep(0.002)
            ended.append(time.perf_counter() - began)
            with suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
                engine.wait(10)
            gone.append(time.perf_counter() - began)
            for _, task in running:
                task.cancel()
    return [
        (f"the engine has ended after, {amount} times", ms(max(ended)), max(ended) <= 2),
        # Who has lost his parent is there until the system's first process looks for him: here every two seconds.
        ("and is gone after", ms(max(gone)), max(gone) <= 2),
        ("ports that could not be had at once", str(refused), not refused),
    ]


async def f3(amount: int) -> list[Line]:
    """SIGTERM under load, once and twice; SIGINT while it starts."""
    draw = random.Random(13)
    lines: list[Line] = []
    for name, times, limit in (("one SIGTERM", 1, DRAIN_SECONDS + 1), ("two SIGTERMs", 2, 1.0)):
        for size, tokens in ((40, 400), (40, LONG)) if times == 1 else ((40, LONG),):
            said: Counter[str] = Counter()
            codes, took, left = set(), 0.0, 0
            for _ in range(amount):
                with server("--drain-seconds", str(DRAIN_SECONDS)) as host:
                    running = await under_load(host, size, tokens, draw)
                    family = host.family
                    began = time.perf_counter()
                    for _ in range(times):
                        host.process.send_signal(signal.SIGTERM)
                        await asyncio.sleep(0.1)
                    await asyncio.wait([task for _, task in running], timeout=20)
                    codes.add(await asyncio.to_thread(host.process.wait, 20))
                    took = max(took, time.perf_counter() - began)
                    said.update(asker.said for asker, _ in running)
                    await asyncio.sleep(0.2)
                    left += sum(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family[1:])
            what = f"{name}, {size} of {tokens} tokens: told {dict(said)}, {left} processes left"
            holds = set(said) <= {"answer", "503", "an event"} and took <= limit and codes == {0} and not left
            lines.append((what, f"code {codes} after {took:.2f} s", holds))
    codes, took, left = set(), 0.0, 0
    delays = [0.1, 0.3, 0.6, 1.0, 1.4, 1.8, 2.2, 2.6]
    said_all = ""
    for delay in delays:
        command = [sys.executable, "-m", "niwaki", "serve", "--port", "0", "--sessions", "sqlite://"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as starting:
            await asyncio.sleep(delay)
            children = psutil.Process(starting.pid).children(recursive=True)
            began = time.perf_counter()
            starting.send_signal(signal.SIGINT)
            _, errors = await asyncio.to_thread(starting.communicate, None, 20)
            codes.add(starting.returncode)
            took = max(took, time.perf_counter() - began)
            said_all += f"[{delay}: {starting.returncode} {errors.strip().splitlines()[-1:]}] "
            _, alive = psutil.wait_procs(children, 2)
            left += len(alive)
    lines.append(
        (
            f"SIGINT {delays} s after the start: {left} processes left",
            f"codes {codes} after {took:.2f} s",
            not left and took <= 2,
        )
    )
    lines.append(("what it said", said_all, "Traceback" not in said_all))
    return lines


async def f4(amount: int) -> list[Line]:
    """The engine is stopped for `amount` seconds, and goes on; a prefill of a minute is honest work."""
    lines = await _stopped(amount)
    for num_tokens in PREFILL_TOKENS:
        prefill = await _long_prefill(num_tokens)
        if prefill[0][2]:
            break
    return [*lines, *prefill]


async def _stopped(seconds: int) -> list[Line]:
    # Else a prompt that is cached by then may give other tokens than one that is computed: rounding in bfloat16.
    with server("--deterministic") as host:
        engine = host.engine
        body = asked("The cat", 2000, temperature=1, seed=4)  # what repeats itself is guessed, and done in no time
        expected = (await host.ask("POST", COMPLETIONS, body)).text
        in_flight = asyncio.ensure_future(host.ask("POST", COMPLETIONS, body))
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        engine.suspend()
        assert not in_flight.done()
        noticed = await _until_health_is(host, 503)
        refused = await host.ask("POST", COMPLETIONS, asked("The cat", 4))
        await asyncio.sleep(max(0.0, began + seconds - time.perf_counter()))
        engine.resume()
        again = await _until_health_is(host, 200)
        is_right = (await in_flight).text == expected
        is_same = host.engine.pid == engine.pid
        await host.idle()
        after = await host.standing()
    return [
        (f"stopped for {seconds} s: unhealthy after", f"{noticed:.2f} s", noticed <= 5),
        ("who asks then is told", str(refused.status), refused.status == 503),
        (f"goes on, the same process: {is_same}; healthy after", f"{again:.2f} s", is_same and again <= 2),
        ("the text that was on its way is right", str(is_right), is_right),
        ("behind it", str(after), after.running == 0),
    ]


async def _until_health_is(host: Server, status: int) -> float:
    """Seconds until then; at most 15."""
    began = time.perf_counter()
    while (await host.ask("GET", "/health")).status != status and time.perf_counter() - began < 15:
        await asyncio.sleep(0.05)
    return time.perf_counter() - began


async def _long_prefill(num_tokens: int) -> list[Line]:
    prompt = new_ids(random.Random(14), num_tokens)
    states: Counter[int] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        size = num_tokens + 1024
        model = roomy(model_folder("L60"), Path(folder) / "L60", positions=size)
        with server("--model", str(model), "--kv-tokens", str(size)) as host:
            began = time.perf_counter()
            working = asyncio.ensure_future(host.ask("POST", COMPLETIONS, asked(prompt, 1)))
            while not working.done():
                asked_at = time.perf_counter()
                states[(await host.ask("GET", "/health")).status] += 1
                slowest = max(slowest, time.perf_counter() - asked_at)
                await asyncio.sleep(0.1)
            took = time.perf_counter() - began
            status = (await working).status
    return [
        (
            f"a prefill of {num_tokens} tokens, answered with {status}",
            f"{took:.0f} s",
            status == 200 and took >= 60,
        ),
        ("/health meanwhile", str(dict(states)), set(states) == {200}),
        ("the slowest of them", ms(slowest), slowest <= 1),
    ]
