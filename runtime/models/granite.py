"""Granite: Llama with four constant factors: on the embedding, on what blocks add, on scores, and under the logits.

Granite 3's mixtures: the same over experts. Granite 4 without experts and without layers that keep a state: the same,
its gates and ups in one.
"""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Experts, Family, LayerKind, LayerNames, ModelConfig
from niwaki.runtime.models.fields import Fields, number, text, whole


def _granite(raw: Fields, llama: ModelConfig) -> ModelConfig:
    return replace(
        llama,
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        attention_scale=number(raw, "attention_multiplier", 1.0),
        logit_scale=1.0 / number(raw, "logits_scaling", 1.0),
    )


def _granite_moe(raw: Fields, llama: ModelConfig) -> ModelConfig:
    """All experts of a layer stand in one tensor."""
    return replace(
        _granite(raw, llama),
        mlp_bias=False,
        experts=Experts(
            count=whole(raw, "num_local_experts", 8),
            per_token=whole(raw, "num_experts_per_tok", 2),
            width=llama.intermediate_size,
            renormalise=True,
            storage="joined",
        ),
        layers=(LayerKind(is_sparse=True),) * llama.num_layers,
        names=LayerNames(
            router="block_sparse_moe.router.layer",
            expert_gate_up=("block_sparse_moe.input_linear.weight",),
            expert_down="block_sparse_moe.output_linear.weight",
        ),
    )


def _granite4(raw: Fields, llama: ModelConfig) -> ModelConfig:
    types = raw.get("layer_types")
    if not isinstance(types, list) or len(types) != llama.num_layers or not set(types) <= ATTENTION:
        raise ModelError(f"layer_types must list attention for each of {llama.num_layers} layers, got {types!r}")
    if (experts := raw.get("num_local_experts", 8)) != 0:
        raise ModelError(f"num_local_experts must be 0 in Granite 4, got {experts!r}")
    is_turned = text(raw, "position_embedding_type", "nope") == "rope"
    return replace(
        _granite(raw, llama),
        intermediate_size=whole(raw, "shared_intermediate_size", 1024),
        mlp_bias=False,
        layers=(LayerKind(rope="main" if is_turned else "none"),) * llama.num_layers,
        names=LayerNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
    )


ATTENTION = {"attention", "full_attention"}
GRANITE = Family(_granite)
GRANITE_MOE = Family(_granite_moe)
GRANITE4 = Family(_granite4)
