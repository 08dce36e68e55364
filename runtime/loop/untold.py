"""Tokens that were drawn in a steady batch and that its requests have not been told yet. Knows no requests, but their
places in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from niwaki.kernels.segments import Int32s, Int64s

MAX_STEPS = 64  # whose tokens are kept before the text of all is made


@dataclass(frozen=True, slots=True)
class Taken:
    """The places that a step's tokens make somebody look at: to take the token that was drawn, which the matcher knows
    already at those in `accepted`; or to draw one for this place alone."""

    looked_at: list[int]
    accepted: set[int]
    one_by_one: list[int]


class Untold:
    """A row of tokens for each step, one for each place of the batch."""

    def __init__(self, num_places: int) -> None:
        self._tokens = np.empty((MAX_STEPS, num_places), np.int32)  # a step's side by side: they are written at once
        self._num_steps = 0
        self._first = np.zeros(num_places, np.int64)  # the step of each place's first token that is not told

    @property
    def is_full(self) -> bool:
        return self._num_steps == MAX_STEPS

    @property
    def row(self) -> Int32s:
        """Where the next step's tokens go; `count_row` says that they are there."""
        row: Int32s = self._tokens[self._num_steps]
        return row

    def count_row(self) -> None:
        self._num_steps += 1

    def pass_over(self, places: Sequence[int]) -> None:
        """Of these the next step's tokens are told otherwise."""
        self._first[places] = self._num_steps + 1

    def take(self, place: int) -> Int32s:
        """The tokens that this place's request is now told."""
        first = int(self._first[place])
        if first >= self._num_steps:
            return self._tokens[:0, place]
        self._first[place] = self._num_steps
        return self._tokens[first : self._num_steps, place]

    def clear(self) -> None:
        """All were told."""
        self._num_steps = 0
        self._first[:] = 0

    def keep(self, places: Int64s) -> None:
        """Only these are left."""
        self._tokens, self._first = self._tokens.take(places, axis=1), self._first[places]  # `[:, places]` is by column
