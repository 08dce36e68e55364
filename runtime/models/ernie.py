"""ERNIE 4.5: Llama whose channels turn with their neighbours. The mixtures: experts scored by a softmax and chosen by
that and a correction, some that all tokens share, and a layer that predicts further tokens, which is left on disk.
"""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Experts, Family, LayerNames, ModelConfig
from niwaki.runtime.models.fields import Fields, flag, whole


def _ernie(raw: Fields, llama: ModelConfig) -> ModelConfig:
    has_bias = flag(raw, "use_bias")
    return replace(llama, attention_bias=has_bias, mlp_bias=has_bias, is_rope_interleaved=True)


def _ernie_moe(raw: Fields, llama: ModelConfig) -> ModelConfig:
    if flag(raw, "use_bias"):
        raise ModelError("use_bias must be false in a mixture of ERNIE 4.5, got True")
    dense = _ernie(raw, llama)
    first, step = _layer(raw, "moe_layer_start_index", 1), whole(raw, "moe_layer_interval", 1)
    last = _layer(raw, "moe_layer_end_index", dense.num_layers - 1)
    width, num_shared = whole(raw, "moe_intermediate_size", 1536), _layer(raw, "moe_num_shared_experts", 2)
    return replace(
        dense,
        experts=Experts(
            count=whole(raw, "moe_num_experts", 64),
            per_token=whole(raw, "moe_k", 6),
            width=width,
            renormalise=True,
            shared_width=width * num_shared or None,
            is_shared_gated=False,
            has_correction=True,
            is_correction_a_row=True,
        ),
        layers=tuple(
            replace(kind, is_sparse=(index + 1) % step == 0 and first <= index <= last)
            for index, kind in enumerate(dense.layer_kinds)
        ),
        names=LayerNames(correction="mlp.moe_statics.e_score_correction_bias", shared="mlp.shared_experts"),
        ignored=(*dense.ignored, "model.mtp_"),
    )


def _layer(raw: Fields, name: str, default: int) -> int:
    """A number from 0 on; -1, which files write for the last layer, is the default."""
    value = raw.get(name)
    if value is None or value == -1:
        return default
    return 0 if value == 0 and not isinstance(value, bool) else whole(raw, name)


DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
ERNIE = Family(_ernie, {**DEFAULTS, "head_dim": 128, "num_key_value_heads": 2})
ERNIE_MOE = Family(_ernie_moe, {**DEFAULTS, "num_key_value_heads": 4})
