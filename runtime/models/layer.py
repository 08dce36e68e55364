"""What a decoder's layer is made of."""

from __future__ import annotations

from dataclasses import dataclass

from niwaki.kernels.operand import Operand
from niwaki.runtime.models.attention import Attention
from niwaki.runtime.models.mlp import Mlp


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    attention_post_norm: Operand | None  # [hidden], of what attention adds
    mlp_norm: Operand | None  # [hidden], of what the MLP reads
    mlp: Mlp
    mlp_post_norm: Operand | None  # [hidden], of what the MLP adds
    next_norm: Operand | None  # [hidden], of what the next layer reads, or the head
