"""Matchers of a composed constraint's parts that no engine has: one special token, and a text with a budget of its own.
Their owner is `composed.ComposedMatcher`, which knows what stands before and behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.protocol import NOTHING_FORCED, Followed, Forced, MaskRow, Matcher, follow
from niwaki.runtime.constraints.walks import Way


class _PartMatcher(ABC):
    """What both have in common of `protocol.Matcher`; the ends of texts are their owner's."""

    __slots__ = ()

    @property
    @abstractmethod
    def can_end(self) -> bool: ...

    @property
    def distance(self) -> int:
        return 0 if self.can_end else 1

    def admits(self, token_id: int, remaining: int) -> bool:
        return True

    def standing(self) -> None:  # noqa: B027
        """No step is known."""

    def walked(self, way: Way) -> None:
        raise AssertionError("no step is known")

    def known_mask(self, remaining: int) -> None:  # noqa: B027  # nothing is the answer
        """Never at hand."""

    def forced_text(self) -> Forced:
        return NOTHING_FORCED

    def fits(self, remaining: int) -> bool:
        return self.distance <= remaining

    def allow_behind(self, row: Words, text: bytes, remaining: int) -> None:  # noqa: B027
        """None: a prompt's end stays as it is before composed constraints."""

    def accept_bytes(self, text: bytes) -> None:
        raise ConstraintError(f"the text {text!r} is not allowed by the constraint")


class MarkMatcher(_PartMatcher):
    """One special token, and nothing else."""

    __slots__ = ("_is_taken", "_token_id")

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._is_taken = False

    @property
    def is_done(self) -> bool:
        return self._is_taken

    @property
    def can_end(self) -> bool:
        return self._is_taken

    def fill_mask(self, row: MaskRow) -> None:
        words = row.view(np.uint32)
        words[:] = 0
        if not self._is_taken:
            words[self._token_id >> 5] = np.uint32(1 << (self._token_id & 31))

    def fill_mask_within(self, row: MaskRow, remaining: int) -> None:
        self.fill_mask(row)

    def accept(self, token_id: int) -> None:
        if self._is_taken or token_id != self._token_id:
            raise ConstraintError(f"token {token_id} is not the marker {self._token_id}")
        self._is_taken = True

    def step(self, token_id: int, remaining: int) -> bool:
        return False

    def follow(self, token_id: int, remaining: int) -> Followed:
        return follow(self, token_id, remaining)

    def forced(self) -> tuple[int, ...]:
        return () if self._is_taken else (self._token_id,)

    def rollback(self, count: int) -> None:
        if count > self._is_taken:
            raise ConstraintError(f"cannot take back {count} tokens of {int(self._is_taken)}")
        self._is_taken = self._is_taken and not count

    def clone(self) -> MarkMatcher:
        twin = MarkMatcher(self._token_id)
        twin._is_taken = self._is_taken
        return twin

    def shortest_ending(self, budget: int) -> tuple[int, ...] | None:
        path = self.forced()
        return path if len(path) <= budget else None


class BudgetMatcher(_PartMatcher):
    """Another matcher, of whose texts every beginning is one too, for at most `max_tokens` tokens."""

    __slots__ = ("_inner", "_left")

    def __init__(self, inner: Matcher, max_tokens: int) -> None:
        self._inner = inner
        self._left = max_tokens

    @property
    def is_done(self) -> bool:
        return self._left == 0 or self._inner.is_done

    @property
    def can_end(self) -> bool:
        return True

    def fill_mask(self, row: MaskRow) -> None:
        if self._left:
            self._inner.fill_mask(row)
        else:
            row.view(np.uint32)[:] = 0

    def fill_mask_within(self, row: MaskRow, remaining: int) -> None:
        if self._left and remaining > 0:
            self._inner.fill_mask_within(row, remaining)
        else:
            row.view(np.uint32)[:] = 0

    def accept(self, token_id: int) -> None:
        if not self._left:
            raise ConstraintError(f"token {token_id} is not allowed: the budget of its part is used up")
        self._inner.accept(token_id)
        self._left -= 1

    def step(self, token_id: int, remaining: int) -> bool:
        return False

    def follow(self, token_id: int, remaining: int) -> Followed:
        return follow(self, token_id, remaining)

    def forced(self) -> tuple[int, ...]:
        return ()

    def rollback(self, count: int) -> None:
        self._inner.rollback(count)
        self._left += count

    def clone(self) -> BudgetMatcher:
        return BudgetMatcher(self._inner.clone(), self._left)

    def shortest_ending(self, budget: int) -> tuple[int, ...] | None:
        return ()
