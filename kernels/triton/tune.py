"""Measures how the kernels are best cut for the shapes of common models, on the GPU at hand, and keeps it.

Called by `python -m niwaki.kernels.check --tune`. What is kept is found by `tuning_for`, see tuning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from niwaki.kernels.coded import Coded, coded
from niwaki.kernels.small_kv import KINDS, narrowed_torch
from niwaki.kernels.triton.attention_cases import Cache
from niwaki.kernels.triton.case import HEADS, REAL, Size
from niwaki.kernels.triton.coded import FEW_ROWS, CodedProduct, coded_linear, coded_product
from niwaki.kernels.triton.coded_experts import grouped_coded_linear, stacked_codes
from niwaki.kernels.triton.launch import ceil_div
from niwaki.kernels.triton.moe import grouped_linear, sorted_choices
from niwaki.kernels.triton.paged_attention import paged_attention
from niwaki.kernels.triton.plan import SPLIT
from niwaki.kernels.triton.tuning import DEFAULTS, Tuning, key_of, load, save, tuning_file

Seconds = Callable[[Callable[[], object]], float]
Tuned = Callable[[Tuning], object]

# (inputs, outputs) of the products of Qwen3-30B-A3B's experts, and of GPT-OSS's, which come in MXFP4.
EXPERTS = ((2048, 1536), (768, 2048))
MXFP4_EXPERTS = ((2880, 5760), (2880, 2880))
MX_GROUP = 32  # numbers that share a power of two
# Of Llama 8B's products.
PRODUCTS = ((4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096))


def tune_all(
    device: torch.device, seconds: Seconds, dtype: torch.dtype = torch.bfloat16, only: str = ""
) -> dict[str, Tuning]:
    """Measure the shapes whose key holds `only` and that are not kept yet, and keep each as it is measured, so that a
    run that was cut off goes on. All that is kept then."""
    path = tuning_file(device)
    for key, kind, make in shapes(device, dtype):
        if only in key and key not in load(path):
            save(path, {key: best_of(candidates(kind), make(), seconds)})
    return load(path)


def shapes(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, str, Callable[[], Tuned]]]:
    """By its key, the kind of each, and what makes what is measured."""
    for heads, kv_heads, head_dim in HEADS:
        size = replace(REAL, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        for kind, cache in product(("decode", "prefill"), ("auto", "int8")):
            bits = 8 * dtype.itemsize if cache == "auto" else 8
            key = key_of(kind, {"head_dim": head_dim, "group": heads // kv_heads, "bits": bits})
            yield key, kind, partial(attention_runs, kind, size, device, dtype, cache)
    for inputs, outputs in EXPERTS:
        for kind, tokens in (("moe_few", 64), ("moe", 4096)):
            key = key_of(kind, {"inputs": inputs, "outputs": outputs})
            operands = tokens, REAL.experts, REAL.per_token, inputs, outputs, device, dtype
            yield key, kind, partial(product_run, *operands)
    for inputs, outputs in MXFP4_EXPERTS:
        for kind, tokens in (("moe_coded_few", 64), ("moe_coded", 4096)):
            key = key_of(kind, {"inputs": inputs, "outputs": outputs, "bits": 4})
            operands = tokens, REAL.experts, REAL.per_token, inputs, outputs, device, dtype
            yield key, kind, partial(mxfp4_run, *operands)
    for (inputs, outputs), codes in product(PRODUCTS, ("int8", "int4")):
        for kind, rows in (("coded_few", FEW_ROWS), ("coded", REAL.prompt)):
            key = key_of(kind, {"inputs": inputs, "outputs": outputs, "bits": 8 if codes == "int8" else 4})
            yield key, kind, partial(coded_run, rows, inputs, outputs, codes, device, dtype)


def candidates(kind: str) -> Iterator[Tuning]:
    """The default, then others near it."""
    default = DEFAULTS[kind]
    yield default
    rows = (default.block_m,) if kind == "decode" or kind.endswith("_few") else (64, 128)
    for block_m, block_n, num_warps, num_stages in product(rows, (32, 64, 128), (4, 8), (2, 3, 4)):
        if kind == "prefill" and block_m != 16 * num_warps:  # four warps multiply 64 rows; with others they spill
            continue
        tuning = replace(default, block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
        if tuning != default:
            yield tuning


def best_of(tunings: Iterable[Tuning], run: Callable[[Tuning], object], seconds: Seconds) -> Tuning:
    """The fastest; one that this GPU cannot hold is passed over."""
    times: dict[Tuning, float] = {}
    for tuning in tunings:
        try:
            times[tuning] = seconds(lambda tuning=tuning: run(tuning))  # type: ignore[misc]  # bound at once, on purpose
        except (OutOfResources, PTXASError):
            continue
    return min(times, key=times.__getitem__)


def attention_runs(
    kind: str, size: Size, device: torch.device, dtype: torch.dtype, kv_dtype: str = "auto"
) -> Callable[[Tuning], object]:
    """Attention of that kind over such a cache, cut as it is told."""
    if kind == "decode":
        cache = Cache(size, [size.keys - 1] * size.rows, [1] * size.rows, device, dtype)
    else:
        cache = Cache(size, [0, 0], [size.prompt] * 2, device, dtype)
    plan = cache.plan(shares=False)
    rows, split = (plan.split[0], SPLIT) if kind == "decode" else ((*plan.split, *plan.parted, *plan.whole)[0], 0)
    out = torch.empty_like(cache.q)
    k_pool, v_pool = (
        pool if kv_dtype == "auto" else narrowed_torch(pool, KINDS[kv_dtype]) for pool in (cache.k_pool, cache.v_pool)
    )

    def run(tuning: Tuning) -> torch.Tensor:
        operands = cache.q, k_pool, v_pool, plan.page_table, plan.length, rows, out
        paged_attention(*operands, split=split, tuning=tuning)
        return out

    return run


def product_run(
    tokens: int, experts: int, per_token: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> Callable[[Tuning], object]:
    """A grouped product of tokens spread evenly over the experts."""
    chosen = torch.randint(experts, (tokens, per_token), device=device).int()
    order, bounds = sorted_choices(chosen, experts)
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    weight = torch.randn(experts, outputs, inputs, device=device).to(dtype)
    out = torch.empty(tokens * per_token, outputs, device=device, dtype=dtype)

    def run(tuning: Tuning) -> torch.Tensor:
        grouped_linear(x, weight, order, bounds, out, per_row=per_token, tuning=tuning)
        return out

    return run


def mxfp4_run(
    tokens: int, experts: int, per_token: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> Callable[[Tuning], object]:
    """As `product_run`, over random codes in MXFP4."""
    chosen = torch.randint(experts, (tokens, per_token), device=device).int()
    order, bounds = sorted_choices(chosen, experts)
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    numbers = torch.randint(16, (outputs, inputs), device=device).to(torch.uint8)
    scales = torch.full((outputs, ceil_div(inputs, MX_GROUP)), 2.0**-6, device=device)
    weight = stacked_codes([Coded(numbers, scales, None, MX_GROUP, 4)] * experts)
    assert weight is not None, "such scales have a kernel"
    out = torch.empty(tokens * per_token, outputs, device=device, dtype=dtype)

    def run(tuning: Tuning) -> torch.Tensor:
        grouped_coded_linear(x, weight, order, bounds, out, per_row=per_token, tuning=tuning)
        return out

    return run


def coded_run(
    rows: int, inputs: int, outputs: int, kind: str, device: torch.device, dtype: torch.dtype
) -> Callable[[Tuning], object]:
    """A product with weights in codes of that kind."""
    weight = coded_product(coded(torch.randn(outputs, inputs, device=device), kind), None)
    assert isinstance(weight, CodedProduct), "whole numbers have a kernel"
    x = torch.randn(rows, inputs, device=device).to(dtype)
    out = torch.empty(rows, outputs, device=device, dtype=dtype)

    def run(tuning: Tuning) -> torch.Tensor:
        coded_linear(x, weight, out, tuning=tuning)
        return out

    return run
