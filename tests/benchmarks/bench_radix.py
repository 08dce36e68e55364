"""Prints what the radix cache costs: microseconds per match, insert, evicted node, and per step of a decoding request.

Run it as `python tests/benchmarks/bench_radix.py [--nodes 100000] [--json PATH]`. Goals, at 100,000 nodes and 10
million tokens: match at most 1 us + 1 us per 64 tokens, insert at most 5 us, evict at most 2 us a node. What is told is
the median over groups of some calls each, in CPU time, so that other processes disturb less.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from niwaki.radix import Cache, Lease, TokenIds

PAGE_SIZE = 16
LEAF = 7 * PAGE_SIZE  # tokens: 100,000 leaves have 11 million
GROUP = 20  # calls that are timed at once: to look at the clock takes as long as one


@dataclass(frozen=True, slots=True)
class Measurement:
    name: str
    microseconds: float
    goal: float | None  # microseconds


def measure(actions: Iterable[Callable[[], object]], per_action: int = 1) -> float:
    """Median microseconds of an action, or of one of the `per_action` things that it does. The garbage collector is out
    of the way."""
    todo = list(actions)
    times: list[float] = []
    gc.disable()
    for first in range(0, len(todo), GROUP):
        group = todo[first : first + GROUP]
        start = time.process_time()
        for action in group:
            action()
        times.append((time.process_time() - start) / len(group))
    gc.enable()
    return statistics.median(times) / per_action * 1e6


def insert(cache: Cache, ids: TokenIds) -> None:
    lease = cache.acquire(ids, room_for=len(ids))
    assert lease is not None
    cache.release(lease, ids, len(ids))


def wide_tree(num_nodes: int, rng: np.random.Generator) -> tuple[Cache, TokenIds]:
    """`num_nodes` prompts that have nothing in common: all of them children of the root."""
    num_pages = (num_nodes + 4000) * LEAF // PAGE_SIZE + 60_000  # what is measured must evict nothing by itself
    cache = Cache(num_pages, PAGE_SIZE)
    prompts = rng.integers(0, 32_000, (num_nodes, LEAF), dtype=np.int32)
    for prompt in prompts:
        insert(cache, prompt)
    return cache, prompts


def deep_tree(num_nodes: int, rng: np.random.Generator) -> tuple[Cache, list[TokenIds]]:
    """Conversations: 100 system prompts, under each a tree of turns."""
    cache = Cache(2 * num_nodes * LEAF // PAGE_SIZE, PAGE_SIZE)
    paths: list[TokenIds] = [rng.integers(0, 32_000, 256, dtype=np.int32) for _ in range(100)]
    for path in paths:
        insert(cache, path)
    while cache.stats().tree_nodes < num_nodes:
        old = paths[int(rng.integers(len(paths)))]
        turn = rng.integers(0, 32_000, int(rng.integers(LEAF // 2, LEAF * 3 // 2)), dtype=np.int32)
        path = np.concatenate([old, turn])
        insert(cache, path)
        paths.append(path)
    return cache, paths


def match_costs(num_nodes: int, rng: np.random.Generator) -> list[Measurement]:
    cache, _ = wide_tree(num_nodes, rng)
    measured = []
    for size in (64, 512, 4096):
        prompts = [rng.integers(0, 32_000, size, dtype=np.int32) for _ in range(200)]
        for prompt in prompts:
            insert(cache, prompt)
        cost = measure([partial(cache.match, prompt) for prompt in prompts] * 20)
        measured.append(Measurement(f"match, hit of {size} tokens, wide tree", cost, 1 + size / 64))
    misses = list(rng.integers(0, 32_000, (4000, 64), dtype=np.int32))
    cost = measure([partial(cache.match, prompt) for prompt in misses])
    measured.append(Measurement("match, miss, wide tree", cost, 2.0))
    return measured


def deep_match_cost(num_nodes: int, rng: np.random.Generator) -> list[Measurement]:
    cache, paths = deep_tree(num_nodes, rng)
    chosen = [paths[int(i)] for i in rng.integers(0, len(paths), 2000)]
    size = sum(len(path) for path in chosen) / len(chosen)
    cost = measure([partial(cache.match, path) for path in chosen])
    return [Measurement(f"match, hit of {size:.0f} tokens on average, deep tree", cost, 1 + size / 64)]


def insert_and_evict_costs(num_nodes: int, rng: np.random.Generator) -> list[Measurement]:
    cache, _ = wide_tree(num_nodes, rng)
    prompts = list(rng.integers(0, 32_000, (4000, LEAF), dtype=np.int32))
    leases = [cache.acquire(prompt, room_for=len(prompt)) for prompt in prompts]
    held: list[tuple[Lease, TokenIds]] = [
        (lease, prompt) for lease, prompt in zip(leases, prompts, strict=True) if lease is not None
    ]
    assert len(held) == len(prompts)
    committed = measure([partial(cache.commit, lease, ids, len(ids)) for lease, ids in held])
    released = measure([partial(cache.release, lease, ids, len(ids)) for lease, ids in held])
    before = cache.stats().tree_nodes
    one, many = LEAF // PAGE_SIZE, 32
    singly = measure([lambda: cache._evict(one)] * 4000)
    together = measure([lambda: cache._evict(many * one)] * (num_nodes // 2 // many), many)
    assert before - cache.stats().tree_nodes == 4000 + num_nodes // 2 // many * many
    return [
        Measurement(f"insert a leaf of {LEAF} tokens (commit), wide tree", committed, 5.0),
        Measurement("release, all committed", released, None),
        Measurement("evict a leaf by itself, wide tree", singly, 2.0),
        Measurement(f"evict a leaf of {many} at once, wide tree", together, 2.0),
    ]


def request_costs(num_nodes: int, rng: np.random.Generator) -> list[Measurement]:
    cache, paths = deep_tree(num_nodes, rng)
    prompt = np.concatenate([paths[-1], rng.integers(0, 32_000, 400, dtype=np.int32)])
    lease = cache.acquire(prompt)
    assert lease is not None
    steps = range(lease.num_cached + 1, len(prompt) + 1)

    def decode(stop: int) -> None:
        cache.reserve(lease, stop)
        cache.commit(lease, prompt, stop)

    decoded = measure([partial(decode, stop) for stop in steps])
    cache.release(lease, prompt, len(prompt))
    chosen = [paths[int(i)] for i in rng.integers(0, len(paths), 2000)]
    cycles = measure([partial(insert, cache, path) for path in chosen])
    return [
        Measurement("reserve + commit of one decoded token", decoded, None),
        Measurement("acquire + release of a cached conversation", cycles, None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=100_000, help="nodes in the tree")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    measured: list[Measurement] = []
    for part in (match_costs, deep_match_cost, insert_and_evict_costs, request_costs):
        measured += part(arguments.nodes, np.random.default_rng(0))
    print(f"{'microseconds':>12}  {'goal':>6}  with {arguments.nodes} nodes in the tree")
    for one in measured:
        goal = "" if one.goal is None else f"{one.goal:.1f}"
        missed = " (missed)" if one.goal is not None and one.microseconds > one.goal else ""
        print(f"{one.microseconds:12.2f}  {goal:>6}  {one.name}{missed}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"nodes": arguments.nodes, "rows": [asdict(one) for one in measured]}))


if __name__ == "__main__":
    main()
