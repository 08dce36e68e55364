"""An engine whose steps are taken by whoever tests it, so that what happens between two of them is exact.

It has no thread of its own: time stands still until somebody takes a turn or waits for an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest import mock

from niwaki.runtime.api.pending import Pending
from niwaki.runtime.engine import Engine
from niwaki.runtime.host.local import LocalBackend

WAIT = 120.0  # seconds for any answer
PAUSE = 0.0002  # seconds, where another thread has to do something first

T = TypeVar("T")


class Stepped(Engine):
    """Whatever is asked of it is done at the next turn, or when it is waited for by `answer` or `come_to_rest`."""

    def __init__(self, model: Path, **options: object) -> None:
        with mock.patch.object(LocalBackend, "_run"):
            super().__init__(model, **options)
        self.backend._between_steps = self._between_steps  # type: ignore[method-assign]  # which waits for the thread

    def turn(self) -> None:
        """One turn of what is a loop on a thread elsewhere: all that was asked, and a step."""
        self.backend._inbox.post(lambda: None)  # else it waits for something where nothing runs
        self.backend._turn()

    def shutdown(self) -> None:
        is_over = self.backend._inbox.is_closed
        super().shutdown()
        if not is_over:
            self.backend._turn()

    def _between_steps(self, work: Callable[[], T]) -> T:
        for command in self.backend._inbox.take(None)[0]:  # what was asked before
            self.backend._guarded(command)
        return work()


def answer(engine: Engine, pending: Pending[T]) -> T:
    """Wait for it, and take the turns that it takes where nobody else does."""
    if isinstance(engine, Stepped):
        until = time.perf_counter() + WAIT
        while not pending.is_done:
            engine.turn()
            assert time.perf_counter() < until, "no answer"
            if not is_busy(engine) and not pending.is_done:  # its constraint is being compiled
                time.sleep(PAUSE)
    return pending.result(timeout=WAIT)


def is_busy(engine: Engine) -> bool:
    """Whether something runs, or was asked and has not begun."""
    return engine.backend._core.has_work or bool(engine.backend._inbox._commands)


def let_run(engine: Engine, until: Callable[[], bool]) -> None:
    """Until that is so, or the engine comes to rest."""
    while not until() and is_busy(engine):
        if isinstance(engine, Stepped):
            engine.turn()
        else:
            time.sleep(PAUSE)


def wait_for_steps(engine: Engine, count: int) -> None:
    """Let the engine take `count` steps, or come to rest."""
    counters = engine.backend._core.counters
    stop = counters.steps + count
    let_run(engine, lambda: counters.steps >= stop)


def come_to_rest(engine: Engine) -> None:
    """Until nothing runs and nothing is left to do of what was asked."""
    give_up = time.perf_counter() + WAIT
    engine.backend._between_steps(lambda: None)
    let_run(engine, lambda: time.perf_counter() > give_up)
    assert not is_busy(engine), "somebody still runs whose story was closed"
