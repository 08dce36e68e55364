"""Tree attention in the engine: the same tokens with it and without, and what it is used for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.segments import Costs
from niwaki.runtime.api import ConfigError
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward import runner
from niwaki.runtime.models.decoder import Decoder
from niwaki.runtime.options.config import EngineConfig
from tests.toy import VOCAB_SIZE, make_model

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"), sharpness=3.0)


def tree_of_prompts() -> list[list[int]]:
    """24 prompts: a system prompt of 96 tokens, three documents of 64 under it, eight questions under each."""
    random = np.random.default_rng(0)

    def some(count: int) -> list[int]:
        return [int(token) for token in random.integers(5, VOCAB_SIZE, count)]

    system = some(96)
    documents = [system + some(64) for _ in range(3)]
    return [document + some(5 + 4 * question) for document in documents for question in range(8)]


def shared_tokens(plans: Sequence[AttentionPlan]) -> tuple[int, int]:
    """(tokens that a segment served, the most segments that one plan had)."""
    found = [plan.shared.segments for plan in plans if plan.shared is not None]
    return sum(len(segment.tokens) for segments in found for segment in segments), max(map(len, found), default=0)


def test_greedy_tokens_are_the_same_with_tree_attention_and_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[AttentionPlan] = []
    forward = Decoder.forward

    def watched(self: Decoder, token_ids: object, plan: AttentionPlan, *more: object, **named: object) -> object:
        plans.append(plan)
        return forward(self, token_ids, plan, *more, **named)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(Decoder, "forward", watched)
    # A toy's attention is so small that sharing does not pay: count nothing but the pairs.
    monkeypatch.setattr(runner, "costs_for", lambda *shape: Costs(1.0, 0.0, key=1.0, query=0.0, segment=0.0))
    answers = []
    for enabled in (False, True):
        plans.clear()
        with Engine(folder, kv_tokens=8192, tree_attention=enabled) as engine:
            results = engine.generate(input_ids=tree_of_prompts(), sampling_params=GREEDY)
            assert isinstance(results, list)
            answers.append([result["output_ids"] for result in results])
        served, widest = shared_tokens(plans)
        assert (served > 24 * 10 and widest >= 4) if enabled else served == 0
    assert answers[0] == answers[1]


def test_an_option_that_is_none_has_its_default() -> None:
    assert EngineConfig.of(None, {"chunked_prefill_size": None, "tree_attention": None}) == EngineConfig.of(None, {})


def test_a_setting_that_is_no_bool_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tree_attention must be True or False, got 'yes'"):
        Engine(folder, tree_attention="yes")
