"""A KV pool of 8 bits: each key and value as int8 numbers, and behind them the float32 that they are multiplied by.

    pool [pages, page_size, kv_heads, head_dim + 4] int8        scale = largest magnitude / 127

So a token keeps its scales wherever its page is copied, evicted or saved. New keys are turned in bfloat16 and rounded
as they are stored. Decode attention reads the numbers as they are (paged_decode.py); for longer rows, and for what
rows share, the pages at hand are widened to bfloat16 pools of their own first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from niwaki.kernels.checks import SCALE_BYTES
from niwaki.kernels.jit import for_any_thread, jit
from niwaki.kernels.numeric import load, store
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.plan import PrefillRow, Segment
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.simd import LANES, splat, times
from niwaki.kernels.simd_memory import float_at, load_pair, put_float, store_pair
from niwaki.kernels.store_kv import rope_store_kv

TINY = np.float32(1e-12)  # a scale of zeros

Paged = TypeVar("Paged", PrefillRow, Segment)


def is_small(pool: torch.Tensor) -> bool:
    return pool.dtype == torch.int8


def rope_store_small(
    qkv: Array, cos: Array, sin: Array, positions: Int64s, slots: Int64s, k_pool: Array, v_pool: Array
) -> None:
    """`store_kv.rope_store_kv` into pools of 8 bits; qkv bfloat16."""
    tokens, kv_heads, head_dim = len(qkv), k_pool.shape[2], k_pool.shape[3] - SCALE_BYTES
    new = np.empty((2, tokens, 1, kv_heads, head_dim), np.uint16)  # a page a token
    rope_store_kv(qkv, cos, sin, positions, np.arange(tokens), new[0], new[1])
    for rows, pool in zip(new, (k_pool, v_pool), strict=True):
        _narrowed(rows.reshape(-1), slots, kv_heads, head_dim, pool.reshape(-1))


def widened(
    k_pool: Array, v_pool: Array, rows: Sequence[PrefillRow], segments: Sequence[Segment], head_dim: int
) -> tuple[Operand, Operand, tuple[PrefillRow, ...], tuple[Segment, ...]]:
    """The pages of `rows` and `segments` as bfloat16 pools, and the same rows and segments in these."""
    pages = np.unique(np.concatenate([*(row.page_ids for row in rows), *(segment.page_ids for segment in segments)]))
    keys, values = (_wide_pages(pool, pages, head_dim) for pool in (k_pool, v_pool))
    return keys, values, _placed(rows, pages), _placed(segments, pages)


def _wide_pages(pool: Array, pages: Int32s, head_dim: int) -> Operand:
    wide = Operand.of(torch.empty((len(pages), *pool.shape[1:3], head_dim), dtype=torch.bfloat16))
    assert wide.array is not None, "it is on the CPU"
    _widened(pool.reshape(-1), pages, pool[0].size, head_dim, wide.array.reshape(-1))
    return wide


def _placed(parts: Sequence[Paged], pages: Int32s) -> tuple[Paged, ...]:
    return tuple(replace(part, page_ids=np.searchsorted(pages, part.page_ids).astype(np.int32)) for part in parts)


@jit()
def _narrow(rows: Array, slots: Int64s, kv_heads: int, head_dim: int, pool: Array) -> None:
    """Row by row of bfloat16 [tokens, kv_heads, head_dim] to its slot."""
    size = head_dim + SCALE_BYTES
    for t in range(slots.shape[0]):
        for head in range(kv_heads):
            source = (t * kv_heads + head) * head_dim
            place = (int(slots[t]) * kv_heads + head) * size
            largest, flaw = TINY, np.float32(0.0)
            for d in range(head_dim):
                number = load(rows[source + d])
                largest = max(largest, abs(number))
                flaw += number * np.float32(0.0)  # NaN, if one of them is no number: then the scale is none
            scale = largest / np.float32(127.0)
            for d in range(head_dim):
                pool[place + d] = np.int8(np.rint(load(rows[source + d]) / scale))
            put_float(pool, place + head_dim, scale + flaw)


@jit()
def _widen(pool: Array, pages: Int32s, page_elements: int, head_dim: int, wide: Array) -> None:
    """wide [pages, page_size, kv_heads, head_dim] = those pages of the pool, rounded to bfloat16."""
    size = head_dim + SCALE_BYTES
    keys = page_elements // size
    whole = head_dim // (2 * LANES) * (2 * LANES)
    for i in range(pages.shape[0]):
        for key in range(keys):
            source = int(pages[i]) * page_elements + key * size
            place = (i * keys + key) * head_dim
            scale = float_at(pool, source + head_dim)
            by = splat(scale)
            for d in range(0, whole, 2 * LANES):
                low, high = load_pair(pool, source + d)
                store_pair(wide, place + d, times(low, by), times(high, by))
            for d in range(whole, head_dim):
                wide[place + d] = store(np.float32(pool[source + d]) * scale, wide[0])


_narrowed, _widened = for_any_thread(_narrow), for_any_thread(_widen)
