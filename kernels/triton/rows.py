"""Move rows by their index: the embeddings of tokens; in the last layer, only the tokens whose logits are wanted.

out[i] = x[index[i]], for one tensor or two of the same number of rows in one launch. The reference is index_select.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from niwaki.kernels.triton.launch import FLOATS, block_of, ceil_div, check, launch, warps_for

MAX_COLUMNS = 4096  # of a row, for one program


def gather_rows(index: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """For each pair (x, out): out[i] = x[index[i]]. index int32 [rows], within bounds, which is not checked; x
    [any, width], out [rows, width], one dtype. One pair or two."""
    name = "gather_rows"
    if len(pairs) not in (1, 2):
        raise ValueError(f"{name}: one pair or two, got {len(pairs)}")
    check(name, "index", index, (None,), torch.int32, index.device, contiguous=True)
    for x, out in pairs:
        check(name, "x", x, (None, None), FLOATS, index.device)
        check(name, "out", out, (len(index), x.shape[1]), x.dtype, index.device)
    (x, out), (other, other_out) = pairs[0], pairs[-1]
    widest = max(x.shape[1], other.shape[1])
    block = min(block_of(widest), MAX_COLUMNS)
    launch(
        _gather_rows,
        (len(index), ceil_div(widest, block)),
        index, x, out, other, other_out, x.shape[1], other.shape[1],
        x.stride(0), out.stride(0), other.stride(0), other_out.stride(0),
        BLOCK=block,
        IS_PAIR=len(pairs) == 2,
        num_warps=warps_for(block),
    )  # fmt: skip


@triton.jit
def _gather_rows(
    index_ptr,
    x_ptr,
    out_ptr,
    other_ptr,
    other_out_ptr,
    width,
    other_width,
    x_stride,
    out_stride,
    other_stride,
    other_out_stride,
    BLOCK: tl.constexpr,
    IS_PAIR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index_ptr + row).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + source * x_stride + at, mask=at < width)
    tl.store(out_ptr + row * out_stride + at, values, mask=at < width)
    if IS_PAIR:
        others = tl.load(other_ptr + source * other_stride + at, mask=at < other_width)
        tl.store(other_out_ptr + row * other_out_stride + at, others, mask=at < other_width)
