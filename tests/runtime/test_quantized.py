"""Checkpoints of quantised weights: each format, written here by its description, means the weights it was made of.

The packing here was compared with `pack_to_int32` of compressed-tensors 0.20, along both dimensions: the same words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from niwaki.kernels.coded import E2M1, Coded, CodedLinear
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import NumbaOps, StackedCodes
from niwaki.kernels.packed import PackedLinear
from niwaki.kernels.tiles import has_matrix_unit, has_tiles
from niwaki.runtime.api import ModelError
from niwaki.runtime.checkpoint.loader import Checkpoint, read_model_folder
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.models.config import ModelConfig
from niwaki.runtime.models.experts import FusedSparseMlp, SparseMlp
from niwaki.runtime.models.projection import Projection, Source, read_projection
from niwaki.runtime.models.weights import expected_tensors

GROUP = 32
LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GPT_OSS = {**LLAMA, "architectures": ["GptOssForCausalLM"], "hidden_size": 64, "num_local_experts": 2,
           "num_experts_per_tok": 1, "rope_scaling": None}  # fmt: skip
# All experts are taken, so that what is rounded cannot choose others.
MIXTURES: dict[str, dict[str, object]] = {
    "qwen3": {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 4,
              "moe_intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 4},
}  # fmt: skip

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]  # the parts, by suffix, and the weight that they mean


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers from 0 on, the first in the lowest bits of each int32."""
    per_word = 32 // bits
    rows = numbers.long().view(len(numbers), -1, per_word)
    words = sum(rows[..., place] << (bits * place) for place in range(per_word))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.int64).bitwise_and(2**32 - 1).to(torch.uint32).view(torch.int32)


def drawn(shape: tuple[int, ...], bits: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [outputs, inputs], scales and zero points [outputs, groups]."""
    numbers = torch.randint(0, 2**bits, shape)
    scales = (torch.rand(shape[0], groups) + 0.5).half() / 16
    return numbers, scales, torch.randint(1, 2**bits, (shape[0], groups))


def gptq(shape: tuple[int, ...], bits: int, zero_offset: int, is_sorted: bool) -> Written:
    numbers, scales, zeros = drawn(shape, bits, shape[1] // GROUP)
    group_of = torch.arange(shape[1]) // GROUP
    parts: Tensors = {}
    if is_sorted:
        group_of = parts["g_idx"] = group_of[torch.randperm(shape[1])].int()
    parts |= {
        "qweight": packed(numbers, bits).t().contiguous(),
        "qzeros": packed((zeros - zero_offset).t(), bits),
        "scales": scales.t().contiguous(),
    }
    return parts, (numbers - zeros[:, group_of]) * scales[:, group_of].float()


def awq(shape: tuple[int, ...]) -> Written:
    numbers, scales, zeros = drawn(shape, 4, shape[1] // GROUP)

    def words(columns: torch.Tensor) -> torch.Tensor:
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        return packed(columns.view(len(columns), -1, 8)[..., order].flatten(1), 4)

    parts = {"qweight": words(numbers.t()), "qzeros": words(zeros.t()), "scales": scales.t().contiguous()}
    return parts, (numbers - by_group(zeros)) * by_group(scales.float())


def by_group(values: torch.Tensor) -> torch.Tensor:
    return values.repeat_interleave(GROUP, 1)


def pack_quantized(shape: tuple[int, ...], bits: int, has_zeros: bool) -> Written:
    numbers, scales, zeros = drawn(shape, bits, shape[1] // GROUP)
    parts = {"weight_packed": packed(numbers, bits), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
    if has_zeros:
        parts["weight_zero_point"] = packed(zeros.t().contiguous(), bits).t().contiguous()
    else:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    return parts, (numbers - by_group(zeros)) * by_group(scales.float())


def per_channel(shape: tuple[int, ...], dtype: torch.dtype) -> Written:
    weight = (torch.randn(shape) * 40).clamp(-120, 120).to(dtype)
    scale = (torch.rand(shape[0], 1) + 0.5).bfloat16() / 64
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale.float()


def blocks(shape: tuple[int, ...]) -> Written:
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 20), -(-shape[1] // 28)) + 0.5  # neither side is a multiple
    spread = scale.repeat_interleave(20, 0)[: shape[0]].repeat_interleave(28, 1)[:, : shape[1]]
    return {"weight": weight, "weight_scale_inv": scale}, weight.float() * spread


def one_scale(shape: tuple[int, ...]) -> Written:
    weight, scale = torch.randn(shape).to(torch.float8_e4m3fn), (torch.rand(()) + 0.5) / 16
    parts = {"weight": weight, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.3)}
    return parts, weight.float() * scale


def mxfp4(shape: tuple[int, ...]) -> Written:
    experts, inputs, outputs = shape
    numbers = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), dtype=torch.uint8)
    scales = torch.randint(118, 129, (experts, outputs, inputs // 32), dtype=torch.uint8)
    stored = numbers[..., ::2] | numbers[..., 1::2] << 4
    values = torch.tensor(E2M1)[numbers.long()] * 2.0 ** (scales[..., None].float() - 127)
    return {"_blocks": stored, "_scales": scales}, values.flatten(2).transpose(1, 2)


def compressed(form: str, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GROUPED = {"strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[tuple[int, ...]], Written], dict[str, object]]] = {
    "gptq": (lambda shape: gptq(shape, 4, 1, False), {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq-8-sorted": (
        lambda shape: gptq(shape, 8, 1, True),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True},
    ),
    "gptq-v2": (
        lambda shape: gptq(shape, 4, 0, True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "int4": (lambda shape: pack_quantized(shape, 4, False), compressed("pack-quantized", num_bits=4, **GROUPED)),
    "int4-zeros": (lambda shape: pack_quantized(shape, 4, True), compressed("pack-quantized", num_bits=4, **GROUPED)),
    "int8-grouped": (
        lambda shape: pack_quantized(shape, 8, False),
        compressed("pack-quantized", num_bits=8, **GROUPED),
    ),
    "int8": (
        lambda shape: per_channel(shape, torch.int8),
        compressed("int-quantized", num_bits=8, strategy="channel"),
    ),
    "fp8": (
        lambda shape: per_channel(shape, torch.float8_e4m3fn),
        compressed("float-quantized", num_bits=8, strategy="channel"),
    ),
    "fp8-blocks": (blocks, {"quant_method": "fp8", "weight_block_size": [20, 28]}),
    "fp8-whole": (one_scale, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
}


# In which products keep them; None: groups that do not follow one another are put together.
KEPT = {
    "gptq": 4,
    "gptq-8-sorted": None,
    "gptq-v2": None,
    "awq": 4,
    "int4": 4,
    "int4-zeros": 4,
    "int8-grouped": 8,
    "int8": 8,
    "fp8": 8,
    "fp8-whole": 8,
    "fp8-blocks": None,  # blocks of 28 inputs
}


def make(folder: Path, name: str, model: dict[str, object] | None = None) -> tuple[ModelConfig, Tensors]:
    """A folder in this format; the weights that it means."""
    torch.manual_seed(0)
    write, quantization = FORMATS[name]
    base = model or (GPT_OSS if name == "mxfp4" else LLAMA)
    (folder / "config.json").write_text(json.dumps({**base, "quantization_config": quantization}))
    config = read_model_folder(folder).config
    stored: Tensors = {}
    meant: Tensors = {}
    for tensor, shape in expected_tensors(config).items():
        is_product = "_proj.weight" in tensor or ".experts." in tensor
        is_quantized = "experts" in tensor and len(shape) == 3 if name == "mxfp4" else is_product
        if is_quantized:
            parts, meant[tensor] = write(shape)
            stored |= {tensor.removesuffix("weight") + suffix: part for suffix, part in parts.items()}
        else:
            stored[tensor] = meant[tensor] = torch.randn(shape) * (0.1 if tensor.endswith(".gate.weight") else 1.0)
    save_file({key: part.contiguous() for key, part in stored.items()}, folder / "model.safetensors")
    return config, meant


def opened(folder: Path, config: ModelConfig) -> Checkpoint:
    return Checkpoint(folder, expected_tensors(config), quantization=config.quantization)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_means_the_weights_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    config, meant = make(tmp_path, name)
    checkpoint = opened(tmp_path, config)
    for tensor, weight in meant.items():
        assert torch.equal(checkpoint.read(tensor), weight.float()), tensor


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_is_computed_as_it_is_stored(name: str, tmp_path: Path) -> None:
    check_computed(tmp_path, *make(tmp_path, name))


def check_computed(folder: Path, config: ModelConfig, meant: Tensors) -> None:
    """In float32 as the weights that it means; in bfloat16 about as near to that as these are, rounded to bfloat16."""
    for count in (9, 1):
        rows = [Row(np.arange(count, dtype=np.int32), 0, [0], count)]
        exact = Runner(config, meant.__getitem__, dtype="float32", num_pages=2).forward(rows)
        assert error_of(Runner.load(folder, dtype="float32", num_pages=2).forward(rows), exact) < 1e-4
        rounded = Runner(config, meant.__getitem__, dtype="bfloat16", num_pages=2).forward(rows)
        kept = Runner.load(folder, dtype="bfloat16", num_pages=2).forward(rows)
        assert error_of(kept, exact) < 1.3 * error_of(rounded, exact)


@pytest.mark.parametrize("model", MIXTURES)
@pytest.mark.parametrize("name", KEPT)
def test_experts_in_codes_are_computed_as_they_are_stored(name: str, model: str, tmp_path: Path) -> None:
    check_computed(tmp_path, *make(tmp_path, name, MIXTURES[model]))


@pytest.mark.parametrize(("name", "model"), [("awq", "qwen3"), ("fp8-blocks", "mixtral")])
def test_on_a_gpu_experts_in_codes_are_put_together_as_they_are_read(name: str, model: str, tmp_path: Path) -> None:
    pytest.importorskip("tests.kernels.triton_setup")
    from niwaki.kernels.triton.ops import TritonOps

    config, meant = make(tmp_path, name, MIXTURES[model])
    rows = [Row(np.arange(3, dtype=np.int32), 0, [0], 3)]
    exact = Runner(config, meant.__getitem__, dtype="float32", num_pages=2).forward(rows)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fused = Runner.load(tmp_path, device=device, dtype="float32", num_pages=2, ops=TritonOps()).forward(rows)
    assert error_of(fused.cpu(), exact) < 1e-3


@pytest.mark.parametrize(("name", "model"), [("awq", "qwen3"), ("int8", "mixtral"), ("int8-grouped", "qwen3")])
def test_on_a_gpu_experts_stay_in_codes(name: str, model: str, tmp_path: Path) -> None:
    pytest.importorskip("tests.kernels.triton_setup")
    from niwaki.kernels.triton.ops import TritonOps

    config, meant = make(tmp_path, name, MIXTURES[model])
    rows = [Row(np.arange(3, dtype=np.int32), 0, [0], 3)]
    exact, rounded = (
        Runner(config, meant.__getitem__, dtype=dtype, num_pages=2).forward(rows) for dtype in ("float32", "bfloat16")
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runner = Runner.load(tmp_path, device=device, dtype="bfloat16", num_pages=2, ops=TritonOps())
    mlp = runner._model._layers[0].mlp
    assert isinstance(mlp, FusedSparseMlp)
    assert isinstance(mlp.gate_up.weight, StackedCodes)
    assert isinstance(mlp.down.weight, StackedCodes)
    # Triton's interpreter cuts off where a GPU rounds.
    assert error_of(runner.forward(rows).cpu(), exact) < 2 * error_of(rounded, exact)


def test_on_a_gpu_experts_in_mxfp4_stay_so(tmp_path: Path) -> None:
    pytest.importorskip("tests.kernels.triton_setup")
    from niwaki.kernels.triton.ops import TritonOps

    config, meant = make(tmp_path, "mxfp4")
    rows = [Row(np.arange(3, dtype=np.int32), 0, [0], 3)]
    exact, rounded = (
        Runner(config, meant.__getitem__, dtype=dtype, num_pages=2).forward(rows) for dtype in ("float32", "bfloat16")
    )
    told = opened(tmp_path, config).code_bytes()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runner = Runner.load(tmp_path, device=device, dtype="bfloat16", num_pages=2, ops=TritonOps())
    mlp = runner._model._layers[0].mlp
    assert isinstance(mlp, FusedSparseMlp)
    for name, product in (("gate_up_proj", mlp.gate_up), ("down_proj", mlp.down)):
        kept = product.weight
        assert isinstance(kept, StackedCodes)
        whole = meant[f"model.layers.0.mlp.experts.{name}"].numel()
        assert kept.codes.nbytes + kept.scales.nbytes == whole // 2 + whole // 32
        assert told[f"model.layers.0.mlp.experts.{name}"] == whole // 2 + whole // 32
    # Triton's interpreter cuts off where a GPU rounds.
    assert error_of(runner.forward(rows).cpu(), exact) < 2 * error_of(rounded, exact)


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no bfloat16 tiles")
def test_experts_in_mxfp4_stay_so_in_memory(tmp_path: Path) -> None:
    _, meant = make(tmp_path, "mxfp4")
    mlp = Runner.load(tmp_path, dtype="bfloat16", num_pages=2)._model._layers[0].mlp
    assert isinstance(mlp, SparseMlp)
    for name in ("gate_up", "down"):
        products = [getattr(expert, name) for expert in mlp.experts]
        assert all(isinstance(product, CodedLinear) for product in products)
        numbers = meant[f"model.layers.0.mlp.experts.{name}_proj"].numel()
        assert sum(product.codes.nbytes + product.zeros.nbytes for product in products) == numbers // 2 + numbers // 32


@pytest.mark.parametrize(("name", "bits"), KEPT.items())
@pytest.mark.parametrize("names", [("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)], ids=len)
def test_the_kernels_of_gpus_multiply_by_what_codes_mean(
    names: tuple[str, ...], name: str, bits: int | None, tmp_path: Path
) -> None:
    pytest.importorskip("tests.kernels.triton_setup")
    from niwaki.kernels.triton.coded import CodedProduct, E4m3Product
    from niwaki.kernels.triton.ops import TritonOps

    config, meant = make(tmp_path, name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = Checkpoint(tmp_path, expected_tensors(config), device=device, quantization=config.quantization)
    read = Source(checkpoint.weight, device, torch.bfloat16)
    made = read_projection(TritonOps(), read, "model.layers.0.", names, False)
    assert isinstance(made, CodedProduct | E4m3Product) == (bits is not None)
    is_e4m3 = name in ("fp8", "fp8-whole")
    assert isinstance(made, E4m3Product) == is_e4m3
    weight = torch.cat([meant[f"model.layers.0.{each}.weight"] for each in names]).float().to(device)
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    out = x.new_empty(5, len(weight))
    made.forward(Operand.of(x), Operand.of(out))
    expected = x.float() @ weight.t()
    # Triton's interpreter cuts off where a GPU rounds; where weights are e4m3 by output, so are rows.
    assert (out - expected).norm() < (0.1 if is_e4m3 else 0.01) * expected.norm()


@pytest.mark.parametrize(("name", "bits"), KEPT.items())
def test_what_codes_take_is_known_before_they_are_read(name: str, bits: int | None, tmp_path: Path) -> None:
    pytest.importorskip("tests.kernels.triton_setup")
    from niwaki.kernels.triton.coded import coded_product

    config, meant = make(tmp_path, name)
    checkpoint = opened(tmp_path, config)
    told = checkpoint.code_bytes()
    assert set(told) == (set() if bits is None else {tensor for tensor in meant if "_proj.weight" in tensor})
    for tensor, most in told.items():
        weight = checkpoint.weight(tensor)
        assert isinstance(weight, Coded)
        product = coded_product(weight, None)
        parts = [getattr(product, part, None) for part in ("codes", "scales", "zeros")]
        taken = sum(part.nbytes for part in parts if part is not None)
        # What is not there of the most: zero points, and for rows in e4m3 what other codes are filled up with.
        assert taken <= most <= taken * (2.1 if name in ("fp8", "fp8-whole") else 1.2)


def error_of(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).square().mean().sqrt())


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no bfloat16 tiles")
@pytest.mark.parametrize(("name", "bits"), KEPT.items())
def test_codes_stay_codes_in_memory(name: str, bits: int | None, tmp_path: Path) -> None:
    config, meant = make(tmp_path, name)
    read = Source(opened(tmp_path, config).weight, torch.device("cpu"), torch.bfloat16)
    names = ("gate_proj", "up_proj")
    made = read_projection(NumbaOps(), read, "model.layers.0.mlp.", names, False)
    if bits is None:
        assert isinstance(made, PackedLinear if has_matrix_unit() else Projection)
        return
    assert isinstance(made, CodedLinear)
    weights = sum(meant[f"model.layers.0.mlp.{name}.weight"].numel() for name in names)
    assert made.codes.nbytes == weights * bits // 8


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ("int8", "quantization 'int8' is not supported; supported: awq, compressed-tensors, fp8, gptq, mxfp4"),
        ({"quant_method": "gptq", "bits": 3}, "bits must be 4 or 8, got 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "bits": 8}, "bits must be 4, got 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ version 'gemv' is not supported"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "AWQ without zero points is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size must be two whole numbers above 0"),
        ({"quant_method": "compressed-tensors"}, "one of config_groups is supported, got None"),
        (compressed("nvfp4-pack-quantized", num_bits=4), "format 'nvfp4-pack-quantized' is not supported; supported:"),
        (compressed("pack-quantized", num_bits=3), "num_bits must be 4 or 8, got 3"),
        (compressed("int-quantized", num_bits=8, strategy="token"), "strategy 'token' is not supported; supported:"),
    ],
)
def test_an_unsupported_quantisation_is_refused_by_name(quantization: object, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantization}))
    with pytest.raises(ModelError) as caught:
        read_model_folder(tmp_path)
    assert said in str(caught.value)


K_PROJ = "model.layers.0.self_attn.k_proj."


@pytest.mark.parametrize(
    ("name", "part", "content", "said"),
    [
        ("gptq", "qweight", torch.zeros(12, 32), "packed weights must be stored as I32, got torch.float32"),
        ("gptq", "scales", torch.zeros(2, 32), r"scales has the shape \[2, 32\], config.json calls for \[3, 32\]"),
        ("gptq-v2", "g_idx", torch.full((96,), 3, dtype=torch.int32), "g_idx names a group beyond the 3"),
        ("int4", "weight_scale", torch.zeros(32, 2), r"scales of \[32, 2\] for a weight of \[32, 96\], expected"),
        ("fp8", "weight", torch.zeros(32, 96), "must be stored as I8 or F8_E4M3, got torch.float32"),
        ("fp8", "weight_scale", None, "has the dtype F8_E4M3; supported: F32, BF16, F16"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    name: str, part: str, content: torch.Tensor | None, said: str, tmp_path: Path
) -> None:
    config, _ = make(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[K_PROJ + part]
    if content is not None:
        tensors[K_PROJ + part] = content
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=said) as caught:
        opened(tmp_path, config).read(K_PROJ + "weight")
    assert K_PROJ in str(caught.value)
