"""Llama 4, of those that also see the text model: most layers turn queries and keys and see chunks of the context; the
others see all of it, without positions, with queries that grow with theirs. Experts, one of which all tokens take."""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Experts, Family, LayerKind, LayerNames, ModelConfig, Temperature
from niwaki.runtime.models.fields import Fields, flag, layer_indices, number, whole

NAMES = LayerNames(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert_gate_up=("feed_forward.experts.gate_up_proj",),
    expert_down="feed_forward.experts.down_proj",
    shared="feed_forward.shared_expert",
)


def _llama4(raw: Fields, llama: ModelConfig) -> ModelConfig:
    width = llama.intermediate_size
    return replace(
        llama,
        intermediate_size=whole(raw, "intermediate_size_mlp", 16_384),
        mlp_bias=False,
        is_rope_interleaved=True,
        qk_norm="bare" if flag(raw, "use_qk_norm", True) else None,
        temperature=_temperature(raw),
        experts=Experts(
            count=whole(raw, "num_local_experts", 16),
            per_token=whole(raw, "num_experts_per_tok", 1),
            width=width,
            renormalise=False,
            shared_width=width,
            is_shared_gated=False,
            score="sigmoid",
            weighs_input=True,
            storage="stacked",
        ),
        layers=_layers(raw, llama.num_layers),
        names=NAMES,
    )


def _temperature(raw: Fields) -> Temperature | None:
    if not flag(raw, "attn_temperature_tuning", True):
        return None
    return Temperature(number(raw, "attn_scale", 0.1), number(raw, "floor_scale", 8192))


def _layers(raw: Fields, count: int) -> tuple[LayerKind, ...]:
    turned = raw.get("no_rope_layers") or [
        int((index + 1) % whole(raw, "no_rope_layer_interval", 4) != 0) for index in range(count)
    ]  # 1: the layer does turn
    if not isinstance(turned, list) or len(turned) < count or not set(turned) <= {0, 1}:
        raise ModelError(f"no_rope_layers must list 0 or 1 for each of {count} layers, got {turned!r}")
    types = raw.get("layer_types")
    if types is None:
        types = ["chunked_attention" if turns else "full_attention" for turns in turned[:count]]
    if not isinstance(types, list) or len(types) != count or not set(types) <= {"chunked_attention", "full_attention"}:
        raise ModelError(f"layer_types must list chunked_attention or full_attention for {count} layers, got {types!r}")
    step = whole(raw, "interleave_moe_layer_step", 1)
    sparse = frozenset(range(step - 1, count, step))
    if raw.get("moe_layers") is not None:
        sparse = layer_indices(raw, "moe_layers")
    chunk = whole(raw, "attention_chunk_size", 8192)
    return tuple(
        LayerKind(
            chunk=chunk if layer_type == "chunked_attention" else None,
            rope="main" if turns else "none",
            has_qk_norm=bool(turns),
            is_sparse=index in sparse,
        )
        for index, (turns, layer_type) in enumerate(zip(turned, types, strict=False))
    )


LLAMA4 = Family(
    _llama4,
    {
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    },
)
LLAMA4_OF_VISION = Family(_llama4, LLAMA4.defaults, text_types=("llama4_text",))
