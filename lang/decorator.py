"""`@function`, with parentheses and without."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Protocol, TypeVar, overload

from niwaki.lang.program import Program
from niwaki.runtime.api import ProgramError

R = TypeVar("R")


class Decorator(Protocol):
    """What `@function()` gives."""

    @overload
    def __call__(self, func: Callable[..., Coroutine[object, object, R]], /) -> Program[R]: ...
    @overload
    def __call__(self, func: Callable[..., R], /) -> Program[R]: ...


@overload
def function(func: Callable[..., Coroutine[object, object, R]], /) -> Program[R]: ...
@overload
def function(func: Callable[..., R], /) -> Program[R]: ...
@overload
def function() -> Decorator: ...
def function(func: Callable[..., object] | None = None, /, **options: object) -> Program | Decorator:
    """Make a program of a function whose first parameter is the state. `@function` and `@function()` are the same.

    Raises:
        ProgramError: the function cannot be a program, or options are given, which are a run's.
    """
    if options:
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ProgramError(f"@function takes no options; give {said} to run(), or to bind() for all runs")
    return Program if func is None else Program(func)
