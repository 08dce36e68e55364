"""EXAONE 4: the norms of OLMo 2, each head of queries and keys normalised, and where most layers have a window, the
others see what, not where.
"""

from __future__ import annotations

from dataclasses import replace

from niwaki.runtime.api import ModelError
from niwaki.runtime.models.config import Family, ModelConfig, with_windows
from niwaki.runtime.models.fields import Fields
from niwaki.runtime.models.olmo import POST_NORMS
from niwaki.runtime.models.positions import read_windows


def _exaone4(raw: Fields, llama: ModelConfig) -> ModelConfig:
    model = replace(llama, attention_bias=False, mlp_bias=False, qk_norm="head", names=POST_NORMS)
    if raw.get("sliding_window") is None:
        return model
    pattern = _pattern(raw)
    windowed = with_windows(model, read_windows(raw, model.num_layers, lambda index: pattern[index % len(pattern)]))
    kinds = (replace(kind, rope="main" if kind.window else "none") for kind in windowed.layer_kinds)
    return replace(windowed, layers=tuple(kinds))


def _pattern(raw: Fields) -> tuple[bool, ...]:
    """Which layers have a window, over and over: "LLLG", or 4 for the same."""
    match raw.get("sliding_window_pattern"):
        case str(kinds) if kinds and set(kinds) <= {"L", "G"}:
            return tuple(kind == "L" for kind in kinds)
        case int(period) if period > 0:
            return (True,) * (period - 1) + (False,)
        case other:
            raise ModelError(f"sliding_window_pattern must be a number of layers, or L and G, got {other!r}")


EXAONE4 = Family(_exaone4, {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4})
