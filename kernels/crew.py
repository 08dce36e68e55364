"""The threads that help with the steps of one model (layers.py). They wait in the system, outside the interpreter.

Linux may wake a thread on the core of the one that woke it, although another is idle; the two then take turns there for
some milliseconds, as long as the step. So helpers are woken by an event, not through a pipe, whose writer is taken to
wait for the reader, and are kept off the core that the step begins on. 23 tokens behind 4,000 after a pause of 50 ms,
two cores, medians of 30 (23 November 2026): 3.2 ms instead of 5.0.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import numpy as np

from niwaki.kernels.first_start import begin_beside
from niwaki.kernels.later import ASKS_LATER, MOST
from niwaki.kernels.layers import begin, end, is_free, work
from niwaki.kernels.operand import Array
from niwaki.kernels.partial import NOTHING, Partial
from niwaki.kernels.pieces import HEADS, NUMBERS, START, TOLD_BLOCK, TOLD_STEP
from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.segments import Int64s

NO_EVENT = -1
ONE = (1).to_bytes(8, sys.byteorder)  # what an event counts
LIKE = np.empty(0, np.uint16)
NO_TOKENS = np.empty(0, np.int32)
NO_NUMBERS = np.empty((0, 5), np.int64)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What is the same in all steps of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    eps: float
    norm_offset: float
    scale: float


class Helper:
    """A thread that waits until it is told of a step. It keeps `blocks`, which it may read, until it ends."""

    def __init__(self, blocks: list[Int64s], length: int) -> None:
        """Raises OSError or RuntimeError where the system has no more events or threads."""
        self._event = os.eventfd(0)
        self._told = np.zeros(length, np.int64)  # where it looks for what it is told
        self._cores = os.sched_getaffinity(0)
        self._avoided = -1
        arguments = self._event, self._told, blocks
        self._thread = threading.Thread(target=_help, args=arguments, name="niwaki-crew", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._event)
            raise

    def tell(self, block: int, step: int) -> None:
        """The address of a block as long as what it is told, 0 to end, and the number of the step in it. Of several
        only the last counts."""
        self._told[TOLD_BLOCK], self._told[TOLD_STEP] = block, step
        os.write(self._event, ONE)

    def avoid(self, core: int) -> None:
        """Run on any other of the process's cores from now on, where it has several."""
        if core == self._avoided or len(self._cores) < 2 or self._thread.native_id is None:
            return
        self._avoided = core
        with suppress(OSError):  # its process may not say where it runs
            os.sched_setaffinity(self._thread.native_id, self._cores - {core})


class Crew:
    """Runs steps of at most `num_lines` lines, one at a time, on the caller's thread and on those who help."""

    def __init__(self, geometry: Geometry, num_lines: int) -> None:
        begin_beside()
        self._geometry = geometry
        self._numbers = np.array([geometry.eps, geometry.norm_offset, geometry.scale])
        self._length = START + 3 * num_lines + (MOST if ASKS_LATER else 0)
        self._blocks: list[Int64s] = []
        self._num_steps = 0
        self._helpers: list[Helper] = []
        self._process = os.getpid()
        weakref.finalize(self, _end, self._helpers)

    def run(self, lines: Int64s, plan: AttentionPlan, wanted: Int64s, logits: Array, threads: int) -> None:
        """One step of these lines, as models/stack.py writes them. `wanted`: the tokens whose logits are wanted."""
        shared, decode, long = plan.shared, plan.decode, plan.long
        segments, tokens, partial = NO_NUMBERS, NO_TOKENS, NOTHING
        if shared is not None:
            decode, long, segments, tokens = shared.decode, shared.long, shared.flat.numbers, shared.flat.tokens
            partial = Partial.empty(plan.num_tokens, self._geometry.heads, self._geometry.head_dim)
        block = self._free_block()
        self._num_steps += 1
        begin(
            block, self._num_steps, threads, lines, plan.positions, plan.slots, plan.page_table, wanted, len(logits),
            logits, decode.token, decode.table_row, decode.length, decode.first_key, segments, tokens, long.numbers,
            partial.mixed, partial.lse
        )  # fmt: skip
        if threads > 1:
            self._call(threads - 1, block)
        work(NO_EVENT, block, LIKE)
        end(block)

    def _free_block(self) -> Int64s:
        free = next((block for block in self._blocks if is_free(block)), None)
        if free is None:
            free = np.zeros(self._length, np.int64)
            g = self._geometry
            free[HEADS:NUMBERS] = g.heads, g.kv_heads, g.head_dim, g.page_size, g.num_pages
            free[NUMBERS] = self._numbers.ctypes.data
            self._blocks.append(free)
        return free

    def _call(self, helpers: int, block: Int64s) -> None:
        if sys.platform != "linux":  # no events elsewhere
            return
        if os.getpid() != self._process:  # threads do not live on in a fork
            return
        with suppress(OSError, RuntimeError):  # the system gives no more: fewer help
            while len(self._helpers) < helpers:
                self._helpers.append(Helper(self._blocks, self._length))
        core = current_core()
        for helper in self._helpers[:helpers]:
            helper.avoid(core)
            helper.tell(block.ctypes.data, self._num_steps)


def current_core() -> int:
    return int(_libc().sched_getcpu())


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _help(event: int, told: Int64s, blocks: list[Int64s]) -> None:
    work(event, told, LIKE)
    if told[TOLD_BLOCK] == 0:  # else it could not wait any more, and may still be told
        os.close(event)
    del blocks  # no sooner: it read them


def _end(helpers: list[Helper]) -> None:
    for helper in helpers:
        helper.tell(0, 0)
