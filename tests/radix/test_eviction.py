"""Eviction policies: who leaves first, whatever the order in which things were used."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from niwaki.radix import Cache, TokenIds
from niwaki.radix.eviction import EVICTIONS, HIGHEST_PRIORITY, MOST, STAMP_BITS
from niwaki.radix.tree import Node

PAGE = 4


def prompt(number: int) -> TokenIds:
    """One page that shares nothing with other numbers."""
    return np.full(PAGE, number, np.int32)


def use(cache: Cache, number: int, priority: int = 0) -> None:
    lease = cache.acquire(prompt(number), room_for=PAGE, priority=priority)
    assert lease is not None
    cache.release(lease, prompt(number), PAGE)


def order_of_leaving(cache: Cache, numbers: list[int]) -> list[int]:
    """Evict page by page and tell who is gone each time."""
    left, gone = list(numbers), []
    while left:
        cache._evict(1)
        missing = [number for number in left if not cache.match(prompt(number))]
        assert len(missing) == 1
        gone += missing
        left.remove(missing[0])
    return gone


@pytest.mark.parametrize("seed", range(5))
def test_each_policy_evicts_in_the_order_that_its_name_says(seed: int) -> None:
    rng = random.Random(seed)
    uses = [(rng.randrange(8), rng.randint(-2, 2)) for _ in range(60)]
    last: dict[int, int] = {}
    highest: dict[int, int] = {}
    hits = dict.fromkeys(range(8), 0)
    for time, (number, priority) in enumerate(uses):
        hits[number] += number in last  # the first use is no hit: it writes
        last[number] = time
        highest[number] = max(priority, highest.get(number, priority))
    numbers = sorted(last)
    keys: dict[str, Callable[[int], tuple[int, ...]]] = {
        "lru": lambda number: (last[number],),
        "lfu": lambda number: (hits[number], last[number]),
        "priority": lambda number: (highest[number], last[number]),
    }
    for policy, key in keys.items():
        cache = Cache(8, PAGE, eviction=policy)
        for number, priority in uses:
            use(cache, number, priority)
        assert order_of_leaving(cache, numbers) == sorted(numbers, key=key), policy


@pytest.mark.parametrize("policy", EVICTIONS)
def test_a_prompt_outlives_the_outputs_below_it(policy: str) -> None:
    cache = Cache(8, PAGE, eviction=policy)
    shared = prompt(1)
    for number in (2, 3):
        ids = np.concatenate([shared, prompt(number)])
        lease = cache.acquire(ids, room_for=len(ids), priority=number)
        assert lease is not None
        cache.release(lease, ids, len(ids))
    for _ in range(2):
        assert cache.match(shared) == PAGE
        cache._evict(1)
    assert cache.match(shared) == PAGE
    cache._evict(1)
    assert cache.match(shared) == 0


def test_ranks_stay_below_the_rank_of_pinned_leaves() -> None:
    node = Node(b"", b"", [], None, (1 << STAMP_BITS) - 1)
    node.hits = 1 << 40
    for priority in (-(10**9), 0, HIGHEST_PRIORITY, 10**9):
        node.priority = priority
        for reached in (0, MOST - 1):
            assert all(0 < make()(node, reached) < MOST for make in EVICTIONS.values())


@pytest.mark.parametrize("is_pinned", [True, False])
def test_what_was_asked_for_often_once_makes_way_in_the_end(*, is_pinned: bool) -> None:
    cache = Cache(4, PAGE, eviction="lfu")
    for _ in range(10):
        use(cache, 0)
    pins = [cache.pin(prompt(0))] if is_pinned else []
    for number in range(1, 40):
        if number == 6:
            assert cache.match(prompt(0)) == PAGE, "it outlives what was asked for once, or twice"
        use(cache, number)
        if number % 2:
            use(cache, number)
        pins += [cache.pin(prompt(number))] if is_pinned else []
    assert cache.match(prompt(0)) == 0
    for pin in pins:
        cache.unpin(pin)
    cache.check()


@pytest.mark.parametrize("policy", ["lru", "returning", "lfu", "priority"])
def test_a_text_that_leaves_page_by_page_leaves_whole_before_the_next_one_in_line(policy: str) -> None:
    cache = Cache(40, PAGE, eviction=policy)
    long = np.arange(30 * PAGE, dtype=np.int32)
    lease = cache.acquire(long, room_for=len(long))
    assert lease is not None
    cache.release(lease, long, len(long))
    for number in (100, 100, 100, 200):
        use(cache, number, priority=1)
    for left in range(30, 0, -1):
        assert cache.match(long) == left * PAGE, "it was never asked for again"
        cache._evict(1)
    assert cache.match(long) == 0
    assert cache.match(prompt(100)) == cache.match(prompt(200)) == PAGE
    cache.check()


def test_new_texts_find_room_beside_those_that_are_done() -> None:
    """Three talks at once of four turns each, again and again, in a pool of six talks that keeps what was said."""
    hits = 0
    cache = Cache(24, PAGE, eviction="lfu")
    for talk in range(0, 60, 3):
        for turn in range(1, 5):
            for number in range(talk, talk + 3):
                ids = np.concatenate([prompt(100 * number + page) for page in range(turn)])
                lease = cache.acquire(ids, room_for=len(ids))
                assert lease is not None
                hits += lease.num_cached // PAGE
                cache.release(lease, ids, len(ids))
    asked = 60 * (1 + 2 + 3)  # pages that a turn before has computed
    assert hits >= 0.5 * asked


def test_a_timed_pin_ends_at_its_time_and_not_before() -> None:
    cache = Cache(2, PAGE)
    use(cache, 1)
    pin = cache.pin(prompt(1), until=10.0)
    copy = cache.pin(prompt(1), until=10.0)
    use(cache, 2)
    use(cache, 1)
    cache.check()
    assert cache.expire(9.9) == 0
    cache._evict(1)
    assert (cache.match(prompt(1)), cache.match(prompt(2))) == (PAGE, 0), "the pinned one stays, though older"
    cache.unpin(copy)
    assert cache.expire(10.0) == 1
    assert cache.stats().pins == 0
    cache.check()
    with pytest.raises(ValueError, match="the pin is closed"):
        cache.unpin(pin)


def test_a_policy_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="eviction must be one of lru, returning, lfu, priority, got 'fifo'"):
        Cache(8, eviction="fifo")


def test_a_leaf_that_is_used_again_goes_to_the_end_of_the_queue_and_evicting_sorts_nothing() -> None:
    cache = Cache(8, PAGE)
    for number in (1, 2, 3, 1, 2):
        use(cache, number)
    assert order_of_leaving(cache, [1, 2, 3]) == [3, 1, 2]
    assert cache._tree._line.num_apart == 0


def test_what_is_flushed_is_not_told_as_evicted_and_what_leaves_later_is() -> None:
    told: list[tuple[str, TokenIds]] = []
    cache = Cache(2, PAGE, on_evict=lambda namespace, ids, first, pages: told.append((namespace, ids)))
    use(cache, 1)
    assert cache.flush()
    assert told == []
    for number in (2, 3, 4):
        use(cache, number)
    assert [(namespace, ids.tolist()) for namespace, ids in told] == [("", prompt(2).tolist())]
