"""Where a text of a JSON grammar stays at one place whatever it goes on with: inside a string that nothing tells apart,
and behind the point of a number.

The grammar is one that `schema/lark.py` wrote. All texts share what their places have in common by their situations
(`grammar_situations.py`), which would cost one text alone more than it saves. This is told from the open string or
number alone, without what may stand where: there the next plain character leaves each terminal of the grammar as it is,
whichever of them may match. Knows the grammar's text and no tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import Final

from niwaki.runtime.constraints.grammar_terminals import LITERAL, LITERALS, Unknown, text_of
from niwaki.runtime.constraints.schema.spelling import BASICS, CHARACTER

# Of a token, in which loops it stays, and whether it is one behind which a loop may begin.
NO_LOOP: Final = 0
STRING, NUMBER, LETTERS, QUOTE = 1, 2, 4, 8

BACKSLASH: Final = ord("\\")
_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_IN_NUMBER: Final = b"-+.0123456789eE"
_BEHIND_POINT: Final = re.compile(rb"-?(?:0|[1-9][0-9]*)\.[0-9]+")
_LITERAL: Final = re.compile(LITERAL)
_FREE_BUT: Final = re.compile(rf"KEY&~\((?:{LITERALS.pattern})\)")
_COUNTED: Final = re.compile(re.escape(f'/"{CHARACTER}{{') + r'(\d+),(\d*)\}"/')
# A terminal of strings that begin with a character of one class: it must come, and there is no other way to begin.
_BEGINS: Final = re.compile(
    r'"\\"" /(?:\(\?:\[(?P<grouped>[^\]]+)\](?:\{[1-9]\d*,\d*\}|\+)?\)(?![*?{])'
    r"|\[(?P<alone>[^\]]+)\](?!\*|\?|\{0))[^|]*"
)
_CLASS: Final = re.compile(r"(?:\\x\{([0-9A-F]+)\}|(\w))(?:-(?:\\x\{([0-9A-F]+)\}|(\w)))?")


def open_string(end: bytes) -> bytes | None:
    """Of a text that ends so, inside a string: the string, from its quote on; None where the end does not tell."""
    quote = end.rfind(b'"')
    return end[quote:] if quote > 0 and end[quote - 1] != BACKSLASH else None


def open_behind(before: bytes, text: bytes) -> bytes:
    """What is open behind a text, from its first byte on: a string, or what may be a number. `before`: what was."""
    outside = before + text
    if before[:1] == b'"' and b'"' not in text and b"\\" not in text:
        return outside
    if b'"' in outside:
        outside = _STRINGS.sub(b"", outside)
        quote = outside.find(b'"')
        if quote >= 0:
            return outside[quote:]
    return outside[len(outside.rstrip(_IN_NUMBER)) :]


class Loops:
    """Of one grammar without `ONCE_...`, the terminals of arrays that allow no item twice. `string_behind` and
    `number_behind`: of what tokens (`LETTERS` and so on) one is the last where such a loop is worth looking for."""

    __slots__ = ("_begins", "_num_counted", "_texts", "has_keys", "number_behind", "string_behind")

    def __init__(self, grammar: str) -> None:
        self._texts: list[bytes] = []  # of all literals
        self._begins = b""  # that a string of a pattern may begin with; others beyond ASCII, too
        self._num_counted = 0  # characters behind which no string is one whose length is still counted
        self.string_behind = self.number_behind = 0
        self.has_keys = False  # whether one may be a `KEY`
        literals: set[str] = set()
        has_strings = has_numbers = False
        try:
            for line in grammar.split("\n"):
                name, _, body = line.partition(": ")
                if name[:1].islower() or LITERALS.fullmatch(body) or _FREE_BUT.fullmatch(body):
                    if body.startswith("%json"):  # which only the engine reads
                        return
                    literals.update(_LITERAL.findall(body))
                    self.has_keys |= "KEY" in body
                elif name in BASICS:
                    has_strings |= name in ("STRING", "KEY")
                    self.has_keys |= name == "KEY"
                    has_numbers |= name == "NUMBER"
                elif counted := _COUNTED.fullmatch(body):
                    least, most = counted.groups()
                    has_strings |= not most
                    self._num_counted = max(self._num_counted, int(most) + 1 if most else int(least))
                elif '"' in body:
                    self._read(body)
                elif "." in body and name != "BLANK":  # a point of numbers stands there as it is
                    return
            self._texts = sorted([_written(literal) for literal in literals])
        except Unknown:
            return
        if has_strings:
            self.string_behind = LETTERS | QUOTE if self._is_free(b'"') else LETTERS
        if has_numbers:
            self.number_behind = NUMBER

    def _read(self, body: str) -> None:
        """A terminal of strings with a pattern."""
        begins = _BEGINS.fullmatch(body)
        if begins is None:
            raise Unknown
        for low_code, low, high_code, high in _CLASS.findall(begins["grouped"] or begins["alone"]):
            first = int(low_code, 16) if low_code else ord(low)
            last = int(high_code, 16) if high_code else ord(high) if high else first
            self._begins += bytes(range(min(first, 0x80), min(last + 1, 0x80)))

    def at(self, opened: bytes) -> int:
        """Which one a text is in behind what is open (`open_behind`)."""
        if opened[:1] == b'"':
            return STRING if self.string_behind and self._is_free(opened) else NO_LOOP
        is_number = self.number_behind and _BEHIND_POINT.fullmatch(opened) and not self._begins_literal(opened)
        return NUMBER if is_number else NO_LOOP

    def _is_free(self, opened: bytes) -> bool:
        if b"\\" in opened or self._begins_literal(opened):
            return False
        if opened.isascii():
            return len(opened) > self._num_counted and not (self._begins and opened[1:2] in self._begins)
        try:
            text = opened[1:].decode()
        except UnicodeDecodeError:
            return False
        return len(text) >= self._num_counted and not self._begins

    def _begins_literal(self, opened: bytes) -> bool:
        at = bisect_left(self._texts, opened)
        return at < len(self._texts) and self._texts[at].startswith(opened)


def _written(literal: str) -> bytes:
    """As `text_of`, in a fifth of the time for most."""
    plain = literal[1:-1].replace('\\"', '"')
    return (text_of(literal) if "\\" in plain else plain).encode()
