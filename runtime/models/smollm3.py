"""SmolLM3: Llama in which every fourth layer turns no queries and keys: it sees what, not where."""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Family, ModelConfig, with_windows
from niwaki.runtime.models.fields import Fields, flag, whole
from niwaki.runtime.models.positions import read_windows


def _smollm3(raw: Fields, llama: ModelConfig) -> ModelConfig:
    turned = raw.get("no_rope_layers")  # 1: the layer does turn, in spite of the name
    if turned is None:
        interval = whole(raw, "no_rope_layer_interval", 4)
        turned = [int((index + 1) % interval != 0) for index in range(llama.num_layers)]
    if not isinstance(turned, list) or len(turned) != llama.num_layers or not set(turned) <= {0, 1}:
        raise ModelError(f"no_rope_layers must list 0 or 1 for each of {llama.num_layers} layers, got {turned!r}")
    if flag(raw, "use_sliding_window"):
        llama = with_windows(llama, read_windows(raw, llama.num_layers, slides=lambda index: not turned[index]))
    kinds = zip(llama.layer_kinds, turned, strict=True)
    return replace(llama, layers=tuple(replace(kind, rope="main" if turns else "none") for kind, turns in kinds))


SMOLLM3 = Family(_smollm3, {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True})
