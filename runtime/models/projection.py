"""One matrix product of a layer, y = x weight^T + bias, and how it is read from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import Ops

Read = Callable[[str], torch.Tensor]


class Linear(Protocol):
    """A product, however its weights are kept."""

    def forward(self, x: Operand, out: Operand) -> None:
        """x [tokens, inputs], out [tokens, outputs]."""
        ...


@dataclass(frozen=True, slots=True)
class Projection:
    """Weights as they are."""

    ops: Ops
    weight: Operand  # [outputs, inputs]
    bias: Operand | None  # [outputs]

    def forward(self, x: Operand, out: Operand) -> None:
        self.ops.linear(x, self.weight, self.bias, out)


def projection_of(ops: Ops, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> Linear:
    """The tensors, their rows one below the other."""
    weight, bias = _stacked(weights), _stacked(biases) if biases else None
    packed = ops.packed(weight, bias)
    if packed is not None:
        return packed
    return Projection(ops, Operand.of(weight), None if bias is None else Operand.of(bias))


def read_projection(ops: Ops, read: Read, prefix: str, names: tuple[str, ...], has_bias: bool) -> Linear:
    """The product of the tensors of these names."""
    weights = [read(f"{prefix}{name}.weight") for name in names]
    return projection_of(ops, weights, [read(f"{prefix}{name}.bias") for name in names] if has_bias else [])


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
