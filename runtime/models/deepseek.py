"""DeepSeek V2 and V3: multi-head latent attention (latent.py), and experts in groups of which a token takes the best.

V2 scores experts by a softmax and a group by its best expert; V3 by a sigmoid, corrected where experts are chosen, and
a group by its best two. Layers that predict further tokens, which V3 has behind the others, are left on disk.

GLM 4.7 Flash is a small V3.
"""

from __future__ import annotations

import math
from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Experts, Family, Latent, LayerNames, ModelConfig
from niwaki.runtime.models.fields import Fields, flag, number, text, whole


def _deepseek(raw: Fields, llama: ModelConfig, experts: Experts) -> ModelConfig:
    latent = Latent(
        query_rank=None if raw.get("q_lora_rank") is None else whole(raw, "q_lora_rank"),
        rank=whole(raw, "kv_lora_rank"),
        head_dim=whole(raw, "qk_nope_head_dim"),
        rotary_dim=llama.head_dim,
        value_dim=whole(raw, "v_head_dim"),
    )
    return replace(
        with_experts(raw, llama, experts),
        num_kv_heads=1,
        head_dim=latent.rank + latent.rotary_dim,
        rotary_dim=latent.rotary_dim,
        attention_scale=(latent.head_dim + latent.rotary_dim) ** -0.5 * _magnitude(raw) ** 2,
        is_rope_interleaved=flag(raw, "rope_interleave", True),
        latent=latent,
    )


def with_experts(raw: Fields, config: ModelConfig, experts: Experts) -> ModelConfig:
    """The config with experts behind its first layers; what predicts further tokens stays on disk."""
    kinds = zip(config.layer_kinds, _sparse_layers(raw, config.num_layers), strict=True)
    return replace(
        config,
        experts=experts,
        layers=tuple(replace(kind, is_sparse=is_sparse) for kind, is_sparse in kinds),
        names=LayerNames(shared="mlp.shared_experts"),
        ignored=(*config.ignored, *_predicting_layers(raw, config.num_layers)),
    )


def _sparse_layers(raw: Fields, count: int) -> tuple[bool, ...]:
    types = raw.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != count or not set(types) <= {"dense", "sparse"}:
            raise ModelError(f"mlp_layer_types must list dense or sparse for {count} layers, got {types!r}")
        return tuple(one == "sparse" for one in types)
    first = raw.get("first_k_dense_replace")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ModelError(f"first_k_dense_replace must be a whole number of layers, got {first!r}")
    return tuple(index >= first for index in range(count))


def _deepseek_v2(raw: Fields, llama: ModelConfig) -> ModelConfig:
    method = text(raw, "topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"topk_method {method!r} is not supported; supported: greedy, group_limited_greedy")
    if flag(raw, "norm_topk_prob"):
        raise ModelError("norm_topk_prob must be false in DeepSeek-V2, got True")
    is_grouped = method == "group_limited_greedy"
    return _deepseek(
        raw,
        llama,
        replace(
            _experts(raw),
            groups=whole(raw, "n_group") if is_grouped else 1,
            groups_per_token=whole(raw, "topk_group") if is_grouped else 1,
        ),
    )


def _deepseek_v3(raw: Fields, llama: ModelConfig) -> ModelConfig:
    return _deepseek(raw, replace(llama, mlp_bias=False), corrected_experts(raw))


def corrected_experts(raw: Fields) -> Experts:
    """Scored by a sigmoid, and chosen by that and a correction."""
    return replace(
        _experts(raw),
        score="sigmoid",
        has_correction=True,
        renormalise=flag(raw, "norm_topk_prob", True),
        groups=whole(raw, "n_group"),
        groups_per_token=whole(raw, "topk_group"),
        group_best=2,
    )


def _experts(raw: Fields) -> Experts:
    width = whole(raw, "moe_intermediate_size")
    return Experts(
        count=whole(raw, "n_routed_experts"),
        per_token=whole(raw, "num_experts_per_tok"),
        width=width,
        renormalise=False,
        shared_width=width * whole(raw, "n_shared_experts"),
        is_shared_gated=False,
        scale=number(raw, "routed_scaling_factor"),
    )


def _magnitude(raw: Fields) -> float:
    """Of queries and keys each, where the context is stretched (YaRN, arXiv 2309.00071, section 3.4)."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    assert isinstance(found, dict), "read_ropes has looked at it"
    if text(found, "rope_type", text(found, "type", "default")) == "default" or not found.get("mscale_all_dim"):
        return 1.0
    return 0.1 * number(found, "mscale_all_dim") * math.log(max(number(found, "factor"), 1.0)) + 1.0


def _predicting_layers(raw: Fields, num_layers: int) -> tuple[str, ...]:
    count = raw.get("num_nextn_predict_layers")
    return tuple(f"model.layers.{num_layers + index}." for index in range(count if isinstance(count, int) else 0))


V2_DEFAULTS: dict[str, object] = {
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "v_head_dim": 128,
}
V3_DEFAULTS: dict[str, object] = {
    **V2_DEFAULTS,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK_V2 = Family(_deepseek_v2, V2_DEFAULTS, head_dim="qk_rope_head_dim")
DEEPSEEK_V3 = Family(_deepseek_v3, V3_DEFAULTS, head_dim="qk_rope_head_dim")
GLM4_MOE_LITE = Family(
    _deepseek_v3,
    {
        **V3_DEFAULTS,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 202_752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
    },
    head_dim="qk_rope_head_dim",
)
