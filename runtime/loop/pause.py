"""When the engine's thread leaves the interpreter to others: while the model computes, and while nobody is there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

MAX_SECONDS: Final = 0.03  # that somebody is kept waiting: what lies between two pauses is mostly below 5 ms


class Pause:
    """The engine's thread enters it; others wait for it, best before each tenth of a millisecond of Python: the
    interpreter gives a thread half of one before it asks for its lock back, and each of several in turn. There is one
    at the start."""

    def __init__(self) -> None:
        self._is_on = threading.Event()
        self._is_on.set()
        self._owner: int | None = None  # the engine's thread
        self._was_too_long = False  # somebody has waited in vain: nobody waits for the next one any more
        self._held_back: list[Callable[[], object]] = []  # until the next one

    def __enter__(self) -> None:
        self._was_too_long = False
        self._is_on.set()
        if self._held_back:
            for wake in self._held_back:
                wake()
            self._held_back.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = threading.get_ident()
        self._is_on.clear()

    @property
    def is_on(self) -> bool:
        return self._is_on.is_set()

    def hold_back(self, wake: Callable[[], object]) -> None:
        """Call it as the next one begins, on the engine's thread. It gives another thread something that this one
        would do nothing with before, but ask for the interpreter as it is woken. It must not raise."""
        self._held_back.append(wake)

    def wait(self) -> None:
        """For the next one, or MAX_SECONDS once: who waits often is not kept for longer. The engine's own thread goes
        on."""
        if not (self._is_on.is_set() or self._was_too_long or threading.get_ident() == self._owner):
            self._was_too_long = not self._is_on.wait(MAX_SECONDS)
