"""Waiting for something to change: threads on a condition, coroutines on their own loop, all under one lock.

Knows nothing of states. A question is a function that is called with the lock held; it must not raise or wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Question: TypeAlias = Callable[[], bool]

# On these threads backends tell results: who waits there for another one waits for ever.
TELLING: Final = ("niwaki-engine", "niwaki-link-read", "niwaki-openai", "niwaki-replicas")


class _Parsing(threading.local):
    """Whether this thread reads a value, with the validators of its type."""

    depth = 0


_parsing = _Parsing()


@contextmanager
def parsing() -> Iterator[None]:
    """The code of a type's author runs in this block, where a backend told a result."""
    _parsing.depth += 1
    try:
        yield
    finally:
        _parsing.depth -= 1


def would_wait_for_itself() -> bool:
    """Whether the thread that asks must go on for anything to be told. On an event loop, too, a backend may tell its
    results."""
    if threading.current_thread().name in TELLING:
        return True
    if not _parsing.depth:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@dataclass(eq=False, slots=True)
class _Sleeper:
    """A coroutine that waits until the answer to its question is yes."""

    is_ready: Question
    loop: asyncio.AbstractEventLoop
    woken: asyncio.Future[None] = field(init=False)

    def __post_init__(self) -> None:
        self.woken = self.loop.create_future()

    def wake(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # its loop is closed: nobody waits there any more
            self.loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if not self.woken.done():  # the coroutine may have been cancelled meanwhile
            self.woken.set_result(None)


class Changes:
    """A lock, and the news about what it guards."""

    __slots__ = ("_condition", "_sleepers", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._condition: threading.Condition | None = None  # made by the first thread that waits: few states have one
        self._sleepers: list[_Sleeper] = []

    @contextmanager
    def released(self) -> Iterator[None]:
        """Without the lock, in the middle of a `with changes.lock:` block."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    def notify_all(self) -> None:
        """Something changed. With the lock held; a coroutine is woken only when its question says yes."""
        if self._condition is not None:
            self._condition.notify_all()
        if self._sleepers:
            ready = [sleeper for sleeper in self._sleepers if sleeper.is_ready()]
            for sleeper in ready:
                self._sleepers.remove(sleeper)
                sleeper.wake()

    def wait_for(self, is_ready: Question, timeout: float | None = None) -> bool:
        """Block the thread until the answer is yes. With the lock held, before and after. False: out of time."""
        if self._condition is None:
            self._condition = threading.Condition(self.lock)
        return self._condition.wait_for(is_ready, timeout)

    async def until(self, is_ready: Question) -> None:
        """Wait without blocking the loop. Without the lock, so by the time this returns the answer may be no again."""
        with self.lock:
            if is_ready():
                return
            sleeper = _Sleeper(is_ready, asyncio.get_running_loop())
            self._sleepers.append(sleeper)
        try:
            await sleeper.woken
        finally:
            with self.lock:
                if sleeper in self._sleepers:  # cancelled while it waited
                    self._sleepers.remove(sleeper)
