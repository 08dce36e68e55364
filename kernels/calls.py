"""Kernels by their address: a kernel calls another one that was chosen at run time, and is not compiled with it.

Such a kernel takes five whole numbers, returns nothing and raises nothing.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Intrinsics get Numba's builder and types, which have no annotations; what kernels call is typed at the end.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

NUMBERS = (types.int64,) * 5

Called = Callable[[int, int, int, int, int], None]


def address_of(kernel: Called) -> int:
    """Of a kernel of `jit()`, which is compiled or read from the disk for it. It holds as long as the process."""
    dispatcher = cast("Any", kernel)
    dispatcher.compile(NUMBERS)
    made = dispatcher.overloads[NUMBERS]._asdict()
    code, name = made["library"], made["fndesc"].llvm_func_name
    return int(code.get_pointer_to_function(name))


@intrinsic
def _call_at(typing, address, a, b, c, d, e):
    """The kernel at that address, of these numbers."""

    def generate(context, builder, signature, args):
        kind = context.call_conv.get_function_type(types.none, NUMBERS)
        place, *numbers = (
            context.cast(builder, arg, was, types.int64) for arg, was in zip(args, signature.args, strict=True)
        )
        # As Numba calls: behind where to put a result and what was raised.
        results = [cgutils.alloca_once(builder, pointer.pointee) for pointer in kind.args[:2]]
        builder.call(builder.inttoptr(place, kind.as_pointer()), [*results, *numbers])
        return context.get_dummy_value()

    return types.void(address, a, b, c, d, e), generate


call_at = cast("Callable[[int, int, int, int, int, int], None]", _call_at)
