"""A step whose tokens are shared out among threads gives what one thread gives, and fails as one step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from niwaki.kernels.ops import NumbaOps
from niwaki.kernels.plan import Span, Spans
from niwaki.runtime.forward import runner as module
from niwaki.runtime.forward.parts import divided
from niwaki.runtime.forward.runner import TORCH_DTYPES, Row, Runner
from niwaki.runtime.models.config import Experts, LayerKind, ModelConfig
from tests.lang.waiting import wait_until

PAGE = 16
CONFIG = ModelConfig(
    vocab_size=200,
    num_layers=3,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=512,
)
KINDS = {
    "plain": CONFIG,
    "heads of tiles": replace(CONFIG, head_dim=64, dtype="bfloat16"),
    "windows": replace(CONFIG, layers=(LayerKind(window=20), LayerKind(), LayerKind(window=20))),
    "experts": replace(
        CONFIG,
        experts=Experts(count=4, per_token=2, width=96, renormalise=True, shared_width=64),
        layers=(LayerKind(is_sparse=True),) * 3,
    ),
}


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And parts however small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(module, "PART_WORK", 1)
    monkeypatch.setattr(module, "PART_TOKENS", 1)
    yield
    torch.set_num_threads(threads)


def rows_of(seed: int, lengths: list[tuple[int, int]]) -> list[Row]:
    """Rows of so many cached and new tokens. The first two pages are everybody's who has cached so many."""
    draw = np.random.default_rng(seed)
    rows, used = [], 2
    for start, count in lengths:
        own = -(-(start + count) // PAGE)
        pages = np.arange(used, used + own)
        pages[: min(2, start // PAGE)] = np.arange(2)[: start // PAGE]
        used += own
        ids = draw.integers(0, 200, count).astype(np.int32)
        rows.append(Row(ids, start, pages.tolist(), int(draw.integers(0, count + 1))))
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("three_threads")
def test_parts_give_what_the_whole_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parted = (Runner.random(KINDS[kind], num_pages=60) for _ in range(2))
    steps = [
        rows_of(1, [(0, 40), (0, 150), (0, 33)]),
        rows_of(2, [(40, 1), (150, 3), (33, 90), (33, 1)]),
        rows_of(3, [(300, 120)]),
    ]
    for rows in steps:
        got = parted.forward(rows)
        with monkeypatch.context() as patch:
            patch.setattr(module, "PART_WORK", 1 << 60)
            expected = whole.forward(rows)
        assert got.shape == expected.shape
        assert float((got - expected).abs().max()) < (1e-5 if whole.dtype == "float32" else 0.05)
    assert float((stored(parted) - stored(whole)).abs().max()) < (1e-5 if whole.dtype == "float32" else 0.05)


def stored(runner: Runner) -> torch.Tensor:
    """All keys and values."""
    pages = torch.from_numpy(runner.read_pages(range(runner.num_pages)))
    return pages.view(TORCH_DTYPES[runner.dtype]).float()


@pytest.mark.usefixtures("three_threads")
def test_a_part_that_fails_fails_the_step_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner.random(CONFIG, num_pages=60)
    rows = rows_of(1, [(0, 60), (0, 60)])
    expected = runner.forward(rows)
    attend = NumbaOps.attend

    def failing(self: NumbaOps, q: Any, k_pool: Any, v_pool: Any, plan: Any, *rest: Any) -> None:
        if plan.positions[-1] == 59 and plan.num_tokens < 60 and plan.positions[0] > 0:
            raise ArithmeticError("of the last part")
        attend(self, q, k_pool, v_pool, plan, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(NumbaOps, "attend", failing)
        with pytest.raises(ArithmeticError, match="of the last part"):
            runner.forward(rows)
    assert torch.equal(runner.forward(rows), expected)


def test_shares_are_of_equal_work_and_every_token_is_in_one() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        spans = Spans.of(
            [Span(int(draw.integers(0, 300)), int(draw.integers(1, 90)), range(25)) for _ in range(draw.integers(1, 9))]
        )
        parts, keys = int(draw.integers(1, 5)), float(draw.integers(1, 200))
        shares = divided(spans, parts, keys)
        assert len(shares) <= parts
        positions = [
            [start + i for start, count in zip(part.starts, part.counts, strict=True) for i in range(count)]
            for _, part in shares
        ]
        whole = [start + i for start, count in zip(spans.starts, spans.counts, strict=True) for i in range(count)]
        assert [one for share in positions for one in share] == whole
        assert [(tokens.start, tokens.stop) for tokens, _ in shares] == list(_bounds(positions))
        work = [sum(keys + one for one in share) for share in positions]
        assert max(work) <= sum(work) / parts + max(whole) + keys + 1


def _bounds(shares: list[list[int]]) -> Iterator[tuple[int, int]]:
    first = 0
    for share in shares:
        yield first, first + len(share)
        first += len(share)


def test_a_token_that_is_more_work_than_a_share_stands_alone() -> None:
    spans = Spans.of([Span(0, 3, [0]), Span(10_000, 1, range(1, 627))])
    assert [(tokens.start, tokens.stop) for tokens, _ in divided(spans, 4, 1.0)] == [(0, 4)]


@pytest.mark.usefixtures("three_threads")
def test_threads_end_with_their_runner() -> None:
    before = set(threading.enumerate())
    runner = Runner.random(CONFIG, num_pages=60)
    runner.forward(rows_of(1, [(0, 60), (0, 60)]))
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del runner
    wait_until(lambda: not any(one.is_alive() for one in started))
