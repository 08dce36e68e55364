"""Waking readers on an event loop from another thread: one call for all that a step has news for.

A call into a loop writes to a pipe, and lets the loop's thread take the interpreter in the middle of the step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pending(threading.local):
    """What this thread will wake; None outside of `together`."""

    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] | None = None


_pending = _Pending()


def wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set the event on its loop; inside of `together`, at the end of that."""
    if _pending.by_loop is None:
        loop.call_soon_threadsafe(event.set)
    else:
        _pending.by_loop.setdefault(loop, []).append(event)


@contextmanager
def together() -> Iterator[None]:
    """Whom this thread wakes inside the block is woken at its end."""
    by_loop = _pending.by_loop = {}
    try:
        yield
    finally:
        _pending.by_loop = None
        for loop, events in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
