"""In how many ways a text of a grammar can go on at one place, counted beforehand: the engine goes through all of them
at each place and stops a text at its limit. Reads what `lark.py` writes.

Alternatives whose keys may be left out stay possible together until a value tells them apart. So places are walked as
sets of dotted rules (Earley's), brackets apart from what is around them; what the walk merges is counted too high,
never too low.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.schema.endless import Body, bodies_of

MAX_AT_ONCE: Final = 4500  # of the engine's 5,000, which counts a few more
MAX_PLACES: Final = 20_000  # walked; what is behind more is left to the engine's limit
OPENING: Final = frozenset({'"{"', '"["'})
MARKS: Final = OPENING | {'"}"', '"]"', '","', '":"'}

Dotted: TypeAlias = tuple[int, int]  # a production, and how many of its symbols are written
Place: TypeAlias = frozenset[Dotted]


def check_width(grammar: str) -> None:
    """Raises ConstraintError where more than MAX_AT_ONCE ways to go on may be possible together."""
    # More than all there are, which are fewer in nearly all grammars: to read one takes 10 ms and more.
    rules = "\n".join(line for line in grammar.split("\n") if not line[:1].isupper())
    most = sum(map(rules.count, "\n|(")) + 2 * sum(map(rules.count, "*+?{"))
    if most > MAX_AT_ONCE:
        _Walk(grammar).check()


class _Walk:
    def __init__(self, grammar: str) -> None:
        self._symbols: list[list[str]] = []  # of each production
        self._of: dict[str, list[int]] = {}  # rule -> its productions
        for name, body in bodies_of(grammar).items():
            self._add(name, body)
        self._empty = self._nullable()
        self._values = self._value_rules()
        # By rule, as bits: the productions that begin where it does, and all that it leads to.
        self._begun = self._led_to(firsts_only=True)
        self._inside = self._led_to(firsts_only=False)
        self._seen: set[Place] = set()
        self._covered: list[int] = []

    def check(self) -> None:
        waiting: list[Iterable[Dotted]] = [*self._brackets(["start"])]
        while waiting and len(self._seen) < MAX_PLACES:
            place = self._completed(waiting.pop())
            if place and place not in self._seen:
                self._seen.add(place)
                waiting += self._after(place)

    # -- the rules as productions

    def _add(self, name: str, body: Body) -> None:
        own = self._of[name] = []
        for items in body:
            symbols: list[str] = []
            for item in items:
                symbol = item.name
                if not symbol:
                    symbol = f"{name} {len(self._symbols)} {len(symbols)}"
                    self._add(symbol, item.group)
                if item.mark:
                    many = f"{symbol} {item.mark} {len(self._symbols)} {len(symbols)}"
                    self._of[many] = []
                    is_repeated = item.mark != "?"
                    for one in ([], [many, symbol] if is_repeated else [symbol]):
                        self._of[many].append(len(self._symbols))
                        self._symbols.append(one)
                    symbol = many
                symbols += [] if symbol == '""' else [symbol]
            own.append(len(self._symbols))
            self._symbols.append(symbols)

    def _nullable(self) -> set[str]:
        found: set[str] = set()
        while more := {
            name
            for name, own in self._of.items()
            if name not in found and any(found.issuperset(self._symbols[number]) for number in own)
        }:
            found |= more
        return found

    def _value_rules(self) -> set[str]:
        """The rules that stand for one value: a bracket, a terminal or another such rule."""
        found = set(self._of)

        def is_value(symbols: list[str]) -> bool:
            if symbols and symbols[0] in OPENING:
                return True
            return len(symbols) == 1 and (symbols[0] not in self._of or symbols[0] in found)

        while others := {name for name in found if not all(is_value(self._symbols[one]) for one in self._of[name])}:
            found -= others
        return found

    def _led_to(self, *, firsts_only: bool) -> dict[str, int]:
        found = dict.fromkeys(self._of, 0)
        changed = True
        while changed:
            changed = False
            for name, own in self._of.items():
                bits = found[name]
                for number in own:
                    bits |= 1 << number
                    for symbol in self._symbols[number]:
                        bits |= found.get(symbol, 0)
                        if firsts_only and symbol not in self._empty:
                            break
                if bits != found[name]:
                    found[name], changed = bits, True
        return found

    # -- places

    def _completed(self, place: Iterable[Dotted]) -> Place:
        """With those behind what may be nothing, without those at their end."""
        found: set[Dotted] = set()
        for number, dot in place:
            symbols = self._symbols[number]
            for at in range(dot, len(symbols)):
                found.add((number, at))
                if symbols[at] not in self._empty:
                    break
        return frozenset(found)

    def _after(self, place: Place) -> Iterator[Iterable[Dotted]]:
        """Where a text may go on to from here: brackets that open, and places behind the next key, mark or value."""
        begun = inside = 0
        is_last = True
        for number, dot in place:
            symbols = self._symbols[number]
            begun |= self._begun.get(symbols[dot], 0)
            for symbol in symbols[dot:]:
                inside |= self._inside.get(symbol, 0)
            is_last &= symbols[dot] in self._of and all(symbol in MARKS for symbol in symbols[dot + 1 :])
        count = len(place) + begun.bit_count()
        if count > MAX_AT_ONCE:
            reason = f"a text may go on in {count} ways at one place, at most {MAX_AT_ONCE}"
            raise ConstraintError(f"schema at its root: {reason}; divide its alternatives, or give them fewer keys")
        if len(place) + inside.bit_count() <= MAX_AT_ONCE:
            return  # all that is behind together is no more
        if is_last:
            if any(known | begun == known for known in self._covered):
                return
            self._covered.append(begun)
        by_literal: dict[str, list[Dotted]] = {}
        unnamed: list[Dotted] = []  # behind what may be any of several literals
        done: list[Dotted] = []
        values: list[str] = []
        for number, dot in (*place, *((number, 0) for number in _bits(begun))):
            if dot == len(self._symbols[number]):
                continue
            symbol = self._symbols[number][dot]
            after = (number, dot + 1)
            if symbol in self._values:
                values.append(symbol)
                bodies = [self._symbols[one] for one in _bits(self._begun[symbol])]
                firsts = [body[0] for body in bodies if body[0] not in self._of]
            elif symbol in self._of:
                done.append(after)
                continue
            else:
                firsts = [symbol]
            literals = [first for first in firsts if first.startswith('"') and first not in OPENING]
            if dot == 0 and symbol in OPENING:
                continue  # told with its value
            for literal in literals:
                by_literal.setdefault(literal, []).append(after)
            if len(literals) < len(firsts):
                unnamed.append(after)
        yield from self._brackets(values)
        yield done
        yield unnamed
        for literal, found in by_literal.items():
            yield found if literal in MARKS else [*found, *unnamed]

    def _brackets(self, values: Iterable[str]) -> Iterator[list[Dotted]]:
        """The places in all objects that may begin with these values, and in all arrays."""
        begun = 0
        for value in values:
            begun |= self._begun.get(value, 0)
        for mark in sorted(OPENING):
            yield [(number, 1) for number in _bits(begun) if self._symbols[number][:1] == [mark]]


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
