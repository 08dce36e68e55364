"""The cases of all kernels but attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from niwaki.kernels.rms_norm import qk_norm_torch, rms_norm_torch
from niwaki.kernels.rope import rope_tables
from niwaki.kernels.small_kv import KINDS, narrowed_torch, widened_torch
from niwaki.kernels.store_kv import rope_store_kv_torch
from niwaki.kernels.triton import moe
from niwaki.kernels.triton.bitmask import apply_bitmask, apply_bitmask_torch
from niwaki.kernels.triton.case import PAGE, Case, Size, randn, tolerance_of
from niwaki.kernels.triton.norm import add_rms_norm, qk_norm
from niwaki.kernels.triton.pages import copy_pages
from niwaki.kernels.triton.penalties import Changes, change_logits
from niwaki.kernels.triton.rope_store import rope_store_kv
from niwaki.kernels.triton.rows import gather_rows
from niwaki.kernels.triton.sample import Draws, misses_torch, sample_rows, sample_rows_torch


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


def head_norm_case(size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    tokens, q_width, k_width = size.rows * 4, size.heads * size.head_dim, size.kv_heads * size.head_dim
    qkv = randn(tokens, q_width + 2 * k_width, device=device, dtype=dtype)
    weights = [randn(size.head_dim, device=device, dtype=dtype) for _ in range(2)]

    def run() -> torch.Tensor:
        out = qkv.clone()
        qk_norm(out, weights[0], weights[1], q_width, k_width, 1e-5)
        return out

    def reference() -> torch.Tensor:
        out = qkv.clone()
        qk_norm_torch(out, weights[0], weights[1], q_width, k_width, 1e-5)
        return out

    return Case(
        "head norm",
        f"{tokens} tokens, {size.heads}/{size.kv_heads} x {size.head_dim}, with a copy",
        run,
        reference,
        tolerance_of(dtype),
        num_bytes=4 * qkv.numel() * dtype.itemsize,
    )


def gate_case(
    size: Size,
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    gate: Callable[[torch.Tensor, torch.Tensor], None],
    reference: Callable[[torch.Tensor], torch.Tensor],
) -> Case:
    tokens = size.rows * 4
    gate_up = randn(tokens, 2 * size.inner, device=device, dtype=dtype)
    out = torch.empty(tokens, size.inner, device=device, dtype=dtype)

    def run() -> torch.Tensor:
        gate(gate_up, out)
        return out

    return Case(
        name,
        f"{tokens} x 2 x {size.inner}",
        run,
        lambda: reference(gate_up),
        tolerance_of(dtype),
        num_bytes=3 * out.numel() * dtype.itemsize,
    )


def rope_case(size: Size, device: torch.device, dtype: torch.dtype, kind: str = "auto") -> Case:
    """`kind`: of the cache, as the engine's `kv_dtype`."""
    tokens = size.rows * 4
    cos, sin = (table.to(device) for table in rope_tables(size.head_dim, 5e5, None, tokens))
    qkv = randn(tokens, (size.heads + 2 * size.kv_heads) * size.head_dim, device=device, dtype=dtype)
    shape = (-(-tokens // PAGE), PAGE, size.kv_heads, size.head_dim)
    expected = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
    pools = [torch.zeros_like(pool) if kind == "auto" else narrowed_torch(pool, KINDS[kind]) for pool in expected]
    index = torch.arange(tokens, dtype=torch.int32, device=device)
    turned = torch.empty_like(qkv)

    def result(rows: torch.Tensor, keys_and_values: list[torch.Tensor]) -> torch.Tensor:
        queries = rows[:, : size.heads * size.head_dim]
        return torch.cat([queries.flatten(), *(part.flatten() for part in keys_and_values)])

    def run() -> torch.Tensor:
        turned.copy_(qkv)
        rope_store_kv(turned, cos, sin, index, index, *pools)
        return result(turned, pools if kind == "auto" else [widened_torch(pool).to(dtype) for pool in pools])

    def reference() -> torch.Tensor:
        again = qkv.clone()
        rope_store_kv_torch(again, cos, sin, index.long(), index.long(), *expected)
        return result(again, expected)

    return Case(
        rope_name(kind),
        f"{tokens} tokens, {size.heads}/{size.kv_heads} x {size.head_dim}, with copies in and out",
        run,
        reference,
        {"auto": tolerance_of(dtype), "int8": 0.01, "fp8": 0.05}[kind],  # half a step of a number in 8 bits
        num_bytes=8 * qkv.numel() * dtype.itemsize,
    )


def rope_name(kind: str) -> str:
    return "rope + KV store" if kind == "auto" else f"rope + KV store, {kind} cache"


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
        1e-6,
        num_bytes=logits.numel() * 4,
        seen_as=lambda tokens: 1.0 + misses_torch(logits, draws, tokens),
    )


def penalties_case(size: Size, device: torch.device) -> Case:
    rows, each = size.rows, min(256, size.vocab)
    logits = randn(rows, size.vocab, device=device, dtype=torch.float32)
    token = torch.stack([torch.randperm(size.vocab, device=device)[:each] for _ in range(rows)])
    count = torch.randint(3, (rows, each), device=device)
    bias = randn(rows, each, device=device, dtype=torch.float32)
    penalties = torch.tensor([1.3, 0.2, 0.1], device=device).repeat(rows, 1)
    changes = Changes(
        bounds=torch.arange(rows + 1, dtype=torch.int32, device=device) * each,
        token=token.int().flatten(),
        count=count.int().flatten(),
        is_seen=torch.ones(rows * each, dtype=torch.int32, device=device),
        bias=bias.flatten(),
        penalties=penalties,
    )

    def run() -> torch.Tensor:
        out = logits.clone()
        change_logits(out, changes)
        return out

    def reference() -> torch.Tensor:
        values = logits.gather(1, token)
        values = torch.where(values > 0, values / 1.3, values * 1.3)
        values = torch.where(count > 0, values - (count * 0.2 + 0.1), values) + bias
        return logits.scatter(1, token, values)

    return Case("penalties", f"{rows} x {each} tokens, with a copy", run, reference, 1e-5, num_bytes=logits.numel() * 8)


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
