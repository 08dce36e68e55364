"""A bug in what is done for one request ends that request, and no other (scorecard F7): none waits for ever, its batch
mates' tokens are those of a clean run, and the pages come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from niwaki.runtime.api import Generation, GenerationError, Output, Regex, SamplingParams
from niwaki.runtime.constraints.matcher import AutomatonMatcher
from niwaki.runtime.request import Request
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
    (Request, "sample_row", ONE_BY_ONE),
    (Request, "named", replace(TOLD, top_logprobs_num=2)),
    (Request, "drop_unshown", GREEDY),
    (Request, "output", GREEDY),
    (Request, "kept_ids", GREEDY),
    (AutomatonMatcher, "admits", LED),
    (AutomatonMatcher, "accept", replace(LED, stop=("a stop that never comes",))),
    (AutomatonMatcher, "fill_mask_within", LED),
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
    for _ in range(FIRST_STEPS):
        host.step()
    victim = host.core._roster.running[host.generations.index(chosen)]
    whole: Callable[..., object] = getattr(owner, name)
    faults: list[object] = []

    def broken(self: object, *args: object, **options: object) -> object:
        if self is victim or self is victim.matcher:
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
