"""The first half of a layer: queries, keys and values of its heads, attention over the pool, and what it adds.

A layer is run in three steps, because the last layer of a step stops early: a prefill chunk that wants no logits needs
its keys stored and no more, and of the others only some tokens go on behind the attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from niwaki.kernels.coded import Coded
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import Linear, Ops
from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.rule import NO_CAP, NO_WINDOW, AttentionRule
from niwaki.runtime.models.config import LayerKind, ModelConfig, Temperature
from niwaki.runtime.models.projection import Source, projection_of, read_projection
from niwaki.runtime.models.workspace import Buffers


class Attention(Protocol):
    def store(self, x: Operand, b: Buffers, plan: AttentionPlan) -> None:
        """Keys and values of x [tokens, hidden] go to the pool, the queries to b.q."""
        ...

    def attend(self, b: Buffers, plan: AttentionPlan) -> None:
        """b.attended = attention of b.q over the pool."""
        ...

    def finish(self, b: Buffers) -> None:
        """b.delta = what the layer makes of b.attended."""
        ...


@dataclass(frozen=True, slots=True)
class RopeTables:
    cos: Operand  # float32 [positions, rotated / 2]
    sin: Operand


@dataclass(frozen=True, slots=True)
class QkNorm:
    q: Operand  # [head_dim], or [heads x head_dim]
    k: Operand  # [head_dim], or [kv_heads x head_dim]
    widths: tuple[int, int]  # columns of the queries, and of the keys
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class Pools:
    """Where a layer's keys and values lie: [pages, page_size, kv_heads, head_dim]."""

    k: Operand
    v: Operand  # `k` again where keys are their own values
    stored_v: Operand  # of no pages then


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Every head has its own keys and values, or shares those of its group."""

    ops: Ops
    qkv: Linear  # hidden -> (heads + 2 kv_heads) x head_dim
    qk_norm: QkNorm | None
    rope: RopeTables
    temperatures: torch.Tensor | None  # float32 [positions, 1, 1]: factors of the queries
    rule: AttentionRule
    pools: Pools
    out: Linear  # heads x head_dim -> hidden

    def store(self, x: Operand, b: Buffers, plan: AttentionPlan) -> None:
        self.qkv.forward(x, b.qkv)
        if self.qk_norm is not None:
            norm = self.qk_norm
            self.ops.qk_norm(b.qkv, norm.q, norm.k, norm.widths, norm.eps, norm.offset)
        if self.temperatures is not None:
            b.q.tensor.mul_(self.temperatures[_positions(plan, self.temperatures.device)])
        self.ops.rope_store_kv(b.qkv, self.rope.cos, self.rope.sin, plan, self.pools.k, self.pools.stored_v)

    def attend(self, b: Buffers, plan: AttentionPlan) -> None:
        self.ops.attend(b.q, self.pools.k, self.pools.v, plan, b.attended_heads, self.rule)

    def finish(self, b: Buffers) -> None:
        self.out.forward(b.attended, b.delta)


def read_attention(
    ops: Ops,
    config: ModelConfig,
    kind: LayerKind,
    rope: RopeTables,
    pools: Pools,
    prefix: str,
    read: Source,
    like: torch.Tensor,
) -> HeadAttention:
    """`like`: a tensor of the model's type on its device."""
    names, head_dim = config.names, config.head_dim
    has_bias = config.attention_bias or config.qkv_bias
    if config.is_rope_interleaved:
        # Queries and keys in another order of channels, both in the same, have the same products.
        weights = [read.weight(f"{prefix}{name}.weight") for name in names.qkv]
        biases = [read(f"{prefix}{name}.bias") for name in names.qkv] if has_bias else []
        turn = partial(in_halves, head_dim=head_dim, turned=config.rotary_dim or head_dim)
        weights[:2] = [part.of_rows(turn) if isinstance(part, Coded) else turn(part) for part in weights[:2]]
        biases[:2] = map(turn, biases[:2])
        qkv = projection_of(ops, read, weights, biases)
    else:
        qkv = read_projection(ops, read, prefix, names.qkv, has_bias)
    temperatures = None
    if config.temperature is not None and (kind.rope == "none" or config.temperature.is_everywhere):
        temperatures = _temperatures(config.temperature, len(rope.cos.tensor)).to(rope.cos.tensor.device)
    return HeadAttention(
        ops=ops,
        qkv=qkv,
        qk_norm=_read_norms(config, prefix, read, like) if kind.has_qk_norm else None,
        rope=rope,
        temperatures=temperatures,
        rule=AttentionRule(
            scale=head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            window=NO_WINDOW if kind.window is None else kind.window,
            chunk=NO_WINDOW if kind.chunk is None else kind.chunk,
            soft_cap=NO_CAP if config.attention_cap is None else config.attention_cap,
            sinks=Operand.of(read(f"{prefix}self_attn.sinks").float()) if config.has_sinks else None,
        ),
        pools=pools,
        out=read_projection(ops, read, prefix, (names.attention_out,), config.attention_bias),
    )


def in_halves(rows: torch.Tensor, head_dim: int, turned: int) -> torch.Tensor:
    """Rows [heads x head_dim, ...] of heads whose channels 2i and 2i + 1 turn together, of the first `turned`, in the
    order in which channels i and i + turned / 2 do."""
    order = torch.arange(head_dim, device=rows.device)
    order[:turned] = order[:turned].view(-1, 2).t().flatten()
    return rows.view(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def _read_norms(config: ModelConfig, prefix: str, read: Source, like: torch.Tensor) -> QkNorm | None:
    if config.qk_norm is None:
        return None
    if config.qk_norm == "bare":
        q = k = like.new_full((config.head_dim,), 1.0 - config.norm_offset)
    else:
        q, k = (read(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
    widths = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return QkNorm(Operand.of(q), Operand.of(k), widths, config.rms_norm_eps, config.norm_offset)


def _temperatures(rule: Temperature, positions: int) -> torch.Tensor:
    floors = torch.floor((torch.arange(positions, dtype=torch.float32) + rule.offset) / rule.floor)
    return (torch.log1p(floors) * rule.scale + 1.0)[:, None, None]


def _positions(plan: AttentionPlan, device: torch.device) -> torch.Tensor:
    if plan.on_device is not None:
        return plan.on_device.positions
    return torch.from_numpy(plan.positions).to(device)
