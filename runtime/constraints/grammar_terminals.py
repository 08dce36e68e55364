"""The terminals of a grammar that `schema/lark.py` wrote, as regular languages, and which of them the rules tell apart.

Knows the grammar's text only: not its rules' meaning, and nothing of llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_language import Languages, Term
from niwaki.runtime.constraints.regex_meaning import matched_by
from niwaki.runtime.constraints.regex_parser import parsed

WORDS: Final = (b"true", b"false", b"null")
MARKS: Final = frozenset({"{", "}", "[", "]", ",", ":", ", ", ": ", ""})
BLANK: Final = "BLANK"
_LITERAL: Final = r'"(?:[^"\\]|\\.)*"'
_LITERALS: Final = re.compile(rf"{_LITERAL}(?: \| {_LITERAL})*")
_PIECE: Final = re.compile(
    rf"\s*(?:(?P<literal>{_LITERAL})|/(?P<regex>(?:[^/\\]|\\.)+)/|(?P<name>\w+)|(?P<mark>[&|~()*+?]|\{{\d*,?\d*\}}))"
)
_COUNT: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")
_BOUNDS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_NUMBER: Final = re.compile(r"-?[0-9][-+.0-9eE]*")


class Unknown(Exception):
    """It is written in a way that is not known here."""


@dataclass(frozen=True, slots=True)
class Terminals:
    """Terminals of one *class* stand in the rules wherever the others do, as a whole alternative, so that what follows
    does not hang on which of them a text has.

    `literals`: texts and the classes that hold them. `bodies`: class, and the terminal as it is written. `named`: all
    that have a name, for what is written in the bodies.
    """

    literals: dict[bytes, tuple[int, ...]]
    bodies: list[tuple[int, str]]
    named: dict[str, str]


NO_TERMINALS: Final = Terminals({}, [], {})


def terminals_of(grammar: str) -> Terminals:
    """Raises Unknown where the grammar has parts that only the engine reads."""
    named: dict[str, str] = {}
    rules: list[str] = []
    for line in grammar.splitlines():
        name, colon, body = line.partition(": ")
        if colon and name[:1].isupper():
            named[name] = body
        elif colon and not name.startswith("%"):
            rules.append(body)
    # Of each literal and name in the rules where it stands as an alternative; None where it stands otherwise, too.
    stands: dict[str, set[int] | None] = {}
    for number, body in enumerate(rules):
        if "%json" in body:
            raise Unknown
        alternatives = body.split(" | ")
        is_whole = len(alternatives) == len(_unquoted(body).split(" | "))
        for part in alternatives if is_whole else [body]:
            pieces = [found["literal"] or found["name"] for found in _pieces(part)]
            own = [piece for piece in pieces if piece is not None]
            is_alone = len(pieces) == 1
            for piece in own:
                where = stands.setdefault(piece, set())
                if not is_alone:
                    stands[piece] = None
                elif where is not None:
                    where.add(number)
    classes: dict[frozenset[int] | str, int] = {}
    literals: dict[bytes, tuple[int, ...]] = {}
    bodies: list[tuple[int, str]] = []
    for piece, where in stands.items():
        if not piece.startswith('"') and piece not in named:
            continue  # a rule
        own_class = classes.setdefault(piece if where is None else frozenset(where), len(classes))
        if piece.startswith('"'):
            _add(literals, piece, own_class)
        elif piece != BLANK and _LITERALS.fullmatch(named[piece]):
            for literal in re.findall(_LITERAL, named[piece]):
                _add(literals, literal, own_class)
        elif piece != BLANK:
            bodies.append((own_class, named[piece]))
    return Terminals(literals, bodies, named)


def _unquoted(body: str) -> str:
    """Without what stands in literals and in brackets."""
    depth = 0
    found: list[str] = []
    for char in re.sub(_LITERAL, '""', body):
        depth -= char == ")"
        if not depth:
            found.append(char)
        depth += char == "("
    return "".join(found)


def _add(literals: dict[bytes, tuple[int, ...]], literal: str, number: int) -> None:
    text = text_of(literal)
    if text in MARKS:
        return
    if (
        not (text[0] == text[-1] == '"' and len(text) > 1)
        and text.encode() not in WORDS
        and not _NUMBER.fullmatch(text)
    ):
        raise Unknown
    known = literals.get(text.encode(), ())
    if number not in known:
        literals[text.encode()] = (*known, number)


def text_of(literal: str) -> str:
    """What a literal of the grammar stands for."""
    if "\\x" in literal:
        raise Unknown
    return str(json.loads(literal, strict=False))


def _pieces(text: str) -> Iterator[re.Match[str]]:
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
        self._pieces = [*_pieces(body)]
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
