"""One matrix product of a layer, y = x weight^T + bias, and how it is read from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from niwaki.kernels.coded import Coded, coded, stacked_codes
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import Linear, Ops, Weight
from niwaki.runtime.models.config import stored_name


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's tensors come from, and how the weights of its products are kept."""

    stored: Callable[[str], Weight]
    device: torch.device
    dtype: torch.dtype
    kind: str = "auto"  # of the codes that products keep, unless theirs come in codes; "auto": as they are
    prefix: str = ""  # of all names, as `stored_name` has it

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor, in the dtype and on the device of the model."""
        return self.plain(self.found(name))

    def found(self, name: str) -> Weight:
        """The tensor as it is stored."""
        return self.stored(stored_name(self.prefix, name))

    def weight(self, name: str) -> Weight:
        """A product's weights, as they are to be kept."""
        stored = self.found(name)
        return stored if isinstance(stored, Coded) else self.kept(self.plain(stored))

    def kept(self, weight: torch.Tensor) -> Weight:
        """Weights in the model's dtype, as they are to be kept."""
        return weight if self.kind == "auto" else coded(weight, self.kind)

    def head(self, weight: torch.Tensor) -> Weight:
        """The same of the head, on which alone hangs which token comes next: the most exact codes."""
        return weight if self.kind == "auto" else coded(weight, "int8")

    def plain(self, weight: Weight) -> torch.Tensor:
        whole = weight.matrix() if isinstance(weight, Coded) else weight
        return whole.to(device=self.device, dtype=self.dtype)

    def behind(self, prefix: str) -> Source:
        return replace(self, prefix=prefix)


@dataclass(frozen=True, slots=True)
class Projection:
    """Weights as they are."""

    ops: Ops
    weight: Operand  # [outputs, inputs]
    bias: Operand | None  # [outputs]

    def forward(self, x: Operand, out: Operand) -> None:
        self.ops.linear(x, self.weight, self.bias, out)


@dataclass(frozen=True, slots=True)
class CodedProjection:
    """Weights in codes where they have no kernel: put together for each product, which saves memory and costs time."""

    ops: Ops
    weight: Coded
    bias: Operand | None  # [outputs]

    def forward(self, x: Operand, out: Operand) -> None:
        self.ops.linear(x, Operand.of(self.weight.matrix().to(x.tensor.dtype)), self.bias, out)


def projection_of(ops: Ops, read: Source, weights: Sequence[Weight], biases: Sequence[torch.Tensor]) -> Linear:
    """The weights, their rows one below the other."""
    weight, bias = joined(read, weights), torch.cat(tuple(biases)) if biases else None
    takes = read.dtype == torch.bfloat16 or not isinstance(weight, Coded)
    packed = ops.packed(weight, bias) if takes else None
    if packed is not None:
        return packed
    if isinstance(weight, Coded) and read.kind == "auto":
        return projection_of(ops, read, [read.plain(weight)], biases)
    added = None if bias is None else Operand.of(bias)
    if isinstance(weight, Coded):
        return CodedProjection(ops, weight, added)
    return Projection(ops, Operand.of(weight), added)


def read_projection(ops: Ops, read: Source, prefix: str, names: tuple[str, ...], has_bias: bool) -> Linear:
    """The product of the tensors of these names."""
    weights = [read.weight(f"{prefix}{name}.weight") for name in names]
    return projection_of(ops, read, weights, [read(f"{prefix}{name}.bias") for name in names] if has_bias else [])


def joined(read: Source, parts: Sequence[Weight]) -> Weight:
    """Their rows one below the other; in codes where they are grouped alike."""
    if len(parts) == 1:
        return parts[0]
    codes = [part for part in parts if isinstance(part, Coded)]
    whole = stacked_codes(codes) if len(codes) == len(parts) else None
    return torch.cat([read.plain(part) for part in parts]) if whole is None else whole
