"""Programs share the places: who has many branches takes no more than his share while others wait."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from niwaki.runtime.api import SamplingParams, Segment
from niwaki.runtime.engine import Engine
from niwaki.runtime.loop.fairness import Claim, over_share, owner_of, seen
from niwaki.runtime.loop.plans import Plan, Room, Running, Waiting
from niwaki.runtime.loop.scheduler import PRIORITY_SECONDS, Policy, plan
from niwaki.runtime.requests.request import Request
from tests.runtime.server.conftest import held

PAGE = 4


def line_of(programs: Sequence[int | None], cached: dict[int | None, int]) -> list[Waiting]:
    """In order of arrival; of each program's prompts so many tokens are cached."""
    return [
        Waiting(
            number, np.arange(40, dtype=np.int32) + 100 * number, 1, num_cached=cached.get(program, 0), program=program
        )
        for number, program in enumerate(programs)
    ]


def claims(programs: Sequence[int]) -> list[Claim]:
    return [("", program) for program in programs]


def planned(waiting: list[Waiting], running: list[Running], places: int, policy: Policy = "lpm") -> Plan:
    return plan(waiting, running, Room(1000, PAGE, max_batch_tokens=10_000, max_running=places), policy)


def test_the_longest_match_goes_first_within_the_share_of_its_program() -> None:
    line = line_of([1] * 8 + [2, 2], {1: 36})
    assert planned(line, [], 4).admit == (0, 1, 8, 9)
    assert planned(line, [], 4, "fcfs").admit == (0, 1, 2, 3)


def test_what_others_leave_of_their_share_is_taken() -> None:
    assert planned(line_of([1] * 8 + [2], {1: 36}), [], 4).admit == (0, 1, 8, 2)


def test_who_runs_counts() -> None:
    running = [Running(100 + number, 20, 19, 5, 10, program=1) for number in range(2)]
    assert planned(line_of([1, 1, 2, 2], {1: 36}), running, 4).admit == (2, 3)


@pytest.mark.parametrize("programs", [[1] * 6, [None] * 6])
def test_one_program_and_requests_of_none_have_all_places(programs: list[int | None]) -> None:
    assert planned(line_of(programs, {}), [], 4).admit == (0, 1, 2, 3)


def test_more_programs_than_places_have_one_each_at_most() -> None:
    assert over_share([(number, ("", number // 2)) for number in range(20)], [], 4) == set(range(1, 20, 2))


def test_callers_share_the_places_before_their_programs_do() -> None:
    """However many programs and caches one of them has."""
    busy = [(number, ("a", None if number % 2 else number)) for number in range(8)]
    assert over_share([*busy, (8, ("b", None))], [], 4) == set(range(2, 8))
    assert over_share([*busy, (8, ("b", None))], [("a", None)] * 2, 4) == set(range(8))
    forks = [(number, ("a", 1 if number < 3 else 2)) for number in range(4)]
    assert over_share([*forks, (4, ("b", 3))], [], 8) == {2}, "two of the four places of the first"
    assert over_share([(number, ("a", None)) for number in range(9)], [], 2) == set()


def test_caches_of_one_caller_are_no_more_callers() -> None:
    line = [replace(request, namespace=f"a/{request.id}") for request in line_of([None] * 8, {None: 36})]
    line += [replace(request, namespace=name) for request, name in zip(line_of([None] * 10, {})[8:], "bc", strict=True)]
    assert planned(line, [], 3).admit == (0, 8, 9)
    assert owner_of("a") == owner_of("a/b") == "a"
    assert owner_of("") == owner_of("/b") == ""


def test_of_a_long_line_the_first_of_each_program_are_seen() -> None:
    def seen_of(programs: Sequence[int | None], most: int) -> list[int]:
        return list(seen([("", program) for program in programs], [0] * len(programs), lambda place: 0, most))

    assert seen_of([1, 1, 1, 2], 9) == [0, 1, 2, 3]
    assert seen_of([1] * 10 + [2] + [3] * 5, 6) == [0, 1, 2, 10, 11, 12], "what the second leaves is the first one's"
    assert seen_of([None] * 10, 4) == [0, 1, 2, 3]
    callers = [("a", number) for number in range(10)] + [("b", None)]
    assert list(seen(callers, [0] * 11, lambda place: 0, 4)) == [0, 1, 2, 10]


def test_of_a_long_line_each_program_of_each_caller_is_seen() -> None:
    line: list[Claim] = [*([("a", 1)] * 1000), ("a", 2), ("b", 3)]
    found = seen(line, [0] * len(line), lambda place: 0, 256)
    assert (len(found), 1000 in found, 1001 in found) == (256, True, True)


def test_of_a_long_line_a_higher_priority_is_seen_first() -> None:
    priorities = [5] * 4 + [0] * 4
    assert list(seen(claims([1] * 4 + [2] * 4), priorities, priorities.__getitem__, 4)) == [0, 1, 2, 3]
    ranks = [6, 5, 5, 5, 5, 0, 0, 0]
    line = claims([2] + [1] * 4 + [2] * 3)
    assert list(seen(line, [0, *priorities[:4], 0, 0, 0], ranks.__getitem__, 4)) == [0, 1, 2, 3]


def test_waiting_long_before_another_program_came_raises_nobody_over_its_share() -> None:
    old = [replace(request, waits_from=-3 * PRIORITY_SECONDS) for request in line_of([1] * 8, {1: 36})]
    line = [*old, replace(line_of([2] * 9, {})[8], first_step=-5)]
    assert planned(line, [], 4).admit == (0, 1, 8, 2)
    ranks = [3] * 10 + [0]
    assert list(seen(claims([1] * 10 + [2]), [0] * 11, ranks.__getitem__, 4)) == [0, 1, 2, 10]


def test_what_was_forked_is_of_the_same_program(bundled_engine: Engine) -> None:
    backend = bundled_engine.backend
    trunk, other = backend.open(), backend.open()
    twin = backend.fork(backend.fork(trunk))
    with held(bundled_engine):  # none of them ends by itself
        running = [
            backend.generate(branch, [Segment("Hello")], SamplingParams(max_new_tokens=200, ignore_eos=True))
            for branch in (trunk, twin, other)
        ]
        programs = [branch.jobs[0].program for branch in (trunk, twin, other)]
        for generation in running:
            generation.cancel()
    assert None not in programs
    assert programs[0] == programs[1] != programs[2]


def test_a_call_with_many_prompts_does_not_hold_up_another_call(bundled_engine: Engine) -> None:
    backend, roster = bundled_engine.backend, bundled_engine.backend._core._roster
    admitted: list[int | None] = []
    admit, config = roster._admit, roster._config

    def note(request: Request) -> None:
        admitted.append(request.job.program)
        admit(request)

    is_held, may_begin = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        assert may_begin.wait(60)

    backend._inbox.post(hold)
    assert is_held.wait(60), "or it takes the first call along, and the other one behind that call's first step"
    once: tuple[object, ...] = ({"max_new_tokens": 1}, None, False, -1, 0)
    roster._admit, roster._config = note, dataclasses.replace(config, max_running_requests=2)  # type: ignore[method-assign]
    try:
        calls = [
            bundled_engine._start(prompt, *once, stream=False)  # type: ignore[arg-type]
            for prompt in ([f"{number} and more" for number in range(6)], "Hello everybody there")
        ]
        may_begin.set()
        for call in calls:
            call.results()
    finally:
        del roster._admit
        roster._config = config
    assert len(admitted) == 7
    assert len(set(admitted)) == 2
    assert admitted[0] != admitted[1], "who has one is among the first two"
    assert None not in admitted
