"""Tree attention: keys that several rows share are read once for all of them, and the parts merged by log-sum-exp.

An item is a run of keys of one page table row, and the queries that see it: those of all rows below a node of the tree
for the node's keys, those of one row for the keys that it has to itself. A program folds one item for one kv head and
writes, for each query, a part; merge.py puts the parts of a query together. Nodes nest: a query has a part from each
node above it. Keys are cut at multiples of `SPLIT`.

(Hydragen, arXiv 2402.05099, and DeFT, arXiv 2404.00242, share in this way.) The reference is attention row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from niwaki.kernels.rule import NO_CAP, PLAIN, AttentionRule
from niwaki.kernels.small_kv import is_small
from niwaki.kernels.triton.fold import attend_keys, first_seen_by
from niwaki.kernels.triton.launch import block_of, check, dot_dtype, dot_precision, launch
from niwaki.kernels.triton.merge import merge_parts
from niwaki.kernels.triton.paged_attention import check_attention
from niwaki.kernels.triton.small import numbers_of, scale_at, scales_of
from niwaki.kernels.triton.tuning import tuning_for


@dataclass(frozen=True, slots=True)
class Items:
    """Items of at most `tile` queries each, in device memory. All arrays int32."""

    key: torch.Tensor  # [items, 5]: table row; first key, end of its keys; first query, number of queries (0: no item)
    tile: int


@dataclass(frozen=True, slots=True)
class TreeItems:
    """The items of a batch, and how their parts come together. All arrays int32, in device memory."""

    shared: Items  # of nodes
    own: Items  # of single rows
    query_token: torch.Tensor  # [queries of items]
    query_part: torch.Tensor  # [queries of items] where the part goes
    bounds: torch.Tensor  # [tokens + 1] the parts of token[i] are bounds[i] to bounds[i + 1]
    token: torch.Tensor  # [tokens]
    num_parts: int


def tree_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    items: TreeItems,
    out: torch.Tensor,
    rule: AttentionRule = PLAIN,
) -> None:
    """out[token] for the tokens of `items`; operands as in `paged_attention`. positions int32 [tokens]: token t sees
    the keys of its items at positions up to positions[t], as far back as `rule` lets it."""
    name, device = "tree_attention", q.device
    heads, _, head_dim = check_attention(name, q, k_pool, v_pool, page_table, out)
    check(name, "positions", positions, (len(q),), torch.int32, device, contiguous=True)
    check(name, "query_token", items.query_token, (None,), torch.int32, device, contiguous=True)
    check(name, "query_part", items.query_part, items.query_token.shape, torch.int32, device, contiguous=True)
    parts = torch.empty((items.num_parts, heads, head_dim), dtype=torch.float32, device=device)
    lse = torch.empty((items.num_parts, heads), dtype=torch.float32, device=device)
    for some in (items.shared, items.own):
        check(name, "key", some.key, (None, 5), torch.int32, device, contiguous=True)
        _run(q, k_pool, v_pool, page_table, positions, some, items, parts, lse, rule)
    merge_parts(parts, lse, items.bounds, items.token, out, rule.sinks)


def _run(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    some: Items,
    items: TreeItems,
    parts: torch.Tensor,
    lse: torch.Tensor,
    rule: AttentionRule,
) -> None:
    _, heads, head_dim = q.shape
    page_size, kv_heads = k_pool.shape[1:3]
    group = heads // kv_heads
    tuning = tuning_for("tree", q.device, head_dim=head_dim, group=group, bits=8 * k_pool.element_size())
    launch(
        _tree_attention,
        (len(some.key), kv_heads),
        q, numbers_of(k_pool), numbers_of(v_pool), parts, lse, page_table, positions, some.key, items.query_token,
        items.query_part, scales_of(k_pool), scales_of(v_pool), heads, rule.scale_for(head_dim), rule.window,
        rule.chunk, rule.soft_cap, k_pool.stride(1), page_table.stride(0), q.stride(0), q.stride(1),
        PAGE=page_size,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_of(head_dim, 16),
        BLOCK_M=block_of(some.tile * group, 16),
        BLOCK_N=tuning.block_n,
        HAS_CAP=rule.soft_cap != NO_CAP,
        HAS_WINDOW=rule.has_window,
        IS_SMALL=is_small(k_pool),
        DOT=dot_dtype(q.dtype),
        PRECISION=dot_precision(q.dtype),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _tree_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    lse_ptr,
    table_ptr,
    position_ptr,
    item_ptr,
    query_token_ptr,
    query_part_ptr,
    k_scale_ptr,
    v_scale_ptr,
    heads,
    scale,
    window,
    chunk,
    soft_cap,
    token_stride,
    table_stride,
    q_stride_t,
    q_stride_h,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SMALL: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(1)
    item_ptr += tl.program_id(0) * 5
    num_queries = tl.load(item_ptr + 4)
    if num_queries > 0:
        row = tl.load(item_ptr).to(tl.int64)
        first_key = tl.load(item_ptr + 1)
        end = tl.load(item_ptr + 2)
        query = tl.load(item_ptr + 3)

        m = tl.arange(0, BLOCK_M)
        is_query = m // GROUP < num_queries
        token = tl.load(query_token_ptr + query + m // GROUP, mask=is_query, other=0).to(tl.int64)
        part = tl.load(query_part_ptr + query + m // GROUP, mask=is_query, other=0).to(tl.int64)
        query_at = tl.load(position_ptr + token, mask=is_query, other=-1)
        head = kv_head * GROUP + m % GROUP
        d = tl.arange(0, BLOCK_D)
        inside = is_query[:, None] & (d < HEAD_DIM)[None, :]
        q_at = token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :]
        q = tl.load(q_ptr + q_at, mask=inside, other=0.0).to(DOT)

        begin = first_key // BLOCK_N * BLOCK_N
        lowest = tl.min(tl.where(is_query, query_at, 2147483647), 0)  # keys up to it are seen by all queries
        if HAS_WINDOW:
            begin = tl.maximum(begin, tl.maximum(first_seen_by(lowest, window, chunk), 0) // BLOCK_N * BLOCK_N)
            whole = begin
        else:  # a first block that begins before the item's keys needs the mask, and so do all then: it is short
            whole = tl.where(begin == first_key, tl.minimum(lowest + 1, end) // BLOCK_N * BLOCK_N, begin)
            whole = tl.maximum(whole, begin)
        scales = scale_at(tl.num_programs(1), kv_head, HEAD_DIM)
        out, lse = attend_keys(
            q, query_at, first_seen_by(query_at, window, chunk), k_ptr + kv_head * HEAD_DIM,
            v_ptr + kv_head * HEAD_DIM, k_scale_ptr + scales, v_scale_ptr + scales, table_ptr + row * table_stride,
            begin, whole, end, first_key, scale, soft_cap, token_stride,
            PAGE, HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_N, HAS_CAP, IS_SMALL, PRECISION,
        )  # fmt: skip
        target = part * heads + head
        tl.store(lse_ptr + target, lse, mask=is_query)
        tl.store(part_ptr + target[:, None] * HEAD_DIM + d[None, :], out, mask=inside)
