"""Whose places the rows of a batch take in an engine that shares them among programs: 32 rows at once are one program.

Beside somebody else's one program they have one share, not 32.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from niwaki.runtime.api import Backend, Branch, SharesPlaces

RowT = TypeVar("RowT")
ResultT = TypeVar("ResultT")


class BatchPlaces:
    """Opens the branches of one batch. A row may run programs on other backends than the batch's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By the backend's id, which it keeps while it is here. None: it does not share places.
        self._programs: dict[int, tuple[Backend, int | None]] = {}

    def open(self, backend: Backend) -> Branch:
        with self._lock:
            if id(backend) not in self._programs:
                self._programs[id(backend)] = backend, _new_program(backend)
            _, program = self._programs[id(backend)]
        return backend.open() if program is None else cast("SharesPlaces", backend).open(program=program)


def _new_program(backend: Backend) -> int | None:
    return backend.new_program() if isinstance(backend, SharesPlaces) else None


def current_batch() -> BatchPlaces | None:
    """That of the row that this code runs for."""
    return _current.get()


def as_one_batch(run_one: Callable[[RowT], ResultT]) -> Callable[[RowT], ResultT]:
    """`run_one` for the rows of a batch. A batch in a row is of that one."""
    places = _current.get() or BatchPlaces()

    def run(row: RowT) -> ResultT:
        token = _current.set(places)
        try:
            return run_one(row)
        finally:
            _current.reset(token)

    return run


def as_one_async_batch(run_one: Callable[[RowT], Awaitable[ResultT]]) -> Callable[[RowT], Awaitable[ResultT]]:
    """`as_one_batch`, where a row is awaited."""
    places = _current.get() or BatchPlaces()

    async def run(row: RowT) -> ResultT:
        token = _current.set(places)
        try:
            return await run_one(row)
        finally:
            _current.reset(token)

    return run


_current: contextvars.ContextVar[BatchPlaces | None] = contextvars.ContextVar("niwaki_current_batch", default=None)
