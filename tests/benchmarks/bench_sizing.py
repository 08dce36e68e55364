"""How many requests pay at once, and what memory a pool takes that fills: the figures of docs/sizing.md.

    python -m tests.benchmarks.bench_sizing --model niwaki-tiny

So many requests come at once, each with PROMPT tokens of its own and NEW to generate. The engine alone, no server.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import numpy as np
import psutil

from niwaki.runtime.api import SamplingParams
from niwaki.runtime.engine import Engine
from tests.benchmarks.shapes import RANDOM, model_folder

AT_ONCE = (1, 4, 16, 64, 128)
PROMPT, NEW = 200, 64
ROUNDS = 3
POOL_TOKENS = 65_536
FIRST_ID, LAST_ID = 5, 400  # ordinary tokens of each tokenizer


def one_round(engine: Engine, batch: int, random: np.random.Generator) -> tuple[float, float]:
    """Generated tokens a second, and the seconds to the first token: the median request's."""
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    prompts = random.integers(FIRST_ID, LAST_ID, (batch, PROMPT), dtype=np.int32)
    began = time.perf_counter()
    running = [engine.backend.start(prompt, params) for prompt in prompts]
    outputs = [one.result(600)[0] for one in running]
    return batch * NEW / (time.perf_counter() - began), statistics.median(one.first_seconds for one in outputs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("niwaki-tiny", *RANDOM), default="niwaki-tiny")
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE)
    given = parser.parse_args(argv)
    random = np.random.default_rng(0)
    process = psutil.Process()
    with Engine(model_folder(given.model), kv_tokens=POOL_TOKENS) as engine:
        one_round(engine, 1, random)  # kernels are compiled
        per_token = engine.get_server_info()["kv_bytes_per_token"]
        before = process.memory_info().rss
        print(f"{given.model}: {os.cpu_count()} processors, {per_token} bytes of KV a token; medians of {ROUNDS}")
        print(f"{'at once':>7}  {'tokens/s':>8}  {'first token':>11}")
        for batch in given.at_once:
            rates, firsts = zip(*(one_round(engine, batch, random) for _ in range(ROUNDS)), strict=True)
            print(
                f"{batch:>7}  {statistics.median(rates):>8.0f}  {statistics.median(firsts) * 1e3:>8.0f} ms", flush=True
            )
        stats = engine.stats()
        written = int(stats["pages_tree"]) * 16
        grown = process.memory_info().rss - before
        print(f"the pool holds {written} tokens; the process has grown by {grown / 2**20:.0f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
