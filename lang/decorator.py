"""`@function`, with parentheses and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

from niwaki.lang.program import Program
from niwaki.runtime.api import ProgramError


@overload
def function(func: Callable[..., object], /) -> Program: ...
@overload
def function() -> Callable[[Callable[..., object]], Program]: ...
def function(
    func: Callable[..., object] | None = None, /, **options: object
) -> Program | Callable[[Callable[..., object]], Program]:
    """Make a program of a function whose first parameter is the state. `@function` and `@function()` are the same.

    Raises:
        ProgramError: the function cannot be a program, or options are given, which are a run's.
    """
    if options:
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ProgramError(f"@function takes no options; give {said} to run(), or to bind() for all runs")
    return Program if func is None else Program(func)
