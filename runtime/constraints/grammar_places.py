"""Masks of a grammar, and what it forces, kept by the tokens that lead there: texts that begin alike share them."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from niwaki.runtime.constraints.protocol import Forced

MAX_PLACES: Final = 4096  # of one constraint
MAX_MASK_BYTES: Final = 4 * 1024 * 1024  # of these masks
PLACE_BYTES: Final = 400


class Place:
    """Where the same tokens lead in every text of one constraint; and the mask, what is forced and whether nothing may
    follow there, once that was found."""

    __slots__ = ("after", "forced", "is_done", "mask")

    def __init__(self) -> None:
        self.after: dict[int, Place] = {}
        self.mask: npt.NDArray[np.uint32] | None = None
        self.forced: Forced | None = None
        self.is_done: bool | None = None


class Places:
    """The places that texts of one constraint came through: what is known there need not be filled again. The first
    ones are kept: texts begin alike, and part where their values do."""

    def __init__(self) -> None:
        self.start = Place()
        self._num_places = 1
        self._masks: dict[bytes, npt.NDArray[np.uint32]] = {}  # each once
        self._mask_bytes = 0  # with their keys

    @property
    def num_bytes(self) -> int:
        return PLACE_BYTES * self._num_places + self._mask_bytes

    def after(self, place: Place | None, token_id: int) -> Place | None:
        """None where no more are kept."""
        found = place and place.after.get(token_id)
        if found is None and place is not None and self._num_places < MAX_PLACES:
            self._num_places += 1
            found = place.after[token_id] = Place()
        return found

    def learn(self, place: Place, mask: npt.NDArray[np.uint32]) -> None:
        known = self._masks.get(key := mask.tobytes())
        if known is None and self._mask_bytes + 2 * mask.nbytes <= MAX_MASK_BYTES:
            known = self._masks[key] = mask.copy()
            self._mask_bytes += 2 * mask.nbytes
        place.mask = known
