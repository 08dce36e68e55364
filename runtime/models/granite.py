"""Granite: Llama with four constant factors: on the embedding, on what blocks add, on scores, and under the logits."""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.models.config import Family, ModelConfig
from niwaki.runtime.models.fields import Fields, number


def _granite(raw: Fields, llama: ModelConfig) -> ModelConfig:
    return replace(
        llama,
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        attention_scale=number(raw, "attention_multiplier", 1.0),
        logit_scale=1.0 / number(raw, "logits_scaling", 1.0),
    )


GRANITE = Family(_granite)
