"""deterministic=True: a request gives the same bits alone, in any batch, cold, cached, in chunks, or set back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from niwaki.kernels import jit, paged_decode
from niwaki.kernels.fixed import TILE, FixedOps
from niwaki.kernels.operand import Operand
from niwaki.runtime.api import ConfigError
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward import runner
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.models.config import Experts, LayerKind, ModelConfig
from tests.toy import VOCAB_SIZE, make_model

Told = list[tuple[list[int], list[float]]]

NUM_NEW = 36  # more than a request's room is promised for: some are set back


def prompts(count: int, seed: int) -> list[list[int]]:
    """Some share heads with others, of every length to a page's edge and beyond."""
    draw = random.Random(seed)
    heads = [[draw.randrange(5, VOCAB_SIZE) for _ in range(size)] for size in (15, 16, 17, 48)]
    return [
        draw.choice(heads)[: draw.choice([15, 16, 48])]
        + [draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(1, 30))]
        for _ in range(count)
    ]


def told(engine: Engine, asked: list[list[int]], seeds: list[int]) -> Told:
    """The tokens of each, and their log-probabilities, all in one batch."""
    params: list[dict[str, object]] = [
        {"temperature": 1.0, "seed": seed, "max_new_tokens": NUM_NEW, "ignore_eos": True} for seed in seeds
    ]
    results: Any = engine.generate(input_ids=asked, sampling_params=params, return_logprob=True)
    return [
        (list(one["output_ids"]), [value for value, *_ in one["meta_info"]["output_token_logprobs"]]) for one in results
    ]


def one_by_one(engine: Engine, asked: list[list[int]]) -> Told:
    return [told(engine, [ids], [seed])[0] for seed, ids in enumerate(asked)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_gives_the_same_bits_whatever_runs_beside_it(tmp_path: Path, dtype: str) -> None:
    folder = make_model(tmp_path / "toy")
    asked = prompts(12, seed=3)
    options = {"dtype": dtype, "deterministic": True}
    with Engine(folder, kv_tokens=4096, enable_prefix_cache=False, **options) as cold:
        alone = one_by_one(cold, asked)
    draw = random.Random(5)
    with Engine(folder, kv_tokens=4096, **options) as warm:
        for _ in range(3):  # cold at first, then from the cache, in other company each time
            order = draw.sample(range(len(asked)), draw.randint(2, len(asked)))
            assert told(warm, [asked[i] for i in order], order) == [alone[i] for i in order]
        assert one_by_one(warm, asked) == alone
        assert warm.stats()["cached_tokens"] > warm.stats()["prefilled_tokens"] / 2
    with Engine(folder, kv_tokens=160, chunked_prefill_size=16, **options) as tight:
        assert told(tight, asked, list(range(len(asked)))) == alone
        assert tight.stats()["preemptions"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(320, 1920), (960, 384), (72, 40)])
def test_a_row_of_a_product_is_the_same_in_every_place(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = Operand.of(torch.randn(outputs, inputs, generator=generator).to(dtype))
    row = torch.randn(inputs, generator=generator).to(dtype)
    found = []
    for count in (1, 2, TILE - 1, TILE, TILE + 1, 3 * TILE):
        x = torch.randn(count, inputs, generator=generator).to(dtype)
        place = int(torch.randint(count, (1,), generator=generator))
        x[place] = row
        out = Operand.of(torch.empty(count, outputs, dtype=dtype))
        FixedOps().linear(Operand.of(x), weight, None, out)
        found.append(out.tensor[place])
        assert torch.allclose(out.tensor.float(), x.float() @ weight.tensor.float().t(), atol=0.5, rtol=0.02)
    assert all(torch.equal(one, found[0]) for one in found)


def test_threads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "toy")
    asked = prompts(6, seed=8)
    threads = torch.get_num_threads(), jit.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            jit.set_num_threads(count)
            monkeypatch.setattr(paged_decode, "MIN_PARALLEL_ELEMENTS", 0)
            monkeypatch.setattr(runner, "PART_WORK", 1)
            monkeypatch.setattr(runner, "PART_TOKENS", 1)
            with Engine(folder, kv_tokens=2048, deterministic=True) as engine:
                found.append(told(engine, asked, list(range(len(asked)))))
    finally:
        torch.set_num_threads(threads[0])
        jit.set_num_threads(threads[1])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "rule",
    [
        {"shared_width": 64},
        {"score": "sigmoid", "has_correction": True, "shared_width": 64, "is_shared_gated": False},
        {"score": "sigmoid", "weighs_input": True},
        {"has_correction": True, "groups": 3, "groups_per_token": 2},
    ],
    ids=["a softmax", "sigmoids and a correction", "sigmoids of what is read", "groups"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_chosen_and_mixed_alike(rule: dict[str, Any], dtype: Literal["float32", "bfloat16"]) -> None:
    config = ModelConfig(
        vocab_size=200,
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context_length=256,
        dtype=dtype,
        experts=Experts(count=6, per_token=2, width=96, renormalise=True, **rule),
        layers=(LayerKind(is_sparse=True),) * 2,
    )
    draw = np.random.default_rng(4)
    rows = [Row(draw.integers(0, 200, n).astype(np.int32), 0, [i], n) for i, n in enumerate((1, 9, 16, 3, 1, 7))]
    made = Runner.random(config, num_pages=len(rows), tree_attention=False, ops=FixedOps())
    together = made.forward(rows)
    assert torch.equal(together, torch.cat([made.forward([row]) for row in rows]))


def test_pages_of_the_two_modes_never_meet(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "toy")
    ids = np.arange(5, 60).tolist()
    with Engine(folder, kv_tokens=1024) as plain:
        plain.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
        plain.save_cache(tmp_path / "cache")
    with (
        Engine(folder, kv_tokens=1024, deterministic=True) as fixed,
        pytest.raises(ConfigError, match="by an engine of another model, dtype"),
    ):
        fixed.load_cache(tmp_path / "cache")
