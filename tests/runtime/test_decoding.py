"""A steady batch kept as arrays gives what single steps give: the same tokens, text, counters and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from niwaki.radix.pages import PageCopy
from niwaki.runtime import scheduler
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
)
from niwaki.runtime.config import EngineConfig
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.constraints.matcher import AutomatonMatcher
from niwaki.runtime.constraints.protocol import MaskRow
from niwaki.runtime.core import EngineCore
from niwaki.runtime.loader import read_model_folder
from niwaki.runtime.request import GenerateJob, Request
from niwaki.runtime.runner import Batch
from niwaki.runtime.tokenizer import Tokenizer
from tests.toy import make_model

PAGE_SIZE = 4


class Formula:
    """Logits that depend on the last token and its position alone."""

    def __init__(self, folder: Path) -> None:
        self.config = read_model_folder(folder).config
        self.broken_at: int | None = None  # the position at which it fails

    def forward(self, batch: Batch) -> torch.Tensor:
        spans = batch.spans
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(spans.starts, spans.counts, strict=True)])
        assert all(spans.held * PAGE_SIZE >= spans.starts + spans.counts)
        if self.broken_at in positions:
            raise RuntimeError("broken")
        ids = batch.token_ids
        if batch.wanted is not None:
            ids, positions = ids[batch.wanted], positions[batch.wanted]
        phase = np.outer(ids + 1.0, np.arange(self.config.vocab_size) + 1.0) * 0.37 + positions[:, None]
        return torch.from_numpy((3.0 * np.cos(phase)).astype(np.float32))

    def copy_pages(self, copies: Sequence[PageCopy]) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"))


class Host:
    """A core on the formula, and requests on it."""

    def __init__(self, folder: Path, num_pages: int = 400) -> None:
        self.runner = Formula(folder)
        self._tokenizer = Tokenizer(folder)
        config = EngineConfig(page_size=PAGE_SIZE, max_running_requests=8)
        model = self.runner.config
        vocabulary = Vocabulary(self._tokenizer.token_bytes, frozenset(model.eos_ids), model.vocab_size)
        self.compiler = ConstraintCompiler(vocabulary, seconds=20)
        boundaries = Boundaries(vocabulary, self._tokenizer.plain_ids)
        self.core = EngineCore(self.runner, self._tokenizer, config, num_pages, boundaries=boundaries)  # type: ignore[arg-type]  # what it asks
        self.generations: list[Generation] = []
        self.jobs: list[GenerateJob] = []
        self.steady_steps = 0

    def submit(self, params: SamplingParams, length: int) -> Generation:
        index = len(self.generations)
        ids = np.random.default_rng(index).integers(5, 60, length, dtype=np.int32)
        generation = Generation()
        job = GenerateJob(generation, 1)
        matcher = None if params.constraint is None else self.compiler.compile(params.constraint).matcher()
        self.core.submit([Request(index, job, 0, ids, params, self._tokenizer, seed=index, matcher=matcher)])
        self.generations.append(generation)
        self.jobs.append(job)
        return generation

    def step(self) -> None:
        self.steady_steps += self.core._decoding is not None
        self.core.step()
        if self.core._decoding is None:
            self.core.pages.cache.check()

    def run(self) -> list[Output]:
        while self.core.has_work:
            self.step()
        self.core.pages.cache.check()
        return [replace(g.result()[0], seconds=0.0, queued_seconds=0.0, first_seconds=0.0) for g in self.generations]


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


def mixed(host: Host, kinds: Sequence[SamplingParams]) -> list[Output]:
    """More requests than may run at once, some of which come later."""
    for index, params in enumerate(kinds):
        host.submit(params, 3 + 5 * index)
    for _ in range(30):
        host.step()
    for index, params in enumerate(kinds):
        host.submit(params, 4 + index)
    return host.run()


def one_by_one(monkeypatch: pytest.MonkeyPatch, work: Callable[[], list[Output]]) -> list[Output]:
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "is_steady", lambda plan, num_running: False)
        return work()


@pytest.mark.parametrize("num_pages", [400, 60], ids=["roomy", "short"])
@pytest.mark.parametrize("kinds", [KINDS, [*KINDS[:3], *CONSTRAINED]], ids=["free", "constrained"])
def test_a_steady_batch_gives_what_single_steps_give(
    kinds: list[SamplingParams], num_pages: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, single = Host(folder, num_pages), Host(folder, num_pages)
    outputs = mixed(host, kinds)
    assert outputs == one_by_one(monkeypatch, lambda: mixed(single, kinds))
    assert host.steady_steps > 50
    assert single.steady_steps == 0
    # Of two that end in one step another may enter the tree first, and so another page may be evicted first.
    counters = [replace(each.core.counters, recomputed_tokens=0) for each in (host, single)]
    assert counters[0] == counters[1]
    assert (num_pages == 60) == (host.core.counters.preemptions > 0)


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

    def fill_mask_within(matcher: AutomatonMatcher, row: MaskRow, remaining: int) -> None:
        if matcher is broken:
            raise ConstraintError("broken")
        matcher.fill_mask(row)

    monkeypatch.setattr(AutomatonMatcher, "known_mask", known_mask)
    monkeypatch.setattr(AutomatonMatcher, "fill_mask_within", fill_mask_within)
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
