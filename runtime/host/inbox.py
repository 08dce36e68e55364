"""What callers want of the engine's thread, handed over in order. Owns the lock and the wait; knows no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from niwaki.runtime.api import EngineStopped
from niwaki.runtime.api.errors import READ_BEFORE

Command = Callable[[], None]

MOST_GATHERED = 32  # commands that wait for each other: the engine begins while the rest of many is still prepared


class _Gathered(threading.local):
    """What this thread holds back; None while it holds nothing back."""

    commands: list[Command] | None = None


class Inbox:
    """Any thread posts, one takes."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._commands: list[Command] = []
        self._gathered = _Gathered()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Take no more. What was posted before is still taken."""
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()

    def post(self, command: Command) -> None:
        """Raises EngineStopped where it is closed."""
        gathered = self._gathered.commands
        if gathered is None:
            self._post_all([command])
            return
        gathered.append(command)
        if len(gathered) == MOST_GATHERED:
            self._post_all(gathered)
            gathered.clear()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What this thread posts inside comes a few dozen at a time. Nothing may be waited for inside. After an error
        the last of them are dropped."""
        gathered = self._gathered.commands = []
        try:
            yield
        finally:
            self._gathered.commands = None
        if gathered:
            self._post_all(gathered)

    def take(self, idle: AbstractContextManager[object] | None) -> tuple[list[Command], bool]:
        """All that was posted, and whether this is the end. Waits for something, inside `idle`, where that is given:
        the taker has nothing else to do."""
        with self._wake:
            if idle is not None and not (self._commands or self._is_closed):
                with idle:
                    self._wake.wait_for(lambda: self._commands or self._is_closed)
            commands, self._commands = self._commands, []
            return commands, self._is_closed

    def _post_all(self, commands: Sequence[Command]) -> None:
        with self._wake:
            if self._is_closed:
                raise EngineStopped(f"the engine was shut down{READ_BEFORE}")
            self._commands += commands
            self._wake.notify()
