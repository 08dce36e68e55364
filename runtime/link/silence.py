"""For how long an engine was silent and could have been heard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PAUSE_SECONDS = 5.0  # between two looks: then whoever looks stood still himself


class Silence:
    """Somebody must look several times within PAUSE_SECONDS, on any thread.

    Where a container is paused or a machine suspended, the engine and this process stand still together. When they go
    on it has not been heard for all that time, and must not be taken for one that hangs: silence counts from there.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # two that look at once must not see half of it
        self._heard_at = self._looked_at = self._awake_since = clock()

    def end(self) -> None:
        """It was heard."""
        self._heard_at = self._clock()

    def seconds(self) -> float:
        with self._lock:
            now = self._clock()
            if now - self._looked_at > PAUSE_SECONDS:
                self._awake_since = now
            self._looked_at = now
            return now - max(self._heard_at, self._awake_since)
