"""Steps that texts of a constraint have taken before, as arrays, and many texts that take them again in one call.

A table is owned by its constraint, and filled by the matchers that step. A walk owns how far some texts of one
constraint have come; their matchers stay where it began until it tells them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from niwaki.kernels.jit import jit
from niwaki.kernels.segments import Int64s

NO_STEP: Final = -1  # the key of a slot that is free
KEY, AFTER, COST, FARTHEST, ENDS = range(5)  # the columns of a table
# Bits of `ends`: the text may end before the step, and behind it; only who has no more tokens may take the step, since
# nobody has looked at what may follow.
BEFORE, BEHIND, LAST = 1, 2, 4
FIRST_SLOTS: Final = 64
MAX_STEPS: Final = 16_384  # of one constraint
WALKED: Final = 64  # steps before matchers are told
STEP_BYTES: Final = 3 * 4  # of a way: a place, a bound, a token
T = TypeVar("T")

_NO_SLOTS: Final[Int64s] = np.full((1, 5), NO_STEP, np.int64)


class StepTable:
    """Which place a token leads to from another one, where that needs nobody's look: it may follow, nothing is forced
    behind it, and the mask there was known when it was added. A place is any number below 2**31.

    The end of a text that has taken such a step is farther by at most `cost`, which may be less than nothing, and at
    most `farthest` from where the text could end.
    """

    def __init__(self) -> None:
        self.slots = _NO_SLOTS  # most constraints have none; another array with the first one
        self._num_steps = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self.slots.nbytes

    def add(self, place: int, token_id: int, after: int, cost: int, farthest: int, ends: int) -> None:
        """`ends`: where the text may end, as far as that is known. Again, when more of it is."""
        with self._lock:
            if self._num_steps == MAX_STEPS:
                return
            if self.slots is _NO_SLOTS or 2 * self._num_steps == len(self.slots):
                size = FIRST_SLOTS if self.slots is _NO_SLOTS else 4 * len(self.slots)
                slots = np.full((size, 5), NO_STEP, np.int64)
                for step in self.slots[self.slots[:, KEY] != NO_STEP]:
                    _put(slots, step)
                self.slots = slots  # at once: who walks sees the one or the other
            step = np.array([place << 32 | token_id, after, cost, farthest, ends], np.int64)
            self._num_steps += _put(self.slots, step)


class Standing(NamedTuple):
    """Where a matcher stands: a place of the table, and the tokens after which its text can end, at most; 0 where it
    may end, or where that is no matter. Behind a step it is 0 only where the text may end and no other end fits."""

    table: StepTable
    place: int
    bound: int


class Way(msgspec.Struct, gc=False):
    """Steps of one text: the place behind each, the bound there, and the token that led there. What the last one led to
    is at hand, the rest is made lists when somebody asks: nobody does of a text that ends where it walked to."""

    numbers: bytes  # int32 [3, steps]
    num_bounded: int  # the last steps behind which the bound is not 0
    place: int
    bound: int
    token_id: int

    @property
    def num_steps(self) -> int:
        return len(self.numbers) // STEP_BYTES

    @property
    def places(self) -> list[int]:
        return self._told(0)

    @property
    def bounds(self) -> list[int]:
        return self._told(1)

    @property
    def token_ids(self) -> list[int]:
        return self._told(2)

    def _told(self, column: int) -> list[int]:
        numbers: list[int] = np.frombuffer(self.numbers, np.int32).reshape(3, -1)[column].tolist()
        return numbers


Walked = tuple[tuple[int, Way], ...]  # the ways of one text, and where in its lists


def write_out(kept: list[T], walked: Walked, told: Callable[[Way], Sequence[T]], first: int = 0) -> None:
    """Have a list whole that has the last step of each way alone: `told` tells what belongs there, of all its steps.
    `first`: how many stand before. What is kept of a last step stays: it may have changed."""
    whole: list[T] = []
    start = 0
    for at, way in walked:
        whole += kept[start : first + at]
        whole += told(way)[:-1]
        start = first + at
    kept[:start] = whole


class Walk:
    """Texts of one constraint, from where they stand on."""

    def __init__(self, standings: Sequence[Standing], at: Sequence[int] | Int64s) -> None:
        """`at`: where each of them is in the batch."""
        self._table = standings[0].table
        self._at = np.array(at, np.int64)
        # Place and bound, before the first step and after each, and the token that leads there.
        self._ways: Int64s = np.empty((WALKED + 1, len(at), 3), np.int64)
        self._ways[0] = [(standing.place, standing.bound, NO_STEP) for standing in standings]
        self.num_steps = 0

    def knows(self, token_ids: Int64s, last: Int64s, starts: Int64s) -> bool:
        """Whether each text can take this token as a step of the table. `last` and `starts`: their difference is how
        many tokens may still come, this one included."""
        ways, step = self._ways, self.num_steps
        return step < WALKED and _step_all(self._table.slots, ways, step, self._at, token_ids, last, starts)

    def go(self) -> None:
        """Take the steps that `knows` was asked about last."""
        self.num_steps += 1

    def ways(self) -> list[Way]:
        """The steps that each text took, one at least, in the order of the standings. The walk is over."""
        steps = self._ways[1 : self.num_steps + 1]
        is_end = steps[:, :, 1] == 0
        bounded = np.where(is_end.any(axis=0), is_end[::-1].argmax(axis=0), len(steps)).tolist()
        # Of each text by itself: one that goes on for long does not keep those of the whole batch.
        numbers, length = steps.transpose(1, 2, 0).astype(np.int32).tobytes(), STEP_BYTES * len(steps)
        starts = range(0, len(numbers), length)
        texts = zip(starts, bounded, *steps[-1].T.tolist(), strict=True)
        return [Way(numbers[start : start + length], *last) for start, *last in texts]


@jit()
def _slot_of(slots: Int64s, key: int) -> int:
    """Where the key stands, or belongs."""
    last = len(slots) - 1
    slot = ((key >> 32) * 0x9E3779B1 + (key & 0xFFFFFFFF) * 0x85EBCA6B) >> 7 & last
    while slots[slot, 0] != key and slots[slot, 0] != NO_STEP:
        slot = (slot + 1) & last
    return slot


@jit()
def _put(slots: Int64s, step: Int64s) -> bool:
    """Whether it is new."""
    slot = _slot_of(slots, step[0])
    is_new = bool(slots[slot, 0] == NO_STEP)
    slots[slot, 1:] = step[1:]
    slots[slot, 0] = step[0]
    return is_new


@jit()
def _step_all(
    slots: Int64s, ways: Int64s, step: int, at: Int64s, token_ids: Int64s, last: Int64s, starts: Int64s
) -> bool:
    """A step of every row of ways [steps, rows, 3], from `step` on; False where one is not known or does not fit. Not
    `nogil`: to take the lock back costs more than this."""
    for row in range(len(at)):
        place, bound = ways[step, row, 0], ways[step, row, 1]
        left = last[at[row]] - starts[at[row]]
        slot = _slot_of(slots, place << 32 | token_ids[at[row]])
        if slots[slot, 0] == NO_STEP or (slots[slot, 4] & 4 and left > 1):
            return False
        farthest = slots[slot, 3]
        behind = bound + slots[slot, 2] if bound else farthest
        if behind >= left:
            ends = slots[slot, 4]
            if ends & 1 and farthest < left:
                behind = farthest
            elif ends & 3 == 3:
                behind = 0
            else:
                return False
        ways[step + 1, row, 0] = slots[slot, 1]
        ways[step + 1, row, 1] = behind
        ways[step + 1, row, 2] = token_ids[at[row]]
    return True
