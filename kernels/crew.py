"""The threads that help with the steps of one model (layers.py). They wait at pipes, outside the interpreter."""

from __future__ import annotations

import os
import struct
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from niwaki.kernels.layers import HEADS, NUMBERS, START, begin, end, is_free, work
from niwaki.kernels.operand import Array
from niwaki.kernels.partial import NOTHING, Partial
from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.segments import Int64s

NO_PIPE = -1
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


class Crew:
    """Runs steps of at most `num_lines` lines, one at a time, on the caller's thread and on those who help."""

    def __init__(self, geometry: Geometry, num_lines: int) -> None:
        self._geometry = geometry
        self._numbers = np.array([geometry.eps, geometry.norm_offset, geometry.scale])
        self._length = START + 3 * num_lines
        self._blocks: list[Int64s] = []
        self._num_steps = 0
        self._pipes: list[int] = []  # one of each helper
        self._process = os.getpid()
        weakref.finalize(self, _close, self._pipes)

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
        work(NO_PIPE, block, LIKE)
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
        if os.getpid() != self._process:  # threads do not live on in a fork
            return
        with suppress(OSError, RuntimeError):  # the system gives no more pipes or threads: fewer help
            while len(self._pipes) < helpers:
                self._pipes.append(_begin_helper(self._blocks, self._length))
        message = struct.pack("qq", block.ctypes.data, self._num_steps)
        for pipe in self._pipes[:helpers]:
            with suppress(OSError):  # it is so far behind that the pipe is full
                os.write(pipe, message)


def _begin_helper(blocks: list[Int64s], length: int) -> int:
    """The pipe at which a new thread waits, until it is closed. The thread keeps what it may read."""
    waits_at, pipe = os.pipe()
    os.set_blocking(pipe, False)
    try:
        threading.Thread(target=_help, args=(waits_at, length, blocks), name="niwaki-crew", daemon=True).start()
    except RuntimeError:
        _close([waits_at, pipe])
        raise
    return pipe


def _help(pipe: int, length: int, blocks: list[Int64s]) -> None:
    try:
        work(pipe, np.zeros(length, np.int64), LIKE)
    finally:
        os.close(pipe)
        del blocks  # no sooner: it read them


def _close(pipes: list[int]) -> None:
    for pipe in pipes:
        os.close(pipe)
