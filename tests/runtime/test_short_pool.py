"""Pools that are too short for what is asked (scorecard L4, L5): what can never fit is refused at the door, all else
ends with the tokens that an ample pool gives, and little is computed twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from niwaki.runtime.api import CapacityError, SamplingParams
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Batch
from tests.formula import PAGE_SIZE, Host
from tests.toy import VOCAB_SIZE, make_model

NUM_NEW = 6
PARAMS = {"temperature": 0.0, "max_new_tokens": NUM_NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"), sharpness=3.0, max_position_embeddings=8192)


def prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(5, VOCAB_SIZE) for _ in range(length)]


def answers(engine: Engine, asked: list[list[int]], **options: object) -> list[list[int]]:
    results: Any = engine.generate(input_ids=asked, sampling_params={**PARAMS, **options})
    return [list(result["output_ids"]) for result in results]


def check_idle(engine: Engine) -> None:
    engine.backend.check()
    stats = engine.stats()
    assert stats["pages_held"] == stats["requests_running"] == stats["requests_waiting"] == 0


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_pool_of_64_pages_answers_what_fits_and_refuses_the_rest_at_the_door(folder: Path, page_size: int) -> None:
    pool = 64 * page_size
    longest = pool - NUM_NEW
    sizes = [1, page_size, page_size + 1, pool // 2, longest - 1, longest] * 2
    draw = random.Random(page_size)
    asked = [prompt(draw, min(size, longest)) for size in sizes]
    with Engine(folder, kv_tokens=2 * pool, enable_prefix_cache=False) as ample:
        expected = answers(ample, asked)
    with Engine(folder, kv_tokens=pool, page_size=page_size, chunked_prefill_size=256) as engine:
        for size in (longest + 1, 2 * pool):
            steps = engine.stats()["steps"]
            with pytest.raises(CapacityError, match=f"KV pool .* holds {pool}$"):
                answers(engine, [prompt(draw, size)])
            assert engine.stats()["steps"] == steps, "refused without a step"
        assert answers(engine, asked) == expected
        check_idle(engine)


@pytest.mark.parametrize("kv_tokens", [96, 128, 192, 320])
def test_a_storm_of_preemptions_computes_little_twice_and_changes_no_token(folder: Path, kv_tokens: int) -> None:
    draw, num_new = random.Random(5), 48
    asked = [prompt(draw, draw.randint(1, 20)) for _ in range(40)]
    with Engine(folder, kv_tokens=8192, enable_prefix_cache=False) as ample:
        expected = answers(ample, asked, max_new_tokens=num_new)
    with Engine(folder, kv_tokens=kv_tokens, chunked_prefill_size=32) as engine:
        assert answers(engine, asked, max_new_tokens=num_new) == expected
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert stats["recomputed_tokens"] <= 0.2 * sum(len(ids) + num_new for ids in asked)
        check_idle(engine)


@pytest.mark.parametrize("chunk", [16, 64])
def test_what_is_computed_once_more_is_counted_apart_from_prompts_and_to_the_token(
    folder: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, num_new = random.Random(6), 30
    head = prompt(draw, 40)
    asked = [head[: draw.choice((0, 20, 40))] + prompt(draw, draw.randint(2, 40)) for _ in range(30)]
    computed: list[int] = []
    with Engine(folder, kv_tokens=224, chunked_prefill_size=chunk, draft_tokens=0) as engine:
        runner = engine.backend._core._runner
        forward = runner.forward

        def counted(batch: Batch) -> torch.Tensor:
            computed.append(len(batch.token_ids))
            return forward(batch)

        monkeypatch.setattr(runner, "forward", counted)
        results: Any = engine.generate(input_ids=asked, sampling_params={**PARAMS, "max_new_tokens": num_new})
        stats = engine.stats()
        check_idle(engine)
    assert stats["preemptions"] > 0
    assert stats["recomputed_tokens"] > 0
    assert stats["cached_tokens"] == sum(result["meta_info"]["cached_tokens"] for result in results)
    assert stats["prefilled_tokens"] + stats["cached_tokens"] == sum(map(len, asked))
    num_texts = len(asked) * (num_new - 1)  # nobody needs the keys of a last token
    assert sum(computed) == stats["prefilled_tokens"] + num_texts + stats["recomputed_tokens"]


def test_what_one_who_was_set_back_had_computed_stays_longer_than_texts_that_ended_after_it(folder: Path) -> None:
    host = Host(folder, num_pages=16)
    host.submit(SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True), 9)
    host.submit(SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True), 9)
    for _ in range(8):
        host.step()
    core, cache = host.core, host.core.pages.cache
    core._land_and_settle()
    long, short = core._roster.running.values()
    core._roster.preempt(long)
    core._roster.waiting.remove(long)  # else he had his place again at once
    while short.lease is not None:
        host.step()
    assert cache.stats().tree_pages == 4 + 5
    lost = long.num_lost
    assert (lost, cache.stats().pins) == (16, 1)
    other = cache.acquire(np.zeros(0, np.int32), room_for=(7 + 5) * PAGE_SIZE)
    assert other is not None
    assert cache.match(long.ids) == lost, "the text that has ended made room"
    cache.discard(other)
    core._roster.waiting.add(long)
    host.run()
    assert core.counters.recomputed_tokens == 1, "for its logits"
    assert cache.stats().pins == 0
