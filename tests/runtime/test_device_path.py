"""The path of a GPU, in Triton's interpreter where there is none: the tokens and logits of the CPU path."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tests.kernels.triton_setup")  # skips where the kernels cannot run

from triton.runtime.driver import driver

from niwaki.kernels.triton.coded import CodedProduct, E4m3Product
from niwaki.kernels.triton.ops import TritonOps
from niwaki.radix.pages import PageCopy
from niwaki.runtime import bundled
from niwaki.runtime.loop.ahead import HostDrawing
from niwaki.runtime.api import ConfigError, SamplingParams, Segment
from niwaki.runtime.sampling.device_sampler import DeviceDrawing
from niwaki.runtime.models.config import Experts, Latent, LayerKind, LayerNames, ModelConfig, Temperature
from niwaki.runtime.models.mlp import DenseMlp
from niwaki.runtime.forward.runner import Batch, Row, Runner, refuse_small_cache, refuse_wide_heads, resolve_device
from niwaki.runtime.sampling.sampler import PlainDraws
from niwaki.runtime.checkpoint.tokenizer import Tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16

TINY = ModelConfig(
    vocab_size=97,
    num_layers=2,
    hidden_size=48,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=256,
    tie_embeddings=True,
    qk_norm="head",
    layers=(LayerKind(window=20), LayerKind(is_sparse=True)),
    experts=Experts(count=5, per_token=2, width=24, renormalise=True, shared_width=16),
)
PROMPTS = ["Mara lives in Oslo.", "red, green"]


@pytest.fixture(scope="module")
def runners() -> tuple[Runner, Runner]:
    folder = Path(bundled.MODEL_DIR)
    host = Runner.load(folder, dtype="float32", num_pages=24, page_size=PAGE)
    device = Runner.load(folder, device=DEVICE, dtype="float32", num_pages=24, page_size=PAGE, ops=TritonOps())
    return host, device


def greedy(runner: Runner, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """All prompts in one batch: a prefill in two chunks, then a token a step."""
    pages = [list(range(8 * i, 8 * i + 8)) for i in range(len(prompts))]
    cut = [max(1, len(ids) - 3) for ids in prompts]
    runner.forward([Row(ints(p[:c]), 0, g, 0) for p, c, g in zip(prompts, cut, pages, strict=True)])
    rows = [Row(ints(p[c:]), c, g) for p, c, g in zip(prompts, cut, pages, strict=True)]
    written: list[list[int]] = [[] for _ in prompts]
    lengths = [len(ids) for ids in prompts]
    for _ in range(steps):
        best = runner.forward(rows).argmax(-1).tolist()
        for i, token in enumerate(best):
            written[i].append(token)
        rows = [Row(ints([t]), n + len(w) - 1, g) for t, n, w, g in zip(best, lengths, written, pages, strict=True)]
    return written


def ints(values: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_the_bundled_model_writes_the_same_greedy_tokens(runners: tuple[Runner, Runner]) -> None:
    tokenizer = Tokenizer(Path(bundled.MODEL_DIR))
    prompts = [list(tokenizer.encode([Segment(text)])) for text in PROMPTS]
    expected, got = (greedy(runner, prompts, 2) for runner in runners)
    assert got == expected


LIKE_GPT_OSS = replace(
    TINY,
    qk_norm=None,
    has_sinks=True,
    activation="clamped",
    gate_alpha=1.7,
    gate_limit=0.8,
    layers=(LayerKind(window=20, is_sparse=True), LayerKind(is_sparse=True)),
    experts=Experts(5, 2, 24, renormalise=True, has_router_bias=True, has_bias=True, storage="interleaved"),
    names=LayerNames(expert_gate_up=("mlp.experts.gate_up_proj",), expert_down="mlp.experts.down_proj"),
)
LIKE_LLAMA4 = replace(
    TINY,
    qk_norm="bare",
    temperature=Temperature(0.6, 7.0),
    layers=(LayerKind(chunk=20, is_sparse=True), LayerKind(rope="none", has_qk_norm=False)),
    experts=Experts(5, 2, 24, renormalise=False, score="sigmoid", weighs_input=True),
)
LIKE_DEEPSEEK = replace(
    TINY,
    num_kv_heads=1,
    head_dim=32,
    rotary_dim=8,
    qk_norm=None,
    attention_scale=0.2,
    latent=Latent(query_rank=12, rank=24, head_dim=12, rotary_dim=8, value_dim=20),
    layers=(LayerKind(is_sparse=True), LayerKind()),
    experts=Experts(6, 2, 24, renormalise=True, score="sigmoid", groups=3, groups_per_token=2, scale=1.5),
)


def pair(config: ModelConfig = TINY) -> tuple[Runner, Runner]:
    made: Callable[..., Runner] = Runner.random
    return made(config, num_pages=17), made(config, num_pages=17, device=DEVICE, ops=TritonOps())


@pytest.mark.parametrize(
    "config", [TINY, LIKE_GPT_OSS, LIKE_LLAMA4, LIKE_DEEPSEEK], ids=["plain", "gpt-oss", "llama4", "deepseek"]
)
def test_logits_agree_cold_chunked_ragged_and_copied(config: ModelConfig) -> None:
    host, device = pair(config)
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 97, 64).astype(np.int32)
    steps = [
        [Row(ids[:22], 0, range(3), 22), Row(ids[40:43], 0, [4])],  # cold, long and short
        [Row(ids[43:44], 22, range(3)), Row(ids[44:48], 3, [4], 4)],  # ragged behind what is cached
        [Row(ids[50:51], 23, range(3)), Row(ids[51:52], 7, [4])],  # a token each
    ]
    for rows in steps:
        assert torch.allclose(device.forward(rows).cpu(), host.forward(rows), atol=1e-4)
    for runner in (host, device):
        runner.copy_pages([PageCopy(1, 5, 8)])
    forked = [Row(ids[52:53], 24, [0, 5]), Row(ids[53:54], 24, range(3))]
    assert torch.allclose(device.forward(forked).cpu(), host.forward(forked), atol=1e-4)


def test_tokens_that_were_drawn_on_the_device_are_computed_like_those_of_the_host() -> None:
    ids = np.random.default_rng(0).integers(0, 97, 64).astype(np.int32)
    for runner in pair():
        runner.forward([Row(ids[:22], 0, range(3), 0), Row(ids[40:43], 0, [4], 0)])
        batch = Batch.of([Row(ids[43:44], 22, range(3)), Row(ids[44:45], 3, [4])])
        expected = runner.forward(batch).clone()
        drawn = torch.from_numpy(batch.token_ids.astype(np.int64)).to(expected.device)
        assert torch.equal(runner.forward(replace(batch, token_ids=np.zeros(2, np.int32), drawn=drawn)), expected)


@pytest.mark.parametrize("position", [0, 11])
def test_a_device_draws_step_after_step_what_the_host_draws(position: int) -> None:
    vocab = 97
    sets: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 9},
        {"temperature": 1.0, "min_p": 0.05, "top_k": 30},
    ]
    rows = [(SamplingParams(**options), 5 + seed, position) for seed, options in enumerate(sets)]  # type: ignore[arg-type]  # floats, and one int
    host = HostDrawing(PlainDraws.of(rows, vocab))
    device = DeviceDrawing(PlainDraws.of(rows, vocab), vocab, torch.device(DEVICE))
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for _ in range(4):
        logits = 2 * torch.randn(len(rows), vocab, generator=generator)
        tokens = host.draw(logits).tolist()
        assert device.draw(logits.to(DEVICE)).tolist() == tokens
        seen.add(tuple(tokens[1:]))
    assert len(seen) == 4
    few, masked = np.array([0x00FF00F0] * 4, np.uint32), np.array([0, 1, 3])
    for masks in ([few, few, few], [few, ~few, few]):
        logits = 2 * torch.randn(len(rows), vocab, generator=generator)
        tokens = host.draw(logits, masked, masks).tolist()
        assert device.draw(logits.to(DEVICE), masked, masks).tolist() == tokens
        assert 0x00FF00F0 >> (tokens[3] % 32) & 1
    logits[2, 5] = float("nan")
    assert (device.draw(logits.to(DEVICE)) < 0).tolist() == [False, False, True, False, False]
    assert (host.draw(logits) < 0).any()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_cache_of_8_bits_holds_as_much_as_the_cpus(kind: str) -> None:
    config = replace(TINY, layers=(), experts=None)
    ids = np.random.default_rng(0).integers(0, 97, 64).astype(np.int32)
    exact = Runner.random(config, num_pages=17)
    host = Runner.random(config, dtype="bfloat16", kv_dtype=kind, num_pages=17)
    device = Runner.random(config, dtype="bfloat16", kv_dtype=kind, num_pages=17, device=DEVICE, ops=TritonOps())
    errors: list[list[float]] = []
    for rows in ([Row(ids[:20], 0, range(2), 20)], [Row(ids[20:22], 20, range(2), 2)], [Row(ids[22:23], 22, range(2))]):
        expected, *others = (runner.forward(rows).cpu() for runner in (exact, host, device))
        errors.append([float((logits - expected).norm() / expected.norm()) for logits in others])
    is_cut = kind == "fp8" and DEVICE == "cpu"  # the interpreter loses carries: see docs/gpu.md
    assert all(there < (0.25 if is_cut else 1.5 * here) for here, there in errors), errors
    for runner in (host, device):
        runner.write_pages([7, 8], runner.read_pages([0, 1]))
        runner.copy_pages([PageCopy(8, 4, 7)])
        token = [runner.forward([Row(ids[23:24], 23, pages)]) for pages in (range(2), [7, 4])]
        assert torch.equal(*token), "scales go where their numbers go"


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_products_keep_their_codes_on_the_device(kind: str) -> None:
    config = replace(TINY, layers=(), experts=None)
    ids = np.random.default_rng(0).integers(0, 97, 64).astype(np.int32)
    rows = [Row(ids[:9], 0, [0], 9), Row(ids[9:10], 0, [1])]
    exact = Runner.random(config, dtype="float32", num_pages=4).forward(rows)
    there = Runner.random(config, dtype="bfloat16", weights=kind, num_pages=4, device=DEVICE, ops=TritonOps())
    mlp = there._model._layers[0].mlp
    assert isinstance(mlp, DenseMlp)
    assert isinstance(mlp.gate_up, CodedProduct if kind != "fp8" else E4m3Product)
    here = Runner.random(config, dtype="bfloat16", weights=kind, num_pages=4).forward(rows)
    error, limit = (float((logits.cpu() - exact).norm() / exact.norm()) for logits in (there.forward(rows), here))
    assert error < (2.5 if kind == "fp8" else 1.2) * limit < 0.4  # of fp8 a GPU multiplies rows of e4m3, too


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_that_does_not_know_e4m3_is_refused_by_name(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    refused = pytest.raises(ConfigError, match="kv_dtype='fp8' wants a GPU that knows e4m3")
    with refused if capability < (8, 9) else nullcontext():
        refuse_small_cache(TINY, "bfloat16", "fp8", torch.device("cuda"))
    refuse_small_cache(TINY, "bfloat16", "int8", torch.device("cuda"))
    with pytest.raises(ConfigError, match="wants heads of a multiple of 4, got 18"):
        refuse_small_cache(replace(TINY, head_dim=18), "bfloat16", "int8", torch.device("cuda"))


def test_what_a_gpu_would_not_check_is_refused_before() -> None:
    _, device = pair()
    with pytest.raises(IndexError, match="outside the vocabulary of 97"):
        device.forward([Row(ints([97]), 0, [0])])
    with pytest.raises(ValueError, match="position 256 is beyond the 256 positions"):
        device.forward([Row(ints([5]), 256, range(17))])


def test_heads_too_wide_for_a_gpu_are_refused_before_anything_is_loaded() -> None:
    refuse_wide_heads(576, torch.device("cpu"))
    refuse_wide_heads(256, torch.device("cuda"))
    with pytest.raises(ConfigError, match="heads of 576 channels are wider than the 256 of the GPU kernels"):
        refuse_wide_heads(576, torch.device("cuda"))


def test_a_second_gpu_is_not_taken_for_the_first() -> None:
    with pytest.raises(ConfigError, match="chosen by CUDA_VISIBLE_DEVICES"):
        resolve_device("cuda:1")


def test_a_gpu_whose_kernels_cannot_be_started_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Driver:
        def get_current_target(self) -> object:
            raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver, "_active", Driver())
    with pytest.raises(ConfigError, match=r"RuntimeError: Failed to find C compiler.. It needs a C compiler \(gcc, cl"):
        resolve_device("cuda")
    monkeypatch.setattr(Driver, "get_current_target", lambda driver: "cuda:90")
    assert resolve_device("cuda").type == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="torch sees no NVIDIA GPU here"):
        resolve_device("cuda")
