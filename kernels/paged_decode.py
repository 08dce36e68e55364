"""Attention of single queries over paged keys: out = softmax(cap(q k^T x scale)) v, for each query over its pages.

Each query streams its keys once, a block of BLOCK positions at a time from position 0 on, with an online softmax
between blocks, so the result depends on nothing but the query and its keys. All query heads of a group share each
loaded key. A bfloat16 pool is read as uint16 and shifted to float32. A sliding window skips the blocks before it.

Within a block two heads of a group are scored against four keys at a time and mixed from two values at a time, eight
sums of sixteen lanes each (simd.py). Pages lie anywhere, which the processor cannot foresee: scoring a key asks memory
for its value, mixing one for a key of the next block. Inner functions get whole arrays and where to begin in them, for
Numba counts the references to each slice of an array, which takes a part of the time that a block does.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange

from niwaki.kernels.checks import check_arrays
from niwaki.kernels.jit import get_num_threads, jit
from niwaki.kernels.numeric import exp_f32, largest_of, load, store, sum_of
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.partial import NOTHING, Float32s, Partial
from niwaki.kernels.plan import DecodeQueries
from niwaki.kernels.rule import NO_CAP, PLAIN, AttentionRule
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.simd import LANES, load16, multiply_add, prefetch, splat, store16, sum_four, zeros

NO_SINKS = np.empty(0, np.float32)
BLOCK = 64  # keys between two rescalings of the running sum
LINE = 64  # bytes that memory gives at a time

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
    sinks = NO_SINKS if rule.sinks is None else _array_of_sinks(rule.sinks, q.shape[1])
    args = (
        q, k_pool, v_pool, page_table, queries.token, queries.table_row, queries.length, queries.first_key,
        partial.mixed, partial.lse, sinks, out, scale, rule.window, rule.chunk, rule.soft_cap
    )  # fmt: skip
    threads = get_num_threads()
    read = queries.length - queries.first_key
    if threads == 1 or int(read.sum()) * kv_heads * head_dim < MIN_PARALLEL_ELEMENTS:
        _decode_items(*args, 0, len(queries.token) * kv_heads)
    else:
        read = np.minimum(read, rule.window)
        _decode_parallel(*args, _equal_shares(read, kv_heads, threads))


def _array_of_sinks(sinks: Operand, heads: int) -> Float32s:
    """Checked: one for each head."""
    array = sinks.array
    if array is None or array.dtype != np.float32 or array.shape != (heads,):
        raise ValueError(
            f"paged_decode_attention: sinks must be float32 [{heads}] on the CPU, got {sinks.tensor.shape}"
        )
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
    sinks: Array,
    out: Array,
    scale: float,
    window: int,
    chunk: int,
    soft_cap: float,
    bounds: Int64s,
) -> None:
    for part in prange(bounds.shape[0] - 1):
        first, last = bounds[part], bounds[part + 1]
        _decode_items(
            q, k_pool, v_pool, page_table, token, table_row, length, first_key, partial_mixed, partial_lse, sinks,
            out, scale, window, chunk, soft_cap, first, last
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
    sinks: Array,
    out: Array,
    scale: float,
    window: int,
    chunk: int,
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
    padded = (head_dim + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
    query = np.zeros(heads * padded, np.float32)
    mixed = np.zeros(heads * padded, np.float32)  # sum of weight x value so far
    weights = np.empty((heads, BLOCK), np.float32)  # of the block at hand: scores, then their exponentials
    flat_weights = weights.reshape(-1)
    highest = np.empty(heads, np.float32)
    total = np.empty(heads, np.float32)
    shrink = np.empty(heads, np.float32)  # what the block does to the sums before it
    at = np.zeros(2 * BLOCK, np.int64)  # where the keys of the block begin in the pool, and those of the next one
    k = k_pool.reshape(-1)
    v = v_pool.reshape(-1)
    item = first_item
    while item < last_item:
        i = item // kv_heads
        first_head = item % kv_heads
        last_head = min(kv_heads, first_head + last_item - item)
        item += last_head - first_head
        for h in range(first_head * group, last_head * group):
            for d in range(head_dim):
                query[h * padded + d] = load(q[token[i], h, d]) * factor
                mixed[h * padded + d] = partial_mixed[token[i], h, d] if first_key[i] > 0 else np.float32(0.0)
            # Weights that sum to e^lse, seen from e^lse, sum to 1.
            highest[h] = partial_lse[token[i], h] if first_key[i] > 0 else np.float32(-1e30)
            total[h] = np.float32(1.0) if first_key[i] > 0 else np.float32(0.0)
        first = max(first_key[i], length[i] - window, (length[i] - 1) // chunk * chunk)
        # Blocks start at multiples of BLOCK, whatever the window: a row's sums do not depend on where it was cut.
        for start in range(first // BLOCK * BLOCK, length[i], BLOCK):
            block = max(start, first)
            count = min(start + BLOCK, length[i]) - block
            end = block + count
            row, width = table_row[i], kv_heads * head_dim
            _place(page_table, row, block, count, page_size, width, at, 0)
            _place(page_table, row, end, min(BLOCK, length[i] - end), page_size, width, at, BLOCK)
            for head in range(first_head, last_head):
                for h in range(head * group, head * group + group, 2):
                    other = min(h + 1, head * group + group - 1)
                    _score(
                        query, h * padded, other * padded, k, v, at, head * head_dim, head_dim, count,
                        flat_weights, h * BLOCK, other * BLOCK,
                    )  # fmt: skip
            for h in range(first_head * group, last_head * group):
                if is_capped:
                    for j in range(count):  # tanh(x) = 1 - 2 / (e^2x + 1)
                        power = exp_f32(np.float32(2.0) * weights[h, j] / cap)
                        weights[h, j] = cap - np.float32(2.0) * cap / (power + np.float32(1.0))
                top = largest_of(weights, h, count, highest[h])
                shrink[h] = exp_f32(highest[h] - top)
                for j in range(count):
                    weights[h, j] = exp_f32(weights[h, j] - top)
                highest[h] = top
                total[h] = total[h] * shrink[h] + sum_of(weights, h, count)
            for head in range(first_head, last_head):
                for h in range(head * group, head * group + group, 2):
                    other = min(h + 1, head * group + group - 1)
                    _mix(
                        weights, h, other, k, v, at, head * head_dim, head_dim, count,
                        shrink[h], shrink[other], mixed, h * padded, other * padded,
                    )  # fmt: skip
        for h in range(first_head * group, last_head * group):
            if sinks.shape[0]:
                total[h] += exp_f32(sinks[h] - highest[h])
            inverse = np.float32(1.0) / total[h]
            for d in range(head_dim):
                out[token[i], h, d] = store(mixed[h * padded + d] * inverse, q[0, 0, 0])


@jit()
def _place(
    page_table: Int32s, row: int, block: int, count: int, page_size: int, width: int, at: Int64s, to: int
) -> None:
    """at[to + j] = the element of the pool where key `block` + j of the row begins, up to a multiple of four keys."""
    page = block // page_size
    offset = block % page_size
    base = np.int64(0)
    for j in range(count):
        if offset == page_size:
            offset = 0
            page += 1
        if j == 0 or offset == 0:
            base = np.int64(page_table[row, page]) * page_size
        at[to + j] = (base + offset) * width
        offset += 1
    for j in range(max(count, 0), (count + 3) // 4 * 4):
        at[to + j] = at[to + count - 1]


@jit()
def _score(
    query: Float32s, own_query: int, other_query: int, k: Array, v: Array, at: Int64s, base: int, head_dim: int,
    count: int, weights: Float32s, own: int, other: int,
) -> None:  # fmt: skip
    """Scores of `count` keys for two heads, which may be the same one, four keys at a time. Asks for their values.

    The heads' queries begin at `own_query` and `other_query`, their weights at `own` and `other`.
    """
    for j in range(0, count, 4):
        first, second, third, fourth = at[j] + base, at[j + 1] + base, at[j + 2] + base, at[j + 3] + base
        for d in range(0, head_dim, LINE // v.itemsize):
            prefetch(v, first + d)
            prefetch(v, second + d)
            prefetch(v, third + d)
            prefetch(v, fourth + d)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zeros()
        for d in range(0, head_dim, LANES):
            left = head_dim - d
            x = load16(query, own_query + d, LANES)
            y = load16(query, other_query + d, LANES)
            if left >= LANES:  # one branch for all of them
                k0, k1 = load16(k, first + d, LANES), load16(k, second + d, LANES)
                k2, k3 = load16(k, third + d, LANES), load16(k, fourth + d, LANES)
            else:
                k0, k1 = load16(k, first + d, left), load16(k, second + d, left)
                k2, k3 = load16(k, third + d, left), load16(k, fourth + d, left)
            a0 = multiply_add(k0, x, a0)
            a1 = multiply_add(k1, x, a1)
            a2 = multiply_add(k2, x, a2)
            a3 = multiply_add(k3, x, a3)
            b0 = multiply_add(k0, y, b0)
            b1 = multiply_add(k1, y, b1)
            b2 = multiply_add(k2, y, b2)
            b3 = multiply_add(k3, y, b3)
        sum_four(weights, own + j, a0, a1, a2, a3)
        sum_four(weights, other + j, b0, b1, b2, b3)


@jit()
def _mix(
    weights: Array, own: int, other: int, k: Array, v: Array, at: Int64s, base: int, head_dim: int, count: int,
    shrink: np.float32, other_shrink: np.float32, mixed: Float32s, own_mixed: int, other_mixed: int,
) -> None:  # fmt: skip
    """mixed = mixed x shrink + the sum of weight x value, for two heads, which may be the same one.

    The heads' weights are the rows `own` and `other`, their sums begin at `own_mixed` and `other_mixed`. Asks for the
    keys of the next block.
    """
    if count % 2:
        weights[own, count] = weights[other, count] = np.float32(0.0)
    for d in range(0, head_dim, 2 * LANES):
        left = head_dim - d
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zeros()
        for j in range(0, count, 2):
            first, second = at[j] + base + d, at[j + 1] + base + d
            if d == 0:
                for ahead in range(0, head_dim, LINE // k.itemsize):
                    prefetch(k, at[BLOCK + j] + base + ahead)
                    prefetch(k, at[BLOCK + j + 1] + base + ahead)
            if left >= 2 * LANES:
                v0, v1 = load16(v, first, LANES), load16(v, first + LANES, LANES)
                v2, v3 = load16(v, second, LANES), load16(v, second + LANES, LANES)
            else:
                v0, v1 = load16(v, first, left), load16(v, first + LANES, left - LANES)
                v2, v3 = load16(v, second, left), load16(v, second + LANES, left - LANES)
            x, y = splat(weights[own, j]), splat(weights[other, j])
            a0 = multiply_add(v0, x, a0)
            a1 = multiply_add(v1, x, a1)
            b0 = multiply_add(v0, y, b0)
            b1 = multiply_add(v1, y, b1)
            x, y = splat(weights[own, j + 1]), splat(weights[other, j + 1])
            a2 = multiply_add(v2, x, a2)
            a3 = multiply_add(v3, x, a3)
            b2 = multiply_add(v2, y, b2)
            b3 = multiply_add(v3, y, b3)
        # Both heads are read before either is written: they may be one.
        one, factor, other_factor = splat(np.float32(1.0)), splat(shrink), splat(other_shrink)
        first, second = own_mixed + d, other_mixed + d
        a0 = multiply_add(load16(mixed, first, LANES), factor, multiply_add(a2, one, a0))
        a1 = multiply_add(load16(mixed, first + LANES, LANES), factor, multiply_add(a3, one, a1))
        b0 = multiply_add(load16(mixed, second, LANES), other_factor, multiply_add(b2, one, b0))
        b1 = multiply_add(load16(mixed, second + LANES, LANES), other_factor, multiply_add(b3, one, b1))
        store16(mixed, first, a0)
        store16(mixed, first + LANES, a1)
        store16(mixed, second, b0)
        store16(mixed, second + LANES, b1)
