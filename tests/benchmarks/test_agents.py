"""W4 in small: what the scheduler promises of hit rates holds, for no clock is in it."""

from __future__ import annotations

from tests.benchmarks.bench_agents import run


def test_interleaved_agents_over_half_a_pool_hit_as_often_as_the_best_order_would() -> None:
    best, plain = (run(policy, agents=12, turns=4, max_running=3) for policy in ("lpm", "fcfs"))
    assert best.hit_rate >= 0.97 * best.optimum
    assert best.hit_rate >= 1.5 * plain.hit_rate
