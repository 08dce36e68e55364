"""What threads need to share work inside Numba kernels: counters that all of them see, memory by its address, and
reading, by which they wait. Nothing here takes the interpreter lock.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from niwaki.kernels.jit import jit
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd_memory import element_pointer

Kind = TypeVar("Kind", bound=np.generic)

ORDER = "seq_cst"
CYCLES = ir.FunctionType(ir.IntType(64), [])
SPINS = 4000  # looks at a counter, some tens of microseconds, before the core is left to others
# As little as sleep can be: Linux makes 70 us of it. No sched_yield: in Linux 6.18 one takes 4 ms, 8 at most, where
# a thread of a higher priority wants the core; those of a step waited 10 to 40 ms while the other core was idle.
NAP = 20  # microseconds
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
def _cycles(typing):
    """Of a clock that counts on at one rate, some nanoseconds apart; 0 on processors that have none for programs."""

    def generate(context, builder, signature, args):
        return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", fnty=CYCLES), [])

    return types.int64(), generate


@intrinsic
def _pause(typing):
    """Leave the core's other thread a moment."""

    def generate(context, builder, signature, args):
        if IS_X86:
            # Not spelt: only some processors have LLVM read instructions (`splits_numbers` in simd.py).
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _row_at(typing, address, length, like):
    return _array_at(address, length, like=like)


@intrinsic
def _rows_at(typing, address, length, width, like):
    return _array_at(address, length, width, like=like)


@intrinsic
def _blocks_at(typing, address, length, height, width, like):
    return _array_at(address, length, height, width, like=like)


@intrinsic
def _pages_at(typing, address, length, size, height, width, like):
    return _array_at(address, length, size, height, width, like=like)


def _array_at(*numbers, like):
    """Of these types: an address, then the sizes of an array of the kind of `like`."""
    result = types.Array(like.dtype, len(numbers) - 1, "C")

    def generate(context, builder, signature, args):
        address, *shape = (
            context.cast(builder, arg, kind, types.intp) for arg, kind in zip(args[:-1], signature.args, strict=False)
        )
        array = context.make_array(result)(context, builder)
        size = context.get_constant(types.intp, like.dtype.bitwidth // 8)
        strides = [size]
        for length in reversed(shape[1:]):
            strides.insert(0, builder.mul(length, strides[0]))
        data = builder.inttoptr(address, array.data.type)
        populate_array(array, data, shape, strides, size, meminfo=None)
        return array._getvalue()

    return result(*numbers, like), generate


_read = types.ExternalFunction("read", types.intp(types.int32, types.uintp, types.uintp))
_sleep = types.ExternalFunction("usleep", types.int32(types.uint32))
read = cast("Callable[[int, int, int], int]", _read)  # descriptor, address, bytes; as POSIX has it
sleep = cast("Callable[[int], int]", _sleep)  # microseconds; as POSIX has it


@jit()
def wait_for(counters: Int64s, index: int, value: int) -> None:
    """Until counters[index] is `value`, which another thread is about to bring about."""
    spins = 0
    while seen(counters, index) != value:
        spins += 1
        if spins % SPINS == 0:
            sleep(NAP)
        else:
            pause()


count = cast("Callable[[Int64s, int, int], int]", _count)
seen = cast("Callable[[Int64s, int], int]", _seen)
tell = cast("Callable[[Int64s, int, int], None]", _tell)
cycles = cast("Callable[[], int]", _cycles)
pause = cast("Callable[[], None]", _pause)
# The memory from an address on as an array of these sizes, of the kind of `like`. Nothing keeps it from being freed.
row_at = cast("Callable[[int, int, npt.NDArray[Kind]], npt.NDArray[Kind]]", _row_at)
rows_at = cast("Callable[[int, int, int, npt.NDArray[Kind]], npt.NDArray[Kind]]", _rows_at)
blocks_at = cast("Callable[[int, int, int, int, npt.NDArray[Kind]], npt.NDArray[Kind]]", _blocks_at)
pages_at = cast("Callable[[int, int, int, int, int, npt.NDArray[Kind]], npt.NDArray[Kind]]", _pages_at)
