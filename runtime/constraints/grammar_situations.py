"""Which texts of a JSON grammar can go on in the same ways: their *situation*.

The grammar is one that `schema/lark.py` wrote, so that each string, number and word of a text is the whole match of
one terminal, and brackets are balanced in each rule. Where a value begins and ends is seen in the text alone. What may
follow inside a string or number hangs on what stands before it, and on what is left of each terminal that may stand
there, which derivatives tell. Behind a value it hangs on which slots of the rules it fits: where there is one slot, all
values are alike. So two texts are in one situation where they differ in nothing that the rules tell apart; what is not
known to be alike is kept apart. Owns what it has met; knows no tokens.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec

from niwaki.runtime.constraints.grammar_rules import START as START_RULE
from niwaki.runtime.constraints.grammar_rules import Bracket, Rules
from niwaki.runtime.constraints.grammar_terminals import WORDS, Unknown, language_of
from niwaki.runtime.constraints.regex_language import Languages, Term, TooManyTerms
from niwaki.runtime.constraints.regex_tree import MAX_CODE_POINT

OUTSIDE, STRING, ESCAPE, NUMBER, WORD = range(5)
QUOTE, BACKSLASH, COMMA, COLON, OPEN_ARRAY, CLOSE_ARRAY, OPEN_OBJECT, CLOSE_OBJECT = b'"\\,:[]{}'
BLANKS: Final = frozenset(b" \n\t")
BEGIN_NUMBER: Final = frozenset(b"-0123456789")
IN_NUMBER: Final = frozenset(b"-+.0123456789eE")
LETTERS: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz")
MAX_TERMS: Final = 4000
MAX_MOVES: Final = 16_384
MAX_POINTS: Final = 32_768
TERM_BYTES: Final = 500
MOVE_BYTES: Final = 120
POINT_BYTES: Final = 400

# The point before the string, number or word that is open, and what kind that is; what is left of the terminals, by
# its number; what was read of it, while that begins a literal; and bytes of a character that is not whole.
Situation: TypeAlias = "tuple[int, int, int, bytes | None, bytes]"
START: Final[Situation] = (0, OUTSIDE, 0, b"", b"")
Symbol: TypeAlias = "int | tuple[str, ...]"  # a byte, or what a value or key was


class _Room:
    """What may stand at a point: `slots`, each with its units; None where that is not known. Of keys each is a slot."""

    __slots__ = ("arrays", "left", "literals", "objects", "slots", "texts")

    def __init__(self) -> None:
        self.slots: dict[str, frozenset[str]] | None = None
        self.arrays: dict[Bracket, tuple[str, ...]] | None = None  # with the slots that they fit
        self.objects: dict[Bracket, tuple[str, ...]] | None = None
        self.left: _Left
        self.texts: list[bytes] = []  # of the literals, ascending
        self.literals: dict[bytes, list[str]] = {}  # text -> units


# The collector of cycles need not look at the many: they name each other by number.
class _Point(msgspec.Struct, eq=False, gc=False):
    """Between two values or marks of a text. `bracket`: the point behind the innermost open one. What may begin here is
    found when something does."""

    before: int
    symbol: Symbol
    bracket: int
    after: dict[Symbol, int]
    room: _Room | None = None


class _Left(msgspec.Struct, eq=False, gc=False):
    """What is left of terminals to be matched, each with its name, and which of them match."""

    number: int
    terms: tuple[tuple[str, Term], ...]
    units: tuple[str, ...]
    moves: dict[int, int]


class Situations:
    """Of one grammar. Safe to be asked by several threads."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar  # read when it is needed first
        self._rules: Rules
        self._lock = threading.Lock()
        self._languages = Languages(MAX_TERMS)
        self._terms: dict[str, Term] = {}
        self._cuts: list[int] = []  # between them no terminal tells characters apart
        self._left: list[_Left] = []
        self._known: dict[tuple[tuple[str, int], ...], _Left] = {}
        self._points = [_Point(0, 0, 0, {})]
        self._rooms: dict[frozenset[tuple[str, frozenset[str]]] | None, _Room] = {}
        self._num_moves = 0
        self.is_spent = False

    @property
    def num_bytes(self) -> int:
        terms = TERM_BYTES * self._languages.num_terms
        return 4 * len(self._grammar) + terms + MOVE_BYTES * self._num_moves + POINT_BYTES * len(self._points)

    def after(self, situation: Situation, text: bytes) -> Situation | None:
        """Where a text of the grammar in this situation is when it has gone on like this; None where that is not
        known."""
        with self._lock:
            if self.is_spent:
                return None
            try:
                return self._after(situation, text)
            except (TooManyTerms, Unknown, RecursionError):
                self.is_spent = True
                return None

    # -- reading

    def _after(self, situation: Situation, text: bytes) -> Situation:
        if not self._left:
            self._begin()
        before, mode, number, read, pending = situation
        left = self._left[number]
        for byte in text:
            if mode == NUMBER and byte not in IN_NUMBER:
                before, mode, read = self._closed(before, left, read), OUTSIDE, b""
            if mode == OUTSIDE:
                mode = _mode_of(byte)
                if mode == OUTSIDE:
                    before = self._marked(before, byte)
                    continue
                left = self._room(before).left
                read = self._begun(before, mode, b"", byte)
                if mode != WORD:
                    left = self._moved(left, byte)
                continue
            read = self._begun(before, mode, read, byte)
            if mode == WORD:
                if read is None:
                    raise Unknown
                if read in WORDS:
                    before, mode, read = self._closed(before, None, read), OUTSIDE, b""
                continue
            if pending or byte >= 0x80:
                pending += bytes((byte,))
                code = _character(pending)
                if code is None:
                    continue
                pending = b""
            else:
                code = byte
            left = self._moved(left, code)
            if not left.terms and read is None:  # the engine takes what we do not
                raise Unknown
            if mode == ESCAPE:
                mode = STRING
            elif mode == STRING and byte == BACKSLASH:
                mode = ESCAPE
            elif mode == STRING and byte == QUOTE:
                before, mode, read = self._closed(before, left, read), OUTSIDE, b""
        return before, mode, left.number if mode in (STRING, ESCAPE, NUMBER) else 0, read, pending

    def _begin(self) -> None:
        self._rules = Rules(self._grammar)
        self._left_of(())

    def _begun(self, before: int, mode: int, read: bytes | None, byte: int) -> bytes | None:
        """What was read of a string, number or word, while that begins a literal that may stand there."""
        if read is None:
            return None
        read += bytes((byte,))
        texts = WORDS if mode == WORD else self._room(before).texts
        at = bisect_left(texts, read)
        return read if at < len(texts) and texts[at].startswith(read) else None

    def _closed(self, before: int, left: _Left | None, read: bytes | None) -> int:
        """The point behind a value, or a key."""
        room = self._room(before)
        units = {*(left.units if left is not None else ()), *(room.literals.get(read, ()) if read is not None else ())}
        found = units if room.slots is None else {slot for slot, own in room.slots.items() if own & units}
        if not found:  # the engine takes what we do not
            raise Unknown
        return self._stepped(before, tuple(sorted(found)))

    def _marked(self, before: int, byte: int) -> int:
        """The point behind a mark, or a blank."""
        point = self._points[before]
        if byte in (OPEN_ARRAY, OPEN_OBJECT):
            self._room(before)  # what is inside asks for it, and would have to ask through all brackets at once
            return self._stepped(before, byte, opens=True)
        if byte not in (COMMA, CLOSE_ARRAY, CLOSE_OBJECT):
            return self._stepped(before, byte)
        if not point.bracket:
            raise Unknown
        bracket = self._points[point.bracket]
        room = self._room(bracket.before)
        fits = room.arrays if bracket.symbol == OPEN_ARRAY else room.objects
        only = next(iter(fits)) if fits is not None and len(fits) == 1 else None
        if byte == COMMA:
            is_endless = only is not None and self._rules.is_endless(only)
            return self._stepped(point.bracket if is_endless else before, byte)
        if fits is None or only is None:
            return self._stepped(before, byte, around=self._points[bracket.before].bracket)
        return self._stepped(bracket.before, fits[only])  # it does not matter what is inside

    def _stepped(self, before: int, symbol: Symbol, *, opens: bool = False, around: int | None = None) -> int:
        points = self._points
        found = points[before].after.get(symbol)
        if found is None:
            found = len(points)
            if found >= MAX_POINTS:
                raise TooManyTerms
            bracket = points[before].bracket if around is None else around
            points.append(_Point(before, symbol, found if opens else bracket, {}))
            points[before].after[symbol] = found
        return found

    # -- what may stand where

    def _room(self, at: int) -> _Room:
        point = self._points[at]
        if point.room is None:
            try:
                slots, is_key = self._slots(at)
                own = {slot: frozenset({slot}) if is_key else self._rules.values(slot).units for slot in slots}
                key = frozenset(own.items())
            except Unknown:
                slots, is_key, key = frozenset(), False, None
            # Not by what fits in brackets: slots of one name have the same.
            point.room = self._rooms.get(key)
            if point.room is None:
                point.room = self._rooms[key] = self._made(key, slots, is_key)
        return point.room

    def _slots(self, at: int) -> tuple[frozenset[str], bool]:
        """Those that may begin at a point, and whether they are keys."""
        at = self._before_blanks(at)
        point = self._points[at]
        if not at:
            return frozenset({START_RULE}), False
        bracket = self._points[point.bracket]
        room = self._room(bracket.before)
        fits = room.arrays if bracket.symbol == OPEN_ARRAY else room.objects
        if not point.bracket or fits is None:
            raise Unknown
        inside = [*map(self._rules.inside, fits)]
        if point.symbol == COLON:
            keys = self._points[self._before_blanks(point.before)].symbol
            if isinstance(keys, int):
                raise Unknown
            return _united(one.pairs.get(key, frozenset()) for one in inside for key in keys), False
        if point.symbol not in (COMMA, OPEN_ARRAY, OPEN_OBJECT):
            raise Unknown
        if bracket.symbol == OPEN_ARRAY:
            return _united(one.items for one in inside), False
        return _united(one.pairs for one in inside), True

    def _before_blanks(self, at: int) -> int:
        while at and self._points[at].symbol in BLANKS:
            at = self._points[at].before
        return at

    def _made(self, key: frozenset[tuple[str, frozenset[str]]] | None, slots: frozenset[str], is_key: bool) -> _Room:
        room = _Room()
        rules = self._rules
        units: set[str] = set(rules.units)
        if key is not None:
            room.slots = dict(key)
            units = {unit for _, own in key for unit in own}
            if not is_key:
                arrays: dict[Bracket, list[str]] = {}
                objects: dict[Bracket, list[str]] = {}
                for slot in sorted(slots):
                    for bracket in rules.values(slot).brackets:
                        (arrays if bracket[0] == '"["' else objects).setdefault(bracket, []).append(slot)
                room.arrays = {bracket: tuple(own) for bracket, own in arrays.items()}
                room.objects = {bracket: tuple(own) for bracket, own in objects.items()}
        terms: list[tuple[str, Term]] = []
        for unit in sorted(units):
            for text in rules.units[unit]:
                room.literals.setdefault(text.encode(), []).append(unit)
            if not rules.units[unit]:
                terms.append((unit, self._term(unit)))
        room.texts = sorted(room.literals)
        room.left = self._left_of(tuple(terms))
        return room

    def _term(self, unit: str) -> Term:
        found = self._terms.get(unit)
        if found is None:
            found = self._terms[unit] = language_of(self._languages, self._rules.named[unit], self._rules.named)
            self._cuts = self._languages.cuts(self._terms.values())
        return found

    def _moved(self, left: _Left, code: int) -> _Left:
        if code > MAX_CODE_POINT or not left.terms:  # what is beyond it stands in no language here
            if left.terms:
                raise Unknown
            return left
        code = self._cuts[bisect_right(self._cuts, code) - 1]
        number = left.moves.get(code)
        if number is None:
            if self._num_moves >= MAX_MOVES:
                raise TooManyTerms
            terms = [(unit, self._languages.after(term, code)) for unit, term in left.terms]
            found = self._left_of(tuple((unit, term) for unit, term in terms if term is not self._languages.nothing))
            left.moves[code] = number = found.number
            self._num_moves += 1
        return self._left[number]

    def _left_of(self, terms: tuple[tuple[str, Term], ...]) -> _Left:
        key = tuple((unit, term.number) for unit, term in terms)
        found = self._known.get(key)
        if found is None:
            units = tuple(unit for unit, term in terms if term.is_nullable)
            found = self._known[key] = _Left(len(self._left), terms, units, {})
            self._left.append(found)
        return found


def _mode_of(byte: int) -> int:
    if byte == QUOTE:
        return STRING
    return NUMBER if byte in BEGIN_NUMBER else WORD if byte in LETTERS else OUTSIDE


def _united(sets: Iterable[Iterable[str]]) -> frozenset[str]:
    return frozenset(name for one in sets for name in one)


def _character(text: bytes) -> int | None:
    """The code of a character in UTF-8; None while it is not whole."""
    try:
        return ord(text.decode())
    except UnicodeDecodeError:
        if len(text) >= 4:
            raise Unknown from None
        return None
