"""A value that is still to come, for `await`: anything else that a program does with it is a forgotten `await`."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeVar

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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Awaited):  # `if s.get("x") == "yes"` would go by, and never be true
            self._refuse()
        return self is other

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __contains__(self, item: object) -> bool:
        self._refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    if not TYPE_CHECKING:  # else every name would be an attribute

        def __getattr__(self, name: str) -> NoReturn:
            # Event loops and debuggers look for cr_frame and the like: it stays as it is, and can be awaited.
            raise AttributeError(f"{self._written} is still to come; write (await {self._written}).{name}")

    def _refuse(self) -> NoReturn:
        is_awaited = inspect.getcoroutinestate(self._coroutine) != inspect.CORO_CREATED
        if not is_awaited:  # else another task waits in it, and would wait for ever
            self.close()  # or Python warns that nobody awaited it, which is said here
        raise ProgramError(f"{self._written} is still to come; write (await {self._written})")
