"""Which replica a request goes to: to its prefix, while that is worth waiting for. Caches without a model, no Ray."""

from __future__ import annotations

import random

import numpy as np

from niwaki.radix import Cache, TokenIds
from niwaki.radix.summary import marks_of
from niwaki.runtime.replicas.routing import RECENT, REQUEST_TOKENS, Routing

LONG = marks_of(np.arange(512, dtype=np.int32))  # 512 tokens: eight requests' worth


def routing(*names: str) -> Routing:
    made = Routing()
    made.stand(names)
    return made


def test_a_request_follows_the_longest_prefix_that_a_summary_tells_of() -> None:
    two = routing("a", "b")
    two.hold("a", LONG[:4])
    two.hold("b", LONG[:9])
    assert two.ranked(LONG) == ["b", "a"]
    assert two.ranked(LONG[:4])[0] == "a"  # both have it all; the one that holds less has more room


def test_only_those_are_chosen_among_who_are_to_be_had_and_maybe_nobody() -> None:
    two = routing("a", "b")
    two.hold("b", LONG)
    assert two.choose({"a", "b"}, LONG) == ["b", "a"]
    assert two.choose({"a"}, LONG) == ["a"]
    assert two.ranked(LONG)[0] == "a", "which is taken to have it, too, and has more room"
    assert two.choose({"c", "a"}, LONG) == ["a", "c"], "the new one comes last"
    assert two.choose({"c"}, LONG) == ["c"]
    assert two.choose((), LONG) == []
    assert routing().choose((), ()) == []


def test_what_was_just_sent_counts_until_a_later_summary_could_have_told_of_it() -> None:
    two = routing("a", "b")
    two.send("b", LONG)
    assert two.ranked(LONG)[0] == "b"
    two.hold("b", [])  # made before the request was computed
    assert two.ranked(LONG)[0] == "b"
    two.hold("b", [])  # by now it would be there
    assert two.ranked(LONG)[0] == "a"


def test_new_prefixes_are_spread_and_stay_where_they_are() -> None:
    two = routing("a", "b")
    prompts = [marks_of(np.arange(first, first + 512, dtype=np.int32)) for first in range(0, 8000, 1000)]
    at = []
    for marks in prompts:
        at.append(two.ranked(marks)[0])
        two.send(at[-1], marks)
    assert sorted(at) == ["a"] * 4 + ["b"] * 4
    assert [two.ranked(marks)[0] for marks in prompts] == at


def test_a_prefix_is_left_where_too_many_wait_for_it() -> None:
    two = routing("a", "b")
    two.hold("a", LONG)
    for number in range(512 // REQUEST_TOKENS):
        assert two.ranked(LONG)[0] == "a"
        two.begin("a", str(number))
    two.begin("a", "one more")
    assert two.ranked(LONG)[0] == "b"
    two.end("a", "0")
    two.end("a", "1")
    assert two.ranked(LONG)[0] == "a"


def test_new_prefixes_are_spread_whoever_is_busy_at_the_moment() -> None:
    two = routing("a", "b")
    prompts = [marks_of(np.arange(first, first + 512, dtype=np.int32)) for first in range(0, 8000, 1000)]
    at = []
    for number, marks in enumerate([*prompts[:4], prompts[0], *prompts[4:]]):
        at.append(two.ranked(marks)[0])
        two.send(at[-1], marks)
        two.begin(at[-1], str(number), marks)
        for past in range(number - 1):  # it is told late that a request is over
            two.end("a", str(past))
            two.end("b", str(past))
    assert at[4] == at[0]
    assert sorted(at[:4] + at[5:]) == ["a"] * 4 + ["b"] * 4


def test_who_has_used_most_lately_counts_for_so_many_requests_only() -> None:
    two = routing("a", "b")
    two.begin("a", "0", LONG)
    two.end("a", "0")
    other = marks_of(np.arange(1000, 1512, dtype=np.int32))
    assert two.ranked(other)[0] == "b"
    for number in range(RECENT):
        two.begin("b", str(number), other[:1])
        two.end("b", str(number))
    assert two.ranked(marks_of(np.arange(2000, 2512, dtype=np.int32)))[0] == "a"


def test_a_replica_that_is_gone_is_forgotten_and_a_new_one_begins_empty() -> None:
    two = routing("a", "b")
    two.hold("a", LONG)
    two.begin("a", "x")
    two.stand(["b", "c"])
    two.send("a", LONG)  # chosen a moment ago
    two.end("a", "x")
    assert two.ranked(LONG) == ["b", "c"]


def test_a_request_that_is_told_to_be_over_before_it_is_told_to_have_begun_weighs_nothing() -> None:
    """As Ray tells of the shortest ones."""
    two = routing("a", "b")
    for number in range(9):
        two.end("a", str(number))
        two.begin("a", str(number), LONG)
    assert two.ranked([]) == ["a", "b"]
    two.begin("a", "0")  # another one of that name
    assert two.ranked([]) == ["b", "a"]


def test_ends_of_what_never_began_are_not_kept_for_ever() -> None:
    """A request that was not taken has no beginning."""
    one = routing("a")
    for number in range(5000):
        one.end("a", str(number))
    assert len(one._replicas["a"].over) < 5000
    one.begin("a", "4999")
    assert not one._replicas["a"].running


def hit_rate(caches: list[Cache], order: list[TokenIds], *, is_routed: bool, late: int = 0) -> float:
    """Of all prompt tokens, those found in the cache of the replica that each prompt was sent to. It is told that a
    request is over when `late` others have begun."""
    names = [str(number) for number in range(len(caches))]
    router = routing(*names)
    found = 0
    for number, ids in enumerate(order):
        marks = marks_of(ids)
        name = router.ranked(marks)[0] if is_routed else names[number % len(names)]
        router.send(name, marks)
        router.begin(name, str(number), marks)
        for known in names:
            router.end(known, str(number - late))
        lease = caches[int(name)].acquire(ids, max_cached=len(ids) - 1, room_for=len(ids))
        assert lease is not None
        found += lease.num_cached
        caches[int(name)].release(lease, ids, len(ids))
        if number % 10 == 9:
            for known, cache in zip(names, caches, strict=True):
                router.hold(known, cache.summary(4096))
    return found / sum(map(len, order))


def few_shot_prompts(seed: int) -> list[TokenIds]:
    """W1: 200 prompts of 512 tokens that are one of 8 prefixes, and 48 of their own, in a random order."""
    draw = random.Random(seed)
    groups = [draw.choices(range(100, 1000), k=512) for _ in range(8)]
    return [np.array(draw.choice(groups) + draw.choices(range(100, 1000), k=48), dtype=np.int32) for _ in range(200)]


def test_two_small_caches_are_nearly_as_good_as_one_of_twice_the_size() -> None:
    """The big one has room for the eight prefixes and some questions. How often prefixes come to the same of two caches
    in turn is the order's luck: the mean of some orders counts."""
    pages = 4 * (512 + 64) // 16
    one = routed = in_turn = 0.0
    for seed in (1, 3, 5, 7):
        order = few_shot_prompts(seed)
        one += hit_rate([Cache(2 * pages)], order, is_routed=True)
        routed += hit_rate([Cache(pages), Cache(pages)], order, is_routed=True)
        in_turn += hit_rate([Cache(pages), Cache(pages)], order, is_routed=False)
    print(f"hit rates: {routed / 4:.3f} routed, {one / 4:.3f} one big cache, {in_turn / 4:.3f} in turn")
    assert routed >= 0.9 * one
    assert routed >= 1.8 * in_turn


def test_prefixes_stay_apart_where_it_is_told_late_that_requests_are_over() -> None:
    """As well as if somebody had told each replica its prefixes beforehand."""
    pages = 4 * (512 + 64) // 16
    beforehand = 0.0
    routed = dict.fromkeys((1, 3, 8), 0.0)
    for seed in range(4):
        order = few_shot_prompts(seed)
        places = {prefix: place for place, prefix in enumerate(sorted({ids[:512].tobytes() for ids in order}))}
        halves = [[ids for ids in order if places[ids[:512].tobytes()] % 2 == half] for half in (0, 1)]
        found = sum(hit_rate([Cache(pages)], half, is_routed=True) * sum(map(len, half)) for half in halves)
        beforehand += found / sum(map(len, order))
        for late in routed:
            routed[late] += hit_rate([Cache(pages), Cache(pages)], order, is_routed=True, late=late)
    print({late: rate / beforehand for late, rate in routed.items()})
    assert all(rate >= 0.98 * beforehand for rate in routed.values())
