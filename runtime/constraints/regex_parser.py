"""Reading a regex: recursive descent over its text, and the position of what is outside the dialect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NoReturn

from niwaki.runtime.constraints.regex_looks import boundary
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
    range_source,
    shown,
)

MAX_DEPTH: Final = 64

_SIMPLE_ESCAPES: Final = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_BEYOND_ASCII: Final = (0x80, MAX_CODE_POINT)
_ANY: Final[Ranges] = ((0, MAX_CODE_POINT),)
_NO_NEWLINE: Final[Ranges] = ((0, 9), (11, MAX_CODE_POINT))
# escape -> its ASCII members, and the cost of one occurrence (states of the automaton that outlines-core builds).
# Dialects differ beyond ASCII: Python's \d takes every Unicode digit (of its own Unicode version), ECMAScript's ten.
# What all of them accept is generated: ASCII where a class is allowed, none of Unicode's where it is excluded.
_CLASSES: Final[dict[str, tuple[Ranges, int]]] = {
    "d": (((0x30, 0x39),), 60),
    "s": (((9, 13), (32, 32)), 10),
    "w": (((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)), 330),
}
# In the Rust dialect, with what it does not count among them: superscripts and other numbers are words to Python, four
# separators are blanks to it, as the mark of byte order is to ECMAScript.
_WIDE: Final = {"\\w": r"\w\p{No}", "\\s": r"\s\x1C-\x1F\x{180E}\x{FEFF}"}
_LOOKS: Final = {"?=": (True, False), "?!": (True, True), "?<=": (False, False), "?<!": (False, True)}
_LETTERS_I: Final = (0x49, 0x69, 0x130, 0x131)  # with a dot and without
_PROPERTY_COST: Final = 400
_BEYOND_ASCII_COST: Final = 6  # of one range beyond ASCII: up to three more bytes, at both ends
_PROPERTY_NAME: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_=:-& ")


@lru_cache(maxsize=512)
def parsed(pattern: str) -> Node:
    """The pattern as a tree.

    Raises:
        ConstraintError: it is not valid, with the position.
    """
    return Parser(pattern).parse()


@dataclass(slots=True)
class Parser:
    """Recursive descent over the text; `at` is the index of the next character."""

    text: str
    at: int = 0
    depth: int = 0
    dot_takes_newline: bool = False
    ignores_case: bool = False
    has_lines: bool = False

    def parse(self) -> Node:
        for index, character in enumerate(self.text):
            if character == "\0":
                raise invalid(self.text, index, "a NUL character is not allowed")
            if 0xD800 <= ord(character) <= 0xDFFF:
                raise invalid(self.text, index, "a lone surrogate is not text")
            if ord(character) > MAX_CODE_POINT:
                raise invalid(self.text, index, "a noncharacter is not text")
        while (flags := self.global_flags()) is not None:
            self.set_flags(flags)
        node = self.alternatives()
        if self.at < len(self.text):
            self.fail("unmatched ')'")
        return node

    def fail(self, reason: str, at: int | None = None) -> NoReturn:
        raise invalid(self.text, self.at if at is None else at, reason)

    def peek(self) -> str:
        """The next character, or nothing at the end."""
        return self.text[self.at : self.at + 1]

    def next(self, missing: str) -> str:
        """Take one character; at the end, fail for what is missing."""
        if self.at >= len(self.text):
            self.fail(missing)
        self.at += 1
        return self.text[self.at - 1]

    def take(self, what: str) -> bool:
        if self.text.startswith(what, self.at):
            self.at += len(what)
            return True
        return False

    def until(self, end: str, missing: str) -> str:
        """Take everything up to `end`, and `end` itself."""
        stop = self.text.find(end, self.at)
        if stop < 0:
            self.fail(missing, len(self.text))
        found = self.text[self.at : stop]
        self.at = stop + len(end)
        return found

    # -- structure

    def alternatives(self) -> Node:
        items = [self.concatenation()]
        while self.take("|"):
            items.append(self.concatenation())
        return items[0] if len(items) == 1 else Alternatives(tuple(items))

    def concatenation(self) -> Node:
        items: list[Node] = []
        self.pass_comments()
        while self.peek() not in ("", "|", ")"):
            items.append(self.repeated())
        return items[0] if len(items) == 1 else Concatenation(tuple(items))

    def repeated(self) -> Node:
        if self.peek() in ("*", "+", "?"):
            self.fail(f"nothing to repeat before '{self.peek()}'")
        node = self.atom()
        self.pass_comments()
        bounds = self.bounds()
        if bounds is None:
            return node
        if isinstance(node, Anchor):
            self.fail("an anchor cannot be repeated", node.index)
        if self.peek() == "+":
            self.fail("possessive repeats are not supported: they match less than they say")
        self.take("?")  # lazy: which text matches does not depend on it
        self.pass_comments()
        if self.bounds() is not None:
            self.fail("a repeat of a repeat needs a group: (?:...)", self.at - 1)
        return Repeat(node, *bounds)

    def pass_comments(self) -> None:
        """(?#...), of which a repeat behind it knows nothing."""
        while self.take("(?#"):
            comment = self.until(")", "missing ')'")
            if (len(comment) - len(comment.rstrip("\\"))) % 2:
                self.fail("a comment that ends in a backslash goes on behind it in Python", self.at - 1)

    def bounds(self) -> tuple[int, int | None] | None:
        """The repeat that stands here: * + ? {m} {m,} {,n} {m,n}. A brace before anything else is a brace."""
        if self.take("*"):
            return 0, None
        if self.take("+"):
            return 1, None
        if self.take("?"):
            return 0, 1
        opening = self.at
        following = self.text[self.at + 1 : self.at + 2]
        if self.peek() != "{" or not ((following.isascii() and following.isdigit()) or following == ","):
            return None
        self.at += 1
        low = self.number() or 0
        high: int | None = low
        if self.take(","):
            high = self.number()
        if not self.take("}"):
            self.fail("missing '}'")
        if high is not None and high < low:
            self.fail(f"the repeat {self.text[opening : self.at]} ends below its start", opening)
        return low, high

    def number(self) -> int | None:
        start = self.at
        while self.peek().isascii() and self.peek().isdigit():
            self.at += 1
        if self.at - start > 6:
            self.fail(f"the count {shown(self.text[start : self.at], 20)} is too large", start)
        return int(self.text[start : self.at]) if self.at > start else None

    def atom(self) -> Node:
        start = self.at
        character = self.next("")
        match character:
            case "(":
                return self.group(start)
            case "[":
                return self.bracketed(start)
            case ".":
                return self.dot()
            case "^" | "$" if self.has_lines:
                return Look(self.exactly(_NO_NEWLINE), character == "$", True, start)
            case "^" | "$":
                return Anchor(character == "^", start)
            case "\\":
                return self.escape(start)
            case _:
                return self.literal(ord(character))

    def group(self, start: int) -> Node:
        flags = self.dot_takes_newline, self.ignores_case, self.has_lines
        look = next((kind for mark, kind in _LOOKS.items() if self.take(mark)), None)
        if look is None and self.take("?"):
            if self.take("P<") or (self.peek() == "<" and self.text[self.at + 1 : self.at + 2] not in ("=", "!")):
                self.take("<")
                name = self.until(">", "missing '>'")
                if not name.isidentifier():
                    self.fail(f"{shown(name, 20)} is not a group name", start)
            elif not self.take(":"):
                self.set_flags(self.scoped_flags(start))
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"groups are nested deeper than {MAX_DEPTH}", start)
        node = self.alternatives()
        if not self.take(")"):
            self.fail(f"missing ')' for the group opened at {start + 1}")
        self.depth -= 1
        self.dot_takes_newline, self.ignores_case, self.has_lines = flags
        return node if look is None else Look(node, *look, start)

    def scoped_flags(self, start: int) -> str:
        """The letters of (?flags:...), the parenthesis and the question mark already taken."""
        for opening, name in (
            (">", "an atomic group"),
            ("P=", "a back-reference"),
            ("P>", "a recursive group"),
            ("(", "a conditional"),
        ):
            if self.text.startswith(opening, self.at):
                self.fail(f"{name} is not supported: it cannot be enforced as an automaton", start)
        begin = self.at
        while self.peek().isascii() and self.peek().isalpha():
            self.at += 1
        flags = self.text[begin : self.at]
        if self.peek() == ")" and flags:
            self.fail("flags for the whole regex must stand at its start", start)
        if not self.take(":") or not flags:
            self.fail("unknown kind of group", start)
        return flags

    def global_flags(self) -> str | None:
        """The letters of a (?flags) that stands here, or None."""
        end = self.text.find(")", self.at)
        flags = self.text[self.at + 2 : end]
        if end < 0 or not self.text.startswith("(?", self.at) or not (flags.isascii() and flags.isalpha()):
            return None
        self.at = end + 1
        return flags

    def set_flags(self, flags: str) -> None:
        for flag in flags:
            match flag:
                case "i":
                    self.ignores_case = True
                case "s":
                    self.dot_takes_newline = True
                case "m":
                    self.has_lines = True
                case "u":
                    pass  # always on
                case _:
                    self.fail(f"the flag '{flag}' is not supported: only i, m, s and u are", self.at - 1)

    # -- one character

    def literal(self, code: int) -> Characters:
        return self.exactly([(code, code)])

    def dot(self) -> Characters:
        return self.exactly(_ANY if self.dot_takes_newline else _NO_NEWLINE)

    def exactly(self, ranges: Iterable[tuple[int, int]]) -> Characters:
        """A set whose characters are known."""
        members = normalised((low, min(high, MAX_CODE_POINT)) for low, high in ranges if low <= MAX_CODE_POINT)
        if not members:
            self.fail("no character is in this set", self.at - 1)
        cost = 1 + _BEYOND_ASCII_COST * sum(high >= 0x80 for _, high in members)
        return self.characters(members, f"[{range_source(members)}]", cost)

    def in_no_case(self, excluded: Ranges, others: Ranges) -> Characters:
        """Of `others`, those that are none of `excluded` in any case: what is left out has its other case left out."""
        cost = self.exactly(others).cost
        if any(low <= code <= high for low, high in excluded for code in _LETTERS_I):  # to Python they are one letter
            excluded = normalised((*excluded, *((code, code) for code in _LETTERS_I)))
        left = f"[{range_source(others)}]&&[^{range_source(excluded)}]"
        return Characters(f"(?i:[{left}])", _ANY, cost, ignores_case=True)

    def opaquely(
        self,
        superset: Ranges,
        source: str,
        cost: int,
        classes: tuple[str, ...] = (),
        listed: Ranges = (),
        is_negated: bool = False,
    ) -> Characters:
        """A set that has a Unicode class in it: the builder knows its characters."""
        source = f"[{source}&&[{range_source(_ANY)}]]"
        return replace(self.characters(superset, source, cost), classes=classes, listed=listed, is_negated=is_negated)

    def characters(self, superset: Ranges, source: str, cost: int) -> Characters:
        if self.ignores_case:
            return Characters(f"(?i:{source})", _ANY, 2 * cost, ignores_case=True)
        return Characters(source, superset, cost)

    def escape(self, start: int) -> Node:
        character = self.next("a backslash at the end")
        match character:
            case "A":
                return Anchor(True, start)
            case "Z" | "z":
                return Anchor(False, start)
            case "b" | "B":
                return boundary(start, is_between=character == "b")
            case _ if character in "123456789":
                self.fail("a back-reference is not supported: it cannot be enforced as an automaton", start)
        if character in _CLASSES:
            return self.exactly(_CLASSES[character][0])
        named = self.named_class(character, start)
        if named is not None:
            superset, name, cost = named
            return self.opaquely(superset, _in_rust(name), cost, (name,))
        return self.literal(self.escaped_code(character, start))

    def named_class(self, character: str, start: int) -> tuple[Ranges, str, int] | None:
        r"""The class that \character names (d, D, s, S, w, W, p, P): a superset, its source, its cost."""
        if character in ("p", "P"):
            name = self.until("}", "missing '}'") if self.take("{") else self.next("missing the property's name")
            if not name or not set(name) <= _PROPERTY_NAME:
                self.fail(f"{shown(name, 20)} is not a Unicode property", start)
            return _ANY, f"\\{character}{{{name}}}", _PROPERTY_COST
        known = _CLASSES.get(character.lower())
        if known is None:
            return None
        ascii_members, cost = known
        if character.isupper():
            ascii_members = tuple(r for r in complement(ascii_members) if r[0] < 0x80)
        return normalised((*ascii_members, _BEYOND_ASCII)), f"\\{character}", cost

    def escaped_code(self, character: str, start: int) -> int:
        """The code point that \\character... stands for."""
        if character in _SIMPLE_ESCAPES:
            return _SIMPLE_ESCAPES[character]
        if character == "0":
            digits = ""
            while len(digits) < 2 and self.peek() and self.peek() in "01234567":
                digits += self.next("")
            return int(digits or "0", 8)
        if character in _HEX_DIGITS:
            length = _HEX_DIGITS[character]
            digits = self.until("}", "missing '}'") if self.take("{") else self.text[self.at : self.at + length]
            if self.text[self.at - 1] != "}":
                self.at += len(digits)
                if len(digits) < length:
                    self.fail(f"\\{character} needs {length} hexadecimal digits", start)
            if not 1 <= len(digits) <= 8 or not all(d in "0123456789abcdefABCDEF" for d in digits):
                self.fail(f"{shown(digits, 20)} is not a hexadecimal number", start)
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                self.fail(f"{digits} is not the number of a character", start)
            return code
        if character.isascii() and character.isalnum():
            self.fail(f"unknown escape \\{character}", start)
        return ord(character)

    # -- [...]

    def bracketed(self, start: int) -> Characters:
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        opaque: list[tuple[Ranges, str, int]] = []
        missing = f"missing ']' for the set opened at {start + 1}"
        is_first = True
        while is_first or self.peek() != "]":
            is_first = False
            item_start = self.at
            low = self.member(missing, opaque)
            is_range = self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]")
            if not is_range:
                if low is not None:
                    ranges.append((low, low))
                continue
            self.at += 1
            high = self.member(missing, opaque)
            if low is None or high is None:
                self.fail("a range needs a character at both ends", item_start)
            if high < low:
                self.fail(f"the range {self.text[item_start : self.at]} ends below its start", item_start)
            ranges.append((low, high))
        self.at += 1
        return self.set_of(negated, ranges, opaque)

    def member(self, missing: str, opaque: list[tuple[Ranges, str, int]]) -> int | None:
        """One character of a set; None where a class was read, which is then the last in `opaque`."""
        start = self.at
        character = self.next(missing)
        if character == "[" and self.peek() in (":", "=", "."):
            self.fail("POSIX classes are not supported; for the character write \\[", start)
        if character != "\\":
            return ord(character)
        character = self.next("a backslash at the end")
        if character == "b":
            return 8  # backspace, inside a set
        named = self.named_class(character, start)
        if named is not None:
            opaque.append(named)
            return None
        return self.escaped_code(character, start)

    def set_of(
        self, negated: bool, ranges: Sequence[tuple[int, int]], opaque: Sequence[tuple[Ranges, str, int]]
    ) -> Characters:
        # Allowed is what every dialect allows, so excluded is what any of them excludes (see _CLASSES).
        narrow = {f"\\{name.upper() if negated else name}": members for name, (members, _) in _CLASSES.items()}
        literal = ranges
        for members in (narrow[text] for _, text, _ in opaque if text in narrow):
            ranges = [*ranges, *(complement(members) if negated else members)]
        texts = {text for _, text, _ in opaque}
        if any(text.swapcase() in texts for text in texts & narrow.keys()):
            ranges, opaque = _ANY, ()  # [\s\S] is every character, blanks beyond ASCII included
        opaque = [named for named in opaque if named[1] not in narrow]
        exact = normalised(ranges)
        if not opaque and negated and literal and self.ignores_case:
            return self.in_no_case(normalised(literal), complement(exact))
        if not opaque:
            return self.exactly(complement(exact) if negated else exact)
        source = f"[{'^' * negated}{range_source(exact)}{''.join(_in_rust(text) for _, text, _ in opaque)}]"
        cost = sum(cost for _, _, cost in opaque)
        classes = tuple(text for _, text, _ in opaque)
        # The ASCII part of \\d, \\s and \\w is known exactly; \\p{...} is known nowhere.
        union = normalised([*exact, *(r for superset, _, _ in opaque for r in superset)])
        if not negated:
            return self.opaquely(union, source, cost, classes, exact)
        if any(superset == _ANY for superset, _, _ in opaque):
            return self.opaquely(_ANY, source, cost, classes, exact, True)
        ascii_part = [r for r in complement(union) if r[1] < 0x80]
        return self.opaquely(normalised([*ascii_part, _BEYOND_ASCII]), source, cost, classes, exact, True)


def _in_rust(name: str) -> str:
    """A class as it is written in the Rust dialect."""
    is_negated = name[1].isupper() and name.lower() in _WIDE
    return f"[^{_WIDE[name.lower()]}]" if is_negated else _WIDE.get(name, name)
