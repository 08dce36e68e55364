"""W4 in small: what the scheduler promises of hit rates holds, for no clock is in it."""

from __future__ import annotations

import pytest

from tests.benchmarks.bench_agents import ANSWERED, Event, best_eviction, run


def test_interleaved_agents_over_half_a_pool_hit_as_often_as_the_best_order_would() -> None:
    best, plain = (run(policy, agents=12, turns=4, max_running=3) for policy in ("lpm", "fcfs"))
    assert best.hit_rate >= 0.97 * best.optimum
    assert best.hit_rate >= 1.5 * plain.hit_rate


@pytest.mark.parametrize("pause", [0, 30])
@pytest.mark.parametrize("eviction", ["lru", "returning", "lfu"])
def test_no_eviction_hits_more_often_than_the_one_that_knows_the_future(eviction: str, pause: int) -> None:
    found = run("lpm", agents=8, turns=4, max_running=2, eviction=eviction, pause=pause)
    assert 0 < found.hit_rate <= found.best_eviction <= found.optimum


def test_agents_that_pause_for_longer_than_the_pool_lasts_find_some_of_their_text() -> None:
    lru, returning = (run("lpm", eviction=name, pause=50) for name in ("lru", "returning"))
    assert returning.hit_rate >= 2 * lru.hit_rate
    lru, returning = (run("lpm", eviction=name) for name in ("lru", "returning"))
    assert returning.hit_rate >= 0.99 * lru.hit_rate, "nothing is lost where they do not pause"


def test_what_is_needed_last_leaves_first_and_from_its_end() -> None:
    known = 100 + ANSWERED - 1  # of an agent that was answered once
    order = [("a", 100), ("b", 100), ("c", 100), ("a", 200), ("b", 200)]
    in_turn = [Event(ord(name), size, is_end) for name, size in order for is_end in (False, True)]
    assert best_eviction(in_turn, 10**6) == 2 * known / 700
    # For the 100 tokens of "c" 55 of "b" go; for the second turn of "a" then "c", which never returns.
    assert best_eviction(in_turn, 2 * known + 45) == pytest.approx((2 * known - 55) / 700)


def test_what_runs_leaves_no_room_for_what_does_not() -> None:
    known = 100 + ANSWERED - 1
    alone = [Event(1, 100, is_answered=False), Event(1, 100, is_answered=True)]
    beside = [Event(2, 150, is_answered=False), Event(1, 200, is_answered=False)]
    assert best_eviction([*alone, *beside], known + 150) == known / 450
    assert best_eviction([*alone, *beside], known + 110) == (known - 40) / 450
