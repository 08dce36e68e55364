"""The checks of the launch functions: a kernel reads memory by the numbers it is given, so they must be right."""

from __future__ import annotations

import numpy as np

from niwaki.kernels.operand import Array

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
