"""What `deterministic=True` costs: prompts, and decoding, against the same engine without it.

python -m tests.benchmarks.bench_deterministic [--json PATH] [--pairs N]
python -m tests.benchmarks.bench_deterministic --differ    # how many answers are others in a batch than alone

A is the engine without it, so the ratio says how many times as long it takes with it. CPU seconds, one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from niwaki.kernels.jit import set_num_threads
from niwaki.runtime.api import Segment
from niwaki.runtime.bundled.trials import trials
from niwaki.runtime.engine import Engine
from tests.benchmarks.bench_prefix import SEED, Workload, few_shot, machine, unique
from tests.benchmarks.harness import MIN_PAIRS, compare, number_of_pairs, table, write_json

NUM_ASKED = 200
MODES: Mapping[str, Mapping[str, object]] = {
    "as it is": {},
    "dtype float32": {"dtype": "float32"},
    "deterministic": {"deterministic": True},
}


def differing(count: int) -> str:
    """For each mode and temperature: of `count` answers of 32 tokens, those that are others in a batch than alone."""
    prompts = [trial.checks[0][0] for trial in trials("extraction", count, SEED)]
    lines = []
    for mode, options in MODES.items():
        with Engine(None, kv_tokens=65_536, **options) as engine:
            asked = [engine.tokenizer.encode([Segment(prompt, control=True)]) for prompt in prompts]
            for temperature in (0, 1):
                params: list[dict[str, object]] = [
                    {"temperature": temperature, "seed": seed, "max_new_tokens": 32, "ignore_eos": True}
                    for seed in range(count)
                ]
                alone = [_ids(engine, [ids], [said])[0] for ids, said in zip(asked, params, strict=True)]
                engine.flush_cache()
                batch = _ids(engine, asked, params)
                differ = sum(one != other for one, other in zip(alone, batch, strict=True))
                lines.append(f"{mode:14}  temperature {temperature}: {differ} of {count} answers differ")
    return "\n".join(lines)


def _ids(engine: Engine, prompts: list[list[int]], params: list[dict[str, object]]) -> list[list[int]]:
    answers = engine.generate(input_ids=prompts, sampling_params=params)
    assert isinstance(answers, list)
    return [answer["output_ids"] for answer in answers]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there as well")
    parser.add_argument("--pairs", type=number_of_pairs, default=MIN_PAIRS)
    parser.add_argument("--differ", action="store_true", help="count answers that hang on the batch, and time nothing")
    options = parser.parse_args(argv)
    if options.differ:
        print(differing(NUM_ASKED))
        return 0
    torch.set_num_threads(1)
    set_num_threads(1)
    results = []
    with Engine(kv_tokens=16_384) as plain, Engine(kv_tokens=16_384, deterministic=True) as fixed:
        vocab_size = plain.tokenizer.vocab_size
        for shape, prompts, num_new in (
            ("4 prompts of 256", unique(vocab_size, num_prompts=4, length=256), 1),
            ("1 x 16, 32 new", unique(vocab_size, num_prompts=1, length=16), 32),
            ("32 x 64, 16 new", unique(vocab_size, num_prompts=32, length=64), 16),
            ("1 prompt of 2,048", unique(vocab_size, num_prompts=1, length=2048), 1),
            ("32 x (512 shared + 8), 16 new", few_shot(vocab_size, num_prompts=32, num_shared=512, num_own=8), 16),
        ):
            results.append(
                compare(
                    "deterministic",
                    shape,
                    ("off", Workload(plain, prompts, num_new)),
                    ("on", Workload(fixed, prompts, num_new)),
                    aim="",
                    pairs=options.pairs,
                    clock=time.process_time,
                )
            )
            print(table(results[-1:]), flush=True)
    if options.json is not None:
        write_json(options.json, results, machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
