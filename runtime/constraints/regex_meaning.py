"""What a regex means, as a term of `regex_language`: the texts that it matches whole, or in which it is found.

Anchors anywhere, look-ahead and look-behind are worked out where that is regular. Each node is read together with what
follows it up to the end of the text, because that is what a look-ahead looks at. Of what stands before it is known
whether that is the text's start, and of which set the last character is: that is what a word boundary looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, assert_never

from niwaki.runtime.constraints.regex_language import Languages, Term
from niwaki.runtime.constraints.regex_looks import UNICODE_WORDS
from niwaki.runtime.constraints.regex_tree import (
    MAX_CODE_POINT,
    Alternatives,
    Anchor,
    Characters,
    Concatenation,
    Look,
    Node,
    Ranges,
    Repeat,
    complement,
    invalid,
    meet,
    normalised,
)
from niwaki.runtime.constraints.regex_unicode import members

ANYTHING: Final = Repeat(Characters("", ((0, MAX_CODE_POINT),), 0), 0, None)
MAX_SETS: Final = 16  # of characters that looks behind tell apart
MAX_COPIES: Final = 8  # of a repeated group that has an anchor or a look in it

# The set in which the character before is, one of those that looks behind tell apart; None at the text's start.
Before = Ranges | None
# What may follow, up to the end of the text, behind such a character.
Following = Callable[[Before], Term]


def found_in(languages: Languages, node: Node, text: str) -> Term:
    """The texts in which the regex `node`, written as `text`, is found.

    Raises:
        ConstraintError: it looks around in a way that is not worked out, with the position.
        TooManyTerms: it is too large.
    """
    whole = node.items if isinstance(node, Concatenation) else (node,)
    return _Reader(languages, text).outermost((ANYTHING, *whole), lambda before: languages.everything)


def matched_by(languages: Languages, node: Node, text: str) -> Term:
    """The texts that the regex matches from their start to their end. Raises as `found_in`."""
    whole = node.items if isinstance(node, Concatenation) else (node,)
    return _Reader(languages, text).outermost(whole, lambda before: languages.empty)


class _Reader:
    def __init__(self, languages: Languages, text: str) -> None:
        self._languages = languages
        self._text = text
        self._sets: list[Ranges] = [((0, MAX_CODE_POINT),)]  # of characters that looks behind tell apart

    def outermost(self, items: tuple[Node, ...], following: Following) -> Term:
        """The whole regex. Here, what stands before a look-behind is all the text there is."""
        self._sets = _told_apart(items)
        if len(self._sets) > MAX_SETS:
            raise invalid(self._text, 0, f"its looks behind tell more than {MAX_SETS} sets of characters apart")
        before = self._languages.empty
        start = 0
        for index, item in enumerate(items):
            if isinstance(item, Look) and not item.is_ahead:
                part = Concatenation(items[start:index])
                if _has(part, lambda node: isinstance(node, Look) or (isinstance(node, Anchor) and not node.is_start)):
                    raise invalid(self._text, item.index, "look-behind after other looks is not supported")
                if not _is_plain(item.item):
                    raise invalid(self._text, item.index, "look-behind for more than plain text is not supported")
                seen = self._languages.sequence(self._languages.everything, self._plain(item.item))
                here = self._behind(before, part, lambda before: self._languages.empty)
                before = self._languages.all_of((here, self._languages.none_of(seen) if item.is_negated else seen))
                start = index + 1
        return self._behind(before, Concatenation(items[start:]), following)

    def _behind(self, before: Term, node: Node, following: Following) -> Term:
        """`node` and what follows it, behind a text of `before` that begins at the text's start."""
        return self._consumed(before, None, self._then(node, following))

    def _read(self, node: Node, before: Before, following: Following) -> Term:
        languages = self._languages
        if _is_plain(node):
            return self._consumed(self._plain(node), before, following)
        match node:
            case Anchor(is_start=True):
                return following(None) if before is None else languages.nothing
            case Anchor():
                return languages.all_of((following(before), languages.empty))
            case Look(Characters() as characters, False, is_negated, _) if (ranges := _ranges(characters)) is not None:
                is_seen = before is not None and meet(before, ranges) == before
                return following(before) if is_seen != is_negated else languages.nothing
            case Look(item, is_ahead, is_negated, index):
                if not is_ahead:
                    raise invalid(
                        self._text,
                        index,
                        "look-behind for more than one character is supported at the outermost level only",
                    )
                if is_negated and has_word_boundary(item):
                    raise invalid(self._text, index, "no word boundary there means one thing here and another there")
                seen = self._read(item, before, lambda before: languages.everything)
                return languages.all_of((following(before), languages.none_of(seen) if is_negated else seen))
            case Alternatives(items):
                following = _remembered(following)
                return languages.any_of([self._read(item, before, following) for item in items])
            case Concatenation(items):
                for item in reversed(items):
                    following = self._then(item, following)
                return following(before)
            case Repeat():
                return self._repeat(node, before, following)
            case _:
                raise AssertionError(node)  # characters are plain

    def _then(self, item: Node, following: Following) -> Following:
        return _remembered(lambda before: self._read(item, before, following))

    def _consumed(self, term: Term, before: Before, following: Following) -> Term:
        languages = self._languages
        if term is languages.empty:
            return following(before)
        behind = {ranges: following(ranges) for ranges in self._sets}
        first = following(before) if term.is_nullable else languages.nothing
        if len({*behind.values(), *([first] if term.is_nullable else [])}) == 1:
            return languages.sequence(term, behind[self._sets[0]])
        if len(set(behind.values())) == 1:
            later = languages.all_of((term, languages.something)) if term.is_nullable else term
            return languages.any_of((first, languages.sequence(later, behind[self._sets[0]])))
        parts = [languages.sequence(self._ending(term, ranges), behind[ranges]) for ranges in self._sets]
        return languages.any_of((first, *parts))

    def _ending(self, term: Term, ranges: Ranges) -> Term:
        """The texts of the term whose last character is one of these."""
        languages = self._languages
        match term.kind:
            case "chars":
                return languages.characters(meet(term.ranges, ranges))
            case "sequence" if term.parts:
                first, rest = term.parts
                last = languages.sequence(first, self._ending(rest, ranges))
                return languages.any_of((last, self._ending(first, ranges))) if rest.is_nullable else last
            case "any":
                return languages.any_of([self._ending(part, ranges) for part in term.parts])
            case "repeat" if term.high != 0:
                item = term.parts[0]
                low = 0 if item.is_nullable else max(term.low - 1, 0)
                others = languages.repeat(item, low, None if term.high is None else term.high - 1)
                return languages.sequence(others, self._ending(item, ranges))
            case "sequence" | "repeat":
                return languages.nothing
        last = languages.sequence(languages.everything, languages.characters(ranges))
        return languages.all_of((term, last))

    def _repeat(self, node: Repeat, before: Before, following: Following) -> Term:
        """A repeat of something with an anchor or a look in it: written out, or (?:(?!X)C)* in front of an end."""
        following = _remembered(following)
        if node.high is not None and node.high <= MAX_COPIES:
            behind = following
            for copy in range(node.high, 0, -1):
                behind = self._copy(node.item, copy > node.low, behind, following)
            return behind(before)
        match node.item:
            case Concatenation((Look(item, True, is_negated, _), Characters() as characters)) if (
                node.high is None and _is_plain(item)
            ):
                return self._tempered(self._plain(item), is_negated, characters, node.low, before, following)
        index = _first_index(node)
        raise invalid(self._text, index, "an anchor or a look-ahead inside an endless repeat is not supported")

    def _copy(self, item: Node, is_optional: bool, behind: Following, following: Following) -> Following:
        read = self._then(item, behind)
        if not is_optional:
            return read
        return _remembered(lambda before: self._languages.any_of((read(before), following(before))))

    def _tempered(
        self, item: Term, is_negated: bool, characters: Characters, low: int, before: Before, following: Following
    ) -> Term:
        """(?:(?!X)C)*: at no place of it (or, with (?=X), at each) begins an X. It may end anywhere where anything may
        follow; else it must lead up to the text's end, so that what follows it cannot begin inside an X."""
        languages = self._languages
        behind, *others = {following(ranges) for ranges in self._sets}
        if others:
            raise invalid(self._text, 0, "a look-behind behind a repeated look-ahead is not supported")
        run = self._plain(Repeat(characters, 0, None))
        if behind is languages.everything and low == 0:
            return languages.any_of((following(before), behind))
        if behind is not languages.empty or low > 0:
            raise invalid(self._text, 0, "a repeated look-ahead is supported only in front of the end: (?:(?!x).)*$")
        begins = languages.sequence(item, languages.everything)
        bad = languages.all_of((begins if is_negated else languages.none_of(begins), languages.something))
        return languages.all_of((run, languages.none_of(languages.sequence(languages.everything, bad))))

    def _plain(self, node: Node) -> Term:
        languages = self._languages
        match node:
            case Characters():
                ranges = _ranges(node)
                if ranges is None:
                    raise invalid(self._text, 0, r"the characters of (?i) or of a \p{...} are not known one by one")
                return languages.characters(ranges)
            case Concatenation(items):
                return languages.sequence(*map(self._plain, items))
            case Alternatives(items):
                return languages.any_of(map(self._plain, items))
            case Repeat(item, low, high):
                return languages.repeat(self._plain(item), low, high)
            case Anchor() | Look():
                raise AssertionError(node)
            case _:
                assert_never(node)


@lru_cache(maxsize=256)
def _ranges(node: Characters) -> Ranges | None:
    if node.ignores_case:
        return None
    if not node.classes:
        return node.superset
    found = list(node.listed)
    for name in node.classes:
        ranges = members(name)
        if ranges is None:
            return None
        found += ranges
    union = normalised(found)
    return complement(union) if node.is_negated else union


def _told_apart(items: Iterable[Node]) -> list[Ranges]:
    """The sets of characters that looks for one character before tell apart, but those of the outermost level."""
    found: list[Ranges] = [((0, MAX_CODE_POINT),)]
    stack = [inner for item in items for inner in _inside(item)]
    while stack:
        node = stack.pop()
        stack += _inside(node)
        if isinstance(node, Look) and not node.is_ahead and isinstance(node.item, Characters):
            ranges = _ranges(node.item) or ()
            sides = (ranges, complement(ranges))
            parts = [meet(known, side) for known in found for side in sides]
            found = [part for part in parts if part]
    return found


def _inside(node: Node) -> tuple[Node, ...]:
    match node:
        case Concatenation(items) | Alternatives(items):
            return items
        case Repeat(item) | Look(item):
            return (item,)
        case _:
            return ()


def _remembered(following: Following) -> Following:
    known: dict[Before, Term] = {}

    def remembered(before: Before) -> Term:
        if before not in known:
            known[before] = following(before)
        return known[before]

    return remembered


def _has(node: Node, wanted: Callable[[Node], bool]) -> bool:
    if wanted(node):
        return True
    match node:
        case Concatenation(items) | Alternatives(items):
            return any(_has(item, wanted) for item in items)
        case Repeat(item) | Look(item):
            return _has(item, wanted)
        case Characters() | Anchor():
            return False
        case _:
            assert_never(node)


def has_word_boundary(node: Node) -> bool:
    return _has(node, lambda found: isinstance(found, Look) and found.item is UNICODE_WORDS)


def _is_plain(node: Node) -> bool:
    return not _has(node, lambda found: isinstance(found, Anchor | Look))


def _first_index(node: Node) -> int:
    match node:
        case Anchor(index=index) | Look(index=index):
            return index
        case Concatenation(items) | Alternatives(items):
            return max(map(_first_index, items), default=0)
        case Repeat(item):
            return _first_index(item)
        case _:
            return 0
