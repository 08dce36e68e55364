"""Many more clients than places, in small: how long each kind of them waits, in steps."""

from __future__ import annotations

from statistics import fmean

from niwaki.runtime.loop.scheduler import Policy
from tests.benchmarks.bench_waiting import Outcome, simulated


def small(policy: Policy, pool_tokens: int) -> Outcome:
    return simulated(policy, pool_tokens, clients=60, places=18, steps=900)


def test_with_room_for_all_nobody_waits_longer_than_in_order_of_arrival_and_nothing_more_is_computed() -> None:
    found, by_arrival = small("lpm", 60_000), small("fcfs", 60_000)
    for kind, waits in found.waits.items():
        assert max(waits) <= 1.1 * max(by_arrival.waits[kind]), kind
    assert found.hit_rate >= 0.99 * by_arrival.hit_rate > 0.9


def test_in_a_short_pool_cached_texts_are_found_and_nobody_waits_for_many_times_as_long_as_the_others() -> None:
    found, by_arrival = small("lpm", 10_000), small("fcfs", 10_000)
    assert found.hit_rate >= 1.5 * by_arrival.hit_rate
    for kind, waits in found.waits.items():
        assert len(waits) > 30, f"{kind} starves"
        assert max(waits) <= 4 * fmean(found.all_waits), kind
