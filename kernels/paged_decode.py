"""Attention of single queries over paged keys: out = softmax(cap(q k^T x scale)) v, for each query over its pages.

Each query streams its keys once, a block of BLOCK positions at a time from position 0 on, with an online softmax
between blocks, so the result depends on nothing but the query and its keys. All query heads of a group share each
loaded key. A sliding window skips the blocks before it. On a matrix unit (AMX) that is decode_by_tiles.py, elsewhere,
and of other kinds of pages, decode_by_vectors.py.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from niwaki.kernels.checks import check_arrays, check_pools
from niwaki.kernels.decode_by_tiles import decode_by_tiles
from niwaki.kernels.decode_by_vectors import decode_by_vectors
from niwaki.kernels.jit import for_any_thread, get_num_threads, jit
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.partial import NOTHING, Partial
from niwaki.kernels.plan import DecodeQueries
from niwaki.kernels.rule import NO_CAP, PLAIN, AttentionRule
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.stack_by_tiles import RUN, SLICE
from niwaki.kernels.tiles import has_matrix_unit

NO_SINKS = np.empty(0, np.float32)

# Key elements read (keys x kv heads x head_dim) from which threads pay: about 1.5 ms of work for one. Waking a second
# costs 0.05 ms on an idle machine, but where other processes hold the cores, milliseconds may pass until it runs.
MIN_PARALLEL_ELEMENTS = 2_000_000


def paged_decode_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Int32s,
    queries: DecodeQueries,
    out: Array,
    rule: AttentionRule = PLAIN,
    partial: Partial = NOTHING,
) -> None:
    """out[token[i]] = attention of q[token[i]] over the first length[i] keys of table row table_row[i], for every i.

    Of these keys those count that `rule` lets the query see. Where first_key[i] > 0, those before it are not read: the
    online softmax goes on from what `partial` holds of them for token[i].

    q, out [tokens, heads, head_dim], elements of a head side by side; k_pool, v_pool contiguous [pages, page_size,
    kv_heads, head_dim]; all of one dtype, or bfloat16 and pools of 8 bits (small_kv.py); heads a multiple of kv_heads.
    Rows of `out` that no query names stay as they are. Indices come from an `AttentionPlan`, which has checked them.
    """
    kv_heads, head_dim = k_pool.shape[2], q.shape[2]
    check_arrays("paged_decode_attention", q.dtype, q=(q, out.shape), out=(out, q.shape))
    check_pools("paged_decode_attention", q, k_pool, v_pool)
    if q.shape[1] % kv_heads:
        raise ValueError(f"paged_decode_attention: {q.shape[1]} query heads are no multiple of {kv_heads} kv heads")
    scale = rule.scale or rule.scale_for(head_dim)  # models state it: a call saved
    sinks = NO_SINKS if rule.sinks is None else sinks_of(rule.sinks, q.shape[1])
    args = (
        q, k_pool, v_pool, page_table, queries.token, queries.table_row, queries.length, queries.first_key,
        partial.mixed, partial.lse, sinks, out, scale, rule.window, rule.chunk, rule.soft_cap
    )  # fmt: skip
    threads = get_num_threads()
    read = queries.length - queries.first_key
    by_tiles = has_matrix_unit() and rule.soft_cap == NO_CAP and _fit_tiles(k_pool)
    if threads == 1 or int(read.sum()) * kv_heads * head_dim < MIN_PARALLEL_ELEMENTS:
        (_all_by_tiles if by_tiles else _all_by_vectors)(*args, 0, len(queries.token) * kv_heads)
    else:
        shares = _equal_shares(np.minimum(read, rule.window), kv_heads, threads)
        (_parallel_by_tiles if by_tiles else _parallel_by_vectors)(*args, shares)


def _fit_tiles(pool: Array) -> bool:
    return pool.dtype == np.uint16 and pool.shape[1] % RUN == 0 and pool.shape[3] % (2 * SLICE) == 0


def sinks_of(sinks: Operand, heads: int) -> Array:
    """Their array, checked: one for each head."""
    array = sinks.array
    if array is None or array.dtype != np.float32 or array.shape != (heads,):
        raise ValueError(f"attention: sinks must be float32 [{heads}] on the CPU, got {sinks.tensor.shape}")
    return array


def paged_decode_attention_torch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    token: torch.Tensor,
    table_row: torch.Tensor,
    length: torch.Tensor,
    out: torch.Tensor,
    rule: AttentionRule = PLAIN,
) -> None:
    """The reference of `paged_decode_attention`, on any device; index tensors int64."""
    _, page_size, kv_heads, head_dim = k_pool.shape
    group = q.shape[1] // kv_heads
    for i in range(len(token)):
        used = int(length[i])
        pages = page_table[table_row[i], : -(-used // page_size)]
        seen = slice(rule.first_seen(used - 1), used)
        k = k_pool[pages].reshape(-1, kv_heads, head_dim)[seen].float()
        v = v_pool[pages].reshape(-1, kv_heads, head_dim)[seen].float()
        grouped = q[token[i]].float().view(kv_heads, group, head_dim)
        scores = torch.einsum("hgd,khd->hgk", grouped, k) * rule.scale_for(head_dim)
        if rule.soft_cap != NO_CAP:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        if rule.sinks is not None:
            scores = torch.cat((scores, rule.sinks.tensor.view(kv_heads, group, 1)), -1)
        mixed = torch.einsum("hgk,khd->hgd", scores.softmax(-1)[..., : len(k)], v)
        out[token[i]] = mixed.reshape(-1, head_dim).to(out.dtype)


def _equal_shares(length: Int32s, kv_heads: int, threads: int) -> Int64s:
    """Bounds [threads + 1] of runs of work items (query x kv_heads + head) that read about equally many keys."""
    ends = np.repeat(length, kv_heads).cumsum(dtype=np.int64)
    targets = ends[-1] * np.arange(1, threads) // threads
    inner = np.searchsorted(ends, targets, side="left") + 1
    return np.concatenate(([0], np.minimum(inner, len(ends)), [len(ends)])).astype(np.int64)


@jit(parallel=True)
def _parallel_by_vectors(
    q: Array, k_pool: Array, v_pool: Array, page_table: Int32s, token: Int32s, table_row: Int32s, length: Int32s,
    first_key: Int32s, partial_mixed: Array, partial_lse: Array, sinks: Array, out: Array, scale: float, window: int,
    chunk: int, soft_cap: float, bounds: Int64s,
) -> None:  # fmt: skip
    for part in prange(bounds.shape[0] - 1):
        first, last = bounds[part], bounds[part + 1]
        decode_by_vectors(
            q, k_pool, v_pool, page_table, token, table_row, length, first_key, partial_mixed, partial_lse, sinks,
            out, scale, window, chunk, soft_cap, first, last
        )  # fmt: skip


@jit(parallel=True)
def _parallel_by_tiles(
    q: Array, k_pool: Array, v_pool: Array, page_table: Int32s, token: Int32s, table_row: Int32s, length: Int32s,
    first_key: Int32s, partial_mixed: Array, partial_lse: Array, sinks: Array, out: Array, scale: float, window: int,
    chunk: int, soft_cap: float, bounds: Int64s,
) -> None:  # fmt: skip
    for part in prange(bounds.shape[0] - 1):
        first, last = bounds[part], bounds[part + 1]
        decode_by_tiles(
            q, k_pool, v_pool, page_table, token, table_row, length, first_key, partial_mixed, partial_lse, sinks,
            out, scale, window, chunk, soft_cap, first, last
        )  # fmt: skip


_all_by_vectors, _all_by_tiles = for_any_thread(decode_by_vectors), for_any_thread(decode_by_tiles)
# Of bfloat16 in whole pages of tiles, with plain scores.
decode_items = decode_by_tiles if has_matrix_unit() else decode_by_vectors
