"""The checks of the launch functions: a kernel reads memory by the numbers it is given, so they must be right."""

from __future__ import annotations

import numpy as np

from niwaki.kernels.operand import Array

SCALE_BYTES = 4  # for each key in 8 bits, see small_kv.py
FLOATS = (np.dtype(np.float32), np.dtype(np.uint16))  # uint16: bfloat16, see numeric.py


def check_arrays(kernel: str, dtype: np.dtype[np.generic], **arrays: tuple[Array, tuple[int, ...]]) -> None:
    """Every array has the dtype, the given shape, and elements side by side in its last dimension.

    Raises:
        TypeError, ValueError: naming the kernel, the argument, what it is and what it should be.
    """
    if dtype not in FLOATS:
        raise TypeError(f"{kernel}: float32, or bfloat16 seen as uint16, is needed, got {dtype}")
    for name, (array, shape) in arrays.items():
        if array.dtype != dtype:
            raise TypeError(f"{kernel}: {name} must be {dtype} like the others, got {array.dtype}")
        if array.shape != shape:
            raise ValueError(f"{kernel}: {name} must have the shape {shape}, got {array.shape}")
        if array.strides[-1] != array.itemsize and array.size:
            raise ValueError(f"{kernel}: {name} must be contiguous in its last dimension, got strides {array.strides}")


def check_product(
    kernel: str, dtype: np.dtype[np.generic], x: Array, weight: Array, bias: Array | None, out: Array
) -> Array:
    """x [rows, inputs], weight [outputs, inputs], bias [outputs], out [rows, outputs]. Returns the bias, an empty one
    where there is none.

    Raises:
        TypeError, ValueError: as `check_arrays`.
    """
    outputs, inputs = weight.shape
    bias = weight[:0, 0] if bias is None else bias
    check_arrays(
        kernel,
        dtype,
        x=(x, (out.shape[0], inputs)),
        weight=(weight, weight.shape),
        bias=(bias, (outputs if len(bias) else 0,)),
        out=(out, (x.shape[0], outputs)),
    )
    return bias


def check_pools(kernel: str, q: Array, k_pool: Array, v_pool: Array) -> None:
    """Keys and values [pages, page_size, kv_heads, head_dim] of the queries' dtype, or of 8 bits with their scales.

    Raises:
        TypeError, ValueError: as `check_arrays`.
    """
    if k_pool.itemsize > 1:
        check_arrays(kernel, q.dtype, k_pool=(k_pool, (*v_pool.shape[:3], q.shape[2])), v_pool=(v_pool, k_pool.shape))
    elif q.dtype != np.uint16 or v_pool.dtype != k_pool.dtype:
        raise TypeError(f"{kernel}: pools of 8 bits want bfloat16 queries, got {q.dtype} and {v_pool.dtype}")
    elif not k_pool.shape == v_pool.shape == (*k_pool.shape[:3], q.shape[2] + SCALE_BYTES):
        raise ValueError(f"{kernel}: pools of {k_pool.shape} and {v_pool.shape} for heads of {q.shape[2]}")
