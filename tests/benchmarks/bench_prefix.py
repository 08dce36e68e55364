"""W1 and W13: what the prefix cache brings where prompts share, and what it costs where nothing is shared. W18: what it
brings that evicted pages come back.

python -m tests.benchmarks.bench_prefix --json build/bench_prefix.json [--model L60] [--only w13]

W13 and W18 are timed by the process's own CPU seconds: one thread a process (OMP_NUM_THREADS=1) makes them comparable.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from niwaki.radix import Cache
from niwaki.runtime.engine import Engine
from tests.benchmarks.harness import MIN_PAIRS, Comparison, compare, number_of_pairs, table, write_json
from tests.benchmarks.shapes import RANDOM, model_folder

Prompts = list[list[int]]

SEED = 20
NUM_RESERVED = 300  # ids below: special tokens and single bytes


class Workload:
    """Runs prompts of random ids through an engine, all at once. Every run begins with an empty cache.

    Random ids, so that nothing is shared but what is meant to be; ignore_eos, so that both sides do equal work.
    """

    def __init__(self, engine: Engine, prompts: Prompts, num_new_tokens: int) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = {"temperature": 0, "max_new_tokens": num_new_tokens, "ignore_eos": True}
        self.counts: dict[str, float] = {}

    def __call__(self) -> None:
        before = dict(self._engine.stats())
        answers = self._engine.generate(input_ids=self._prompts, sampling_params=self._params)
        assert isinstance(answers, list)
        assert len(answers) == len(self._prompts)
        after = self._engine.stats()
        self.counts = {name: after[name] - before[name] for name in ("prefilled_tokens", "cached_tokens")}
        self._engine.flush_cache()


class TreeTime:
    """The CPU seconds that the engine's thread spends in its cache, and the calls, looking at the clock apart."""

    METHODS = ("peek", "forget", "acquire", "reserve", "commit", "release", "discard", "num_exclusive", "flush")

    def __init__(self, cache: Cache) -> None:
        self.of: Counter[str] = Counter()  # nanoseconds by method
        self.calls: Counter[str] = Counter()
        self._is_inside = False  # of a method that calls another
        for name in self.METHODS:
            setattr(cache, name, self._timed(name, getattr(cache, name)))
        nothing = self._timed("nothing", lambda: None)
        for _ in range(1000):
            nothing()
        self._clock = self.of["nothing"] // 1000
        self.forget()

    @property
    def seconds(self) -> float:
        return self.of.total() / 1e9

    def forget(self) -> None:
        """Begin anew."""
        self.of.clear()
        self.calls.clear()

    def _timed(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        self._clock = 0

        def call(*args: object, **options: object) -> object:
            if self._is_inside:
                return method(*args, **options)
            self._is_inside = True
            start = time.thread_time_ns()
            try:
                return method(*args, **options)
            finally:
                self.of[name] += time.thread_time_ns() - start - self._clock
                self.calls[name] += 1
                self._is_inside = False

        return call


def few_shot(vocab_size: int, *, num_prompts: int, num_shared: int, num_own: int) -> Prompts:
    random = np.random.default_rng(SEED)
    shared = random.integers(NUM_RESERVED, vocab_size, num_shared).tolist()
    return [shared + random.integers(NUM_RESERVED, vocab_size, num_own).tolist() for _ in range(num_prompts)]


def unique(vocab_size: int, *, num_prompts: int, length: int) -> Prompts:
    random = np.random.default_rng(SEED + 1)
    return [random.integers(NUM_RESERVED, vocab_size, length).tolist() for _ in range(num_prompts)]


def cache_on_off(
    engines: tuple[Engine, Engine], workload: str, shape: str, prompts: Prompts, num_new: int, aim: str, pairs: int
) -> Comparison:
    cached, plain = (Workload(engine, prompts, num_new) for engine in engines)

    def notes() -> Mapping[str, float]:
        return {
            "tokens prefilled with the cache": cached.counts["prefilled_tokens"],
            "without": plain.counts["prefilled_tokens"],
            "ratio of the work": plain.counts["prefilled_tokens"] / cached.counts["prefilled_tokens"],
        }

    return compare(workload, shape, ("cache on", cached), ("cache off", plain), aim=aim, pairs=pairs, notes=notes)


def w1(engines: tuple[Engine, Engine], vocab_size: int, pairs: int) -> Comparison:
    """Few-shot, one token: 200 prompts that share 512 tokens and differ in 48."""
    prompts = few_shot(vocab_size, num_prompts=200, num_shared=512, num_own=48)
    return cache_on_off(engines, "W1", "200 x (512 shared + 48), 1 new", prompts, 1, ">= 9", pairs)


def w13(engines: tuple[Engine, Engine], vocab_size: int, pairs: int) -> Comparison:
    """Nothing shared: 64 prompts of 256 tokens, 32 new each. B / A below 1 is what the cache costs."""
    prompts = unique(vocab_size, num_prompts=64, length=256)
    trees = [TreeTime(engine.backend._core.pages.cache) for engine in engines]
    cached, plain = (Workload(engine, prompts, 32) for engine in engines)
    shares: list[float] = []
    microseconds: dict[str, list[float]] = {}  # a request, by method

    def timed() -> None:
        tree, start = trees[0], time.process_time()
        tree.forget()
        cached()
        shares.append(tree.seconds / (time.process_time() - start))
        for name in tree.of:
            microseconds.setdefault(name, []).append(tree.of[name] / 1000 / len(prompts))
        microseconds.setdefault("all", []).append(tree.seconds * 1e6 / len(prompts))

    def notes() -> Mapping[str, float]:
        share = {"% of the time in the tree": 100 * statistics.median(shares)}
        return share | {f"us a request, {name}": statistics.median(told) for name, told in microseconds.items()}

    return compare(
        "W13",
        "64 x 256 unique, 32 new",
        ("cache on", timed),
        ("cache off", plain),
        aim=">= 1 / 1.003",
        pairs=pairs,
        notes=notes,
        clock=time.process_time,
    )


class Rotating:
    """Long prompts in turn, one new token each, in a pool that holds one: each has left before it returns."""

    NUM_PROMPTS = 4

    def __init__(self, engine: Engine, vocab_size: int, length: int) -> None:
        self._engine = engine
        self._prompts = itertools.cycle(unique(vocab_size, num_prompts=self.NUM_PROMPTS, length=length))
        for _ in range(self.NUM_PROMPTS):
            self()

    def __call__(self) -> None:
        params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        self._engine.generate(input_ids=next(self._prompts), sampling_params=params)


def w18(vocab_size: int, pairs: int) -> Iterator[Comparison]:
    """A prefix of 2,048 tokens that was evicted: the time to the first token, fetched or computed."""
    length, pool = 2048, 2048 + 64
    with tempfile.TemporaryDirectory() as folder, Engine(kv_tokens=pool) as computing:
        tiers: dict[str, dict[str, object]] = {"RAM": {"host_cache_bytes": 2**30}, "disk": {"disk_cache_dir": folder}}
        for name, options in tiers.items():
            with Engine(None, kv_tokens=pool, **options) as fetching:

                def notes(engine: Engine = fetching) -> Mapping[str, float]:
                    return {"tokens restored": engine.stats()["tier_restored_tokens"]}

                yield compare(
                    "W18",
                    f"{length} + 1 token, from {name}",
                    ("fetched", Rotating(fetching, vocab_size, length)),
                    ("computed", Rotating(computing, vocab_size, length)),
                    aim=">= 10" if name == "RAM" else "",
                    pairs=pairs,
                    notes=notes,
                    clock=time.process_time,
                )


ON_OFF: Mapping[str, Callable[[tuple[Engine, Engine], int, int], Comparison]] = {"w1": w1, "w13": w13}
NAMES = (*ON_OFF, "w18")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there as well")
    parser.add_argument("--pairs", type=number_of_pairs, default=MIN_PAIRS + 2)
    parser.add_argument("--only", choices=NAMES, action="append")
    parser.add_argument("--model", choices=["niwaki-tiny", *RANDOM], default="niwaki-tiny", help="of W1 and W13")
    options = parser.parse_args(argv)
    results: list[Comparison] = []
    model = model_folder(options.model)
    with Engine(model, kv_tokens=65_536) as cached, Engine(model, kv_tokens=65_536, enable_prefix_cache=False) as plain:
        vocab_size = cached.vocab_size
        for name in options.only or NAMES:
            if name == "w18":
                results += (found := list(w18(vocab_size, options.pairs)))
            else:
                results += (found := [ON_OFF[name]((cached, plain), vocab_size, options.pairs)])
            print(table(found), flush=True)
    if options.json is not None:
        write_json(options.json, results, machine())
        print(f"written to {options.json}")
    return 0


def machine() -> Mapping[str, object]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
    }


if __name__ == "__main__":
    sys.exit(main())
