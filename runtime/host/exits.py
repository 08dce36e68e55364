"""What a process's end leaves untold: its engines stop then, and daemon threads that wait for one learn of it."""

from __future__ import annotations

import atexit
import threading

from niwaki.runtime.api import EngineStopped


def let_daemons_go_silently() -> None:
    """From now on a daemon thread that is inside an engine when the process ends goes without a traceback, as it would
    from anywhere else. Called behind what is to stop the engine then: of two callbacks the later one comes first."""
    if not _process.is_told:
        _process.is_told = True
        atexit.register(_be_quiet)


def _be_quiet() -> None:
    """All threads that are no daemons have ended."""
    tell = threading.excepthook

    def tell_others(given: threading.ExceptHookArgs) -> None:
        if not isinstance(given.exc_value, EngineStopped):
            tell(given)

    threading.excepthook = tell_others


class _Process:
    is_told = False


_process = _Process()
