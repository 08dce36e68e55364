"""The functions that a model's forward pass is made of, behind one protocol, chosen by device.

Models call these and torch's row selection, nothing else, so a new device is one more class here. Attention has three
paths behind `attend`, told apart by the plan: what rows share, then short rows and long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

from niwaki.kernels.clamped_mul import clamped_mul, clamped_mul_torch
from niwaki.kernels.coded import Coded, coded_linear
from niwaki.kernels.copy_pages import copy_pages
from niwaki.kernels.few_pairs import linear_few_pairs, takes_few
from niwaki.kernels.gelu_mul import gelu_mul, gelu_mul_torch
from niwaki.kernels.linear import is_few, linear_few_rows, linear_torch
from niwaki.kernels.linear_tiles import linear_tiles, takes
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.packed import packed_linear
from niwaki.kernels.paged_decode import paged_decode_attention, paged_decode_attention_torch
from niwaki.kernels.partial import NOTHING
from niwaki.kernels.plan import AttentionPlan, Segment
from niwaki.kernels.prefill import prefill_attention, prefill_attention_torch
from niwaki.kernels.rms_norm import add_rms_norm, qk_norm, qk_norm_torch, rms_norm, rms_norm_torch
from niwaki.kernels.rule import PLAIN, AttentionRule
from niwaki.kernels.shared_prefix import can_share, shared_attention
from niwaki.kernels.silu_mul import silu_mul, silu_mul_torch
from niwaki.kernels.small_kv import is_small, rope_store_small, widened
from niwaki.kernels.store_kv import rope_store_kv, rope_store_kv_torch
from niwaki.kernels.tile_attention import can_tile, tile_rows, tile_segments

Gate = Callable[[Operand, Operand], None]  # as Ops.silu_mul
Weight = torch.Tensor | Coded  # [outputs, inputs]


class Linear(Protocol):
    """A product, however its weights are kept."""

    def forward(self, x: Operand, out: Operand) -> None:
        """x [tokens, inputs], out [tokens, outputs]."""
        ...


@dataclass(frozen=True, slots=True)
class StackedCodes:
    """The weights of one product of each expert in few bits, as the device lays them out."""

    codes: torch.Tensor  # [experts, outputs, bytes]
    scales: torch.Tensor  # float32 [experts, outputs, groups]; of e2m1 uint8, as `CodedProduct` has them
    zeros: torch.Tensor | None  # int16 [experts, outputs, groups]
    span: int
    spans: int  # of a group
    inputs: int


@dataclass(frozen=True, slots=True)
class Stacked:
    """One product of each expert."""

    weight: torch.Tensor | StackedCodes  # [experts, outputs, inputs]
    bias: torch.Tensor | None = None  # [experts, outputs]


class FusedExperts(Protocol):
    def stacked(self, experts: Sequence[Coded]) -> StackedCodes | None:
        """None where these codes have no kernel, or differ in their layout."""
        ...

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
        """out[t] = sum over j of weights[t, j] x what expert chosen[t, j] makes of its row of x.

        x [tokens, hidden], or [tokens x k, hidden], a row for each choice; weights float32, chosen int32 [tokens, k];
        gate_up: hidden -> 2 x width, down: width -> hidden; out [tokens, hidden].
        """
        ...


class Ops(Protocol):
    """Shapes and dtypes as in the kernels' own files. Every operand of a call lives on the same device."""

    @property
    def reads_device_plan(self) -> bool:
        """Whether plans must hold their `on_device` half."""
        ...

    @property
    def fused_experts(self) -> FusedExperts | None:
        """A whole mixture of experts over stacked weights; None: expert by expert."""
        ...

    def packed(self, weight: Weight, bias: torch.Tensor | None) -> Linear | None:
        """The product with its weights laid out for this device; None where `linear` is as fast on them as they are,
        or where codes have no kernel."""
        ...

    def route(self, scores: torch.Tensor, per_token: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """weights float32 and chosen [tokens, per_token]: the softmax of scores [tokens, experts] at its highest,
        divided by their sum on request."""
        ...

    def linear(self, x: Operand, weight: Operand, bias: Operand | None, out: Operand) -> None:
        """out = x weight^T + bias. x [tokens, inputs], weight [outputs, inputs]."""
        ...

    def rms_norm(self, x: Operand, weight: Operand, eps: float, out: Operand, offset: float = 0.0) -> None: ...

    def add_rms_norm(
        self, x: Operand, delta: Operand, weight: Operand, eps: float, out: Operand, offset: float = 0.0
    ) -> None: ...

    def qk_norm(
        self, qkv: Operand, q_weight: Operand, k_weight: Operand, widths: tuple[int, int], eps: float, offset: float
    ) -> None:
        """`widths`: columns of the queries, and of the keys."""
        ...

    def silu_mul(self, gate_up: Operand, out: Operand) -> None: ...

    def gelu_mul(self, gate_up: Operand, out: Operand) -> None: ...

    def clamped_mul(self, gate_up: Operand, out: Operand, alpha: float, limit: float) -> None: ...

    def rope_store_kv(
        self, qkv: Operand, cos: Operand, sin: Operand, plan: AttentionPlan, k_pool: Operand, v_pool: Operand
    ) -> None: ...

    def attend(
        self,
        q: Operand,
        k_pool: Operand,
        v_pool: Operand,
        plan: AttentionPlan,
        out: Operand,
        rule: AttentionRule = PLAIN,
    ) -> None:
        """out[t] = attention of q[t] over the keys that plan and rule let token t see.

        q, out [tokens, heads, head_dim].
        """
        ...

    def select_rows(self, index: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """out[i] = x[index[i]] for one pair (x, out) or two; index int32 [rows]."""
        ...

    def copy_pages(self, pool: torch.Tensor, copies: Sequence[tuple[int, int, int]]) -> None:
        """See kernels/copy_pages.py."""
        ...


def ops_for(device: torch.device) -> Ops:
    """Numba on the CPU, Triton on an NVIDIA GPU; elsewhere the torch references, which run on any device."""
    if device.type == "cpu":
        return NumbaOps()
    if device.type == "cuda" and find_spec("triton") is not None:
        from niwaki.kernels.triton.ops import TritonOps  # an extra, and a second to load

        return TritonOps()
    return TorchOps()


def array_of(operand: Operand) -> Array:
    """Its memory as NumPy sees it. Raises TypeError where that is not the CPU's."""
    if operand.array is None:
        raise TypeError(f"a CPU kernel was given a tensor on {operand.tensor.device}")
    return operand.array


class Plain:
    """What the CPU and the references have in common: torch's own way."""

    reads_device_plan = False
    fused_experts = None

    def packed(self, weight: Weight, bias: torch.Tensor | None) -> Linear | None:
        return None

    def route(self, scores: torch.Tensor, per_token: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = scores.float().softmax(-1).topk(per_token, -1)
        return weights / weights.sum(-1, keepdim=True) if renormalise else weights, chosen

    def select_rows(self, index: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        for x, out in pairs:
            torch.index_select(x, 0, index, out=out)

    def copy_pages(self, pool: torch.Tensor, copies: Sequence[tuple[int, int, int]]) -> None:
        copy_pages(pool, copies)


class NumbaOps(Plain):
    """The CPU kernels; torch for matrix products of many rows."""

    def packed(self, weight: Weight, bias: torch.Tensor | None) -> Linear | None:
        return coded_linear(weight, bias) if isinstance(weight, Coded) else packed_linear(weight, bias)

    def linear(self, x: Operand, weight: Operand, bias: Operand | None, out: Operand) -> None:
        rows, matrix = array_of(x), array_of(weight)
        is_whole = rows.flags.c_contiguous  # the kernels of pairs step over all of it
        if is_whole and takes_few(rows, matrix):
            linear_few_pairs(rows, matrix, None if bias is None else array_of(bias), array_of(out))
        elif is_whole and takes(rows, matrix):
            linear_tiles(rows, matrix, None if bias is None else array_of(bias), array_of(out))
        elif is_few(rows):
            linear_few_rows(rows, matrix, None if bias is None else array_of(bias), array_of(out))
        else:
            linear_torch(x.tensor, weight.tensor, None if bias is None else bias.tensor, out.tensor)

    def rms_norm(self, x: Operand, weight: Operand, eps: float, out: Operand, offset: float = 0.0) -> None:
        rms_norm(array_of(x), array_of(weight), eps, array_of(out), offset)

    def add_rms_norm(
        self, x: Operand, delta: Operand, weight: Operand, eps: float, out: Operand, offset: float = 0.0
    ) -> None:
        add_rms_norm(array_of(x), array_of(delta), array_of(weight), eps, array_of(out), offset)

    def qk_norm(
        self, qkv: Operand, q_weight: Operand, k_weight: Operand, widths: tuple[int, int], eps: float, offset: float
    ) -> None:
        qk_norm(array_of(qkv), array_of(q_weight), array_of(k_weight), *widths, eps, offset)

    def silu_mul(self, gate_up: Operand, out: Operand) -> None:
        silu_mul(array_of(gate_up), array_of(out))

    def gelu_mul(self, gate_up: Operand, out: Operand) -> None:
        gelu_mul(array_of(gate_up), array_of(out))

    def clamped_mul(self, gate_up: Operand, out: Operand, alpha: float, limit: float) -> None:
        clamped_mul(array_of(gate_up), array_of(out), alpha, limit)

    def rope_store_kv(
        self, qkv: Operand, cos: Operand, sin: Operand, plan: AttentionPlan, k_pool: Operand, v_pool: Operand
    ) -> None:
        put = rope_store_small if is_small(k_pool.tensor) else rope_store_kv
        put(array_of(qkv), array_of(cos), array_of(sin), plan.positions, plan.slots, array_of(k_pool), array_of(v_pool))

    def attend(
        self,
        q: Operand,
        k_pool: Operand,
        v_pool: Operand,
        plan: AttentionPlan,
        out: Operand,
        rule: AttentionRule = PLAIN,
    ) -> None:
        decode, prefill, partial = plan.decode, plan.prefill, NOTHING
        segments: tuple[Segment, ...] = ()
        if plan.shared is not None and can_share(plan.shared, rule):
            decode, prefill, segments = plan.shared.decode, plan.shared.prefill, plan.shared.segments
        pools = array_of(k_pool), array_of(v_pool)
        if is_small(k_pool.tensor) and (prefill or segments):
            k_pool, v_pool, prefill, segments = widened(*pools, prefill, segments, q.tensor.shape[2])
        wide = array_of(q), array_of(k_pool), array_of(v_pool)
        by_tiles = can_tile(k_pool.tensor.dtype, k_pool.tensor.shape[1], k_pool.tensor.shape[3])
        if segments and by_tiles:
            partial = tile_segments(*wide, segments, rule)
        elif segments:
            partial = shared_attention(wide[0], k_pool.tensor, v_pool.tensor, segments, rule)
        if len(decode.token):
            paged_decode_attention(array_of(q), *pools, plan.page_table, decode, array_of(out), rule, partial)
        if prefill and by_tiles:
            tile_rows(*wide, prefill, array_of(out), rule, partial)
        elif prefill:
            prefill_attention(q.tensor, k_pool.tensor, v_pool.tensor, prefill, out.tensor, rule, partial)


class TorchOps(Plain):
    """The references, behind the same protocol."""

    def linear(self, x: Operand, weight: Operand, bias: Operand | None, out: Operand) -> None:
        linear_torch(x.tensor, weight.tensor, None if bias is None else bias.tensor, out.tensor)

    def rms_norm(self, x: Operand, weight: Operand, eps: float, out: Operand, offset: float = 0.0) -> None:
        out.tensor.copy_(rms_norm_torch(x.tensor, weight.tensor, eps, offset))

    def add_rms_norm(
        self, x: Operand, delta: Operand, weight: Operand, eps: float, out: Operand, offset: float = 0.0
    ) -> None:
        x.tensor.add_(delta.tensor)
        self.rms_norm(x, weight, eps, out, offset)

    def qk_norm(
        self, qkv: Operand, q_weight: Operand, k_weight: Operand, widths: tuple[int, int], eps: float, offset: float
    ) -> None:
        qk_norm_torch(qkv.tensor, q_weight.tensor, k_weight.tensor, *widths, eps, offset)

    def silu_mul(self, gate_up: Operand, out: Operand) -> None:
        out.tensor.copy_(silu_mul_torch(gate_up.tensor))

    def gelu_mul(self, gate_up: Operand, out: Operand) -> None:
        out.tensor.copy_(gelu_mul_torch(gate_up.tensor))

    def clamped_mul(self, gate_up: Operand, out: Operand, alpha: float, limit: float) -> None:
        out.tensor.copy_(clamped_mul_torch(gate_up.tensor, alpha, limit))

    def rope_store_kv(
        self, qkv: Operand, cos: Operand, sin: Operand, plan: AttentionPlan, k_pool: Operand, v_pool: Operand
    ) -> None:
        device = qkv.tensor.device
        positions = torch.from_numpy(plan.positions).to(device)
        slots = torch.from_numpy(plan.slots).to(device)
        rope_store_kv_torch(qkv.tensor, cos.tensor, sin.tensor, positions, slots, k_pool.tensor, v_pool.tensor)

    def attend(
        self,
        q: Operand,
        k_pool: Operand,
        v_pool: Operand,
        plan: AttentionPlan,
        out: Operand,
        rule: AttentionRule = PLAIN,
    ) -> None:
        device = q.tensor.device
        paged_decode_attention_torch(
            q.tensor,
            k_pool.tensor,
            v_pool.tensor,
            torch.from_numpy(plan.page_table).to(device),
            torch.from_numpy(plan.decode.token).to(device),
            torch.from_numpy(plan.decode.table_row).to(device),
            torch.from_numpy(plan.decode.length).to(device),
            out.tensor,
            rule,
        )
        prefill_attention_torch(q.tensor, k_pool.tensor, v_pool.tensor, plan.prefill, out.tensor, rule)
