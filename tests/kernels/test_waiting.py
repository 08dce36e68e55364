"""Who waits for another thread inside a kernel leaves the core to others."""

from __future__ import annotations

import threading
import time

import numpy as np

from niwaki.kernels.atomics import tell, wait_for
from niwaki.kernels.jit import jit
from niwaki.kernels.layers import work  # readies LLVM for what a pause is made of
from niwaki.kernels.segments import Int64s


@jit(nogil=True)
def _wait(counters: Int64s) -> None:
    wait_for(counters, 0, 1)


@jit(nogil=True)
def _tell(counters: Int64s) -> None:
    tell(counters, 0, 1)


def test_a_long_wait_is_slept_through_in_part_even_where_nobody_else_wants_the_core() -> None:
    counters, used = np.zeros(1, np.int64), list[float]()
    assert work is not None
    _tell(np.zeros(1, np.int64))
    _wait(np.ones(1, np.int64))  # compiled

    def wait() -> None:
        began = time.thread_time()
        _wait(counters)
        used.append(time.thread_time() - began)

    waiting = threading.Thread(target=wait)
    waiting.start()
    began = time.perf_counter()
    time.sleep(0.5)
    took = time.perf_counter() - began
    _tell(counters)
    waiting.join()
    assert used[0] < 0.95 * took
