"""Phi 3, 3.5 and 4: Llama with fused projections, on request a window, a part of each head turned, and LongRoPE."""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.models.config import Family, LayerNames, ModelConfig, with_windows
from niwaki.runtime.models.fields import Fields
from niwaki.runtime.models.positions import read_windows


def _phi3(raw: Fields, llama: ModelConfig) -> ModelConfig:
    windowed = with_windows(llama, read_windows(raw, llama.num_layers, slides=lambda _: True))
    names = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return replace(windowed, attention_bias=False, mlp_bias=False, names=names)


PHI3 = Family(_phi3, {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, may_turn_part=True)
