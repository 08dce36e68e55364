"""The memory of the pool on a CPU, which the system finds as it is first written.

Has it found some pages ahead, beside the steps. In pieces of 2 MB, of which one took up to 5 ms, the keys and the
values of all layers came to their next piece in the same step, which then took 60 ms. Not all of it at the start: what
is never used is not taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

PIECE: Final = 2 << 20  # of the memory: a huge page, which is found whole
AHEAD: Final = PIECE // 2  # bytes of each layer's keys, and of its values
POPULATE_WRITE: Final = 23  # of madvise, in Linux since 5.14; elsewhere memory is found as it is written

Planes = npt.NDArray[np.uint8]  # [layers x 2, pages, bytes of a page]


class PoolMemory:
    """Its pages are used from the first one on: a page that was used before is used again before another is."""

    def __init__(self, planes: Planes) -> None:
        self._planes = planes
        self._ahead = max(1, AHEAD // planes.shape[2])  # pages
        self._num_found = 0
        self._finding: threading.Thread | None = None

    def find(self, num_used: int) -> None:
        """Have the pages found that follow the first `num_used`. Does not wait for it."""
        if num_used + self._ahead <= self._num_found or self._num_found == self._planes.shape[1]:
            return
        if sys.platform != "linux" or (self._finding is not None and self._finding.is_alive()):
            return
        first, self._num_found = self._num_found, min(num_used + 2 * self._ahead, self._planes.shape[1])
        self._finding = threading.Thread(
            target=_write_to, args=(self._planes, first, self._num_found), name="niwaki-memory", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no thread to be had: memory is found as it is written
            self._finding.start()

    def wait(self) -> None:
        """Until what was asked for is found."""
        if self._finding is not None and self._finding.ident is not None:
            self._finding.join()


def _write_to(planes: Planes, first: int, stop: int) -> None:
    """As if somebody wrote to these pages; what they hold stays. Says nothing where the system cannot do it."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for plane in planes:
        begin = plane[first:].ctypes.data
        end = begin + (stop - first) * plane.shape[1]
        begin -= begin % mmap.PAGESIZE
        while begin < end:  # piece by piece: meanwhile nobody in the process gets new memory
            size = min(PIECE - begin % PIECE, end - begin)
            madvise(begin, size, POPULATE_WRITE)
            begin += size
