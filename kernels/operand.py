"""A tensor together with the NumPy view of the same memory, so that a step does not make that view again and again.

On the CPU a kernel launch costs about 1 us and `tensor.numpy()` as much again for each argument. Buffers, weights
and pools live as long as the model, so their views are made once. bfloat16, which NumPy lacks, is seen as uint16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Operand:
    """`array` shares the memory of `tensor` and is None unless that is on the CPU."""

    tensor: torch.Tensor
    array: Array | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        if tensor.device.type != "cpu":
            return cls(tensor, None)
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        return cls(tensor, bits.numpy())

    def rows(self, count: int) -> Operand:
        """The first `count` rows, without a copy."""
        return Operand(self.tensor[:count], None if self.array is None else self.array[:count])
