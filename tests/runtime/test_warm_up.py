"""What a GPU compiles when a model is loaded is all that its steps ask for later. Kernels are noted here, not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tests.kernels.triton_setup")  # skips where the kernels cannot run

from niwaki.kernels.triton import launch
from niwaki.kernels.triton.launch import is_interpreted
from niwaki.kernels.triton.ops import TritonOps
from niwaki.radix.pages import PageCopy
from niwaki.runtime.api import SamplingParams
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward import warm_up as first_steps
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.forward.warm_up import warm_up
from niwaki.runtime.models.config import Experts, LayerKind, ModelConfig
from niwaki.runtime.sampling.device_sampler import DeviceDrawing, sample_on_device
from niwaki.runtime.sampling.sampler import PlainDraws, SampleRow
from tests.fake_graphs import put_in_place

if not is_interpreted():
    pytest.skip("of kernels that are compiled nobody tells what for", allow_module_level=True)

PAGES = 400
MOST_BLOCKS = 65_535  # of a grid, but for its first side
SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "context_length": 4096,
}
SPARSE = LayerKind(is_sparse=True)
MODELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "plain": ({"tie_embeddings": True}, {}),
    "window": ({"qk_norm": "head", "layers": (LayerKind(window=20), LayerKind())}, {}),
    "experts": ({"layers": (SPARSE, LayerKind()), "experts": Experts(8, 2, 24, renormalise=True)}, {}),
    "int8 cache": ({}, {"dtype": "bfloat16", "kv_dtype": "int8"}),
    "int4 weights": ({}, {"dtype": "bfloat16", "weights": "int4"}),
}
# Rows of (start, count): what comes to an engine in its first minutes.
STEPS = [
    [(0, 1)], [(5, 1)] * 3, [(300, 1)] * 7, [(700, 1)] * 5, [(1500, 1), (3, 1), (7, 1)], [(9, 2)], [(800, 3), (2, 5)],
    [(0, 16)], [(0, 30), (4, 1)], [(900, 100)], [(1300, 200)], [(2000, 17), (0, 300)], [(0, 1000)],
    [(0, 257), (1, 1), (3, 9)], [(0, 64)] * 16, [(0, 15)] * 33, [(0, 1)] * 33,
]  # fmt: skip


class Noted:
    """What kernels would be compiled for, in place of running them."""

    def __init__(self) -> None:
        self.kinds: dict[object, str] = {}
        self.doing = ""

    def start(self, kernel: Any, grid: tuple[int, ...], args: tuple[object, ...], meta: dict[str, object]) -> None:
        assert max(grid[1:], default=1) <= MOST_BLOCKS
        plain = kernel.kwargs.get("do_not_specialize") or ()
        anywhere = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
        parts: list[object] = [kernel, *sorted((name, str(value)) for name, value in meta.items())]
        for name, arg in zip(kernel.arg_names, args, strict=False):
            if isinstance(arg, torch.Tensor):
                parts.append((arg.dtype, name in anywhere or arg.data_ptr() % 16 == 0))
            elif not isinstance(arg, int) or name in plain:
                parts.append(type(arg))
            else:  # Triton compiles for 1, for what 16 divides, and for more than 31 bits
                parts.append(arg if is_constant(kernel, name) else (arg == 1, arg % 16 == 0, arg >= 2**31))
        self.kinds.setdefault(tuple(parts), f"{kernel.fn.__name__} in {self.doing}")


def is_constant(kernel: Any, name: str) -> bool:
    return "constexpr" in str(kernel.fn.__annotations__.get(name, ""))


@pytest.mark.parametrize("name", MODELS)
def test_no_step_compiles_what_loading_did_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is compiled in the middle of a step stops all requests, the sampler's for 7 seconds."""
    noted = Noted()
    monkeypatch.setattr(launch, "_start", noted.start)
    fields, options = MODELS[name]
    make: Callable[..., Runner] = Runner.random
    runner = make(ModelConfig(**SMALL | fields), num_pages=PAGES, ops=TritonOps(), **options)
    warm_up(runner)
    known = set(noted.kinds)
    assert len(known) > 15
    for step in STEPS:
        noted.doing = f"a step of {step}"
        logits = runner.forward(rows_of(step))
        sample_on_device(logits, [SampleRow(SamplingParams(top_p=0.9), 3, 2)] * len(logits))
    for branches, trunk in ((20, 70), (9, 100), (33, 64)):
        noted.doing = f"a tree of {branches}"
        token = np.zeros(1, np.int32)
        runner.forward([Row(token, trunk * 16 + 3, [*range(trunk), trunk + i]) for i in range(branches)])
    noted.doing = "copies"
    runner.copy_pages([PageCopy(1, 7, 3), PageCopy(2, 8, 16), PageCopy(3, 9, 5)])
    for count in (1, 2, 3, 5, 17):
        draw(count, noted)
    assert [told for kind, told in noted.kinds.items() if kind not in known] == []


def draw(count: int, noted: Noted) -> None:
    noted.doing = f"drawing {count}"
    logits, mask = torch.zeros(count, 1024), np.full(32, 7, np.uint32)
    rows = [(SamplingParams(temperature=0.5), 1, 2)] * count
    drawing = DeviceDrawing(PlainDraws.of(rows, 1024), 1024, torch.device("cpu"))
    drawing.draw(logits)
    drawing.draw(logits, np.array([0]), [mask])
    penalised = SampleRow(SamplingParams(presence_penalty=0.5), 3, 2, mask, [1, 2], [3])
    sample_on_device(logits, [penalised] * count)


def rows_of(step: list[tuple[int, int]]) -> list[Row]:
    """Each on pages of its own. Of each the last logits are wanted."""
    rows, page = [], 0
    for index, (start, count) in enumerate(step):
        pages = -(-(start + count) // 16)
        rows.append(Row(np.zeros(count, np.int32), start, range(page, page + pages), 1 + index % count))
        page += pages
    return rows


@pytest.mark.parametrize(("pages", "context"), [(1, 4096), (40, 4096), (200, 100), (66, 4096)])
def test_a_pool_that_is_too_small_for_some_steps_has_the_others(
    pages: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_start", Noted().start)
    config = ModelConfig(**SMALL | {"context_length": context})
    warm_up(Runner.random(config, num_pages=pages, ops=TritonOps()))


def test_an_engine_on_a_gpu_is_warm_before_it_takes_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[Runner] = []
    monkeypatch.setattr(first_steps, "warm_up", warmed.append)
    with Engine():
        assert not warmed, "a CPU's kernels are compiled as they are needed"
    put_in_place(monkeypatch)
    monkeypatch.setattr(Runner, "is_on_gpu", property(lambda runner: True))
    with Engine() as engine:
        assert warmed == [engine.backend._core._runner]
