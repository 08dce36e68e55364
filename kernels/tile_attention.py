"""Attention of many queries over the same pages, in bfloat16, no score kept.

A *stack* is the queries of some tokens, one below the other, that read the same pages: those of one long row of the
batch, or of all rows behind a shared prefix. All of them go over a block of keys before the next is read, with an
online softmax between blocks (arXiv 2205.14135): on the matrix unit by stack_in_lanes.py, where vectors multiply pairs
of bfloat16 by stack_by_pairs.py, elsewhere by stack_by_tiles.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import prange

from niwaki.kernels.jit import for_any_thread, get_num_threads, jit
from niwaki.kernels.operand import Array
from niwaki.kernels.paged_decode import NO_SINKS, sinks_of
from niwaki.kernels.partial import NOTHING, Float32s, Partial
from niwaki.kernels.plan import MAX_DECODE_BESIDE_PAIRS, MAX_DECODE_BESIDE_TILES, PrefillRow, Segment
from niwaki.kernels.rule import PLAIN, AttentionRule
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.simd import splits_numbers
from niwaki.kernels.stack_by_pairs import attend_by_pairs
from niwaki.kernels.stack_by_tiles import RUN, SLICE, attend_by_tiles
from niwaki.kernels.stack_in_lanes import attend_in_lanes
from niwaki.kernels.tiles import WHOLE, Bytes, has_matrix_unit, has_tiles
from niwaki.kernels.vector_tiles import multiplies_pairs

# These heads of a stack; what all three take is told in `tile_attention`.
attend_heads = attend_by_tiles
longest_single = MAX_DECODE_BESIDE_TILES  # tokens of a row that are quicker as single queries than as a stack
if has_matrix_unit() and splits_numbers():
    attend_heads = attend_in_lanes
elif multiplies_pairs() and not has_matrix_unit():
    attend_heads = attend_by_pairs
    longest_single = MAX_DECODE_BESIDE_PAIRS


# Products of queries and keys (tokens x keys x heads x head_dim) from which threads pay: 0.25 ms of work for one. Two
# that find idle cores take 1.0 of the time of one at 8 million, 0.88 at 15, 0.7 at 25 and 31, 0.61 at 123 (least of 400
# runs, an EPYC, Zen 4, 28 November 2026); where other processes hold the cores they take 1.2 of it at any size.
MIN_PARALLEL_PRODUCTS = 10_000_000


def can_tile(dtype: torch.dtype, page_size: int, head_dim: int) -> bool:
    """Whether pages of this kind can be read in tiles, here."""
    return dtype == torch.bfloat16 and page_size % RUN == 0 and head_dim % (2 * SLICE) == 0 and has_tiles()


def tile_segments(q: Array, k_pool: Array, v_pool: Array, segments: Sequence[Segment], rule: AttentionRule) -> Partial:
    """`shared_prefix.shared_attention` where `can_tile`."""
    partial = Partial.empty(q.shape[0], q.shape[1], q.shape[2])
    for each in segments:
        end = each.first_key + len(each.page_ids) * k_pool.shape[1]
        ends = np.full(len(each.tokens), end, np.int32)
        where = each.page_ids, each.tokens, ends, each.first_key
        tile_attention(q, k_pool, v_pool, *where, q, rule, partial, is_partial=True)
    return partial


def tile_rows(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    rows: Sequence[PrefillRow],
    out: Array,
    rule: AttentionRule,
    partial: Partial,
) -> None:
    """`prefill.prefill_attention` where `can_tile`."""
    for row in rows:
        every = np.arange(row.count, dtype=np.int32)
        page_ids = row.page_ids[row.first_key // k_pool.shape[1] :]
        where = page_ids, every + np.int32(row.first), every + np.int32(row.start + 1), row.first_key
        tile_attention(q, k_pool, v_pool, *where, out, rule, partial)


def tile_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    pages: Int32s,
    tokens: Int32s,
    ends: Int32s,
    first_key: int,
    out: Array,
    rule: AttentionRule = PLAIN,
    partial: Partial = NOTHING,
    *,
    is_partial: bool = False,
) -> None:
    """out[t] = attention of q[t] over the keys before ends[i], for every t = tokens[i], as far as `rule` lets a token
    at ends[i] - 1 see them.

    `pages` begin with the one of `first_key`. Where that is above 0, the keys before it are not read: the softmax goes
    on from what `partial` holds of them. With `is_partial` the outcome goes there, instead of to `out`.

    q, out [all tokens, heads, head_dim], elements of a head side by side; k_pool, v_pool contiguous [all pages,
    page_size, kv_heads, head_dim], bfloat16; heads a multiple of kv_heads. Indices are not checked.

    Raises:
        ValueError: not `can_tile`. The processor would end the program.
    """
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    if k_pool.dtype != np.uint16 or q.dtype != np.uint16 or not can_tile(torch.bfloat16, page_size, head_dim):
        raise ValueError(f"tile_attention: no tiles for {k_pool.dtype} pages of {page_size} x {head_dim} on this CPU")
    scale = rule.scale or rule.scale_for(head_dim)
    sinks = NO_SINKS if rule.sinks is None else sinks_of(rule.sinks, q.shape[1])
    args = (
        q, k_pool, v_pool, pages, tokens, ends, first_key, partial.mixed, partial.lse, sinks, out, is_partial,
        scale, rule.window, rule.chunk, rule.soft_cap, WHOLE
    )  # fmt: skip
    threads = min(get_num_threads(), kv_heads)
    seen = min(len(pages) * page_size, rule.window, rule.chunk)  # keys, at most
    if threads == 1 or len(tokens) * seen * q.shape[1] * head_dim < MIN_PARALLEL_PRODUCTS:
        _attend_all(*args, 0, kv_heads)
    else:
        _attend_parallel(*args, np.linspace(0, kv_heads, threads + 1).astype(np.int64))


@jit(parallel=True)
def _attend_parallel(
    q: Array, k_pool: Array, v_pool: Array, pages: Int32s, tokens: Int32s, ends: Int32s, first_key: int,
    partial_mixed: Float32s, partial_lse: Float32s, sinks: Array, out: Array, is_partial: bool, scale: float,
    window: int, chunk: int, soft_cap: float, shape: Bytes, heads: Int64s,
) -> None:  # fmt: skip
    for part in prange(heads.shape[0] - 1):
        first_head, last_head = heads[part], heads[part + 1]
        attend_heads(
            q, k_pool, v_pool, pages, tokens, ends, first_key, partial_mixed, partial_lse, sinks, out, is_partial,
            scale, window, chunk, soft_cap, shape, first_head, last_head
        )  # fmt: skip


_attend_all = for_any_thread(attend_heads)
