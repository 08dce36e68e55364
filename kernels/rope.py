"""Rotary position embedding: the angles, with the ways to scale them for long texts, and the rotation as a reference.

The halves convention of Hugging Face checkpoints: channel i turns with channel i + head_dim / 2 by the angle
position x inverse_frequency[i]. The CPU kernel that rotates is fused with the store, see store_kv.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Wavelengths above `original_context / low_freq_factor` are stretched by `factor`, those below
    `original_context / high_freq_factor` kept, and those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): channels that turn more than `beta_fast` times within `original_context` are kept, those
    that turn less than `beta_slow` times stretched by `factor`, with a ramp between; cos and sin are multiplied by
    `attention_factor`."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True  # the ends of the ramp to whole channels


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753) within the original context: one divisor a channel, cos and sin times
    `attention_factor`. The second set of divisors, for longer sequences, would change keys that are already cached."""

    short_factors: tuple[float, ...]  # [rotated / 2]
    original_context: int
    attention_factor: float


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling | LongRopeScaling | None


def rope_tables(head_dim: int, theta: float, scaling: RopeScaling, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [positions, head_dim / 2]; head_dim: the channels of a head that are turned."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(head_dim, theta, scaling))
    cos, sin = angles.cos(), angles.sin()
    if isinstance(scaling, YarnScaling | LongRopeScaling):
        return cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos, sin


def unrotated_tables(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of a layer without positions: no channel is turned. float32 [positions, 0]."""
    return torch.empty((positions, 0)), torch.empty((positions, 0))


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """float32 [head_dim / 2], in radians a token."""
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling(factor, low, high, original):
            wavelengths = 2 * math.pi / plain
            blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)  # 1: kept, 0: stretched
            return (1 - blend) * plain / factor + blend * plain
        case YarnScaling():
            kept = _yarn_kept(head_dim, theta, scaling)
            return plain / scaling.factor * (1 - kept) + plain * kept
        case LongRopeScaling(factors):
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)


def _yarn_kept(head_dim: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """float32 [head_dim / 2]: 1 where a channel is kept, 0 where it is stretched."""

    def channel(turns: float) -> float:  # the one that turns so often within the original context
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001  # a ramp of no width is a step
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)


def rotate_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn x [tokens, heads, head_dim] by its positions [tokens]; computed in float32, in the dtype of x.

    Tables narrower than head_dim / 2 leave the last channels as they are.
    """
    half = cos.shape[1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    c, s = cos[positions][:, None], sin[positions][:, None]  # [tokens, 1, half]
    return torch.cat((first * c - second * s, second * c + first * s, rest), -1).to(x.dtype)
