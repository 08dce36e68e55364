"""The memory of a step's activations: one buffer each for the life of the model, and views of it by batch size.

For a small model a step is mostly launches, so every buffer and its NumPy view is made once for each batch size
(see kernels/operand.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch

from niwaki.kernels.operand import Operand
from niwaki.runtime.models.config import ModelConfig

KEPT_BUFFER_SIZES = 256  # batch sizes whose views are kept; making those of a larger batch costs little beside its work

_numbers = count()  # of memories


@dataclass(frozen=True, slots=True)
class Buffers:
    """The activations of one batch size. All batch sizes share memory: a step's values end with the step."""

    x: Operand  # [tokens, hidden] the residual stream
    normed: Operand  # [tokens, hidden]
    delta: Operand  # [tokens, hidden] what a block adds to x
    qkv: Operand  # [tokens, (heads + 2 kv_heads) x head_dim]; 1 kv_heads where keys are their own values
    q: Operand  # [tokens, heads, head_dim], a view of qkv
    attended: Operand  # [tokens, heads x head_dim]
    attended_heads: Operand  # the same as [tokens, heads, head_dim]
    gate_up: Operand  # [tokens, 2 x intermediate]
    activated: Operand  # [tokens, intermediate]
    memory: int  # a number of the memory that all this is in, and of no other


class Workspace:
    """Memory for the activations of a step, grown to the largest batch seen, and its views by batch size."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._capacity = 0
        self._memory: tuple[torch.Tensor, ...] = ()
        self._number = next(_numbers)
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
        self._kept.clear()
        self._memory, self._capacity = (), 0  # before: the old and the new together are more than a GPU's pool leaves
        config = self._config
        q_width = config.num_heads * config.head_dim
        widths = (
            config.hidden_size,
            config.hidden_size,
            config.hidden_size,
            q_width + config.kv_halves * config.num_kv_heads * config.head_dim,
            q_width,
            2 * config.intermediate_size,
            config.intermediate_size,
        )
        self._memory = tuple(torch.empty((tokens, w), dtype=self._dtype, device=self._device) for w in widths)
        self._capacity, self._number = tokens, next(_numbers)

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
            memory=self._number,
        )
