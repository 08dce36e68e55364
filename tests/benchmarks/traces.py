"""Random traces at full size: what the quick tests do with a few hundred steps, as often as one likes.

python -m tests.benchmarks.traces --operations 100000  # the cache against a naive model, as many for each policy
python -m tests.benchmarks.traces --count 10000        # the engine against cold solo runs (scorecard I1)
python -m tests.benchmarks.traces --count 10000 --float  # ... in the usual mode, against a plain dense forward
python -m tests.benchmarks.traces --count 250 --threads  # ... the engine on its own thread, as users have it

A trace is a few actions on one engine, between steps that are counted: send a request or several at once (prompts share
heads that end at a page's edge or a token beside it), cancel something in the middle of its prefill or its text, send
the same again, set somebody back. The pool is so small that requests are set back without that. Behind each trace the
cache proves its invariants, and nothing runs or holds a page.

The engine is deterministic: what comes out must be, bit for bit, tokens and log-probabilities, what the same request
gives in a cold engine by itself. With `--float` sums are taken in another order beside others, so a text may part from
the one alone where two tokens are nearly equally likely; each log-probability must then be within 1e-5 of what a
forward pass of the whole text by transformers gives. Half of the engines launch a step before they read the last one's
tokens, as on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from niwaki.kernels.jit import set_num_threads
from niwaki.radix.eviction import EVICTIONS
from niwaki.runtime.api import Cancelled, Generation, Output, SamplingParams
from niwaki.runtime.engine import Engine
from tests.benchmarks.stepping import Stepped, answer, come_to_rest, wait_for_steps
from tests.radix.test_cache_random import Simulation
from tests.toy import VOCAB_SIZE, make_model

PAGE = 16
POOLS = (128, 192, 320)  # tokens
CHUNKS = (16, 32, 64)  # tokens a step
EVERY = 1000  # operations on one cache, and traces of one family of prompts
PER_ENGINE = 50  # traces
NEW = (1, 6, PAGE + 4)  # tokens
TOLERANCE = 1e-5  # of a log-probability in float32

Ids = tuple[int, ...]
Told = tuple[tuple[int, ...], tuple[float | None, ...]]


def operations(count: int, seed: int, eviction: str) -> None:
    """`count` random operations over caches of many sizes, everything checked after each; raises AssertionError at the
    first that is wrong."""
    sizes = itertools.cycle(itertools.product((3, 9, 40, 200), (1, 4, 16)))
    done = 0
    while done < count:
        num_pages, page_size = next(sizes)
        simulation = Simulation(random.Random(f"{seed} {eviction} {done}"), num_pages, page_size, eviction=eviction)
        for _ in range(min(EVERY, count - done)):
            simulation.step()
            done += 1
        simulation.finish()


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
    """What each request gives by itself in a cold engine, asked once: a shorter text is the head of a longer one."""

    def __init__(self, folder: Path, *, deterministic: bool = True) -> None:
        self._engine = Stepped(folder, kv_tokens=1024, enable_prefix_cache=False, deterministic=deterministic)
        self._known: dict[Asked, Told] = {}

    def __call__(self, asked: Asked) -> Told:
        longest = replace(asked, num_new=NEW[-1])
        if longest not in self._known:
            (output,) = answer(self._engine, start(self._engine, longest))
            self._known[longest] = told(output)
        tokens, logprobs = self._known[longest]
        return tokens[: asked.num_new], logprobs[: asked.num_new]

    def close(self) -> None:
        self._engine.shutdown()


class Dense:
    """The log-probabilities of a text's tokens, from one forward pass of all of it in transformers and in float64."""

    def __init__(self, folder: Path) -> None:
        from tests.reference import open_reference  # loads transformers, which takes ten seconds

        self._model = open_reference(folder, torch.float64)
        self._known: dict[tuple[Ids, Ids], tuple[float, ...]] = {}

    def __call__(self, prompt: Ids, tokens: Ids) -> tuple[float, ...]:
        if (prompt, tokens) not in self._known:
            ids = torch.tensor([prompt + tokens])
            with torch.inference_mode():
                logits = self._model(ids).logits[0, len(prompt) - 1 : -1]
            of_all = torch.log_softmax(logits, -1)
            self._known[prompt, tokens] = tuple(of_all[torch.arange(len(tokens)), ids[0, len(prompt) :]].tolist())
        return self._known[prompt, tokens]


def start(engine: Engine, asked: Asked) -> Generation:
    return engine.backend.start(np.array(asked.ids, np.int32), asked.params)


def told(output: Output) -> Told:
    return tuple(output.token_ids), tuple(entry.logprob for entry in output.logprobs)


class Traffic:
    """Requests that look like each other: heads of a page, of two and of three, one token less and more, and of much
    less than one; few tails, one of them empty."""

    def __init__(self, seed: str, *, is_plain: bool) -> None:
        draw = random.Random(seed)
        self._is_plain = is_plain
        self._heads = [tuple(draw.randrange(5, VOCAB_SIZE) for _ in range(3 * PAGE + 1)) for _ in range(2)]
        self._tails = [tuple(draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(1, 20))) for _ in range(3)]
        self._tails.append(())

    def asked(self, draw: random.Random) -> Asked:
        size = draw.choice((2, 9, *(pages * PAGE + beside for pages in (1, 2, 3) for beside in (-1, 0, 1))))
        ids = draw.choice(self._heads)[:size] + draw.choice(self._tails)
        return Asked(ids, draw.choice(NEW), draw.randrange(2), self._is_plain)


@dataclass
class Counts:
    answers: int = 0
    parted: int = 0  # whose tokens are not those of the one alone: none in deterministic mode
    largest: float = 0.0  # difference of a log-probability
    cancelled: int = 0
    set_back: int = 0  # in the middle of their prompts
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
            for name, value in asdict(self).items()
        )


Judge = Callable[[Asked, Told, Counts], None]


def exact(solo: Solo) -> Judge:
    def judge(asked: Asked, got: Told, counts: Counts) -> None:
        assert got == solo(asked), f"{asked} gave {got}, alone {solo(asked)}"

    return judge


def close_by(solo: Solo, dense: Dense) -> Judge:
    def judge(asked: Asked, got: Told, counts: Counts) -> None:
        tokens, logprobs = got
        counts.parted += tokens != solo(asked)[0]
        for place, (logprob, expected) in enumerate(zip(logprobs, dense(asked.ids, tokens), strict=True)):
            assert logprob is not None
            counts.largest = max(counts.largest, abs(logprob - expected))
            assert abs(logprob - expected) <= TOLERANCE, f"{asked}: {logprob} at {place} of {tokens}, not {expected}"

    return judge


def trace(engine: Engine, judge: Judge, traffic: Traffic, draw: random.Random, counts: Counts) -> None:
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
            counts.cancelled += ended(engine, generation)
            if draw.random() < 0.7:  # and once more
                running.append((asked, start(engine, asked)))
        else:
            counts.set_back += set_back(engine, draw)
        wait_for_steps(engine, draw.choice((0, 0, 1, 1, 2, 3, 8)))
    for asked, generation in running:
        (output,) = answer(engine, generation)
        judge(asked, told(output), counts)
        counts.answers += 1
    come_to_rest(engine)
    cache = engine.backend._core.pages.cache
    engine.backend.check()
    assert (cache.stats().held_pages, cache.stats().leases) == (0, 0), cache.stats()
    if draw.random() < 0.2:
        assert engine.flush_cache()


def ended(engine: Engine, generation: Generation) -> bool:
    """Whether it was cancelled rather than done before."""
    try:
        answer(engine, generation)
    except Cancelled:
        return True
    return False


def set_back(engine: Engine, draw: random.Random) -> int:
    """As where pages are short: some who run give theirs back. Returns of how many the prompt was half computed."""

    def preempt() -> int:
        core = engine.backend._core
        core._land_and_settle()
        running = list(core._roster.running.values())
        chosen = draw.sample(running, draw.randint(0, len(running)))
        num_half = sum(0 < request.num_computed < request.num_prompt for request in chosen)
        for request in chosen:
            core._roster.preempt(request)
        return num_half

    return engine.backend._between_steps(preempt)


def traces(
    count: int,
    seed: int,
    *,
    first: int = 0,
    deterministic: bool = True,
    threads: bool = False,
    per_engine: int = PER_ENGINE,
) -> Iterator[tuple[int, Counts]]:
    """Run those from number `first` on, in turn over engines of several sizes; gives how many are done and the counts
    now and then."""
    counts, kind = Counts(), Engine if threads else Stepped
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(
            Path(folder) / "toy", hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1
        )
        solo = Solo(model, deterministic=deterministic)
        judge = exact(solo) if deterministic else close_by(solo, Dense(model))
        sizes = list(itertools.product(POOLS, CHUNKS, (False, True) if deterministic else (False,)))
        for start in range(first, first + count, per_engine):
            pool, chunk, runs_ahead = sizes[start // per_engine % len(sizes)]
            options: dict[str, object] = {"kv_tokens": pool, "chunked_prefill_size": chunk}
            options |= {"draft_tokens": 0} if runs_ahead else {}  # who may guess does not run ahead
            stop = min(start + per_engine, first + count)
            with kind(model, **options, deterministic=deterministic) as engine:
                engine.backend._core._runs_ahead = runs_ahead
                traffic = Traffic(f"{seed} {start // EVERY}", is_plain=runs_ahead)
                for number in range(start, stop):
                    try:
                        trace(engine, judge, traffic, random.Random(f"{seed} {number}"), counts)
                    except BaseException as error:
                        error.add_note(f"trace {number} of seed {seed}: {options}, {runs_ahead=}")
                        raise
                stats = engine.stats()
                counts.cached_tokens += int(stats["cached_tokens"])
                counts.preemptions += int(stats["preemptions"])
                counts.steps += int(stats["steps"])
            yield stop - first, counts
        solo.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=0, metavar="N", help="on the cache, for each policy")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="traces on engines")
    parser.add_argument("--float", action="store_true", help="the usual mode, against a dense forward in float32")
    parser.add_argument("--threads", action="store_true", help="engines on their own threads, not step by step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="begin with trace K of the seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    options = parser.parse_args(argv)
    for eviction in EVICTIONS if options.operations else ():
        began = time.perf_counter()
        operations(options.operations, options.seed, eviction)
        took = time.perf_counter() - began
        print(f"{eviction}: {options.operations} operations, checked after each, in {took:.0f} s", flush=True)
    if not options.threads:  # they would wait for each other more than they compute
        torch.set_num_threads(1)
        set_num_threads(1)
    began, used = time.perf_counter(), time.process_time()
    for done, counts in traces(
        options.count, options.seed, first=options.first, deterministic=not options.float, threads=options.threads
    ):
        took = time.perf_counter() - began
        is_over = done == options.count or took > options.seconds
        if done % EVERY == 0 or is_over:
            cost = f"{took:.0f} s, {time.process_time() - used:.0f} s of CPU time"
            print(f"{done} traces hold: {counts}; {cost}", flush=True)
        if is_over:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
