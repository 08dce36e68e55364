"""Pools that are too short for what is asked, and more than there is time for: L4, L5 and L8 of the scorecard, each on
an engine in this process. Each gives lines of (what, figure, whether it holds)."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch

from niwaki.runtime.api import CapacityError, Generation, Output, SamplingParams
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Batch
from niwaki.runtime.link.engine_host import COLLECTIONS
from tests.benchmarks.scorecard.load import Line
from tests.benchmarks.scorecard.wire import ms, percentile

Ids = tuple[int, ...]


def drawn(draw: random.Random, length: int) -> Ids:
    return tuple(draw.randrange(100, 2000) for _ in range(length))


def start(engine: Engine, ids: Ids, num_new: int, priority: int = 0) -> Generation:
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True, priority=priority)
    return engine.backend.start(np.array(ids, np.int32), params)


def output_of(generation: Generation) -> Output:
    return generation.result(timeout=300)[0]


@contextmanager
def watched(engine: Engine) -> Iterator[list[tuple[float, float]]]:
    """When each batch was begun and done from here on: an engine that goes round in circles computes none."""
    runner = engine.backend._core._runner
    works, batches = runner.forward, list[tuple[float, float]]()

    def forward(batch: Batch) -> torch.Tensor:
        began = time.perf_counter()
        logits = works(batch)
        batches.append((began, time.perf_counter()))
        return logits

    runner.forward = forward  # type: ignore[assignment,method-assign]  # the core gives it batches
    try:
        yield batches
    finally:
        runner.forward = works  # type: ignore[method-assign]  # as it was


def is_empty(engine: Engine) -> bool:
    """Whether every page is back, and nobody waits."""
    engine.backend.check()
    stats = engine.stats()
    return not (stats["pages_held"] or stats["requests_running"] or stats["requests_waiting"])


# -- L4 ---------------------------------------------------------------------------------------------------------------

NUM_NEW = 6


async def l4(amount: int) -> list[Line]:
    """Prompts of 1 token to twice a pool of 64 pages, of 1, 16 and 64 tokens, all at once."""
    lines: list[Line] = []
    for page_size in (1, 16, 64):
        pool = 64 * page_size
        draw = random.Random(page_size)
        asked = [drawn(draw, max(1, min(2 * pool, int(2 * pool ** draw.random())))) for _ in range(amount)]
        with Engine(kv_tokens=4 * pool, enable_prefix_cache=False, deterministic=True) as ample:
            fits = [ids for ids in asked if len(ids) + NUM_NEW <= pool]
            expected = {ids: output_of(start(ample, ids, NUM_NEW)).token_ids for ids in fits}
        refused: list[float] = []
        running: list[tuple[Ids, Generation]] = []
        with Engine(kv_tokens=pool, page_size=page_size, deterministic=True) as engine, watched(engine) as batches:
            for ids in asked:
                began = time.perf_counter()
                try:
                    running.append((ids, start(engine, ids, NUM_NEW)))
                except CapacityError:
                    refused.append(time.perf_counter() - began)
            right = sum(output_of(generation).token_ids == expected.get(ids) for ids, generation in running)
            is_idle = is_empty(engine)
        stall = max(done - before for (_, before), (_, done) in pairwise(batches))
        what = f"pages of {page_size}"
        is_door_right = len(running) == len(fits)
        lines += [
            (f"{what}, answered as by an ample pool", f"{right} of {len(fits)}", right == len(fits) and is_door_right),
            (f"{what}, refused, the latest in", f"{len(refused)}, {ms(max(refused))}", max(refused) < 0.1),
            (f"{what}, the longest time without a batch done", ms(stall), stall < 5.0),
            (f"{what}, every page back", str(is_idle), is_idle),
        ]
    return lines


# -- L5 ---------------------------------------------------------------------------------------------------------------


async def l5(amount: int) -> list[Line]:
    """So many requests at once, over four pools that they do not fit."""
    draw, num_new = random.Random(5), 48
    asked = [drawn(draw, draw.randint(1, 40)) for _ in range(amount)]
    with Engine(kv_tokens=32_768, enable_prefix_cache=False, deterministic=True) as ample:
        expected = answers(ample, asked, num_new)
    lines: list[Line] = []
    for pool in (96, 128, 192, 320):
        with Engine(kv_tokens=pool, deterministic=True) as engine:
            right = sum(map(tuple.__eq__, answers(engine, asked, num_new), expected))
            stats, is_idle = engine.stats(), is_empty(engine)
        useful = sum(len(ids) + num_new for ids in asked)
        share = stats["recomputed_tokens"] / useful
        what = f"a pool of {pool}"
        lines += [
            (f"{what}, answered as by an ample pool", f"{right} of {amount}", right == amount),
            (f"{what}, {stats['preemptions']:.0f} preemptions, computed again", f"{100 * share:.1f} %", share <= 0.3),
            (f"{what}, every page back", str(is_idle), is_idle),
        ]
    return lines


def answers(engine: Engine, asked: Sequence[Ids], num_new: int) -> list[tuple[int, ...]]:
    with engine.backend.together():
        running = [start(engine, ids, num_new) for ids in asked]
    return [output_of(generation).token_ids for generation in running]


# -- L8 ---------------------------------------------------------------------------------------------------------------

PLACES = 16
HIGH_SHARE = 0.1
SAMPLE = 200  # requests that tell how many a second there is time for


async def l8(amount: int) -> list[Line]:
    """Twice as many requests a second as there is time for, one in ten of them of a high priority, for so many
    seconds."""
    draw = random.Random(8)

    def asked() -> tuple[Ids, int]:
        return drawn(draw, draw.randint(16, 128)), draw.randint(8, 48)

    options: dict[str, object] = {"kv_tokens": PLACES * 192, "max_running_requests": PLACES}
    with Engine(None, **options) as engine:
        for _ in range(2):  # the first time kernels are loaded
            began = time.perf_counter()
            for generation in [start(engine, *asked(), priority=place % 9 // 8) for place in range(SAMPLE)]:
                output_of(generation)
            rate = 2 * SAMPLE / (time.perf_counter() - began)
        alone = [output_of(start(engine, *asked())).first_seconds for _ in range(50)]
        gc.collect()
        gc.freeze()  # as a server does: a full collection of what was loaded holds the interpreter for 0.2 s
        usual = gc.get_threshold()
        gc.set_threshold(*COLLECTIONS)
        found: list[tuple[bool, Generation]] = []
        with watched(engine) as batches:
            began = time.perf_counter()
            while (now := time.perf_counter() - began) < amount:
                while len(found) < rate * now:
                    is_high = draw.random() < HIGH_SHARE
                    found.append((is_high, start(engine, *asked(), priority=int(is_high))))
                time.sleep(0.001)
            outputs = [(is_high, output_of(generation)) for is_high, generation in found]
            took = time.perf_counter() - began
        is_idle = is_empty(engine)
    gc.unfreeze()
    gc.set_threshold(*usual)
    high = [output.first_seconds for is_high, output in outputs if is_high]
    low = [output.first_seconds for is_high, output in outputs if not is_high]
    bound = percentile([done - began for began, done in batches], 99) + percentile(alone, 99)
    return [
        (f"{rate:.0f} a second for {amount} s, done in", f"{took:.1f} s", True),
        ("one step and a prefill alone, p99 of both", ms(bound), True),
        (f"{len(high)} of high priority, first token at p99", ms(percentile(high, 99)), percentile(high, 99) <= bound),
        (f"{len(low)} of low priority, the longest wait", f"{max(low):.1f} s", max(low) <= 60.0),
        ("every page back", str(is_idle), is_idle),
    ]
