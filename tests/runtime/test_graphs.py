"""CUDA graphs without CUDA: a graph that computes its kernels anew over the same memory, as a replay does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("tests.kernels.triton_setup")  # skips where the kernels cannot run

from niwaki.kernels.plan import AttentionPlan, make_plan
from niwaki.kernels.triton.launch import is_interpreted
from niwaki.kernels.triton.ops import TritonOps
from niwaki.runtime.forward.graphs import DecodeGraphs
from niwaki.runtime.forward.runner import Batch, Row, Runner
from niwaki.runtime.models.config import ModelConfig
from niwaki.runtime.models.decoder import Decoder
from niwaki.runtime.models.workspace import Buffers

if not is_interpreted():
    pytest.skip(
        "a GPU takes the kernels; test_interpreted.py runs this in a process of its own", allow_module_level=True
    )

CPU = torch.device("cpu")
PAGES = 24
SMALL = ModelConfig(
    vocab_size=61,
    num_layers=1,
    hidden_size=32,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    context_length=128,
)


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.replay: Callable[[], object] = lambda: pytest.fail("nothing was captured")


class Order:
    """Stands for streams and events, and for the model that a graph captures; keeps what happened, in order."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.done: list[str] = []
        self._capturing: Graph | None = None

    def forward(
        self,
        ids: torch.Tensor,
        plan: AttentionPlan,
        wanted: npt.NDArray[np.int64] | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        logits = self.model.forward(ids, plan, wanted, out=out)
        self.done.append("capture" if self._capturing else "warm up")
        if self._capturing is not None:

            def replay() -> None:
                self.done.append("replay")
                self.model.forward(ids, plan, wanted, out=out)

            self._capturing.replay = replay
        return logits

    def buffers(self, tokens: int) -> Buffers:
        return self.model.buffers(tokens)

    @contextmanager
    def capture(self, graph: Graph, pool: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "what another thread does must not end it"
        self._capturing = graph
        yield
        self._capturing = None

    def synchronize(self) -> None:
        self.done.append("host is free")

    def record(self) -> None:
        self.done.append("inputs are there")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> tuple[Runner, Order]:
    """A runner whose single tokens go through graphs."""
    runner = Runner.random(SMALL, num_pages=PAGES, ops=TritonOps())
    order = Order(runner._model)
    fakes = {
        "CUDAGraph": Graph,
        "graph": order.capture,
        "graph_pool_handle": lambda: None,
        "Event": lambda: order,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    blank = make_plan((), page_size=16, num_pages=PAGES)
    runner._graphs = DecodeGraphs(order, CPU, blank)  # type: ignore[arg-type]  # it has what is asked of a decoder
    return runner, order


def rows_of(step: int, count: int, pages: int = 8) -> list[Row]:
    """Each on pages of its own, the second row at another position."""
    ids = np.array([[7 * step + i] for i in range(count)], np.int32)
    return [Row(ids[i], 20 + step + 9 * (i == 1), range(pages * i, pages * i + pages)) for i in range(count)]


def test_replays_give_what_launches_give(order: tuple[Runner, Order]) -> None:
    graphed, happened = order
    plain = Runner.random(SMALL, num_pages=PAGES, ops=TritonOps())
    prompt = np.arange(29, dtype=np.int32)
    for runner in (graphed, plain):
        runner.forward([Row(prompt, 0, range(8 * i, 8 * i + 8), 0) for i in range(3)])
    happened.done.clear()
    for step, count in enumerate((3, 3, 1, 3)):
        rows = rows_of(step, count)
        assert torch.allclose(graphed.forward(rows), plain.forward(rows), atol=1e-5)
    recording = ["warm up", "capture"]
    step_of = ["host is free", "inputs are there", "replay"]
    assert happened.done == [*recording, *step_of, *step_of, *recording, *step_of, *step_of]


def test_a_replay_takes_tokens_that_lie_on_the_device(order: tuple[Runner, Order]) -> None:
    graphed, happened = order
    expected = graphed.forward(rows_of(0, 3)).clone()
    batch = Batch.of(rows_of(0, 3))
    drawn = torch.from_numpy(batch.token_ids.astype(np.int64))
    happened.done.clear()
    graphed.forward(rows_of(1, 3))
    assert torch.equal(graphed.forward(replace(batch, token_ids=np.zeros(3, np.int32), drawn=drawn)), expected)
    assert happened.done.count("replay") == 2


def test_all_graphs_write_their_logits_to_the_same_memory(order: tuple[Runner, Order]) -> None:
    """By itself each of a large model's would hold a hundred megabytes."""
    runner, _ = order
    three, one = (runner.forward(rows_of(0, count)) for count in (3, 1))
    assert three.data_ptr() == one.data_ptr()


def test_rows_that_fill_a_batch_up_touch_no_page(order: tuple[Runner, Order]) -> None:
    runner, _ = order
    before = runner.read_pages(range(PAGES))
    runner.forward(rows_of(0, 3))
    after = runner.read_pages(range(PAGES))
    changed = np.flatnonzero((before != after).any(1)).tolist()
    assert changed == [1, 9, 17], "the pages of positions 20 and 29"
