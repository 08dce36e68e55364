"""A matrix product with weights of few bits: out = x W^T + bias, where W[o, i] = scale[o, g] (code[o, i] - zero[o, g]).

g = i // group. Codes stay as they are in memory, whole numbers of 8 or 4 bits or e4m3, and are widened in registers,
exactly, before they are multiplied; the sums of a group are multiplied by its scales in float32. A program takes
BLOCK_M rows, BLOCK_N outputs and at a time a span of inputs, which no group's end divides. Of 4 bits a byte of a span
holds an input of its first half and, in the upper bits, one of its second: either half is a product by itself, and
nothing is shuffled. Numbers of e2m1 have scales that are powers of two, a byte for each 32 inputs, which is half of a
span: they are widened with them, exactly, and all sums of an output are one.

Weights in e4m3 with a scale for each output are multiplied by rows in e4m3 with a scale for each row (W8A8), through
torch's own product. The reference of all is `Coded.matrix` of kernels/coded.py; of the rows, `rows_in_e4m3_torch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from niwaki.kernels.coded import MAX_EXPONENT, Coded
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import Linear
from niwaki.kernels.small_kv import FP8, LARGEST, TINY, knows_e4m3, narrowed_torch
from niwaki.kernels.triton.launch import (
    FLOATS,
    block_of,
    ceil_div,
    check,
    check_width,
    dot_dtype,
    dot_precision,
    is_compiling,
    launch,
    warps_for,
)
from niwaki.kernels.triton.tuning import Tuning, tuning_for

MAX_SPAN = 128
MIN_SPAN = 32  # half of it is the least inner side of a product
FEW_ROWS = 16
MULTIPLE = 16  # sides of a product of e4m3
E2M1_SPAN = 64


@dataclass(frozen=True, slots=True)
class CodedProduct:
    codes: torch.Tensor  # [outputs, spans x span] int8 or e4m3; of 4 bits uint8 [outputs, spans x span / 2]
    scales: torch.Tensor  # float32 [outputs, groups]; of e2m1 uint8, their exponents plus 127 [outputs, 2 x spans]
    zeros: torch.Tensor | None  # int16 [outputs, groups]
    bias: torch.Tensor | None  # [outputs]
    span: int
    spans: int  # of a group
    inputs: int

    def forward(self, x: Operand, out: Operand) -> None:
        coded_linear(x.tensor, self, out.tensor)


@dataclass(frozen=True, slots=True)
class E4m3Product:
    codes: torch.Tensor  # e4m3 [outputs, inputs]
    scales: torch.Tensor  # float32 [1, outputs]
    bias: torch.Tensor | None  # bfloat16 [outputs]

    def forward(self, x: Operand, out: Operand) -> None:
        """x, out bfloat16."""
        rows, scales = rows_in_e4m3(x.tensor)
        if is_compiling():
            return
        if rows.device.type == "cpu":  # the interpreter: torch 2.11 multiplies numbers of 8 bits so on GPUs alone
            products = torch.mm(rows.float(), self.codes.float().t()).mul_(scales).mul_(self.scales)
            out.tensor.copy_(products if self.bias is None else products.add_(self.bias))
            return
        torch._scaled_mm(
            rows, self.codes.t(), scale_a=scales, scale_b=self.scales, bias=self.bias, out_dtype=torch.bfloat16,
            out=out.tensor,
        )  # fmt: skip


def coded_product(weight: Coded, bias: torch.Tensor | None) -> Linear | None:
    """None where groups share no span, the device does not know e4m3, or scales of e2m1 are no powers of two."""
    outputs, inputs = weight.codes.shape
    is_e4m3, is_one_group = weight.codes.dtype == FP8, weight.group >= inputs
    if is_e4m3 and not knows_e4m3(weight.codes.device):
        return None
    if is_e4m3 and is_one_group and outputs % MULTIPLE == 0 and inputs % MULTIPLE == 0:
        return E4m3Product(weight.codes.contiguous(), weight.scales.t().contiguous(), bias)
    return laid_out(weight, bias)


def laid_out(weight: Coded, bias: torch.Tensor | None = None) -> CodedProduct | None:
    """Codes as `coded_linear` reads them; None as for `coded_product`."""
    outputs, inputs = weight.codes.shape
    is_e4m3, is_one_group = weight.codes.dtype == FP8, weight.group >= inputs
    if is_e4m3 and not knows_e4m3(weight.codes.device):
        return None
    span = MAX_SPAN if is_one_group else min(weight.group & -weight.group, MAX_SPAN)
    if span < MIN_SPAN:
        return None
    exponents = weight.exponents(MAX_EXPONENT) if weight.is_e2m1 else None
    if weight.is_e2m1:
        if exponents is None:
            return None
        span = E2M1_SPAN
    depth = ceil_div(inputs, span)
    codes = pad(weight.codes.contiguous().view(torch.int8), (0, depth * span - inputs))
    if weight.bits == 4:
        low, high = codes.view(outputs, depth, 2, span // 2).unbind(2)
        codes = (low | high << 4).view(torch.uint8).flatten(1)
    elif is_e4m3:
        codes = codes.view(FP8)
    if exponents is not None:
        group_of = torch.arange(0, depth * span, span // 2, device=codes.device) // weight.group
        scales = exponents[:, group_of.clamp(max=exponents.shape[1] - 1)]
        return CodedProduct(codes, scales.contiguous(), None, bias, span, 1, inputs)
    zeros = None if weight.zeros is None else weight.zeros.contiguous()
    spans = depth if is_one_group else weight.group // span
    return CodedProduct(codes, weight.scales.contiguous(), zeros, bias, span, spans, inputs)


def coded_linear(x: torch.Tensor, weight: CodedProduct, out: torch.Tensor, *, tuning: Tuning | None = None) -> None:
    """x [rows, inputs], out [rows, outputs], one dtype."""
    name, device = "coded_linear", x.device
    outputs, groups = weight.scales.shape
    is_of_4_bits = weight.codes.dtype == torch.uint8
    check(name, "x", x, (None, weight.inputs), FLOATS, device)
    check(name, "out", out, (len(x), outputs), x.dtype, device)
    check(name, "codes", weight.codes, (outputs, None), (torch.int8, torch.uint8, FP8), device, contiguous=True)
    check(name, "scales", weight.scales, (outputs, groups), (torch.float32, torch.uint8), device, contiguous=True)
    if weight.zeros is not None:
        check(name, "zeros", weight.zeros, (outputs, groups), torch.int16, device, contiguous=True)
    if weight.bias is not None:
        check(name, "bias", weight.bias, (outputs,), FLOATS, device, contiguous=True)
    kind = "coded_few" if len(x) <= FEW_ROWS else "coded"
    chosen = tuning or tuning_for(kind, device, inputs=weight.inputs, outputs=outputs, bits=4 if is_of_4_bits else 8)
    launch(
        _coded_linear,
        (ceil_div(len(x), chosen.block_m), ceil_div(outputs, chosen.block_n)),
        x, weight.codes, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if weight.bias is None else weight.bias, out, len(x), outputs, weight.inputs, groups,
        weight.spans, x.stride(0), weight.codes.stride(0), out.stride(0),
        SPAN=weight.span,
        IS_OF_4_BITS=is_of_4_bits,
        IS_E2M1=is_of_4_bits and weight.scales.dtype == torch.uint8,
        IS_ONE_GROUP=groups == 1,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=weight.bias is not None,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        DOT=dot_dtype(x.dtype),
        PRECISION=dot_precision(x.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )  # fmt: skip


def rows_in_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, inputs] as e4m3 numbers, and a scale for each row, float32 [rows, 1]: its largest magnitude / 448."""
    name = "rows_in_e4m3"
    check(name, "x", x, (None, None), FLOATS, x.device)
    check_width(name, x.shape[1])
    codes = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    block = block_of(x.shape[1])
    launch(
        _rows_in_e4m3,
        (len(x),),
        x, codes, scales, x.shape[1], x.stride(0),
        LARGEST=LARGEST[torch.uint8],
        TINY=float(TINY),
        BLOCK=block,
        num_warps=warps_for(block),
    )  # fmt: skip
    return codes, scales


def rows_in_e4m3_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of `rows_in_e4m3`."""
    narrow = narrowed_torch(x[:, None], torch.uint8)[:, 0]
    return narrow[:, : x.shape[1]].view(FP8), narrow[:, x.shape[1] :].contiguous().view(torch.float32)


@triton.jit(do_not_specialize=["rows"])
def _coded_linear(
    x_ptr,
    code_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    groups,
    spans,
    x_stride,
    code_stride,
    out_stride,
    SPAN: tl.constexpr,
    IS_OF_4_BITS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    IS_ONE_GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < outputs
    total = multiply_codes(
        x_ptr + m.to(tl.int64)[:, None] * x_stride, m < rows, code_ptr + n.to(tl.int64)[None, :] * code_stride,
        scale_ptr + n * groups, zero_ptr + n * groups, is_output, INPUTS, spans,
        SPAN, IS_OF_4_BITS, IS_E2M1, IS_ONE_GROUP, HAS_ZEROS, BLOCK_M, BLOCK_N, DOT, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    target = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & is_output[None, :])


@triton.jit
def multiply_codes(
    x_row,  # [BLOCK_M, 1] where rows begin
    is_row,  # [BLOCK_M]
    code_row,  # [1, BLOCK_N] where the codes of outputs begin
    scale_row,  # [BLOCK_N] where their scales do
    zero_row,  # [BLOCK_N] where their zeros do; read only where HAS_ZEROS
    is_output,  # [BLOCK_N]
    INPUTS: tl.constexpr,
    spans,
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
    """float32 [BLOCK_M, BLOCK_N]"""
    BLOCK_K: tl.constexpr = SPAN // 2 if IS_OF_4_BITS else SPAN
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    zero = tl.zeros((BLOCK_N,), tl.float32)
    for span in range(tl.cdiv(INPUTS, SPAN)):
        group = span // spans
        if HAS_ZEROS:
            zero = tl.load(zero_row + group, mask=is_output, other=0).to(tl.float32)
        codes = tl.load(code_row + span * BLOCK_K + k[:, None], mask=is_output[None, :], other=0.0)
        at = span * SPAN + k[None, :]
        x = tl.load(x_row + at, mask=is_row[:, None] & (at < INPUTS), other=0.0).to(DOT)
        if IS_E2M1:
            low = of_e2m1(codes & 15, tl.load(scale_row + 2 * span, mask=is_output, other=0))
            total = tl.dot(x, low.to(DOT), total, input_precision=PRECISION)
            at += BLOCK_K
            x = tl.load(x_row + at, mask=is_row[:, None] & (at < INPUTS), other=0.0).to(DOT)
            high = of_e2m1(codes >> 4, tl.load(scale_row + 2 * span + 1, mask=is_output, other=0))
            total = tl.dot(x, high.to(DOT), total, input_precision=PRECISION)
        elif IS_OF_4_BITS:
            low = (codes & 15).to(tl.float32) - zero[None, :]
            summed = tl.dot(x, low.to(DOT), input_precision=PRECISION)
            at += BLOCK_K
            x = tl.load(x_row + at, mask=is_row[:, None] & (at < INPUTS), other=0.0).to(DOT)
            high = (codes >> 4).to(tl.float32) - zero[None, :]
            summed = tl.dot(x, high.to(DOT), summed, input_precision=PRECISION)
        elif HAS_ZEROS:
            numbers = codes.to(tl.float32) - zero[None, :]
            summed = tl.dot(x, numbers.to(DOT), input_precision=PRECISION)
        else:
            summed = tl.dot(x, codes.to(DOT), input_precision=PRECISION)
        if IS_E2M1:
            pass
        elif IS_ONE_GROUP:
            total += summed
        else:
            total += summed * tl.load(scale_row + group, mask=is_output, other=0.0)[None, :]
    if IS_ONE_GROUP and not IS_E2M1:
        total = total * tl.load(scale_row, mask=is_output, other=0.0)[None, :]
    return total


@triton.jit
def of_e2m1(
    codes,  # [BLOCK_K, BLOCK_N]
    exponents,  # uint8 [BLOCK_N], plus 127
):
    """What the codes mean times 2^exponent, float32. Their bits, put in place, are the number times 2^-126, also where
    it is 0.5, which has no exponent: a subnormal. That and the power are two factors, for 2^(126 + exponent) is more
    than a float32 where the exponent is above 1."""
    placed = ((codes & 8).to(tl.uint32) << 28) | ((codes & 7).to(tl.uint32) << 22)
    power = (exponents.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    return placed.to(tl.float32, bitcast=True) * 8.507059173023462e37 * power[None, :]  # 2^126


@triton.jit
def _rows_in_e4m3(
    x_ptr, code_ptr, scale_ptr, width, stride, LARGEST: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), TINY) / LARGEST
    tl.store(scale_ptr + row, scale)
    tl.store(code_ptr + row * width + at, (x / scale).to(code_ptr.dtype.element_ty), mask=at < width)
