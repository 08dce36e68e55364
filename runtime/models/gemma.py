"""Gemma: norms whose weights are stored less 1, GELU, and a scaled embedding. Gemma 2 and 3, of those that also see the
text model: norms before and behind each block, and windows on most layers. Gemma 2 caps scores and logits; Gemma 3
normalises queries and keys instead, and turns them by another base where there is a window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Family, LayerNames, ModelConfig, with_windows
from niwaki.runtime.models.fields import Fields, flag, number, whole
from niwaki.runtime.models.positions import Rope, read_windows

NORMS = LayerNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
DEFAULTS: dict[str, object] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def _gemma(raw: Fields, llama: ModelConfig) -> ModelConfig:
    if flag(raw, "use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is not supported: the model embeds text, it does not continue it")
    return replace(llama, mlp_bias=False, norm_offset=1.0, embedding_scale=llama.hidden_size**0.5)


def _named_tanh(raw: Fields) -> Fields:
    """Gemma's first files say "gelu" and mean its approximation."""
    said = raw.get("hidden_activation") or raw.get("hidden_act")
    return {**raw, "hidden_activation": "gelu_pytorch_tanh" if said in (None, "gelu") else said}


def _windowed(raw: Fields, llama: ModelConfig, slides: Callable[[int], bool]) -> ModelConfig:
    return replace(
        with_windows(_gemma(raw, llama), read_windows(raw, llama.num_layers, slides)),
        attention_scale=number(raw, "query_pre_attn_scalar") ** -0.5,
        logit_cap=_cap(raw, "final_logit_softcapping"),
        names=NORMS,
    )


def _gemma2(raw: Fields, llama: ModelConfig) -> ModelConfig:
    gemma = _windowed(raw, llama, slides=lambda index: index % 2 == 0)
    return replace(gemma, attention_cap=_cap(raw, "attn_logit_softcapping"))


def _gemma3(raw: Fields, llama: ModelConfig) -> ModelConfig:
    if raw.get("attn_logit_softcapping") is not None:
        raise ModelError(f"attn_logit_softcapping must be null in Gemma 3, got {raw['attn_logit_softcapping']!r}")
    period = whole(raw, "sliding_window_pattern", whole(raw, "_sliding_window_pattern", 6))
    gemma = _windowed(raw, llama, slides=lambda index: (index + 1) % period != 0)
    return replace(
        gemma,
        qk_norm="head",
        local_rope=llama.local_rope or Rope(number(raw, "rope_local_base_freq", 10_000.0)),
        layers=tuple(replace(kind, rope="local" if kind.window else "main") for kind in gemma.layer_kinds),
    )


def _cap(raw: Fields, name: str) -> float | None:
    return None if raw.get(name) is None else number(raw, name)


GEMMA = Family(
    _gemma,
    {"head_dim": 256, "max_position_embeddings": 8192, "num_key_value_heads": 16, "tie_word_embeddings": True},
    translate=_named_tanh,
)
GEMMA2 = Family(_gemma2, {**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})
GEMMA3_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rope_theta": 1e6,
    "max_position_embeddings": 131_072,
}
GEMMA3 = Family(_gemma3, GEMMA3_DEFAULTS)
GEMMA3_OF_VISION = Family(_gemma3, GEMMA3_DEFAULTS, text_types=("gemma3_text",))
