"""GPT-OSS: a sink for each head, windows on every other layer, biases throughout, and experts with a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.models.config import Experts, Family, LayerNames, ModelConfig, with_windows
from niwaki.runtime.models.fields import Fields, number, whole
from niwaki.runtime.models.positions import read_windows


def _gpt_oss(raw: Fields, llama: ModelConfig) -> ModelConfig:
    windowed = with_windows(llama, read_windows(raw, llama.num_layers, slides=lambda index: index % 2 == 0))
    return replace(
        windowed,
        mlp_bias=False,
        has_sinks=True,
        activation="clamped",
        gate_alpha=number(raw, "swiglu_alpha", 1.702),
        gate_limit=number(raw, "swiglu_limit", 7.0),
        experts=Experts(
            count=whole(raw, "num_local_experts", 128),
            per_token=whole(raw, "num_experts_per_tok", 4),
            width=llama.intermediate_size,
            renormalise=True,
            has_router_bias=True,
            has_bias=True,
            storage="interleaved",
        ),
        layers=tuple(replace(kind, is_sparse=True) for kind in windowed.layer_kinds),
        names=LayerNames(
            router="mlp.router",
            expert_gate_up=("mlp.experts.gate_up_proj",),
            expert_down="mlp.experts.down_proj",
        ),
    )


YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
GPT_OSS = Family(
    _gpt_oss,
    {
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": YARN,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
    },
)
