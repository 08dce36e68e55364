"""What `python -m niwaki.kernels.check` runs: every kernel on one size of inputs, beside its reference and its peers.

A case knows the bytes that it must move and the operations that it must do, each input read once; the check turns them
and the time into shares of what the device can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from niwaki.kernels.rms_norm import rms_norm_torch
from niwaki.kernels.rope import rope_tables
from niwaki.kernels.silu_mul import silu_mul_torch
from niwaki.kernels.store_kv import rope_store_kv_torch
from niwaki.kernels.triton import moe
from niwaki.kernels.triton.bitmask import apply_bitmask, apply_bitmask_torch
from niwaki.kernels.triton.gate import silu_mul
from niwaki.kernels.triton.norm import add_rms_norm
from niwaki.kernels.triton.paged_attention import paged_attention
from niwaki.kernels.triton.pages import copy_pages
from niwaki.kernels.triton.plan import SPLIT, DevicePlan, device_plan
from niwaki.kernels.triton.rope_store import FP8, quantized_torch, rope_store_kv
from niwaki.kernels.triton.rows import gather_rows
from niwaki.kernels.triton.sample import Draws, sample_rows, sample_rows_torch
from niwaki.kernels.triton.tree_attention import tree_attention

PAGE = 16
DECODE, DECODE_FP8 = "decode", "decode, FP8 cache"
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """`run` and `reference` give the same tensor, `run` in the type of the kernel."""

    name: str
    shape: str
    run: Run
    reference: Run
    tolerance: float  # of |out - reference| / |reference|
    num_bytes: float = 0.0
    operations: float = 0.0
    peers: Mapping[str, Run] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Size:
    """How large the cases are. `real` is an 8B Llama at a large batch."""

    rows: int
    keys: int
    prompt: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    experts: int
    per_token: int
    own_keys: int  # behind the shared ones, in the tree


TINY = Size(2, 40, 20, 4, 2, 16, 48, 40, 203, 4, 2, 5)
COMPILED = Size(4, 1024, 64, 32, 8, 128, 4096, 1024, 4096, 8, 2, 32)  # real widths, few rows: nothing runs
REAL = Size(128, 4096, 4096, 32, 8, 128, 4096, 14_336, 128_256, 64, 8, 256)


def cases(size: Size, device: torch.device, dtype: torch.dtype, only: str = "") -> Iterator[Case]:
    """Those whose name holds `only`, one after another: each frees its memory before the next."""
    makers: dict[str, Callable[[], Case]] = {
        DECODE: lambda: decode_case(size, device, dtype),
        DECODE_FP8: lambda: decode_case(size, device, torch.bfloat16, is_fp8=True),
        "prefill": lambda: prefill_case(size, device, dtype),
        "tree decode": lambda: tree_case(size, device, dtype),
        "residual + RMSNorm": lambda: norm_case(size, device, dtype),
        "SiLU gate": lambda: gate_case(size, device, dtype),
        "rope + KV store": lambda: rope_case(size, device, dtype),
        "sample": lambda: sample_case(size, device),
        "bitmask": lambda: bitmask_case(size, device),
        "gather two": lambda: gather_case(size, device, dtype),
        "copy pages": lambda: copy_case(size, device, dtype),
        "experts: route, product, sum": lambda: moe_case(size, device, dtype),
    }
    for name, make in makers.items():
        if only in name:
            case = make()
            assert case.name == name
            yield case
            del case


def tolerance_of(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


def randn(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


# ---------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------


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
        for row in range(len(q)):  # row by row: float32 copies of everything would not fit
            one, its_keys, its_values = (tensor[row : row + 1].float() for tensor in (q, keys, values))
            mixed = scaled_dot_product_attention(one, its_keys, its_values, is_causal=q.shape[2] > 1, enable_gqa=True)
            out[row] = mixed[0]
        return out.transpose(1, 2).reshape(self.q.shape)

    def sdpa(self) -> Run:
        q, keys, values = self.dense()
        is_causal = q.shape[2] > 1
        return lambda: scaled_dot_product_attention(q, keys, values, is_causal=is_causal, enable_gqa=True)


def flat(cache: Cache, plan: DevicePlan) -> Run:
    out = torch.empty_like(cache.q)

    def run() -> torch.Tensor:
        operands = cache.q, cache.k_pool, cache.v_pool, plan.page_table, plan.length
        for rows in plan.split:
            paged_attention(*operands, rows, out, split=SPLIT)
        for rows in plan.whole:
            paged_attention(*operands, rows, out)
        return out

    return run


def decode_case(size: Size, device: torch.device, dtype: torch.dtype, *, is_fp8: bool = False) -> Case:
    cache = Cache(size, [size.keys - 1] * size.rows, [1] * size.rows, device, dtype)
    run = flat(cache, cache.plan(shares=False))
    if is_fp8:
        run = _in_fp8(cache)
    return Case(
        DECODE_FP8 if is_fp8 else DECODE,
        f"{size.rows} x {size.keys} keys, {size.heads}/{size.kv_heads} x {size.head_dim}",
        run,
        cache.reference,
        tolerance_of(dtype),
        num_bytes=2 * size.rows * size.keys * size.kv_heads * size.head_dim * (1 if is_fp8 else dtype.itemsize),
        peers={} if is_fp8 else {"SDPA": cache.sdpa()},
    )


def _in_fp8(cache: Cache) -> Run:
    """The cache's keys and values become what FP8 keeps of them, and the run reads them so."""
    plan, out = cache.plan(shares=False), torch.empty_like(cache.q)
    scale = torch.full((cache.k_pool.shape[2],), 0.02, device=cache.device)
    k_pool, v_pool = (
        quantized_torch(pool.flatten(0, 1), scale).view(pool.shape) for pool in (cache.k_pool, cache.v_pool)
    )
    cache.k_pool, cache.v_pool = ((pool.float() * 0.02).to(cache.q.dtype) for pool in (k_pool, v_pool))
    assert k_pool.dtype == FP8

    def run() -> torch.Tensor:
        operands = cache.q, k_pool, v_pool, plan.page_table, plan.length, plan.split[0], out
        paged_attention(*operands, k_scale=scale, v_scale=scale, split=SPLIT)
        return out

    return run


def prefill_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    cache = Cache(size, [0, 0], [size.prompt] * 2, device, dtype)
    peers: dict[str, Run] = {"SDPA": cache.sdpa()}
    if device.type == "cuda":
        peers["FlexAttention"] = _flex(cache)
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


# ---------------------------------------------------------------------------------------------------------------
# Row by row
# ---------------------------------------------------------------------------------------------------------------


def norm_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    tokens, width = size.rows * 4, size.hidden
    x, delta = (randn(tokens, width, device=device, dtype=dtype) for _ in range(2))
    weight, out = randn(width, device=device, dtype=dtype), torch.empty_like(x)
    kept = x.clone()

    def run() -> torch.Tensor:
        x.copy_(kept)
        add_rms_norm(x, delta, weight, 1e-5, out)
        return out

    return Case(
        "residual + RMSNorm",
        f"{tokens} x {width}, with a copy of x",
        run,
        lambda: rms_norm_torch(kept + delta, weight, 1e-5),
        tolerance_of(dtype),
        num_bytes=6 * x.numel() * dtype.itemsize,
    )


def gate_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    tokens = size.rows * 4
    gate_up = randn(tokens, 2 * size.inner, device=device, dtype=dtype)
    out = torch.empty(tokens, size.inner, device=device, dtype=dtype)

    def run() -> torch.Tensor:
        silu_mul(gate_up, out)
        return out

    return Case(
        "SiLU gate",
        f"{tokens} x 2 x {size.inner}",
        run,
        lambda: silu_mul_torch(gate_up),
        tolerance_of(dtype),
        num_bytes=3 * out.numel() * dtype.itemsize,
    )


def rope_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    tokens = size.rows * 4
    cos, sin = (table.to(device) for table in rope_tables(size.head_dim, 5e5, None, tokens))
    qkv = randn(tokens, (size.heads + 2 * size.kv_heads) * size.head_dim, device=device, dtype=dtype)
    shape = (-(-tokens // PAGE), PAGE, size.kv_heads, size.head_dim)
    pools = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(4)]
    index = torch.arange(tokens, dtype=torch.int32, device=device)
    turned = torch.empty_like(qkv)

    def run() -> torch.Tensor:
        turned.copy_(qkv)
        rope_store_kv(turned, cos, sin, index, index, pools[0], pools[1])
        return torch.cat([turned[:, : size.heads * size.head_dim].flatten(), pools[0].flatten(), pools[1].flatten()])

    def reference() -> torch.Tensor:
        again = qkv.clone()
        rope_store_kv_torch(again, cos, sin, index.long(), index.long(), pools[2], pools[3])
        return torch.cat([again[:, : size.heads * size.head_dim].flatten(), pools[2].flatten(), pools[3].flatten()])

    return Case(
        "rope + KV store",
        f"{tokens} tokens, {size.heads}/{size.kv_heads} x {size.head_dim}, with copies in and out",
        run,
        reference,
        tolerance_of(dtype),
        num_bytes=8 * qkv.numel() * dtype.itemsize,
    )


def sample_case(size: Size, device: torch.device) -> Case:
    rows, vocab = size.rows, size.vocab
    logits = 3 * randn(rows, vocab, device=device, dtype=torch.float32)
    number = torch.arange(rows, device=device)
    masks = torch.full((1, -(-vocab // 32)), 0x7FFF7FFF, dtype=torch.int32, device=device)
    draws = Draws(
        scale=torch.full((rows,), 1.25, device=device),
        top_p=torch.where(number % 3 == 0, 1.0, 0.9).double(),
        min_p=torch.where(number % 3 == 2, 0.01, 0.0).double(),
        top_k=torch.where(number % 3 == 1, 50, vocab),
        seed=number,
        position=number,
        mask_of=torch.where(number % 2 == 0, 0, -1).int(),
        masks=masks,
    )
    return Case(
        "sample",
        f"{rows} x {vocab}: free, top-k 50, top-p 0.9 and min-p; half masked",
        lambda: sample_rows(logits, draws),
        lambda: sample_rows_torch(logits, draws),
        0.0,  # a token that differs is looked at: an edge that rounding crosses is rarer than one in a million draws
        num_bytes=logits.numel() * 4,
    )


def bitmask_case(size: Size, device: torch.device) -> Case:
    rows, vocab = size.rows, size.vocab
    logits = randn(rows, vocab, device=device, dtype=torch.float32)
    low, high = -(2**31), 2**31 - 1
    masks = torch.randint(low, high, (rows, -(-vocab // 32)), device=device).int()
    mask_of = torch.arange(rows, dtype=torch.int32, device=device) - 1

    def run() -> torch.Tensor:
        out = logits.clone()
        apply_bitmask(out, masks, mask_of)
        return out.isinf().float()

    def reference() -> torch.Tensor:
        out = logits.clone()
        apply_bitmask_torch(out, masks, mask_of)
        return out.isinf().float()

    return Case("bitmask", f"{rows} x {vocab}, with copies", run, reference, 0.0, num_bytes=logits.numel() * 20)


def gather_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    tokens = size.rows * 16
    x, other = (randn(tokens, size.hidden, device=device, dtype=dtype) for _ in range(2))
    index = torch.randperm(tokens, device=device)[: tokens // 2].int()
    out, other_out = (torch.empty(len(index), size.hidden, device=device, dtype=dtype) for _ in range(2))

    def run() -> torch.Tensor:
        gather_rows(index, (x, out), (other, other_out))
        return out

    return Case(
        "gather two",
        f"{len(index)} of {tokens} x {size.hidden}",
        run,
        lambda: x.index_select(0, index),
        0.0,
        num_bytes=4 * out.numel() * dtype.itemsize,
    )


def copy_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    pages = 2 * size.rows
    pool = randn(4, 2, pages, PAGE, size.kv_heads, size.head_dim, device=device, dtype=dtype)
    copies = [(i, size.rows + i, PAGE) for i in range(size.rows)]

    def run() -> torch.Tensor:
        copy_pages(pool, copies)
        return pool[:, :, size.rows :]

    return Case(
        "copy pages",
        f"{size.rows} pages x 4 layers, with its list",
        run,
        lambda: pool[:, :, : size.rows],
        0.0,
        num_bytes=pool.numel() * dtype.itemsize,
    )


def moe_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    tokens, hidden, width = size.rows * 4, size.hidden // 2, size.hidden // 4
    x = randn(tokens, hidden, device=device, dtype=dtype)
    weight = randn(size.experts, width, hidden, device=device, dtype=dtype)
    scores = randn(tokens, size.experts, device=device, dtype=torch.float32)
    weights = torch.empty(tokens, size.per_token, device=device)
    chosen = torch.empty(tokens, size.per_token, dtype=torch.int32, device=device)
    results = torch.empty(tokens * size.per_token, width, device=device, dtype=dtype)
    out = torch.empty(tokens, width, device=device, dtype=dtype)

    def run() -> torch.Tensor:
        moe.route(scores, weights, chosen, renormalise=True)
        order, bounds = moe.sorted_choices(chosen, size.experts)
        moe.grouped_linear(x, weight, order, bounds, results, per_row=size.per_token)
        moe.combine(results, weights, out)
        return out

    def reference() -> torch.Tensor:
        shares, experts = moe.route_torch(scores, size.per_token, renormalise=True)
        total = torch.zeros(tokens, width, device=device)
        for expert in range(size.experts):
            token, place = torch.nonzero(experts == expert, as_tuple=True)
            product = (x[token].float() @ weight[expert].float().t()).to(dtype).float()
            total.index_add_(0, token, product * shares[token, place][:, None])
        return total

    return Case(
        "experts: route, product, sum",
        f"{tokens} tokens, {size.per_token} of {size.experts}, {hidden} -> {width}",
        run,
        reference,
        tolerance_of(dtype),
        num_bytes=weight.numel() * dtype.itemsize,
        operations=2 * tokens * size.per_token * hidden * width,
    )
