"""Masks of a grammar, and what it forces, kept by the tokens that lead there: texts that begin alike share them."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from niwaki.runtime.constraints.protocol import Forced
from niwaki.runtime.constraints.walks import BEFORE, BEHIND, StepTable

MAX_PLACES: Final = 4096  # of one constraint
MAX_MASK_BYTES: Final = 4 * 1024 * 1024  # of these masks
PLACE_BYTES: Final = 400
NO_ID: Final = -1


class Place(msgspec.Struct, eq=False, gc=False):
    """Where the same tokens lead in every text of one constraint, and what was found there: the mask, what is forced,
    whether the text may end, and whether nothing may follow.

    Of the token that leads here: `cost`, by how much it may move the end away, and at most `farthest`; and how many
    characters begin in it. They are known where nothing is forced here and something may follow (`is_free`).
    """

    # Not looked at by the collector of cycles, which has none to find: places lead forward only. Those of a thousand
    # schemas held all rows up for 70 ms.

    token_id: int
    number: int  # in the order in which they were met
    # Most places lead to one other only: what a step looks at lies together then.
    first_id: int = NO_ID
    first: Place | None = None
    others: dict[int, Place] | None = None
    mask: npt.NDArray[np.uint32] | None = None
    forced: Forced | None = None
    can_end: bool | None = None
    is_done: bool | None = None
    is_free: bool = False
    walk_ends: int = -1  # as which the step to here was added to the known ones, see `StepTable.add`
    cost: int = 0
    farthest: int = 0
    num_characters: int = 0

    def after(self, token_id: int) -> Place | None:
        if self.first_id == token_id:
            return self.first
        return None if self.others is None else self.others.get(token_id)

    def add(self, token_id: int, number: int) -> Place:
        place = Place(token_id, number)
        if self.first is None:
            self.first, self.first_id = place, token_id
        elif self.others is None:
            self.others = {token_id: place}
        else:
            self.others[token_id] = place
        return place


class Places:
    """The places that texts of one constraint came through: what is known there need not be filled again. The first
    ones are kept: texts begin alike, and part where their values do."""

    def __init__(self) -> None:
        self.start = Place(NO_ID, 0)
        self.all = [self.start]  # by number
        self.known_steps = StepTable()  # from number to number
        self._masks: dict[bytes, npt.NDArray[np.uint32]] = {}  # each once
        self._mask_bytes = 0  # with their keys

    @property
    def num_bytes(self) -> int:
        return PLACE_BYTES * len(self.all) + self._mask_bytes + self.known_steps.num_bytes

    def after(self, place: Place | None, token_id: int) -> Place | None:
        """None where no more are kept."""
        found = place and place.after(token_id)
        if found is None and place is not None and len(self.all) < MAX_PLACES:
            found = place.add(token_id, len(self.all))
            self.all.append(found)
        return found

    def note_walkable(self, place: Place, after: Place) -> None:
        """Others may take this step without a look at them."""
        ends = (BEFORE if place.can_end else 0) | (BEHIND if after.can_end else 0)
        if after.walk_ends != ends:
            after.walk_ends = ends
            self.known_steps.add(place.number, after.token_id, after.number, after.cost, after.farthest, ends)

    def learn(self, place: Place, mask: npt.NDArray[np.uint32]) -> None:
        known = self._masks.get(key := mask.tobytes())
        if known is None and self._mask_bytes + 2 * mask.nbytes <= MAX_MASK_BYTES:
            known = self._masks[key] = mask.copy()
            self._mask_bytes += 2 * mask.nbytes
        place.mask = known
