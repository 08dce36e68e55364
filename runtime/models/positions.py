"""Reads from config.json where tokens stand: the rotary parameters, in the spellings of the years, and the windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from niwaki.kernels.rope import LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling
from niwaki.runtime.api import ModelError
from niwaki.runtime.models.fields import Fields, flag, number, numbers, text, whole

ROPE_TYPES = ("default", "linear", "llama3", "longrope", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of some layers: its base, and how it is stretched."""

    theta: float = 10_000.0
    scaling: RopeScaling = None


@dataclass(frozen=True, slots=True)
class Ropes:
    main: Rope
    local: Rope | None  # of the layers with a window, where it is another
    rotary_dim: int  # the channels of a head that are turned


def read_ropes(raw: Fields, context_length: int, head_dim: int) -> Ropes:
    """From `rope_parameters` (transformers 5; one object, or one a layer type), or `rope_scaling` and `rope_theta`."""
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    found = raw.get(name)
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise ModelError(f"{name} must be an object, got {found!r}")
    main, local = found.get("full_attention", found), found.get("sliding_attention")
    for part in (main, local):
        if part is not None and not isinstance(part, dict):
            raise ModelError(f"{name} must hold objects, got {found!r}")
    factor = number(main, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * factor)
    if factor > 1.0 or rotary_dim % 2 or not rotary_dim:
        raise ModelError(f"{name}: partial_rotary_factor {factor} turns {rotary_dim} of {head_dim} channels of a head")
    return Ropes(
        _rope(raw, name, main, context_length, rotary_dim),
        None if local is None else _rope(raw, name, local, context_length, rotary_dim),
        rotary_dim,
    )


def _rope(raw: Fields, name: str, found: Fields, context_length: int, rotary_dim: int) -> Rope:
    theta = number(found, "rope_theta", number(raw, "rope_theta", 10_000.0))
    original = whole(
        found, "original_max_position_embeddings", whole(raw, "original_max_position_embeddings", context_length)
    )
    match text(found, "rope_type", text(found, "type", "default")):
        case "default" | "mrope":  # three positions a token, which in text are one
            return Rope(theta)
        case "linear":
            return Rope(theta, LinearScaling(number(found, "factor")))
        case "llama3":
            low, high = number(found, "low_freq_factor"), number(found, "high_freq_factor")
            if high <= low:
                raise ModelError(f"{name}: high_freq_factor {high} must be above low_freq_factor {low}")
            return Rope(theta, Llama3Scaling(number(found, "factor"), low, high, original))
        case "yarn":
            return Rope(theta, _yarn(found, original))
        case "longrope":
            stretch = number(found, "factor", context_length / original)
            default = math.sqrt(1 + math.log(stretch) / math.log(max(original, 2))) if stretch > 1 else 1.0
            factors = numbers(found, "short_factor", rotary_dim // 2)
            return Rope(theta, LongRopeScaling(factors, original, number(found, "attention_factor", default)))
        case other:
            raise ModelError(f"{name}: rope type {other!r} is not supported; supported: {', '.join(ROPE_TYPES)}")


def _yarn(found: Fields, original: int) -> YarnScaling:
    factor = number(found, "factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    default = magnitude(1.0)
    if found.get("mscale") and found.get("mscale_all_dim"):
        default = magnitude(number(found, "mscale")) / magnitude(number(found, "mscale_all_dim"))
    return YarnScaling(
        factor,
        original,
        number(found, "beta_fast", 32.0),
        number(found, "beta_slow", 1.0),
        number(found, "attention_factor", default),
        flag(found, "truncate", default=True),
    )


def read_windows(raw: Fields, num_layers: int, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: `sliding_window` where `layer_types` says so or, without that list, `slides(index)`."""
    window = None if raw.get("sliding_window") is None else whole(raw, "sliding_window")
    types = raw.get("layer_types")
    if types is None:
        types = ["sliding_attention" if slides(index) else "full_attention" for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"layer_types must list a type for each of {num_layers} layers, got {types!r}")
    for layer_type in types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"layer type {layer_type!r} is not supported; supported: full_attention, sliding_attention"
            )
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)
