"""Waking readers on an event loop from another thread: one call for all that a step has news for.

A call into a loop writes to a pipe, and lets the loop's thread take the interpreter in the middle of the step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

Tell = Callable[[], object]


class _Pending(threading.local):
    """What this thread will wake; None outside of `together`."""

    by_loop: dict[asyncio.AbstractEventLoop, list[Tell]] | None = None


_pending = _Pending()


def wake(loop: asyncio.AbstractEventLoop, tell: Tell) -> None:
    """Call `tell` on the loop, soon; inside of `together`, at the end of that. On a closed loop nobody reads."""
    by_loop = _pending.by_loop
    if by_loop is None:
        _call_soon(loop, [tell])
    else:
        by_loop.setdefault(loop, []).append(tell)


class _Together:
    """Whom this thread wakes inside the block is woken at its end. Used again and again, by any thread."""

    def __enter__(self) -> None:  # not a generator: entered for each step's frame, when caches are cold
        _pending.by_loop = {}

    def __exit__(self, *error: object) -> None:
        by_loop, _pending.by_loop = _pending.by_loop, None
        for loop, tells in (by_loop or {}).items():
            if loop is loop_here():
                tell_all(tells)
            else:
                _call_soon(loop, tells)


together = _Together()


def loop_here() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs this code, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _call_soon(loop: asyncio.AbstractEventLoop, tells: list[Tell]) -> None:
    try:
        loop.call_soon_threadsafe(tell_all, tells)
    except RuntimeError:
        if not loop.is_closed():  # it may be closed at any moment: to look first would not do
            raise


def tell_all(tells: Iterable[Tell]) -> None:
    for tell in tells:
        tell()
