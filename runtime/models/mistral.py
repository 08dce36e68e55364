"""Mistral: Llama with a sliding window. Ministral: on some layers. Mixtral: with experts as well.

Mistral Small 3.1 and 3.2 are a Mistral with an image encoder beside it. Ministral 3, with or without one, has no window
and queries that grow with their position.
"""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Experts, Family, LayerNames, ModelConfig, Temperature, with_windows
from niwaki.runtime.models.fields import Fields, number, whole
from niwaki.runtime.models.positions import read_windows


def _mistral(raw: Fields, llama: ModelConfig) -> ModelConfig:
    windows = read_windows(raw, llama.num_layers, slides=lambda _: True)
    return replace(with_windows(llama, windows), attention_bias=False, mlp_bias=False)


def _ministral3(raw: Fields, llama: ModelConfig) -> ModelConfig:
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict):
        raise ModelError(f"rope_parameters must be an object in Ministral 3, got {rope!r}")
    floor = whole(rope, "original_max_position_embeddings", llama.context_length)
    temperature = Temperature(number(rope, "llama_4_scaling_beta"), floor, offset=0.0, is_everywhere=True)
    return replace(_mistral(raw, llama), temperature=temperature)


def _of_vision(raw: Fields, llama: ModelConfig) -> ModelConfig:
    return (_ministral3 if raw.get("model_type") == "ministral3" else _mistral)(raw, llama)


def _mixtral(raw: Fields, llama: ModelConfig) -> ModelConfig:
    return with_mixtral_experts(raw, _mistral(raw, llama))


def with_mixtral_experts(raw: Fields, dense: ModelConfig) -> ModelConfig:
    return replace(
        dense,
        experts=Experts(
            count=whole(raw, "num_local_experts", 8),
            per_token=whole(raw, "num_experts_per_tok", 2),
            width=dense.intermediate_size,
            renormalise=True,
        ),
        layers=tuple(replace(kind, is_sparse=True) for kind in dense.layer_kinds),
        names=LayerNames(
            router="block_sparse_moe.gate",
            expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            expert_down="block_sparse_moe.experts.{}.w2",
        ),
    )


MISTRAL = Family(_mistral, {"num_key_value_heads": 8, "sliding_window": 4096})
MINISTRAL = MISTRAL
MINISTRAL3_DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
}
MINISTRAL3 = Family(_ministral3, MINISTRAL3_DEFAULTS)
MISTRAL_OF_VISION = Family(
    _of_vision,
    {**MISTRAL.defaults, "sliding_window": None},
    text_types=("mistral", "ministral3"),
    text_defaults={"ministral3": MINISTRAL3_DEFAULTS},
)
MIXTRAL = Family(_mixtral, {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6})
