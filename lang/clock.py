"""The alarm clock: one thread that calls back when a time has come, for every run and every gen with a time-out."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVarTuple
from weakref import WeakMethod

from niwaki.runtime.api.readiness import readiness

log = logging.getLogger("niwaki.lang")

Ts = TypeVarTuple("Ts")

# Alarms that were called off stay in line until their time comes, or until they are most of a line this long.
MANY = 1024

# Seconds until somebody looks again whose time stands still.
SHORTEST = 0.01


class Countdown:
    """A time-out of so many seconds from now on. It stands still while this process gets ready to run anything: to load
    the default model and to compile kernels takes what it takes, and is no run's doing."""

    __slots__ = ("_end",)

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds - readiness.seconds()

    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self._end + readiness.seconds() - time.monotonic())


class Alarm:
    """What `Clock.at` hands out."""

    __slots__ = ("_ring", "left")

    def __init__(self, ring: Callable[[], None], left: Callable[[], float]) -> None:
        """`left`: seconds until it is to go off, as far as one can tell."""
        self._ring: Callable[[], None] | None = ring
        self.left = left

    @property
    def is_cancelled(self) -> bool:
        return self._ring is None

    def cancel(self) -> None:
        """It will not go off, unless it is going off right now. Cancelling twice is allowed."""
        self._ring = None

    def go_off(self) -> None:
        ring = self._ring
        if ring is not None:
            ring()


class Clock:
    """Calls methods at times of `time.monotonic()`. The thread starts with the first alarm and sleeps between them.

    An alarm does not keep the method's object alive: what is gone by then is not called. A callback runs on the
    clock's thread, so it must be short and must not wait.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Also in a fork: the thread and the alarms are its parent's."""
        self._changed = threading.Condition()
        self._alarms: list[tuple[float, int, Alarm]] = []  # a heap
        self._order = itertools.count()
        self._num_looked_at = MANY
        self._thread: threading.Thread | None = None

    def at(self, when: float, method: Callable[[*Ts], None], *args: *Ts) -> Alarm:
        """Call the bound `method` with `args` at `when`, or at once where that is past."""
        return self._add(when, lambda: 0.0, method, *args)

    def at_end_of(self, countdown: Countdown, method: Callable[[*Ts], None], *args: *Ts) -> Alarm:
        """Call the bound `method` with `args` when no time is left."""
        return self._add(time.monotonic() + countdown.left(), countdown.left, method, *args)

    def _add(self, when: float, left: Callable[[], float], method: Callable[[*Ts], None], *args: *Ts) -> Alarm:
        target = WeakMethod(method)

        def ring() -> None:
            call = target()
            if call is not None:
                call(*args)

        alarm = Alarm(ring, left)
        with self._changed:
            heapq.heappush(self._alarms, (when, next(self._order), alarm))
            self._sweep()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="niwaki-clock", daemon=True)
                self._thread.start()
            elif self._alarms[0][2] is alarm:
                self._changed.notify()
        return alarm

    @property
    def num_alarms(self) -> int:
        """Alarms in line, cancelled ones included."""
        return len(self._alarms)

    def _sweep(self) -> None:
        """Take out cancelled alarms whenever the line has doubled, so that it stays as long as what is in it."""
        if len(self._alarms) >= self._num_looked_at:
            self._alarms = [entry for entry in self._alarms if not entry[2].is_cancelled]
            heapq.heapify(self._alarms)
            self._num_looked_at = max(MANY, 2 * len(self._alarms))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._alarms or (wait := self._alarms[0][0] - time.monotonic()) > 0:
                    self._changed.wait(min(wait, threading.TIMEOUT_MAX) if self._alarms else None)
                alarm = heapq.heappop(self._alarms)[2]
                left = 0.0 if alarm.is_cancelled else alarm.left()
                if left > 0.0:  # its time stood still meanwhile
                    heapq.heappush(self._alarms, (time.monotonic() + max(left, SHORTEST), next(self._order), alarm))
                    del alarm
                    continue
            try:
                alarm.go_off()
            except Exception:  # an alarm's fault is its own: the others must still go off
                log.exception("an alarm failed")
            del alarm


clock = Clock()
if hasattr(os, "register_at_fork"):  # where processes can be forked
    os.register_at_fork(after_in_child=clock._begin)
