"""Time that passes when a test says so: what ends by the clock is then told from what is slow on a loaded machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from niwaki.lang.clock import clock


class _Waker:
    def look(self) -> None:
        """Nothing: the clock looks at the time whenever an alarm comes to stand first."""


@contextmanager
def passing_time() -> Iterator[Callable[[float], None]]:
    """Gives `later(seconds)`, behind which runs, calls and alarms see so much more time gone."""
    passed = 0.0
    waker = _Waker()

    def later(seconds: float) -> None:
        nonlocal passed
        passed += seconds
        clock.at(0.0, waker.look)

    moved = SimpleNamespace(monotonic=lambda: time.monotonic() + passed, perf_counter=time.perf_counter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("niwaki.lang.clock.time", moved)
        yield later
