"""Waiting in a test for what other threads do, and interrupting the one that waits."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable

PATIENCE = 180.0  # seconds: what a loaded machine is given, on which kernels may have to be compiled first


def wait_until(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Wait until it is true; states that nobody holds are gone by then."""
    deadline = time.monotonic() + patience
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        gc.collect()
        pause.wait(0.005)


def press_ctrl_c() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)
