"""How long this process has been getting ready: loading the default model, compiling kernels. No time-out counts it, no
picture shows it."""

from __future__ import annotations

import os
import threading
import time


class Readiness:
    """Seconds in which something was made ready, however many threads did so at once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._began = 0.0
        self._seconds = 0.0

    def _begin_in_fork(self) -> None:
        """What its parent makes ready is made on threads that the fork does not have. Until now that counts: time-outs
        that began before the fork count from it."""
        if self._depth:
            self._seconds += time.monotonic() - self._began
        self._lock = threading.Lock()
        self._depth = 0

    def begin(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._began = time.monotonic()
            self._depth += 1

    def end(self) -> None:
        """One end for each beginning; one more changes nothing."""
        with self._lock:
            if self._depth == 1:
                self._seconds += time.monotonic() - self._began
            self._depth = max(0, self._depth - 1)

    def seconds(self) -> float:
        """Until now: it grows as the clock does while something is being made ready, and else stands still."""
        with self._lock:
            return self._seconds + (time.monotonic() - self._began if self._depth else 0.0)

    def clock(self) -> float:
        """Seconds on a clock that stands still while something is being made ready."""
        with self._lock:
            return (self._began if self._depth else time.monotonic()) - self._seconds

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()


readiness = Readiness()
if hasattr(os, "register_at_fork"):  # where processes can be forked
    os.register_at_fork(after_in_child=readiness._begin_in_fork)
