"""Results of a batch that are there before their turn, which is told where an earlier row is slow. Owns no row."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

ResultT = TypeVar("ResultT")

# Where nothing was given for so long, an earlier row is slow, and results that wait for it are kept.
KEEP_SECONDS = 1.0
# Is told the number of a row, from 0 on in the order of the rows, and its result.
Keep: TypeAlias = Callable[[int, ResultT | Exception], None]


class Behind(Generic[ResultT]):
    """The results of a batch that are there and wait for an earlier one: kept, once nothing was given for a while."""

    def __init__(self, keep: Keep[ResultT] | None) -> None:
        self._keep = keep
        self._numbers: deque[int] = deque()  # in the order in which they ended; some may have been given since
        self._num_given = 0
        self._given_at = time.monotonic()

    def gives_next(self) -> None:
        self._num_given += 1
        self._given_at = time.monotonic()
        while self._numbers and self._numbers[0] < self._num_given:
            self._numbers.popleft()

    def has_ended(self, number: int) -> None:
        if self._keep is not None:
            self._numbers.append(number)

    def patience(self) -> float | None:
        """Seconds until `keep` is to be called, if nothing is given before. None: there is nothing to keep."""
        return max(0.0, self._given_at + KEEP_SECONDS - time.monotonic()) if self._numbers else None

    def keep(self, result_at: Callable[[int], ResultT | Exception]) -> None:
        """`result_at`: by how many places it stands behind the next one that is given."""
        assert self._keep is not None, "nothing is noted for nobody"
        while self._numbers:
            number = self._numbers.popleft()
            if number > self._num_given:
                self._keep(number, result_at(number - self._num_given))
