"""The search for a way to the end of a grammar's text: by endings that are known, straight, or by the shortest of all.

Owns nothing that changes but the effort that it is given; places are looked at, and stay where they are.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from operator import attrgetter
from typing import Final

from niwaki.runtime.constraints.grammar_source import GrammarSource
from niwaki.runtime.constraints.grammar_vocabulary import Ending, GrammarVocabulary, Shorter, completes
from niwaki.runtime.constraints.guidance import BRACKETS, CLOSING, Effort, KnownEnd, Native, short_text, straight_text

TOKEN_BYTES: Final = 4  # about
SHORTEST_EFFORT: Final = 150  # for the shortest of all, which mostly spends it in vain where the straight way is long
COSTLY: Final = 3  # to try what is known: on the straight way it is, behind brackets alone
FEW: Final = 4  # rests that are tried one after the other
CHECKED_TOKENS: Final = 200  # of a known ending that take as long to check as a place of a search


class KnownEnds:
    """What all texts of a grammar may end as, and by how much each token may move an end away."""

    def __init__(self, words: GrammarVocabulary, shortest: Ending, source: GrammarSource) -> None:
        self.words = words
        self.shortest = shortest
        self.endings = (shortest, *([words.ending(source.other)] if source.other else []))
        self.closings, self.array_ends = source.closings, source.array_ends
        commitments = source.commitments
        self.value = commitments.value
        # Not for each of 131,072 tokens: they are of a few dozen kinds.
        self._costs: list[int] = [max(plain, commitments.inside) + num * self.value for plain, num in words.cost_kinds]
        self.highest_cost = max(self._costs) + self.value

    @cached_property
    def rests(self) -> list[tuple[Ending, list[int], list[int]]]:
        """Of each ending those that are tried: of how many tokens, and from which byte on. Few texts ask."""
        return [(ending, *ending.written_rests()) for ending in self.endings]

    def cost(self, token_id: int) -> int:
        """By how much the token may move an end away, beside what its last opening byte begins."""
        found: int = self._costs[self.words.cost_kind_of[token_id]]
        return found


class EndingSearch:
    """From places of one text, or one token behind them."""

    __slots__ = ("_effort", "_ending", "_ends", "_num_tokens", "_num_written")

    def __init__(
        self, ends: KnownEnds, ending: Ending | None, num_written: int, num_tokens: int, effort: Effort
    ) -> None:
        """`ending`: one of this text, from `num_written` characters before. `num_tokens`: of the text."""
        self._ends = ends
        self._ending = ending
        self._num_written = num_written
        self._num_tokens = num_tokens
        self._effort = effort

    def known_end(self, place: Native, enough: int = 0) -> bytes | None:
        """A part of an ending that completes the text from `place`: what closed before still closes. One of at most
        `enough` tokens, else the shortest."""
        if place.is_accepting():
            return b""
        ending, words = self._ending, self._ends.words
        found = [] if ending is None else [(ending, *ending.written_rests(self._num_written))]
        may_follow: dict[int, bool] = {}  # most begin with one of a few bytes
        far: dict[tuple[int, int], list[Ending]] = {}  # by what they are of and their first byte
        # Also of the shortest text: what a whole text needs may be asked for again, as after each comma of a list.
        for number, (source, counts, starts) in enumerate(found + self._ends.rests):
            shorter = Shorter()
            for count, start in zip(counts, starts, strict=True):
                head = source.whole[start]
                if head not in may_follow:
                    may_follow[head] = place.validate_tokens([words.ids[head]]) == 1
                if not may_follow[head]:
                    continue
                rest = source.from_byte(start)
                if count > enough:
                    far.setdefault((number, head), []).append(rest)
                elif shorter.completes(place, rest, words):
                    return source.whole[start:]
        expected = 0 if ending is None else ending.num_tokens - 1
        ends = (_shortest_of(rests, place, words, expected) for rests in far.values())
        shortest = [end for end in ends if end is not None]
        return min(shortest, key=attrgetter("num_tokens")).text if shortest else None

    def straight(self, place: Native) -> bytes | None:
        """See `straight_text`."""
        known_end = self._affordable_end(self._effort)
        looks_behind = CLOSING if self._cost() < COSTLY else BRACKETS
        ends, words = self._ends, self._ends.words
        whole = ends.shortest.whole
        behind_key = self._end_behind_key
        return straight_text(
            place, words, self._effort, known_end, ends.closings, looks_behind, whole, behind_key, ends.array_ends
        )

    def _end_behind_key(self, place: Native, key: bytes) -> bytes | None:
        """What the shortest text has behind this key, its quotes and its colon, where it completes the text here."""
        shortest = self._ends.shortest
        start = shortest.whole.find(key) + len(key)
        if start < len(key) or not self._effort.take(1 + int(shortest.counts[start]) // CHECKED_TOKENS):
            return None
        return shortest.whole[start:] if completes(place, shortest.from_byte(start), self._ends.words) else None

    def shortest(self, place: Native) -> bytes | None:
        """See `short_text`."""
        num_before = TOKEN_BYTES * self._num_tokens
        effort = self._effort.part(SHORTEST_EFFORT)
        found = short_text(place, self._ends.words, effort, self._affordable_end(effort), num_before)
        self._effort.left += max(0, effort.left)
        return found

    def _cost(self) -> int:
        """Of trying what is known once, as places of a search."""
        endings = (*self._ends.endings, self._ending or self._ends.shortest)
        return sum(one.num_tokens for one in endings) // CHECKED_TOKENS

    def _affordable_end(self, effort: Effort) -> KnownEnd:
        """`known_end`, as far as the effort goes."""
        cost = self._cost()

        def known_end(place: Native) -> bytes | None:
            return self.known_end(place) if not cost or effort.take(cost) else None

        return known_end


def _shortest_of(rests: list[Ending], place: Native, words: GrammarVocabulary, expected: int) -> Ending | None:
    """The shortest that completes the text, of rests of one ending that begin alike. Where a long one does, one is
    found by halving: mostly what completes it stands behind it in all longer ones. `expected`: tokens that it may have,
    near which it is looked for first."""
    ordered = sorted(rests, key=attrgetter("num_tokens"))

    def ends(rest: Ending) -> bool:
        return completes(place, rest, words)

    last = len(ordered) - 1
    if last < FEW - 1:
        return next(filter(ends, ordered), None)
    high = min(bisect_left(ordered, expected, key=attrgetter("num_tokens")), last)
    low = 0
    if ends(ordered[high]):
        step = 1
        while step <= high and ends(ordered[high - step]):
            high, step = high - step, 2 * step
        low = max(0, high - step + 1)
    elif high < last and ends(ordered[last]):
        low, high = high + 1, last
    else:
        return next(filter(ends, ordered), None)
    return ordered[bisect_left(ordered, True, low, high, key=ends)]
