"""The Llama architecture on a paged KV pool: weights as plain tensors, one forward pass over a ragged batch.

Owns the weights, the pool and the step's buffers. Knows pages only through an `AttentionPlan`; all arithmetic is
`kernels.ops`. For a small model a step is mostly launches, so projections that read the same input are
fused, and every buffer and its NumPy view is made once for each batch size (see kernels/operand.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from niwaki.kernels.copy_pages import copy_pages
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import ops_for
from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.rope import rope_tables
from niwaki.runtime.models.config import ModelConfig

KEPT_BUFFER_SIZES = 256  # batch sizes whose views are kept; making those of a larger batch costs little beside its work


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x weight^T + bias."""

    weight: Operand  # [outputs, inputs]
    bias: Operand | None  # [outputs]


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Operand  # [hidden]
    qkv: Projection  # hidden -> (heads + 2 kv_heads) x head_dim
    attention_out: Projection  # heads x head_dim -> hidden
    mlp_norm: Operand  # [hidden]
    gate_up: Projection  # hidden -> 2 x intermediate
    down: Projection  # intermediate -> hidden
    k_pool: Operand  # [pages, page_size, kv_heads, head_dim]
    v_pool: Operand


@dataclass(frozen=True, slots=True)
class Buffers:
    """The activations of one batch size. All batch sizes share memory: a step's values end with the step."""

    x: Operand  # [tokens, hidden] the residual stream
    normed: Operand  # [tokens, hidden]
    delta: Operand  # [tokens, hidden] what a block adds to x
    qkv: Operand  # [tokens, (heads + 2 kv_heads) x head_dim]
    q: Operand  # [tokens, heads, head_dim], a view of qkv
    attended: Operand  # [tokens, heads x head_dim]
    attended_heads: Operand  # the same as [tokens, heads, head_dim]
    gate_up: Operand  # [tokens, 2 x intermediate]
    activated: Operand  # [tokens, intermediate]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config has, by its name in the file, with its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        projections = {
            "self_attn.q_proj": (q_width, hidden, config.attention_bias),
            "self_attn.k_proj": (kv_width, hidden, config.attention_bias),
            "self_attn.v_proj": (kv_width, hidden, config.attention_bias),
            "self_attn.o_proj": (hidden, q_width, config.attention_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        for name, (outputs, inputs, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (outputs,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class Llama:
    """`read(name)` gives each of `expected_tensors`, once, in the dtype and on the device of the model."""

    def __init__(
        self,
        config: ModelConfig,
        read: Callable[[str], torch.Tensor],
        *,
        num_pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._ops = ops_for(device)
        # Zeros, not empty: a page that is gathered whole must not bring a NaN from memory that was never written.
        self._pool = torch.zeros(
            (config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim),
            dtype=dtype,
            device=device,
        )
        self._embedding = read("model.embed_tokens.weight")  # [vocab, hidden]
        self._layers = tuple(self._read_layer(index, read) for index in range(config.num_layers))
        self._norm = Operand.of(read("model.norm.weight"))
        self._head = Operand.of(self._embedding if config.tie_embeddings else read("lm_head.weight"))  # [vocab, hidden]
        # No sequence can be longer than the pool, and a table for 131,072 positions takes 64 MB.
        positions = min(config.context_length, num_pages * page_size)
        cos, sin = rope_tables(config.head_dim, config.rope_theta, config.rope_scaling, positions)
        self._cos, self._sin = Operand.of(cos.to(device)), Operand.of(sin.to(device))
        self._body = Workspace(config, device, dtype)
        self._tail = Workspace(config, device, dtype)  # the rows whose logits are wanted, from the last layer's end on

    def forward(
        self, token_ids: torch.Tensor, plan: AttentionPlan, wanted: npt.NDArray[np.int64] | None
    ) -> torch.Tensor:
        """Logits float32 [len(wanted), vocab] of the batch's tokens `wanted`, of all where it is None.

        token_ids int32 or int64 [tokens], in the order of the plan. Keys and values of all tokens are stored.
        """
        with torch.inference_mode():
            return self._forward(token_ids, plan, wanted)

    def _forward(
        self, token_ids: torch.Tensor, plan: AttentionPlan, wanted: npt.NDArray[np.int64] | None
    ) -> torch.Tensor:
        config, ops, layers = self._config, self._ops, self._layers
        b = self._body.of_size(plan.num_tokens)
        torch.index_select(self._embedding, 0, token_ids, out=b.x.tensor)
        ops.rms_norm(b.x, layers[0].attention_norm, config.rms_norm_eps, b.normed)
        for index, layer in enumerate(layers):
            if index:
                ops.add_rms_norm(b.x, b.delta, layer.attention_norm, config.rms_norm_eps, b.normed)
            ops.linear(b.normed, layer.qkv.weight, layer.qkv.bias, b.qkv)
            ops.rope_store_kv(b.qkv, self._cos, self._sin, plan, layer.k_pool, layer.v_pool)
            is_last = index == len(layers) - 1
            if is_last and wanted is not None and not len(wanted):
                break
            ops.attend(b.q, layer.k_pool, layer.v_pool, plan, b.attended_heads)
            if is_last and wanted is not None and len(wanted) < plan.num_tokens:
                b = self._select(b, wanted)  # nothing after this mixes tokens: the others need no more work
            ops.linear(b.attended, layer.attention_out.weight, layer.attention_out.bias, b.delta)
            ops.add_rms_norm(b.x, b.delta, layer.mlp_norm, config.rms_norm_eps, b.normed)
            ops.linear(b.normed, layer.gate_up.weight, layer.gate_up.bias, b.gate_up)
            ops.silu_mul(b.gate_up, b.activated)
            ops.linear(b.activated, layer.down.weight, layer.down.bias, b.delta)
        else:
            ops.add_rms_norm(b.x, b.delta, self._norm, config.rms_norm_eps, b.normed)
            logits = torch.empty((len(b.x.tensor), config.vocab_size), dtype=self._dtype, device=self._device)
            ops.linear(b.normed, self._head, None, Operand.of(logits))
            return logits.float()
        return torch.empty((0, config.vocab_size), dtype=torch.float32, device=self._device)

    def copy_pages(self, copies: list[tuple[int, int, int]]) -> None:
        """See kernels/copy_pages.py."""
        copy_pages(self._pool, copies)

    def _select(self, b: Buffers, wanted: npt.NDArray[np.int64]) -> Buffers:
        index = torch.from_numpy(wanted).to(self._device)
        tail = self._tail.of_size(len(wanted))
        torch.index_select(b.x.tensor, 0, index, out=tail.x.tensor)
        torch.index_select(b.attended.tensor, 0, index, out=tail.attended.tensor)
        return tail

    def _read_layer(self, index: int, read: Callable[[str], torch.Tensor]) -> Layer:
        prefix = f"model.layers.{index}."

        def projection(has_bias: bool, *names: str) -> Projection:
            weight = torch.cat([read(f"{prefix}{name}.weight") for name in names])
            bias = torch.cat([read(f"{prefix}{name}.bias") for name in names]) if has_bias else None
            return Projection(Operand.of(weight), None if bias is None else Operand.of(bias))

        config = self._config
        return Layer(
            attention_norm=Operand.of(read(prefix + "input_layernorm.weight")),
            qkv=projection(config.attention_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            attention_out=projection(config.attention_bias, "self_attn.o_proj"),
            mlp_norm=Operand.of(read(prefix + "post_attention_layernorm.weight")),
            gate_up=projection(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
            down=projection(config.mlp_bias, "mlp.down_proj"),
            k_pool=Operand.of(self._pool[index, 0]),
            v_pool=Operand.of(self._pool[index, 1]),
        )


class Workspace:
    """Memory for the activations of a step, grown to the largest batch seen, and its views by batch size."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._capacity = 0
        self._memory: tuple[torch.Tensor, ...] = ()
        self._kept: dict[int, Buffers] = {}

    def of_size(self, tokens: int) -> Buffers:
        kept = self._kept.get(tokens)
        if kept is not None:
            return kept
        if tokens > self._capacity:
            self._grow(max(tokens, 2 * self._capacity, 16))
        buffers = self._views(tokens)
        if tokens <= KEPT_BUFFER_SIZES:
            self._kept[tokens] = buffers
        return buffers

    def _grow(self, tokens: int) -> None:
        config = self._config
        q_width = config.num_heads * config.head_dim
        widths = (
            config.hidden_size,
            config.hidden_size,
            config.hidden_size,
            q_width + 2 * config.num_kv_heads * config.head_dim,
            q_width,
            2 * config.intermediate_size,
            config.intermediate_size,
        )
        self._memory = tuple(torch.empty((tokens, w), dtype=self._dtype, device=self._device) for w in widths)
        self._capacity = tokens
        self._kept.clear()

    def _views(self, tokens: int) -> Buffers:
        heads, head_dim = self._config.num_heads, self._config.head_dim
        x, normed, delta, qkv, attended, gate_up, activated = (memory[:tokens] for memory in self._memory)
        return Buffers(
            x=Operand.of(x),
            normed=Operand.of(normed),
            delta=Operand.of(delta),
            qkv=Operand.of(qkv),
            q=Operand.of(qkv.view(tokens, -1, head_dim)[:, :heads]),
            attended=Operand.of(attended),
            attended_heads=Operand.of(attended.view(tokens, heads, head_dim)),
            gate_up=Operand.of(gate_up),
            activated=Operand.of(activated),
        )
