"""The second half of a layer: one gated MLP, or a mixture of them of which each token takes a few.

Both read [tokens, hidden] and write what the layer adds to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import FusedExperts, Ops
from niwaki.runtime.models.config import Experts
from niwaki.runtime.models.workspace import Buffers

Gate = Callable[[Operand, Operand], None]  # ops.silu_mul or ops.gelu_mul


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x weight^T + bias."""

    weight: Operand  # [outputs, inputs]
    bias: Operand | None  # [outputs]


class Mlp(Protocol):
    def forward(self, x: Operand, b: Buffers) -> None:
        """b.delta = what the MLP makes of x [tokens, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """delta = down(gate(gate_up(x)))."""

    ops: Ops
    gate: Gate
    gate_up: Projection  # hidden -> 2 x width
    down: Projection  # width -> hidden

    def forward(self, x: Operand, b: Buffers) -> None:
        self.ops.linear(x, self.gate_up.weight, self.gate_up.bias, b.gate_up)
        self.gate(b.gate_up, b.activated)
        self.ops.linear(b.activated, self.down.weight, self.down.bias, b.delta)


@dataclass(frozen=True, slots=True)
class Expert:
    gate_up: Operand  # [2 x width, hidden]
    down: Operand  # [hidden, width]


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Every token takes it, times the sigmoid of a product with `gate`."""

    expert: Expert
    gate: torch.Tensor  # [1, hidden]


@dataclass(frozen=True, slots=True)
class FusedSparseMlp:
    """The same as SparseMlp by grouped products over stacked experts, which ask nothing of the host."""

    ops: Ops
    gate: Gate
    fused: FusedExperts
    is_gelu: bool
    router: torch.Tensor  # [experts, hidden]
    gate_up: torch.Tensor  # [experts, 2 x width, hidden]
    down: torch.Tensor  # [experts, hidden, width]
    rule: Experts
    shared: SharedExpert | None

    def forward(self, x: Operand, b: Buffers) -> None:
        rows = x.tensor
        self.fused(
            rows,
            torch.mm(rows, self.router.t()),
            self.gate_up,
            self.down,
            b.delta.tensor,
            per_token=self.rule.per_token,
            renormalise=self.rule.renormalise,
            is_gelu=self.is_gelu,
        )
        if self.shared is not None:
            added = Operand.of(torch.empty_like(rows))
            run_expert(self.ops, self.gate, self.shared.expert, x, added)
            b.delta.tensor.add_(added.tensor * torch.mm(rows, self.shared.gate.t()).sigmoid())


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """delta = sum over a token's chosen experts of weight x expert(x), summed in float32 in the order of the experts.

    Tokens are sorted by expert, so each expert that anyone chose is one product over its own rows.
    """

    ops: Ops
    gate: Gate
    router: torch.Tensor  # [experts, hidden]
    experts: tuple[Expert, ...]
    rule: Experts
    shared: SharedExpert | None

    def forward(self, x: Operand, b: Buffers) -> None:
        rows, per_token = x.tensor, self.rule.per_token
        scores = _product(self.ops, x, self.router).float().softmax(-1)  # [tokens, experts]
        weights, chosen = scores.topk(per_token, -1)
        if self.rule.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        by_expert, order = chosen.flatten().sort(stable=True)
        token = order // per_token
        counts = torch.bincount(by_expert, minlength=self.rule.count).tolist()
        sorted_rows = rows.index_select(0, token)
        added = torch.empty_like(sorted_rows)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(first, first + count)
                run_expert(self.ops, self.gate, expert, Operand.of(sorted_rows[part]), Operand.of(added[part]))
                first += count
        weighted = added.float().mul_(weights.flatten()[order][:, None])
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device).index_add_(0, token, weighted)
        if self.shared is not None:
            run_expert(self.ops, self.gate, self.shared.expert, x, b.delta)
            share = _product(self.ops, x, self.shared.gate).float().sigmoid()
            total.add_(b.delta.tensor.float().mul_(share))
        b.delta.tensor.copy_(total)


def run_expert(ops: Ops, gate: Gate, expert: Expert, x: Operand, out: Operand) -> None:
    """out = what one expert makes of x [rows, hidden]."""
    outputs = expert.gate_up.tensor.shape[0]
    gate_up = Operand.of(x.tensor.new_empty((len(x.tensor), outputs)))
    activated = Operand.of(x.tensor.new_empty((len(x.tensor), outputs // 2)))
    ops.linear(x, expert.gate_up, None, gate_up)
    gate(gate_up, activated)
    ops.linear(activated, expert.down, None, out)


def _product(ops: Ops, x: Operand, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T as the device's own operations have it."""
    out = x.tensor.new_empty((len(x.tensor), len(weight)))
    ops.linear(x, Operand.of(weight), None, Operand.of(out))
    return out
