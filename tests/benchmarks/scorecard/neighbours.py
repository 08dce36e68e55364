"""Clients beside the one that is measured: python -m tests.benchmarks.scorecard.neighbours PORT KIND...

One for each kind, which asks again as soon as it was answered, until stdin ends. Requests are made beforehand and
answers are not read apart, so that they take little of the processors.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable, Mapping

import psutil

from tests.benchmarks.scorecard.load import asked, new_ids
from tests.benchmarks.scorecard.wire import COMPLETIONS, Json, Server, Wire

NUM_PROMPTS = {"long": 400, "short": 2000, "wide": 400}  # each once: none is in the cache
KINDS: Mapping[str, Callable[[random.Random], Json]] = {
    "long": lambda draw: asked(new_ids(draw, 3000), 1),
    "short": lambda draw: asked(new_ids(draw, 20), 16),
    "wide": lambda draw: asked(new_ids(draw, 20), 64, n=8, temperature=1, logprobs=20),
}


async def ask_again(port: int, kinds: list[str]) -> None:
    draw = random.Random(os.getpid())
    host = Server(psutil.Process(), port, "")
    prompts = {
        kind: iter([host.request("POST", COMPLETIONS, KINDS[kind](draw)) for _ in range(NUM_PROMPTS[kind])])
        for kind in set(kinds)
    }
    is_over = asyncio.Event()

    async def one(kind: str) -> None:
        wire = await Wire.open(host)
        while not is_over.is_set():
            wire.writer.write(next(prompts[kind]))
            answer = await wire.answer()
            assert answer.status == 200, answer
        wire.close()

    clients = asyncio.gather(*map(one, kinds))
    print("asking", flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    is_over.set()
    await clients


if __name__ == "__main__":
    asyncio.run(ask_again(int(sys.argv[1]), sys.argv[2:]))
