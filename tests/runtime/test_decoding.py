"""A steady batch kept as arrays gives what single steps give: the same tokens, text, counters and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from niwaki.runtime.api import (
    Cancelled,
    Choices,
    ConstraintError,
    Delta,
    Generation,
    GenerationError,
    Grammar,
    JsonSchema,
    Output,
    Regex,
    SamplingParams,
    Segment,
)
from niwaki.runtime.api.readiness import readiness
from niwaki.runtime.constraints.matcher import AutomatonMatcher
from niwaki.runtime.constraints.protocol import MaskRow
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Batch
from niwaki.runtime.loop import core, delivery, plans, scheduler
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.loop.counters import Counters
from niwaki.runtime.loop.decoding import Decoding
from niwaki.runtime.loop.roster import pages_of
from tests.benchmarks.stepping import Stepped, answer, come_to_rest
from tests.formula import Host, mixed
from tests.toy import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"))


T = TypeVar("T")

GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, top_p=0.9)
KINDS = [
    GREEDY,
    DRAWN,
    replace(GREEDY, max_new_tokens=150),  # text in several portions
    replace(DRAWN, ignore_eos=False),
    replace(DRAWN, stop=("a", "e")),
    replace(DRAWN, stop_token_ids=(7, 11, 19, 23)),
    replace(DRAWN, repetition_penalty=1.2, max_new_tokens=25),
    replace(DRAWN, min_tokens=10, ignore_eos=False),
    replace(GREEDY, return_logprob=True, max_new_tokens=12),
    replace(DRAWN, logit_bias=((9, 2.0),), max_new_tokens=9),
]
LED = replace(DRAWN, ignore_eos=False, constraint=Regex("(?s).{30,}"))  # nearly free, under a mask
CONSTRAINED = [
    LED,
    replace(GREEDY, constraint=Regex("[a-z ]*")),
    replace(LED, constraint=Regex("(?:[a-z]{3}, )*[a-z]{3}[.]"), max_new_tokens=17),  # the budget cuts it short
    replace(LED, constraint=Choices(("a" * 40, "a" * 39 + "bc", "dead end"))),
    replace(LED, constraint=Grammar('start: "<" /[^>]/* ">"'), max_new_tokens=30),
    replace(LED, constraint=JsonSchema('{"type": "array", "items": {"type": "string"}, "minItems": 2}')),
    replace(LED, stop=("a",)),
    replace(LED, return_logprob=True),
    replace(LED, repetition_penalty=1.2),
    replace(LED, stop_token_ids=(7, 11, 19, 23)),
]


def nobody_sits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who does hangs on the machine's speed."""
    take_late = delivery.Delivery.take_late
    monkeypatch.setattr(delivery.Delivery, "take_late", lambda own, until=None: take_late(own))


def one_by_one(monkeypatch: pytest.MonkeyPatch, work: Callable[[], T]) -> T:
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "is_steady", lambda plan, num_running, **others: False)
        return work()


@pytest.mark.parametrize("num_pages", [400, 60], ids=["roomy", "short"])
@pytest.mark.parametrize("kinds", [KINDS, [*KINDS[:3], *CONSTRAINED]], ids=["free", "constrained"])
def test_a_steady_batch_gives_what_single_steps_give(
    kinds: list[SamplingParams], num_pages: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody_sits_out(monkeypatch)
    host, single = Host(folder, num_pages), Host(folder, num_pages)
    outputs = mixed(host, kinds)
    assert outputs == one_by_one(monkeypatch, lambda: mixed(single, kinds))
    assert host.steady_steps > 50
    assert single.steady_steps == 0
    # Of two that end in one step another may enter the tree first, and so another page may be evicted first.
    counters = [replace(each.core.counters, recomputed_tokens=0) for each in (host, single)]
    assert counters[0] == counters[1]
    assert (num_pages == 60) == (host.core.counters.preemptions > 0)


def test_a_batch_is_steady_behind_its_prompts_where_nobody_waits(folder: Path) -> None:
    host = Host(folder)
    for length in (5, 9, 30):
        host.submit(DRAWN, length)
    host.step()
    assert host.core._decoding is not None
    host.run()


def test_a_batch_that_resumes_reads_the_pages_that_its_requests_hold_now(folder: Path) -> None:
    """A commit may have put another's equal page in the place of one since."""
    host = Host(folder)
    for length in (5, 9):
        host.submit(GREEDY, length)
    host.step()
    decoding = host.core._decoding
    assert decoding is not None
    decoding.settle()
    pages = pages_of(decoding.requests[1])
    pages[0], before = 399, pages[0]
    assert decoding.resume()
    assert decoding.batch.spans.table[1, : len(pages)].tolist() == pages
    pages[0] = before
    assert decoding.resume()
    host.run()


@pytest.mark.parametrize("kind", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_batch_in_which_nobody_finds_a_place_goes_on_whoever_comes(
    kind: SamplingParams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crowded() -> tuple[int | None, list[Output]]:
        host = Host(folder)
        for index in range(8):
            host.submit(replace(kind, max_new_tokens=20 + index, ignore_eos=True), 9)
        for _ in range(12):
            host.step()
            host.submit(replace(kind, max_new_tokens=5, ignore_eos=True), 9)
        steady = None if host.core._decoding is None else host.core._decoding.num_steps
        host.submit(replace(kind, max_new_tokens=5, ignore_eos=True, priority=1), 9)
        assert host.core._decoding is None, "one of them gives way"
        return steady, host.run()

    steady, outputs = crowded()
    assert (None, outputs) == one_by_one(monkeypatch, crowded)
    assert steady is not None
    assert steady > 8


def test_the_last_token_of_a_prompt_that_stands_alone_in_a_step_is_counted_and_shared(folder: Path) -> None:
    host = Host(folder)
    length = host.core._config.step_tokens + 1
    generation = host.submit(replace(GREEDY, max_new_tokens=4), length)
    host.step()
    host.step()
    assert host.core.counters.prefilled_tokens == length
    assert host.core.pages.cache.stats().tree_tokens == length
    host.run()
    assert generation.result()[0].first_seconds > 0.0


def test_the_seconds_of_a_request_are_without_those_in_which_kernels_are_compiled(folder: Path) -> None:
    host = Host(folder)
    with readiness:  # as the engine tells of a compiler that runs
        compiled = host.submit(GREEDY, 5)
        host.run()
    told = compiled.result()[0]
    assert (told.queued_seconds, told.first_seconds, told.seconds) == (0.0, 0.0, 0.0)
    later = host.submit(GREEDY, 5)
    host.run()
    told = later.result()[0]
    assert 0.0 < told.queued_seconds < told.first_seconds < told.seconds


def test_a_batch_that_does_not_fit_a_step_is_not_steady() -> None:
    rows = tuple(plans.Row(index, 1) for index in range(4))
    alone = {"num_waiting": 0, "max_batch_tokens": 4}
    assert scheduler.is_steady(plans.Plan(rows), 4, **alone)
    assert not scheduler.is_steady(plans.Plan(rows), 5, **alone)


@pytest.mark.parametrize("waited_seconds", [0.0, 3 * scheduler.PRIORITY_SECONDS])
@pytest.mark.parametrize("most_seen", [256, 10])
def test_a_program_of_many_branches_does_not_hold_up_another_s_only_one(
    folder: Path, most_seen: int, waited_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("niwaki.runtime.loop.roster.MAX_MATCHED_WAITING", most_seen)
    host = Host(folder)
    for _ in range(40):
        host.submit(GREEDY, 9, 1)
    for request in host.core._roster.waiting:
        request.waited_seconds = waited_seconds
    host.submit(GREEDY, 9, 2)
    while not host.generations[-1].is_done:
        host.step()
    assert sum(generation.is_done for generation in host.generations[:-1]) <= 8, "as many as may run at once"
    host.run()


def test_in_order_of_arrival_no_program_is_looked_at_before_its_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("niwaki.runtime.loop.roster.MAX_MATCHED_WAITING", 4)
    host = Host(folder)
    host.core._roster._policy = "fcfs"
    for program in [1] * 6 + [2]:
        host.submit(DRAWN, 9, program)
    host.step()
    assert list(host.core._roster.running) == [0, 1, 2, 3]
    host.run()


def test_who_begins_to_read_is_told_every_token_from_then_on(folder: Path) -> None:
    host = Host(folder)
    generation, other = host.submit(DRAWN, 5), host.submit(DRAWN, 9)
    for _ in range(20):
        host.step()
    deltas: list[Delta] = []
    generation.add_delta_callback(deltas.append)
    host.step()
    told = sum(len(delta.token_ids) for delta in deltas)
    assert told >= 19, "what came before, too"
    while host.core.has_work:
        before = len(deltas)
        host.step()
        assert len(deltas) <= before + 2
    (output,) = generation.result()
    assert "".join(delta.text for delta in deltas) == output.text
    assert [i for delta in deltas for i in delta.token_ids] == list(output.token_ids)
    assert len(deltas) > 10
    assert len(list(other.deltas())) <= 3, "nobody reads these one by one"


def test_a_mask_that_fails_fails_its_request_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_sits_out(monkeypatch)
    host, calm = Host(folder), Host(folder)
    for each in (host, calm):
        for params in (LED, LED, DRAWN):
            each.submit(params, 9)
    for _ in range(10):
        host.step()
    assert host.core._decoding is not None
    broken = host.core._decoding.requests[0].matcher

    def known_mask(matcher: AutomatonMatcher, remaining: int) -> None:
        return None

    fill = AutomatonMatcher.fill_mask

    def fill_mask(matcher: AutomatonMatcher, row: MaskRow) -> None:
        if matcher is broken:
            raise ConstraintError("broken")
        fill(matcher, row)

    monkeypatch.setattr(AutomatonMatcher, "known_mask", known_mask)
    monkeypatch.setattr(AutomatonMatcher, "fill_mask", fill_mask)
    host.step()
    monkeypatch.undo()
    assert isinstance(host.generations.pop(0).error(), ConstraintError)
    assert host.run() == calm.run()[1:]


def test_a_cancelled_request_leaves_what_it_computed_and_the_others_go_on(folder: Path) -> None:
    host, calm = Host(folder), Host(folder)
    for each in (host, calm):
        for length in (5, 9, 14):
            each.submit(DRAWN, length)
    for _ in range(20):
        host.step()
    host.core.abort(host.jobs[1])
    assert isinstance(host.generations[1].error(), Cancelled)
    host.core.pages.cache.check()
    assert host.core.pages.cache.stats().tree_tokens >= 9 + 15
    del host.generations[1]
    assert host.run() == [output for index, output in enumerate(calm.run()) if index != 1]


def test_a_model_that_fails_fails_the_batch_and_gives_its_pages_back(folder: Path) -> None:
    host = Host(folder)
    first, second = host.submit(GREEDY, 5), host.submit(GREEDY, 9)
    for _ in range(10):
        host.step()
    host.runner.broken_at = 16
    while host.core.has_work:
        host.step()
    assert isinstance(first.error(), GenerationError)
    assert isinstance(second.error(), GenerationError)
    assert host.core.pages.cache.stats().held_pages == 0


def test_a_row_that_is_not_finite_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, calm = Host(folder), Host(folder)
    for each in (host, calm):
        for params in (DRAWN, DRAWN, replace(GREEDY, return_logprob=True)):
            each.submit(params, 9)
    for _ in range(10):
        host.step()
    whole = host.runner.forward

    def broken(batch: Batch) -> torch.Tensor:
        logits = whole(batch)
        logits[0] = float("nan")
        return logits

    monkeypatch.setattr(host.runner, "forward", broken)
    host.step()
    monkeypatch.setattr(host.runner, "forward", whole)
    assert isinstance(host.generations.pop(0).error(), GenerationError)
    assert host.run() == calm.run()[1:]


@pytest.mark.parametrize("kinds", [KINDS, CONSTRAINED], ids=["free", "constrained"])
def test_who_decodes_goes_on_as_arrays_beside_pieces_of_prompts(
    kinds: list[SamplingParams], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives what single steps give: whoever ends meanwhile, and when the prompt has come."""
    nobody_sits_out(monkeypatch)

    def beside() -> tuple[int, list[Output], Counters]:
        host = Host(folder, chunk=24)
        num_beside = 0

        def step() -> None:
            nonlocal num_beside
            decoding = host.core._decoding
            num_beside += decoding is not None and bool(decoding.prefills)
            host.step()

        for first in (0, 5):
            for index, params in enumerate(kinds[first : first + 5]):
                host.submit(params, 3 + index)
            for _ in range(5):
                step()
            host.submit(replace(DRAWN, max_new_tokens=20), 230)
            host.submit(kinds[first], 120)
            while host.core.has_work:
                step()
        return num_beside, host.run(), host.core.counters

    num_beside, outputs, counters = beside()
    assert one_by_one(monkeypatch, beside) == (0, outputs, counters)
    assert num_beside > 10


def test_what_is_computed_beside_arrays_is_what_is_computed_in_planned_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of prompts and of those who decode, by a model that reads them."""
    texts = [f"the cat {'sat on the mat and ' * number}" for number in (1, 2, 3, 5, 60, 40)]
    num_beside: list[int] = []
    step_beside = EngineCore._step_beside

    def counted(core: EngineCore, decoding: Decoding) -> None:
        num_beside.append(len(decoding.requests))
        step_beside(core, decoding)

    monkeypatch.setattr(EngineCore, "_step_beside", counted)
    found: list[list[tuple[int, ...]]] = []
    counts: list[int] = []
    for pieces in (core.STEADY_PIECES, 1 << 30):
        monkeypatch.setattr(core, "STEADY_PIECES", pieces)
        with Stepped(folder, kv_tokens=4096, chunked_prefill_size=16, deterministic=True) as engine:
            running = [begun(engine, text) for text in texts[:4]]
            for _ in range(6):
                engine.turn()
            running += [begun(engine, text) for text in texts[4:]]
            found.append([answer(engine, generation)[0].token_ids for generation in running])
            come_to_rest(engine)
        counts.append(len(num_beside))
    assert found[0] == found[1]
    assert counts[0] == counts[1] > 5, "none in the second"


def begun(engine: Engine, text: str) -> Generation:
    params = replace(GREEDY, max_new_tokens=60)
    return engine.backend.generate(engine.backend.open(), [Segment(text)], params)
