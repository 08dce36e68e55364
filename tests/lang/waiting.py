"""Waiting in a test for what other threads do, and interrupting the one that waits."""

from __future__ import annotations

import gc
import signal
import sys
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


def interrupted(read: Callable[[], object]) -> object:
    """Read on the main thread, where Ctrl-C is pressed once it waits."""
    ident = threading.main_thread().ident
    assert ident is not None

    def is_waiting() -> bool:
        frame = sys._current_frames()[ident]  # as also while it starts a thread, but that asks no question
        asked = threading.Condition.wait_for.__code__
        return (
            frame.f_code is threading.Condition.wait.__code__
            and frame.f_back is not None
            and (frame.f_back.f_code is asked)
        )

    def press() -> None:
        wait_until(is_waiting)
        press_ctrl_c()

    threading.Thread(target=press).start()
    return read()
