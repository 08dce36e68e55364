"""The cases of attention: single tokens, long prompts, windows, 8 bits, and a tree, over a cache of pages in order."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from niwaki.kernels.checks import SCALE_BYTES
from niwaki.kernels.operand import Operand
from niwaki.kernels.paged_decode import paged_decode_attention_torch
from niwaki.kernels.rule import PLAIN, AttentionRule
from niwaki.kernels.small_kv import KINDS, narrowed_torch, widened_torch
from niwaki.kernels.triton.attend import AttentionCall
from niwaki.kernels.triton.case import PAGE, Case, Run, Size, randn, tolerance_of
from niwaki.kernels.triton.paged_attention import paged_attention
from niwaki.kernels.triton.peers import decode_peers, made_late, prefill_peers
from niwaki.kernels.triton.plan import PARTED_SPLIT, SPLIT, DevicePlan, device_plan
from niwaki.kernels.triton.tree_attention import tree_attention

FLEX = "FlexAttention"
SLOW_PEERS = (FLEX,)  # torch compiles for half a minute
WINDOW, SINKS = "decode, window and cap", "decode, chunk and sinks"
TURN = "next turn"


class Cache:
    """A batch of rows (start, count) with keys and values in pages, in order, the first `shared` pages in common."""

    def __init__(
        self,
        size: Size,
        starts: list[int],
        counts: list[int],
        device: torch.device,
        dtype: torch.dtype,
        shared: int = 0,
    ) -> None:
        self.starts, self.counts = np.array(starts, np.int64), np.array(counts, np.int64)
        lengths = self.starts + self.counts
        own = int(-(-lengths.max() // PAGE)) - shared
        trunk = np.arange(shared, dtype=np.int32)
        self.table = np.stack([np.r_[trunk, shared + i * own + np.arange(own)] for i in range(len(starts))])
        self.table = self.table.astype(np.int32)
        shape = (int(self.table.max()) + 1, PAGE, size.kv_heads, size.head_dim)
        self.k_pool, self.v_pool = (randn(*shape, device=device, dtype=dtype) for _ in range(2))
        self.q = randn(int(self.counts.sum()), size.heads, size.head_dim, device=device, dtype=dtype)
        self.positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        self.group = size.heads // size.kv_heads
        self.device = device

    def plan(self, *, shares: bool) -> DevicePlan:
        ids = np.zeros(len(self.positions), np.int32)
        return device_plan(
            self.starts, self.counts, self.table, ids, self.positions, self.positions,
            page_size=PAGE, group=self.group, device=self.device, shares=shares,
        )  # fmt: skip

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [rows, heads, count, head_dim], keys and values [rows, kv_heads, length, head_dim] of equal rows."""
        rows, length = len(self.counts), int((self.starts + self.counts)[0])
        pages = torch.from_numpy(self.table.astype(np.int64)).to(self.device)
        keys, values = (pool[pages].flatten(1, 2)[:, :length].transpose(1, 2) for pool in (self.k_pool, self.v_pool))
        q = self.q.view(rows, -1, *self.q.shape[1:]).transpose(1, 2)
        return q, keys.contiguous(), values.contiguous()

    def reference(self) -> torch.Tensor:
        q, keys, values = self.dense()
        out = torch.empty(q.shape, dtype=torch.float32, device=self.device)
        count, length = q.shape[2], keys.shape[2]
        everything = torch.ones(count, length, dtype=torch.bool, device=self.device)
        seen = everything.tril(length - count) if count > 1 else None
        for row in range(len(q)):  # row by row: float32 copies of everything would not fit
            one, its_keys, its_values = (tensor[row : row + 1].float() for tensor in (q, keys, values))
            mixed = scaled_dot_product_attention(one, its_keys, its_values, attn_mask=seen, enable_gqa=True)
            out[row] = mixed[0]
        return out.transpose(1, 2).reshape(self.q.shape)

    def sdpa(self) -> Run:
        q, keys, values = self.dense()
        is_causal = q.shape[2] > 1
        return lambda: scaled_dot_product_attention(q, keys, values, is_causal=is_causal, enable_gqa=True)


def flat(cache: Cache, plan: DevicePlan, small: tuple[torch.Tensor, ...] = ()) -> Run:
    """`small`: pools to read instead."""
    out = torch.empty_like(cache.q)

    def run() -> torch.Tensor:
        k_pool, v_pool = small or (cache.k_pool, cache.v_pool)
        AttentionCall(cache.q, k_pool, v_pool, out, PLAIN).launch(plan)
        return out

    return run


def turn_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    """What a conversation goes on with, behind what was said before."""
    count, start = 64, max(8 * size.keys, 2 * PARTED_SPLIT - 100)
    cache = Cache(size, [start], [count], device, dtype)
    plan, out = cache.plan(shares=False), torch.empty_like(cache.q)
    (rows,) = plan.parted
    operands = cache.q, cache.k_pool, cache.v_pool, plan.page_table, plan.length, rows

    def in_one_part() -> torch.Tensor:
        paged_attention(*operands, out)
        return out

    return Case(
        TURN,
        f"{count} tokens behind {start}, {size.heads}/{size.kv_heads} x {size.head_dim}",
        flat(cache, plan),
        cache.reference,
        tolerance_of(dtype),
        num_bytes=2 * (start + count) * size.kv_heads * size.head_dim * dtype.itemsize,
        operations=4 * size.heads * size.head_dim * count * (start + count / 2),
        peers={"in one part": in_one_part},
    )


def decode_case(size: Size, device: torch.device, dtype: torch.dtype, kind: str = "auto") -> Case:
    """`kind`: of the cache, as the engine's `kv_dtype`."""
    cache = Cache(size, [size.keys - 1] * size.rows, [1] * size.rows, device, dtype)
    small: tuple[torch.Tensor, ...] = ()
    item, peers = size.head_dim * dtype.itemsize, {"SDPA": cache.sdpa(), **decode_peers(cache)}
    if kind != "auto":
        small = tuple(narrowed_torch(pool, KINDS[kind]) for pool in (cache.k_pool, cache.v_pool))
        cache.k_pool, cache.v_pool = (widened_torch(pool).to(dtype) for pool in small)
        item, peers = size.head_dim + SCALE_BYTES, {}
    return Case(
        decode_name(kind),
        f"{size.rows} x {size.keys} keys, {size.heads}/{size.kv_heads} x {size.head_dim}",
        flat(cache, cache.plan(shares=False), small),
        cache.reference,
        tolerance_of(dtype),
        num_bytes=2 * size.rows * size.keys * size.kv_heads * item,
        peers=peers,
    )


def decode_name(kind: str) -> str:
    return "decode" if kind == "auto" else f"decode, {kind} cache"


def window_case(size: Size, device: torch.device, dtype: torch.dtype, name: str) -> Case:
    rule = AttentionRule(window=size.keys // 2, soft_cap=30.0)
    if name == SINKS:
        rule = AttentionRule(chunk=size.keys // 2, sinks=Operand.of(torch.zeros(size.heads, device=device)))
    cache = Cache(size, [size.keys - 1] * size.rows, [1] * size.rows, device, dtype)
    plan, out = cache.plan(shares=False), torch.empty_like(cache.q)

    def run() -> torch.Tensor:
        operands = cache.q, cache.k_pool, cache.v_pool, plan.page_table, plan.length, plan.split[0], out
        paged_attention(*operands, rule, split=SPLIT)
        return out

    def reference() -> torch.Tensor:
        expected, rows = torch.empty_like(cache.q), torch.arange(size.rows, device=device)
        length = torch.full((size.rows,), size.keys, device=device)
        operands = cache.q, cache.k_pool, cache.v_pool, plan.page_table.long(), rows, rows, length, expected
        paged_decode_attention_torch(*operands, rule)
        return expected

    return Case(
        name,
        f"{size.rows} x {size.keys // 2} of {size.keys} keys, {size.heads}/{size.kv_heads} x {size.head_dim}",
        run,
        reference,
        tolerance_of(dtype),
        num_bytes=size.rows * size.keys * size.kv_heads * size.head_dim * dtype.itemsize,
    )


def prefill_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    cache = Cache(size, [0, 0], [size.prompt] * 2, device, dtype)
    peers: dict[str, Run] = {"SDPA": cache.sdpa(), **prefill_peers(cache)}
    if device.type == "cuda":
        peers[FLEX] = made_late(_flex, cache)
    return Case(
        "prefill",
        f"2 x {size.prompt} tokens, {size.heads}/{size.kv_heads} x {size.head_dim}",
        flat(cache, cache.plan(shares=False)),
        cache.reference,
        tolerance_of(dtype),
        num_bytes=2 * cache.q.numel() * dtype.itemsize,
        operations=2 * 4 * size.heads * size.head_dim * size.prompt * (size.prompt + 1) / 2,
        peers=peers,
    )


def _flex(cache: Cache) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # compiles: on a GPU only

    q, keys, values = cache.dense()
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device=str(cache.device))
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, keys, values, block_mask=mask, enable_gqa=True)


def tree_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    shared = size.keys // PAGE * PAGE
    start = shared + size.own_keys - 1
    rows = max(size.rows, 16)  # of fewer, sharing would not pay
    cache = Cache(size, [start] * rows, [1] * rows, device, dtype, shared=shared // PAGE)
    plan, out = cache.plan(shares=True), torch.empty_like(cache.q)

    def run() -> torch.Tensor:
        if plan.tree is None:  # too small to pay
            return flat(cache, plan)()
        tree_attention(cache.q, cache.k_pool, cache.v_pool, plan.page_table, plan.positions, plan.tree, out)
        return out

    return Case(
        "tree decode",
        f"{rows} x ({shared} shared + {size.own_keys}) keys",
        run,
        cache.reference,
        tolerance_of(dtype),
        num_bytes=2 * (shared + rows * size.own_keys) * size.kv_heads * size.head_dim * dtype.itemsize,
        peers={"row by row": flat(cache, cache.plan(shares=False))},
    )
