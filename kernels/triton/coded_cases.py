"""The cases of products with weights of few bits: a batch that decodes, and one of a prompt's length."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import pad

from niwaki.kernels.coded import E2M1, Coded, coded
from niwaki.kernels.operand import Operand
from niwaki.kernels.triton.case import Case, Maker, Size, randn
from niwaki.kernels.triton.coded import coded_product, rows_in_e4m3_torch
from niwaki.kernels.triton.coded_experts import grouped_coded_linear, stacked_codes
from niwaki.kernels.triton.launch import block_of, ceil_div, is_interpreted
from niwaki.kernels.triton.moe import grouped_linear, sorted_choices

KINDS = ("int8", "int4", "fp8", "fp8 in groups", "MXFP4")
EXPERT_KINDS = ("int8", "int4", "MXFP4")
TOLERANCE = 0.01
INTERPRETED_E4M3 = 0.06  # of rows in e4m3 in Triton's interpreter, which loses a carry where they are rounded


def coded_cases(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Maker]:
    rows = {"few rows": max(8, size.rows // 2), "many rows": size.prompt}
    tokens = {"few tokens": size.rows, "many tokens": 2 * size.prompt}
    experts: dict[str, Maker] = {
        (name := f"experts, {kind}, {many}"): partial(_experts_case, name, kind, tokens[many], size, device, dtype)
        for kind in EXPERT_KINDS
        for many in tokens
    }
    products: dict[str, Maker] = {
        (name := f"product, {kind}, {many}"): partial(_case, name, kind, rows[many], size, device, dtype)
        for kind in KINDS
        for many in rows
    }
    return products | experts


def _case(name: str, kind: str, rows: int, size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    if kind == "fp8":
        dtype = torch.bfloat16  # no other product of e4m3 is there
    inputs, outputs = size.hidden, 2 * size.inner
    group = min(128, block_of(inputs) // 2)
    matrix = randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5
    weight = _mxfp4_near(matrix) if kind == "MXFP4" else coded(matrix, kind.removesuffix(" in groups"))
    if kind.endswith(" in groups"):
        weight = replace(weight, scales=weight.scales.expand(-1, ceil_div(inputs, group)).contiguous(), group=group)
    product = coded_product(weight, None)
    assert product is not None, "of these shapes all kinds have a kernel"
    x = randn(rows, inputs, device=device, dtype=dtype)
    out = torch.empty(rows, outputs, device=device, dtype=dtype)

    def run() -> torch.Tensor:
        product.forward(Operand.of(x), Operand.of(out))
        return out

    return Case(
        name,
        f"{rows} x {inputs} -> {outputs}",
        run,
        lambda: (rows_as_multiplied(x) if kind == "fp8" else x.float()) @ weight.matrix().t(),
        INTERPRETED_E4M3 if kind == "fp8" and is_interpreted() else TOLERANCE,
        num_bytes=inputs * outputs * weight.bits / 8 + 2 * out.numel() + 2 * x.numel(),
        operations=2 * rows * inputs * outputs,
        peers={"bfloat16": lambda: x @ matrix.t()},
    )


def _mxfp4_near(matrix: torch.Tensor) -> Coded:
    """A power of two for each 32 inputs, at which their largest is 4 to 8; 6 for what is above."""
    inputs = matrix.shape[1]
    groups = pad(matrix.float(), (0, -inputs % 32)).unflatten(1, (-1, 32))
    scales = torch.exp2(groups.abs().amax(2).clamp(min=2.0**-40).log2().floor() - 2)
    values = torch.tensor(E2M1[:8], device=matrix.device)
    codes = torch.bucketize((groups / scales[..., None]).abs(), (values[1:] + values[:-1]) / 2)
    signs = (groups < 0).to(torch.uint8) << 3
    return Coded((codes.to(torch.uint8) | signs).flatten(1)[:, :inputs], scales, None, 32, 4)


def rows_as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """By weights in e4m3 with a scale for each output: float32, rounded to e4m3."""
    codes, scales = rows_in_e4m3_torch(x)
    return codes.float() * scales


def _experts_case(name: str, kind: str, tokens: int, size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    inputs, outputs = size.hidden // 2, size.hidden // 4
    matrices = randn(size.experts, outputs, inputs, device=device, dtype=dtype) / inputs**0.5
    experts = [_mxfp4_near(matrix) if kind == "MXFP4" else coded(matrix, kind) for matrix in matrices]
    weight = stacked_codes(experts)
    assert weight is not None, "of these shapes all kinds have a kernel"
    chosen = torch.randint(size.experts, (tokens, size.per_token), device=device).int()
    order, bounds = sorted_choices(chosen, size.experts)
    x = randn(tokens, inputs, device=device, dtype=dtype)
    out, plain = (torch.empty(len(order), outputs, device=device, dtype=dtype) for _ in range(2))

    def run() -> torch.Tensor:
        grouped_coded_linear(x, weight, order, bounds, out, per_row=size.per_token)
        return out

    def in_bfloat16() -> torch.Tensor:
        grouped_linear(x, matrices, order, bounds, plain, per_row=size.per_token)
        return plain

    def reference() -> torch.Tensor:
        rows = x.float().repeat_interleave(size.per_token, 0)
        of = chosen.flatten().long()
        expected = torch.empty(len(rows), outputs, device=device)
        for index, expert in enumerate(experts):
            expected[of == index] = rows[of == index] @ expert.matrix().t()
        return expected

    return Case(
        name,
        f"{tokens} tokens, {size.per_token} of {size.experts}, {inputs} -> {outputs}",
        run,
        reference,
        TOLERANCE,
        num_bytes=size.experts * inputs * outputs * experts[0].bits / 8,
        operations=2 * len(order) * inputs * outputs,
        peers={"experts as they are": in_bfloat16},
    )
