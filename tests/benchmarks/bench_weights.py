"""What weights in few bits bring and cost: memory, the time of a step, the bundled model's scores.

    python -m tests.benchmarks.bench_weights [--shapes L60 L300] [--trials 100] [--kinds auto int8 int4 fp8]

A step is one token of each of 1, 8 and 32 requests with short contexts, or 256 tokens of one prompt; the kinds take
turns, and the median of ROUNDS counts. Scores as in `make eval`, in bfloat16; 0 trials leave them out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.bundled.evaluate import Marker
from niwaki.runtime.bundled.trials import BEYOND, TRIALS
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.options.config import WEIGHTS
from tests.benchmarks.shapes import RANDOM

ROUNDS = 9
CONTEXT = 32  # tokens that are cached before a step
PROMPT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["L60", "L300"], choices=tuple(RANDOM))
    parser.add_argument("--kinds", nargs="*", default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--trials", type=int, default=100, help="a task")
    options = parser.parse_args()
    for shape in options.shapes:
        print_steps(shape, options.kinds)
    if options.trials:
        for kind in options.kinds:
            scores = scores_of({"weights": kind}, options.trials)
            mean = statistics.mean(scores.values())
            print(f"{kind:<6} mean {mean:.1%}  " + "  ".join(f"{task} {score:.1%}" for task, score in scores.items()))


def print_steps(shape: str, kinds: Sequence[str]) -> None:
    """A line for each kind: MB of all tensors, and the milliseconds of each step."""
    runners: dict[str, Runner] = {}
    sizes: dict[str, int] = {}
    for kind in kinds:
        before = bytes_of_tensors()
        runners[kind] = Runner.random(RANDOM[shape], weights=kind, num_pages=128)
        sizes[kind] = bytes_of_tensors() - before
    steps = {f"{rows} rows": decoding(rows) for rows in (1, 8, 32)} | {f"{PROMPT} tokens": [prompt()]}
    print(f"{shape:<6} {'MB':>7}" + "".join(f"{name:>12}" for name in steps))
    times = {
        name: medians({kind: step_of(runner, rows) for kind, runner in runners.items()}) for name, rows in steps.items()
    }
    for kind in kinds:
        milliseconds = "".join(f"{1000 * times[name][kind]:>12.2f}" for name in steps)
        print(f"{kind:<6} {sizes[kind] / 1e6:>7.0f}{milliseconds}", flush=True)


def decoding(rows: int) -> list[Row]:
    pages = -(-(CONTEXT + 1) // 16)
    return [Row(np.array([row], np.int32), CONTEXT, range(row * pages, row * pages + pages)) for row in range(rows)]


def prompt() -> Row:
    return Row(np.arange(PROMPT, dtype=np.int32), 0, range(PROMPT // 16))


def step_of(runner: Runner, rows: list[Row]) -> Callable[[], object]:
    return lambda: runner.forward(rows)


def medians(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each, run in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def bytes_of_tensors() -> int:
    """Of all tensors that there are, each piece of memory once."""
    gc.collect()
    storages = (found.untyped_storage() for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def scores_of(engine_options: Mapping[str, object], trials: int) -> dict[str, float]:
    with Engine(MODEL_DIR, dtype="bfloat16", kv_tokens=65_536, **engine_options) as engine:

        def complete(prompts: Sequence[list[int]], budgets: Sequence[int]) -> list[list[int]]:
            sampling = [{"temperature": 0, "max_new_tokens": budget} for budget in budgets]
            results = engine.generate(input_ids=list(prompts), sampling_params=sampling)
            assert isinstance(results, list)
            return [[int(token) for token in result["output_ids"]] for result in results]

        marker = Marker(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), complete)
        asked = TRIALS | dict.fromkeys(BEYOND, 0.0)
        return {task: marker.row(task, least, trials, 1000).score for task, least in asked.items()}


if __name__ == "__main__":
    main()
