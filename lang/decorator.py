"""`@function`, with parentheses and without."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Concatenate, Never, Protocol, TypeVar, cast, overload

from niwaki.lang.program import Program
from niwaki.lang.state import P, R_co, State
from niwaki.runtime.api import ProgramError

R = TypeVar("R")


class AsyncProgram(Program[R_co, P]):
    """The program of an `async def`: called with a state, it is to be awaited."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]  # what a body returns is awaited here, and at once there in a `Program`
        def __call__(  # type: ignore[overload-overlap]  # as in `Program`
            self, state: State, *args: object, **kwargs: object
        ) -> Coroutine[object, object, R_co]: ...
        @overload
        def __call__(self, *args: object, **kwargs: object) -> State[R_co]: ...
        def __call__(self, *args: object, **kwargs: object) -> object: ...


class Decorator(Protocol):
    """What `@function()` gives."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # as in `function`
        self, func: Callable[Concatenate[Never, P], Coroutine[object, object, R]], /
    ) -> AsyncProgram[R, P]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[Never, P], R], /) -> Program[R, P]: ...
    @overload
    def __call__(  # type: ignore[overload-cannot-match]
        self, func: Callable[..., Coroutine[object, object, R]], /
    ) -> AsyncProgram[R]: ...
    @overload
    def __call__(self, func: Callable[..., R], /) -> Program[R]: ...  # type: ignore[overload-cannot-match]


# Who takes *arguments beside a state with a name matches none of the first two, whatever mypy thinks here.
@overload
def function(  # type: ignore[overload-overlap]  # a coroutine may be what a def returns, too
    func: Callable[Concatenate[Never, P], Coroutine[object, object, R]], /
) -> AsyncProgram[R, P]: ...
@overload
def function(func: Callable[Concatenate[Never, P], R], /) -> Program[R, P]: ...
@overload
def function(  # type: ignore[overload-cannot-match]
    func: Callable[..., Coroutine[object, object, R]], /
) -> AsyncProgram[R]: ...
@overload
def function(func: Callable[..., R], /) -> Program[R]: ...  # type: ignore[overload-cannot-match]
@overload
def function() -> Decorator: ...
def function(func: Callable[..., object] | None = None, /, **options: object) -> Program | Decorator:
    """Decorator: make a program of a function, `def` or `async def`, whose first parameter is the state.

    `@function` and `@function()` are the same.

    Raises:
        ProgramError: the function cannot be a program; or options are given, which belong to `run` or `bind`.
    """
    if options:
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ProgramError(f"@function takes no options; give {said} to run(), or to bind() for all runs")
    return cast("Decorator", _program) if func is None else _program(func)


def _program(func: Callable[..., object]) -> Program:
    return AsyncProgram(func) if inspect.iscoroutinefunction(func) else Program(func)
