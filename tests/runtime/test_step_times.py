"""How long the steps of a device took, and that nobody waits to know."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from niwaki.runtime.forward.step_times import DeviceTimes, HostTimes


class Event:
    """Of a device whose clock is `now`, and which has come to `reached`. Where it records it works through what it was
    given before."""

    now: ClassVar[float] = 0.0  # milliseconds
    reached: ClassVar[float] = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self._at = 0.0

    def record(self) -> None:
        self._at = Event.now

    def query(self) -> bool:
        return Event.reached >= self._at

    def elapsed_time(self, other: Event) -> float:
        assert self.query(), "it would be waited for"
        assert other.query(), "it would be waited for"
        return other._at - self._at


def test_steps_of_a_device_are_told_once_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching them says nothing: by that a page would be computed sooner than it is fetched from memory."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "now", 10.0)
    times = DeviceTimes()
    told = []
    for tokens, milliseconds, reached in ((512, 20.0, 15.0), (512, 30.0, 20.0), (1, 2.0, 40.0), (7, 1.0, 63.0)):
        times.begin()
        Event.now += milliseconds
        Event.reached = reached
        told.append(times.end(tokens))
    assert told == [[], [], [(512, 0.02)], [(512, 0.03), (1, 0.002), (7, 0.001)]]
    monkeypatch.setattr(Event, "reached", 100.0)
    times.begin()
    times.begin()  # the one before has failed
    Event.now += 4.0
    assert times.end(3) == [(3, 0.004)]


def test_steps_of_the_host_have_ended_when_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5])
    monkeypatch.setattr("niwaki.runtime.forward.step_times.time.perf_counter", lambda: next(clock))
    times = HostTimes()
    times.begin()
    assert times.end(9) == ((9, 0.5),)
