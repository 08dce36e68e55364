"""What `deterministic=True` costs: prompts, and decoding, against the same engine without it.

python -m tests.benchmarks.bench_deterministic [--json PATH] [--pairs N]

A is the engine without it, so the ratio says how many times as long it takes with it. CPU seconds, one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from niwaki.kernels.jit import set_num_threads
from niwaki.runtime.engine import Engine
from tests.benchmarks.bench_prefix import Workload, few_shot, machine, unique
from tests.benchmarks.harness import MIN_PAIRS, compare, table, write_json


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there as well")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    options = parser.parse_args(argv)
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
