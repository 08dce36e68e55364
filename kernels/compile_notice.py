"""Tells whoever sits at the screen that kernels are compiled: the first time that takes half a minute, in silence.

Owns what is known of the compiling that goes on. Numba tells of each function that no cache had, and of no other.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from numba.core import event

from niwaki.kernels.jit import is_ours

log = logging.getLogger("niwaki.kernels")

TELL_SECONDS = 1.0  # of compiling before anything is said
QUIET_SECONDS = 2.0  # without compiling, and it is over
LOOK_SECONDS = 0.1
LONG_SECONDS = 5.0  # a GPU's kernels that are compiled already are loaded in less


def announce_compiling() -> None:
    """From now on tell: the logger at INFO where somebody set up logging and stderr is neither a terminal nor a
    notebook's, else stderr, which in a container is its log. Calling it twice is allowed."""
    with _lock:
        if not _listeners:
            _listeners.append(_Listener())
            event.register("numba:compile", _listeners[0])  # type: ignore[no-untyped-call]  # Numba has no types


@contextmanager
def saying_when_long(line: str) -> Iterator[None]:
    """Say so, once what is done inside has taken long."""
    timer = threading.Timer(LONG_SECONDS, _say, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Listener(event.Listener):
    """Functions of ours that are being compiled, on whatever thread. One is compiled inside another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._began = self._ended = 0.0
        self._watch: threading.Thread | None = None

    def on_start(self, event: event.Event) -> None:
        if not is_ours(event):
            return
        with self._lock:
            self._depth += 1
            if self._watch is None:
                self._began = time.monotonic()
                is_kept = event.data["dispatcher"].stats.cache_path is not None
                self._watch = threading.Thread(target=self._tell, args=(is_kept,), name="niwaki-compiling", daemon=True)
                self._watch.start()

    def on_end(self, event: event.Event) -> None:
        if is_ours(event):
            with self._lock:
                self._depth -= 1
                self._ended = time.monotonic()

    def _tell(self, is_kept: bool) -> None:
        has_told = False
        while True:
            time.sleep(LOOK_SECONDS)
            with self._lock:
                now = time.monotonic()
                lasts = (now if self._depth else self._ended) - self._began
                is_over = not self._depth and now - self._ended > QUIET_SECONDS
                if is_over:
                    self._watch = None
            if not has_told and lasts > TELL_SECONDS:
                has_told = True
                how_often = "once; the first time takes half a minute or more"
                if not is_kept:
                    how_often = "in each process, for no folder can be written; NUMBA_CACHE_DIR names one"
                _say(f"niwaki: compiling kernels for this processor ({how_often}) ...")
            if is_over:
                if has_told:
                    _say(f"niwaki: kernels compiled in {lasts:.0f} s")
                return


def _say(line: str) -> None:
    # A notebook's stderr is no terminal, but somebody looks at it.
    is_looked_at = sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    if sys.stderr is None or (log.hasHandlers() and not is_looked_at):
        log.info(line.removeprefix("niwaki: "))
    else:
        print(line, file=sys.stderr, flush=True)


_lock = threading.Lock()
_listeners: list[_Listener] = []
