"""Granite: Llama with four constant factors: on the embedding, on what blocks add, on scores, and under the logits.

Granite 4 without experts and without layers that keep a state: the same, its gates and ups in one.
"""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Family, LayerKind, LayerNames, ModelConfig
from niwaki.runtime.models.fields import Fields, number, text, whole


def _granite(raw: Fields, llama: ModelConfig) -> ModelConfig:
    return replace(
        llama,
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        attention_scale=number(raw, "attention_multiplier", 1.0),
        logit_scale=1.0 / number(raw, "logits_scaling", 1.0),
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
GRANITE4 = Family(_granite4)
