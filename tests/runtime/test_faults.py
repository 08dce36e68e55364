"""A bug in what is done for one request ends that request, and no other (scorecard F7): none waits for ever, its batch
mates' tokens are those of a clean run, and the pages come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from niwaki.runtime.api import Generation, GenerationError, Grammar, NiwakiError, Output, Regex, SamplingParams
from niwaki.runtime.constraints.grammar_engine import GrammarMatcher
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.matcher import AutomatonMatcher
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.jobs import GenerateJob
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.redraw import sample_within
from niwaki.runtime.sampling.sampler import Sampled, SampleRow, rows_of, token_logprobs
from tests.formula import Host
from tests.toy import make_model

GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
LOOKED_AT = replace(GREEDY, stop=("a stop that never comes",))
ONE_BY_ONE = replace(GREEDY, repetition_penalty=1.2)
TOLD = replace(GREEDY, return_logprob=True)
LED = replace(GREEDY, temperature=1.0, ignore_eos=False, constraint=Regex("(?s).{30,}"))
FIRST_STEPS = 12  # the fault comes behind them, while all decode

HOOKS: list[tuple[type, str, SamplingParams]] = [
    (Request, "take", LOOKED_AT),
    (Request, "show", LOOKED_AT),
    (Request, "next_delta", LOOKED_AT),
    (Request, "end_text", replace(TOLD, top_logprobs_num=2)),
    (Request, "sample_row", ONE_BY_ONE),
    (Request, "drop_unshown", GREEDY),
    (Request, "output", GREEDY),
    (Request, "kept_ids", GREEDY),
    (AutomatonMatcher, "admits", LED),
    (AutomatonMatcher, "accept", replace(LED, stop=("a stop that never comes",))),
    (AutomatonMatcher, "fill_mask", LED),
    (AutomatonMatcher, "known_mask", LED),
    (AutomatonMatcher, "follow", LED),
    (GrammarMatcher, "new_mask", replace(LED, constraint=Grammar(r"start: /(.|\n){30,}/"))),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"))


def submitted(host: Host, params: SamplingParams) -> tuple[Generation, list[Generation]]:
    """One request that will fail, between others of every kind."""
    before = [host.submit(each, 9) for each in (GREEDY, TOLD)]
    chosen = host.submit(params, 9)
    return chosen, [*before, *(host.submit(each, 9) for each in (LOOKED_AT, ONE_BY_ONE))]


def told(generation: Generation) -> Output:
    return replace(generation.result(0)[0], seconds=0.0, queued_seconds=0.0, first_seconds=0.0)


@pytest.mark.parametrize(("owner", "name", "params"), HOOKS, ids=[name for _, name, _ in HOOKS])
def test_a_fault_at_a_hook_of_one_request_ends_it_alone(
    owner: type, name: str, params: SamplingParams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, calm = Host(folder), Host(folder)
    _, expected = submitted(calm, params)
    calm.run()
    chosen, others = submitted(host, params)
    host.run_until_steady(FIRST_STEPS)
    victim = host.core._roster.running[host.generations.index(chosen)]
    whole: Callable[..., object] = getattr(owner, name)
    faults: list[object] = []

    def broken(self: object, *args: object, **options: object) -> object:
        if self is victim or self is victim.matcher or any(self is own for own in victim.top_logprobs):
            faults.append(self)
            raise RuntimeError("a bug")
        return whole(self, *args, **options)

    monkeypatch.setattr(owner, name, broken)
    while host.core.has_work:
        host.step()
    assert faults, "the hook was called"
    assert isinstance(chosen.error(), GenerationError)
    assert "a bug" in str(chosen.error())
    assert [told(each) for each in others] == [told(each) for each in expected]
    host.core.pages.cache.check()
    assert host.core.pages.cache.stats().held_pages == 0


def test_a_fault_at_the_door_ends_the_request_and_nobody_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(folder)
    whole = Request.next_delta

    def broken(self: Request, *, is_last: bool = False) -> object:
        if self.num_prompt == 7:
            raise RuntimeError("a bug")
        return whole(self, is_last=is_last)

    monkeypatch.setattr(Request, "next_delta", broken)
    failing, going = host.submit(GREEDY, 7), host.submit(GREEDY, 9)
    assert isinstance(failing.error(), GenerationError)
    while host.core.has_work:
        host.step()
    assert len(going.result(0)) == 1
    assert host.core.pages.cache.stats().held_pages == 0


def test_a_matcher_that_fails_where_it_is_told_what_is_known_ends_its_request_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, calm = Host(folder), Host(folder)
    led = replace(LED, temperature=0.0, constraint=Regex("(?s).{3,}"), ignore_eos=True)
    for each in (host, calm):
        each.submit(led, 9)  # its tokens are known from then on
        each.run()
        each.submit(GREEDY, 9)
    _, expected = calm.run()
    whole = AutomatonMatcher.step
    faults: list[object] = []

    def broken(self: AutomatonMatcher, token_id: int, remaining: int) -> bool:
        if whole(self, token_id, remaining):
            faults.append(self)
            raise RuntimeError("a bug")
        return False

    monkeypatch.setattr(AutomatonMatcher, "step", broken)
    going, chosen = host.generations[1], host.submit(led, 9)
    while host.core.has_work:
        host.step()
    assert len(faults) == 1
    assert isinstance(chosen.error(), GenerationError)
    assert told(going) == expected
    assert host.core.pages.cache.stats().held_pages == 0


def test_a_request_goes_on_without_guesses_where_none_can_be_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, host = Host(folder), Host(folder)
    for each in (calm, host):
        each.submit(GREEDY, 9)
    expected = calm.run()
    asked: list[Request] = []

    def broken(self: Request, most: int, echo: int) -> TokenIds:
        asked.append(self)
        raise RuntimeError("a bug")

    monkeypatch.setattr(Request, "guess", broken)
    (output,) = host.run()
    assert asked
    assert replace(output, drafted=(), drafted_spans=()) == replace(expected[0], drafted=(), drafted_spans=())


def test_when_one_of_a_job_fails_the_others_of_it_take_no_token_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, moved = Host(folder), list[TokenIds]()
    generation = Generation()
    job = GenerateJob(generation, 2, moved=moved.append)
    ids = np.arange(5, 14, dtype=np.int32)
    failing = Request(0, job, 1, ids, ONE_BY_ONE, host._tokenizer)
    first = Request(1, job, 0, ids[::-1], ONE_BY_ONE, host._tokenizer)
    host.core.submit([failing, first])
    whole = Request.take

    def broken(self: Request, sampled: Sampled, end_ids: frozenset[int], *, is_accepted: bool = False) -> object:
        if self is failing and self.remaining_new == 1:
            raise RuntimeError("a bug")
        return whole(self, sampled, end_ids, is_accepted=is_accepted)

    monkeypatch.setattr(Request, "take", broken)
    while host.core.has_work:
        host.step()
    assert isinstance(generation.error(), GenerationError)
    assert (len(moved), host.core.counters.finished, host.core.counters.failed) == (0, 0, 1)
    host.core.pages.cache.check()
    assert host.core.pages.cache.stats().held_pages == 0


def test_log_probabilities_that_cannot_be_read_fail_their_request_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, calm = Host(folder), Host(folder)
    reading = (TOLD, TOLD, replace(TOLD, top_logprobs_num=2), TOLD)

    def submitted(host: Host) -> list[Generation]:
        """All read their whole prompts in one step, but for one that reads nothing; only the second has token 50."""
        generations = [Generation() for _ in range(5)]
        for number, params in enumerate(reading):
            ids = np.arange(5, 14, dtype=np.int32) if number != 1 else np.arange(45, 54, dtype=np.int32)
            job = GenerateJob(generations[number], 1)
            host.core.submit([Request(number, job, 0, ids, params, host._tokenizer, logits_from=0)])
        host.core.submit([Request(9, GenerateJob(generations[-1], 1), 0, ids[::-1], GREEDY, host._tokenizer)])
        return generations

    expected = submitted(calm)
    while calm.core.has_work:
        calm.step()
    faults: list[int] = []

    def broken(logits: torch.Tensor, target_ids: TokenIds, top_n: int = 0) -> list[Sampled | GenerationError]:
        if 50 in target_ids:
            faults.append(len(target_ids))
            raise RuntimeError("a bug")
        return token_logprobs(logits, target_ids, top_n)

    monkeypatch.setattr("niwaki.runtime.loop.delivery.token_logprobs", broken)
    generations = submitted(host)
    while host.core.has_work:
        host.step()
    assert faults == [24, 8], "those of three prompts together, then of the one"
    assert isinstance(generations[1].error(), GenerationError)
    assert "a bug" in str(generations[1].error())
    del generations[1], expected[1]
    assert [told(each) for each in generations] == [told(each) for each in expected]
    assert len(told(generations[0]).prompt_logprobs) == 9
    assert (host.core.counters.finished, host.core.counters.failed) == (len(expected), 1)
    host.core.pages.cache.check()
    assert host.core.pages.cache.stats().held_pages == 0


@pytest.mark.parametrize("params", [ONE_BY_ONE, replace(LED, stop=("a stop that never comes",))])
def test_a_row_that_cannot_be_drawn_fails_its_request_alone(
    params: SamplingParams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, calm = Host(folder), Host(folder)
    for each in (host, calm):
        for _ in range(3):
            each.submit(params, 9)
        each.run_until_steady(FIRST_STEPS)
    expected = calm.run()
    faults: list[int] = []

    def broken(logits: torch.Tensor, rows: Sequence[SampleRow], *others: Any) -> list[Sampled | NiwakiError]:
        if any(row.seed == 1 for row in rows):
            faults.append(len(rows))
            raise RuntimeError("a bug")
        return sample_within(logits, rows, *others)

    monkeypatch.setattr("niwaki.runtime.loop.delivery.sample_within", broken)
    host.core._land_and_settle()  # else those under constraints are drawn as arrays
    while host.core.has_work:
        host.step()
    assert faults == [3, 1], "all together, then by itself"
    assert "a bug" in str(host.generations[1].error())
    assert [told(host.generations[place]) for place in (0, 2)] == [expected[0], expected[2]]
    assert (host.core.counters.finished, host.core.counters.failed) == (2, 1)
    host.core.pages.cache.check()
    assert host.core.pages.cache.stats().held_pages == 0


def test_rows_that_cannot_be_taken_out_together_are_drawn_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, calm, asked = Host(folder), Host(folder), list[int]()
    for each in (host, calm):
        for _ in range(3):
            each.submit(ONE_BY_ONE, 9)
        each.run_until_steady(FIRST_STEPS)
    expected = calm.run()

    def broken(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        asked.append(len(rows))
        if len(rows) > 1:
            raise RuntimeError("a bug")
        return rows_of(logits, rows)

    monkeypatch.setattr("niwaki.runtime.loop.delivery.rows_of", broken)
    assert host.run() == expected
    assert asked[:4] == [3, 1, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_mask_that_fits_no_vocabulary_ends_its_request_alone(
    temperature: float, runs_ahead: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    led = replace(LED, temperature=temperature)
    kinds = [led, replace(led, constraint=Regex("(?s).{29,}")), GREEDY, replace(GREEDY, temperature=1.0)]
    host, calm = Host(folder, runs_ahead=runs_ahead), Host(folder, runs_ahead=runs_ahead)
    for each in (host, calm):
        for params in kinds:
            each.submit(params, 9)
        each.run_until_steady(FIRST_STEPS)
    expected = calm.run()
    victim = host.core._roster.running[0].matcher
    whole = AutomatonMatcher.known_mask

    def broken(self: AutomatonMatcher, remaining: int) -> Words | None:
        mask = whole(self, remaining)
        return mask if mask is None or self is not victim else mask[:1]

    monkeypatch.setattr(AutomatonMatcher, "known_mask", broken)
    # Matchers that know a token from other texts need no mask.
    monkeypatch.setattr(AutomatonMatcher, "step", lambda self, token_id, remaining: False)
    while host.core.has_work:
        host.step()
    assert "does not fit a vocabulary" in str(host.generations[0].error())
    assert [told(each) for each in host.generations[1:]] == expected[1:]
    assert (host.core.counters.finished, host.core.counters.failed) == (3, 1)
    host.core.pages.cache.check()
    assert host.core.pages.cache.stats().held_pages == 0
