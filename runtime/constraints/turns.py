"""Short turns on a processor, for the processes that compile (Linux). Owns a signal and its timers; knows nothing else.

However nice a process is, Linux gives it a share of processors that are all wanted, and ends its turn with a tick of
the clock, up to 4 ms later: so long waits a thread of the engine that was put off for it. Who takes short turns offers
his processor to whoever waits every millisecond, wherever he is, in native code too: the handler of the signal is the C
library's `sched_yield` itself.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

TURN_NS: Final = 1_000_000  # a signal takes 24 us: every 0.3 ms one made what is compiled take 1.08 times as long
SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}  # of which the C library knows nothing
ATTRIBUTES: Final = struct.Struct("<IIQiIQQQ")  # size, policy, flags, niceness, priority, runtime, deadline, period
CLOCK_MONOTONIC: Final = 1
SIGEV_THREAD_ID: Final = 4


class Event(ctypes.Structure):
    """A `sigevent`, of 64 bytes where pointers have eight."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread_id", ctypes.c_int),
        ("rest", ctypes.c_char * 44),
    )


class Turns:
    """Those of a process."""

    def __init__(self) -> None:
        self._libc: ctypes.CDLL | None = None  # of a process that takes short turns

    def begin(self) -> None:
        """Give SIGVTALRM up for `short`, which does something from here on where the system can. For the thread that
        starts the others, of the niceness that it keeps."""
        if sys.platform != "linux" or platform.machine() not in SCHED_SETATTR:
            return
        with suppress(OSError, AttributeError):  # a C library that has none of these
            libc = ctypes.CDLL(None)
            libc.timer_settime.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]
            libc.timer_delete.argtypes = [ctypes.c_void_p]
            libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
            # Who yields gives up what is left of his slice, which is 2.8 ms by default: so he would have a third of his
            # share. Systems that know no slices of a process accept this, and take nothing from who yields.
            niceness = os.getpriority(os.PRIO_PROCESS, 0)
            slices = ATTRIBUTES.pack(ATTRIBUTES.size, os.sched_getscheduler(0), 0, niceness, 0, TURN_NS, 0, 0)
            if not libc.syscall(SCHED_SETATTR[platform.machine()], 0, slices, 0):
                # It wants no argument, nobody reads what it returns, and it leaves errno alone, since it never fails.
                libc.signal(signal.SIGVTALRM, ctypes.cast(libc.sched_yield, ctypes.c_void_p))
                self._libc = libc

    @contextmanager
    def short(self) -> Iterator[None]:
        """Inside, this thread's turns are short."""
        libc, timer = self._libc, ctypes.c_void_p()
        if libc is None or libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(_of_this_thread()), ctypes.byref(timer)):
            yield
            return
        libc.timer_settime(timer, 0, struct.pack("@4l", 0, TURN_NS, 0, TURN_NS), None)  # an `itimerspec`
        try:
            yield
        finally:
            libc.timer_delete(timer)


def _of_this_thread() -> Event:
    return Event(None, signal.SIGVTALRM, SIGEV_THREAD_ID, threading.get_native_id())


OWN: Final = Turns()
