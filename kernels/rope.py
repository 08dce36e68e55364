"""Rotary position embedding: the angles, with Llama 3.1's scaling of them, and the rotation as a reference.

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


RopeScaling = Llama3Scaling | LinearScaling | None


def rope_tables(head_dim: int, theta: float, scaling: RopeScaling, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [positions, head_dim / 2]."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(head_dim, theta, scaling))
    return angles.cos(), angles.sin()


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


def rotate_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn x [tokens, heads, head_dim] by its positions [tokens]; computed in float32, in the dtype of x."""
    first, second = x.float().chunk(2, -1)
    c, s = cos[positions][:, None], sin[positions][:, None]  # [tokens, 1, head_dim / 2]
    return torch.cat((first * c - second * s, second * c + first * s), -1).to(x.dtype)
