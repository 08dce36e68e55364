"""A matrix product for a few rows: out = x W^T + bias, the shape of every projection while requests decode.

With few rows the work is reading W once, and general matrix products are poor at it. Measured on one core of an EPYC
with AVX512-BF16 (shared with other work, so read the ratios), W [1920, 320], us for torch.mm / this kernel:

    rows        1          2          4          8          16
    float32     406 / 89   589 / 91   494 / 107  535 / 167  761 / 505
    bfloat16    190 / 50   255 / 61   259 / 75   291 / 133  308 / 336

Above MAX_ROWS torch is as fast or faster (and far faster where the CPU multiplies bfloat16 tiles), so it takes over.
Where few_pairs.py and linear_tiles.py can be had, they do better than both.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange

from niwaki.kernels.checks import check_product
from niwaki.kernels.jit import REDUCTION, get_num_threads, jit
from niwaki.kernels.numeric import load, store
from niwaki.kernels.operand import Array
from niwaki.kernels.partial import Float32s

MAX_ROWS = {np.dtype(np.float32): 16, np.dtype(np.uint16): 8}
MAX_NUMBERS = 8192  # of x in bfloat16, if it has more than two rows: as float32 they lie near
MAX_ROWS_BESIDE_SLOW = 64  # of bfloat16 where torch has no quick product of it

# Elements of W from which threads pay; see paged_decode.py for what a second one may cost.
MIN_PARALLEL_ELEMENTS = 4_000_000


@cache
def multiplies_halves() -> bool:
    """Whether torch has a quick product of bfloat16 here. On processors of AVX2 alone it has none: 512 rows against
    [1408, 256] take 22 ms, and 4 ms as float32. Builds without oneDNN, as those for macOS, have nobody to ask."""
    is_quick = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_quick is not None and bool(is_quick())


def is_few(x: Array) -> bool:
    """Whether `linear_few_rows` is quicker for these rows than torch."""
    if x.dtype != np.uint16:
        return len(x) <= MAX_ROWS[x.dtype]
    is_near = not multiplies_halves() or len(x) <= 2 or x.size <= MAX_NUMBERS
    return len(x) <= most_few_rows() and is_near


def most_few_rows() -> int:
    """Rows of bfloat16 above which `is_few` has the same answer for any more of them."""
    return MAX_ROWS[np.dtype(np.uint16)] if multiplies_halves() else MAX_ROWS_BESIDE_SLOW


def linear_few_rows(x: Array, weight: Array, bias: Array | None, out: Array) -> None:
    """x [rows, inputs], weight [outputs, inputs], bias [outputs], out [rows, outputs]; one dtype, rows contiguous."""
    bias = check_product("linear_few_rows", x.dtype, x, weight, bias, out)
    threads = get_num_threads()
    if threads == 1 or weight.size < MIN_PARALLEL_ELEMENTS:
        _columns(x, weight, bias, out, 0, len(weight))
    else:
        _columns_parallel(x, weight, bias, out, threads)


def linear_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """The same for any number of rows, on any device."""
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not multiplies_halves():
        whole = x.float() @ weight.float().t()
        out.copy_(whole if bias is None else whole.add_(bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@jit(parallel=True)
def _columns_parallel(x: Array, weight: Array, bias: Array, out: Array, parts: int) -> None:
    outputs = weight.shape[0]
    for part in prange(parts):
        _columns(x, weight, bias, out, outputs * part // parts, outputs * (part + 1) // parts)


@jit()
def _columns(x: Array, weight: Array, bias: Array, out: Array, first: int, last: int) -> None:
    columns_of(widened(x), weight, bias, out, first, last)


@jit()
def widened(x: Array) -> Float32s:
    """x as float32."""
    rows, inputs = x.shape
    wide = np.empty((rows, inputs), np.float32)
    for m in range(rows):
        for k in range(inputs):
            wide[m, k] = load(x[m, k])
    return wide


@jit(fastmath=REDUCTION)
def columns_of(wide: Float32s, weight: Array, bias: Array, out: Array, first: int, last: int) -> None:
    """Outputs `first` to `last` of the rows that were `widened`."""
    rows, inputs = wide.shape
    for n in range(first, last):
        w = weight[n]
        offset = np.float32(0.0) if bias.shape[0] == 0 else load(bias[n])
        # Four rows at a time share each element of W as it is read; LLVM vectorises the four sums over the width.
        for m in range(0, rows - 3, 4):
            x0, x1, x2, x3 = wide[m], wide[m + 1], wide[m + 2], wide[m + 3]
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for k in range(inputs):
                value = load(w[k])
                s0 += x0[k] * value
                s1 += x1[k] * value
                s2 += x2[k] * value
                s3 += x3[k] * value
            out[m, n] = store(s0 + offset, w[0])
            out[m + 1, n] = store(s1 + offset, w[0])
            out[m + 2, n] = store(s2 + offset, w[0])
            out[m + 3, n] = store(s3 + offset, w[0])
        for m in range(rows - rows % 4, rows):
            x0 = wide[m]
            s0 = np.float32(0.0)
            for k in range(inputs):
                s0 += x0[k] * load(w[k])
            out[m, n] = store(s0 + offset, w[0])
