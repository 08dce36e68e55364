"""Branches of an engine where something fails: they stand where they stood, and closing them never does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from niwaki.runtime.api import (
    Cancelled,
    CapacityError,
    Constraint,
    ConstraintError,
    EngineStopped,
    Generation,
    GenerationError,
    Regex,
    RequestError,
    SamplingParams,
    Segment,
)
from niwaki.runtime.constraints import Matcher
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Batch
from niwaki.runtime.requests.jobs import GenerateJob
from tests.toy import make_model

WEB = ["see http://www.cat.org and http://dog.org", "the cat sat on the mat"] * 3
SHORT = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)
REFUSED = SamplingParams(constraint=Regex("a{3"))


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(make_model(tmp_path_factory.mktemp("toy"), texts=WEB), kv_tokens=1024) as made:
        yield made


def test_a_branch_whose_continuations_are_refused_stands_where_it_stood(engine: Engine) -> None:
    backend, branch = engine.backend, engine.backend.open()
    backend.append(branch, [Segment("the cat")])
    stood = list(branch.token_ids)
    for continuations in ([], ["a", ""]):
        with pytest.raises(RequestError):
            backend.score(branch, [Segment(" sat")], continuations)
        assert list(branch.token_ids) == stood
    with pytest.raises(CapacityError):
        backend.score(branch, [Segment(" sat")], ["on the mat " * 2000])
    assert list(branch.token_ids) == stood


def test_what_stands_open_behind_choices_stays_open_for_forks_and_after_an_error(engine: Engine) -> None:
    backend = engine.backend

    def scored() -> list[int]:
        """The tokens of a text that goes on behind choices which merge with it."""
        backend.append(branch := backend.open(), [Segment("see http:")])
        backend.score(branch, [], ["//www", " the cat"], heal=True).result(60)
        assert branch.num_open
        twin = backend.fork(branch)
        with pytest.raises(ConstraintError):
            backend.generate(branch, [Segment("//www")], REFUSED)
        for each in (branch, twin):
            backend.append(each, [Segment("//www")])
        assert list(branch.token_ids) == list(twin.token_ids)
        return list(branch.token_ids)

    assert scored() == engine.tokenizer.encode([Segment("see http://www")], at_start=True)


def test_a_branch_stands_before_the_token_that_ended_its_text(engine: Engine) -> None:
    backend, branch = engine.backend, engine.backend.open()
    backend.append(branch, [Segment("the cat")])
    stood = list(branch.token_ids)
    (output,) = backend.generate(backend.fork(branch), [], SHORT).result(60)
    third = output.token_ids[2]
    assert third not in output.token_ids[:2]
    (output,) = backend.generate(branch, [], replace(SHORT, stop_token_ids=(third,))).result(60)
    assert output.token_ids[-1] == output.finish_reason.matched == third
    assert list(branch.token_ids) == [*stood, *output.token_ids[:-1]]


def test_a_request_that_was_refused_is_none_of_its_branchs(engine: Engine) -> None:
    branch = engine.backend.open()
    with pytest.raises(ConstraintError):
        engine.backend.generate(branch, [Segment("the")], REFUSED)
    assert branch.jobs == []
    engine.backend.generate(branch, [Segment("the")], SHORT).result(60)
    engine.backend.check()  # behind the end of that
    assert branch.jobs == []


def test_who_closes_a_branch_while_a_constraint_is_compiled_ends_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, branch = engine.backend, engine.backend.open()
    begun, goes_on, started = threading.Event(), threading.Event(), list[Generation]()
    matchers = backend._compilations.matchers

    def held(constraint: Constraint | None, count: int) -> list[Matcher | None]:
        begun.set()
        goes_on.wait(60)
        return matchers(constraint, count)

    monkeypatch.setattr(backend._compilations, "matchers", held)
    starting = threading.Thread(target=lambda: started.append(backend.generate(branch, [Segment("the")], LONG)))
    starting.start()
    assert begun.wait(60)
    backend.close(branch)
    goes_on.set()
    starting.join(60)
    with pytest.raises(Cancelled):
        started[0].result(60)


def test_a_branch_may_be_closed_while_its_engine_is_shut_down(engine: Engine) -> None:
    backend, branch = engine.backend, engine.backend.open()
    begun, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        goes_on.wait(60)

    backend.generate(branch, [Segment("the")], SHORT).result(60)  # it holds a pin now
    backend.after_step = hold
    running = backend.generate(branch, [Segment(" cat")], LONG)
    assert begun.wait(60)
    ending = threading.Thread(target=engine.shutdown)
    ending.start()
    while backend.is_alive:
        time.sleep(0.001)
    backend.close(branch)
    goes_on.set()
    ending.join(60)
    with pytest.raises(EngineStopped):
        running.result(60)


@pytest.mark.parametrize("ending", ["cancelled", "failed"])
def test_a_branch_stays_where_it_is_when_the_first_of_several_texts_has_ended_and_another_never_does(
    engine: Engine, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, branch = engine.backend, engine.backend.open()
    runner = backend._core._runner
    works = runner.forward
    params = SamplingParams(n=3, temperature=1.0, max_new_tokens=60, stop_token_ids=tuple(range(5, 100)))
    seen = []

    def forward(batch: Batch) -> torch.Tensor:
        job = branch.jobs[0]
        if isinstance(job, GenerateJob) and 0 in job.outputs:
            seen.append(len(job.outputs))
            if ending == "failed":
                raise OSError("told to fail")
            backend.cancel(job)
        return works(batch)

    monkeypatch.setattr(runner, "forward", forward)
    backend.append(branch, [Segment("the cat")])
    stood = list(branch.token_ids)
    for seed in range(20):
        generation = backend.generate(branch, [], replace(params, seed=seed))
        try:
            generation.result(60)
        except (Cancelled, GenerationError):
            assert list(branch.token_ids) == stood
            break
        branch.move(np.array(stood, np.int32), 0)
    assert seen, "the first one ended before another"
    assert seen[0] < 3
    backend.close(branch)
    backend.check()
    assert backend._core.pages.cache.stats().pins == 0
