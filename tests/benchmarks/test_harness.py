"""The harness compares what it says it compares, and its workloads share what they say they share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from niwaki.runtime.engine import Engine
from tests.benchmarks.bench_host import measure
from tests.benchmarks.bench_prefix import Workload, few_shot, unique
from tests.benchmarks.harness import compare, number_of_pairs, table, write_json
from tests.benchmarks.peers.workloads import BRANCHING, serial, waves_of


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    with Engine(kv_tokens=4096) as cached, Engine(kv_tokens=4096, enable_prefix_cache=False) as plain:
        yield cached, plain


@pytest.mark.parametrize("text", ["4", "0", "-7", "x", ""])
def test_too_few_pairs_are_refused_on_the_command_line(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at least 5 pairs"):
        number_of_pairs(text)
    assert number_of_pairs("5") == 5


def test_a_comparison_alternates_and_takes_the_median_of_the_pairs() -> None:
    clock = 0.0
    order: list[str] = []
    durations = {"a": iter([9, 1, 1, 1, 1, 1]), "b": iter([9, 2, 3, 4, 5, 60])}  # the first is the warm-up

    def run(name: str) -> None:
        nonlocal clock
        order.append(name)
        clock += next(durations[name])

    sides = ("A", lambda: run("a")), ("B", lambda: run("b"))
    result = compare("W0", "shape", *sides, aim="none", pairs=5, clock=lambda: clock)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab" + "ba" + "ab"
    assert (result.ratio, result.low, result.high) == (4, 2, 60)
    assert (result.seconds_a, result.seconds_b) == (1, 4)


def test_a_result_is_printed_and_written(tmp_path: Path) -> None:
    result = compare("W0", "shape", ("A", lambda: None), ("B", lambda: None), aim="2", notes=lambda: {"hits": 3.0})
    assert "W0" in table([result])
    assert "hits 3" in table([result])
    write_json(tmp_path / "new" / "bench.json", [result], {"cpus": 2})
    written = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert written["results"][0]["pairs"] == 5
    assert written["machine"] == {"cpus": 2}


def test_the_shared_prompts_share_and_the_unique_ones_do_not() -> None:
    shared = few_shot(2000, num_prompts=5, num_shared=64, num_own=8)
    assert len({tuple(prompt[:64]) for prompt in shared}) == 1
    assert len({tuple(prompt[64:]) for prompt in shared}) == 5
    assert len({prompt[0] for prompt in unique(2000, num_prompts=20, length=4)}) > 10


def test_the_cache_computes_a_shared_prefix_once_and_without_it_every_time(engines: tuple[Engine, Engine]) -> None:
    prompts = few_shot(1000, num_prompts=6, num_shared=128, num_own=8)
    cached, plain = (Workload(engine, prompts, 1) for engine in engines)
    for _ in range(2):  # the second run finds an empty cache again
        cached()
        plain()
        assert plain.counts["prefilled_tokens"] == 6 * (128 + 8)
        assert cached.counts["prefilled_tokens"] <= 128 + 6 * 8 + 16
        assert cached.counts["prefilled_tokens"] + cached.counts["cached_tokens"] == 6 * (128 + 8)


def test_branches_in_turn_are_the_same_requests_and_never_two_of_one_program() -> None:
    for name in BRANCHING:
        waves = waves_of([name], 1000)[name]
        in_turn = serial(name, waves)
        assert len(in_turn) > len(waves)
        assert sorted(request for wave in in_turn for request in wave) == sorted(
            request for wave in waves for request in wave
        )
        shared = min(len(ids) for wave in waves for ids, _ in wave) // 2
        for wave in in_turn:
            trunks = [tuple(ids[:shared]) for ids, _ in wave]
            assert len(set(trunks)) == len(trunks) or name == "W2", name  # of W2 all questions share their head
    waves = waves_of(["W13"], 1000)["W13"]
    assert serial("W13", waves) == waves


def test_the_parts_of_the_hosts_step_are_all_found_and_add_up_to_it() -> None:
    for batch in (1, 4):
        told = measure(batch)
        assert all(microseconds >= 0 for microseconds in told.parts.values())
        assert 0 < told.total < 1.5 * sum(told.parts.values())
        assert told.parts["sample"] > 0, "the draw is looked at by itself"
