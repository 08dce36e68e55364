"""Steps in pieces without CUDA: what is recorded between two attentions computes what the whole step does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("tests.kernels.triton_setup")  # skips where the kernels cannot run

from niwaki.kernels.plan import make_plan
from niwaki.kernels.triton.launch import is_interpreted
from niwaki.kernels.triton.ops import TritonOps
from niwaki.runtime.forward import pieces
from niwaki.runtime.forward.pieces import PieceGraphs
from niwaki.runtime.forward.recording import Recorder
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.models.config import Experts, LayerKind, ModelConfig
from tests.fake_graphs import Graph, put_in_place

if not is_interpreted():
    pytest.skip(
        "a GPU takes the kernels; test_interpreted.py runs this in a process of its own", allow_module_level=True
    )

CPU = torch.device("cpu")
PAGES = 24
SMALL = ModelConfig(
    vocab_size=61,
    num_layers=2,
    hidden_size=32,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    context_length=128,
)
MIXTURE = replace(
    SMALL,
    layers=(LayerKind(window=20), LayerKind(is_sparse=True)),
    experts=Experts(count=5, per_token=2, width=24, renormalise=True),
)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelConfig], Runner]:
    """Makes a runner whose ragged steps go through pieces."""
    put_in_place(monkeypatch)

    def make(config: ModelConfig) -> Runner:
        runner = Runner.random(config, num_pages=PAGES, ops=TritonOps())
        blank = make_plan((), page_size=16, num_pages=PAGES)
        runner._pieces = PieceGraphs(runner._model, CPU, blank, Recorder(CPU))
        return runner

    return make


def rows_of(step: int, counts: Sequence[int], num_logits: int | None = None) -> list[Row]:
    """Each on pages of its own, and behind what the steps before have stored there."""
    return [
        Row(
            (np.arange(count, dtype=np.int32) * 7 + 5 * step + index) % 61,
            20 * step,
            range(8 * index, 8 * index + 8),
            count if num_logits is None else num_logits,
        )
        for index, count in enumerate(counts)
    ]


@pytest.mark.parametrize("config", [SMALL, MIXTURE], ids=["dense", "mixture"])
def test_pieces_in_order_compute_what_the_whole_step_does(
    config: ModelConfig, recorded: Callable[[ModelConfig], Runner]
) -> None:
    in_pieces, whole = recorded(config), Runner.random(config, num_pages=PAGES, ops=TritonOps())
    steps = [rows_of(0, (17, 4, 9)), rows_of(1, (3, 1, 2)), rows_of(2, (1, 5)), rows_of(3, (2, 1, 3), 1)]
    for rows in steps:
        torch.testing.assert_close(in_pieces.forward(rows), whole.forward(rows), atol=1e-5, rtol=1e-5)
    assert Graph.num_replays == len(steps) * (config.num_layers + 1)
    graphs = in_pieces._pieces
    assert graphs is not None
    assert sorted(graphs._recorded) == [8, 32], "each size is recorded once"
    assert len(graphs._recorded[8].calls) == config.num_layers
    # Not bit by bit: torch orders the sums of a product by its rows, which are more where a step was filled up.
    stored, wanted = (runner.read_pages(range(PAGES)).view(np.float32) for runner in (in_pieces, whole))
    assert ((stored == 0) == (wanted == 0)).all(), "what fills up is not stored"
    np.testing.assert_allclose(stored, wanted, atol=1e-5)


def test_what_a_larger_step_left_does_not_reach_the_tokens_that_fill_up(
    recorded: Callable[[ModelConfig], Runner],
) -> None:
    runner = recorded(MIXTURE)
    first = runner.forward(rows_of(0, (3, 2))).clone()
    graphs = runner._pieces
    assert graphs is not None
    with torch.inference_mode():
        graphs._recorded[8].attended.fill_(torch.nan)
    assert torch.equal(runner.forward(rows_of(0, (3, 2))), first)
    assert graphs._recorded[8].logits.isfinite().all()


def test_large_steps_and_those_that_want_no_logits_are_launched(
    recorded: Callable[[ModelConfig], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "SIZES", (2, 4))
    runner = recorded(SMALL)
    assert len(runner.forward(rows_of(0, (3,), 0))) == 0
    assert len(runner.forward(rows_of(0, (3, 2)))) == 5
    assert Graph.num_replays == 0
