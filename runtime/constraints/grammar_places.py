"""Masks of a grammar, and what it forces, kept by place: texts that can go on in the same ways share them."""

from __future__ import annotations

import threading
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from niwaki.runtime.constraints.grammar_endings import KnownEnds
from niwaki.runtime.constraints.grammar_loops import NO_LOOP, Loops
from niwaki.runtime.constraints.grammar_situations import START, Situation, Situations
from niwaki.runtime.constraints.protocol import Forced
from niwaki.runtime.constraints.walks import BEFORE, BEHIND, LAST, StepTable

MAX_PLACES: Final = 4096  # of one constraint
MAX_STEPS: Final = 8192  # between them
MAX_GRAMMAR: Final = 8 * 1024  # characters, which take some milliseconds to be read
MAX_MASK_BYTES: Final = 4 * 1024 * 1024  # of these masks
SHARED: Final = 2  # texts: for one alone it does not pay to keep anything
SAMPLE: Final = 64  # bytes of a mask by which it is looked for: a hash of all 16 KiB takes longer than to make it
PLACE_BYTES: Final = 500
STEP_BYTES: Final = 200
NO_ID: Final = -1


class Step(msgspec.Struct, eq=False, gc=False):
    """A token that may follow at a place, and the number of the one behind it."""

    token_id: int
    after: int
    walk_ends: int = NO_ID  # as which it was added to the known ones, see `StepTable.add`


class Place(msgspec.Struct, eq=False, gc=False):
    """Where texts of one constraint are that can go on in the same ways, and what was found there: the mask, what is
    forced, whether the text may end, and whether nothing may follow. `is_free`: nothing is forced, something may.

    Texts are known to be at one place by their situation, or else by their tokens.
    """

    # Not looked at by the collector of cycles, which has none to find: a step names its place by number. Those of a
    # thousand schemas held all rows up for 70 ms.

    number: int  # in the order in which they were met
    situation: Situation | None
    # Most places lead to one other only: what a step looks at lies together then.
    first_id: int = NO_ID
    first: Step | None = None
    others: dict[int, Step] | None = None
    mask: npt.NDArray[np.uint32] | None = None
    forced: Forced | None = None
    can_end: bool | None = None
    is_done: bool | None = None
    is_free: bool = False
    loop: int = NO_LOOP  # which tokens stay here
    opened: bytes | None = None  # what is open here (`open_behind`), where that was looked at

    def step(self, token_id: int) -> Step | None:
        if self.first_id == token_id:
            return self.first
        return None if self.others is None else self.others.get(token_id)

    def allows(self, token_id: int) -> bool:
        """Whether the token is known to be in the mask."""
        mask = self.mask
        return mask is not None and bool(int(mask[token_id >> 5]) >> (token_id & 31) & 1)

    def add(self, step: Step) -> None:
        if self.first is None:
            self.first, self.first_id = step, step.token_id
        elif self.others is None:
            self.others = {step.token_id: step}
        else:
            self.others[step.token_id] = step


class Places:
    """The places that texts of one constraint came through: what is known there need not be filled again. The first
    ones are kept."""

    def __init__(self, grammar: str) -> None:
        """`grammar`: one whose situations can be told, or nothing."""
        self._grammar = grammar if len(grammar) <= MAX_GRAMMAR else ""
        self._num_texts = 0
        self.loops: Loops | None = None  # of the first text, while there is no other: situations tell as much
        self.start = Place(0, None, opened=b"")
        self.all = [self.start]  # by number
        self.known_steps = StepTable()  # from number to number
        self._situations: Situations | None = None  # told from the second text on: for one it would not pay
        self._by_situation = {START: self.start}
        self._num_steps = 0
        # Each once, but for the few that differ from another one outside of their samples.
        self._masks: dict[bytes, tuple[bytes, npt.NDArray[np.uint32]]] = {}
        self._mask_bytes = 0
        self._lock = threading.Lock()

    def expect_text(self) -> None:
        """One more begins."""
        with self._lock:  # situations of two would be taken for each other's: they are numbers
            self._num_texts += 1
            self.loops = Loops(self._grammar) if self._num_texts < SHARED and self._grammar else None
            if self._num_texts == SHARED and self._grammar:
                self._situations = Situations(self._grammar)
                self.start.situation = START

    @property
    def num_bytes(self) -> int:
        own = PLACE_BYTES * len(self.all) + STEP_BYTES * self._num_steps + self._mask_bytes
        situations = 0 if self._situations is None else self._situations.num_bytes
        return own + situations + self.known_steps.num_bytes

    def step(self, place: Place, token_id: int, text: bytes) -> Step | None:
        """A token that may follow there, and what it writes. None where the place behind it is not kept."""
        found = place.step(token_id)
        if found is not None and not self.is_alone(place, found):
            return found
        situation = None
        if self._situations is not None and place.situation is not None:
            situation = self._situations.after(place.situation, text)
        with self._lock:
            after = None if situation is None else self._by_situation.get(situation)
            if found is not None:
                if after is not None:
                    found.after = after.number
                elif situation is not None:
                    alone = self.all[found.after]
                    alone.situation, self._by_situation[situation] = situation, alone
                return found
            if after is None:
                if len(self.all) >= MAX_PLACES:
                    return None
                after = Place(len(self.all), situation)
                self.all.append(after)
                if situation is not None:
                    self._by_situation[situation] = after
            step = Step(token_id, after.number)
            if self._num_steps < MAX_STEPS and place.step(token_id) is None:
                place.add(step)
                self._num_steps += 1
        return step

    def is_alone(self, place: Place, step: Step) -> bool:
        """Whether the first text took this step before places were shared: the one behind it may become one that is."""
        return place.situation is not None and self.all[step.after].situation is None

    def note_walkable(self, place: Place, step: Step, distances: KnownEnds, kind: int = 0) -> None:
        """Others may take this step without a look at them. `kind`: LAST, or nothing."""
        if kind and (self.is_alone(place, step) or (step.walk_ends != NO_ID and not step.walk_ends & LAST)):
            return  # it may lead elsewhere, or more is known
        after = self.all[step.after]
        ends = kind | (BEFORE if place.can_end else 0) | (BEHIND if after.can_end else 0)
        if step.walk_ends != ends:
            step.walk_ends = ends
            cost = distances.cost(step.token_id)
            self.known_steps.add(place.number, step.token_id, step.after, cost, cost + distances.value, ends)

    def learn(self, place: Place, mask: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """The mask there, as the one that is kept where there is room and it may be asked for again; else it is told
        back."""
        if self._num_texts < SHARED:
            if not place.loop or self._mask_bytes + mask.nbytes > MAX_MASK_BYTES:
                return mask
            place.mask = mask.copy()
            self._mask_bytes += mask.nbytes
            return place.mask
        text = mask.tobytes()
        sample = text[:: max(1, len(text) // SAMPLE)]
        found = self._masks.get(sample)
        if found is not None and found[0] == text:
            known = found[1]
        else:
            if self._mask_bytes + mask.nbytes > MAX_MASK_BYTES:
                return mask
            known = np.frombuffer(text, np.uint32)
            self._masks[sample] = text, known
            self._mask_bytes += mask.nbytes
        place.mask = known
        return known
