"""Texts that others have written before are followed in one call for all, and come out as they do one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from niwaki.runtime.api import Constraint, GenerationError, Grammar, JsonSchema, Output, Regex, SamplingParams
from niwaki.runtime.constraints import ConstraintCompiler, Matcher
from niwaki.runtime.constraints.masks import MaskFiller
from niwaki.runtime.constraints.protocol import FREE
from niwaki.runtime.constraints.walks import BEFORE, BEHIND, LAST, MAX_STEPS, WALKED, Standing, StepTable, Walk, Way
from niwaki.runtime.forward.runner import Batch
from niwaki.runtime.loop import scheduler
from niwaki.runtime.loop.led import Led
from tests.formula import Host
from tests.toy import make_model
from tests.toy_constraints import make_compiler

GREEDY = SamplingParams(max_new_tokens=90, temperature=0.0, ignore_eos=True)
ANY_TEXT = Grammar(r"start: /(.|\n)*/")
ENDLESS = JsonSchema('{"type": "array", "items": {"type": "string"}, "minItems": 2}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConstraintCompiler]:
    with closing(make_compiler(tmp_path_factory.mktemp("toy"))) as made:
        yield made


def walked(host: Host) -> int:
    """Run it; in how many steps its texts walked."""
    count = 0
    while host.core.has_work:
        host.step()
        count += is_walking(host)
    return count


def is_walking(host: Host) -> bool:
    return host.core._decoding is not None and host.core._decoding._led.is_walking


def four(host: Host, params: SamplingParams) -> list[Output]:
    for length in (5, 9, 14, 7):
        host.submit(params, length)
    walked(host)
    return host.run()


@pytest.mark.parametrize("budget", [17, 90, 150])
@pytest.mark.parametrize("constraint", [Regex("(?s).*"), ANY_TEXT, ENDLESS], ids=["regex", "grammar", "schema"])
def test_known_texts_are_written_as_unknown_ones(
    constraint: Constraint, budget: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(GREEDY, constraint=constraint, max_new_tokens=budget)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "is_steady", lambda plan, num_running, **others: False)
        outputs = four(Host(folder), params)
    known = Host(folder).compiler
    num_walked = 0
    for _ in range(4):
        host = Host(folder)
        host.compiler = known
        for length in (5, 9, 14, 7):
            host.submit(params, length)
        num_walked = walked(host)
        assert host.run() == outputs
    assert num_walked or budget < 90


def test_who_begins_to_read_or_is_cancelled_ends_the_walk(folder: Path) -> None:
    params = replace(GREEDY, constraint=ANY_TEXT)
    host, calm = Host(folder), Host(folder)
    outputs = four(calm, params)
    for _ in range(3):
        seen = Host(folder)
        seen.compiler = calm.compiler
        assert four(seen, params) == outputs
    host.compiler = calm.compiler
    for length in (5, 9, 14, 7):
        host.submit(params, length)
    while not is_walking(host):
        host.step()
    deltas = host.generations[1].deltas()
    host.step()
    assert not is_walking(host)
    host.core.abort(host.jobs[2])
    while host.core.has_work:
        host.step()
    assert "".join(delta.text for delta in deltas) == outputs[1].text
    for index in (0, 1, 3):
        assert host.generations[index].result()[0].token_ids == outputs[index].token_ids


def test_beside_a_row_without_usable_logits_the_others_are_drawn_under_their_masks(folder: Path) -> None:
    params = replace(GREEDY, constraint=ENDLESS)
    calm = Host(folder)
    outputs = four(calm, params)
    for _ in range(3):
        seen = Host(folder)
        seen.compiler = calm.compiler
        four(seen, params)
    host = Host(folder)
    host.compiler = calm.compiler
    for length in (5, 9, 14, 7):
        host.submit(params, length)
    forward, num_masked = host.runner.forward, 0

    def broken(batch: Batch) -> torch.Tensor:
        """The first row is NaN, and the highest of another one is what its text does not allow."""
        nonlocal num_masked
        logits = forward(batch)
        if is_walking(host) and not num_masked:
            logits[0, 7] = torch.nan
            logits[1:, 0] = 100.0
            num_masked = len(logits) - 1
        return logits

    host.runner.forward = broken  # type: ignore[method-assign]
    while host.core.has_work:
        host.step()
    assert num_masked == 3
    assert type(host.generations[0].error()) is GenerationError
    for index in (1, 2, 3):
        assert host.generations[index].result()[0].token_ids == outputs[index].token_ids


@pytest.mark.parametrize("constraint", [ANY_TEXT, ENDLESS, Regex("(?:[a-z]{3}, )*[a-z]{3}[.]"), Regex("(?s).*")])
@pytest.mark.parametrize("budget", [40, 2000])
def test_a_matcher_that_has_walked_is_as_one_that_stepped(
    constraint: Constraint, budget: int, compiler: ConstraintCompiler
) -> None:
    compiled = compiler.compile(constraint)
    filler = MaskFiller(compiler.vocabulary.num_words)
    num_walked = 0
    for text in range(80):
        draw = random.Random(text % 8)
        one, other = compiled.matcher(), compiled.matcher()
        remaining = budget
        walk: Walk | None = None
        for _ in range(35):
            if other.is_done or remaining == 0:
                break
            (row,) = filler.start([other]).rows()
            assert isinstance(row, np.ndarray)
            token_id = draw.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
            is_known = other.step(token_id, remaining)
            if not is_known and not other.admits(token_id, remaining):
                continue
            if walk is None and (standing := one.standing()) is not None:
                walk = Walk([standing], [0])
            left = np.array([remaining]), np.array([0])
            if walk is not None and walk.knows(np.array([token_id]), *left):
                # Near the end of a budget a step tells that the mask behind it is at hand; who walks needs none.
                assert is_known or other.follow(token_id, remaining) is FREE, "what may be walked may be told"
                walk.go()
                num_walked += 1
            else:
                end_walk(walk, one)
                walk = None
                if not one.step(token_id, remaining):
                    assert one.follow(token_id, remaining) in (FREE, other.follow(token_id, remaining))
            remaining -= 1
            if draw.random() < 0.1:
                end_walk(walk, one)
                walk = None
                assert_alike(one, other, remaining)
        end_walk(walk, one)
        assert_alike(one, other, remaining)
        if text % 2:  # what is behind each token is asked for before the end is looked for
            for count in range(1, budget - remaining):
                shorter, alike = one.clone(), other.clone()
                shorter.rollback(count)
                alike.rollback(count)
                assert_alike(shorter, alike, remaining + count)
        assert one.shortest_ending(50) == other.shortest_ending(50)
        one.rollback(budget - remaining)
        assert_alike(one, compiled.matcher(), budget)
    filler.close()
    assert num_walked > 100 or budget < 2000


def test_a_walk_by_a_regex_goes_on_to_the_end_of_a_budget(compiler: ConstraintCompiler) -> None:
    """Where distances are exact: what fits is known, so the last steps need no masks, however far some ends are."""
    compiled = compiler.compile(Regex("(?s).*"))
    token_id, stranger = compiler.vocabulary.token_bytes.index(b"a"), compiler.vocabulary.token_bytes.index(b"\xf0")
    for _ in range(3):  # one to find where it leads, one that has found it, one to whom it is known
        matcher = compiled.matcher()
        for each in (token_id, token_id, stranger):
            if not matcher.step(each, 100):
                matcher.follow(each, 100)
            matcher.fill_mask(np.zeros(compiler.vocabulary.num_words, np.uint32))
    assert compiled.matcher().step(token_id, 1)
    assert not compiled.matcher().step(stranger, 1)
    matcher = compiled.matcher()
    matcher.accept(token_id)
    standing = matcher.standing()
    assert standing is not None

    def goes(token_id: int, left: int) -> bool:
        return Walk([standing], [0]).knows(np.array([token_id]), np.array([left]), np.array([0]))

    assert [goes(token_id, left) for left in (100, 2, 1)] == [True] * 3
    matcher.accept(stranger)
    assert matcher.distance > 1, "a character has begun"
    assert [goes(stranger, matcher.distance + more) for more in (2, 1, 0)] == [True, True, False]


def end_walk(walk: Walk | None, matcher: Matcher) -> None:
    for way in walk.ways() if walk is not None and walk.num_steps else ():
        matcher.walked(way)


def assert_alike(one: Matcher, other: Matcher, remaining: int) -> None:
    assert (one.can_end, one.is_done) == (other.can_end, other.is_done)
    assert one.fits(remaining) == other.fits(remaining)
    first, second = np.zeros(15, np.uint32), np.zeros(15, np.uint32)
    one.fill_mask_within(first, remaining)
    other.fill_mask_within(second, remaining)
    assert (first == second).all()


def test_a_table_finds_all_that_was_added_and_nothing_else() -> None:
    table = StepTable()
    draw = random.Random(1)
    added = {(draw.randrange(4000), draw.randrange(131_072)): draw.randrange(4000) for _ in range(5000)}
    for (place, token_id), after in added.items():
        table.add(place, token_id, after, 1, 3, 0)
        table.add(place, token_id, after, 1, 3, 1)  # again
    for place in {place for place, _ in added} | {4001}:
        mine = [token_id for other, token_id in added if other == place] + [draw.randrange(131_072)]
        walk = Walk([Standing(table, place, 2)] * len(mine), range(len(mine)))
        tokens, none = np.array(mine), np.zeros(len(mine), np.int64)
        assert walk.knows(tokens, none + 100, none) == all((place, token_id) in added for token_id in mine)
        known = Walk([Standing(table, place, 2)], [0])
        for token_id in mine[:-1]:
            assert known.knows(np.array([token_id]), none + 100, none)
            known.go()
            (way,) = known.ways()
            assert (way.places, way.bounds, way.token_ids) == ([added[place, token_id]], [3], [token_id])
            known = Walk([Standing(table, place, 2)], [0])
        fresh = Walk([Standing(StepTable(), place, 2)], [0])
        assert not fresh.knows(np.array(mine[:1]), none[:1] + 100, none[:1]), "each table has steps of its own"


def test_a_walk_goes_only_where_an_end_is_known_to_fit_and_stops_to_tell() -> None:
    table = StepTable()
    for place in range(3):
        table.add(place, 7, place + 1, cost=4, farthest=6, ends=[0, 1, 3][place])

    def bound_after(place: int, bound: int, left: int) -> int | None:
        walk = Walk([Standing(table, place, bound)], [0])
        if not walk.knows(np.array([7]), np.array([left]), np.array([0])):
            return None
        walk.go()
        (way,) = walk.ways()
        assert way.bounds == [way.bound]
        return way.bound

    assert [bound_after(0, 5, left) for left in (10, 9)] == [9, None]
    assert [bound_after(1, 5, left) for left in (10, 9, 7, 6)] == [9, 6, 6, None]
    assert [bound_after(2, 5, left) for left in (10, 7, 6, 1)] == [9, 6, 0, 0]
    table.add(5, 7, 6, cost=4, farthest=6, ends=LAST | BEFORE | BEHIND)
    assert [bound_after(5, 1, left) for left in (90, 2, 1)] == [None, None, 0], "nobody knows what may follow it"
    table.add(9, 7, 9, 0, 1, 0)
    walk = Walk([Standing(table, 9, 1)], [0])
    for _ in range(WALKED):
        assert walk.knows(np.array([7]), np.array([9]), np.array([0]))
        walk.go()
    assert not walk.knows(np.array([7]), np.array([9]), np.array([0])), "its matcher must be told first"


def test_a_table_stops_growing_at_its_limit() -> None:
    table = StepTable()
    for place in range(MAX_STEPS + 1000):
        table.add(place, 5, place, 1, 1, 0)
    assert table.num_bytes < 3 << 20
    for place, is_known in ((MAX_STEPS - 1, True), (MAX_STEPS, False)):
        walk = Walk([Standing(table, place, 1)], [0])
        assert walk.knows(np.array([5]), np.array([9]), np.array([0])) == is_known


@pytest.mark.parametrize("constraint", [Regex("(?s).*"), ANY_TEXT], ids=["regex", "grammar"])
def test_known_texts_walk_from_their_second_token_to_the_last(
    constraint: Constraint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(GREEDY, constraint=constraint, max_new_tokens=12)
    known = Host(folder)
    # Two, so that each is met before the last step, too.
    letters = [known.compiler.vocabulary.token_bytes.index(letter) for letter in (b"a", b"b")]
    forward, num_walked, num_steps = known.runner.forward, [], []

    def written_in_letters(batch: Batch) -> torch.Tensor:
        logits = forward(batch)
        found = logits - 100
        found[:, letters] = logits[:, letters]
        return found

    # In vain for who ends where he walked to: draws under masks, and steps made lists.
    in_vain: list[str] = []

    def counted(whose: type, name: str) -> None:
        call = getattr(whose, name)

        def noted(*given: object) -> object:
            in_vain.append(name)
            return call(*given)

        monkeypatch.setattr(whose, name, noted)

    counted(Led, "drawn_under")
    counted(Way, "_told")

    for _ in range(5):
        in_vain.clear()
        host = Host(folder)
        host.compiler, host.runner.forward = known.compiler, written_in_letters  # type: ignore[method-assign]
        for length in (5, 9, 14, 7, 8, 6):
            host.submit(params, length)
        num_walked.append(walked(host))
        num_steps.append(host.core.counters.steps)
        outputs = host.run()
        assert [(len(output.token_ids), output.complete) for output in outputs] == [(12, True)] * 6
    assert num_steps[-1] == 12
    assert num_walked[-1] == 11  # begun behind the first token, over with the last one
    assert not in_vain
