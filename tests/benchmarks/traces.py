"""Random traces at full size: what the quick tests do with a few hundred steps, as often as one likes.

python -m tests.benchmarks.traces --operations 100000    # the cache against a naive model, checked after each
python -m tests.benchmarks.traces --traces 10000         # the engine against cold solo runs (scorecard I1)
python -m tests.benchmarks.traces --traces 10000 --ahead # ... with steps launched before the last one's tokens are read

A trace is a few timed actions on one engine: send a request or several at once (prompts share heads that end at a
page's edge or a token beside it), let it take some steps, cancel something in the middle of its prefill or its text,
send the same again. The pool is so small that requests are set back. The engine is deterministic: what comes out must
be, bit for bit, tokens and log-probabilities, what the same request gives in a cold engine by itself.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from niwaki.radix.eviction import EVICTIONS
from niwaki.runtime.api import Cancelled, Generation, Output, SamplingParams
from niwaki.runtime.engine import Engine
from tests.radix.test_cache_random import Simulation
from tests.toy import VOCAB_SIZE, make_model

PAGE = 16
POOLS = (128, 192, 320)  # tokens
CHUNKS = (16, 32, 64)  # tokens a step
EVERY = 1000  # traces or operations between two lines of progress

Ids = tuple[int, ...]
Told = tuple[tuple[int, ...], tuple[float | None, ...]]


def operations(count: int, seed: int) -> None:
    """`count` random operations over caches of many sizes; raises AssertionError at the first that is wrong."""
    sizes = itertools.cycle(itertools.product((3, 9, 40, 200), (1, 4, 16), EVICTIONS))
    done = 0
    for number in itertools.count():
        num_pages, page_size, eviction = next(sizes)
        draw = random.Random(f"{seed} {number}")
        simulation = Simulation(draw, num_pages, page_size, eviction=eviction)
        for _ in range(min(EVERY, count - done)):
            simulation.step()
            done += 1
        simulation.finish()
        if done >= count:
            return


@dataclass(frozen=True)
class Asked:
    """One request. Equal ones must be answered equally."""

    ids: Ids
    num_new: int
    seed: int
    is_plain: bool  # tokens only, which may end it at any time

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=1.0,
            seed=self.seed,
            max_new_tokens=self.num_new,
            ignore_eos=True,
            return_logprob=not self.is_plain,
            stop_token_ids=tuple(range(5, 15)) if self.is_plain else (),
        )


class Solo:
    """What each request gives by itself in a cold engine, asked once."""

    def __init__(self, folder: Path) -> None:
        self._engine = Engine(folder, kv_tokens=1024, enable_prefix_cache=False, deterministic=True)
        self._known: dict[Asked, Told] = {}

    def __call__(self, asked: Asked) -> Told:
        if asked not in self._known:
            (output,) = start(self._engine, asked).result(timeout=120)
            self._known[asked] = told(output)
        return self._known[asked]

    def close(self) -> None:
        self._engine.shutdown()


def start(engine: Engine, asked: Asked) -> Generation:
    return engine.backend.start(np.array(asked.ids, np.int32), asked.params)


def told(output: Output) -> Told:
    return tuple(output.token_ids), tuple(entry.logprob for entry in output.logprobs)


class Traffic:
    """Requests that look like each other: heads of a page, one token less and more, of three and of much less than one;
    few tails, one of them empty."""

    def __init__(self, seed: int, *, is_plain: bool) -> None:
        draw = random.Random(seed)
        self._is_plain = is_plain
        self._heads = [tuple(draw.randrange(5, VOCAB_SIZE) for _ in range(3 * PAGE)) for _ in range(3)]
        self._tails = [tuple(draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(0, 20))) for _ in range(8)]
        self._tails.append(())

    def asked(self, draw: random.Random) -> Asked:
        size = draw.choice((2, 9, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE))
        ids = draw.choice(self._heads)[:size] + draw.choice(self._tails)
        return Asked(ids, draw.choice((1, 12, 36)), draw.randrange(3), self._is_plain)


@dataclass
class Counts:
    answers: int = 0
    cancelled: int = 0
    cached_tokens: float = 0
    preemptions: float = 0


def trace(engine: Engine, solo: Solo, traffic: Traffic, draw: random.Random, counts: Counts) -> None:
    """One trace; raises AssertionError where an answer is not the solo one, or a page is lost."""
    running: list[tuple[Asked, Generation]] = []
    for _ in range(draw.randint(2, 5)):
        action = draw.random()
        if action < 0.55 or not running:
            group = [traffic.asked(draw) for _ in range(draw.randint(1, 4))]
            group += group[:1] * draw.randint(0, 2)  # the same prompt twice in one step
            running += [(asked, start(engine, asked)) for asked in group]
        elif action < 0.85:
            asked, generation = running.pop(draw.randrange(len(running)))
            generation.cancel()
            counts.cancelled += ended(generation)
            if draw.random() < 0.7:  # and once more
                running.append((asked, start(engine, asked)))
        else:
            wait_for_steps(engine, draw.randint(1, 6))
    for asked, generation in running:
        (output,) = generation.result(timeout=120)
        assert told(output) == solo(asked), f"{asked} gave {told(output)}, alone {solo(asked)}"
        counts.answers += 1


def ended(generation: Generation) -> bool:
    """Whether it was cancelled rather than done before."""
    try:
        generation.result(timeout=120)
    except Cancelled:
        return True
    return False


def wait_for_steps(engine: Engine, count: int) -> None:
    """Let the engine take `count` steps, or come to rest."""
    until = engine.stats()["steps"] + count
    while engine.stats()["steps"] < until and engine.stats()["requests_running"]:
        time.sleep(0.0005)


def traces(count: int, seed: int, *, runs_ahead: bool = False) -> Iterator[tuple[int, Counts]]:
    """Run them in turn over engines of several sizes; gives the number done and the counts now and then."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "toy")
        solo = Solo(model)
        done = 0
        sizes = itertools.cycle(itertools.product(POOLS, CHUNKS))
        while done < count:
            pool, chunk = next(sizes)
            options = {"kv_tokens": pool, "chunked_prefill_size": chunk, "deterministic": True}
            options |= {"draft_tokens": 0} if runs_ahead else {}  # who may guess does not run ahead
            with Engine(model, **options) as engine:
                engine.backend._core._runs_ahead = runs_ahead
                traffic = Traffic(seed + done, is_plain=runs_ahead)
                for _ in range(min(EVERY // 4, count - done)):
                    trace(engine, solo, traffic, random.Random(f"{seed} {done}"), counts)
                    done += 1
                engine.backend.check()
                stats = engine.stats()
                assert stats["pages_held"] == stats["requests_running"] == stats["requests_waiting"] == 0
                counts.cached_tokens += stats["cached_tokens"]
                counts.preemptions += stats["preemptions"]
            yield done, counts
        solo.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=0, metavar="N")
    parser.add_argument("--traces", type=int, default=0, metavar="N")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    began = time.perf_counter()
    if options.operations:
        operations(options.operations, options.seed)
        print(
            f"{options.operations} operations, checked after each, in {time.perf_counter() - began:.0f} s", flush=True
        )
    began = time.perf_counter()
    if options.traces:
        for done, counts in traces(options.traces, options.seed, runs_ahead=options.ahead):
            print(
                f"{done} traces: {counts.answers} answers equal to cold solo runs, {counts.cancelled} cancelled, "
                f"{counts.cached_tokens:.0f} tokens from the cache, {counts.preemptions:.0f} preemptions, "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
