"""The second half of a layer where each token takes a few of many gated MLPs, and perhaps one more that all take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import torch

from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import FusedExperts, Gate, Linear, Ops, Stacked
from niwaki.runtime.models.config import Experts, ModelConfig
from niwaki.runtime.models.mlp import Mlp
from niwaki.runtime.models.projection import Source, projection_of, read_projection
from niwaki.runtime.models.workspace import Buffers


@dataclass(frozen=True, slots=True)
class Expert:
    """out = down(gate(gate_up(x)))."""

    gate: Gate
    gate_up: Linear  # hidden -> 2 x width
    down: Linear  # width -> hidden
    width: int

    def run(self, x: Operand, out: Operand) -> None:
        """x, out [rows, hidden]."""
        gate_up = Operand.of(x.tensor.new_empty((len(x.tensor), 2 * self.width)))
        activated = Operand.of(x.tensor.new_empty((len(x.tensor), self.width)))
        self.gate_up.forward(x, gate_up)
        self.gate(gate_up, activated)
        self.down.forward(activated, out)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Every token takes it, on request times the sigmoid of a product."""

    expert: Expert
    gate: Linear | None  # hidden -> 1

    def run(self, x: Operand) -> torch.Tensor:
        added = Operand.of(torch.empty_like(x.tensor))
        self.expert.run(x, added)
        if self.gate is None:
            return added.tensor
        share = x.tensor.new_empty((len(x.tensor), 1))
        self.gate.forward(x, Operand.of(share))
        return added.tensor.float() * share.float().sigmoid()


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a token takes, and what they weigh.

    Where it is more than a softmax it computes in float32, as DeepSeek's does (arXiv 2412.19437, section 2.1.2): scores
    are compared across groups, whose sums lie closer together than bfloat16 tells apart.
    """

    ops: Ops
    weight: Operand  # [experts, hidden]
    bias: Operand | None  # [experts]
    correction: torch.Tensor | None  # float32 [experts]
    rule: Experts

    def choose(self, x: Operand) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights float32 and chosen [tokens, per_token]."""
        rule = self.rule
        if rule.score == "softmax" and rule.groups == 1 and self.correction is None:
            scores = x.tensor.new_empty((len(x.tensor), rule.count))
            self.ops.linear(x, self.weight, self.bias, Operand.of(scores))
            weights, chosen = self.ops.route(scores, rule.per_token, renormalise=rule.renormalise)
            return weights * rule.scale if rule.scale != 1.0 else weights, chosen
        products = torch.mm(x.tensor.float(), self.weight.tensor.float().t())
        scores = products.sigmoid() if rule.score == "sigmoid" else products.softmax(-1)
        compared = scores if self.correction is None else scores + self.correction
        chosen = self._in_best_groups(compared).topk(rule.per_token, -1).indices
        weights = scores.gather(1, chosen)
        if rule.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * rule.scale, chosen.int()

    def _in_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [tokens, experts] with -inf for the experts outside of a token's best groups."""
        rule = self.rule
        if rule.groups == 1:
            return scores
        grouped = scores.view(len(scores), rule.groups, -1)
        best = grouped.topk(rule.group_best, -1).values.sum(-1).topk(rule.groups_per_token, -1).indices
        is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        return grouped.masked_fill(is_out[..., None], -torch.inf).view(scores.shape)


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """delta = sum over a token's chosen experts of weight x expert(x), summed in float32 in the order of the experts.

    Tokens are sorted by expert, so each expert that anyone chose is one product over its own rows.
    """

    router: Router
    experts: tuple[Expert, ...]
    rule: Experts
    shared: SharedExpert | None

    def forward(self, x: Operand, b: Buffers) -> None:
        rows, per_token = x.tensor, self.rule.per_token
        weights, chosen = self.router.choose(x)
        by_expert, order = chosen.flatten().sort(stable=True)
        token = order // per_token
        counts = torch.bincount(by_expert, minlength=self.rule.count).tolist()
        sorted_rows, sorted_weights = rows.index_select(0, token), weights.flatten()[order][:, None]
        if self.rule.weighs_input:
            sorted_rows = sorted_rows * sorted_weights.to(rows.dtype)
        added = torch.empty_like(sorted_rows)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(first, first + count)
                expert.run(Operand.of(sorted_rows[part]), Operand.of(added[part]))
                first += count
        weighted = added.float() if self.rule.weighs_input else added.float().mul_(sorted_weights)
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device).index_add_(0, token, weighted)
        if self.shared is not None:
            total.add_(self.shared.run(x))
        b.delta.tensor.copy_(total)


@dataclass(frozen=True, slots=True)
class FusedSparseMlp:
    """The same by grouped products over stacked experts, which ask nothing of the host."""

    router: Router
    fused: FusedExperts
    gate: Gate
    gate_up: Stacked  # hidden -> 2 x width
    down: Stacked  # width -> hidden
    rule: Experts
    shared: SharedExpert | None

    def forward(self, x: Operand, b: Buffers) -> None:
        rows = x.tensor
        weights, chosen = self.router.choose(x)
        if self.rule.weighs_input:
            rows = rows.repeat_interleave(self.rule.per_token, 0) * weights.view(-1, 1).to(rows.dtype)
            weights = torch.ones_like(weights)
        self.fused(rows, weights, chosen, self.gate_up, self.gate, self.down, b.delta.tensor)
        if self.shared is not None:
            b.delta.tensor.add_(self.shared.run(x))


def read_experts(ops: Ops, gate: Gate, config: ModelConfig, rule: Experts, prefix: str, read: Source) -> Mlp:
    names = config.names
    weight = Operand.of(read(f"{prefix}{names.router}.weight"))
    bias = Operand.of(read(f"{prefix}{names.router}.bias")) if rule.has_router_bias else None
    correction = read(f"{prefix}{names.router}.e_score_correction_bias").float() if rule.has_correction else None
    router = Router(ops, weight, bias, correction, rule)
    shared = None
    if rule.shared_width is not None:
        gate_up = read_projection(ops, read, prefix, (f"{names.shared}.gate_proj", f"{names.shared}.up_proj"), False)
        down = read_projection(ops, read, prefix, (f"{names.shared}.down_proj",), False)
        share = (f"{names.shared}_gate",)
        share_gate = read_projection(ops, read, prefix, share, False) if rule.is_shared_gated else None
        shared = SharedExpert(Expert(gate, gate_up, down, rule.shared_width), share_gate)
    if rule.storage == "each" and ops.fused_experts is None:
        numbers = range(rule.count)
        gate_ups = [read_projection(ops, read, prefix, _of(names.expert_gate_up, index), False) for index in numbers]
        downs = [read_projection(ops, read, prefix, _of((names.expert_down,), index), False) for index in numbers]
    else:
        stacked = _read_stacked(config, rule, prefix, read)
        if ops.fused_experts is not None:
            return FusedSparseMlp(router, ops.fused_experts, gate, *stacked, rule, shared)
        gate_ups, downs = (_one_by_one(ops, read, product) for product in stacked)
    experts = tuple(Expert(gate, *products, rule.width) for products in zip(gate_ups, downs, strict=True))
    return SparseMlp(router, experts, rule, shared)


def _one_by_one(ops: Ops, read: Source, product: Stacked) -> list[Linear]:
    biases: Iterable[list[torch.Tensor]] = repeat([]) if product.bias is None else ([bias] for bias in product.bias)
    return [projection_of(ops, read, [read.kept(one)], bias) for one, bias in zip(product.weight, biases, strict=False)]


def _of(names: tuple[str, ...], expert: int) -> tuple[str, ...]:
    return tuple(name.format(expert) for name in names)


def _read_stacked(config: ModelConfig, rule: Experts, prefix: str, read: Source) -> tuple[Stacked, Stacked]:
    """All experts' products, gates before ups."""
    names = config.names
    if rule.storage == "each":

        def stacked(parts: tuple[str, ...]) -> torch.Tensor:
            found = None
            for index in range(rule.count):
                one = torch.cat([read(f"{prefix}{name}.weight") for name in _of(parts, index)])
                found = one.new_empty((rule.count, *one.shape)) if found is None else found
                found[index] = one
            assert found is not None, "there is an expert"
            return found

        return Stacked(stacked(names.expert_gate_up)), Stacked(stacked((names.expert_down,)))

    def transposed(name: str) -> Stacked:
        bias = read(f"{prefix}{name}_bias") if rule.has_bias else None
        return Stacked(read(prefix + name).transpose(1, 2).contiguous(), bias)

    gate_up, down = transposed(names.expert_gate_up[0]), transposed(names.expert_down)
    if rule.storage == "interleaved":
        bias = gate_up.bias
        gate_up = Stacked(_uninterleaved(gate_up.weight), None if bias is None else _uninterleaved(bias))
    return gate_up, down


def _uninterleaved(rows: torch.Tensor) -> torch.Tensor:
    """[experts, 2 x width, ...] with the even rows first."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)
