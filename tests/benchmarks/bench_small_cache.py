"""What a cache of 8 bits brings and costs: bytes of a token, the time of a step, the bundled model's scores.

    python -m tests.benchmarks.bench_small_cache [--shapes L15 L60] [--kinds auto int8 fp8] [--trials 100]

A step is one token of each of ROWS requests behind contexts of their own, or STEP tokens of one prompt behind such a
context; the kinds take turns, and the median counts. Scores as in `make eval`, in bfloat16; 0 trials leave them out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import numpy as np

from niwaki.runtime.forward.runner import Row, Runner
from tests.benchmarks.bench_weights import medians, scores_of, step_of
from tests.benchmarks.shapes import RANDOM

KINDS = ("auto", "int8", "fp8")
ROWS = 16
STEP = 256
CONTEXTS = (256, 1024, 4096 - STEP)
PAGE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["L15", "L60"], choices=tuple(RANDOM))
    parser.add_argument("--trials", type=int, default=100, help="a task")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    options = parser.parse_args()
    for shape in options.shapes:
        print_steps(shape, options.kinds)
    for kind in options.kinds if options.trials else ():
        scores = scores_of({"kv_dtype": kind}, options.trials)
        mean = statistics.mean(scores.values())
        print(f"{kind:<6} mean {mean:.1%}  " + "  ".join(f"{task} {score:.1%}" for task, score in scores.items()))


def print_steps(shape: str, kinds: Sequence[str]) -> None:
    """A line for each kind: bytes of a token, and the milliseconds of each step."""
    pages = -(-(max(CONTEXTS) + STEP) // PAGE)
    runners = {kind: Runner.random(RANDOM[shape], kv_dtype=kind, num_pages=ROWS * pages) for kind in kinds}
    # Pages in random order, as in a pool that has been used for a while.
    tables = np.random.default_rng(0).permutation(ROWS * pages).astype(np.int32).reshape(ROWS, pages)
    print(f"{shape:<6} bytes a token" + "".join(f"{f'{ROWS} x {c}':>12}{f'{STEP} at {c}':>14}" for c in CONTEXTS))
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for context in CONTEXTS:
        decoding = [Row(np.array([row], np.int32), context, tables[row]) for row in range(ROWS)]
        prompt = [Row(np.arange(STEP, dtype=np.int32), context, tables[0])]
        for rows in (decoding, prompt):
            for kind, seconds in medians({kind: step_of(made, rows) for kind, made in runners.items()}).items():
                times[kind].append(1000 * seconds)
    for kind, made in runners.items():
        pairs = zip(times[kind][::2], times[kind][1::2], strict=True)
        steps = "".join(f"{one:>12.2f}{many:>14.2f}" for one, many in pairs)
        print(f"{kind:<6} {made.kv_bytes_per_token:>13}{steps}", flush=True)


if __name__ == "__main__":
    main()
