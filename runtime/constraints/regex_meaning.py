"""What a regex means, as a term of `regex_language`: the texts that it matches whole, or in which it is found.

Anchors anywhere, look-ahead and look-behind are worked out where that is regular. Each node is read together with what
follows it up to the end of the text, because that is what a look-ahead looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, assert_never

from niwaki.runtime.constraints.regex_language import Languages, Term
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
    normalised,
)
from niwaki.runtime.constraints.regex_unicode import members

ANYTHING: Final = Repeat(Characters("", ((0, MAX_CODE_POINT),), 0), 0, None)
MAX_COPIES: Final = 8  # of a repeated group that has an anchor or a look in it

# What may follow, up to the end of the text; the argument says whether we still stand at the text's start.
Following = Callable[[bool], Term]


def found_in(languages: Languages, node: Node, text: str) -> Term:
    """The texts in which the regex `node`, written as `text`, is found.

    Raises:
        ConstraintError: it looks around in a way that is not worked out, with the position.
        TooManyTerms: it is too large.
    """
    whole = node.items if isinstance(node, Concatenation) else (node,)
    return _Reader(languages, text).outermost((ANYTHING, *whole), lambda at_start: languages.everything)


def matched_by(languages: Languages, node: Node, text: str) -> Term:
    """The texts that the regex matches from their start to their end. Raises as `found_in`."""
    whole = node.items if isinstance(node, Concatenation) else (node,)
    return _Reader(languages, text).outermost(whole, lambda at_start: languages.empty)


class _Reader:
    def __init__(self, languages: Languages, text: str) -> None:
        self._languages = languages
        self._text = text

    def outermost(self, items: tuple[Node, ...], following: Following) -> Term:
        """The whole regex. Here, what stands before a look-behind is all the text there is."""
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
                here = self._behind(before, part, lambda at_start: self._languages.empty)
                before = self._languages.all_of((here, self._languages.none_of(seen) if item.is_negated else seen))
                start = index + 1
        return self._behind(before, Concatenation(items[start:]), following)

    def _behind(self, before: Term, node: Node, following: Following) -> Term:
        """`node` and what follows it, behind a text of `before` that begins at the text's start."""
        languages = self._languages
        at_start = self._read(node, True, following) if before.is_nullable else languages.nothing
        if before is languages.empty:
            return at_start
        later = languages.all_of((before, languages.something)) if before.is_nullable else before
        return languages.any_of((at_start, languages.sequence(later, self._read(node, False, following))))

    def _read(self, node: Node, at_start: bool, following: Following) -> Term:
        languages = self._languages
        if _is_plain(node):
            return self._consumed(self._plain(node), at_start, following)
        match node:
            case Anchor(is_start=True):
                return following(True) if at_start else languages.nothing
            case Anchor():
                return languages.all_of((following(at_start), languages.empty))
            case Look(item, is_ahead, is_negated, index):
                if not is_ahead:
                    raise invalid(self._text, index, "look-behind is supported at the outermost level only")
                seen = self._read(item, at_start, lambda at_start: languages.everything)
                return languages.all_of((following(at_start), languages.none_of(seen) if is_negated else seen))
            case Alternatives(items):
                following = _remembered(following)
                return languages.any_of([self._read(item, at_start, following) for item in items])
            case Concatenation(items):
                for item in reversed(items):
                    following = self._then(item, following)
                return following(at_start)
            case Repeat():
                return self._repeat(node, at_start, following)
            case _:
                raise AssertionError(node)  # characters are plain

    def _then(self, item: Node, following: Following) -> Following:
        return _remembered(lambda at_start: self._read(item, at_start, following))

    def _consumed(self, term: Term, at_start: bool, following: Following) -> Term:
        languages = self._languages
        later = languages.sequence(term, following(False))
        if not at_start or not term.is_nullable:
            return later
        first = following(True)
        if first is following(False):
            return later
        return languages.any_of(
            (first, languages.sequence(languages.all_of((term, languages.something)), following(False)))
        )

    def _repeat(self, node: Repeat, at_start: bool, following: Following) -> Term:
        """A repeat of something with an anchor or a look in it: written out, or (?:(?!X)C)* in front of an end."""
        following = _remembered(following)
        if node.high is not None and node.high <= MAX_COPIES:
            behind = following
            for copy in range(node.high, 0, -1):
                behind = self._copy(node.item, copy > node.low, behind, following)
            return behind(at_start)
        match node.item:
            case Concatenation((Look(item, True, is_negated, _), Characters() as characters)) if (
                node.high is None and _is_plain(item)
            ):
                return self._tempered(self._plain(item), is_negated, characters, node.low, at_start, following)
        index = _first_index(node)
        raise invalid(self._text, index, "an anchor or a look-ahead inside an endless repeat is not supported")

    def _copy(self, item: Node, is_optional: bool, behind: Following, following: Following) -> Following:
        read = self._then(item, behind)
        if not is_optional:
            return read
        return _remembered(lambda at_start: self._languages.any_of((read(at_start), following(at_start))))

    def _tempered(
        self, item: Term, is_negated: bool, characters: Characters, low: int, at_start: bool, following: Following
    ) -> Term:
        """(?:(?!X)C)*: at no place of it (or, with (?=X), at each) begins an X. It may end anywhere where anything may
        follow; else it must lead up to the text's end, so that what follows it cannot begin inside an X."""
        languages = self._languages
        behind = following(False)
        run = self._plain(Repeat(characters, 0, None))
        if behind is languages.everything and low == 0:
            return languages.any_of((following(at_start), behind))
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


def _remembered(following: Following) -> Following:
    known: dict[bool, Term] = {}

    def remembered(at_start: bool) -> Term:
        if at_start not in known:
            known[at_start] = following(at_start)
        return known[at_start]

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
