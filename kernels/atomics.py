"""What threads need to share work inside Numba kernels: counters that all of them see, memory by its address, and
reading, by which they wait. Nothing here takes the interpreter lock.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from niwaki.kernels.jit import jit
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd_memory import element_pointer

Kind = TypeVar("Kind", bound=np.generic)

ORDER = "seq_cst"
SPINS = 4000  # looks at a counter, some tens of microseconds, before the core is offered to others
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@intrinsic
def _count(typing, array, index, more):
    """array[index] as it was; `more` is added to it."""

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature, args)
        value = context.cast(builder, args[2], signature.args[2], types.int64)
        return builder.atomic_rmw("add", pointer, value, ORDER)

    return types.int64(array, index, more), generate


@intrinsic
def _seen(typing, array, index):
    """array[index], as it is now."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(element_pointer(context, builder, signature, args), ORDER, 8)

    return types.int64(array, index), generate


@intrinsic
def _tell(typing, array, index, value):
    """array[index] = value, for all to see."""

    def generate(context, builder, signature, args):
        value = context.cast(builder, args[2], signature.args[2], types.int64)
        builder.store_atomic(value, element_pointer(context, builder, signature, args), ORDER, 8)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def _pause(typing):
    """Leave the core's other thread a moment."""

    def generate(context, builder, signature, args):
        if IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(ir.InlineAsm(kind, "pause", "", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _pointer(typing, address, like):
    """The address as a pointer to what `like` is an array of."""
    result = types.CPointer(like.dtype)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64, like), generate


pointer_to = cast("Callable[[int, npt.NDArray[np.generic]], object]", _pointer)
array_from = cast("Callable[[object, tuple[int, ...]], npt.NDArray[Any]]", carray)
_read = types.ExternalFunction("read", types.intp(types.int32, types.uintp, types.uintp))
_give_way = types.ExternalFunction("sched_yield", types.int32())
read = cast("Callable[[int, int, int], int]", _read)  # descriptor, address, bytes; as POSIX has it
give_way = cast("Callable[[], int]", _give_way)


@jit(inline=True)
def row_at(address: int, length: int, like: npt.NDArray[Kind]) -> npt.NDArray[Kind]:
    """The memory from `address` on as an array [length] of the kind of `like`. Nothing keeps it from being freed."""
    return array_from(pointer_to(address, like), (length,))


@jit(inline=True)
def rows_at(address: int, length: int, width: int, like: npt.NDArray[Kind]) -> npt.NDArray[Kind]:
    """As `row_at`, [length, width]."""
    return array_from(pointer_to(address, like), (length, width))


@jit(inline=True)
def blocks_at(address: int, length: int, height: int, width: int, like: npt.NDArray[Kind]) -> npt.NDArray[Kind]:
    """As `row_at`, [length, height, width]."""
    return array_from(pointer_to(address, like), (length, height, width))


@jit(inline=True)
def pages_at(
    address: int, length: int, size: int, height: int, width: int, like: npt.NDArray[Kind]
) -> npt.NDArray[Kind]:
    """As `row_at`, [length, size, height, width]."""
    return array_from(pointer_to(address, like), (length, size, height, width))


@jit()
def wait_for(counters: Int64s, index: int, value: int) -> None:
    """Until counters[index] is `value`, which another thread is about to bring about."""
    spins = 0
    while seen(counters, index) != value:
        spins += 1
        if spins % SPINS == 0:
            give_way()
        else:
            pause()


count = cast("Callable[[Int64s, int, int], int]", _count)
seen = cast("Callable[[Int64s, int], int]", _seen)
tell = cast("Callable[[Int64s, int, int], None]", _tell)
pause = cast("Callable[[], None]", _pause)
