"""Seed-OSS: Llama with biased queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Family, ModelConfig
from niwaki.runtime.models.fields import Fields, flag


def _seed_oss(raw: Fields, llama: ModelConfig) -> ModelConfig:
    has_bias, has_out_bias = llama.attention_bias, flag(raw, "attention_out_bias")
    if has_out_bias and not has_bias:
        raise ModelError("attention_out_bias must be false where attention_bias is, got True")
    return replace(llama, qkv_bias=has_bias, attention_bias=has_out_bias)


SEED_OSS = Family(
    _seed_oss,
    {"attention_bias": True, "head_dim": 128, "max_position_embeddings": 524_288, "num_key_value_heads": 8},
)
