"""What a model folder must hold, and the one line that says what is wrong with it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from niwaki.kernels.rope import LinearScaling, Llama3Scaling
from niwaki.runtime.api import ConfigError, ModelError, SamplingOptions
from niwaki.runtime.checkpoint.loader import Checkpoint, read_model_folder
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.models.config import ModelConfig, parse_config
from niwaki.runtime.models.weights import expected_tensors

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 3,
}
LLAMA3 = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_tensors(config).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(parse_config(CONFIG)), tmp_path / "model.safetensors")
    return tmp_path


def rewrite(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def shard(folder: Path, count: int = 2) -> dict[str, str]:
    """Replace model.safetensors by `count` files and an index. Returns the weight map."""
    tensors = weights(parse_config(CONFIG))
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {name: names[i % count] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name, place in weight_map.items() if place == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def load(folder: Path) -> Runner:
    return Runner.load(folder, num_pages=4)


def logits(runner: Runner) -> torch.Tensor:
    return runner.forward([Row(np.arange(9, dtype=np.int32), 0, [2], 9)])


def message(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---------------------------------------------------------------------------------------------------------------
# Folders that load
# ---------------------------------------------------------------------------------------------------------------


def test_shards_load_like_one_file(folder: Path) -> None:
    whole = logits(load(folder))
    shard(folder, 3)
    assert torch.equal(logits(load(folder)), whole)


def test_a_tensor_is_read_bit_for_bit(folder: Path) -> None:
    config = parse_config(CONFIG)
    checkpoint = Checkpoint(folder, expected_tensors(config))
    for name, tensor in weights(config).items():
        assert torch.equal(checkpoint.read(name), tensor)


def test_on_the_way_to_a_gpu_each_file_is_opened_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = set(shard(folder).values())
    opened: list[str] = []

    def opening(file: Path, framework: str, device: str) -> object:
        opened.append(f"{file.name} for {device}")
        return safe_open(file, framework=framework, device="cpu")

    monkeypatch.setattr("niwaki.runtime.checkpoint.loader.safe_open", opening)
    config = read_model_folder(folder).config
    there = Checkpoint(folder, expected_tensors(config), device=torch.device("cuda"))
    here = Checkpoint(folder, expected_tensors(config))
    for name in expected_tensors(config):
        assert torch.equal(there.read(name), here.read(name)), name
    assert sorted(opened) == sorted(f"{name} for cuda" for name in files)


def test_a_tied_checkpoint_may_keep_its_head_and_old_ones_their_frequencies(folder: Path) -> None:
    rewrite(folder, tie_word_embeddings=True)
    tensors = weights(parse_config(CONFIG)) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    tied = logits(load(folder))
    rewrite(folder, tie_word_embeddings=False)
    del tensors["model.layers.0.self_attn.rotary_emb.inv_freq"]
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(load(folder)), tied)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_other_stored_dtypes_are_converted_exactly(folder: Path, stored: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in weights(parse_config(CONFIG)).items()}
    save_file({name: tensor.float() for name, tensor in tensors.items()}, folder / "model.safetensors")
    exact = logits(load(folder))
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(load(folder)), exact)


def test_dtype_auto_is_the_checkpoints_own_and_float16_widens() -> None:
    named = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
    for spelling in ("dtype", "torch_dtype"):
        for stored, used in named.items():
            raw = {k: v for k, v in CONFIG.items() if k != "torch_dtype"} | {spelling: stored}
            assert parse_config(raw).dtype == used


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10_000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 32)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            Llama3Scaling(8.0, 1.0, 4.0, 32),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10_000.0, LinearScaling(2.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        ({"rope_scaling": None, "rope_theta": 9.0}, 9.0, None),
    ],
)
def test_both_spellings_of_rope_are_read(changes: dict[str, object], theta: float, scaling: object) -> None:
    config = parse_config({**CONFIG, **changes})
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_generation_config_gives_defaults_and_end_tokens(folder: Path) -> None:
    assert read_model_folder(folder).config.eos_ids == (3,)
    assert read_model_folder(folder).generation_defaults == SamplingOptions()
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 0, "max_length": 99})
    )
    contents = read_model_folder(folder)
    assert contents.config.eos_ids == (5, 7)
    assert contents.generation_defaults == SamplingOptions(temperature=0.6, top_p=0.9, top_k=-1)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    contents = read_model_folder(folder)
    assert contents.config.eos_ids == (3,)
    assert contents.generation_defaults.temperature == 0.0


def test_bytes_of_keys_and_values_are_those_of_the_pool() -> None:
    config = parse_config(CONFIG)
    assert config.kv_bytes_per_token() == config.kv_bytes_per_token("float32") == 2 * 2 * 2 * 4 * 4
    assert config.kv_bytes_per_token("bfloat16") == 2 * 2 * 2 * 4 * 2


# ---------------------------------------------------------------------------------------------------------------
# Folders that do not
# ---------------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "nowhere does not exist" in message(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "file is a file, not a folder" in message(tmp_path / "file")
    assert "config.json is missing" in message(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff{}", "is not valid JSON"),
        (b"[1]", "must hold a JSON object, got list"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"", "is not valid JSON"),
    ],
)
def test_bad_json_is_told_with_its_file(folder: Path, text: bytes, said: str) -> None:
    for name in ("generation_config.json", "config.json"):
        (folder / name).write_bytes(text)
        assert f"{name} {said}" in message(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported: LlamaForCausalLM, "),
        ({"architectures": None}, "none (model_type 'llama') is not supported"),
        ({"hidden_size": "16"}, "hidden_size must be a whole number of at least 1, got '16'"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, got 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be shared by 3"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "no multiple of 3"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu, gelu_pytorch_tanh"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
            "rope type 'dynamic' is not supported; supported: default, linear, llama3, longrope, yarn",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "short_factor must be a list of 2 numbers",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.3}}, "turns 1 of 4 channels"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor 1.0 must be above",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1",
        ),
        ({"rope_theta": float("nan")}, "rope_theta must be a number above 0"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization 'bitsandbytes' is not supported; supported: awq, compressed-tensors, fp8, gptq, mxfp4",
        ),
        ({"torch_dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be a token id or a list"),
        ({"eos_token_id": 40}, "eos_token_id 40 is outside the vocabulary of 40"),
    ],
)
def test_an_impossible_config_is_refused_by_field(folder: Path, changes: dict[str, object], said: str) -> None:
    rewrite(folder, **changes)
    text = message(folder)
    assert said in text
    assert str(folder) in text


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_p": 2}, "top_p must be a number from 0.0 to 1.0"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"eos_token_id": -1}, "eos_token_id must be a token id"),
    ],
)
def test_impossible_generation_defaults_are_refused(folder: Path, raw: dict[str, object], said: str) -> None:
    (folder / "generation_config.json").write_text(json.dumps(raw))
    assert f"generation_config.json: {said}" in message(folder)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = weights(parse_config(CONFIG))
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NORM = "model.norm.weight"


def test_tensors_that_do_not_fit_the_config_are_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(NORM))
    assert f"lacks tensor {NORM}" in message(folder)
    change_tensors(folder, lambda tensors: tensors.update(more=torch.ones(1)))
    assert "has tensor more, which config.json does not call for" in message(folder)
    change_tensors(folder, lambda tensors: tensors.update({NORM: torch.ones(15)}))
    assert f"tensor {NORM} has the shape [15], config.json calls for [16]" in message(folder)
    change_tensors(folder, lambda tensors: tensors.update({NORM: torch.ones(16, dtype=torch.int8)}))
    assert f"{NORM} has the dtype I8; supported: F32, BF16, F16" in message(folder)
    change_tensors(folder, lambda tensors: tensors.clear())
    assert "lacks 21 tensors: model.embed_tokens.weight, " in message(folder)
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks tensor lm_head.weight" in message(folder)


def test_biases_are_called_for_by_the_config(folder: Path) -> None:
    rewrite(folder, attention_bias=True)
    assert "lacks 8 tensors: model.layers.0.self_attn.q_proj.bias" in message(folder)
    rewrite(folder, mlp_bias=True)
    assert "lacks 6 tensors: model.layers.0.mlp.gate_proj.bias" in message(folder)


def test_a_truncated_file_is_refused_at_every_length(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 7, 8, 9, 500, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert "model.safetensors" in message(folder)
    file.write_bytes(whole + b"\0")
    assert "the download may be incomplete" in message(folder)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "takes 8 bytes, its offsets say 0 to 4"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}}, "entry of a is malformed"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "starts at byte"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "its offsets say -8 to 0"),
        ({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, "the download may be incomplete"),
        ({"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, "has the dtype F64"),
        ({"a": []}, "entry of a is malformed"),
        (
            {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"},
            "tensor b starts at byte",  # two tensors in one place
        ),
    ],
)
def test_a_lying_header_is_refused_before_anything_is_read(folder: Path, header: object, said: str) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    assert said in message(folder)


def test_a_header_size_beyond_the_file_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert "is cut short" in message(folder)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"no")
    assert "is not valid JSON" in message(folder)


def test_a_folder_without_safetensors_says_what_to_do(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in message(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "convert it to safetensors" in message(folder)


def test_an_index_that_does_not_fit_its_files_is_refused(folder: Path) -> None:
    weight_map = shard(folder)
    index = folder / "model.safetensors.index.json"

    def indexed(**changes: object) -> str:
        index.write_text(json.dumps({"weight_map": {**weight_map, **changes}}))
        return message(folder)

    second = "model-00002-of-00002.safetensors"
    assert f"{second} lacks the tensor ghost" in indexed(ghost=second)
    assert "which is no safetensors file of this folder" in indexed(ghost="../model.safetensors")
    assert "which is no safetensors file of this folder" in indexed(ghost="/etc/passwd")
    assert "which is no safetensors file of this folder" in indexed(ghost=7)
    assert "other.safetensors, named by model.safetensors.index.json, is missing" in indexed(ghost="other.safetensors")
    save_file({NORM: torch.ones(16)}, folder / "third.safetensors")
    assert f"tensor {NORM} is in both" in indexed(**{NORM: "third.safetensors"})
    index.write_text(json.dumps({"weight_map": {}}))
    assert "has no weight_map" in message(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").chmod(0)
    assert "cannot read" in message(folder)


@pytest.mark.parametrize("options", [{"dtype": "float64"}, {"device": "toaster"}, {"dtype": ""}])
def test_an_unknown_dtype_or_device_is_refused(folder: Path, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"must be auto"):
        Runner.load(folder, num_pages=4, **options)  # type: ignore[arg-type]  # device and dtype are strings
