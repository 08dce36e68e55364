"""All that `python -m niwaki.kernels.check` runs, by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import torch

from niwaki.kernels.clamped_mul import clamped_mul_torch
from niwaki.kernels.gelu_mul import gelu_mul_torch
from niwaki.kernels.silu_mul import silu_mul_torch
from niwaki.kernels.small_kv import KINDS
from niwaki.kernels.triton.attention_cases import (
    SINKS,
    TURN,
    WINDOW,
    decode_case,
    decode_name,
    prefill_case,
    tree_case,
    turn_case,
    window_case,
)
from niwaki.kernels.triton.case import COMPILED, HEADS, Maker, Size
from niwaki.kernels.triton.coded_cases import coded_cases
from niwaki.kernels.triton.gate import clamped_mul, gelu_mul, silu_mul
from niwaki.kernels.triton.row_cases import (
    bitmask_case,
    copy_case,
    gate_case,
    gather_case,
    head_norm_case,
    moe_case,
    norm_case,
    penalties_case,
    rope_case,
    rope_name,
    sample_case,
)


def cases(size: Size, device: torch.device, dtype: torch.dtype, only: str = "") -> dict[str, Maker]:
    """Those whose name holds `only`. Not made yet: each frees its memory before the next is."""
    makers: dict[str, Maker] = {
        **{decode_name(kind): partial(decode_case, size, device, dtype, kind) for kind in ("auto", *KINDS)},
        WINDOW: lambda: window_case(size, device, dtype, WINDOW),
        SINKS: lambda: window_case(size, device, dtype, SINKS),
        "prefill": lambda: prefill_case(size, device, dtype),
        TURN: lambda: turn_case(size, device, dtype),
        "tree decode": lambda: tree_case(size, device, dtype),
        "residual + RMSNorm": lambda: norm_case(size, device, dtype),
        "head norm": lambda: head_norm_case(size, device, dtype),
        "SiLU gate": lambda: gate_case(size, device, dtype, "SiLU gate", silu_mul, silu_mul_torch),
        "GELU gate": lambda: gate_case(size, device, dtype, "GELU gate", gelu_mul, gelu_mul_torch),
        "clamped gate": lambda: gate_case(
            size,
            device,
            dtype,
            "clamped gate",
            lambda gate_up, out: clamped_mul(gate_up, out, 1.7, 3.0),
            lambda gate_up: clamped_mul_torch(gate_up, 1.7, 3.0),
        ),
        **{rope_name(kind): partial(rope_case, size, device, dtype, kind) for kind in ("auto", *KINDS)},
        "sample": lambda: sample_case(size, device),
        "penalties": lambda: penalties_case(size, device),
        "bitmask": lambda: bitmask_case(size, device),
        "gather two": lambda: gather_case(size, device, dtype),
        "copy pages": lambda: copy_case(size, device, dtype),
        **coded_cases(size, device, dtype),
        "experts: route, product, sum": lambda: moe_case(size, device, dtype),
    }
    return {name: make for name, make in makers.items() if only in name}


def wide_cases(device: torch.device, only: str = "") -> dict[str, Maker]:
    """Attention of other models' heads, and in float32: what is compiled besides."""
    sizes = [replace(COMPILED, heads=heads, kv_heads=kv_heads, head_dim=dim) for heads, kv_heads, dim in HEADS]
    makers: dict[str, Maker] = {}
    for size, dtype in product(sizes, (torch.bfloat16, torch.float32)):
        about = f"{size.heads}/{size.kv_heads} x {size.head_dim}, {str(dtype).removeprefix('torch.')}"
        for name, make in (
            ("decode", decode_case),
            ("prefill", prefill_case),
            (TURN, turn_case),
            ("tree decode", tree_case),
        ):
            makers[f"{name}, {about}"] = partial(make, size, device, dtype)
    return {name: make for name, make in makers.items() if only in name}
