"""Tells when kernels begin to be compiled and when that ends, to whoever keeps the time."""

from __future__ import annotations

from collections.abc import Callable

from numba.core import event

from niwaki.kernels.jit import is_ours


def on_compiling(begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """From now on call these around each function of ours that no cache had, on the thread that compiles it; one is
    compiled inside another. Once for a `begins`: calling it again with the same changes nothing."""
    if begins not in _told:
        _told.append(begins)
        event.register("numba:compile", _Listener(begins, ends))  # type: ignore[no-untyped-call]  # Numba has no types


class _Listener(event.Listener):
    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins, self._ends = begins, ends

    def on_start(self, event: event.Event) -> None:
        if is_ours(event):
            self._begins()

    def on_end(self, event: event.Event) -> None:
        if is_ours(event):
            self._ends()


_told: list[Callable[[], None]] = []
