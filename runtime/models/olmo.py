"""OLMo 2: norms behind the blocks, none before, and one over all queries and one over all keys. OLMo 3: with windows.

OLMoE: the norms of Llama, those of queries and keys from OLMo 2, and experts.
"""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Experts, Family, LayerNames, ModelConfig, with_windows
from niwaki.runtime.models.fields import Fields, flag, whole
from niwaki.runtime.models.positions import Rope, read_windows

POST_NORMS = LayerNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)


def _olmo2(raw: Fields, llama: ModelConfig) -> ModelConfig:
    return replace(llama, mlp_bias=False, qk_norm="whole", names=POST_NORMS)


def _olmo3(raw: Fields, llama: ModelConfig) -> ModelConfig:
    olmo2 = _olmo2(raw, llama)
    windowed = with_windows(olmo2, read_windows(raw, llama.num_layers, slides=lambda index: (index + 1) % 4 != 0))
    return replace(
        windowed,
        # Only the layers that see everything are stretched.
        local_rope=llama.local_rope or Rope(llama.rope_theta),
        layers=tuple(replace(kind, rope="local" if kind.window else "main") for kind in windowed.layer_kinds),
    )


def _olmoe(raw: Fields, llama: ModelConfig) -> ModelConfig:
    if raw.get("clip_qkv") is not None:
        raise ModelError(f"clip_qkv is not supported, got {raw['clip_qkv']!r}; supported: null")
    return replace(
        llama,
        mlp_bias=False,
        qk_norm="whole",
        experts=Experts(
            count=whole(raw, "num_experts", 64),
            per_token=whole(raw, "num_experts_per_tok", 8),
            width=llama.intermediate_size,
            renormalise=flag(raw, "norm_topk_prob"),
        ),
        layers=tuple(replace(kind, is_sparse=True) for kind in llama.layer_kinds),
    )


OLMO2 = Family(_olmo2, {"rms_norm_eps": 1e-5})
OLMO3 = Family(_olmo3, {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096})
OLMOE = Family(_olmoe, {"rms_norm_eps": 1e-5})
