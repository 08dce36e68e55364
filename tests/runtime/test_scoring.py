"""A beginning that continuations share is computed for one of them, and told for each."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
import torch

from niwaki.runtime.api import GenerationError, Score, Segment, TokenLogprob
from niwaki.runtime.engine import Engine
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.requests.request import Request
from niwaki.runtime.requests.scoring import SharedBeginnings
from niwaki.runtime.sampling import sampler
from niwaki.runtime.sampling.sampler import Sampled

HEAD = "The weather in "
NAMES = [
    f"{first}{middle}{last}" for first in ("Berg", "Nor") for middle in ("en", "der") for last in ("a", "by", "ton")
]


def logprob_of(path: tuple[int, ...]) -> float:
    """Of the last token of a path; another one for each path."""
    return -random.Random(str(path)).random()


def score_of(tokens: tuple[int, ...], start: int) -> Score:
    """What a request tells that scores the tokens from `start` on."""
    told = [
        TokenLogprob(logprob_of(tokens[: end + 1]), tokens[end], f"<{tokens[end]}>")
        for end in range(start, len(tokens))
    ]
    return Score("".join(entry.text or "" for entry in told), tuple(told))


@pytest.mark.parametrize("seed", range(30))
def test_the_parts_make_the_scores_of_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    tails = [tuple(rng.choices((1, 2, 3), k=rng.randint(1, 6))) for _ in range(rng.randint(1, 40))]
    shared = SharedBeginnings.of([list(tail) for tail in tails])
    parts = [score_of(tail, count) for tail, count in zip(tails, shared.counts, strict=True)]
    told = shared.whole(parts + parts)  # behind one text, and behind another
    assert told == tuple(score_of(tail, 0) for tail in tails) * 2


@pytest.mark.parametrize("seed", range(30))
def test_no_beginning_is_asked_for_twice(seed: int) -> None:
    rng = random.Random(seed)
    tails = list({tuple(rng.choices((1, 2, 3), k=rng.randint(1, 6))) for _ in range(rng.randint(1, 40))})
    shared = SharedBeginnings.of([list(tail) for tail in tails])
    asked = [
        tail[: end + 1] for tail, count in zip(tails, shared.counts, strict=True) for end in range(count, len(tail))
    ]
    assert len(asked) == len(set(asked))
    assert set(asked) == {tail[:end] for tail in tails for end in range(1, len(tail) + 1)}


def test_who_builds_on_others_comes_behind_those_who_build_on_none() -> None:
    shared = SharedBeginnings.of([[1, 2, 3], [1, 2], [4, 4], [1, 9]])
    assert [shared.counts[index] for index in shared.by_need] == [0, 0, 1, 2]
    assert sorted(shared.by_need) == [0, 1, 2, 3]


def test_choices_with_a_common_beginning_are_scored_as_each_alone() -> None:
    with Engine(dtype="float32", kv_tokens=2048) as engine:
        backend = engine.backend
        branch = backend.open()
        together = backend.score(branch, [Segment(HEAD)], NAMES, unconditional=True).result(60)
        alone = [backend.score(branch, [], [name], unconditional=True).result(60) for name in NAMES]
    expected = [scores[0] for scores in alone] + [scores[1] for scores in alone]
    assert [score.text for score in together] == NAMES * 2
    for score, own in zip(together, expected, strict=True):
        assert [entry.token_id for entry in score.logprobs] == [entry.token_id for entry in own.logprobs]
        known = [(entry.logprob, other.logprob) for entry, other in zip(score.logprobs, own.logprobs, strict=True)]
        assert [one is None for one, _ in known] == [other is None for _, other in known]
        numbers = [(one, other) for one, other in known if one is not None and other is not None]
        assert [one for one, _ in numbers] == pytest.approx([other for _, other in numbers], abs=1e-4)


def test_choices_that_wait_have_no_copy_of_the_text_before_them(
    bundled_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{number}!" for number in range(500)]
    grown: list[int] = []
    whole = EngineCore.submit

    def watched(self: EngineCore, requests: Sequence[Request]) -> None:
        whole(self, requests)
        grown.append(tracemalloc.get_traced_memory()[0] - before)

    monkeypatch.setattr(EngineCore, "submit", watched)
    for head in ("a b " * 10, "a b " * 450):
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            branch = bundled_engine.backend.open()
            scores = bundled_engine.backend.score(branch, [Segment(head)], texts).result(60)
        finally:
            tracemalloc.stop()
        assert [score.text for score in scores] == texts
    length = scores[0].prompt_tokens
    assert length > 800
    assert grown[1] - grown[0] < 4 * length * len(texts) / 10, "bytes, of a copy each"


def test_log_probabilities_are_told_once_for_a_common_beginning(
    bundled_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def token_logprobs(logits: torch.Tensor, target_ids: Sequence[int], top_n: int) -> list[Sampled | GenerationError]:
        asked.append(len(target_ids))
        return sampler.token_logprobs(logits, target_ids, top_n)

    monkeypatch.setattr("niwaki.runtime.loop.delivery.token_logprobs", token_logprobs)
    scores = bundled_engine.backend.score(bundled_engine.backend.open(), [Segment(HEAD)], NAMES).result(60)
    paths = {
        tuple(entry.token_id for entry in score.logprobs[:end])
        for score in scores
        for end in range(1, len(score.logprobs) + 1)
    }
    assert sum(asked) == len(paths) < sum(len(score.logprobs) for score in scores)
