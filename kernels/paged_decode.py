"""Attention of single queries over paged keys: out = softmax(cap(q k^T x scale)) v, for each query over its pages.

Each query streams its keys once, a block of BLOCK positions at a time from position 0 on, with an online softmax
between blocks, so the result depends on nothing but the query and its keys. All query heads of a group share each
loaded key. A bfloat16 pool is read as uint16 and shifted to float32. A sliding window skips the blocks before it.

Within a block the positions are the outer loop and the heads the inner one, so that memory is read in order: on one
core, 32 queries over 500 keys of 5 x 32, 3.2 times as fast in float32 as head by head, 1.7 times in bfloat16.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange

from niwaki.kernels.checks import check_arrays
from niwaki.kernels.jit import get_num_threads, jit
from niwaki.kernels.numeric import dot, exp_f32, largest_of, load, store, sum_of
from niwaki.kernels.operand import Array
from niwaki.kernels.partial import NOTHING, Partial
from niwaki.kernels.plan import DecodeQueries
from niwaki.kernels.rule import NO_CAP, PLAIN, AttentionRule
from niwaki.kernels.segments import Int32s, Int64s

BLOCK = 64  # keys between two rescalings of the running sum

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

    Of these keys the last `rule.window` count. Where first_key[i] > 0, those before it are not read: the online softmax
    goes on from what `partial` holds of them for token[i].

    q, out [tokens, heads, head_dim], elements of a head side by side; k_pool, v_pool contiguous [pages, page_size,
    kv_heads, head_dim]; all of one dtype; heads a multiple of kv_heads. Rows of `out` that no query names stay as
    they are. Indices come from an `AttentionPlan`, which has checked them.
    """
    kv_heads, head_dim = k_pool.shape[2:]
    check_arrays(
        "paged_decode_attention",
        q.dtype,
        q=(q, out.shape),
        out=(out, (q.shape[0], q.shape[1], head_dim)),
        k_pool=(k_pool, v_pool.shape),
        v_pool=(v_pool, k_pool.shape),
    )
    if q.shape[1] % kv_heads:
        raise ValueError(f"paged_decode_attention: {q.shape[1]} query heads are no multiple of {kv_heads} kv heads")
    scale = rule.scale or rule.scale_for(head_dim)  # models state it: a call saved
    window, soft_cap = rule.window, rule.soft_cap
    args = (
        q, k_pool, v_pool, page_table, queries.token, queries.table_row, queries.length, queries.first_key,
        partial.mixed, partial.lse, out, scale, window, soft_cap
    )  # fmt: skip
    threads = get_num_threads()
    read = queries.length - queries.first_key
    if threads == 1 or int(read.sum()) * kv_heads * head_dim < MIN_PARALLEL_ELEMENTS:
        _decode_items(*args, 0, len(queries.token) * kv_heads)
    else:
        read = np.minimum(read, window)
        _decode_parallel(*args, _equal_shares(read, kv_heads, threads))


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
        seen = slice(max(0, used - rule.window), used)
        k = k_pool[pages].reshape(-1, kv_heads, head_dim)[seen].float()
        v = v_pool[pages].reshape(-1, kv_heads, head_dim)[seen].float()
        grouped = q[token[i]].float().view(kv_heads, group, head_dim)
        scores = torch.einsum("hgd,khd->hgk", grouped, k) * rule.scale_for(head_dim)
        if rule.soft_cap != NO_CAP:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        mixed = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v)
        out[token[i]] = mixed.reshape(-1, head_dim).to(out.dtype)


def _equal_shares(length: Int32s, kv_heads: int, threads: int) -> Int64s:
    """Bounds [threads + 1] of runs of work items (query x kv_heads + head) that read about equally many keys."""
    ends = np.repeat(length, kv_heads).cumsum(dtype=np.int64)
    targets = ends[-1] * np.arange(1, threads) // threads
    inner = np.searchsorted(ends, targets, side="left") + 1
    return np.concatenate(([0], np.minimum(inner, len(ends)), [len(ends)])).astype(np.int64)


@jit(parallel=True)
def _decode_parallel(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Int32s,
    token: Int32s,
    table_row: Int32s,
    length: Int32s,
    first_key: Int32s,
    partial_mixed: Array,
    partial_lse: Array,
    out: Array,
    scale: float,
    window: int,
    soft_cap: float,
    bounds: Int64s,
) -> None:
    for part in prange(bounds.shape[0] - 1):
        first, last = bounds[part], bounds[part + 1]
        _decode_items(
            q, k_pool, v_pool, page_table, token, table_row, length, first_key, partial_mixed, partial_lse, out,
            scale, window, soft_cap, first, last
        )  # fmt: skip


@jit()
def _decode_items(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Int32s,
    token: Int32s,
    table_row: Int32s,
    length: Int32s,
    first_key: Int32s,
    partial_mixed: Array,
    partial_lse: Array,
    out: Array,
    scale: float,
    window: int,
    soft_cap: float,
    first_item: int,
    last_item: int,
) -> None:
    """Work items first_item to last_item, numbered query x kv_heads + head; those of one query are done together."""
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    heads = q.shape[1]
    group = heads // kv_heads
    factor = np.float32(scale)
    cap = np.float32(soft_cap)
    is_capped = soft_cap < math.inf
    query = np.empty((heads, head_dim), np.float32)
    mixed = np.empty((heads, head_dim), np.float32)  # sum of weight x value so far
    weights = np.empty((heads, BLOCK), np.float32)  # of the block at hand: scores, then their exponentials
    highest = np.empty(heads, np.float32)
    total = np.empty(heads, np.float32)
    wide = np.empty(head_dim, np.float32)  # one key or value
    item = first_item
    while item < last_item:
        i = item // kv_heads
        first_head = item % kv_heads
        last_head = min(kv_heads, first_head + last_item - item)
        item += last_head - first_head
        pages = page_table[table_row[i]]
        for h in range(first_head * group, last_head * group):
            source = q[token[i], h]
            for d in range(head_dim):
                query[h, d] = load(source[d]) * factor
                mixed[h, d] = partial_mixed[token[i], h, d] if first_key[i] > 0 else np.float32(0.0)
            # Weights that sum to e^lse, seen from e^lse, sum to 1.
            highest[h] = partial_lse[token[i], h] if first_key[i] > 0 else np.float32(-1e30)
            total[h] = np.float32(1.0) if first_key[i] > 0 else np.float32(0.0)
        first = max(first_key[i], length[i] - window)
        # Blocks start at multiples of BLOCK, whatever the window: a row's sums do not depend on where it was cut.
        for start in range(first // BLOCK * BLOCK, length[i], BLOCK):
            block = max(start, first)
            count = min(start + BLOCK, length[i]) - block
            for j in range(count):
                keys = k_pool[pages[(block + j) // page_size], (block + j) % page_size]
                for head in range(first_head, last_head):
                    for d in range(head_dim):
                        wide[d] = load(keys[head, d])
                    for h in range(head * group, head * group + group):
                        weights[h, j] = dot(wide, query[h])
            if is_capped:
                for h in range(first_head * group, last_head * group):
                    for j in range(count):  # tanh(x) = 1 - 2 / (e^2x + 1)
                        power = exp_f32(np.float32(2.0) * weights[h, j] / cap)
                        weights[h, j] = cap - np.float32(2.0) * cap / (power + np.float32(1.0))
            for h in range(first_head * group, last_head * group):
                top = largest_of(weights[h], count, highest[h])
                shrink = exp_f32(highest[h] - top)
                for j in range(count):
                    weights[h, j] = exp_f32(weights[h, j] - top)
                highest[h] = top
                total[h] = total[h] * shrink + sum_of(weights[h], count)
                for d in range(head_dim):
                    mixed[h, d] *= shrink
            for j in range(count):
                values = v_pool[pages[(block + j) // page_size], (block + j) % page_size]
                for head in range(first_head, last_head):
                    for d in range(head_dim):
                        wide[d] = load(values[head, d])
                    for h in range(head * group, head * group + group):
                        weight = weights[h, j]
                        for d in range(head_dim):
                            mixed[h, d] += weight * wide[d]
        for h in range(first_head * group, last_head * group):
            target = out[token[i], h]
            inverse = np.float32(1.0) / total[h]
            for d in range(head_dim):
                target[d] = store(mixed[h, d] * inverse, q[0, 0, 0])
