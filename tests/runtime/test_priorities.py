"""Who gives way to a higher priority: as few as it takes, for what it brings alone, and prefills with their tokens."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from niwaki.radix import Cache
from niwaki.runtime.api import SamplingParams
from niwaki.runtime.loop.plans import Row, Running, Waiting
from niwaki.runtime.loop.roster import MAX_MATCHED_WAITING, MIXED_SECONDS
from niwaki.runtime.loop.scheduler import MOST_URGENT, PRIORITY_SECONDS, plan
from tests.formula import Host
from tests.runtime.test_scheduler import ROOM, decoding, tokens
from tests.runtime.test_scheduler_loads import FakeEngine, Request
from tests.toy import make_model

URGENT = Waiting(9, tokens(9, 32), max_new_tokens=8, priority=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"))


def test_no_more_give_way_than_it_takes_with_what_was_kept_free_for_them() -> None:
    running = [replace(decoding(id), max_new_tokens=320) for id in range(2)]  # 6 pages of growth each
    made = plan([URGENT], running, replace(ROOM, free_pages=10))
    assert (made.preempt, made.admit) == ((0,), (9,))


def test_several_find_places_of_lower_ones_in_one_step_as_far_as_its_tokens_go() -> None:
    running = [decoding(id) for id in range(4)]
    full = replace(ROOM, max_running=4, free_pages=40)
    three = [replace(URGENT, id=9 + i, ids=tokens(9 + i, 32)) for i in range(3)]
    made = plan(three, running, full)
    assert (len(made.preempt), made.admit) == (3, (9, 10, 11))
    made = plan(three, running, replace(full, max_batch_tokens=16))
    assert (len(made.preempt), made.admit) == (1, (9,)), "nobody gives way to who would have no row"
    crowd = [replace(URGENT, id=9 + i, ids=tokens(9 + i, 4)) for i in range(2 * MOST_URGENT)]
    many = plan(crowd, [decoding(id) for id in range(8)], replace(full, max_running=8))
    assert len(many.preempt) == MOST_URGENT


def test_nobody_gives_way_for_cached_pages_that_only_who_leaves_holds() -> None:
    stays, leaves = decoding(1, priority=1), replace(decoding(2, num_pages=5), num_exclusive_pages=5)
    room = replace(ROOM, free_pages=3)
    same_prefix = Waiting(9, tokens(9, 144), 8, num_cached=64, num_locked_pages=4, priority=1)  # 9 pages, and growth
    assert plan([same_prefix], [stays, leaves], room).preempt == (), "8 pages, of which 4 are those that are cached"
    both_hold_it = replace(leaves, num_exclusive_pages=1)
    assert plan([same_prefix], [stays, both_hold_it], replace(room, free_pages=5)).preempt == (2,)
    other_text = replace(leaves, ids=tokens(2, 70))
    assert plan([same_prefix], [stays, other_text], room).preempt == (2,)


def test_a_request_that_fits_only_alone_drives_out_all_lower_ones() -> None:
    large = Waiting(9, tokens(9, 160), max_new_tokens=1, priority=1)
    made = plan([large], [decoding(0), decoding(1)], replace(ROOM, free_pages=4))
    assert (set(made.preempt), made.admit) == ({0, 1}, (9,))


def test_a_long_prefill_leaves_the_tokens_of_a_step_to_a_higher_priority() -> None:
    prefill = Running(1, 5000, 0, 313, max_new_tokens=10, ids=tokens(1, 5000))
    made = plan([URGENT], [prefill], ROOM)
    assert (set(made.rows), made.preempt) == ({Row(1, 480), Row(9, 32)}, ())
    begun = Running(9, 1000, 100, 7, max_new_tokens=8, priority=1, ids=tokens(9, 1000))
    assert plan([], [prefill, begun], ROOM).rows == (Row(9, 512),)
    assert plan([replace(URGENT, priority=-1)], [prefill], ROOM).rows == (Row(1, 512),)


def test_a_high_priority_does_not_wait_for_the_prefill_of_a_low_one() -> None:
    low = Request(0, tokens(0, 4096), max_new_tokens=4)
    high = Request(1, tokens(1, 32), max_new_tokens=4, arrives=2, priority=1)
    engine = FakeEngine(Cache(400), max_batch_tokens=64)
    engine.run([low, high], max_steps=200)
    assert high.first_token_step == 2
    assert engine.preemptions == 0


def test_a_high_priority_does_not_wait_for_what_a_low_one_computes_of_the_same_prompt() -> None:
    """That comes in small pieces, or not at all while others of the high priority have theirs."""
    twin = Running(1, 640, 128, 40, max_new_tokens=10, ids=tokens(0, 640))
    asked = Waiting(9, tokens(0, 512), max_new_tokens=8, num_cached=128, num_locked_pages=8, priority=1)
    assert plan([asked], [twin], ROOM).admit == (9,)
    assert plan([replace(asked, priority=0)], [twin], ROOM).admit == ()
    assert plan([asked], [replace(twin, priority=1)], ROOM).admit == ()


def test_a_low_prefill_is_not_held_up_for_ever_by_a_stream_of_high_ones() -> None:
    low = Request(0, tokens(0, 640), max_new_tokens=2)
    stream = [Request(1 + i, tokens(1 + i, 64), max_new_tokens=2, arrives=1 + i, priority=1) for i in range(256)]
    engine = FakeEngine(Cache(400), max_batch_tokens=64, step_seconds=PRIORITY_SECONDS / 32)
    engine.run([low, *stream], max_steps=400)
    assert low.first_token_step is not None
    assert low.first_token_step < 3 * 32


def test_who_runs_and_is_of_a_lower_priority_sits_out_the_step_in_which_a_higher_one_is_admitted() -> None:
    running = [decoding(0), decoding(1, priority=1), Running(2, 500, 0, 32, max_new_tokens=8, ids=tokens(2, 500))]
    alone = replace(ROOM, admits_alone=True)
    made = plan([URGENT], running, alone)
    assert (made.rows, made.admit, made.is_alone) == ((Row(1, 1), Row(9, 32)), (9,), True)
    together = plan([URGENT], running, ROOM)
    assert ({row.id for row in together.rows}, together.is_alone) == ({0, 1, 2, 9}, False)
    aged = [replace(one, waited_seconds=PRIORITY_SECONDS) for one in running]
    assert {row.id for row in plan([URGENT], aged, alone).rows} == {0, 1, 2, 9}, "they count as much by now"
    equal = plan([replace(URGENT, priority=0)], running, alone)
    assert ({row.id for row in equal.rows}, equal.is_alone) == ({0, 1, 2, 9}, False)
    full = plan([URGENT], running, replace(alone, max_running=3))
    assert (full.rows, full.preempt, full.is_alone) == ((Row(1, 1), Row(9, 32)), (0,), True)


def test_prompts_of_a_lower_priority_come_in_small_pieces_for_who_may_come_of_a_higher() -> None:
    low = Running(1, 5000, 0, 313, max_new_tokens=8, ids=tokens(1, 5000))
    high = Running(2, 300, 100, 19, max_new_tokens=8, priority=1, ids=tokens(2, 300))
    room = replace(ROOM, max_lower_tokens=64, highest=1)
    assert plan([], [low], room).rows == (Row(1, 64),)
    assert plan([replace(URGENT, priority=0, ids=tokens(9, 300))], [decoding(0)], room).rows == (Row(0, 1), Row(9, 64))
    assert plan([], [high], room).rows == (Row(2, 200),), "its own are not bounded"
    assert plan([], [low, high], room).rows == (Row(2, 200), Row(1, 64))
    assert set(plan([URGENT], [low], room).rows) == {Row(9, 32), Row(1, 64)}
    assert plan([], [low], replace(room, max_prompt_tokens=32)).rows == (Row(1, 32),)


def test_after_two_priorities_were_there_lower_prompts_come_in_small_pieces_for_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    sizes: list[int] = []
    host = Host(folder, keys_per_token=1e9, chunk=64, streaming=16)
    low, high = (SamplingParams(max_new_tokens=2, temperature=0.0, priority=priority) for priority in (0, 1))

    def largest() -> int:
        host.submit(low, 200)
        host.submit(low, 200)
        sizes.clear()
        while host.core.has_work:
            sizes.append(host.core._roster.plan().num_tokens)
            host.step()
        return max(sizes)

    assert largest() == 64
    host.submit(high, 9)
    assert largest() <= 16 + 9 + 2
    now += MIXED_SECONDS
    assert largest() <= 16 + 2
    now += 0.1 + MIXED_SECONDS
    assert largest() == 64


def test_who_sits_a_step_out_for_a_higher_priority_has_a_token_in_each_second_step(folder: Path) -> None:
    host = Host(folder, keys_per_token=1e9)
    first = host.submit(SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True), 9)
    host.step()
    (request,) = host.core._roster.running.values()
    lengths = [request.length]
    for _ in range(6):
        host.submit(SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True, priority=1), 9)
        host.step()
        lengths.append(request.length)
    assert [later - before for before, later in pairwise(lengths)] == [0, 1, 0, 1, 0, 1]
    host.run()
    assert first.result()[0].finish_reason.type == "length"


def test_nobody_is_set_back_where_a_higher_one_was_to_be_admitted_alone_and_finds_no_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(folder, keys_per_token=1e9)
    host.submit(SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True), 9)
    host.step()
    host.submit(SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True, priority=1), 9)
    with monkeypatch.context() as patch:
        patch.setattr(host.core.pages, "acquire", lambda *args, **options: None)
        host.step()
    assert (host.core.num_waiting, host.core.num_running, host.core.counters.preemptions) == (1, 1, 0)
    assert len(host.run()) == 2


def test_a_high_priority_behind_hundreds_of_low_ones_is_seen(folder: Path) -> None:
    host = Host(folder)
    low, high = SamplingParams(max_new_tokens=2, temperature=0.0), SamplingParams(max_new_tokens=2, priority=1)
    waiting = [host.submit(low, 9) for _ in range(MAX_MATCHED_WAITING + 20)]
    urgent = host.submit(high, 9)
    for _ in range(3):
        host.step()
    assert urgent.is_done
    assert not waiting[-1].is_done
    host.run()
    assert host.core.pages.cache.stats().held_pages == 0


def test_time_that_a_request_runs_is_none_that_it_has_waited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    host = Host(folder)
    host.submit(SamplingParams(max_new_tokens=8, temperature=0.0), 9)
    roster = host.core._roster
    request = roster.waiting[0]
    now += 40.0
    host.step()
    assert (request.waited_seconds, request.waits_since) == (40.0, None)
    now += 500.0
    roster.preempt(request)
    now += 25.0
    assert now - roster._as_waiting(request).waits_from == 65.0
    host.run()
    assert request.waited_seconds == 65.0
