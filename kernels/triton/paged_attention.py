"""Attention of a ragged batch over paged keys: query t of a row sees the keys of its row up to its own, as far back as
the rule lets it. Any number of queries a row; grouped heads; windows, chunks, sinks, soft caps; keys in the queries'
type or of 8 bits.

A program takes BLOCK_M queries of one kv head: TILE tokens of a row x the heads of the group, so that a key is read
once for all heads that share it. Tile number i + first[i] // TILE is the first of row i, so the host lays out no
tiles. Blocks of keys that all queries see are folded without a mask.

With `split`, the keys are cut at its multiples into parts, each a program of its own whose result kernels/triton/
merge.py puts together (Flash-Decoding, Dao et al. 2023): for few queries over many keys. The cuts stand at fixed
positions, so a row's result does not depend on the batch.

References: `prefill_attention_torch`, and `paged_decode_attention_torch` for single queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from niwaki.kernels.rule import NO_CAP, PLAIN, AttentionRule
from niwaki.kernels.small_kv import is_small
from niwaki.kernels.triton.fold import LOG2_E, attend_keys, first_seen_by
from niwaki.kernels.triton.launch import (
    FLOATS,
    block_of,
    ceil_div,
    check,
    dot_dtype,
    dot_precision,
    launch,
)
from niwaki.kernels.triton.merge import checked_sinks, merge_parts
from niwaki.kernels.triton.small import check_pool, numbers_of, scale_at, scales_of
from niwaki.kernels.triton.tuning import Tuning, tuning_for

MAX_SPLIT_TOKENS = 16  # rows of at most so many new tokens have their keys split into small parts
# Of a launch; a token has as many parts as the longest row. With 32 heads of 128 channels so many take 270 MB, and are
# far more work than a GPU has places for.
MAX_PARTS = 1 << 14


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Rows of one kind of a batch, in device memory. Row i of them is `row[i]` of the batch."""

    row: torch.Tensor  # int32 [rows], into the page table and `length`
    first: torch.Tensor  # int32 [rows + 1]: their tokens counted up
    token: torch.Tensor  # int32 [their tokens], ascending within a row
    num_tokens: int
    max_length: int  # of the keys that one of them sees


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    length: torch.Tensor,
    rows: RaggedRows,
    out: torch.Tensor,
    rule: AttentionRule = PLAIN,
    *,
    split: int = 0,
    tuning: Tuning | None = None,
) -> None:
    """out[t] for the tokens t of `rows`; others stay as they are. A row of length 0 gets zeros.

    q, out [tokens, heads, head_dim], one dtype, elements of a head side by side; k_pool, v_pool contiguous [pages,
    page_size, kv_heads, head_dim], of that dtype or of 8 bits (kernels/small_kv.py); page_table int32 [batch, widest];
    length int32 [batch]: keys of each row, its new ones included. Indices come from a plan, which has checked them.
    `split`: 0, or keys a part, a multiple of 128; doubled where there would be more than `MAX_PARTS`.
    """
    name, device = "paged_attention", q.device
    heads, kv_heads, head_dim = check_attention(name, q, k_pool, v_pool, page_table, out)
    check(name, "length", length, (len(page_table),), torch.int32, device, contiguous=True)
    check(name, "row", rows.row, (None,), torch.int32, device, contiguous=True)
    check(name, "first", rows.first, (len(rows.row) + 1,), torch.int32, device, contiguous=True)
    check(name, "token", rows.token, (rows.num_tokens,), torch.int32, device, contiguous=True)
    if split % 128:
        raise ValueError(f"{name}: split must be a multiple of 128, got {split}")
    sinks = checked_sinks(name, rule.sinks, q)
    group = heads // kv_heads
    one_each = rows.num_tokens == len(rows.row)
    has_few = rows.num_tokens <= MAX_SPLIT_TOKENS * len(rows.row)
    kind = "decode" if one_each else "split" if split and has_few else "prefill"
    chosen = tuning or tuning_for(kind, device, head_dim=head_dim, group=group, bits=8 * k_pool.element_size())
    block_m = block_of(group, 16) if one_each else max(chosen.block_m, block_of(group, 16))
    tile = 1 if one_each else block_m // group
    split = bounded_split(split, rows.max_length, rows.num_tokens)
    num_splits = ceil_div(rows.max_length, split) if split else 1
    if num_splits > 1:
        target = torch.empty((rows.num_tokens * num_splits, heads, head_dim), dtype=torch.float32, device=device)
        lse = torch.empty((len(target), heads), dtype=torch.float32, device=device)
    else:  # one part: the same arithmetic, without the way round
        target = lse = out
    try:
        launch(
            _paged_attention,
            (rows.num_tokens // tile + (0 if one_each else len(rows.row)), kv_heads, num_splits),
            q, numbers_of(k_pool), numbers_of(v_pool), target, lse, page_table, length, rows.row, rows.first,
            rows.token, scales_of(k_pool), scales_of(v_pool), sinks, len(rows.row), rule.scale_for(head_dim),
            rule.window, rule.chunk, rule.soft_cap, k_pool.stride(1), page_table.stride(0), q.stride(0),
            q.stride(1), target.stride(0), target.stride(1), num_splits, split,
            PAGE=k_pool.shape[1],
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=block_of(head_dim, 16),
            TILE=tile,
            IS_SINGLE=one_each,
            BLOCK_M=block_m,
            BLOCK_N=chosen.block_n,
            IS_SPLIT=num_splits > 1,
            HAS_CAP=rule.soft_cap != NO_CAP,
            HAS_WINDOW=rule.has_window,
            HAS_SINKS=rule.sinks is not None,
            IS_SMALL=is_small(k_pool),
            DOT=dot_dtype(q.dtype),
            PRECISION=dot_precision(q.dtype),
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )  # fmt: skip
    except OutOfResources:  # a smaller GPU, and wide heads
        if one_each or block_m == block_of(group, 16):
            raise
        smaller = replace(chosen, block_m=block_m // 2)
        paged_attention(q, k_pool, v_pool, page_table, length, rows, out, rule, split=split, tuning=smaller)
        return
    if num_splits > 1:
        merge_parts(target, lse, num_splits, rows.token, out, rule.sinks)


def check_attention(
    name: str,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
) -> tuple[int, int, int]:
    """heads, kv_heads and head_dim of operands that fit."""
    check(name, "q", q, (None, None, None), FLOATS, q.device)
    check(name, "out", out, q.shape, q.dtype, q.device)
    _, heads, head_dim = q.shape
    check_pool(name, "k_pool", k_pool, head_dim, q.dtype, q.device)
    check(name, "v_pool", v_pool, k_pool.shape, k_pool.dtype, q.device, contiguous=True)
    kv_heads = k_pool.shape[2]
    check(name, "page_table", page_table, (None, None), torch.int32, q.device)
    if heads % kv_heads:
        raise ValueError(f"{name}: {heads} query heads are no multiple of {kv_heads} kv heads")
    return heads, kv_heads, head_dim


@triton.jit
def row_of_tile(first_ptr, tile, num_rows, TILE: tl.constexpr):
    """The last row i whose first tile, first[i] // TILE + i, is not behind `tile`."""
    low = tile * 0
    high = low + num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(first_ptr + middle) // TILE + middle <= tile:
            low = middle
        else:
            high = middle
    return low


def bounded_split(split: int, length: int, num_tokens: int) -> int:
    """`split`, or so many times twice that, that `num_tokens` of `length` keys have few enough parts."""
    while split and split < length and num_tokens * ceil_div(length, split) > MAX_PARTS:
        split *= 2
    return split


# What differs from batch to batch is not compiled for anew: that would stop a step for seconds.
@triton.jit(do_not_specialize=["num_rows", "table_stride", "num_splits", "split"])
def _paged_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    length_ptr,
    row_ptr,
    first_ptr,
    token_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sink_ptr,
    num_rows,
    scale,
    window,
    chunk,
    soft_cap,
    token_stride,
    table_stride,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    num_splits,
    split,  # keys of a part
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    IS_SINGLE: tl.constexpr,  # every row has one token
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SMALL: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(1)
    if IS_SINGLE:
        index = tl.program_id(0)
        tile_token = 0
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tokens of a row, which see most, come first
        index = row_of_tile(first_ptr, tile, num_rows, TILE)
        tile_token = (tile - tl.load(first_ptr + index) // TILE - index) * TILE
    first = tl.load(first_ptr + index)
    count = tl.load(first_ptr + index + 1) - first
    if tile_token < count:
        row = tl.load(row_ptr + index).to(tl.int64)
        length = tl.load(length_ptr + row)
        start = length - count  # position of the row's first new token; below 0 where there are no keys

        first_at = start + tile_token
        end = tl.minimum(length, first_at + TILE)
        first_key = 0
        if HAS_WINDOW:
            first_key = tl.maximum(first_seen_by(first_at, window, chunk), 0)
        if IS_SPLIT:
            first_of_part = tl.program_id(2) * split
            first_key = tl.maximum(first_key, first_of_part)
            end = tl.minimum(end, first_of_part + split)

        m = tl.arange(0, BLOCK_M)
        row_token = tile_token + m // GROUP
        is_query = (m < TILE * GROUP) & (row_token < count)
        query_at = tl.where(is_query, start + row_token, -1)
        token = tl.load(token_ptr + first + row_token, mask=is_query, other=0).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        d = tl.arange(0, BLOCK_D)
        inside = is_query[:, None] & (d < HEAD_DIM)[None, :]
        q_at = token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :]
        # A part without keys, of which a batch with one long row has many, reads nothing.
        q = tl.load(q_ptr + q_at, mask=inside & (first_key < end), other=0.0).to(DOT)

        begin = first_key // BLOCK_N * BLOCK_N
        if HAS_WINDOW:
            whole = begin
        else:  # all keys up to the first query's are seen by all of the tile
            whole = tl.maximum(tl.minimum((first_at + 1) // BLOCK_N * BLOCK_N, end // BLOCK_N * BLOCK_N), begin)
        scales = scale_at(tl.num_programs(1), kv_head, HEAD_DIM)
        out, lse = attend_keys(
            q, query_at, first_seen_by(query_at, window, chunk), k_ptr + kv_head * HEAD_DIM,
            v_ptr + kv_head * HEAD_DIM, k_scale_ptr + scales, v_scale_ptr + scales, table_ptr + row * table_stride,
            begin, whole, end, first_key, scale, soft_cap, token_stride,
            PAGE, HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_N, HAS_CAP, IS_SMALL, PRECISION,
        )  # fmt: skip
        if IS_SPLIT:
            part = (first + row_token).to(tl.int64) * num_splits + tl.program_id(2)
            tl.store(lse_ptr + part * (out_stride_t // HEAD_DIM) + head, lse, mask=is_query)
            is_read = inside & (lse > -float("inf"))[:, None]
            part_at = part[:, None] * out_stride_t + head[:, None] * out_stride_h + d[None, :]
            tl.store(out_ptr + part_at, out, mask=is_read)
        else:
            if HAS_SINKS:
                sink = tl.load(sink_ptr + head, mask=is_query, other=0.0) * LOG2_E
                out = out / (1.0 + tl.exp2(sink - lse))[:, None]
            out_at = token[:, None] * out_stride_t + head[:, None] * out_stride_h + d[None, :]
            tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
