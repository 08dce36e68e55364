"""Attention in parts: what a query got from some of its keys, and how two such parts become one.

A part is the mixed values, normalised, and the log of the sum of its exponentials. With L = log(e^a + e^b),
    mixed = e^(a - L) mixed_a + e^(b - L) mixed_b
is the attention over both sets of keys (arXiv 2205.14135, section 3.1; merged across devices in arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from niwaki.kernels.jit import jit
from niwaki.kernels.numeric import exp_f32, load, store
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.segments import Int32s

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Partial:
    """What each token has got so far. Rows of tokens that have got nothing hold anything."""

    mixed: Float32s  # [tokens, heads, head_dim]
    lse: Float32s  # [tokens, heads]

    @classmethod
    def empty(cls, tokens: int, heads: int, head_dim: int) -> Partial:
        return cls(np.empty((tokens, heads, head_dim), np.float32), np.empty((tokens, heads), np.float32))


NOTHING = Partial.empty(0, 0, 0)


def stack_queries(q: Array, tokens: Int32s, kv_heads: int, packed: Array) -> None:
    """packed[g, i x group + j] = head g x group + j of token tokens[i], with group = heads / kv_heads.

    q [all tokens, heads, head_dim]; packed [kv_heads, len(tokens) x group, head_dim]: every query that reads the same
    keys, one below the other.
    """
    _stack_queries(q, tokens, kv_heads, packed)


def take(part: torch.Tensor, lse: torch.Tensor, tokens: Int32s, into: Partial, *, is_first: bool) -> None:
    """Merge a segment's attention into `into`, or, `is_first`, put it there.

    part [1, kv_heads, len(tokens) x group, head_dim] and lse float32 [1, kv_heads, len(tokens) x group] have the order
    of `stack_queries`.
    """
    _take(_by_query(part), _by_query(lse), tokens, into.mixed, into.lse, is_first)


def finish(part: torch.Tensor, lse: torch.Tensor, first: int, partial: Partial, out: Array) -> None:
    """out[first + i] = `partial` of that token merged with the row's own part. For rows of many tokens.

    part [1, heads, count, head_dim], lse float32 [1, heads, count]; out [tokens, heads, head_dim].
    """
    _finish(_by_query(part), _by_query(lse), first, partial.mixed, partial.lse, out)


def _by_query(tensor: torch.Tensor) -> Array:
    """[1, heads, queries, ...] as an array [queries, heads, ...], bfloat16 as in `Operand`."""
    array = Operand.of(tensor).array
    assert array is not None, "the CPU's own attention gave it"
    return np.ascontiguousarray(array[0].swapaxes(0, 1))


@jit()
def _stack_queries(q: Array, tokens: Int32s, kv_heads: int, packed: Array) -> None:
    heads, head_dim = q.shape[1:]
    group = heads // kv_heads
    for i in range(tokens.shape[0]):
        for head in range(heads):
            source = q[tokens[i], head]
            target = packed[head // group, i * group + head % group]
            for d in range(head_dim):
                target[d] = source[d]


@jit()
def _take(part: Array, lse: Array, tokens: Int32s, into_mixed: Float32s, into_lse: Float32s, is_first: bool) -> None:
    heads, head_dim = into_mixed.shape[1:]
    kv_heads = part.shape[1]
    group = heads // kv_heads
    for i in range(tokens.shape[0]):
        for head in range(heads):
            new = part[i * group + head % group, head // group]
            new_lse = lse[i * group + head % group, head // group]
            mixed = into_mixed[tokens[i], head]
            if is_first:
                for d in range(head_dim):
                    mixed[d] = load(new[d])
                into_lse[tokens[i], head] = new_lse
            else:
                old_lse = into_lse[tokens[i], head]
                share = _share(new_lse, old_lse)
                for d in range(head_dim):
                    mixed[d] += share * (load(new[d]) - mixed[d])
                into_lse[tokens[i], head] = max(new_lse, old_lse) + np.log1p(exp_f32(-abs(new_lse - old_lse)))


@jit()
def _finish(part: Array, lse: Array, first: int, mixed: Float32s, partial_lse: Float32s, out: Array) -> None:
    count, heads, head_dim = part.shape
    for i in range(count):
        for head in range(heads):
            token = first + i
            share = _share(lse[i, head], partial_lse[token, head])
            for d in range(head_dim):
                old = mixed[token, head, d]
                out[token, head, d] = store(old + share * (load(part[i, head, d]) - old), part[0, 0, 0])


@jit()
def _share(new_lse: np.float32, old_lse: np.float32) -> np.float32:
    """e^new / (e^new + e^old)."""
    share: np.float32 = np.float32(1.0) / (np.float32(1.0) + exp_f32(old_lse - new_lse))
    return share
