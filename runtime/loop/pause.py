"""When the engine's thread leaves the interpreter to others: while the model computes, and while nobody is there."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final

MAX_SECONDS: Final = 0.03  # that somebody is kept waiting: what lies between two pauses is mostly below 5 ms


class Pause:
    """The engine's thread enters it; others wait for it before a millisecond of Python. There is one at the start."""

    def __init__(self) -> None:
        self._is_on = threading.Event()
        self._is_on.set()

    def __enter__(self) -> None:
        self._is_on.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_on.clear()

    @property
    def is_on(self) -> bool:
        return self._is_on.is_set()

    def wait(self) -> None:
        """For the next one, or MAX_SECONDS."""
        self._is_on.wait(MAX_SECONDS)
