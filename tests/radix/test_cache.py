"""The cache, claim by claim. Random operations against a naive model are in test_cache_random.py."""

from __future__ import annotations

import random

import numpy as np
import pytest

from niwaki.radix import Cache, Lease, PageCopy, TokenIds


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


def count(start: int, stop: int) -> TokenIds:
    return np.arange(start, stop, dtype=np.int32)


def write(cache: Cache, tokens: TokenIds, namespace: str = "") -> None:
    """A whole request: computed to its last token, and over."""
    lease = take(cache, tokens, namespace)
    cache.release(lease, tokens, len(tokens))
    cache.check()


def take(cache: Cache, tokens: TokenIds, namespace: str = "") -> Lease:
    lease = cache.acquire(tokens, namespace, room_for=len(tokens))
    assert lease is not None
    return lease


def room(cache: Cache) -> int:
    return cache.num_free + cache.num_evictable


# -- sharing ----------------------------------------------------------------------------------------------------------


def test_a_prefix_is_shared_to_the_token_by_copying_the_head_of_the_page_where_it_ends() -> None:
    cache = Cache(16, page_size=4)
    write(cache, count(0, 10))
    lease = cache.acquire(np.concatenate([count(0, 7), ids(99, 98)]))
    assert lease is not None
    assert lease.num_cached == 7
    assert lease.page_ids[0] == 0
    assert lease.copies == (PageCopy(src=1, dst=lease.page_ids[1], num_tokens=3),)
    cache.check()


def test_a_partial_last_page_is_found_and_copied_too() -> None:
    cache = Cache(16, page_size=4)
    write(cache, count(0, 10))
    lease = cache.acquire(count(0, 12))
    assert lease is not None
    assert lease.num_cached == 10
    assert [copy.num_tokens for copy in lease.copies] == [2]


def test_the_full_pages_of_a_prefix_can_be_looked_up_without_a_lock() -> None:
    cache = Cache(num_pages=8, page_size=4)
    assert cache.page_ids(count(0, 8)) == []
    write(cache, count(0, 10))
    lease = take(cache, count(0, 10))
    stats = cache.stats()
    assert cache.page_ids(count(0, 10)) == cache.page_ids(count(0, 12)) == lease.page_ids[:2]
    assert cache.page_ids(count(0, 7)) == lease.page_ids[:1]
    assert cache.page_ids(count(1, 9)) == cache.page_ids(count(0, 8), "another") == []
    assert cache.stats() == stats
    cache.discard(lease)
    cache.check()


def test_max_cached_leaves_a_token_to_compute() -> None:
    cache = Cache(16, page_size=4)
    write(cache, count(0, 8))
    lease = cache.acquire(count(0, 8), max_cached=7)
    assert lease is not None
    assert lease.num_cached == 7
    assert cache.match(count(0, 8)) == 8


def test_full_pages_are_shared_from_the_commit_on_while_the_request_still_runs() -> None:
    cache = Cache(16, page_size=4)
    lease = take(cache, count(0, 10))
    assert cache.match(count(0, 10)) == 0
    cache.commit(lease, count(0, 10), 6)
    assert cache.match(count(0, 10)) == 4
    cache.commit(lease, count(0, 10), 10)
    assert cache.match(count(0, 10)) == 8, "the last page is unfinished"
    cache.commit(lease, count(0, 10), 10, share_tail=True)
    assert cache.match(count(0, 10)) == 10, "and offered when asked to"
    cache.check()


def test_two_who_computed_the_same_end_up_with_the_same_pages() -> None:
    cache = Cache(16, page_size=4)
    first, second = take(cache, count(0, 9)), take(cache, count(0, 9))
    assert not set(first.page_ids) & set(second.page_ids)
    cache.commit(first, count(0, 9), 9)
    cache.commit(second, count(0, 9), 9)
    assert first.page_ids[:2] == second.page_ids[:2]
    assert first.page_ids[2] != second.page_ids[2]
    assert cache.num_free == 16 - 4
    cache.check()


def test_releasing_what_is_there_already_gives_all_own_pages_back() -> None:
    cache = Cache(16, page_size=4)
    first, second = take(cache, count(0, 10)), take(cache, count(0, 10))
    cache.release(first, count(0, 10), 10)
    cache.release(second, count(0, 10), 10)
    assert cache.num_free == 16 - 3
    cache.check()


def test_a_partial_page_makes_way_for_the_longer_page_that_says_the_same() -> None:
    cache = Cache(16, page_size=4)
    for size in (1, 2, 3, 4, 6, 7, 20):
        write(cache, count(0, size))
        assert cache.stats().tree_pages == -(-size // 4)
        assert cache.stats().tree_tokens == size
    assert cache.stats().tree_nodes == 1, "a sequence that grows stays one node"


def test_a_decoded_sequence_stays_one_node() -> None:
    cache = Cache(100, page_size=4)
    lease = take(cache, count(0, 200))
    for size in range(1, 201):
        cache.commit(lease, count(0, 200), size)
    assert cache.stats().tree_nodes == 1
    cache.check()


def test_namespaces_share_nothing_and_leave_nothing_behind() -> None:
    cache = Cache(16, page_size=4)
    write(cache, count(0, 8), "a")
    assert (cache.match(count(0, 8), "a"), cache.match(count(0, 8), "b"), cache.match(count(0, 8))) == (8, 0, 0)
    write(cache, count(0, 8), "b")
    assert cache.stats().tree_pages == 4
    assert cache.flush()
    assert cache.stats().namespaces == 0


def test_match_finds_the_longest_prefix_ever_released_while_nothing_is_evicted() -> None:
    rng = random.Random(0)
    cache = Cache(4000, page_size=4)
    seen: list[list[int]] = [[]]

    def longest(tokens: list[int]) -> int:
        sizes = [next((i for i, (a, b) in enumerate(zip(old, tokens, strict=False)) if a != b), None) for old in seen]
        return max(min(len(old), len(tokens)) if size is None else size for old, size in zip(seen, sizes, strict=True))

    for _ in range(400):
        head = rng.choice(seen)
        tokens = head[: rng.randint(0, len(head))] + [rng.randint(0, 2) for _ in range(rng.randint(1, 15))]
        assert cache.match(ids(*tokens)) == longest(tokens)
        write(cache, ids(*tokens))
        seen.append(tokens)
    assert cache.stats().evicted_pages == 0


# -- room -------------------------------------------------------------------------------------------------------------


def test_eviction_never_frees_a_locked_prefix() -> None:
    cache = Cache(6, page_size=4)
    write(cache, count(0, 16))
    lease = cache.acquire(count(0, 8))
    assert lease is not None
    assert cache.num_evictable == 2, "what the lease does not use of the path"
    other = take(cache, count(100, 116))
    assert cache.match(count(0, 16)) == 8
    assert not cache.reserve(other, 17), "all six pages are in use"
    assert len(other.page_ids) == 4
    cache.check()


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    cache = Cache(9, page_size=4)
    for start in (0, 100, 200):
        write(cache, count(start, start + 12))
    cache.discard(take(cache, count(0, 12)))  # used again: now 100 is the oldest
    lease = take(cache, count(300, 308))
    assert [cache.match(count(start, start + 12)) for start in (0, 100, 200)] == [12, 4, 12]
    assert cache.reserve(lease, 16)
    assert [cache.match(count(start, start + 12)) for start in (0, 100, 200)] == [12, 0, 8]
    assert cache.stats().evicted_pages == 4
    cache.check()


def test_a_long_running_request_counts_as_used_when_it_ends() -> None:
    cache = Cache(8, page_size=4)
    lease = take(cache, count(0, 12))
    cache.commit(lease, count(0, 12), 8)
    write(cache, count(100, 108))
    cache.release(lease, count(0, 12), 12)
    cache.discard(take(cache, count(200, 220)))
    assert [cache.match(count(start, start + 12)) for start in (0, 100)] == [12, 0]


def test_an_unfinished_page_that_is_written_again_counts_as_used() -> None:
    cache = Cache(4, page_size=4)
    write(cache, count(0, 3))
    write(cache, count(100, 103))
    write(cache, count(0, 3))
    cache.discard(take(cache, count(200, 212)))
    assert [cache.match(count(start, start + 3)) for start in (0, 100)] == [3, 0]


def test_a_page_of_which_the_head_was_copied_is_not_used_by_that_since_the_copy_is_there() -> None:
    cache = Cache(6, page_size=4)
    write(cache, count(0, 8))
    write(cache, count(100, 108))
    write(cache, ids(0, 1, 2, 50))
    cache.discard(take(cache, count(200, 208)))
    assert [cache.match(count(start, start + 8)) for start in (0, 100)] == [4, 8]
    assert cache.match(ids(0, 1, 2, 50)) == 4


def test_a_prefix_that_was_used_outlives_the_rest_of_its_node() -> None:
    cache = Cache(4, page_size=4)
    write(cache, count(0, 8))
    write(cache, count(100, 108))
    cache.discard(take(cache, count(0, 4)))
    cache.discard(take(cache, count(200, 212)))
    assert [cache.match(count(start, start + 8)) for start in (0, 100)] == [4, 0]


def test_a_request_as_large_as_the_pool_runs_again_and_again() -> None:
    cache = Cache(4, page_size=4)
    for _ in range(3):
        lease = cache.acquire(count(0, 16), max_cached=15, room_for=16)
        assert lease is not None
        assert lease.num_cached in (0, 12), "no fifth page for the copy: it ends on a page boundary"
        cache.release(lease, count(0, 16), 16)
        cache.check()
    assert cache.acquire(count(0, 17), room_for=17) is None
    cache.check()


def test_the_source_of_a_copy_makes_no_room_for_it_and_is_free_to_go_afterwards() -> None:
    cache = Cache(3, page_size=4)
    write(cache, count(0, 3))
    write(cache, count(100, 108))
    lease = cache.acquire(ids(0, 1, 7), room_for=8)
    assert lease is not None
    assert lease.copies == (PageCopy(src=0, dst=lease.page_ids[0], num_tokens=2),)
    assert [cache.match(count(start, start + 3)) for start in (0, 100)] == [3, 0]
    assert cache.num_evictable == 1
    cache.check()


def test_num_exclusive_says_what_a_preemption_would_give_back() -> None:
    cache = Cache(20, page_size=4)
    first = take(cache, count(0, 16))
    cache.commit(first, count(0, 16), 16)
    second = take(cache, np.concatenate([count(0, 8), count(50, 60)]))
    assert (cache.num_exclusive(first), cache.num_exclusive(second)) == (2, 3)
    before = room(cache)
    cache.discard(first)
    assert room(cache) == before + 2
    assert cache.num_exclusive(second) == 5


def test_peek_tells_which_pages_are_locked_already() -> None:
    cache = Cache(20, page_size=4)
    write(cache, count(0, 18))
    assert (cache.peek(count(0, 18)).num_cached, cache.peek(count(0, 18)).num_locked_pages) == (18, 0)
    lease = cache.acquire(count(0, 8))
    assert lease is not None
    assert cache.peek(count(0, 18)).num_locked_pages == 2
    assert cache.peek(count(0, 5)).num_locked_pages == 1
    assert cache.stats().lookups == 2, "looking does not count"


def test_a_prompt_is_looked_up_again_when_something_was_written_that_begins_like_it() -> None:
    cache = Cache(20, page_size=4)
    write(cache, count(0, 2))
    assert cache.peek(count(0, 12), key=7).num_cached == 2
    for other in (ids(0, 1, 9, 9, 9), ids(5, 6, 7, 8)):
        write(cache, other)
        assert cache.remembered.get(7) is not None, "neither shares a third token"
    write(cache, count(0, 9))
    assert cache.peek(count(0, 12), key=7).num_cached == 9
    assert cache.remembered.get(7) is None, "from a page on, what is locked may change in every step"


def test_an_outline_shows_what_left_for_a_tier_behind_what_it_continues() -> None:
    cache = Cache(8, page_size=4, on_evict=lambda *_: None)
    write(cache, count(0, 16))
    write(cache, ids(*range(8), *range(50, 58)))

    def told(tier: str | None) -> list[tuple[int, int, int, str]]:
        nodes = cache.outline(9, tier_of=lambda namespace, ids, page: tier)
        return [(node.parent, node.num_pages, node.num_children, node.tier) for node in nodes]

    cache._evict(1)
    assert told("memory") == [(-1, 2, 2, "pool"), (0, 2, 0, "pool"), (0, 1, 1, "pool"), (2, 1, 0, "memory")]
    cache._evict(1)
    assert told("disk") == [(-1, 2, 2, "pool"), (0, 2, 0, "pool"), (0, 1, 1, "disk"), (2, 1, 0, "disk")]
    assert told(None) == [(-1, 2, 1, "pool"), (0, 2, 0, "pool")], "no tier has it"
    write(cache, count(0, 16))
    assert {tier for *_, tier in told("memory")} == {"pool"}, "it is back"


def test_an_outline_has_what_was_used_last_however_deep_it_stands() -> None:
    cache = Cache(40, page_size=4)
    for start in range(0, 100, 10):
        write(cache, count(start, start + 4))
    write(cache, count(0, 8))
    write(cache, ids(*range(8), *range(200, 204)))
    assert [(node.parent, node.token_ids[-1]) for node in cache.outline(3)] == [(-1, 203), (-1, 93), (-1, 83)]
    write(cache, ids(*range(8), *range(300, 304)))
    assert [(node.parent, node.token_ids[-1]) for node in cache.outline(3)] == [(-1, 7), (0, 303), (0, 203)]


# -- pins -------------------------------------------------------------------------------------------------------------


def test_a_pinned_prefix_outlives_everything_unpinned_and_takes_no_room_away() -> None:
    cache = Cache(6, page_size=4)
    write(cache, count(0, 10))
    pin = cache.pin(count(0, 10))
    assert room(cache) == 6
    for start in (100, 200, 300):
        write(cache, count(start, start + 12))
        assert cache.match(count(0, 10)) == 10
    write(cache, count(400, 416))  # four pages: only now something pinned must go
    assert cache.match(count(0, 10)) == 8
    cache.unpin(pin)
    cache.check()


def test_a_pin_keeps_no_more_than_its_prefix() -> None:
    cache = Cache(8, page_size=4)
    write(cache, count(0, 16))
    pin = cache.pin(count(0, 6))
    write(cache, count(100, 124))
    assert cache.match(count(0, 16)) == 8, "two pages hold the six tokens"
    write(cache, np.concatenate([count(0, 8), count(50, 58)]))
    write(cache, count(200, 224))
    assert cache.match(count(0, 16)) == 8, "not the pages that were added behind it either"
    cache.unpin(pin)
    write(cache, count(300, 332))
    assert cache.match(count(0, 16)) == 0, "unpinned, it goes in its turn"


def test_a_pinned_end_does_not_pin_what_is_added_behind_it() -> None:
    cache = Cache(8, page_size=4)
    write(cache, count(0, 8))
    pin = cache.pin(count(0, 8))
    write(cache, count(0, 16))
    write(cache, count(100, 116))
    write(cache, count(200, 220))  # evicts five pages of six that are not pinned, the oldest first
    assert cache.match(count(0, 16)) == 8
    cache.unpin(pin)


def test_a_pin_moves_on_when_the_page_that_it_keeps_grows() -> None:
    cache = Cache(8, page_size=4)
    write(cache, count(0, 6))
    pin = cache.pin(count(0, 6))
    write(cache, count(0, 16))
    write(cache, count(100, 116))
    write(cache, count(200, 220))
    assert cache.match(count(0, 16)) == 8
    cache.unpin(pin)
    cache.check()


def test_a_pin_moves_on_when_the_page_that_it_keeps_is_still_being_written() -> None:
    cache = Cache(8, page_size=4)
    writer = take(cache, count(0, 6))
    cache.commit(writer, count(0, 6), 6, share_tail=True)
    pin = cache.pin(count(0, 6))
    write(cache, count(0, 16))
    cache.discard(writer)
    write(cache, count(100, 116))
    write(cache, count(200, 220))
    assert cache.match(count(0, 16)) == 8
    cache.unpin(pin)
    cache.check()


def test_a_pin_ranks_a_leaf_by_its_last_use_again_when_it_is_gone() -> None:
    cache = Cache(4, page_size=4)
    write(cache, count(0, 8))
    pin = cache.pin(count(0, 8))
    write(cache, count(100, 108))
    lease = take(cache, count(200, 204))  # evicts from 100, and by that ranks the pinned leaf anew
    cache.discard(lease)
    write(cache, count(300, 308))
    cache.unpin(pin)
    lease = take(cache, count(400, 408))
    assert [cache.match(count(start, start + 8)) for start in (0, 300)] == [0, 8], "the older one went"
    cache.discard(lease)


def test_pins_of_one_text_live_on_their_own() -> None:
    cache = Cache(8, page_size=4)
    write(cache, count(0, 8))
    pins = [cache.pin(count(0, 8)) for _ in range(64)]
    for pin in pins[:-1]:
        cache.unpin(pin)
        cache.check()
    write(cache, count(100, 124))
    assert cache.match(count(0, 8)) == 8
    cache.unpin(pins[-1])
    assert cache.stats().pins == 0


def test_pinning_and_unpinning_without_end_keeps_the_eviction_line_short() -> None:
    cache = Cache(8, page_size=4)
    write(cache, count(0, 8))
    for _ in range(1000):
        cache.unpin(cache.pin(count(0, 8)))
    assert len(cache._tree._line) < 100
    cache.check()


def test_pins_survive_splits_and_a_flush() -> None:
    cache = Cache(16, page_size=4)
    write(cache, count(0, 16))
    pin = cache.pin(count(0, 16))
    write(cache, np.concatenate([count(0, 8), count(50, 54)]))
    cache.check()
    assert cache.flush(), "pins are soft"
    cache.check()
    cache.unpin(pin)
    assert cache.stats().namespaces == 0


# -- misuse -----------------------------------------------------------------------------------------------------------


def test_a_closed_lease_or_pin_is_refused() -> None:
    cache = Cache(8, page_size=4)
    lease = take(cache, count(0, 4))
    cache.release(lease, count(0, 4), 4)
    pin = cache.pin(count(0, 4))
    cache.unpin(pin)
    for action in (
        lambda: cache.reserve(lease, 8),
        lambda: cache.commit(lease, count(0, 4), 4),
        lambda: cache.release(lease, count(0, 4), 4),
        lambda: cache.discard(lease),
        lambda: cache.unpin(pin),
    ):
        with pytest.raises(ValueError, match="is closed"):
            action()
    cache.check()


def test_what_was_not_written_or_is_not_the_same_sequence_is_refused() -> None:
    cache = Cache(8, page_size=4)
    lease = take(cache, count(0, 8))
    cache.commit(lease, count(0, 8), 4)
    for num_written in (3, 9):
        with pytest.raises(ValueError, match="num_written must be from 4"):
            cache.commit(lease, count(0, 20), num_written)
    with pytest.raises(ValueError, match="to 6"):
        cache.commit(lease, count(0, 6), 7)
    with pytest.raises(ValueError, match="not the tokens that this lease shares"):
        cache.commit(lease, count(1, 9), 8)
    cache.check()


@pytest.mark.parametrize(
    "wrong", [[1, 2], np.zeros(3, np.int64), np.zeros((2, 2), np.int32), np.zeros(2, np.float32), None]
)
def test_token_ids_of_another_kind_are_refused(wrong: object) -> None:
    cache = Cache(8, page_size=4)
    with pytest.raises(TypeError, match="int32 with one dimension"):
        cache.match(wrong)  # type: ignore[arg-type]  # that is the point


def test_an_empty_pool_or_page_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        Cache(0)
    with pytest.raises(ValueError, match="page_size must be at least 1, got -1"):
        Cache(4, -1)


def test_check_finds_a_page_in_two_places_and_a_lost_one() -> None:
    cache = Cache(8, page_size=4)
    write(cache, count(0, 8))
    cache._pool.give([0])
    with pytest.raises(AssertionError, match=r"free 7 \+ tree 2 \+ held 0 != 8"):
        cache.check()
    cache._pool.take(2)
    with pytest.raises(AssertionError, match=r"free 5 \+ tree 2 \+ held 0 != 8"):
        cache.check()
