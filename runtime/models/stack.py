"""The layers of a plain decoder as the lines of kernels/layers.py, so that a small step is one native call.

Plain: each layer normalises, attends to all keys by scores as they are, and gates by SiLU; weights, activations and
cache are bfloat16. That is Llama, Mistral, Qwen 2 and 3, Phi 3 and what else is built like them, Ministral 3 where its
queries do not grow yet. Other models go from kernel to kernel as decoder.py tells; so do steps of many tokens where
torch does their products best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from niwaki.kernels import pieces
from niwaki.kernels.coded import CodedLinear
from niwaki.kernels.coded_line import OUT, X, line_of
from niwaki.kernels.crew import Crew, Geometry
from niwaki.kernels.few_pairs import MAX_ROWS as MAX_ROWS_OF_PAIRS
from niwaki.kernels.few_pairs import takes_few
from niwaki.kernels.linear import is_few, most_few_rows
from niwaki.kernels.linear_tiles import ROWS_AT_ONCE, takes
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.ops import Linear, NumbaOps, array_of
from niwaki.kernels.packed import PackedLinear
from niwaki.kernels.pieces import LINE_WIDTH
from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.rule import NO_CAP
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd import LANES
from niwaki.kernels.tile_attention import can_tile
from niwaki.runtime.models.attention import HeadAttention
from niwaki.runtime.models.config import ModelConfig
from niwaki.runtime.models.layer import Layer
from niwaki.runtime.models.mlp import DenseMlp
from niwaki.runtime.models.projection import Projection
from niwaki.runtime.models.workspace import Buffers

# Tokens of a step that is one call where torch has a quicker product of more: of one thread, and of several.
MAX_TOKENS_ALONE = 64
MAX_TOKENS = 512
WORK_OF_A_THREAD = 10_000_000  # multiply-adds: some 0.2 ms, for which one is worth waking
LEAST_ROWS = 4  # the weights are read once however few they are, which takes as long as multiplying so many

# Steps of so many tokens and more, of which at most one in so many wants logits: in the last layer only these ask. 42
# rows of 48 tokens behind 512 take 0.977 of the time, five prompts of 384 0.978, eight rows of 8 0.997 (L15, one thread
# of an EPYC, Zen 4, 28 November 2026, medians of 7, 7 and 41 in turn).
LEAST_SPARED, SPARED = 32, 4

NOBODY = np.empty(0, np.int64)
WIDTH = 6  # of a line of a product: columns of what it writes


@dataclass(frozen=True, slots=True)
class PlainLayer:
    attention: HeadAttention
    mlp_norm: Operand
    mlp: DenseMlp
    next_norm: Operand


@dataclass(frozen=True, slots=True)
class _Apart:
    """The product of a layer's queries, keys and values as two."""

    queries: Projection
    keys_values: Projection


@dataclass(frozen=True, slots=True)
class _Lines:
    memory: tuple[int, int]  # of the activations, and of those of the wanted tokens (`Buffers.memory`)
    table: Int64s | None  # None where a product has no kernel for so many tokens


class Stack:
    """`forward` does what lies between the embeddings and the logits. `has_any_size`: of any number of tokens."""

    def __init__(
        self, config: ModelConfig, plain: Sequence[PlainLayer], first_norm: Operand, head: Linear, num_pages: int
    ) -> None:
        self._layers = plain
        self._first_norm = first_norm
        self._head = head
        self._width = config.hidden_size
        self._q_width = config.num_heads * config.head_dim
        self._num_positions = len(plain[0].attention.rope.cos.tensor)
        self._num_plain_positions = min(_plain_positions(one.attention, self._num_positions) for one in plain)
        pool = plain[0].attention.pools.k.tensor
        geometry = Geometry(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            pool.shape[1],
            num_pages,
            config.rms_norm_eps,
            config.norm_offset,
            plain[0].attention.rule.scale_for(config.head_dim),
        )
        products = [
            each for one in plain for each in (one.attention.qkv, one.attention.out, one.mlp.gate_up, one.mlp.down)
        ]
        self._work = sum(math.prod(_shape(each)) for each in products)  # multiply-adds of a token
        self._work_of_a_key = 2 * len(plain) * self._q_width  # for each token that sees it
        self._crew = Crew(geometry, 14 * len(plain) + 5)
        self._is_plain_everywhere = self._num_plain_positions == self._num_positions
        self.has_any_size = all(map(_takes_any, (*products, head))) and self._is_plain_everywhere
        self._kept: dict[tuple[int, int, bool, bool], _Lines] = {}
        self._last_apart = _apart(plain[-1].attention, self._q_width)

    @classmethod
    def of(
        cls, config: ModelConfig, ops: object, layers: Sequence[Layer], first_norm: Operand | None, head: Linear
    ) -> Stack | None:
        """None where a layer is not plain, or this processor has no kernels for it."""
        plain = [_plain(layer, ops) for layer in layers]
        if type(ops) is not NumbaOps or first_norm is None or config.residual_scale != 1.0 or not _is_one_kind(head):
            return None
        found = [layer for layer in plain if layer is not None]
        if not found or len(found) < len(plain):
            return None
        pool = found[0].attention.pools.k.tensor
        if not can_tile(pool.dtype, pool.shape[1], pool.shape[3]):
            return None
        return cls(config, found, first_norm, head, len(pool))

    def lines(
        self, plan: AttentionPlan, body: Buffers, tail: Buffers | None, num_wanted: int, threads: int
    ) -> Int64s | None:
        """The table of a step of these buffers; None where it must go from kernel to kernel."""
        tokens = len(body.x.tensor)
        if not self._is_plain_everywhere and int(plan.positions.max()) >= self._num_plain_positions:
            return None
        if not self.has_any_size and tokens > (MAX_TOKENS if threads > 1 else MAX_TOKENS_ALONE):
            return None
        memory = body.memory, (body if tail is None else tail).memory
        most = _many()
        spares = self._last_apart is not None and tokens >= LEAST_SPARED and num_wanted <= tokens // SPARED
        kind = min(tokens, most), min(num_wanted, most), tail is None, spares
        kept = self._kept.get(kind)
        if kept is None or kept.memory != memory:
            kept = _Lines(memory, self._written(body, tail, num_wanted, spares))
            self._kept[kind] = kept
        return kept.table

    def forward(
        self, lines: Int64s, plan: AttentionPlan, wanted: Int64s | None, logits: torch.Tensor, threads: int
    ) -> None:
        """From the embeddings in the body's x to `logits` [wanted tokens, vocab], bfloat16; `wanted` ascending.

        Raises:
            ValueError: a position is beyond the model's; nothing was stored then.
        """
        if (last := int(plan.positions.max())) >= self._num_positions:
            raise ValueError(f"position {last} is beyond the {self._num_positions} positions of the model")
        threads = max(1, min(threads, self._work_of(plan) // WORK_OF_A_THREAD))
        self._crew.run(lines, plan, NOBODY if wanted is None else wanted, array_of(Operand.of(logits)), threads)

    def _work_of(self, plan: AttentionPlan) -> int:
        """Multiply-adds of a step, about."""
        attended = int(plan.positions.sum()) * self._work_of_a_key
        return max(plan.num_tokens, LEAST_ROWS) * self._work + attended

    def _written(self, body: Buffers, tail: Buffers | None, num_wanted: int, spares: bool) -> Int64s | None:
        """`spares`: in the last layer only wanted tokens ask."""
        table: list[list[int] | None] = []
        chain: list[list[int] | None] = [[pieces.NORM, 0, *_at(body.x, self._first_norm, body.normed), self._width]]
        for layer in self._layers:
            attention, b, is_tail = layer.attention, body, 0
            pools, qkv_width = attention.pools, body.qkv.tensor.shape[1]
            qkv, width = attention.qkv, qkv_width
            apart = self._last_apart if spares and layer is self._layers[-1] else None
            if apart is not None:
                qkv, width = apart.keys_values, qkv_width - self._q_width  # without queries between
            chain.append(_product(qkv, body.normed, body.qkv))
            if attention.qk_norm is not None:
                norm = attention.qk_norm
                lengths = [len(norm.q.tensor), len(norm.k.tensor)]
                chain.append([pieces.QK_NORM, 0, *_at(body.qkv), qkv_width, *_at(norm.q, norm.k), *lengths])
            tables = *_at(attention.rope.cos, attention.rope.sin), *attention.rope.cos.tensor.shape
            chain.append([pieces.STORE, 0, *_at(body.qkv), width, *tables, *_at(pools.k, pools.v)])
            table += _chained(chain, 0)
            if layer is self._layers[-1]:
                if not num_wanted:
                    break
                if tail is not None:
                    b, is_tail = tail, 1
            if apart is not None and tail is not None:
                pairs = *_at(body.normed, tail.normed), self._width, *_at(body.x, tail.x), self._width
                table += [
                    [pieces.SELECT, 1, *pairs],
                    _product(apart.queries, tail.normed, tail.qkv, 1),
                    [pieces.TURN, 1, *_at(tail.qkv), self._q_width, *tables, *_at(body.qkv), qkv_width],
                ]
            read = [*_at(body.qkv), qkv_width, *_at(pools.k, pools.v, body.attended)]
            table += [[kind, is_tail, *read] for kind in (pieces.SHARED, pieces.NESTED, pieces.OWN)]
            if is_tail:
                stream = self._width if apart is None else 0  # else it was taken before
                pairs = *_at(body.x, b.x), stream, *_at(body.attended, b.attended), self._q_width
                table.append([pieces.SELECT, 1, *pairs])
            chain = [
                _product(attention.out, b.attended, b.delta, is_tail),
                [pieces.ADD_NORM, is_tail, *_at(b.x, layer.mlp_norm, b.normed), self._width, *_at(b.delta)],
                *_gated(layer.mlp.gate_up, b, is_tail),
                _product(layer.mlp.down, b.activated, b.delta, is_tail, pieces.READS),
                [pieces.ADD_NORM, is_tail, *_at(b.x, layer.next_norm, b.normed), self._width, *_at(b.delta)],
            ]
            if layer is self._layers[-1]:
                table += [*_chained(chain, is_tail), _product(self._head, b.normed, None, is_tail)]
        numbers = np.zeros((len(table), LINE_WIDTH), np.int64)
        for i, line in enumerate(table):
            if line is None:
                return None
            numbers[i, : len(line)] = line
        return numbers


def _plain(layer: Layer, ops: object) -> PlainLayer | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, HeadAttention) or not isinstance(mlp, DenseMlp) or not isinstance(ops, NumbaOps):
        return None
    rule = attention.rule
    is_plain = (
        not rule.has_window
        and rule.soft_cap == NO_CAP
        and rule.sinks is None
        and mlp.gate == ops.silu_mul
        and layer.attention_post_norm is None
        and layer.mlp_post_norm is None
        and all(map(_is_one_kind, (attention.qkv, attention.out, mlp.gate_up, mlp.down)))
    )
    if not is_plain or layer.mlp_norm is None or layer.next_norm is None:
        return None
    return PlainLayer(attention, layer.mlp_norm, mlp, layer.next_norm)


def _plain_positions(attention: HeadAttention, positions: int) -> int:
    """Before the first one at which queries are multiplied by something else than 1."""
    if attention.temperatures is None:
        return positions
    scaled = (attention.temperatures.flatten() != 1.0).nonzero()
    return int(scaled[0]) if len(scaled) else positions


def _apart(attention: HeadAttention, q_width: int) -> _Apart | None:
    """None where they are packed together or normalised together."""
    qkv = attention.qkv
    if not isinstance(qkv, Projection) or attention.qk_norm is not None:
        return None

    def part(first: int, last: int) -> Projection:
        bias = None if qkv.bias is None else Operand.of(qkv.bias.tensor[first:last])
        return Projection(qkv.ops, Operand.of(qkv.weight.tensor[first:last]), bias)

    return _Apart(part(0, q_width), part(q_width, len(qkv.weight.tensor)))


def _is_one_kind(linear: Linear) -> bool:
    return isinstance(linear, Projection | PackedLinear | CodedLinear)


def _takes_any(linear: Linear) -> bool:
    """Whether pieces.py has a kernel for any number of rows, which is the quickest."""
    if isinstance(linear, Projection):
        return takes(_many_rows(linear), array_of(linear.weight))
    return isinstance(linear, PackedLinear)


def _many_rows(projection: Projection) -> Array:
    """Such as it multiplies, without memory of their own."""
    inputs = projection.weight.tensor.shape[1]
    return np.broadcast_to(np.uint16(0), (_many(), inputs))


def _many() -> int:
    """Rows from which on any number of them goes by the same kernel."""
    return max(most_few_rows(), MAX_ROWS_OF_PAIRS) + 1


def _shape(linear: Linear) -> tuple[int, int]:
    if isinstance(linear, PackedLinear | CodedLinear):
        return linear.outputs, linear.inputs
    assert isinstance(linear, Projection), "others are not plain"
    outputs, inputs = linear.weight.tensor.shape
    return outputs, inputs


def _chained(lines: Sequence[list[int] | None], is_tail: int) -> list[list[int] | None]:
    """These lines, so that blocks of rows go through all of them one after the other where rows are many."""
    kinds = {line[0] for line in lines if line is not None}
    most = pieces.MOST_PACKED if pieces.PACKED in kinds else ROWS_AT_ONCE
    return [[pieces.CHAIN, is_tail, len(lines), most], *lines] if kinds <= set(pieces.BY_ROWS) else list(lines)


def _product(linear: Linear, x: Operand, out: Operand | None, is_tail: int = 0, strip: int = 0) -> list[int] | None:
    """None where pieces.py has no kernel for so many rows. `strip`: what of it lives in a chain alone."""
    place = 0 if out is None else out.tensor.data_ptr()
    if isinstance(linear, CodedLinear):
        line = line_of(linear)
        line[:2] = pieces.CODED, is_tail
        (line[X],) = _at(x)
        line[OUT] = place
        return line
    if isinstance(linear, PackedLinear):
        sizes = linear.inputs, linear.outputs
        return [pieces.PACKED, is_tail, *_at(x, linear.weight), place, *sizes, *_at(linear.bias), strip]
    assert isinstance(linear, Projection), "others are not plain"
    rows, weight = array_of(x), array_of(linear.weight)
    if takes_few(rows, weight):
        kind = pieces.PAIRS
    elif takes(rows, weight):
        kind = pieces.TILES
    elif is_few(rows):
        kind = pieces.FEW
    else:
        return None
    bias = 0 if linear.bias is None else linear.bias.tensor.data_ptr()
    outputs, inputs = weight.shape
    return [kind, is_tail, *_at(x, linear.weight), place, inputs, outputs, bias, strip]


def _gated(gate_up: Linear, b: Buffers, is_tail: int) -> list[list[int] | None]:
    """From `normed` to `activated`."""
    width = b.activated.tensor.shape[1]
    if isinstance(gate_up, PackedLinear) and width % LANES == 0:
        line = _product(gate_up, b.normed, b.activated, is_tail, pieces.WRITES)
        assert line is not None, "of packed weights there is a product of any number of rows"
        line[WIDTH] = width
        return [[*line, width // LANES]]
    return [
        _product(gate_up, b.normed, b.gate_up, is_tail, pieces.WRITES),
        [pieces.GATE, is_tail, *_at(b.gate_up, b.activated), width],
    ]


def _at(*operands: Operand) -> list[int]:
    return [operand.tensor.data_ptr() for operand in operands]
