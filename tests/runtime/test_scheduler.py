"""The scheduler: single plans. Whole loads are in `test_scheduler_loads.py`."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from niwaki.radix import TokenIds
from niwaki.runtime.loop.filling import GROWTH_SHARE
from niwaki.runtime.loop.plans import AGED_STEPS, AGED_TOKENS, Room, Row, Running, Waiting
from niwaki.runtime.loop.scheduler import PRIORITY_SECONDS, ROOMY, Policy, next_victim, plan

ROOM = Room(free_pages=1000, page_size=16, max_batch_tokens=512, max_running=64)


def tokens(seed: int, size: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 2000, size, dtype=np.int32)


def decoding(id: int, *, num_tokens: int = 33, num_pages: int = 3, priority: int = 0) -> Running:
    return Running(id, num_tokens, num_tokens - 1, num_pages, max_new_tokens=10, priority=priority)


# -- one plan ---------------------------------------------------------------------------------------------------------


def test_decoding_rows_come_first_and_get_a_token_each_however_long_the_prefills() -> None:
    prefill = Running(1, 5000, 0, 313, max_new_tokens=10, ids=tokens(1, 5000))
    made = plan([], [prefill, *(decoding(i) for i in range(2, 12))], ROOM)
    assert made.rows[:10] == tuple(Row(i, 1) for i in range(2, 12))
    assert made.rows[10:] == (Row(1, 502),)


def test_a_short_run_of_forced_tokens_counts_as_decoding() -> None:
    prefill = Running(1, 5000, 0, 313, max_new_tokens=10, ids=tokens(1, 5000))
    forced = Running(2, 40, 31, 3, max_new_tokens=10)
    assert plan([], [prefill, forced], ROOM).rows == (Row(2, 9), Row(1, 503))


def test_who_has_nothing_pending_has_no_row_and_keeps_his_place_and_pages() -> None:
    late = Running(1, 33, 33, 3, max_new_tokens=10)
    waiting = [Waiting(7, tokens(7, 40), max_new_tokens=8)]
    made = plan(waiting, [late, decoding(2)], replace(ROOM, max_running=2))
    assert made.rows == (Row(2, 1),)
    assert not made.preempt
    assert plan(waiting, [late], replace(ROOM, max_running=2)).admit == (7,)
    assert not plan([], [late], ROOM).rows


def test_the_budget_is_never_exceeded_and_prefills_are_cut_to_fit() -> None:
    waiting = [Waiting(i, tokens(i, 300), max_new_tokens=8) for i in range(5)]
    made = plan(waiting, [], ROOM)
    assert made.rows == (Row(0, 300), Row(1, 212))
    assert made.admit == (0, 1)
    assert made.num_tokens == ROOM.max_batch_tokens


def test_longest_prefix_match_goes_first_and_fcfs_does_not_care() -> None:
    waiting = [Waiting(i, tokens(i, 400), max_new_tokens=8, num_cached=cached) for i, cached in enumerate((0, 16, 320))]
    room = replace(ROOM, max_running=2)
    assert plan(waiting, [], room, "lpm").admit == (2, 1)
    assert plan(waiting, [], room, "fcfs").admit == (0, 1)


def test_where_the_pool_has_room_for_all_who_came_first_goes_first() -> None:
    waiting = [Waiting(i, tokens(i, 400), max_new_tokens=8, num_cached=cached) for i, cached in enumerate((0, 16, 320))]
    with_growth = (400 + GROWTH_SHARE * 8) / ROOM.page_size + 1  # pages of one, rounded up
    ample = int(3 * with_growth / ROOMY) + 1
    room = replace(ROOM, max_running=2, free_pages=ample, num_pages=ample)
    made = plan(waiting, [], replace(room, since_aged=10**6, tokens_since_aged=10**6))
    assert (made.admit, made.aged) == ((0, 1), None)
    short = replace(room, free_pages=ample - 1, num_pages=ample - 1)
    assert plan(waiting, [], short).admit == (2, 1)
    assert plan(waiting, [], replace(room, free_pages=ample - 1)).admit == (2, 1), "somebody holds the others"
    held = [replace(one, num_locked_pages=num_held) for one, num_held in zip(waiting, (0, 1, 20), strict=True)]
    assert plan(held, [], short).admit == (0, 1), "these are there already"
    assert plan([replace(one, max_new_tokens=400) for one in waiting], [], room).admit == (2, 1), "they grow"


def test_a_lower_priority_makes_the_pool_no_shorter_for_a_higher_one() -> None:
    low = [Waiting(i, tokens(i, 400), max_new_tokens=8, num_cached=16 * i) for i in range(3)]
    high = [Waiting(i, tokens(i, 40), max_new_tokens=8, num_cached=16 * (i - 8), priority=1) for i in (8, 9)]
    room = replace(ROOM, free_pages=60, num_pages=60, max_batch_tokens=2000, max_running=3)
    assert plan([*low, *high], [], room).admit == (8, 9, 2)
    assert plan([*low, *high], [], replace(room, free_pages=1000, num_pages=1000)).admit == (8, 9, 0)
    assert plan([*low, *high], [], replace(room, free_pages=14, num_pages=14)).admit == (9, 8)


def test_whose_tokens_are_few_beside_those_that_were_admitted_meanwhile_goes_first() -> None:
    first = Waiting(1, tokens(1, 100), max_new_tokens=8)
    others = [Waiting(i, tokens(i, 100), max_new_tokens=8, num_cached=96) for i in (2, 3)]
    enough = AGED_TOKENS * (100 + 8)
    room = replace(ROOM, since_aged=0, max_running=2)
    assert plan([first, *others], [], replace(room, tokens_since_aged=enough - 1)).admit == (2, 3)
    made = plan([first, *others], [], replace(room, tokens_since_aged=enough))
    assert (made.admit, made.aged) == ((1, 2), 1)
    cached = replace(first, num_cached=90)
    made = plan([cached, *others], [], replace(room, tokens_since_aged=AGED_TOKENS * (10 + 8)))
    assert (made.admit, made.aged) == ((1, 2), 1), "it brings only what is not cached"


def test_who_waited_longest_goes_before_any_match_one_at_a_time() -> None:
    waiting = [
        Waiting(1, tokens(1, 100), max_new_tokens=8, num_cached=96),
        Waiting(2, tokens(2, 100), max_new_tokens=8, first_step=-AGED_STEPS),
        Waiting(3, tokens(3, 100), max_new_tokens=8, first_step=-AGED_STEPS - 5),
    ]
    made = plan(waiting, [], ROOM)
    assert (made.admit, made.aged) == ((3, 1, 2), 3)
    made = plan(waiting, [], replace(ROOM, since_aged=AGED_STEPS - 1))
    assert (made.admit, made.aged) == ((1, 2, 3), None), "the turn of the next one has not come"


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_higher_priority_goes_first_until_the_lower_one_has_waited_very_long(policy: Policy) -> None:
    low = Waiting(1, tokens(1, 100), max_new_tokens=8, num_cached=96, first_step=-AGED_STEPS)
    high = Waiting(2, tokens(2, 100), max_new_tokens=8, priority=1)
    room = replace(ROOM, max_running=1)
    assert plan([low, high], [], room, policy).admit == (2,)
    assert plan([replace(low, first_step=-(10**6)), high], [], room, policy).admit == (2,), "steps may be short"
    assert plan([replace(low, waits_from=-2 * PRIORITY_SECONDS), high], [], room, policy).admit == (1,)


def test_who_does_not_fit_is_overtaken_until_it_has_aged() -> None:
    running = [decoding(0)]
    big = Waiting(1, tokens(1, 400), max_new_tokens=8, num_cached=16)
    small = Waiting(2, tokens(2, 20), max_new_tokens=8)
    room = replace(ROOM, free_pages=12)
    assert plan([big, small], running, room).admit == (2,)
    assert plan([replace(big, first_step=-AGED_STEPS), small], running, room).admit == ()
    assert plan([big, small], running, room, "fcfs").admit == ()


def test_a_lone_request_that_fills_the_whole_pool_is_admitted() -> None:
    room = replace(ROOM, free_pages=10)
    assert plan([Waiting(1, tokens(1, 160), max_new_tokens=1)], [], room).rows == (Row(1, 160),)


def test_one_that_can_never_fit_does_not_block_the_others() -> None:
    waiting = [Waiting(1, tokens(1, 161), max_new_tokens=1, first_step=-(10**6)), Waiting(2, tokens(2, 30), 8)]
    assert plan(waiting, [], replace(ROOM, free_pages=10)).admit == (2,)


def test_admission_leaves_room_for_those_who_run_to_grow() -> None:
    running = [decoding(i) for i in range(4)]  # each needs a page for 10 more tokens some time
    newcomer = Waiting(9, tokens(9, 16), max_new_tokens=16)  # a page now, one to grow
    assert plan([newcomer], running, replace(ROOM, free_pages=1)).admit == ()
    grown = [replace(one, num_pages=4) for one in running]
    assert plan([newcomer], grown, replace(ROOM, free_pages=1)).admit == ()
    assert plan([newcomer], grown, replace(ROOM, free_pages=2)).admit == (9,)


def test_pages_that_others_hold_already_cost_nothing() -> None:
    forks = [Waiting(i, np.concatenate([tokens(0, 320), tokens(i, 8)]), 8, num_cached=320) for i in range(1, 5)]
    room = replace(ROOM, free_pages=20 + 4)
    assert plan(forks, [], room).admit == (1, 2, 3, 4), (
        "the first takes the 20 pages of the prefix, the others one each"
    )
    assert plan(forks, [decoding(9, num_pages=4)], room).admit == (1, 2, 3, 4)
    held = [replace(fork, num_locked_pages=20) for fork in forks]
    assert plan(held, [decoding(9, num_pages=4)], replace(ROOM, free_pages=4)).admit == (1, 2, 3, 4)
    assert plan(forks, [decoding(9, num_pages=4)], replace(ROOM, free_pages=4)).admit == ()


# -- sharing inside the batch -----------------------------------------------------------------------------------------


def test_a_request_waits_for_a_prefix_that_is_being_prefilled() -> None:
    prefix = tokens(0, 1000)
    owner = Running(1, 1000, 512, 63, max_new_tokens=8, ids=prefix)
    same = Waiting(2, np.concatenate([prefix, tokens(2, 10)]), 8, num_cached=512)
    other = Waiting(3, tokens(3, 50), 8)
    assert plan([same, other], [owner], replace(ROOM, max_batch_tokens=2048)).admit == (3,)
    assert plan([replace(same, namespace="b")], [owner], replace(ROOM, max_batch_tokens=2048)).admit == (2,)
    assert plan([same], [owner], replace(ROOM, max_batch_tokens=2048, shares_prefixes=False)).admit == (2,)


def test_who_may_not_use_the_cache_does_not_wait_for_it_either() -> None:
    owner = Running(1, 1000, 512, 63, max_new_tokens=8, ids=tokens(0, 1000))
    scored = Waiting(2, tokens(0, 500), 8, max_cached=0)
    assert plan([scored], [owner], replace(ROOM, max_batch_tokens=2048)).admit == (2,)
    assert plan([replace(scored, max_cached=None)], [owner], replace(ROOM, max_batch_tokens=2048)).admit == ()
    cut = replace(scored, num_cached=500, max_cached=100)
    assert plan([cut], [], replace(ROOM, max_batch_tokens=2048)).rows == (Row(2, 400),)


def test_of_many_equal_prompts_one_is_admitted_and_the_rest_follow_a_step_later() -> None:
    prompt = tokens(0, 40)
    waiting = [Waiting(i, prompt, 8) for i in range(5)]
    assert plan(waiting, [], ROOM).admit == (0,)
    owner = Running(0, 41, 40, 3, max_new_tokens=7)
    assert plan([replace(one, num_cached=39) for one in waiting[1:]], [owner], ROOM).admit == (1, 2, 3, 4)


def test_a_gain_below_a_page_is_not_worth_waiting_for() -> None:
    owner = Running(1, 100, 96, 7, max_new_tokens=8, ids=tokens(0, 100))
    fork = Waiting(2, np.concatenate([tokens(0, 100), tokens(2, 50)]), 8, num_cached=96)
    assert plan([fork], [owner], ROOM).admit == (2,)


@pytest.mark.parametrize(("length", "count"), [(2, 1), (2, 15), (9, 1), (9, 2), (16, 1), (16, 2)])
@pytest.mark.parametrize("is_running", [True, False])
def test_short_prompts_wait_for_an_equal_one_where_together_they_save_a_page(
    length: int, count: int, *, is_running: bool
) -> None:
    ids = tokens(0, length)
    first = Waiting(0, ids, 8)
    running = [Running(99, length, 0, 1, 8, ids=ids)] if is_running else []
    others = [Waiting(i, ids.copy(), 8) for i in range(1, count + 1)]
    waits = (length - 1) * count >= ROOM.page_size
    admitted = [one.id for one in others] if not waits else []
    waiting = others if is_running else [first, *others]
    # The first one's place is its own: it counts for nobody.
    assert plan(waiting, running, ROOM).admit == tuple([] if is_running else [0]) + tuple(admitted)


def test_a_short_prompt_does_not_wait_for_the_long_one_that_begins_like_it() -> None:
    owner = Running(1, 3000, 0, 188, max_new_tokens=8, ids=tokens(0, 3000))
    assert plan([Waiting(2, tokens(0, 2), 8)], [owner], replace(ROOM, max_batch_tokens=4096)).admit == (2,)


def test_who_waits_for_whose_prefill_is_as_if_each_were_compared_with_all() -> None:
    def helps(one: Waiting, ids: TokenIds, namespace: str) -> bool:
        start = min(one.num_cached, one.most_cached)
        stop = min(start + ROOM.page_size, one.most_cached)
        alike = [
            other
            for other in waiting
            if other.id not in admitted
            and other.namespace == one.namespace
            and other.ids[: other.most_cached].tolist() == one.ids[: one.most_cached].tolist()
            and other.most_cached - other.num_cached < ROOM.page_size
        ]
        is_whole = stop > start and len(ids) >= len(one.ids) and (stop - start) * len(alike) >= ROOM.page_size
        is_gain = stop == start + ROOM.page_size or is_whole
        return namespace == one.namespace and is_gain and ids[:stop].tolist() == one.ids[:stop].tolist()

    rng = random.Random(5)
    texts = [np.array([rng.randrange(2) for _ in range(48)], np.int32) for _ in range(3)]
    room = replace(ROOM, max_batch_tokens=100_000)
    found = set()
    for _ in range(300):
        prompts = [rng.choice(texts)[: rng.randint(2, 48)] for _ in range(8)]
        prompts = [np.append(ids, np.int32(rng.randrange(2))) for ids in prompts]
        waiting = [
            Waiting(i, ids, 8, num_cached=rng.randrange(len(ids)), namespace=rng.choice(["", "", "b"]))
            for i, ids in enumerate(prompts)
        ]
        waiting.sort(key=lambda one: -one.num_cached)
        owner = Running(99, 60, 16, 10, 8, ids=np.append(rng.choice(texts), tokens(0, 12)), namespace="")
        assert owner.ids is not None
        prefilling, admitted = [(owner.ids, "")], []
        for one in waiting:
            if not any(helps(one, *prefill) for prefill in prefilling):
                admitted.append(one.id)
                prefilling.append((one.ids, one.namespace))
        assert plan(waiting, [owner], room).admit == tuple(admitted)
        found.add(len(admitted))
    assert len(found) > 3, "some wait and some do not"


# -- preemption -------------------------------------------------------------------------------------------------------


def test_nobody_is_preempted_while_the_next_tokens_fit() -> None:
    running = [decoding(i, num_tokens=33, num_pages=2) for i in range(4)]
    assert plan([], running, replace(ROOM, free_pages=4)).preempt == ()


def test_who_loses_least_among_the_lowest_priority_is_preempted_and_the_first_admitted_never() -> None:
    running = [
        decoding(0, num_tokens=17, num_pages=1),
        decoding(1, num_tokens=65, num_pages=4),
        decoding(2, num_tokens=49, num_pages=3),
        decoding(3, num_tokens=33, num_pages=2, priority=1),
    ]
    made = plan([Waiting(9, tokens(9, 4), 4)], running, replace(ROOM, free_pages=2))
    assert made.preempt == (0,), "3 has the higher priority, and is the one that is never preempted"
    assert made.admit == (), "what was just given up is not taken by a newcomer"
    flat = [replace(one, priority=0) for one in running]
    assert [one.id for one in (next_victim(flat), next_victim(flat[:3]), next_victim(flat[:2])) if one] == [3, 2, 1]
    assert next_victim(flat[:1]) is None


def test_nobody_overtakes_who_was_set_back_on_the_pages_that_it_still_has_cached() -> None:
    running = [decoding(0)]
    back = Waiting(1, tokens(1, 100), max_new_tokens=40, num_cached=70, is_set_back=True)  # 4 pages of 7
    small = Waiting(2, tokens(2, 16), max_new_tokens=16)  # a page now, one to grow
    assert plan([back, small], running, replace(ROOM, free_pages=5)).admit == ()
    assert plan([back, small], running, replace(ROOM, free_pages=6)).admit == (2,)
    assert plan([back, small], running, replace(ROOM, free_pages=8)).admit == (1,), "all it takes, and a page to grow"
    assert plan([replace(back, is_set_back=False), small], running, replace(ROOM, free_pages=5)).admit == (2,)
    assert plan([replace(back, num_locked_pages=3), small], running, replace(ROOM, free_pages=3)).admit == (2,)
    twin = replace(back, id=3)
    assert plan([back, twin, small], running, replace(ROOM, free_pages=6)).admit == (2,), "these pages are the same"
    assert plan([replace(back, priority=-1), small], running, replace(ROOM, free_pages=5)).admit == (2,)
    assert plan([back, small], [], replace(ROOM, free_pages=6)).admit == (2,), "nobody runs who would make room for it"


def test_prefills_that_hold_all_pages_between_them_do_not_wait_for_each_other() -> None:
    running = [Running(i, 200, 80, 5, max_new_tokens=8, ids=tokens(i, 200)) for i in range(4)]
    made = plan([], running, replace(ROOM, free_pages=0))
    assert made.preempt == (3,)
    assert made.rows == (Row(0, 80),)
