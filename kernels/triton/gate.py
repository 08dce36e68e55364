"""The gates of MLPs: out = act(gate) * up, with act = silu(g) = g / (1 + e^-g), or the tanh form of GELU (arXiv
1606.08415): g / (1 + e^-2u), u = sqrt(2 / pi) (g + 0.044715 g^3); and the clamped gate of kernels/clamped_mul.py.

One pass: gate and up are read once, in float32, and rounded once. The references are `silu_mul_torch`,
`gelu_mul_torch` and `clamped_mul_torch` of kernels/silu_mul.py, gelu_mul.py and clamped_mul.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from niwaki.kernels.triton.launch import FLOATS, block_of, ceil_div, check, launch, warps_for

MAX_COLUMNS = 2048  # of a row, for one program

SILU, GELU, CLAMPED = 0, 1, 2


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """gate_up [tokens, 2 x width], gates first; out [tokens, width]; one dtype."""
    _run("silu_mul", gate_up, out, SILU)


def gelu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Shapes as in `silu_mul`."""
    _run("gelu_mul", gate_up, out, GELU)


def clamped_mul(gate_up: torch.Tensor, out: torch.Tensor, alpha: float, limit: float) -> None:
    """Shapes as in `silu_mul`."""
    _run("clamped_mul", gate_up, out, CLAMPED, alpha, limit)


def _run(
    kernel: str, gate_up: torch.Tensor, out: torch.Tensor, kind: int, alpha: float = 1.0, limit: float = 0.0
) -> None:
    check(kernel, "out", out, (None, None), FLOATS, out.device)
    tokens, width = out.shape
    check(kernel, "gate_up", gate_up, (tokens, 2 * width), out.dtype, out.device)
    block = min(block_of(width), MAX_COLUMNS)
    launch(
        _gate_mul,
        (tokens, ceil_div(width, block)),
        gate_up, out, width, gate_up.stride(0), out.stride(0), alpha, limit,
        BLOCK=block,
        KIND=kind,
        num_warps=warps_for(block),
    )  # fmt: skip


@triton.jit
def _gate_mul(
    gate_up_ptr, out_ptr, width, in_stride, out_stride, alpha, limit, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up_ptr + row * in_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * in_stride + width + at, mask=inside, other=0.0).to(tl.float32)
    power = gate
    if KIND == 1:
        power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    if KIND == 2:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        power = alpha * gate
    gated = gate * tl.sigmoid(tl.maximum(power, -80.0)) * up  # e^80 is a float32, and e^-80 as good as nothing
    tl.store(out_ptr + row * out_stride + at, gated.to(out_ptr.dtype.element_ty), mask=inside)
