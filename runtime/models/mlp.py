"""The second half of a layer where all tokens take the same gated MLP. Mixtures of them are in experts.py.

It reads [tokens, hidden] and writes what the layer adds to the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import Gate, Linear, Ops
from niwaki.runtime.models.config import ModelConfig
from niwaki.runtime.models.workspace import Buffers


class Mlp(Protocol):
    def forward(self, x: Operand, b: Buffers) -> None:
        """b.delta = what the MLP makes of x [tokens, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """delta = down(gate(gate_up(x)))."""

    gate: Gate
    gate_up: Linear  # hidden -> 2 x width
    down: Linear  # width -> hidden

    def forward(self, x: Operand, b: Buffers) -> None:
        self.gate_up.forward(x, b.gate_up)
        self.gate(b.gate_up, b.activated)
        self.down.forward(b.activated, b.delta)


def gate_of(ops: Ops, config: ModelConfig) -> Gate:
    match config.activation:
        case "silu":
            return ops.silu_mul
        case "gelu_tanh":
            return ops.gelu_mul
        case "clamped":
            return partial(ops.clamped_mul, alpha=config.gate_alpha, limit=config.gate_limit)
