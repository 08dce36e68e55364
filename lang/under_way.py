"""What runs for a batch now, so that it ends when nobody reads the batch any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from niwaki.lang.executor import Executor

Result = TypeVar("Result")


class UnderWay:
    """The rows of a batch that run now. Whoever stops reading the batch, by Ctrl-C too, stops them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executors: set[Executor] = set()
        self._is_over = False

    @contextmanager
    def has(self, executor: Executor) -> Iterator[None]:
        with self._lock:
            self._executors.add(executor)
            is_late = self._is_over
        if is_late:
            executor.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._executors.discard(executor)

    def ended_with(self, results: Iterator[Result]) -> Iterator[Result]:
        try:
            yield from results
        finally:
            with self._lock:
                self._is_over = True
                left = list(self._executors)
            for executor in left:
                executor.cancel()
