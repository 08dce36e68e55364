"""CUDA graphs of decoding, without CUDA: replayed they compute what is launched, and ask nothing of the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tests.kernels.triton_setup")  # skips where the kernels cannot run

from niwaki.kernels.plan import make_plan
from niwaki.kernels.segments import Int32s
from niwaki.kernels.triton.launch import is_interpreted
from niwaki.kernels.triton.ops import TritonOps
from niwaki.kernels.triton.plan import BatchShape, lay_out
from niwaki.runtime.forward import graphs
from niwaki.runtime.forward.graphs import DecodeGraphs
from niwaki.runtime.forward.recording import Recorder
from niwaki.runtime.forward.runner import Batch, Row, Runner
from niwaki.runtime.models.config import Experts, Latent, LayerKind, LayerNames, ModelConfig, Temperature
from niwaki.runtime.models.decoder import Decoder
from niwaki.runtime.models.workspace import Buffers
from tests.fake_graphs import Graph, Watch, put_in_place

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


class Told(Decoder):
    """Keeps what happens to a model whose graphs are recorded, in order, with the events of the device."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.done: list[str] = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.done.append("warm up" if Graph.recording is None else "capture")
        return self.model.forward(*args, **kwargs)

    def buffers(self, tokens: int) -> Buffers:
        return self.model.buffers(tokens)

    def synchronize(self) -> None:
        self.done.append("host is free")

    def record(self) -> None:
        self.done.append("inputs are there")


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelConfig], tuple[Runner, Told]]:
    """Makes a runner whose single tokens go through graphs."""
    put_in_place(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)

    def make(config: ModelConfig) -> tuple[Runner, Told]:
        runner = Runner.random(config, num_pages=PAGES, ops=TritonOps())
        told = Told(runner._model)
        monkeypatch.setattr(torch.cuda, "Event", lambda: told)
        monkeypatch.setattr(Graph, "on_replay", lambda: told.done.append("replay"))
        blank = make_plan((), page_size=16, num_pages=PAGES)
        runner._graphs = DecodeGraphs(told, CPU, blank, Recorder(CPU))
        return runner, told

    return make


def rows_of(step: int, count: int, pages: int = 8) -> list[Row]:
    """Each on pages of its own, the second row at another position."""
    ids = np.array([[7 * step + i] for i in range(count)], np.int32)
    return [Row(ids[i], 20 + step + 9 * (i == 1), range(pages * i, pages * i + pages)) for i in range(count)]


Make = Callable[[ModelConfig], tuple[Runner, Told]]


def test_replays_give_what_launches_give(graphed: Make) -> None:
    recorded, happened = graphed(SMALL)
    plain = Runner.random(SMALL, num_pages=PAGES, ops=TritonOps())
    prompt = np.arange(29, dtype=np.int32)
    for runner in (recorded, plain):
        runner.forward([Row(prompt, 0, range(8 * i, 8 * i + 8), 0) for i in range(3)])
    happened.done.clear()
    for step, count in enumerate((3, 3, 1, 3)):
        rows = rows_of(step, count)
        assert torch.allclose(recorded.forward(rows), plain.forward(rows), atol=1e-5)
    recording = ["warm up", "capture"]
    step_of = ["host is free", "inputs are there", "replay"]
    assert happened.done == [*recording, *step_of, *step_of, *recording, *step_of, *step_of]


def test_a_replay_takes_tokens_that_lie_on_the_device(graphed: Make) -> None:
    runner, happened = graphed(SMALL)
    expected = runner.forward(rows_of(0, 3)).clone()
    batch = Batch.of(rows_of(0, 3))
    drawn = torch.from_numpy(batch.token_ids.astype(np.int64))
    happened.done.clear()
    runner.forward(rows_of(1, 3))
    assert torch.equal(runner.forward(replace(batch, token_ids=np.zeros(3, np.int32), drawn=drawn)), expected)
    assert happened.done.count("replay") == 2


def test_all_graphs_write_their_logits_to_the_same_memory(graphed: Make) -> None:
    """By itself each of a large model's would hold a hundred megabytes."""
    runner, _ = graphed(SMALL)
    three, one = (runner.forward(rows_of(0, count)) for count in (3, 1))
    assert three.data_ptr() == one.data_ptr()


def test_rows_that_fill_a_batch_up_touch_no_page(graphed: Make) -> None:
    runner, _ = graphed(SMALL)
    before = runner.read_pages(range(PAGES))
    runner.forward(rows_of(0, 3))
    after = runner.read_pages(range(PAGES))
    changed = np.flatnonzero((before != after).any(1)).tolist()
    assert changed == [1, 9, 17], "the pages of positions 20 and 29"


SPARSE = (LayerKind(is_sparse=True),)
LIKE_GPT_OSS = replace(
    SMALL,
    has_sinks=True,
    activation="clamped",
    gate_alpha=1.7,
    gate_limit=0.8,
    layers=SPARSE,
    experts=Experts(5, 2, 24, renormalise=True, has_router_bias=True, has_bias=True, storage="interleaved"),
    names=LayerNames(expert_gate_up=("mlp.experts.gate_up_proj",), expert_down="mlp.experts.down_proj"),
)
LIKE_LLAMA4 = replace(
    SMALL,
    temperature=Temperature(0.6, 7.0, is_everywhere=True),
    layers=SPARSE,
    experts=Experts(5, 2, 24, renormalise=False, score="sigmoid", weighs_input=True, shared_width=16),
)
LIKE_DEEPSEEK = replace(
    SMALL,
    head_dim=32,
    rotary_dim=8,
    attention_scale=0.2,
    latent=Latent(query_rank=12, rank=24, head_dim=12, rotary_dim=8, value_dim=20),
    layers=SPARSE,
    experts=Experts(6, 2, 24, renormalise=True, score="sigmoid", groups=3, groups_per_token=2, has_correction=True),
)


@pytest.mark.parametrize(
    "config", [SMALL, LIKE_GPT_OSS, LIKE_LLAMA4, LIKE_DEEPSEEK], ids=["dense", "gpt-oss", "llama4", "deepseek"]
)
def test_a_step_that_is_replayed_asks_for_no_memory_and_waits_for_nothing(config: ModelConfig, graphed: Make) -> None:
    """Nor does what was recorded for it: the graphs here refuse that, as CUDA does."""
    runner, _ = graphed(config)
    plain = Runner.random(config, num_pages=PAGES, ops=TritonOps())
    runner.forward(rows_of(0, 3))
    plain.forward(rows_of(0, 3))
    batch = Batch.of(rows_of(1, 3))
    drawn = torch.from_numpy(batch.token_ids.astype(np.int64))
    asked = Watch()
    with asked:
        replayed = runner.forward(replace(batch, drawn=drawn))
    assert torch.allclose(replayed, plain.forward(batch), atol=1e-5)
    assert asked.names.count("copy_") == 3, "the inputs to pinned memory, from there to the device, and the tokens"
    assert set(asked.names) <= {"copy_", "slice", "detach", "alias", "view", "lift_fresh"}, asked.names


def test_only_the_first_recording_gives_memory_back(graphed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[str] = []
    runner, happened = graphed(SMALL)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append("all"))
    for count in (1, 2, 3):
        runner.forward(rows_of(0, count))
    assert happened.done.count("capture") == 3
    assert given_back == ["all"]


def test_graphs_keep_no_memory_that_larger_steps_have_grown_out_of(graphed: Make) -> None:
    runner, _ = graphed(SMALL)
    runner.reserve(64)
    addresses = []
    for rows in (rows_of(0, 1), [Row(np.arange(40, dtype=np.int32), 0, range(8), 0)], rows_of(0, 3)):
        runner.forward(rows)
        addresses.append(runner._model.buffers(1).x.tensor.data_ptr())
    assert len(set(addresses)) == 1


def test_what_fails_while_it_is_recorded_is_told_and_leaves_nothing_behind(graphed: Make) -> None:
    runner, told = graphed(SMALL)
    expected = runner.forward(rows_of(0, 3)).clone()
    model = told.model

    class Broken(Decoder):
        def __init__(self) -> None: ...

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits = model.forward(*args, **kwargs)
            if Graph.recording is None:
                return logits
            assert not gc.isenabled(), "what ends meanwhile may be CUDA's"
            raise ZeroDivisionError

    told.model = Broken()
    assert gc.isenabled()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            runner.forward(rows_of(0, 2))
        assert gc.isenabled()
    assert torch.equal(runner.forward(rows_of(0, 3)), expected), "what was recorded before goes on"
    told.model = model
    runner.forward(rows_of(0, 2))


def test_what_would_wait_cannot_be_recorded(graphed: Make) -> None:
    runner, told = graphed(SMALL)
    model = told.model

    class Waiting(Decoder):
        def __init__(self) -> None: ...

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits = model.forward(*args, **kwargs)
            return logits.clamp(max=logits.max().item())

    told.model = Waiting()
    assert runner._graphs is not None
    arrays, shape = laid_out(rows_of(0, 2))
    refused = pytest.raises(RuntimeError, match="not permitted when stream is capturing: item")
    with refused, torch.inference_mode():
        runner._graphs.forward(arrays, shape)


def test_what_cannot_be_recorded_is_launched_and_told_once(graphed: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A model whose steps CUDA refuses to record answers all the same."""
    runner, told = graphed(SMALL)
    plain = Runner.random(SMALL, num_pages=PAGES, ops=TritonOps())
    model = told.model

    class Waiting(Decoder):
        def __init__(self) -> None: ...

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits = model.forward(*args, **kwargs)
            logits.max().item()
            return logits

    told.model = runner._model = Waiting()
    for step in range(2):
        assert torch.allclose(runner.forward(rows_of(step, 2)), plain.forward(rows_of(step, 2)), atol=1e-5)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("no CUDA graphs for steps of single tokens any more, which take longer now: operation not")
    assert "replay" not in told.done


def test_pages_that_are_held_and_not_reached_yet_make_no_other_graph(graphed: Make) -> None:
    """A table has columns to spare; how many, a batch that has just begun and one that goes on do not agree upon."""
    runner, happened = graphed(SMALL)
    for pages in (2, 3, 24):
        runner.forward([Row(np.array([5], np.int32), 20, range(pages))])
    arrays, _ = laid_out([Row(np.array([5], np.int32), 20, range(24))])
    assert arrays["table"].shape == (1, 2)
    assert happened.done.count("capture") == 1


def test_of_too_many_graphs_the_one_that_was_not_used_for_longest_goes(
    graphed: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    runner, happened = graphed(SMALL)
    for count, num_recorded in ((1, 1), (2, 2), (1, 2), (4, 3), (1, 3), (2, 4), (4, 5)):
        runner.forward(rows_of(0, count, 6))
        assert happened.done.count("capture") == num_recorded
        assert happened.done[-1] == "replay"


def laid_out(rows: list[Row]) -> tuple[dict[str, Int32s], BatchShape]:
    """A batch of these single tokens, as the runner hands it to its graphs."""
    batch = Batch.of(rows)
    plan = make_plan(batch.spans, page_size=16, num_pages=PAGES)
    return lay_out(
        batch.spans.starts, batch.spans.counts, plan.page_table, batch.token_ids, plan.positions, plan.slots,
        page_size=16, group=2,
    )  # fmt: skip
