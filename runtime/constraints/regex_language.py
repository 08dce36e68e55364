"""Regular languages as terms: joined, intersected, complemented, and asked what is in them.

Terms are built by one `Languages`, which gives equal terms the same object. Texts are read by Brzozowski's derivatives
("Derivatives of regular expressions", 1964): what may follow a character is a term again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from typing import Final, Literal, TypeAlias

from niwaki.runtime.constraints.regex_tree import MAX_CODE_POINT, Ranges, complement, holds, meet, normalised

Kind: TypeAlias = Literal["chars", "sequence", "any", "all", "not", "repeat"]
MAX_TERMS: Final = 60_000  # of one `Languages`
ANY_CHARACTER: Final[Ranges] = ((0, MAX_CODE_POINT),)
# Taken first where any character of a set would do: a witness should be readable.
PLEASANT: Final = "a0A -_./:@"


class TooManyTerms(Exception):
    """The question would take too long."""


@dataclass(eq=False, slots=True)
class Term:
    """`least` bounds the length of its texts from below. `is_plain`: neither "all" nor "not" is in it, so that it is
    empty only where it is `Languages.nothing`."""

    kind: Kind
    parts: tuple[Term, ...]
    ranges: Ranges
    low: int
    high: int | None
    number: int
    is_nullable: bool
    least: int
    is_plain: bool


class Languages:
    """Builds terms and answers for them. Used by one thread at a time."""

    def __init__(self, max_terms: int = MAX_TERMS) -> None:
        self._max_terms = max_terms
        self._terms: dict[tuple[object, ...], Term] = {}
        self._derivatives: dict[tuple[Term, int], Term] = {}
        self._classes: dict[Term, tuple[Ranges, ...]] = {}
        self._empty: dict[Term, bool | None] = {}
        self.nothing = self._term("any")
        self.empty = self._term("sequence")
        self.any_character = self.characters(ANY_CHARACTER)
        self.everything = self._term("repeat", (self.any_character,), low=0, high=None)
        self.something = self.sequence(self.any_character, self.everything)

    @property
    def num_terms(self) -> int:
        """How many were built, with the answers about single characters."""
        return len(self._terms) + len(self._derivatives)

    # -- building

    def characters(self, ranges: Ranges) -> Term:
        """One character. `ranges` are normalised."""
        return self._term("chars", ranges=ranges) if ranges else self.nothing

    def text(self, text: str) -> Term:
        return self.sequence(*(self.characters(((ord(char), ord(char)),)) for char in text))

    def sequence(self, *terms: Term) -> Term:
        return reduce(lambda rest, first: self._before(first, rest), reversed(terms), self.empty)

    def _before(self, first: Term, rest: Term) -> Term:
        if first is self.nothing or rest is self.nothing:
            return self.nothing
        if first is self.empty:
            return rest
        if rest is self.empty:
            return first
        if first.kind == "sequence":
            return self._before(first.parts[0], self._before(first.parts[1], rest))
        if first is self.everything and (rest is first or (rest.kind == "sequence" and rest.parts[0] is first)):
            return rest
        return self._term("sequence", (first, rest))

    def any_of(self, terms: Iterable[Term]) -> Term:
        kept: dict[Term, None] = {}
        ranges: list[tuple[int, int]] = []
        for term in terms:
            for part in term.parts if term.kind == "any" else (term,):
                if part is self.everything:
                    return part
                if part.kind == "chars":
                    ranges += part.ranges
                else:
                    kept[part] = None
        if ranges:
            kept[self.characters(normalised(ranges))] = None
        if len(kept) == 2 and self.empty in kept and self.something in kept:
            return self.everything
        ordered = tuple(sorted(kept, key=lambda part: part.number))
        return ordered[0] if len(ordered) == 1 else self._term("any", ordered)

    def all_of(self, terms: Iterable[Term]) -> Term:
        kept: dict[Term, None] = {}
        for term in terms:
            for part in term.parts if term.kind == "all" else (term,):
                if part is self.nothing:
                    return part
                if part is not self.everything:
                    kept[part] = None
        if self.empty in kept:
            return self.empty if all(part.is_nullable for part in kept) else self.nothing
        if any(part.kind == "not" and part.parts[0] in kept for part in kept):
            return self.nothing
        if self.something in kept and any(not part.is_nullable for part in kept if part is not self.something):
            del kept[self.something]
        ordered = tuple(sorted(kept, key=lambda part: part.number))
        if not ordered:
            return self.everything
        return ordered[0] if len(ordered) == 1 else self._term("all", ordered)

    def none_of(self, term: Term) -> Term:
        """Every text that is not in `term`."""
        if term.kind == "not":
            return term.parts[0]
        if term is self.everything:
            return self.nothing
        return self.everything if term is self.nothing else self._term("not", (term,))

    def repeat(self, item: Term, low: int, high: int | None) -> Term:
        if high == 0 or item is self.empty:
            return self.empty
        if item is self.nothing:
            return self.nothing if low else self.empty
        if low == high == 1:
            return item
        if item.is_nullable:
            low = 0
        if item.kind == "repeat" and item.low == 0 and item.high is None:
            return item
        return self._term("repeat", (item,), low=low, high=high)

    def _term(
        self,
        kind: Kind,
        parts: tuple[Term, ...] = (),
        *,
        ranges: Ranges = (),
        low: int = 0,
        high: int | None = 0,
    ) -> Term:
        key = (kind, *(part.number for part in parts), ranges, low, high)
        known = self._terms.get(key)
        if known is not None:
            return known
        if len(self._terms) >= self._max_terms:
            raise TooManyTerms
        match kind:
            case "chars":
                is_nullable, least = False, 1
            case "sequence":
                is_nullable, least = all(part.is_nullable for part in parts), sum(part.least for part in parts)
            case "any":
                is_nullable = any(part.is_nullable for part in parts)
                least = min((part.least for part in parts), default=0)
            case "all":
                is_nullable, least = all(part.is_nullable for part in parts), max(part.least for part in parts)
            case "not":
                is_nullable = not parts[0].is_nullable
                least = 0 if is_nullable else 1
            case "repeat":
                is_nullable, least = low == 0 or parts[0].is_nullable, low * parts[0].least
        is_plain = kind not in ("all", "not") and all(part.is_plain for part in parts)
        term = Term(kind, parts, ranges, low, high, len(self._terms), is_nullable, least, is_plain)
        self._terms[key] = term
        return term

    # -- reading

    def after(self, term: Term, code: int) -> Term:
        """What may follow the character in the texts of `term` that begin with it."""
        key = (term, code)
        known = self._derivatives.get(key)
        if known is None:
            if len(self._derivatives) >= self._max_terms:
                raise TooManyTerms
            known = self._derivatives[key] = self._after(term, code)
        return known

    def _after(self, term: Term, code: int) -> Term:
        match term.kind:
            case "chars":
                return self.empty if holds(term.ranges, code) else self.nothing
            case "sequence":
                if not term.parts:
                    return self.nothing
                first, rest = term.parts
                behind = self._before(self.after(first, code), rest)
                return self.any_of((behind, self.after(rest, code))) if first.is_nullable else behind
            case "any":
                return self.any_of(self.after(part, code) for part in term.parts)
            case "all":
                return self.all_of(self.after(part, code) for part in term.parts)
            case "not":
                return self.none_of(self.after(term.parts[0], code))
            case "repeat":
                rest = self.repeat(term.parts[0], max(term.low - 1, 0), None if term.high is None else term.high - 1)
                return self._before(self.after(term.parts[0], code), rest)

    def holds(self, term: Term, text: str) -> bool:
        """Whether the text is in the language."""
        for char in text:
            term = self.after(term, ord(char))
            if term is self.nothing:
                return False
        return term.is_nullable

    def classes(self, term: Term) -> tuple[Ranges, ...]:
        """The sets of characters that the term does not tell apart."""
        known = self._classes.get(term)
        if known is None:
            known = self._classes[term] = self._partition(term)
        return known

    def cuts(self, terms: Iterable[Term]) -> list[int]:
        """Characters from one of these to the next are not told apart; the last is behind all characters."""
        return _cuts(_sets_of(terms))

    def _partition(self, term: Term) -> tuple[Ranges, ...]:
        sets = _sets_of([term])
        edges = _cuts(sets)
        places = {edge: place for place, edge in enumerate(edges)}
        keys = [0] * len(edges)  # a bit for each set that holds what begins at the edge
        for number, ranges in enumerate(sets):
            for low, high in ranges:
                for place in range(places[low], places[high + 1]):
                    keys[place] |= 1 << number
        members: dict[int, list[tuple[int, int]]] = {}
        for key, (low, above) in zip(keys[:-1], pairwise(edges), strict=True):
            members.setdefault(key, []).append((low, above - 1))
        return tuple(map(tuple, members.values()))

    def shortest(self, term: Term, max_looks: int = 2000) -> str | None:
        """A short text (the shortest, but where intersections mislead), or None where there is none.

        Raises:
            TooManyTerms: `max_looks` terms were looked at, and it is not known.
        """
        if term is self.nothing:
            return None
        if term.is_plain:
            if term.least > max_looks:
                raise TooManyTerms
            return _shortest_plain(term)
        classes = [_pleasant(ranges) for ranges in self.classes(term)]
        queue: list[tuple[int, int, str, Term]] = [(term.least, 0, "", term)]
        seen = {term}
        order = 0
        for _ in range(max_looks):
            if not queue:
                return None
            _, _, text, place = heapq.heappop(queue)
            if place.is_nullable:
                return text
            for code in classes:
                behind = self.after(place, code)
                if behind is not self.nothing and behind not in seen:
                    seen.add(behind)
                    order -= 1
                    heapq.heappush(queue, (len(text) + 1 + behind.least, order, text + chr(code), behind))
        raise TooManyTerms

    def is_empty(self, term: Term) -> bool | None:
        """Whether no text is in it; None where that is not found out quickly."""
        if term.is_plain:
            return term is self.nothing
        if term not in self._empty:
            try:
                self._empty[term] = self.shortest(term, 300) is None
            except TooManyTerms:
                self._empty[term] = None
        return self._empty[term]

    def members(self, term: Term, limit: int) -> list[str] | None:
        """All texts, the shortest first, where they are at most `limit`; else None."""
        few: list[int] = []
        many: list[int] = []
        for ranges in self.classes(term):
            is_small = sum(high - low + 1 for low, high in ranges) <= limit
            members = [code for low, high in ranges for code in range(low, high + 1)] if is_small else []
            few += members
            many += [] if is_small else [ranges[0][0]]
        try:
            found: list[str] = []
            places: Sequence[tuple[str, Term]] = [("", term)]
            for _ in range(1000):
                found += [text for text, place in places if place.is_nullable]
                if len(found) > limit:
                    return None
                if any(self.is_empty(self.after(place, code)) is not True for _, place in places for code in many):
                    return None
                places = [
                    (text + chr(code), behind)
                    for text, place in places
                    for code in few
                    if self.is_empty(behind := self.after(place, code)) is not True
                ]
                if not places:
                    return found
                if len(places) > 4 * limit:
                    return None
        except TooManyTerms:
            pass
        return None


def _sets_of(terms: Iterable[Term]) -> list[Ranges]:
    """Of characters, each once."""
    sets: dict[Ranges, None] = {}
    seen: set[Term] = set()
    stack = [*terms]
    while stack:
        part = stack.pop()
        if part not in seen:
            seen.add(part)
            stack += part.parts
            if part.ranges:
                sets[part.ranges] = None
    return [*sets]


def _cuts(sets: Iterable[Ranges]) -> list[int]:
    cuts = {0, MAX_CODE_POINT + 1}
    for ranges in sets:
        for low, high in ranges:
            cuts |= {low, high + 1}
    return sorted(cuts)


def _shortest_plain(term: Term) -> str:
    """Of a term without "all" and "not", which is not empty: `least` is the length of its shortest texts then."""
    texts: list[str] = []
    while term.kind == "sequence" and term.parts:  # each is the first and the rest: long ones are not walked by calls
        first, term = term.parts
        texts.append(_shortest_plain(first))
    match term.kind:
        case "chars":
            texts.append(chr(_pleasant(term.ranges)))
        case "any":
            texts.append(_shortest_plain(min(term.parts, key=lambda part: part.least)))
        case "repeat":
            texts += [_shortest_plain(term.parts[0])] * term.low if term.low else []
    return "".join(texts)


@lru_cache(maxsize=512)
def _pleasant(ranges: Ranges) -> int:
    for char in PLEASANT:
        if any(low <= ord(char) <= high for low, high in ranges):
            return ord(char)
    for low, high in ranges:
        if high > 0x20:
            return max(low, 0x21)
    return ranges[0][0]


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters of `ranges` that are not in `others`; both normalised."""
    return meet(ranges, complement(others))
