from __future__ import annotations

import mmap
import resource
import sys

import numpy as np
import pytest

from niwaki.runtime.kv.pool_memory import AHEAD, PIECE, PoolMemory

PAGE_BYTES = 4096
AHEAD_PAGES = AHEAD // PAGE_BYTES
NUM_PAGES = 4 * PIECE // PAGE_BYTES

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="memory is found ahead on Linux only")


def faults_of_writing(planes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], first: int, stop: int) -> int:
    """How often the system had to find memory for these pages. What else a write takes is there: it is rehearsed, as
    the C library may have given memory back (a server does that behind long bodies)."""
    faults = 0
    for written in (np.ones_like(planes), planes):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        written[:, first:stop, 0] = 1
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    return faults


@pytest.fixture
def planes() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    memory = mmap.mmap(-1, 2 * NUM_PAGES * PAGE_BYTES)  # new: what NumPy allocates may have been used before
    return np.frombuffer(memory, np.uint8).reshape(2, NUM_PAGES, PAGE_BYTES)


@linux_only
def test_pages_ahead_are_written_without_a_fault(planes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    memory = PoolMemory(planes)
    memory.find(0)
    memory.wait()
    assert faults_of_writing(planes, 0, 2 * AHEAD_PAGES) == 0
    # Who wrote so many stands one half before the end of what was found: the rest is asked for.
    memory.find(AHEAD_PAGES + 1)
    memory.wait()
    assert faults_of_writing(planes, 2 * AHEAD_PAGES, 3 * AHEAD_PAGES + 1) == 0


@linux_only
def test_far_ahead_nothing_is_taken(planes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    memory = PoolMemory(planes)
    memory.find(0)
    memory.wait()
    assert faults_of_writing(planes, 2 * PIECE // PAGE_BYTES, NUM_PAGES) > 0


def test_what_pages_hold_stays(planes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    planes[1, 3] = 7
    memory = PoolMemory(planes)
    for used in (0, 1, AHEAD_PAGES, NUM_PAGES):
        memory.find(used)
        memory.wait()
    assert (planes[1, 3] == 7).all()
    assert not planes[0].any()
