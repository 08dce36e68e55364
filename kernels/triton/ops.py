"""The functions of a forward pass on an NVIDIA GPU: Triton kernels, and cuBLAS through torch for the dense products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from niwaki.kernels.coded import Coded
from niwaki.kernels.linear import linear_torch
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import Gate, Linear, Stacked, StackedCodes, Weight
from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.rule import PLAIN, AttentionRule
from niwaki.kernels.triton.attend import AttentionCall
from niwaki.kernels.triton.coded import coded_product
from niwaki.kernels.triton.coded_experts import grouped_coded_linear, stacked_codes
from niwaki.kernels.triton.gate import clamped_mul, gelu_mul, silu_mul
from niwaki.kernels.triton.moe import combine, grouped_linear, route, sorted_choices
from niwaki.kernels.triton.norm import add_rms_norm, qk_norm, rms_norm
from niwaki.kernels.triton.pages import Copy, copy_pages
from niwaki.kernels.triton.plan import DevicePlan
from niwaki.kernels.triton.rope_store import rope_store_kv
from niwaki.kernels.triton.rows import gather_rows


class TritonOps:
    """Plans must hold their `on_device` half. In Triton's interpreter it runs on CPU tensors."""

    reads_device_plan = True

    def packed(self, weight: Weight, bias: torch.Tensor | None) -> Linear | None:
        """cuBLAS takes floats as they are."""
        return coded_product(weight, bias) if isinstance(weight, Coded) else None

    def linear(self, x: Operand, weight: Operand, bias: Operand | None, out: Operand) -> None:
        linear_torch(x.tensor, weight.tensor, None if bias is None else bias.tensor, out.tensor)

    def rms_norm(self, x: Operand, weight: Operand, eps: float, out: Operand, offset: float = 0.0) -> None:
        rms_norm(x.tensor, weight.tensor, eps, out.tensor, offset)

    def add_rms_norm(
        self, x: Operand, delta: Operand, weight: Operand, eps: float, out: Operand, offset: float = 0.0
    ) -> None:
        add_rms_norm(x.tensor, delta.tensor, weight.tensor, eps, out.tensor, offset)

    def qk_norm(
        self, qkv: Operand, q_weight: Operand, k_weight: Operand, widths: tuple[int, int], eps: float, offset: float
    ) -> None:
        qk_norm(qkv.tensor, q_weight.tensor, k_weight.tensor, *widths, eps, offset)

    def silu_mul(self, gate_up: Operand, out: Operand) -> None:
        silu_mul(gate_up.tensor, out.tensor)

    def gelu_mul(self, gate_up: Operand, out: Operand) -> None:
        gelu_mul(gate_up.tensor, out.tensor)

    def clamped_mul(self, gate_up: Operand, out: Operand, alpha: float, limit: float) -> None:
        clamped_mul(gate_up.tensor, out.tensor, alpha, limit)

    def rope_store_kv(
        self, qkv: Operand, cos: Operand, sin: Operand, plan: AttentionPlan, k_pool: Operand, v_pool: Operand
    ) -> None:
        on_device = _on_device(plan)
        rope_store_kv(
            qkv.tensor,
            cos.tensor,
            sin.tensor,
            on_device.positions,
            on_device.slots,
            k_pool.tensor,
            v_pool.tensor,
        )

    def attend(
        self,
        q: Operand,
        k_pool: Operand,
        v_pool: Operand,
        plan: AttentionPlan,
        out: Operand,
        rule: AttentionRule = PLAIN,
    ) -> None:
        on_device = _on_device(plan)
        call = AttentionCall(q.tensor, k_pool.tensor, v_pool.tensor, out.tensor, rule)
        if on_device.put_off is not None:
            on_device.put_off(call)
        else:
            call.launch(on_device)

    def select_rows(self, index: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        gather_rows(index, *pairs)

    def copy_pages(self, pool: torch.Tensor, copies: Sequence[Copy]) -> None:
        copy_pages(pool, copies)

    def route(self, scores: torch.Tensor, per_token: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.empty((len(scores), per_token), dtype=torch.float32, device=scores.device)
        chosen = torch.empty((len(scores), per_token), dtype=torch.int32, device=scores.device)
        route(scores, weights, chosen, renormalise=renormalise)
        return weights, chosen

    @property
    def fused_experts(self) -> TritonExperts:
        return EXPERTS


class TritonExperts:
    """A mixture of experts by grouped products. Nothing comes back to the host."""

    def stacked(self, experts: Sequence[Coded]) -> StackedCodes | None:
        return stacked_codes(experts)

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: Stacked,
        gate: Gate,
        down: Stacked,
        out: torch.Tensor,
    ) -> None:
        order, bounds = sorted_choices(chosen, _shape_of(gate_up)[0])
        per_row = len(order) // len(x)
        wide = _grouped(x, gate_up, chosen, order, bounds, per_row)
        narrow = x.new_empty((len(order), wide.shape[1] // 2))
        gate(Operand.of(wide), Operand.of(narrow))
        combine(_grouped(narrow, down, chosen, order, bounds, 1), weights, out)


EXPERTS = TritonExperts()


def _shape_of(product: Stacked) -> tuple[int, int]:
    """Experts, and outputs of each."""
    weight = product.weight
    experts, outputs, _ = (weight.scales if isinstance(weight, StackedCodes) else weight).shape
    return experts, outputs


def _grouped(
    x: torch.Tensor,
    product: Stacked,
    chosen: torch.Tensor,
    order: torch.Tensor,
    bounds: torch.Tensor,
    per_row: int,
) -> torch.Tensor:
    out = x.new_empty((len(order), _shape_of(product)[1]))
    if isinstance(product.weight, StackedCodes):
        grouped_coded_linear(x, product.weight, order, bounds, out, per_row=per_row)
    else:
        grouped_linear(x, product.weight, order, bounds, out, per_row=per_row)
    return out if product.bias is None else out.add_(product.bias[chosen.flatten()])


def _on_device(plan: AttentionPlan) -> DevicePlan:
    if plan.on_device is None:
        raise TypeError("a GPU kernel was given a plan without its half on the device")
    return plan.on_device
