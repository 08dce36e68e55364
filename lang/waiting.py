"""Waiting for something to change: threads on a condition, coroutines on their own loop, all under one lock.

Knows nothing of states. A question is a function that is called with the lock held; it must not raise or wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

Question: TypeAlias = Callable[[], bool]


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
    """A lock, and the news about what it guards. `with changes:` takes the lock."""

    __slots__ = ("_condition", "_sleepers")

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._sleepers: list[_Sleeper] = []

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *error: object) -> None:
        self._condition.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Without the lock, in the middle of a `with changes:` block."""
        self._condition.release()
        try:
            yield
        finally:
            self._condition.acquire()

    def notify_all(self) -> None:
        """Something changed. With the lock held; a coroutine is woken only when its question says yes."""
        self._condition.notify_all()
        if self._sleepers:
            ready = [sleeper for sleeper in self._sleepers if sleeper.is_ready()]
            for sleeper in ready:
                self._sleepers.remove(sleeper)
                sleeper.wake()

    def wait_for(self, is_ready: Question, timeout: float | None = None) -> bool:
        """Block the thread until the answer is yes. With the lock held, before and after. False: out of time."""
        return self._condition.wait_for(is_ready, timeout)

    async def until(self, is_ready: Question) -> None:
        """Wait without blocking the loop. Without the lock, so by the time this returns the answer may be no again."""
        with self:
            if is_ready():
                return
            sleeper = _Sleeper(is_ready, asyncio.get_running_loop())
            self._sleepers.append(sleeper)
        try:
            await sleeper.woken
        finally:
            with self:
                if sleeper in self._sleepers:  # cancelled while it waited
                    self._sleepers.remove(sleeper)
