"""What the rules of a grammar that `schema/lark.py` wrote let stand where: values at a *slot*, items and keys in
brackets.

A slot is a name or literal of the grammar that stands for one value. Knows the grammar's text only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from niwaki.runtime.constraints.grammar_terminals import LITERAL, LITERALS, Unknown, pieces_of, text_of

START: Final = "start"
BLANK: Final = "BLANK"
OPEN: Final = {'"["': '"]"', '"{"': '"}"'}
CLOSE: Final = frozenset(OPEN.values())
COMMAS: Final = frozenset({'","', '", "'})
COLONS: Final = frozenset({'":"', '": "'})
_MARK: Final = re.compile(r"[&|~()*+?]|\{\d*,?\d*\}|\"\"")  # of the rules, and what is nothing

Bracket: TypeAlias = tuple[str, ...]  # an alternative that is an array or an object, in pieces


@dataclass(frozen=True, slots=True)
class Inside:
    """Slots of items, or of the values behind each key."""

    items: frozenset[str]
    pairs: dict[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Values:
    """What a slot can be: terminals and literals, by name, and what begins with a bracket."""

    units: frozenset[str]
    brackets: frozenset[Bracket]


class Rules:
    """Raises Unknown, here and elsewhere, for a grammar with parts that only the engine reads, or that are written in
    a way that is not known here."""

    def __init__(self, grammar: str) -> None:
        self.named: dict[str, str] = {}  # terminals
        self._rules: dict[str, list[tuple[str, ...]]] = {}
        for line in grammar.split("\n"):  # texts may hold what only others take for an end of a line
            name, colon, body = line.partition(": ")
            if not colon or name.startswith("%"):
                continue
            if name[:1].isupper():
                self.named[name] = body
            elif "%json" in body:
                raise Unknown
            else:
                self._rules[name] = [*_alternatives(body)]
        self._values: dict[str, Values] = {}
        self._inside: dict[Bracket, Inside] = {}
        self._known_values: dict[str, bool] = {}

    @cached_property
    def units(self) -> dict[str, list[str]]:
        """All terminals and literals of the rules that are values or keys. Of a terminal that is literals, their
        texts; of a literal its own; of another terminal nothing."""
        found: dict[str, list[str]] = {}
        for piece in dict.fromkeys(piece for rule in self._rules.values() for body in rule for piece in body):
            if piece in self.named and piece != BLANK:
                body = self.named[piece]
                is_plain = LITERALS.fullmatch(body) is not None
                found[piece] = [text_of(text) for text in re.findall(LITERAL, body)] if is_plain else []
            elif piece.startswith('"') and piece not in OPEN and piece not in CLOSE | COMMAS | COLONS and piece != '""':
                found[piece] = [text_of(piece)]
        return found

    def values(self, slot: str) -> Values:
        found = self._values.get(slot)
        if found is None:
            units: set[str] = set()
            brackets: set[Bracket] = set()
            for body in self._bodies(slot):
                if _is_bracket(body):
                    brackets.add(body)
                elif len(body) != 1 or not self._is_piece(body[0]):
                    raise Unknown
                elif body[0] not in self._rules:
                    units.add(body[0])
            found = self._values[slot] = Values(frozenset(units), frozenset(brackets))
        return found

    def inside(self, bracket: Bracket) -> Inside:
        found = self._inside.get(bracket)
        if found is None:
            items: set[str] = set()
            pairs: dict[str, set[str]] = {}
            self._look_inside(bracket[1:-1], items, pairs, set())
            if bool(items) and bool(pairs):
                raise Unknown
            inside = Inside(frozenset(items), {key: frozenset(slots) for key, slots in pairs.items()})
            found = self._inside[bracket] = inside
        return found

    def is_endless(self, bracket: Bracket) -> bool:
        """Whether behind each comma the same may follow."""
        first, *rest = [piece for piece in bracket[1:-1] if piece != BLANK]
        body = [first, *rest]
        if body[0] == "(" and body[-2:] == [")", "?"]:
            body = body[1:-2]
        comma = body[2] if len(body) == 6 else ""
        return comma in COMMAS and body == [body[0], "(", comma, body[0], ")", "*"] and self._is_piece(body[0])

    def _look_inside(
        self, pieces: tuple[str, ...], items: set[str], pairs: dict[str, set[str]], seen: set[str]
    ) -> None:
        pieces = tuple(piece for piece in pieces if piece != BLANK and not _MARK.fullmatch(piece))
        at = 0
        while at < len(pieces):
            piece = pieces[at]
            if piece in COMMAS:
                at += 1
            elif not self._is_piece(piece):
                raise Unknown
            elif pieces[at + 1 : at + 2] and pieces[at + 1] in COLONS:
                slot = pieces[at + 2] if at + 2 < len(pieces) else ""
                if piece in self._rules or not self._is_piece(slot):
                    raise Unknown
                pairs.setdefault(piece, set()).add(slot)
                at += 3
            else:
                if self._is_value(piece):
                    items.add(piece)
                elif piece not in seen:
                    seen.add(piece)
                    for body in self._rules[piece]:
                        self._look_inside(body, items, pairs, seen)
                at += 1

    def _is_value(self, piece: str) -> bool:
        """Not a part of what stands in brackets, that has a rule of its own."""
        found = self._known_values.get(piece)
        if found is None:
            bodies = self._bodies(piece)
            found = all(_is_bracket(body) or (len(body) == 1 and self._is_piece(body[0])) for body in bodies)
            self._known_values[piece] = found
        return found

    def _bodies(self, slot: str) -> list[tuple[str, ...]]:
        """The alternatives of a slot, and those of rules that stand alone in one. Of rules that lead to each other none
        is known before all are, so nothing of it is kept but what is asked for."""
        names = [slot]
        bodies: list[tuple[str, ...]] = []
        for name in names:  # grows meanwhile
            for body in self._rules.get(name, [(name,)]):
                bodies.append(body)
                if len(body) == 1 and body[0] in self._rules and body[0] not in names:
                    names.append(body[0])
        return bodies

    def _is_piece(self, piece: str) -> bool:
        return piece in self._rules or piece in self.units


def _is_bracket(body: tuple[str, ...]) -> bool:
    return body[0] in OPEN and body[-1] == OPEN[body[0]]


def _alternatives(body: str) -> Iterator[tuple[str, ...]]:
    found: list[str] = []
    depth = 0
    for piece in _texts(body):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            yield tuple(found)
            found = []
        else:
            found.append(piece)
    yield tuple(found)


def _texts(body: str) -> Iterable[str]:
    return (found[found.lastgroup or ""] for found in pieces_of(body))
