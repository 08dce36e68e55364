"""Waiting in a test for what other threads do."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds: what a loaded machine is given


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until it is true; states that nobody holds are gone by then."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        gc.collect()
        pause.wait(0.005)
