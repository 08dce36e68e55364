"""How long steps take. A device is asked by events and never waited for: what is launched takes its time later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

Ended = Sequence[tuple[int, float]]  # tokens and seconds of steps


class StepTimes(Protocol):
    def begin(self) -> None:
        """A step begins; one that fails is not ended."""
        ...

    def end(self, num_tokens: int) -> Ended:
        """It has been computed, or launched. What is known by now of this step and those before, each told once."""
        ...


class HostTimes:
    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self, num_tokens: int) -> Ended:
        return ((num_tokens, time.perf_counter() - self._began),)


class DeviceTimes:
    def __init__(self) -> None:
        self._began = _now()
        self._under_way: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> None:
        self._began = _now()

    def end(self, num_tokens: int) -> Ended:
        self._under_way.append((num_tokens, self._began, _now()))
        ended = []
        while self._under_way:
            tokens, begin, end = self._under_way[0]
            if not end.query():  # type: ignore[no-untyped-call]  # torch gives it no types
                break
            self._under_way.popleft()
            ended.append((tokens, begin.elapsed_time(end) / 1e3))
        return ended


def _now() -> torch.cuda.Event:
    """Where the device comes to behind all that was launched."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types
    event.record()
    return event
