"""W14: what tree attention brings where branches share a prefix, and what looking for one costs where none is shared.

python -m tests.benchmarks.bench_tree [--json PATH] [--pairs N] [--only attention|step|engine|unshared]

Ratios are of pairs run in turn; A is tree attention, B the same engine with `tree_attention=False`. One thread,
timed by its own CPU seconds, so that a machine that does something else gives the same ratios.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from niwaki.kernels.jit import set_num_threads
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import NumbaOps
from niwaki.kernels.plan import Span, make_plan
from niwaki.kernels.shared_prefix import costs_for
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.models.config import ModelConfig
from tests.benchmarks.bench_prefix import NUM_RESERVED, SEED, Workload, few_shot, machine, unique
from tests.benchmarks.harness import Comparison, compare, number_of_pairs, table, write_json
from tests.benchmarks.shapes import SHAPES

PAGE = 16
BRANCHES = 32
OWN = 64


def tables(shared: int, own: int, seed: int = SEED) -> tuple[list[list[int]], int]:
    """Page tables of the branches on shuffled pages, and the size of the pool."""
    trunk, each = shared // PAGE, -(-own // PAGE)
    num_pages = trunk + BRANCHES * each
    pages = np.random.default_rng(seed).permutation(num_pages).tolist()
    return [[*pages[:trunk], *pages[trunk + i * each :][:each]] for i in range(BRANCHES)], num_pages


def times(count: int, action: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            action()

    return run


def attention(pairs: int) -> Iterator[Comparison]:
    """One layer's attention of one decode step, the plan apart."""
    for name, config in SHAPES.items():
        for shared in (512, 1024):
            yield one_attention(name, config, shared, pairs)


def one_attention(name: str, config: ModelConfig, shared: int, pairs: int) -> Comparison:
    heads, kv_heads, head_dim, dtype = config.num_heads, config.num_kv_heads, config.head_dim, torch.bfloat16
    rows, num_pages = tables(shared, OWN)
    spans = [Span(shared + OWN - 1, 1, pages) for pages in rows]
    tree, flat = (
        make_plan(spans, page_size=PAGE, num_pages=num_pages, costs=costs)
        for costs in (costs_for(heads, kv_heads, head_dim, PAGE, dtype), None)
    )
    generator = torch.Generator().manual_seed(SEED)
    shape = (num_pages, PAGE, kv_heads, head_dim)
    keys, values = (Operand.of(torch.randn(shape, generator=generator).to(dtype)) for _ in "kv")
    q = Operand.of(torch.randn((BRANCHES, heads, head_dim), generator=generator).to(dtype))
    out = Operand.of(torch.empty_like(q.tensor))
    ops = NumbaOps()

    def run(plan: object) -> Callable[[], None]:
        assert plan is tree or plan is flat
        return times(5, lambda: ops.attend(q, keys, values, tree if plan is tree else flat, out))

    with torch.inference_mode():
        return compare(
            "attention",
            f"{name}, {BRANCHES} x ({shared} + {OWN})",
            ("tree", run(tree)),
            ("flat", run(flat)),
            aim=">= 6" if shared == 1024 else "",
            pairs=pairs,
            clock=time.process_time,
        )


def step(pairs: int) -> Iterator[Comparison]:
    """One decode step of the model, everything but scheduling and sampling."""
    for name, config in SHAPES.items():
        rows, num_pages = tables(512, OWN)
        yield one_step("step", f"{name}, {BRANCHES} x (512 + {OWN})", config, 512, rows, num_pages, ">= 2", pairs)


def unshared(pairs: int) -> Iterator[Comparison]:
    """The same with nothing in common; then W13 through the engine."""
    for name, config in SHAPES.items():
        rows, num_pages = tables(0, 256)
        yield one_step("unshared", f"{name}, {BRANCHES} x 256", config, 192, rows, num_pages, ">= 0.98", pairs)
    with Engine() as tree, Engine(tree_attention=False) as flat:
        prompts = unique(tree.tokenizer.vocab_size, num_prompts=64, length=256)
        yield compare(
            "unshared",
            "niwaki-tiny, W13: 64 x 256, 32 new",
            ("tree", Workload(tree, prompts, 32)),
            ("flat", Workload(flat, prompts, 32)),
            aim=">= 0.98",
            pairs=pairs,
            clock=time.process_time,
        )


def one_step(
    workload: str,
    shape: str,
    config: ModelConfig,
    shared: int,
    tables_: Sequence[Sequence[int]],
    num_pages: int,
    aim: str,
    pairs: int,
) -> Comparison:
    token = np.array([NUM_RESERVED], np.int32)
    batch = [Row(token, shared + OWN - 1, pages) for pages in tables_]
    runners = [Runner.random(config, num_pages=num_pages, tree_attention=enabled) for enabled in (True, False)]
    tree, flat = (times(3, lambda runner=runner: runner.forward(batch)) for runner in runners)  # type: ignore[misc]
    return compare(workload, shape, ("tree", tree), ("flat", flat), aim=aim, pairs=pairs, clock=time.process_time)


class Branches:
    """32 requests decode behind prompts that are in the cache already: their shared part, and half of their own."""

    def __init__(self, engine: Engine, shared: int) -> None:
        self._engine = engine
        vocab_size = engine.tokenizer.vocab_size
        self._prompts = few_shot(vocab_size, num_prompts=BRANCHES, num_shared=shared, num_own=OWN // 2)
        self._params = {"temperature": 0, "max_new_tokens": OWN, "ignore_eos": True}

    def __call__(self) -> None:
        self._engine.generate(input_ids=self._prompts, sampling_params=self._params)


def engine(pairs: int) -> Iterator[Comparison]:
    """The whole engine, scheduling and sampling included: 64 new tokens for each branch, behind 32 of its own."""
    with Engine() as tree, Engine(tree_attention=False) as flat:
        for shared in (512, 1024):
            yield compare(
                "engine",
                f"niwaki-tiny, {BRANCHES} x ({shared} + {OWN})",
                ("tree", Branches(tree, shared)),
                ("flat", Branches(flat, shared)),
                aim=">= 2" if shared == 512 else "",
                pairs=pairs,
                clock=time.process_time,
            )


PARTS: Mapping[str, Callable[[int], Iterator[Comparison]]] = {
    "attention": attention,
    "step": step,
    "engine": engine,
    "unshared": unshared,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there as well")
    parser.add_argument("--pairs", type=number_of_pairs, default=15)
    parser.add_argument("--only", choices=sorted(PARTS), action="append")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    set_num_threads(1)
    results: list[Comparison] = []
    for name in options.only or PARTS:
        part = list(PARTS[name](options.pairs))
        print(table(part), flush=True)
        results += part
    if options.json is not None:
        write_json(options.json, results, machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
