"""Grouped products over experts whose weights stay in few bits: out[c] = W[expert of c] x[c's row], W as in coded.py.

Tiles are found as in moe.py, so no number comes back to the host, and a tile multiplies its rows as coded.py does: an
expert's codes are read as they are, once for each BLOCK_M of its rows. The reference is `Coded.matrix` of the expert of
each choice, times its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from niwaki.kernels.coded import Coded
from niwaki.kernels.ops import StackedCodes
from niwaki.kernels.small_kv import FP8
from niwaki.kernels.triton.coded import CodedProduct, laid_out, multiply_codes
from niwaki.kernels.triton.launch import FLOATS, ceil_div, check, dot_dtype, dot_precision, launch
from niwaki.kernels.triton.moe import FEW_CHOICES, choices_of_tile
from niwaki.kernels.triton.tuning import Tuning, tuning_for


def stacked_codes(experts: Sequence[Coded]) -> StackedCodes | None:
    """None where codes have no kernel, or not all of them are laid out alike."""
    made: list[CodedProduct] = []
    for expert in experts:
        product = laid_out(expert)
        if product is None or (made and not _are_alike(made[0], product)):
            return None
        made.append(product)
    first = made[0]

    def together(part: Callable[[CodedProduct], torch.Tensor]) -> torch.Tensor:
        return torch.stack([part(product) for product in made])

    zeros = None if first.zeros is None else together(lambda product: _zeros_of(product))
    codes, scales = together(lambda product: product.codes), together(lambda product: product.scales)
    return StackedCodes(codes, scales, zeros, first.span, first.spans, first.inputs)


def _zeros_of(product: CodedProduct) -> torch.Tensor:
    assert product.zeros is not None, "they are alike"
    return product.zeros


def _are_alike(one: CodedProduct, other: CodedProduct) -> bool:
    same_shapes = one.codes.shape == other.codes.shape and one.scales.shape == other.scales.shape
    same_types = one.codes.dtype == other.codes.dtype and one.scales.dtype == other.scales.dtype
    same_numbers = same_types and (one.zeros is None) == (other.zeros is None)
    return same_shapes and same_numbers and (one.span, one.spans, one.inputs) == (other.span, other.spans, other.inputs)


def grouped_coded_linear(
    x: torch.Tensor,
    weight: StackedCodes,
    order: torch.Tensor,
    bounds: torch.Tensor,
    out: torch.Tensor,
    *,
    per_row: int,
    tuning: Tuning | None = None,
) -> None:
    """out[c] = weight[expert of c] x[c // per_row] for every choice c; operands as in `grouped_linear` of moe.py."""
    name, device = "grouped_coded_linear", x.device
    experts, outputs, groups = weight.scales.shape
    is_of_4_bits = weight.codes.dtype == torch.uint8
    check(name, "x", x, (None, weight.inputs), FLOATS, device)
    codes = (torch.int8, torch.uint8, FP8)
    check(name, "codes", weight.codes, (experts, outputs, None), codes, device, contiguous=True)
    scales = (torch.float32, torch.uint8)
    check(name, "scales", weight.scales, (experts, outputs, groups), scales, device, contiguous=True)
    if weight.zeros is not None:
        check(name, "zeros", weight.zeros, weight.scales.shape, torch.int16, device, contiguous=True)
    check(name, "order", order, (len(x) * per_row,), torch.int32, device, contiguous=True)
    check(name, "bounds", bounds, (experts + 1,), torch.int32, device, contiguous=True)
    check(name, "out", out, (len(order), outputs), x.dtype, device)
    kind = "moe_coded_few" if len(order) <= FEW_CHOICES * experts else "moe_coded"
    chosen = tuning or tuning_for(kind, device, inputs=weight.inputs, outputs=outputs, bits=4 if is_of_4_bits else 8)
    launch(
        _grouped_coded_linear,
        (len(order) // chosen.block_m + experts, ceil_div(outputs, chosen.block_n)),
        x, weight.codes, weight.scales, weight.scales if weight.zeros is None else weight.zeros, order, bounds, out,
        experts, outputs, weight.inputs, groups, weight.spans, per_row, x.stride(0), weight.codes.stride(1),
        out.stride(0),
        SPAN=weight.span,
        IS_OF_4_BITS=is_of_4_bits,
        IS_E2M1=is_of_4_bits and weight.scales.dtype == torch.uint8,
        IS_ONE_GROUP=groups == 1,
        HAS_ZEROS=weight.zeros is not None,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        DOT=dot_dtype(x.dtype),
        PRECISION=dot_precision(x.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )  # fmt: skip


@triton.jit
def _grouped_coded_linear(
    x_ptr,
    code_ptr,
    scale_ptr,
    zero_ptr,
    order_ptr,
    bounds_ptr,
    out_ptr,
    experts,
    outputs,
    INPUTS: tl.constexpr,
    groups,
    spans,
    per_row,
    x_stride,
    code_stride,
    out_stride,
    SPAN: tl.constexpr,
    IS_OF_4_BITS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    IS_ONE_GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    expert, at, end = choices_of_tile(bounds_ptr, tl.program_id(0), experts, BLOCK_M)
    if at < end:
        m = at + tl.arange(0, BLOCK_M)
        choice = tl.load(order_ptr + m, mask=m < end, other=0).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_output = n < outputs
        row = expert.to(tl.int64) * outputs + n  # of all experts' outputs
        total = multiply_codes(
            x_ptr + (choice // per_row)[:, None] * x_stride, m < end, code_ptr + row[None, :] * code_stride,
            scale_ptr + row * groups, zero_ptr + row * groups, is_output, INPUTS, spans,
            SPAN, IS_OF_4_BITS, IS_E2M1, IS_ONE_GROUP, HAS_ZEROS, BLOCK_M, BLOCK_N, DOT, PRECISION,
        )  # fmt: skip
        target = out_ptr + choice[:, None] * out_stride + n[None, :]
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(m < end)[:, None] & is_output[None, :])
