"""Mistral: Llama with a sliding window. Ministral: on some layers. Mixtral: with experts as well.

Mistral Small 3.1 and 3.2 are a Mistral with an image encoder beside it.
"""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.models.config import Experts, Family, LayerNames, ModelConfig, with_windows
from niwaki.runtime.models.fields import Fields, whole
from niwaki.runtime.models.positions import read_windows


def _mistral(raw: Fields, llama: ModelConfig) -> ModelConfig:
    windows = read_windows(raw, llama.num_layers, slides=lambda _: True)
    return replace(with_windows(llama, windows), attention_bias=False, mlp_bias=False)


def _mixtral(raw: Fields, llama: ModelConfig) -> ModelConfig:
    mistral = _mistral(raw, llama)
    return replace(
        mistral,
        experts=Experts(
            count=whole(raw, "num_local_experts", 8),
            per_token=whole(raw, "num_experts_per_tok", 2),
            width=llama.intermediate_size,
            renormalise=True,
        ),
        layers=tuple(replace(kind, is_sparse=True) for kind in mistral.layer_kinds),
        names=LayerNames(
            router="block_sparse_moe.gate",
            expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            expert_down="block_sparse_moe.experts.{}.w2",
        ),
    )


MISTRAL = Family(_mistral, {"num_key_value_heads": 8, "sliding_window": 4096})
MINISTRAL = MISTRAL
MISTRAL_OF_VISION = Family(_mistral, {**MISTRAL.defaults, "sliding_window": None}, text_types=("mistral",))
MIXTRAL = Family(_mixtral, {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6})
