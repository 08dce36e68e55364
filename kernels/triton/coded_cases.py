"""The cases of products with weights of few bits: a batch that decodes, and one of a prompt's length."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from niwaki.kernels.coded import coded
from niwaki.kernels.operand import Operand
from niwaki.kernels.triton.case import Case, Maker, Size, randn
from niwaki.kernels.triton.coded import coded_product
from niwaki.kernels.triton.launch import block_of, ceil_div

KINDS = {"int8": 0.01, "int4": 0.01, "fp8": 0.06, "fp8 in groups": 0.01}  # tolerances: of "fp8" rows are rounded, too


def coded_cases(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Maker]:
    rows = {"few rows": size.rows // 2, "many rows": size.prompt}
    return {
        (name := f"product, {kind}, {many}"): partial(_case, name, kind, rows[many], size, device, dtype)
        for kind in KINDS
        for many in rows
    }


def _case(name: str, kind: str, rows: int, size: Size, device: torch.device, dtype: torch.dtype) -> Case:
    if kind == "fp8":
        dtype = torch.bfloat16  # no other product of e4m3 is there
    inputs, outputs = size.hidden, 2 * size.inner
    group = min(128, block_of(inputs) // 2)
    matrix = randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5
    weight = coded(matrix, kind.removesuffix(" in groups"))
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
        lambda: x.float() @ weight.matrix().t(),
        KINDS[kind],
        num_bytes=inputs * outputs * weight.bits / 8 + 2 * out.numel() + 2 * x.numel(),
        operations=2 * rows * inputs * outputs,
        peers={"bfloat16": lambda: x @ matrix.t()},
    )
