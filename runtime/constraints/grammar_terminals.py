"""The terminals of a grammar that `schema/lark.py` wrote, as regular languages. Knows nothing of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_language import Languages, Term
from niwaki.runtime.constraints.regex_meaning import matched_by
from niwaki.runtime.constraints.regex_parser import parsed

WORDS: Final = (b"false", b"null", b"true")  # ascending
LITERAL: Final = r'"(?:[^"\\]|\\.)*"'
LITERALS: Final = re.compile(rf"{LITERAL}(?:\|{LITERAL})*")
_PIECE: Final = re.compile(
    rf"\s*(?:(?P<literal>{LITERAL})|/(?P<regex>(?:[^/\\]|\\.)+)/|(?P<name>\w+)|(?P<mark>[&|~()*+?]|\{{\d*,?\d*\}}))"
)
_COUNT: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")
_BOUNDS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Unknown(Exception):
    """It is written in a way that is not known here."""


def text_of(literal: str) -> str:
    """What a literal of the grammar stands for."""
    if "\\x" in literal:
        raise Unknown
    return str(json.loads(literal, strict=False))


def pieces_of(text: str) -> Iterator[re.Match[str]]:
    at = 0
    text = text.rstrip()
    while at < len(text):
        found = _PIECE.match(text, at)
        if found is None:
            raise Unknown
        yield found
        at = found.end()


def language_of(languages: Languages, body: str, named: dict[str, str]) -> Term:
    """The texts of a terminal.

    Raises:
        Unknown: it is written in a way that is not known here.
        TooManyTerms: see `Languages`.
    """
    return _Reader(languages, body, named).read()


class _Reader:
    def __init__(self, languages: Languages, body: str, named: dict[str, str]) -> None:
        self._languages, self._named = languages, named
        self._pieces = [*pieces_of(body)]
        self._at = 0

    def read(self) -> Term:
        found = self._any()
        if self._at < len(self._pieces):
            raise Unknown
        return found

    def _mark(self) -> str:
        return (self._pieces[self._at]["mark"] or "") if self._at < len(self._pieces) else ")"

    def _take(self, mark: str) -> bool:
        is_here = self._at < len(self._pieces) and self._mark() == mark
        self._at += is_here
        return is_here

    def _any(self) -> Term:
        found = [self._all()]
        while self._take("|"):
            found.append(self._all())
        return self._languages.any_of(found)

    def _all(self) -> Term:
        found = [self._sequence()]
        while self._take("&"):
            found.append(self._sequence())
        return self._languages.all_of(found)

    def _sequence(self) -> Term:
        found = [self._repeated()]
        while self._mark() not in ("|", "&", ")"):
            found.append(self._repeated())
        return self._languages.sequence(*found)

    def _repeated(self) -> Term:
        if self._take("~"):
            return self._languages.none_of(self._repeated())
        found = self._atom()
        mark = self._mark()
        if mark in _BOUNDS:
            found = self._languages.repeat(found, *_BOUNDS[mark])
            self._at += 1
        elif count := _COUNT.fullmatch(mark):
            low, comma, high = count.groups()
            least = int(low or 0)
            found = self._languages.repeat(found, least, (int(high) if high else None) if comma else least)
            self._at += 1
        return found

    def _atom(self) -> Term:
        if self._take("("):
            found = self._any()
            if not self._take(")"):
                raise Unknown
            return found
        if self._at >= len(self._pieces):
            raise Unknown
        piece = self._pieces[self._at]
        self._at += 1
        if (literal := piece["literal"]) is not None:
            return self._languages.text(text_of(literal))
        if (regex := piece["regex"]) is not None:
            try:
                return matched_by(self._languages, parsed(regex), regex)
            except ConstraintError:
                raise Unknown from None
        if (name := piece["name"]) is not None and name in self._named:
            return language_of(self._languages, self._named[name], self._named)
        raise Unknown
