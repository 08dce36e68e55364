"""Which tokens of many continuations are computed for which of them: a beginning that several share, for one alone.

Plain data: tokens in, places out, and whole scores made of parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from niwaki.runtime.api import Score


@dataclass(frozen=True, slots=True)
class SharedBeginnings:
    """In the order of their tokens, what each continuation has in common with the one before it.

    That is all that it has in common with any before it. So what the one before it knows, and its own rest, is all.
    """

    order: tuple[int, ...]
    counts: tuple[int, ...]  # by continuation: tokens that it takes from the one before it in the order

    @classmethod
    def of(cls, tails: Sequence[list[int]]) -> SharedBeginnings:
        """Each keeps a token of its own at least: something must be computed for it."""
        order = sorted(range(len(tails)), key=tails.__getitem__)
        counts = [0] * len(tails)
        for before, index in itertools.pairwise(order):
            counts[index] = min(_num_common(tails[before], tails[index]), len(tails[index]) - 1)
        return cls(tuple(order), tuple(counts))

    @property
    def by_need(self) -> list[int]:
        """The continuations, those that take least from others first: what others build on is in the cache early."""
        return sorted(self.order, key=self.counts.__getitem__)

    def whole(self, parts: Sequence[Score]) -> tuple[Score, ...]:
        """The scores of the continuations, from those of their own tokens; of all behind one text, then of all behind
        another."""
        scores = list(parts)
        for first in range(0, len(parts), len(self.order)):
            for before, index in itertools.pairwise(self.order):
                if count := self.counts[index]:
                    own = scores[first + index]
                    logprobs = scores[first + before].logprobs[:count] + own.logprobs
                    text = "".join(token.text or "" for token in logprobs)
                    scores[first + index] = replace(own, text=text, logprobs=logprobs)
        return tuple(scores)


def _num_common(first: list[int], second: list[int]) -> int:
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))
