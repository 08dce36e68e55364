"""What every launch function shares: checks of its operands, the arithmetic of grids, and the one place of starting.

A kernel addresses memory by the numbers that it is given, so nothing unchecked goes past here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.errors import OutOfResources

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
POOLS = (*FLOATS, torch.int8, torch.uint8)  # of keys and values; see kernels/small_kv.py for those of 8 bits
MAX_BLOCK = 65_536  # elements of a row that one program holds at once


@dataclass(frozen=True, slots=True)
class Compiling:
    """Compile-only mode."""

    shared: int  # bytes of shared memory that a block may have
    kernels: list[object] = field(default_factory=list)


_compiling: ContextVar[Compiling | None] = ContextVar("compiling", default=None)  # else kernels run
# Launches that had to do with fewer stages than they asked for, by what was asked. Almost always empty.
_stages: dict[object, int] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **meta: object) -> None:
    """Start `kernel` on `grid`; nothing where the grid is empty. Where its stages of loads in flight do not fit this
    GPU's shared memory, fewer do."""
    if 0 in grid:
        return
    asked = (kernel, *meta.items()) if _stages else None
    if asked in _stages:
        meta["num_stages"] = _stages[asked]
    try:
        _start(kernel, grid, args, meta)
    except OutOfResources:
        asked, stages = (kernel, *meta.items()), meta.get("num_stages")
        if not isinstance(stages, int) or stages < 2:
            raise
        fewer = {**meta, "num_stages": stages - 1}
        launch(kernel, grid, *args, **fewer)
        _stages[asked] = _stages.get((kernel, *fewer.items()), stages - 1)


def _start(kernel: Any, grid: tuple[int, ...], args: tuple[object, ...], meta: dict[str, object]) -> None:
    mode = _compiling.get()
    if mode is None:
        kernel[grid](*args, **meta)
        return
    compiled = kernel.warmup(*args, grid=grid, **meta)
    if compiled.metadata.shared > mode.shared:
        raise OutOfResources(compiled.metadata.shared, mode.shared, "shared memory")
    mode.kernels.append(compiled)


@contextmanager
def compiling(shared: int = 227 << 10) -> Iterator[list[object]]:
    """Launches inside compile their kernel for Triton's active target, a block of which has so many bytes of shared
    memory, and do not run it. Yields what was compiled."""
    mode = Compiling(shared)
    token = _compiling.set(mode)
    try:
        yield mode.kernels
    finally:
        _compiling.reset(token)
        _stages.clear()  # they were for another GPU


def is_compiling() -> bool:
    return _compiling.get() is not None


def is_interpreted() -> bool:
    return bool(knobs.runtime.interpret)


def dot_dtype(dtype: torch.dtype) -> Any:
    """The type in which a matrix product of `dtype` is given to the hardware. The interpreter multiplies the bits of
    bfloat16 as whole numbers (Triton 3.6), so it gets float32."""
    if is_interpreted() or dtype == torch.float32:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products are exact ones: tf32, Triton's default, keeps 10 bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def block_of(width: int, least: int = 1) -> int:
    """The power of two that covers `width`."""
    return max(least, int(triton.next_power_of_2(width)))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def warps_for(block: int) -> int:
    """Warps of a program that works on `block` elements at a time: 8 elements a thread, from 1 to 8 warps."""
    return min(8, max(1, block // 256))


def check(
    kernel: str,
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    *,
    contiguous: bool = False,
) -> None:
    """`tensor` is on `device`, of one of the dtypes, of the shape (None: any), with elements side by side in its last
    dimension, or contiguous altogether.

    Raises:
        TypeError, ValueError: naming the kernel, the argument, what it is and what it should be.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.device != device:
        raise ValueError(f"{kernel}: {name} must be on {device} like the others, got {tensor.device}")
    if device.type != "cuda" and not is_interpreted() and _compiling.get() is None:
        raise ValueError(f"{kernel}: {name} is on {device}; outside Triton's interpreter a CUDA device is needed")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{kernel}: {name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.ndim != len(shape) or any(w is not None and w != h for w, h in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("any" if side is None else str(side) for side in shape)
        raise ValueError(f"{kernel}: {name} must have the shape ({wanted}), got {tuple(tensor.shape)}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{kernel}: {name} must be contiguous, got strides {tensor.stride()}")
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(f"{kernel}: {name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def check_width(kernel: str, width: int) -> None:
    if width > MAX_BLOCK:
        raise ValueError(f"{kernel}: rows of {width} elements are wider than the {MAX_BLOCK} that one program holds")
