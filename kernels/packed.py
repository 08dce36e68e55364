"""A matrix product with weights laid out for the CPU's bfloat16 tiles (AMX), by oneDNN: out = x W^T + bias.

A product reads W tile by tile; in rows it has to be laid out anew each time. Measured on two cores of a Xeon with AMX,
22 November 2026, bfloat16, us for kernels/linear.py / torch.mm / packed with its copy, weights not in the cache:

    rows                   1                 8                  33                  64
    [640, 384]      80 / 98 / 76     209 / 94 / 79      - / 114 / 82       - / 129 / 108
    [1920, 384]   188 / 203 / 147   394 / 188 / 152     - / 219 / 164      - / 288 / 224
    [8192, 384]   440 / 564 / 313  1960 / 395 / 292     - / 830 / 490      - / 1077 / 750
    [4096, 1024]  700 / 634 / 357  2400 / 514 / 352     - / 1190 / 700     - / 1494 / 900

17 to 32 rows took longer than 33 (860 us instead of 490 at [8192, 384]): such a batch is filled up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from niwaki.kernels.operand import Operand

ROWS = 32  # that the layout is chosen for; 8, 256 and no hint gave the same times, 1 worse ones
SLOW = range(17, 33)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights [outputs, inputs] in oneDNN's own order, and their bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: Operand, out: Operand) -> None:
        """x [rows, inputs], out [rows, outputs], both bfloat16."""
        rows = x.tensor
        count = len(rows)
        if count in SLOW:
            filled = rows.new_zeros((SLOW.stop, rows.shape[1]))
            filled[:count] = rows
            rows = filled
        product = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        out.tensor.copy_(product[:count])


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear | None:
    """None where this CPU has no bfloat16 tiles, or the weights are not bfloat16. `weight` is not kept."""
    if weight.dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return None
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS), bias)
