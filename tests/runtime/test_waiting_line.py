"""The line of those who wait, against a plain list; and what a step looks at of a long one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from niwaki.runtime.api import SamplingParams
from niwaki.runtime.loop import fairness, roster, scheduler
from niwaki.runtime.loop.plans import AGED_STEPS, Plan, Room, Running, Waiting
from niwaki.runtime.loop.roster import MAX_MATCHED_WAITING
from niwaki.runtime.loop.scheduler import PRIORITY_SECONDS
from niwaki.runtime.loop.waiting_line import WaitingLine
from niwaki.runtime.requests.request import Request
from tests.formula import Host
from tests.toy import make_model


@dataclass(frozen=True)
class Job:
    program: int | None


@dataclass(frozen=True)
class Waits:
    """What a line knows of a request."""

    id: int
    params: SamplingParams
    namespace: str
    job: Job = field(default_factory=lambda: Job(None))


def drawn(draw: random.Random, number: int) -> Request:
    params = SamplingParams(priority=draw.choice((0, 0, 0, 2)))
    return cast(Request, Waits(number, params, draw.choice(("", "a", "b")), Job(draw.choice((None, 7, 8)))))


@pytest.mark.parametrize("seed", range(4))
def test_it_is_a_list_in_order_of_arrival_whoever_comes_goes_or_is_set_back(seed: int) -> None:
    draw, line = random.Random(seed), WaitingLine()
    waiting: list[Request] = []
    gone: list[Request] = []
    for number in range(300):
        if waiting and draw.random() < 0.45:
            gone.append(waiting.pop(draw.randrange(len(waiting))))
            line.remove(gone[-1])
        elif gone and draw.random() < 0.3:
            back = gone.pop(draw.randrange(len(gone)))
            waiting = sorted([*waiting, back], key=lambda one: one.id)
            line.add(back)
        else:
            waiting.append(drawn(draw, number))
            line.add(waiting[-1])
        line.check()
        assert (list(line), len(line)) == (waiting, len(waiting))
        assert line.priorities() == {one.params.priority for one in waiting}
        for one in waiting[:1]:
            assert line[0] is one is line.find(one.id)


@pytest.mark.parametrize("most", [1, 5, 40])
@pytest.mark.parametrize("seed", range(3))
def test_who_is_looked_at_is_among_the_first_of_each_kind(seed: int, most: int) -> None:
    draw, line = random.Random(seed), WaitingLine()
    everybody = [drawn(draw, number) for number in range(200)]
    for one in everybody:
        line.add(one)
    some = line.first_of_each(most)
    assert list(some) == [one for one in everybody if one in some], "in order of arrival"

    def seen(of: list[Request]) -> list[Request]:
        of = sorted(of, key=lambda one: -one.params.priority)
        claims = [(one.namespace, one.job.program) for one in of]
        priorities = [one.params.priority for one in of]
        return [of[place] for place in fairness.seen(claims, priorities, lambda place: priorities[place], most)]

    assert seen(list(some)) == seen(everybody)
    assert line.first_of_each(200) is line._all
    for least in line.priorities():
        above = [one for one in everybody if one.params.priority > least]
        assert list(line.first_of_each(200, least)) == above
        assert list(line.first_of_each(most, least)) == [one for one in some if one in above]


def test_of_a_long_line_a_step_looks_at_no_more_than_of_a_shorter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(make_model(tmp_path))
    low, high = SamplingParams(max_new_tokens=2, temperature=0.0), SamplingParams(max_new_tokens=2, priority=1)
    for _ in range(4 * MAX_MATCHED_WAITING):
        host.submit(low, 9)
    host.submit(high, 9)
    num_looks = 0
    works = roster._waited

    def waited(request: Request, now: float) -> float:
        nonlocal num_looks
        num_looks += 1
        return works(request, now)

    monkeypatch.setattr(roster, "_waited", waited)
    host.core._roster.plan()
    assert num_looks <= 3 * MAX_MATCHED_WAITING
    host.core._roster.waiting.check()


def test_who_waits_of_the_highest_priority_is_admitted_alone_and_the_others_in_the_next_step(tmp_path: Path) -> None:
    host = Host(make_model(tmp_path))
    low, high = (SamplingParams(max_new_tokens=2, temperature=0.0, priority=priority) for priority in (0, 1))
    for params in (low, low, high, low, high):
        host.submit(params, 9)
    host.step()
    assert sorted(host.core._roster.running) == [2, 4]
    host.step()
    assert sorted(host.core._roster.running) == [0, 1, 3]
    assert len(host.run()) == 5


def test_where_somebody_of_a_higher_priority_comes_in_every_step_the_others_are_admitted_in_each_second(
    tmp_path: Path,
) -> None:
    host = Host(make_model(tmp_path))
    low, high = (SamplingParams(max_new_tokens=1, temperature=0.0, priority=priority) for priority in (0, 900))
    first = host.submit(low, 9)
    for _ in range(2):
        host.submit(high, 9)
        assert not first.is_done
        host.step()
    assert first.is_done


def test_who_has_waited_for_long_enough_to_count_as_much_is_admitted_beside_the_highest(tmp_path: Path) -> None:
    host = Host(make_model(tmp_path))
    host.submit(SamplingParams(max_new_tokens=2), 9)
    host.submit(SamplingParams(max_new_tokens=2, priority=1), 9)
    old = host.core._roster.waiting[0]
    old.waited_seconds = PRIORITY_SECONDS
    assert sorted(host.core._roster.plan().admit) == [0, 1]


def test_where_not_all_of_the_highest_find_room_others_take_what_is_left(tmp_path: Path) -> None:
    host = Host(make_model(tmp_path), num_pages=8)
    for length, priority in ((9, 0), (60, 1), (9, 1)):
        host.submit(SamplingParams(max_new_tokens=2, priority=priority), length)
    assert sorted(host.core._roster.plan().admit) == [0, 2]


def test_after_one_that_went_first_for_its_long_wait_the_next_waits_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(make_model(tmp_path / "toy"))
    seen: list[tuple[int, int | None]] = []
    make = scheduler.plan

    def noted(waiting: Sequence[Waiting], running: Sequence[Running], room: Room, policy: scheduler.Policy) -> Plan:
        made = make(waiting, running, room, policy)
        seen.append((room.since_aged, made.aged))
        return made

    monkeypatch.setattr(scheduler, "plan", noted)
    for index in range(12):  # eight may run
        host.submit(SamplingParams(max_new_tokens=AGED_STEPS + 10 + index, temperature=0.0, ignore_eos=True), 4)
    host.run()
    first = next(place for place, (_, aged) in enumerate(seen) if aged is not None)
    assert seen[first][0] >= AGED_STEPS
    assert seen[first + 1][0] < AGED_STEPS
