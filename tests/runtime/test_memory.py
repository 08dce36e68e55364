"""The size of the KV pool: a share of what is left, or bytes; on a GPU, what the weights and a step leave."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import psutil
import pytest
import torch

from niwaki.runtime.api import ConfigError
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Runner
from niwaki.runtime.kv import memory as memory_of_pool
from niwaki.runtime.kv.host_memory import available_bytes, total_bytes
from niwaki.runtime.kv.memory import (
    KvMemory,
    bytes_beside_pool,
    check_pool,
    chunk_tokens,
    pool_tokens,
    streaming_tokens,
)
from niwaki.runtime.models.config import Experts, LayerKind, LayerNames, ModelConfig
from niwaki.runtime.models.workspace import Workspace
from niwaki.runtime.options.config import EngineConfig

SMALL = ModelConfig(
    vocab_size=1000,
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=128,
    tie_embeddings=True,
)
PER_TOKEN = 2 * 2 * 2 * 16 * 4


def tokens_on(device: str, kv_memory: KvMemory) -> int:
    return pool_tokens(SMALL, torch.device(device), "float32", kv_memory, step_tokens=512, step_logits=8)


def test_bytes_and_shares_size_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens_on("cpu", 1000 * PER_TOKEN) == 1000
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 8_000_000 * PER_TOKEN}))
    assert tokens_on("cpu", 0.5) == 4_000_000
    assert tokens_on("cpu", None) == 65_536, "a CPU's pool has a limit unless one asks for more"


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_s_limit_counts_where_it_is_less_than_the_machine_has(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 64 << 30}))
    process, top = tmp_path / "cgroup", tmp_path / "groups"
    process.write_text("0::/box/job\n" if version == 2 else "7:cpu,cpuacct:/box/job\n4:memory:/box/job\n0::/\n")
    memory = top if version == 2 else top / "memory"
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (memory / "box" / "job").mkdir(parents=True)

    def put(group: Path, limit: str, used: int, files: int) -> None:
        for name, text in zip(names, (limit, str(used)), strict=True):
            (group / name).write_text(f"{text}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {files}\ntotal_inactive_file {files}\n")

    put(memory / "box" / "job", "max" if version == 2 else str(2**63 - 4096), 3 << 30, 0)
    assert available_bytes(process, top) == 64 << 30
    put(memory / "box", str(8 << 30), 3 << 30, 1 << 30)
    assert available_bytes(process, top) == 6 << 30, "the group above has a limit; what files take is given up"
    put(memory / "box" / "job", str(4 << 30), 5 << 30, 0)
    assert available_bytes(process, top) == 0
    monkeypatch.setattr(memory_of_pool, "available_bytes", lambda: 1_000_000 * PER_TOKEN)
    assert tokens_on("cpu", 0.5) == 500_000


def test_where_there_are_no_groups_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1 << 30}))
    assert available_bytes(tmp_path / "none", tmp_path) == 1 << 30
    (tmp_path / "cgroup").write_text("0::/not/seen/from/here\nnonsense\n")
    assert available_bytes(tmp_path / "cgroup", tmp_path) == 1 << 30


def test_a_pool_that_the_machine_could_never_fill_is_refused_with_what_could() -> None:
    with pytest.raises(
        ConfigError, match=r"takes [0-9.]+ GiB, this machine has [0-9.]+ GiB; lower kv_tokens"
    ) as caught:
        Engine(kv_tokens=2**39)
    most = int(str(caught.value).split(" to ")[-1].split()[0])
    check_pool(SMALL, torch.device("cpu"), "float32", "auto", total_bytes() // PER_TOKEN)
    with pytest.raises(ConfigError, match="lower kv_tokens"):
        check_pool(SMALL, torch.device("cpu"), "float32", "auto", total_bytes() // PER_TOKEN + 1)
    assert 0 < most < 2**39


def test_a_pool_on_a_cpu_takes_memory_as_it_is_written() -> None:
    process, num_pages = psutil.Process(), 16_384
    before = process.memory_info().rss
    runner = Runner.random(SMALL, dtype="float32", device="cpu", num_pages=num_pages)
    grown = process.memory_info().rss - before
    assert num_pages * runner.page_size * runner.kv_bytes_per_token == 128 * 2**20
    assert grown < 32 * 2**20
    last = runner.read_pages([num_pages - 1])
    assert not last.any(), "never written, and so zero"


def test_a_gpu_gives_what_the_weights_and_a_step_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = bytes_beside_pool(SMALL, "float32", step_tokens=512, step_logits=8)
    weights = 1000 * 64 + 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert beside - bytes_beside_pool(SMALL, "bfloat16", step_tokens=512, step_logits=8) > 2 * weights
    free = beside + 10_000 * PER_TOKEN
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free, free))
    assert tokens_on("cuda", 1.0) == 10_000
    assert tokens_on("cuda", 0.5) == 5_000
    assert tokens_on("cuda", None) == 9_500
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (beside, beside))
    with pytest.raises(ConfigError, match=r"the weights and one step take 2.0 GiB, the GPU has 2.0 GiB free"):
        tokens_on("cuda", None)


@pytest.mark.parametrize(("weights", "share"), [("int8", 0.5), ("fp8", 0.5), ("int4", 0.3)])
def test_weights_in_codes_leave_the_pool_more(weights: str, share: float) -> None:
    config = replace(SMALL, vocab_size=64, hidden_size=1024, intermediate_size=2048)
    plain, coded = (
        bytes_beside_pool(config, "bfloat16", weights=kind, step_tokens=1, step_logits=1) for kind in ("auto", weights)
    )
    products = 2 * 2 * (1024 * 128 + 1024 * 64 + 3 * 1024 * 2048)
    assert plain - coded == pytest.approx((1 - share) * products, rel=0.1)


@pytest.mark.parametrize("storage", ["each", "stacked"])
def test_experts_in_codes_leave_the_pool_more(storage: Literal["each", "stacked"]) -> None:
    names = LayerNames(expert_gate_up=("mlp.experts.gate_up_proj",), expert_down="mlp.experts.down_proj")
    config = replace(
        SMALL,
        vocab_size=64,
        hidden_size=512,
        layers=(LayerKind(is_sparse=True),) * SMALL.num_layers,
        experts=Experts(8, 2, 1024, renormalise=True, storage=storage),
        names=LayerNames() if storage == "each" else names,
    )

    def beside(dtype: str, weights: str) -> int:
        return bytes_beside_pool(config, dtype, weights=weights, step_tokens=1, step_logits=1)

    experts = 2 * SMALL.num_layers * 8 * 3 * 512 * 1024
    assert beside("bfloat16", "auto") - beside("bfloat16", "int8") == pytest.approx(0.475 * experts, rel=0.1)
    assert beside("float32", "auto") - beside("float32", "int8") < 0.1 * experts, "in float32 they are put together"


def test_weights_that_come_in_codes_leave_the_pool_more() -> None:
    config = replace(SMALL, hidden_size=1024, intermediate_size=2048)
    stored = {f"model.layers.{layer}.mlp.{name}_proj.weight": 1_000_000 for layer in (0, 1) for name in ("up", "down")}
    stored["model.embed_tokens.weight"] = 1  # is looked up, so it is put together

    def beside(dtype: str, stored: dict[str, int]) -> int:
        return bytes_beside_pool(config, dtype, stored=stored, step_tokens=1, step_logits=1)

    assert beside("bfloat16", {}) - beside("bfloat16", stored) == 4 * (2 * 1024 * 2048 - 1_000_000)
    assert beside("float32", {}) == beside("float32", stored), "only bfloat16 is computed from codes"


@pytest.mark.parametrize("kv_memory", [0.0, 1.5, -3, True, "half"])
def test_a_share_or_bytes_that_make_no_pool_are_refused(kv_memory: object) -> None:
    with pytest.raises(ConfigError, match=r"kv_memory must be a share above 0\.0 and up to 1\.0, or bytes"):
        EngineConfig.of(None, {"kv_memory": kv_memory})


def test_a_pool_has_one_size() -> None:
    with pytest.raises(ConfigError, match="give kv_tokens or kv_memory, not both"):
        replace(EngineConfig(kv_tokens=64), kv_memory=0.5)


def test_a_step_of_a_small_model_takes_more_tokens_within_limits() -> None:
    cpu = torch.device("cpu")
    wide = replace(SMALL, vocab_size=8, num_layers=1, hidden_size=1024, num_heads=8, head_dim=128, num_kv_heads=8)
    sizes = [chunk_tokens(replace(wide, intermediate_size=1024 * size), cpu) for size in (1, 2, 8, 16, 1024)]
    assert sizes == [2048, 2048, 1024, 512, 512]


@pytest.mark.parametrize(
    ("has_unit", "more"), [(True, [2048, 2048, 2048, 1536, 512]), (False, [2048, 2048, 1024, 512, 512])]
)
def test_a_step_takes_more_tokens_where_a_matrix_unit_multiplies_bfloat16(
    monkeypatch: pytest.MonkeyPatch, has_unit: bool, more: list[int]
) -> None:
    monkeypatch.setattr("niwaki.runtime.kv.memory.has_matrix_unit", lambda: has_unit)
    cpu = torch.device("cpu")
    wide = replace(SMALL, vocab_size=8, num_layers=1, hidden_size=1024, num_heads=8, head_dim=128, num_kv_heads=8)
    models = [replace(wide, intermediate_size=1024 * size) for size in (1, 2, 8, 16, 1024)]
    assert [chunk_tokens(model, cpu, "bfloat16") for model in models] == more
    assert [chunk_tokens(model, cpu, "float32") for model in models] == [2048, 2048, 1024, 512, 512]
    assert streaming_tokens(models[3], cpu, "bfloat16") == max(64, more[3] // 16)


def test_a_gpu_takes_larger_steps_and_of_those_a_quarter_while_a_stream_is_read() -> None:
    gpu = torch.device("cuda")
    large = replace(SMALL, vocab_size=8, num_layers=32, hidden_size=4096, num_heads=32, head_dim=128, num_kv_heads=8)
    sizes = [chunk_tokens(replace(large, intermediate_size=1024 * size), gpu) for size in (4, 14, 100)]
    assert sizes == [8192, 4352, 2048]
    assert chunk_tokens(SMALL, gpu) == 8192
    assert streaming_tokens(SMALL, gpu) == 2048


def test_the_memory_of_a_step_is_let_go_before_a_larger_step_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Workspace(SMALL, torch.device("cpu"), torch.float32)
    space.of_size(16)
    old = [weakref.ref(tensor) for tensor in space._memory]
    empty = torch.empty

    def checked(shape: tuple[int, int], **options: Any) -> torch.Tensor:
        assert all(one() is None for one in old)
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", checked)
    assert len(old) == 7
    assert len(space.of_size(17).x.tensor) == 17
    monkeypatch.setattr(torch, "empty", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        space.of_size(1000)
    monkeypatch.undo()
    assert len(space.of_size(3).x.tensor) == 3, "a step that had no room leaves none without"


def test_a_loaded_engine_has_reserved_its_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    monkeypatch.setattr(Runner, "reserve", lambda self, tokens: reserved.append(tokens))
    with Engine(kv_tokens=4096, chunked_prefill_size=640, max_running_requests=8):
        assert reserved == [648]


def entries_of(result: Mapping[str, Any]) -> list[Any]:
    meta = result["meta_info"]
    return [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]


def test_a_step_has_as_many_logits_as_memory_was_counted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probabilities of a long prompt want as many rows of the whole vocabulary as it has tokens."""
    texts = ["The red lamp means that the tank is empty. " * 6, "Is the soup cold? " * 8]
    greedy = {"temperature": 0.0, "max_new_tokens": 5}
    sizes: list[int] = []
    forward = Runner.forward

    def counted(self: Runner, rows: Any) -> torch.Tensor:
        logits = forward(self, rows)
        sizes.append(len(logits))
        return logits

    monkeypatch.setattr(Runner, "forward", counted)
    told, most = [], []
    for rows in (2**15, 20):
        monkeypatch.setattr(memory_of_pool, "STEP_LOGITS", rows * 2048)
        sizes.clear()
        with Engine(kv_tokens=4096, chunked_prefill_size=1024, dtype="float32") as engine:
            results = engine.generate(texts, greedy, return_logprob=True, logprob_start_len=9)
        told.append([entry for one in results for entry in entries_of(one)])
        most.append(max(sizes))
    assert most[0] > 100
    assert most[1] <= 20 + len(texts)
    for whole, part in zip(*told, strict=True):
        assert whole[1] == part[1]
        assert whole[0] is part[0] is None or whole[0] == pytest.approx(part[0], abs=1e-4)


def test_what_is_said_of_a_step_holds() -> None:
    assert EngineConfig(chunked_prefill_size=64).step_tokens == 64
    assert EngineConfig().step_tokens == 512
    with pytest.raises(ConfigError, match="chunked_prefill_size"):
        EngineConfig(chunked_prefill_size=8)
