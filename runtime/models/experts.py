"""The second half of a layer where each token takes a few of many gated MLPs, and perhaps one more that all take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch

from niwaki.kernels.coded import Coded
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import FusedExperts, Gate, Linear, Ops, Stacked, StackedCodes, Weight
from niwaki.runtime.models.config import Experts, ModelConfig
from niwaki.runtime.models.mlp import Mlp
from niwaki.runtime.models.projection import Source, joined, projection_of, read_projection
from niwaki.runtime.models.workspace import Buffers

# All experts' matrices of a product: [experts, outputs, inputs] in the model's type, or one by one in codes.
Whole = torch.Tensor | Callable[[], Iterator[Weight]]


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
        return added.tensor.float() * _sigmoid(share.float())


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
        products = torch.empty((len(x.tensor), rule.count), device=x.tensor.device)
        wide = Operand.of(x.tensor.float()), Operand.of(self.weight.tensor.float())
        self.ops.linear(*wide, None, Operand.of(products))
        scores = _sigmoid(products) if rule.score == "sigmoid" else products.softmax(-1)
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
            each = rows[:, None].expand(-1, self.rule.per_token, -1).flatten(0, 1)  # repeat_interleave may wait
            rows = each * weights.view(-1, 1).to(rows.dtype)
            weights = torch.ones_like(weights)
        self.fused(rows, weights, chosen, self.gate_up, self.gate, self.down, b.delta.tensor)
        if self.shared is not None:
            b.delta.tensor.add_(self.shared.run(x))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """torch's own rounds the last few numbers of a tensor otherwise than those before: a row of it would depend on how
    many there are."""
    return 1 / (1 + torch.exp(-x))


def read_experts(ops: Ops, gate: Gate, config: ModelConfig, rule: Experts, prefix: str, read: Source) -> Mlp:
    names = config.names
    weight = Operand.of(read(f"{prefix}{names.router}.weight"))
    bias = Operand.of(read(f"{prefix}{names.router}.bias")) if rule.has_router_bias else None
    correction = read(f"{prefix}{names.correction}").float().flatten() if rule.has_correction else None
    router = Router(ops, weight, bias, correction, rule)
    shared = None
    if rule.shared_width is not None:
        gate_up = read_projection(ops, read, prefix, (f"{names.shared}.gate_proj", f"{names.shared}.up_proj"), False)
        down = read_projection(ops, read, prefix, (f"{names.shared}.down_proj",), False)
        share = (f"{names.shared}_gate",)
        share_gate = read_projection(ops, read, prefix, share, False) if rule.is_shared_gated else None
        shared = SharedExpert(Expert(gate, gate_up, down, rule.shared_width), share_gate)
    fused = ops.fused_experts
    if fused is not None:
        return FusedSparseMlp(router, fused, gate, *_read_stacked(config, rule, prefix, read, fused), rule, shared)
    if rule.storage == "each":
        numbers = range(rule.count)
        gate_ups = [read_projection(ops, read, prefix, _of(names.expert_gate_up, index), False) for index in numbers]
        downs = [read_projection(ops, read, prefix, _of((names.expert_down,), index), False) for index in numbers]
    else:
        gate_ups, downs = (_one_by_one(ops, read, *product) for product in _read_whole(config, rule, prefix, read))
    experts = tuple(Expert(gate, *products, rule.width) for products in zip(gate_ups, downs, strict=True))
    return SparseMlp(router, experts, rule, shared)


def _one_by_one(ops: Ops, read: Source, weight: Whole, bias: torch.Tensor | None) -> list[Linear]:
    biases: Iterable[list[torch.Tensor]] = repeat([]) if bias is None else ([one] for one in bias)
    return [projection_of(ops, read, [one], added) for one, added in zip(_each(read, weight), biases, strict=False)]


def _each(read: Source, weight: Whole) -> Iterator[Weight]:
    """The matrix of each expert, as it is to be kept."""
    return map(read.kept, weight) if isinstance(weight, torch.Tensor) else weight()


def _of(names: tuple[str, ...], expert: int) -> tuple[str, ...]:
    return tuple(name.format(expert) for name in names)


def _read_stacked(
    config: ModelConfig, rule: Experts, prefix: str, read: Source, fused: FusedExperts
) -> tuple[Stacked, Stacked]:
    """All experts' products, gates before ups, in codes where these have a kernel."""
    names = config.names
    if rule.storage != "each":
        (gate_up, gate_up_bias), (down, down_bias) = _read_whole(config, rule, prefix, read)
        kept_gate_up, kept_down = (_kept(read, weight, rule.count, fused) for weight in (gate_up, down))
        return Stacked(kept_gate_up, gate_up_bias), Stacked(kept_down, down_bias)

    def stacked(parts: tuple[str, ...]) -> Stacked:
        experts = (
            joined(read, [read.weight(f"{prefix}{name}.weight") for name in _of(parts, index)])
            for index in range(rule.count)
        )
        return Stacked(_together(read, experts, rule.count, fused))

    return stacked(names.expert_gate_up), stacked((names.expert_down,))


def _kept(read: Source, weight: Whole, count: int, fused: FusedExperts) -> torch.Tensor | StackedCodes:
    """Stacked weights, as they are to be kept."""
    if isinstance(weight, torch.Tensor) and read.kind == "auto":
        return weight
    return _together(read, _each(read, weight), count, fused)


def _together(read: Source, experts: Iterable[Weight], count: int, fused: FusedExperts) -> torch.Tensor | StackedCodes:
    """`count` matrices of one shape. Those in the model's type are put in their place one by one: two copies of all
    would be too many."""
    codes: list[Coded] = []
    stacked: torch.Tensor | None = None

    def place(index: int, one: Weight) -> None:
        nonlocal stacked
        plain = read.plain(one)
        stacked = plain.new_empty((count, *plain.shape)) if stacked is None else stacked
        stacked[index] = plain

    for index, one in enumerate(experts):
        if isinstance(one, Coded) and read.dtype == torch.bfloat16 and stacked is None:
            codes.append(one)
            continue
        for earlier, code in enumerate(codes):
            place(earlier, code)
        codes.clear()
        place(index, one)
    if stacked is None:
        kept = fused.stacked(codes)
        if kept is not None:
            return kept
        for index, code in enumerate(codes):
            place(index, code)
    assert stacked is not None, "there is an expert"
    return stacked


def _read_whole(
    config: ModelConfig, rule: Experts, prefix: str, read: Source
) -> tuple[tuple[Whole, torch.Tensor | None], tuple[Whole, torch.Tensor | None]]:
    """Of checkpoints that store all experts in one: weights and biases [experts, outputs] of both products."""
    names = config.names

    def product(name: str, order: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Whole, torch.Tensor | None]:
        bias = torch.stack([order(one) for one in read(f"{prefix}{name}_bias")]) if rule.has_bias else None
        stored = read.found(prefix + name)
        if isinstance(stored, Coded):
            return partial(_matrices, stored, order), bias
        whole = read.plain(stored)
        if rule.storage == "joined":
            return whole, bias
        rows = whole.new_empty((len(whole), whole.shape[2], whole.shape[1]))
        for kept, one in zip(rows, whole, strict=True):
            kept.copy_(order(one.t()))
        return rows, bias

    halves = _uninterleaved if rule.storage == "interleaved" else _as_they_are
    return product(names.expert_gate_up[0], halves), product(names.expert_down, _as_they_are)


def _matrices(stack: Coded, order: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Weight]:
    """Made as they are taken: the codes of large models fill gigabytes."""
    for number in range(len(stack.codes)):
        yield stack.of_rows(lambda rows, number=number: order(rows[number]))  # type: ignore[misc]  # bound at once


def _as_they_are(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _uninterleaved(rows: torch.Tensor) -> torch.Tensor:
    """[2 x width, ...] with the even rows first."""
    return torch.cat((rows[::2], rows[1::2]))
