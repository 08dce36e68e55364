"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in the form that reads the cache as it is.

With c the latent vector of a token and r its rotated channels, head h has the key (K_h c, r) and the value V_h c. As
q . K_h c = (K_h^T q) . c, queries are multiplied by K_h instead of all keys, and what is attended, a mixture of latent
vectors, by V_h: attention of many query heads over one head of keys (r, c) that are their own values. A token takes
rank + rotary_dim numbers a layer in the cache, instead of heads x (head_dim + value_dim).

The price: a query's product with a key has rank + rotary_dim terms, three times those of a head's own key in
DeepSeek-V3, so a long prompt is slower than it would be with keys made anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import Linear, Ops
from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.rule import AttentionRule
from niwaki.runtime.models.attention import Pools, RopeTables, in_halves
from niwaki.runtime.models.config import Latent, ModelConfig
from niwaki.runtime.models.projection import Source, projection_of, read_projection
from niwaki.runtime.models.workspace import Buffers

NORM_EPS = 1e-6  # of the norms inside the block, whatever rms_norm_eps says


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """Queries through a latent vector of their own, or without one."""

    down: Linear | None  # hidden -> query_rank
    norm: Operand | None  # [query_rank]
    up: Linear  # query_rank, or hidden -> heads x (head_dim + rotary_dim)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    ops: Ops
    shape: Latent
    queries: LatentQueries
    latent: Linear  # hidden -> rank + rotary_dim
    norm: Operand  # [rank]
    to_key: torch.Tensor  # [heads, head_dim, rank]
    to_value: torch.Tensor  # [heads, rank, value_dim]
    rope: RopeTables
    rule: AttentionRule
    pools: Pools
    out: Linear  # heads x value_dim -> hidden

    def store(self, x: Operand, b: Buffers, plan: AttentionPlan) -> None:
        tokens, (heads, head_dim, _) = len(x.tensor), self.to_key.shape
        rotary = self.shape.rotary_dim
        q = self._queries(x).view(tokens, heads, head_dim + rotary)
        by_head = b.qkv.tensor.view(tokens, heads + 1, -1)  # the last one is the key
        by_head[:, :heads, :rotary] = q[..., head_dim:]
        by_head[:, :heads, rotary:] = torch.bmm(q[..., :head_dim].transpose(0, 1), self.to_key).transpose(0, 1)
        made = _product(self.latent, x, self.shape.rank + rotary)
        by_head[:, heads, :rotary] = made[:, self.shape.rank :]
        self.ops.rms_norm(
            Operand.of(made[:, : self.shape.rank]), self.norm, NORM_EPS, Operand.of(by_head[:, heads, rotary:])
        )
        self.ops.rope_store_kv(b.qkv, self.rope.cos, self.rope.sin, plan, self.pools.k, self.pools.stored_v)

    def attend(self, b: Buffers, plan: AttentionPlan) -> None:
        self.ops.attend(b.q, self.pools.k, self.pools.v, plan, b.attended_heads, self.rule)

    def finish(self, b: Buffers) -> None:
        mixed = b.attended_heads.tensor[..., self.shape.rotary_dim :]
        values = torch.bmm(mixed.transpose(0, 1), self.to_value)  # [heads, tokens, value_dim]
        self.out.forward(Operand.of(values.transpose(0, 1).flatten(1)), b.delta)

    def _queries(self, x: Operand) -> torch.Tensor:
        heads, head_dim, _ = self.to_key.shape
        width = heads * (head_dim + self.shape.rotary_dim)
        own = self.queries
        if own.down is None or own.norm is None:
            return _product(own.up, x, width)
        small = Operand.of(_product(own.down, x, len(own.norm.tensor)))
        self.ops.rms_norm(small, own.norm, NORM_EPS, small)
        return _product(own.up, small, width)


def read_latent_attention(
    ops: Ops, config: ModelConfig, shape: Latent, rope: RopeTables, pools: Pools, prefix: str, read: Source
) -> LatentAttention:
    heads, rank, bias = config.num_heads, shape.rank, config.attention_bias
    block = prefix + "self_attn."
    assert config.attention_scale is not None, "the family states it: it is of the whole key, not of what is cached"

    def turned(rows: torch.Tensor, of_head: int) -> torch.Tensor:
        """Rows of heads whose last `rotary_dim` channels are turned."""
        if not config.is_rope_interleaved:
            return rows
        by_head = rows.view(-1, of_head, *rows.shape[1:])
        last = by_head[:, of_head - shape.rotary_dim :]
        by_head[:, of_head - shape.rotary_dim :] = in_halves(
            last.flatten(0, 1), shape.rotary_dim, shape.rotary_dim
        ).view(last.shape)
        return rows

    up = "q_proj" if shape.query_rank is None else "q_b_proj"
    up_weight = turned(read(f"{block}{up}.weight"), shape.head_dim + shape.rotary_dim)
    queries = LatentQueries(None, None, projection_of(ops, read, [read.kept(up_weight)], []))
    if shape.query_rank is not None:
        down = read_projection(ops, read, block, ("q_a_proj",), bias)
        queries = LatentQueries(down, Operand.of(read(f"{block}q_a_layernorm.weight")), queries.up)
    latent = turned(read(f"{block}kv_a_proj_with_mqa.weight"), rank + shape.rotary_dim)
    latent_bias = [turned(read(f"{block}kv_a_proj_with_mqa.bias"), rank + shape.rotary_dim)] if bias else []
    both = read(f"{block}kv_b_proj.weight").view(heads, shape.head_dim + shape.value_dim, rank)
    return LatentAttention(
        ops=ops,
        shape=shape,
        queries=queries,
        latent=projection_of(ops, read, [read.kept(latent)], latent_bias),
        norm=Operand.of(read(f"{block}kv_a_layernorm.weight")),
        to_key=both[:, : shape.head_dim].contiguous(),
        to_value=both[:, shape.head_dim :].transpose(1, 2).contiguous(),
        rope=rope,
        rule=AttentionRule(scale=config.attention_scale),
        pools=pools,
        out=read_projection(ops, read, prefix, (config.names.attention_out,), bias),
    )


def _product(linear: Linear, x: Operand, width: int) -> torch.Tensor:
    out = x.tensor.new_empty((len(x.tensor), width))
    linear.forward(x, Operand.of(out))
    return out
