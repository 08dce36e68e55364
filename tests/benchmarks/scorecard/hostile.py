"""What is sent and done to break it: F6, F8, B1, B3 and I2 of the scorecard. Each gives lines of (what, figure, whether
it holds)."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from niwaki.runtime.bundled import MODEL_DIR
from tests.benchmarks.scorecard.load import Line, asked, crowd, new_ids
from tests.benchmarks.scorecard.wire import COMPLETIONS, Gone, Server, Wire, ms, server

DESCRIPTORS = 256
KEYS = ("a key of one team", "a key of another team")
HEAVY = r"(?=.*a.{%d}b)(?=.*c.{%d}d)[a-z]{1,400}"  # left to the process that compiles
MANGLED = [
    *(
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"null",
        b"true",
        b"-1",
        b"0.1",
        b'""',
        b"[]",
        b"{}",
        b"[[1]]",
        b"\x00",
        b"\xff\xfe",
    ),
    *(b'"\\ud800"', b'"\\u0000"', b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5_000, b'"' + b"x" * 70_000 + b'"'),
]
USER = [{"role": "user", "content": "Hello"}]
SHAPE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BODIES: dict[str, dict[str, object]] = {
    COMPLETIONS: {"prompt": "The cat", "max_tokens": 2, "n": 1, "stop": ["."], "logprobs": 1, "logit_bias": {"5": 1}},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2, "top_p": 0.5, "response_format": SHAPE, "tools": TOOLS},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16, "temperature": 0, "metadata": {"a": "b"}},
    "/generate": {"text": "The cat", "sampling_params": {"max_new_tokens": 2, "regex": "[a-z]+"}, "stream": False},
    "/tokenize": {"prompt": "The cat", "add_special_tokens": True},
    "/detokenize": {"tokens": [300, 301, 302]},
    "/v1/sessions": {"messages": USER, "metadata": {"a": "b"}},
}
KEPT = ("max_tokens", "max_output_tokens", "sampling_params")  # without them an answer may be as long as the context


async def f6(amount: int) -> list[Line]:
    """The process that compiles constraints is killed `amount` times at work; then there are few descriptors."""
    draw = random.Random(21)
    told: Counter[int] = Counter()
    after: Counter[int] = Counter()
    killed = 0
    with server() as host:
        for number in range(amount):
            hard = asked("The cat", 4, regex=HEAVY % (9 + number % 6, 7 + number), ignore_eos=False)
            working = asyncio.ensure_future(host.ask("POST", COMPLETIONS, hard))
            until = time.perf_counter() + 0.02 + draw.random() * 0.4
            while time.perf_counter() < until and not working.done():
                await asyncio.sleep(0.005)
            for child in host.engine.children():
                with suppress(psutil.NoSuchProcess):
                    child.kill()
                    killed += 1
            told[(await working).status] += 1
            after[(await host.ask("POST", COMPLETIONS, asked("x", 4, regex=f"[a-f]{{3,{5 + number}}}"))).status] += 1
        for one in host.family:
            one.rlimit(psutil.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        crowded = [await Wire.open(host) for _ in range(2 * DESCRIPTORS)]
        for wire in crowded:
            wire.writer.write(wire.request("POST", COMPLETIONS, asked("The cat", 1)))
        heard = await asyncio.gather(*(_heard(wire) for wire in crowded))
        for wire in crowded:
            wire.close()
        began = time.perf_counter()
        status = (await host.ask("POST", COMPLETIONS, asked("The cat", 1))).status
        again = time.perf_counter() - began
        await host.idle()
        standing = await host.standing()
    return [
        (f"{killed} kills: the requests that compiled were told", str(dict(told)), set(told) <= {200, 400, 503}),
        ("who asked next was told", str(dict(after)), set(after) == {200}),
        (f"{2 * DESCRIPTORS} connections with {DESCRIPTORS} descriptors", str(dict(Counter(heard))), "200" in heard),
        (f"who comes behind them is told {status} after", ms(again), status == 200 and again < 5),
        ("behind it", str(standing), standing.running == 0),
    ]


async def _heard(wire: Wire) -> str:
    """Within a while; the connections that nobody could accept are heard when others close."""
    try:
        return str((await asyncio.wait_for(wire.answer(), 20)).status)
    except (Gone, ConnectionError):
        return "closed"
    except TimeoutError:
        return "nothing in 20 s"
    finally:
        wire.close()


async def f8(amount: int) -> list[Line]:
    """`amount` servers are started at once; then some that cannot start."""
    began = time.perf_counter()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        open_all = (asyncio.to_thread(stack.enter_context, server("--kv-tokens", "2048")) for _ in range(amount))
        hosts: list[Server] = await asyncio.gather(*open_all)
        started = time.perf_counter() - began
        answers = await asyncio.gather(*(host.ask("POST", COMPLETIONS, asked("The cat", 2)) for host in hosts))
        statuses = Counter(answer.status for answer in answers)
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        torn = Path(folder) / "torn"
        shutil.copytree(MODEL_DIR, torn)
        for weights in torn.glob("*.safetensors"):
            weights.write_bytes(weights.read_bytes()[:-1000])
        (Path(folder) / "empty").mkdir()
        failed = [
            (name, *await asyncio.to_thread(_failed_start, options))
            for name, options in {
                "a taken port": ["--port", str(taken.getsockname()[1])],
                "no model folder": ["--model", str(Path(folder) / "none")],
                "an empty model folder": ["--model", str(Path(folder) / "empty")],
                "weights cut off": ["--model", str(torn)],
            }.items()
        ]
    return [
        (f"{amount} servers at once: all answer after", f"{started:.1f} s", statuses == Counter({200: amount})),
        *(
            (f"{name}: code {code} after {took:.1f} s", said.strip(), code == 1 and took < 5 and said.count("\n") == 1)
            for name, code, took, said in failed
        ),
    ]


def _failed_start(options: list[str]) -> tuple[int, float, str]:
    command = [sys.executable, "-m", "niwaki", "serve", "--port", "0", "--sessions", "sqlite://", *options]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, time.perf_counter() - began, done.stderr


async def b1(amount: int) -> list[Line]:
    """`amount` bodies, each of them good but for something."""
    draw = random.Random(22)
    statuses: Counter[int] = Counter()
    bad: list[tuple[str, bytes, bytes]] = []
    slowest = 0.0
    with server() as host:

        async def send(_: int) -> None:
            nonlocal slowest
            page = draw.choice(sorted(BODIES))
            body = mangled(draw, BODIES[page])
            wire = await Wire.open(host)
            began = time.perf_counter()
            try:
                answer = await wire.ask("POST", page, body)
                statuses[answer.status] += 1
                if answer.status >= 500 or b"Traceback" in answer.body:
                    bad.append((page, body[:300], answer.body[:300]))
            except Gone:
                statuses[0] += 1
            finally:
                wire.close()
            slowest = max(slowest, time.perf_counter() - began)

        await crowd(4, send, amount)
        await host.idle()
        standing = await host.standing()
    return [
        (f"answers to {amount} bodies by status (0: closed)", str(dict(sorted(statuses.items()))), statuses[0] == 0),
        ("answered with 500 and more", str(bad[:3]), not bad),
        ("the slowest answer", ms(slowest), slowest < 2),
        ("behind it", str(standing), standing.running == 0),
    ]


def mangled(draw: random.Random, body: dict[str, object]) -> bytes:
    """A good body in which a value is another one, a name is another one, or bytes were cut out, doubled or changed."""
    text, names = json.dumps(body).encode(), sorted(set(body).difference(KEPT))
    match draw.randrange(5):
        case 0:
            name = draw.choice(names)
            return text.replace(json.dumps(body[name]).encode(), draw.choice(MANGLED), 1)
        case 1:
            return text.replace(draw.choice(names).encode(), draw.choice([b"", b"x", b"stream", b"model"]), 1)
        case 2:
            start = draw.randrange(len(text))
            return text[:start] + text[start + draw.randrange(1, 9) :]
        case 3:
            start = draw.randrange(len(text))
            return text[:start] + draw.choice(MANGLED) + text[start:]
        case _:
            place = draw.randrange(len(text))
            return text[:place] + bytes([draw.randrange(256)]) + text[place + 1 :]


async def b3(amount: int) -> list[Line]:
    """`amount` schemas, each of which comes once."""
    numbers = itertools.count()
    statuses: Counter[int] = Counter()
    with server() as host:

        async def send(_: int) -> None:
            number = next(numbers)
            fields = {f"field_{number}_{place}": {"type": "integer", "maximum": number} for place in range(3)}
            schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
            shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "response_format": shape}
            wire = await Wire.open(host)
            statuses[(await wire.ask("POST", "/v1/chat/completions", body)).status] += 1
            wire.close()

        weights: list[float] = []
        for part in range(4):
            await crowd(8, send, amount // 4)
            weights.append(host.engine.memory_info().rss / 2**20)
            if part == 0:
                written = _written(host)
        written = _written(host) - written
    return [
        (f"answers to {amount} schemas", str(dict(statuses)), set(statuses) == {200}),
        ("MiB of the engine after each quarter", str([round(one) for one in weights]), weights[-1] - weights[0] < 300),
        ("bytes written to disks behind the first quarter", str(written), written < 2**16),
    ]


def _written(host: Server) -> int:
    return sum(one.io_counters().write_bytes for one in host.family)


async def i2(amount: int) -> list[Line]:
    """One key asks for `amount` prompts that another has just asked for, and for as many that nobody has."""
    draw = random.Random(23)
    cached: Counter[int] = Counter()
    known, new, own = list[float](), list[float](), list[float]()
    with server("--api-key", KEYS[0], "--api-key", KEYS[1]) as host:
        wire = await Wire.open(host)

        async def timed(ids: list[int], key: str) -> tuple[float, int]:
            began = time.perf_counter()
            answer = await wire.ask("POST", COMPLETIONS, asked(ids, 1), authorization=f"Bearer {key}")
            took = time.perf_counter() - began
            usage = answer.json["usage"]
            assert isinstance(usage, dict)
            return took, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

        for number in range(amount):
            # No two begin alike: a key may hit what it asked itself.
            ids, other = ([300 + (2 * number + which) % 1700, *new_ids(draw, 511)] for which in range(2))
            await timed(ids, KEYS[0])
            for prompt, times in draw.sample([(ids, known), (other, new)], 2):
                took, held = await timed(prompt, KEYS[1])
                times.append(took)
                cached[held] += 1
            own.append((await timed(ids, KEYS[0]))[0])
        wire.close()
    apart, seen = _auc(known, new), _auc(own, new)
    return [
        ("cached tokens that the second key was told", str(dict(cached)), set(cached) == {0}),
        (
            "AUC of its times, known to the other against new (0.5: no difference)",
            f"{apart:.3f}",
            0.45 <= apart <= 0.55,
        ),
        ("AUC where it is a key's own, for comparison", f"{seen:.3f}", seen > 0.9),
    ]


def _auc(quick: list[float], slow: list[float]) -> float:
    """How often one of the first took less than one of the second."""
    return sum(a < b for a in quick for b in slow) / (len(quick) * len(slow))
