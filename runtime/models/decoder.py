"""The decoder of all families on a paged KV pool: weights as plain tensors, one forward pass over a ragged batch.

Owns the weights, the pool and the step's buffers. Knows pages only through an `AttentionPlan`; all arithmetic is
`kernels.ops`. What a family does differently stands in the config and becomes, at loading, a norm or rule or table that
a layer has or has not. For a small model a step is mostly launches, so projections that read the same input are fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from niwaki.kernels.checks import SCALE_BYTES
from niwaki.kernels.copy_pages import planes_of, read_pages, write_pages
from niwaki.kernels.float_logits import float_logits
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import Ops, ops_for
from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.rope import rope_tables, unrotated_tables
from niwaki.kernels.small_kv import KINDS
from niwaki.kernels.transfer import on_device
from niwaki.runtime.models.attention import Attention, Pools, RopeTables, read_attention
from niwaki.runtime.models.config import EMBEDDING, FINAL_NORM, HEAD, LayerKind, ModelConfig
from niwaki.runtime.models.experts import read_experts
from niwaki.runtime.models.latent import read_latent_attention
from niwaki.runtime.models.layer import Layer
from niwaki.runtime.models.mlp import DenseMlp, Mlp, gate_of
from niwaki.runtime.models.projection import Source, projection_of, read_projection
from niwaki.runtime.models.stack import Stack
from niwaki.runtime.models.workspace import Buffers, Workspace

ALIGNMENT = 64  # bytes: a vector register, which kernels read whole


@dataclass(frozen=True, slots=True)
class Part:
    """What belongs to one call of `forward` of several at once."""

    body: Workspace
    tail: Workspace  # the rows whose logits are wanted, from the last layer's end on
    stored: Callable[[], object]  # called in each layer when the keys are stored, and before any is read


class Decoder:
    """`read` gives each of `expected_tensors`, once; its dtype and device are the model's."""

    def __init__(
        self,
        config: ModelConfig,
        read: Source,
        *,
        num_pages: int,
        page_size: int,
        kv_dtype: str = "auto",
        ops: Ops | None = None,
    ) -> None:
        device, dtype = read.device, read.dtype
        self._config = config
        self._device = device
        self._dtype = dtype
        self._ops = ops or ops_for(device)
        # In the model's dtype, as Gemma's was trained: sqrt(2304) = 48 is exact, sqrt(1152) is not.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        # Zeros, not empty: a page that is gathered whole must not bring a NaN from memory that was never written.
        # A key of 8 bits: numbers and their scale, see kernels/small_kv.py.
        size = config.head_dim + (SCALE_BYTES if kv_dtype in KINDS else 0)
        shape = (config.num_layers, config.kv_halves, num_pages, page_size, config.num_kv_heads, size)
        self._pool = _zeros(shape, KINDS.get(kv_dtype, dtype), device)
        # No sequence can be longer than the pool, and a table for 131,072 positions takes 64 MB.
        self._ropes = self._rope_tables(min(config.context_length, num_pages * page_size))
        read = read.behind(config.prefix)
        self._embedding = read(EMBEDDING)  # [vocab, hidden]
        self._first_norm = self._read_norm(read, 0, config.names.attention_norm)
        self._norm = Operand.of(read(FINAL_NORM))
        self._layers = tuple(self._read_layer(index, kind, read) for index, kind in enumerate(config.layer_kinds))
        head = self._embedding if config.tie_embeddings else read(HEAD)  # [vocab, hidden]
        self._head = projection_of(self._ops, read, [read.head(head)], [])
        self._whole = self.new_part(lambda: None)
        self._stack = Stack.of(config, self._ops, self._layers, self._first_norm, self._head)

    def new_part(self, stored: Callable[[], object]) -> Part:
        """What `forward` needs to run beside itself. It calls `stored` in each layer before any key is read."""
        body, tail = (Workspace(self._config, self._device, self._dtype) for _ in range(2))
        return Part(body, tail, stored)

    @property
    def has_any_size(self) -> bool:
        """Whether each step is one native call, which divides its work among threads itself."""
        return self._stack is not None and self._stack.has_any_size

    def forward(
        self,
        token_ids: torch.Tensor,
        plan: AttentionPlan,
        wanted: npt.NDArray[np.int64] | None,
        part: Part | None = None,
        threads: int = 1,
        out: torch.Tensor | None = None,
        as_computed: bool = False,
    ) -> torch.Tensor:
        """Logits float32 [len(wanted), vocab] of the batch's tokens `wanted`, of all where it is None; written to `out`
        where there is one. With `as_computed` they may be bfloat16.

        token_ids int32 or int64 [tokens], in the order of the plan. Keys and values of all tokens are stored. Calls at
        the same time need a `part` each; one without a part may use so many `threads`.
        """
        with torch.inference_mode():
            if part is None and self._stack is not None:
                logits = self._forward_at_once(self._stack, token_ids, plan, wanted, threads)
                if logits is not None and not (as_computed and self._caps_nothing):
                    logits = self._capped(float_logits(logits))
                if logits is not None:
                    return logits if out is None else out.copy_(logits)
            return self._forward(token_ids, plan, wanted, part or self._whole, out)

    def _forward_at_once(
        self,
        stack: Stack,
        token_ids: torch.Tensor,
        plan: AttentionPlan,
        wanted: npt.NDArray[np.int64] | None,
        threads: int,
    ) -> torch.Tensor | None:
        """As `forward`, in one native call, as they were computed; None where there is none for such a step."""
        tokens = plan.num_tokens
        num_wanted = tokens if wanted is None else len(wanted)
        b = self._whole.body.of_size(tokens)
        tail = self._whole.tail.of_size(num_wanted) if 0 < num_wanted < tokens else None
        lines = stack.lines(plan, b, tail, num_wanted, threads)
        if lines is None:
            return None
        self._embed(token_ids, b)
        logits = torch.empty((num_wanted, self._config.vocab_size), dtype=self._dtype, device=self._device)
        stack.forward(lines, plan, wanted, logits, threads)
        return logits

    def _embed(self, token_ids: torch.Tensor, b: Buffers) -> None:
        torch.index_select(self._embedding, 0, token_ids, out=b.x.tensor)
        if self._embedding_scale != 1.0:
            b.x.tensor.mul_(self._embedding_scale)

    def _forward(
        self,
        token_ids: torch.Tensor,
        plan: AttentionPlan,
        wanted: npt.NDArray[np.int64] | None,
        part: Part,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        config, ops = self._config, self._ops
        eps, offset = config.rms_norm_eps, config.norm_offset
        b = part.body.of_size(plan.num_tokens)
        index = None
        if wanted is not None and 0 < len(wanted) < plan.num_tokens:  # before a device computes: it would be waited for
            index = on_device(wanted.astype(np.int32), self._device)
        self._embed(token_ids, b)
        entering = b.x  # what the next block reads
        if self._first_norm is not None:
            ops.rms_norm(b.x, self._first_norm, eps, b.normed, offset)
            entering = b.normed
        last = self._layers[-1]
        for layer in self._layers:
            layer.attention.store(entering, b, plan)
            part.stored()
            if layer is last and wanted is not None and not len(wanted):
                return torch.empty((0, config.vocab_size), dtype=torch.float32, device=self._device)
            layer.attention.attend(b, plan)
            if layer is last and index is not None:
                b = self._select(b, index, part.tail)  # nothing after this mixes tokens: the others need no more work
            layer.attention.finish(b)
            entering = self._add(b, layer.attention_post_norm, layer.mlp_norm)
            layer.mlp.forward(entering, b)
            entering = self._add(b, layer.mlp_post_norm, layer.next_norm)
        logits = torch.empty((len(entering.tensor), config.vocab_size), dtype=self._dtype, device=self._device)
        self._head.forward(entering, Operand.of(logits))
        return self._capped(logits.float() if out is None else out.copy_(logits))

    def buffers(self, tokens: int) -> Buffers:
        """The activations of a batch of so many tokens. A CUDA graph writes to them, so it must keep them."""
        return self._whole.body.of_size(tokens)

    def copy_pages(self, copies: list[tuple[int, int, int]]) -> None:
        """See kernels/copy_pages.py."""
        self._ops.copy_pages(self._pool, copies)

    def host_planes(self) -> npt.NDArray[np.uint8] | None:
        """The pool's own memory, see kernels/copy_pages.py; None where it is a device's."""
        return planes_of(self._pool) if self._device.type == "cpu" else None

    def read_pages(self, page_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """See kernels/copy_pages.py."""
        return read_pages(self._pool, page_ids)

    def write_pages(self, page_ids: Sequence[int], contents: Iterable[npt.NDArray[np.uint8]]) -> int:
        """See kernels/copy_pages.py."""
        return write_pages(self._pool, page_ids, contents)

    def _add(self, b: Buffers, post_norm: Operand | None, norm: Operand | None) -> Operand:
        """x += delta, which is normalised and scaled before where the model does so. Returns what the next block
        reads: the sum, normalised where it has a norm."""
        config = self._config
        if post_norm is not None:
            self._ops.rms_norm(b.delta, post_norm, config.rms_norm_eps, b.delta, config.norm_offset)
        if config.residual_scale != 1.0:
            b.delta.tensor.mul_(config.residual_scale)
        if norm is None:
            b.x.tensor.add_(b.delta.tensor)
            return b.x
        self._ops.add_rms_norm(b.x, b.delta, norm, config.rms_norm_eps, b.normed, config.norm_offset)
        return b.normed

    @property
    def _caps_nothing(self) -> bool:
        return self._config.logit_scale == 1.0 and self._config.logit_cap is None

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        if self._config.logit_scale != 1.0:
            logits.mul_(self._config.logit_scale)
        if self._config.logit_cap is not None:
            logits.div_(self._config.logit_cap).tanh_().mul_(self._config.logit_cap)
        return logits

    def _select(self, b: Buffers, index: torch.Tensor, space: Workspace) -> Buffers:
        tail = space.of_size(len(index))
        self._ops.select_rows(index, (b.x.tensor, tail.x.tensor), (b.attended.tensor, tail.attended.tensor))
        return tail

    def _rope_tables(self, positions: int) -> dict[str, RopeTables]:
        """By the names of `LayerKind.rope`, those that the model has."""
        config = self._config
        width = config.rotary_dim or config.head_dim
        tables = {"main": rope_tables(width, config.rope_theta, config.rope_scaling, positions)}
        if config.local_rope is not None:
            tables["local"] = rope_tables(width, config.local_rope.theta, config.local_rope.scaling, positions)
        tables["none"] = unrotated_tables(positions)
        return {
            name: RopeTables(Operand.of(cos.to(self._device)), Operand.of(sin.to(self._device)))
            for name, (cos, sin) in tables.items()
        }

    def _read_layer(self, index: int, kind: LayerKind, read: Source) -> Layer:
        config, names = self._config, self._config.names
        prefix = f"model.layers.{index}."
        is_last = index == config.num_layers - 1
        return Layer(
            attention=self._read_attention(index, kind, prefix, read),
            attention_post_norm=self._read_norm(read, index, names.attention_post_norm),
            mlp_norm=self._read_norm(read, index, names.mlp_norm),
            mlp=self._read_mlp(prefix, kind, read),
            mlp_post_norm=self._read_norm(read, index, names.mlp_post_norm),
            next_norm=self._norm if is_last else self._read_norm(read, index + 1, names.attention_norm),
        )

    def _read_attention(self, index: int, kind: LayerKind, prefix: str, read: Source) -> Attention:
        config, rope = self._config, self._ropes[kind.rope]
        keys, values = self._pool[index, 0], self._pool[index, -1]
        stored_values = values if config.latent is None else values[:0]
        pools = Pools(Operand.of(keys), Operand.of(values), Operand.of(stored_values))
        if config.latent is not None:
            return read_latent_attention(self._ops, config, config.latent, rope, pools, prefix, read)
        return read_attention(self._ops, config, kind, rope, pools, prefix, read, self._embedding)

    def _read_norm(self, read: Source, index: int, name: str | None) -> Operand | None:
        return None if name is None else Operand.of(read(f"model.layers.{index}.{name}.weight"))

    def _read_mlp(self, prefix: str, kind: LayerKind, read: Source) -> Mlp:
        config, names, gate = self._config, self._config.names, gate_of(self._ops, self._config)
        if kind.is_sparse and config.experts is not None:
            return read_experts(self._ops, gate, config, config.experts, prefix, read)
        gate_up = read_projection(self._ops, read, prefix, names.gate_up, config.mlp_bias)
        return DenseMlp(gate, gate_up, read_projection(self._ops, read, prefix, (names.down,), config.mlp_bias))


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that on a CPU take memory only as they are written. (`torch.zeros` writes them all at once.)"""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[first : first + size]).view(dtype).view(shape)
