"""MiniMax-M2: the experts of Mixtral, scored as DeepSeek V3 does, all queries (keys) of a token normalised together,
and half of each head turned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Family, ModelConfig
from niwaki.runtime.models.fields import Fields, flag, text, whole
from niwaki.runtime.models.mistral import with_mixtral_experts


def _minimax_m2(raw: Fields, llama: ModelConfig) -> ModelConfig:
    if (kind := text(raw, "qk_norm_type", "per_layer")) != "per_layer":
        raise ModelError(f"qk_norm_type {kind!r} is not supported; supported: per_layer")
    qk_norm: Literal["whole"] | None = "whole" if flag(raw, "use_qk_norm", True) else None
    mixture = with_mixtral_experts(raw, replace(llama, attention_bias=False, mlp_bias=False, qk_norm=qk_norm))
    assert mixture.experts is not None, "just put in"
    experts = replace(mixture.experts, score="sigmoid", has_correction=True)
    names = replace(mixture.names, correction="block_sparse_moe.e_score_correction_bias")
    return replace(mixture, experts=experts, names=names)


def _translate(raw: Fields) -> Fields:
    """Published files tell how many channels of a head are turned, newer ones which part."""
    if raw.get("rotary_dim") is None:
        return raw
    return {"partial_rotary_factor": whole(raw, "rotary_dim") / whole(raw, "head_dim", 128), **raw}


MINIMAX_M2 = Family(
    _minimax_m2,
    {
        "head_dim": 128,
        "max_position_embeddings": 196_608,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "rope_theta": 5e6,
    },
    translate=_translate,
    may_turn_part=True,
)
