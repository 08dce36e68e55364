"""Beside texts without constraints the others are looked after as far as the time goes; who is left sits a step out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from niwaki.runtime.api import Cancelled, JsonSchema, Output, Regex, SamplingParams
from niwaki.runtime.constraints import Matcher, masks
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.loop import delivery, forced, late, scheduler
from niwaki.runtime.loop.pause import Pause
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.sampler import Sampled
from tests.formula import Host, mixed
from tests.runtime.test_decoding import CONSTRAINED, DRAWN, GREEDY
from tests.toy import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"))


def schema_of(number: int) -> JsonSchema:
    names = {f"{word}{number}": {"type": kind} for word, kind in (("a", "string"), ("b", "integer"), ("c", "boolean"))}
    return JsonSchema(json.dumps({"properties": names, "required": [*names], "additionalProperties": False}))


FREE = replace(GREEDY, max_new_tokens=60)
LED = [replace(DRAWN, ignore_eos=False, constraint=schema_of(number), max_new_tokens=50) for number in range(5)]
LED_LONG = replace(GREEDY, constraint=Regex("[a-z ]{40,}"), max_new_tokens=50)


def limited(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(delivery, "PATIENCE", seconds)
    monkeypatch.setattr(delivery, "SHARE", 0.0)
    monkeypatch.setattr(late, "MAX_SAT_OUT", 0)  # steps on a formula leave the thread no time


def written(host: Host, kinds: Sequence[SamplingParams]) -> list[Output]:
    """But for what was guessed, and what others had computed before."""
    return [replace(one, drafted=(), drafted_spans=(), cached_tokens=0) for one in mixed(host, kinds)]


@pytest.mark.parametrize(("seconds", "num_pages"), [(0.0, 400), (0.0, 60), (0.0005, 400)])
def test_who_sits_out_writes_the_same(
    seconds: float, num_pages: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [*CONSTRAINED, *LED, FREE, replace(FREE, temperature=1.0)]
    limited(monkeypatch, 3600.0)
    with monkeypatch.context() as patched:
        told_here(patched)
        expected = written(Host(folder, num_pages), kinds)
    limited(monkeypatch, seconds)
    host = Host(folder, num_pages)
    assert written(host, kinds) == expected
    assert (num_pages == 60) == (host.core.counters.preemptions > 0)


def test_who_was_made_shorter_beside_others_says_so_whatever_the_last_token_forced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    schema = {"properties": {"on": flags}, "required": ["on"], "additionalProperties": False}
    cut = replace(LED[0], constraint=JsonSchema(json.dumps({"type": "object", **schema})))
    kinds = [FREE, *[replace(cut, max_new_tokens=budget) for budget in range(9, 15)]]
    limited(monkeypatch, 3600.0)
    with monkeypatch.context() as patched:
        told_here(patched)
        expected = written(Host(folder), kinds)
    assert {(one.finish_reason.type, one.complete) for one in expected[1:]} == {("stop", True), ("length", True)}
    assert written(Host(folder), kinds) == expected


def told_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers are told of what is drawn by the thread that takes it."""
    monkeypatch.setattr(delivery.Delivery, "_is_told_beside", lambda own, request, sampled: False)


def all_masks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are waited for in the step that asks, however long they take."""
    ready = late.Late.ready

    def ready_at_once(own: late.Late) -> Iterator[late.Undrawn]:
        with own._pause:
            assert all(rows.masks.are_there(None) for rows in own._undrawn)
        return ready(own)

    monkeypatch.setattr(late.Late, "ready", ready_at_once)


def every_step_takes_all_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sits a step out, however slow the machine."""
    limited(monkeypatch, 3600.0)
    told_here(monkeypatch)
    all_masks_are_there(monkeypatch)


def test_who_is_set_back_while_his_matcher_is_told_of_a_token_keeps_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [*CONSTRAINED, *LED, FREE, *LED, replace(FREE, temperature=1.0)]
    with monkeypatch.context() as patched:
        told_here(patched)
        expected = written(Host(folder, 400), kinds)
    # All masks are waited for and the matchers told at once, and nobody's token is taken before somebody waits for it.
    is_ready, take_drawn = late.Drawn.is_ready, delivery.Delivery.take_drawn
    waited_for: set[late.Drawn] = set()
    taken: list[bool] = []

    def ready_when_waited_for(own: late.Drawn, *, waits: bool = False, seconds: float = -1) -> bool:
        with nullcontext() if host.core.pause.is_on else host.core.pause:
            is_ready(own, waits=True)
        if waits:
            waited_for.add(own)
        return not own.is_told or own in waited_for

    def counted(own: delivery.Delivery) -> bool:
        taken.append(take_drawn(own))
        return taken[-1]

    monkeypatch.setattr(delivery, "PATIENCE", 3600.0)
    all_masks_are_there(monkeypatch)
    monkeypatch.setattr(late.Drawn, "is_ready", ready_when_waited_for)
    monkeypatch.setattr(delivery.Delivery, "take_drawn", counted)
    host = Host(folder, 60)
    outputs = written(host, kinds)
    assert host.core.counters.preemptions > 0
    assert any(taken)
    assert outputs == expected


def test_what_fails_beside_fails_its_own_request_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 0.0)
    find = forced.forced_tokens
    failed: list[Matcher] = []

    def failing(matcher: Matcher, tail: Sequence[int], remaining: int, boundaries: Boundaries) -> list[int]:
        if not failed:
            failed.append(matcher)
        if matcher is failed[0]:
            raise RuntimeError("broken")
        return find(matcher, tail, remaining, boundaries)

    monkeypatch.setattr(late, "forced_tokens", failing)
    all_masks_are_there(monkeypatch)  # else the text without one may have ended, and nothing is told beside any more
    host = Host(folder)
    for params in [FREE, *LED]:
        host.submit(params, 4)
    while host.core.has_work:
        host.step()
    errors = [generation.error() for generation in host.generations]
    assert sum(error is not None for error in errors) == 1
    assert any("broken" in str(error) for error in errors)
    assert errors[0] is None
    host.core.pages.cache.check()


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is steady, and no mask late."""
    monkeypatch.setattr(scheduler, "is_steady", lambda plan, num_running, **others: False)
    monkeypatch.setattr(masks.Masks, "are_there", lambda waiting, seconds: True)


def written_behind_each_step(host: Host, params: Sequence[SamplingParams]) -> list[list[int]]:
    """How many tokens each has after each step, until the first has ended."""
    for one in params:
        host.submit(one, 4)
    requests = list(host.core._roster.waiting)
    written = [[request.num_generated for request in requests]]  # what is forced at once
    while not host.generations[0].is_done:
        host.step()
        written.append([request.num_generated for request in requests])
    return written


def moved(written: Sequence[Sequence[int]]) -> list[list[bool]]:
    """Of each step who has written something in it."""
    return [[old < new for old, new in zip(before, after, strict=True)] for before, after in pairwise(written)]


def test_a_text_without_a_constraint_has_a_token_of_every_step_and_the_others_take_turns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 0.0)
    one_by_one(monkeypatch)
    host = Host(folder)
    written = written_behind_each_step(host, [FREE, *LED])
    steps = moved(written)
    assert all(has for has, *_ in steps)
    assert len(steps) == FREE.max_new_tokens
    assert all(sum(others) <= 1 for _, *others in steps)
    for place in range(1, 1 + len(LED)):
        at = [number for number, has in enumerate(steps) if has[place]]
        assert at[0] < len(LED) + 1
        assert all(later - earlier <= len(LED) + 1 for earlier, later in pairwise(at))
        assert host.generations[place].is_done


def test_texts_under_constraints_alone_wait_for_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 0.0)
    one_by_one(monkeypatch)
    host = Host(folder)
    assert all(map(all, moved(written_behind_each_step(host, [LED_LONG] * 3))[:4]))


def test_who_is_alone_when_the_others_have_ended_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 0.0)
    host = Host(folder)
    written_behind_each_step(host, [replace(FREE, max_new_tokens=3), *LED])
    assert host.core.num_running == len(LED)
    host.run()
    assert host.core.counters.preemptions == 0


def test_who_is_cancelled_while_he_sits_out_is_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 0.0)
    host = Host(folder)
    for params in [FREE, *LED]:
        host.submit(params, 4)
    host.step()
    host.step()
    running = [request for request in host.core._roster.running.values() if request.num_pending == 0]
    assert len(running) >= 3
    for request in running:
        host.core.abort(request.job)
    num_generated = [request.num_generated for request in running]
    while host.core.has_work:
        host.step()
    assert [request.num_generated for request in running] == num_generated, "what was drawn for him is dropped"
    gone = [host.generations[request.id] for request in running]
    assert all(isinstance(generation.error(), Cancelled) for generation in gone)
    assert host.core.pages.cache.stats().held_pages == 0


def hold_masks_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """None is filled before the event is set."""
    may_fill = threading.Event()
    fill = masks.MaskFiller._fill

    def held_up(*arguments: object) -> None:
        may_fill.wait(30)
        fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(masks.MaskFiller, "_fill", held_up)
    return may_fill


def test_who_is_cancelled_before_his_mask_is_there_has_nothing_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 0.0)
    may_fill = hold_masks_up(monkeypatch)
    drawn: list[Request] = []
    add_drawn = late.Late.add_drawn

    def noted(own: late.Late, request: Request, sampled: Sampled, *, is_told_beside: bool) -> None:
        drawn.append(request)
        add_drawn(own, request, sampled, is_told_beside=is_told_beside)

    monkeypatch.setattr(late.Late, "add_drawn", noted)
    host = Host(folder)
    for params in (FREE, LED[0], LED[1]):
        host.submit(params, 4)
    host.step()
    _, gone, left = host.core._roster.running.values()
    host.core.abort(gone.job)
    may_fill.set()
    while host.core.has_work:
        host.step()
    assert left in drawn
    assert gone not in drawn


def test_masks_that_are_not_there_hold_nobody_up_but_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 0.0)
    may_fill = hold_masks_up(monkeypatch)
    host = Host(folder)
    quick = replace(GREEDY, constraint=Regex("[a-z ]*"), max_new_tokens=20)
    host.submit(FREE, 4)
    host.submit(LED[0], 4)
    host.submit(quick, 4)
    for _ in range(10):
        host.step()
    free, led, _ = host.core._roster.running.values()
    assert free.num_generated == 10
    num_forced = len(led.forced)
    assert led.num_generated == num_forced
    may_fill.set()
    host.run()
    assert all(generation.error() is None for generation in host.generations)


def test_what_is_told_slowly_is_waited_for_a_little_in_each_step_and_to_the_end_behind_many() -> None:
    line = late.Late(None, Pause())
    drawn = late.Drawn(cast(Request, SimpleNamespace(lease=None, matcher=None)), Sampled(1))
    line._drawn.append(drawn)
    drawn.begin()  # nobody tells its matcher yet

    def step_on() -> None:
        for _ in range(late.MAX_SAT_OUT):
            line.begin_step()

    stepping = threading.Thread(target=step_on, daemon=True)
    stepping.start()
    stepping.join(60)
    assert not stepping.is_alive(), "the others have their steps"
    assert line.next_drawn() is None
    last = threading.Thread(target=line.begin_step, daemon=True)
    last.start()
    assert last.is_alive(), "its turn comes in any case"
    drawn.tell(None)
    last.join(60)
    assert not last.is_alive()
    assert line.next_drawn() is drawn
