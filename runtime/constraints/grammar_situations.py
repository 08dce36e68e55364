"""Which texts of a JSON grammar can go on in the same ways: their *situation*.

The grammar is one that `schema/lark.py` wrote, so that each string, number and word of a text is the whole match of
one terminal, and where it begins and ends is seen in the text alone. What may follow inside it hangs on where it began
and on what of each terminal is left to be matched, which derivatives tell; behind it on which terminals match it. So
two texts are in one situation where they are alike but for strings and numbers that no terminal tells apart, and no
text is taken for another: what is not known to be alike is kept apart. Owns what it has met; knows no tokens.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from typing import Final, TypeAlias

from niwaki.runtime.constraints.grammar_terminals import NO_TERMINALS, WORDS, Unknown, language_of, terminals_of
from niwaki.runtime.constraints.regex_language import Languages, Term, TooManyTerms
from niwaki.runtime.constraints.regex_tree import MAX_CODE_POINT

OUTSIDE, STRING, ESCAPE, NUMBER, WORD = range(5)
QUOTE, BACKSLASH = b'"\\'
BEGIN_NUMBER: Final = frozenset(b"-0123456789")
IN_NUMBER: Final = frozenset(b"-+.0123456789eE")
LETTERS: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz")
MAX_TERMS: Final = 4000
MAX_MOVES: Final = 16_384
MAX_BEHIND: Final = 32_768
TERM_BYTES: Final = 500
MOVE_BYTES: Final = 120
BEHIND_BYTES: Final = 200

# What stands before the string, number or word that is open, and what kind that is; what is left of the terminals, by
# its number; what was read of it, while that begins a literal; and bytes of a character that is not whole.
Situation: TypeAlias = "tuple[int, int, int, bytes | None, bytes]"
START: Final[Situation] = (0, OUTSIDE, 0, b"", b"")


class _Left:
    """What is left of terminals to be matched, each with its class."""

    __slots__ = ("classes", "moves", "number", "terms")

    def __init__(self, number: int, terms: tuple[tuple[int, Term], ...]) -> None:
        self.number = number
        self.terms = terms
        self.moves: dict[int, _Left] = {}
        self.classes = tuple({own for own, term in terms if term.is_nullable})  # of those that match


class Situations:
    """Of one grammar. Safe to be asked by several threads."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._terminals = NO_TERMINALS  # read when they are needed first
        self._lock = threading.Lock()
        self._literals: list[bytes] = []
        self._languages = Languages(MAX_TERMS)
        self._left: list[_Left] = []
        self._known: dict[tuple[tuple[int, int], ...], _Left] = {}
        self._behind: dict[tuple[int, int | tuple[int, ...]], int] = {}
        self._words: dict[bytes, tuple[int, ...]] = {}
        self._cuts: list[int] = []  # between them no terminal tells characters apart
        self._num_moves = 0
        self._is_spent = False

    @property
    def num_bytes(self) -> int:
        terms = TERM_BYTES * self._languages.num_terms
        return terms + MOVE_BYTES * self._num_moves + BEHIND_BYTES * len(self._behind)

    def after(self, situation: Situation, text: bytes) -> Situation | None:
        """Where a text of the grammar in this situation is when it has gone on like this; None where that is not
        known."""
        with self._lock:
            if self._is_spent:
                return None
            try:
                return self._after(situation, text)
            except (TooManyTerms, Unknown):
                self._is_spent = True
                return None

    def _after(self, situation: Situation, text: bytes) -> Situation:
        if not self._left:
            self._begin()
        before, mode, number, read, pending = situation
        left = self._left[number]
        for byte in text:
            if mode == NUMBER and byte not in IN_NUMBER:
                before, mode = self._closed(before, left.classes, read), OUTSIDE
            if mode == OUTSIDE:
                read = bytes((byte,))
                if byte == QUOTE:
                    mode, left = STRING, self._moved(self._left[0], byte)
                elif byte in BEGIN_NUMBER:
                    mode, left = NUMBER, self._moved(self._left[0], byte)
                elif byte in LETTERS:
                    mode = WORD
                else:
                    before = self._stepped(before, byte)
                read = (
                    read if mode != OUTSIDE and self._begins_literal(read, mode) else b"" if mode == OUTSIDE else None
                )
                continue
            if read is not None:
                read += bytes((byte,))
                if not self._begins_literal(read, mode):
                    read = None
            if mode == WORD:
                if read in self._words:
                    before, mode, read = self._stepped(before, self._words[read]), OUTSIDE, b""
                elif read is None:
                    raise Unknown
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
            if not left.terms and read is None:
                raise Unknown
            if mode == ESCAPE:
                mode = STRING
            elif mode == STRING and byte == BACKSLASH:
                mode = ESCAPE
            elif mode == STRING and byte == QUOTE:
                before, mode, read = self._closed(before, left.classes, read), OUTSIDE, b""
        if mode in (OUTSIDE, WORD):
            return before, mode, 0, read, b""
        return before, mode, left.number, read, pending

    def _begin(self) -> None:
        terminals = self._terminals = terminals_of(self._grammar)
        self._literals = sorted(terminals.literals)
        terms = [(own, language_of(self._languages, body, terminals.named)) for own, body in terminals.bodies]
        self._left_of(tuple(terms))
        self._cuts = self._languages.cuts(term for _, term in terms)
        for word in WORDS:
            held = {own for own, term in terms if self._languages.holds(term, word.decode())}
            if found := held.union(terminals.literals.get(word, ())):
                self._words[word] = tuple(sorted(found))

    def _begins_literal(self, read: bytes, mode: int) -> bool:
        if mode == WORD:
            return any(word.startswith(read) for word in self._words)
        at = bisect_left(self._literals, read)
        return at < len(self._literals) and self._literals[at].startswith(read)

    def _closed(self, before: int, classes: tuple[int, ...], read: bytes | None) -> int:
        literal = () if read is None else self._terminals.literals.get(read, ())
        found = tuple(sorted({*classes, *literal})) if literal or len(classes) > 1 else classes
        if not found:  # the engine takes what we do not
            raise Unknown
        return self._stepped(before, found)

    def _stepped(self, before: int, by: int | tuple[int, ...]) -> int:
        key = (before, by)
        found = self._behind.get(key)
        if found is None:
            if len(self._behind) >= MAX_BEHIND:
                raise TooManyTerms
            found = self._behind[key] = len(self._behind) + 1
        return found

    def _moved(self, left: _Left, code: int) -> _Left:
        if code > MAX_CODE_POINT:  # what is beyond it stands in no language here
            raise Unknown
        code = self._cuts[bisect_right(self._cuts, code) - 1]
        found = left.moves.get(code)
        if found is None:
            if self._num_moves >= MAX_MOVES:
                raise TooManyTerms
            terms = [(own, self._languages.after(term, code)) for own, term in left.terms]
            found = self._left_of(tuple((own, term) for own, term in terms if term is not self._languages.nothing))
            left.moves[code] = found
            self._num_moves += 1
        return found

    def _left_of(self, terms: tuple[tuple[int, Term], ...]) -> _Left:
        key = tuple((own, term.number) for own, term in terms)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _Left(len(self._left), terms)
            self._left.append(found)
        return found


def _character(text: bytes) -> int | None:
    """The code of a character in UTF-8; None while it is not whole."""
    try:
        return ord(text.decode())
    except UnicodeDecodeError:
        if len(text) >= 4:
            raise Unknown from None
        return None
