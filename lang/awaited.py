"""A value that is still to come, for `await`: anything else that a program does with it is a forgotten `await`."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import NoReturn, TypeVar

from niwaki.runtime.api import ProgramError

T = TypeVar("T")


class Awaited(Coroutine[object, object, T]):
    """A coroutine that knows how it was written. As text it would say `<coroutine object ...>`, in a prompt too, so
    it is refused there."""

    def __init__(self, coroutine: Coroutine[object, object, T], written: str) -> None:
        self._coroutine = coroutine
        self._written = written

    def __await__(self) -> Generator[object, object, T]:
        return self._coroutine.__await__()  # what an event loop sends is its own affair

    def send(self, value: object) -> object:
        return self._coroutine.send(value)

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> object:
        return self._coroutine.throw(val if isinstance(val, BaseException) else typ)

    def close(self) -> None:
        self._coroutine.close()

    def __repr__(self) -> str:
        return f"<{self._written}, still to come>"

    def __str__(self) -> str:
        self._refuse()

    def __format__(self, how: str) -> str:
        self._refuse()

    def __add__(self, other: object) -> NoReturn:
        self._refuse()

    __radd__ = __add__

    def _refuse(self) -> NoReturn:
        is_awaited = inspect.getcoroutinestate(self._coroutine) != inspect.CORO_CREATED
        if not is_awaited:  # else another task waits in it, and would wait for ever
            self.close()  # or Python warns that nobody awaited it, which is said here
        raise ProgramError(f"{self._written} is still to come; write (await {self._written})")
