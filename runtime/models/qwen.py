"""Qwen 2 and 2.5: biased queries, keys and values. Qwen 3: no bias, and a norm on each head of queries and keys.

Both have variants with experts, variants that also see, of which the text model is read, and windows that no published
checkpoint turns on.
"""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.models.config import Experts, Family, LayerNames, ModelConfig, with_windows
from niwaki.runtime.models.fields import Fields, flag, layer_indices, whole
from niwaki.runtime.models.positions import read_windows


def _qwen2(raw: Fields, llama: ModelConfig) -> ModelConfig:
    return replace(_windowed(raw, llama), attention_bias=False, mlp_bias=False, qkv_bias=flag(raw, "qkv_bias", True))


def _qwen3(raw: Fields, llama: ModelConfig) -> ModelConfig:
    return replace(_windowed(raw, llama), mlp_bias=False, qk_norm="head")


def _qwen2_moe(raw: Fields, llama: ModelConfig) -> ModelConfig:
    shared = whole(raw, "shared_expert_intermediate_size", 5632)
    return _sparse(raw, _qwen2(raw, llama), whole(raw, "num_experts", 60), shared)


def _qwen3_moe(raw: Fields, llama: ModelConfig) -> ModelConfig:
    return _sparse(raw, _qwen3(raw, llama), _count(raw, 128), None)


def _qwen3_vl_moe(raw: Fields, llama: ModelConfig) -> ModelConfig:
    """Experts stand in one tensor of all, and what they weigh sums to 1 whatever the file says."""
    mixture = _sparse({**raw, "norm_topk_prob": True}, _qwen3(raw, llama), _count(raw, 60), None)
    assert mixture.experts is not None, "just put in"
    names = LayerNames(expert_gate_up=("mlp.experts.gate_up_proj",), expert_down="mlp.experts.down_proj")
    return replace(mixture, experts=replace(mixture.experts, storage="stacked"), names=names)


def _count(raw: Fields, default: int) -> int:
    """transformers 5 writes num_local_experts, its forerunners num_experts."""
    return whole(raw, "num_experts", whole(raw, "num_local_experts", default))


def _nested(raw: Fields) -> Fields:
    """Published files of Qwen 2 and 2.5 VL have the fields of their text model beside those of the whole."""
    return raw if "text_config" in raw else {**raw, "text_config": {}}


def _windowed(raw: Fields, llama: ModelConfig) -> ModelConfig:
    if not flag(raw, "use_sliding_window"):
        return llama
    from_layer = raw.get("max_window_layers", 28)
    first = from_layer if isinstance(from_layer, int) else llama.num_layers
    return with_windows(llama, read_windows(raw, llama.num_layers, slides=lambda index: index >= first))


def _sparse(raw: Fields, dense: ModelConfig, count: int, shared_width: int | None) -> ModelConfig:
    step, excepted = whole(raw, "decoder_sparse_step", 1), layer_indices(raw, "mlp_only_layers")
    return replace(
        dense,
        experts=Experts(
            count=count,
            per_token=whole(raw, "num_experts_per_tok"),
            width=whole(raw, "moe_intermediate_size"),
            renormalise=flag(raw, "norm_topk_prob"),
            shared_width=shared_width,
        ),
        layers=tuple(
            replace(kind, is_sparse=index not in excepted and (index + 1) % step == 0)
            for index, kind in enumerate(dense.layer_kinds)
        ),
    )


QWEN2 = Family(_qwen2, {"sliding_window": 4096})
QWEN3 = Family(_qwen3, {"head_dim": 128, "sliding_window": 4096})
QWEN2_MOE = Family(_qwen2_moe, {"sliding_window": 4096, "num_experts_per_tok": 4, "moe_intermediate_size": 1408})
QWEN3_MOE = Family(_qwen3_moe, {"sliding_window": 4096, "num_experts_per_tok": 8, "moe_intermediate_size": 768})
QWEN2_VL_DEFAULTS: dict[str, object] = {
    **QWEN2.defaults,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
QWEN2_VL = Family(_qwen2, QWEN2_VL_DEFAULTS, translate=_nested, text_types=("qwen2_vl_text",), text_prefix="")
QWEN2_5_VL = Family(_qwen2, QWEN2_VL_DEFAULTS, translate=_nested, text_types=("qwen2_5_vl_text",), text_prefix="")
QWEN3_VL = Family(
    _qwen3,
    {"head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 500_000.0},
    text_types=("qwen3_vl_text",),
    text_prefix="model.language_model.",
)
QWEN3_VL_MOE = Family(
    _qwen3_vl_moe,
    {
        "max_position_embeddings": 128_000,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    text_types=("qwen3_vl_moe_text",),
    text_prefix="model.language_model.",
)
