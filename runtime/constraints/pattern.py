"""Regexes as users write them: parsed, bounded, and rewritten for the automaton builder. Knows no tokens.

The dialect is what Python's `re` and the Rust `regex` crate have in common, under a full match (docs/constraints.md
lists it). What is outside it is refused with its position: nothing is ever read differently from what it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NoReturn, assert_never

from niwaki.runtime.api import ConstraintError

MAX_PATTERN_BYTES: Final = 64 * 1024
MAX_DEPTH: Final = 64
# The last two code points of Unicode are noncharacters, and stand for the ends of the text in the automaton builder:
# no set holds them.
MAX_CODE_POINT: Final = 0x10FFFD

# ---------------------------------------------------------------------------------------------------------------
# The tree
# ---------------------------------------------------------------------------------------------------------------

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set.

    `source` is the set in the Rust dialect. `superset` holds at least the characters of the set (exactly those where
    it names them one by one). `cost` is about how many states of a byte automaton one occurrence takes.
    """

    source: str
    superset: Ranges
    cost: int


@dataclass(frozen=True, slots=True)
class Concatenation:
    items: tuple[Node, ...]  # none: the empty text


@dataclass(frozen=True, slots=True)
class Alternatives:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    low: int
    high: int | None  # None: any number


@dataclass(frozen=True, slots=True)
class Anchor:
    """^ or $: dropped at the ends of the text, where a full match holds them anyway, and refused elsewhere."""

    is_start: bool
    index: int


Node = Characters | Concatenation | Alternatives | Repeat | Anchor

EMPTY: Final = Concatenation(())


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regex of the dialect.

    `source` is the same language in the Rust dialect. `cost` is about the number of states of its automaton before
    it is made deterministic; `is_harmless` means that it provably stays as small when it is, so that it may be
    compiled without a process to kill.
    """

    text: str
    source: str
    cost: int
    is_harmless: bool


def parse(text: str) -> Pattern:
    """Read a regex.

    Raises:
        ConstraintError: too long, not valid, or outside the dialect, with the position (1 is the first character).
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_PATTERN_BYTES:
        raise ConstraintError(f"a regex of {size} bytes is too long: at most {MAX_PATTERN_BYTES}")
    node = _without_anchors(_Parser(text).parse(), text, first=True, last=True)
    return Pattern(text, _source(node), _cost(node), _stays_small(node))


def shown(text: str, limit: int = 60) -> str:
    """The pattern in quotes, shortened for a message, with lone surrogates (which nothing can print) escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return f"'{text}'" if len(text) <= limit else f"'{text[: limit - 3]}...'"


def invalid(text: str, index: int, reason: str) -> ConstraintError:
    """The error for a fault at text[index]."""
    return ConstraintError(f"regex {shown(text)} is not valid at {index + 1}: {reason}")


# ---------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------

_SIMPLE_ESCAPES: Final = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_BEYOND_ASCII: Final = (0x80, MAX_CODE_POINT)
_ANY: Final[Ranges] = ((0, MAX_CODE_POINT),)
# escape -> its ASCII members, and the cost of one occurrence (states of the automaton that outlines-core builds).
# Dialects differ beyond ASCII: Python's \d takes every Unicode digit (of its own Unicode version), ECMAScript's ten.
# What all of them accept is generated: ASCII where a class is allowed, none of Unicode's where it is excluded.
_CLASSES: Final[dict[str, tuple[Ranges, int]]] = {
    "d": (((0x30, 0x39),), 60),
    "s": (((9, 13), (32, 32)), 10),
    "w": (((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)), 330),
}
_PROPERTY_COST: Final = 400
_BEYOND_ASCII_COST: Final = 6  # of one range beyond ASCII: up to three more bytes, at both ends
_PROPERTY_NAME: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_=:-& ")


@dataclass(slots=True)
class _Parser:
    """Recursive descent over the text; `at` is the index of the next character."""

    text: str
    at: int = 0
    depth: int = 0
    dot_takes_newline: bool = False
    ignores_case: bool = False

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
        while self.peek() not in ("", "|", ")"):
            items.append(self.repeated())
        return items[0] if len(items) == 1 else Concatenation(tuple(items))

    def repeated(self) -> Node:
        if self.peek() in ("*", "+", "?"):
            self.fail(f"nothing to repeat before '{self.peek()}'")
        node = self.atom()
        bounds = self.bounds()
        if bounds is None:
            return node
        if isinstance(node, Anchor):
            self.fail("an anchor cannot be repeated", node.index)
        if self.peek() == "+":
            self.fail("possessive repeats are not supported: they match less than they say")
        self.take("?")  # lazy: which text matches does not depend on it
        if self.bounds() is not None:
            self.fail("a repeat of a repeat needs a group: (?:...)", self.at - 1)
        return Repeat(node, *bounds)

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
            case "^" | "$":
                return Anchor(character == "^", start)
            case "\\":
                return self.escape(start)
            case _:
                return self.literal(ord(character))

    def group(self, start: int) -> Node:
        flags = self.dot_takes_newline, self.ignores_case
        if self.take("?"):
            if self.take("#"):
                self.until(")", "missing ')'")
                return EMPTY
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
        self.dot_takes_newline, self.ignores_case = flags
        return node

    def scoped_flags(self, start: int) -> str:
        """The letters of (?flags:...), the parenthesis and the question mark already taken."""
        for opening, name in (
            ("=", "look-ahead"),
            ("!", "look-ahead"),
            ("<", "look-behind"),
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
                case "u":
                    pass  # always on
                case _:
                    self.fail(f"the flag '{flag}' is not supported: only i, s and u are", self.at - 1)

    # -- one character

    def literal(self, code: int) -> Characters:
        return self.exactly([(code, code)])

    def dot(self) -> Characters:
        return self.exactly(_ANY if self.dot_takes_newline else ((0, 9), (11, MAX_CODE_POINT)))

    def exactly(self, ranges: Iterable[tuple[int, int]]) -> Characters:
        """A set whose characters are known."""
        members = _normalised((low, min(high, MAX_CODE_POINT)) for low, high in ranges if low <= MAX_CODE_POINT)
        if not members:
            self.fail("no character is in this set", self.at - 1)
        cost = 1 + _BEYOND_ASCII_COST * sum(high >= 0x80 for _, high in members)
        return self.characters(members, f"[{_range_source(members)}]", cost)

    def opaquely(self, superset: Ranges, source: str, cost: int) -> Characters:
        """A set that has a Unicode class in it: the builder knows its characters."""
        return self.characters(superset, f"[{source}&&[{_range_source(_ANY)}]]", cost)

    def characters(self, superset: Ranges, source: str, cost: int) -> Characters:
        if self.ignores_case:
            return Characters(f"(?i:{source})", _ANY, 2 * cost)
        return Characters(source, superset, cost)

    def escape(self, start: int) -> Node:
        character = self.next("a backslash at the end")
        match character:
            case "A":
                return Anchor(True, start)
            case "Z" | "z":
                return Anchor(False, start)
            case "b" | "B":
                self.fail("word boundaries are not supported: they cannot be enforced as an automaton", start)
            case _ if character in "123456789":
                self.fail("a back-reference is not supported: it cannot be enforced as an automaton", start)
        if character in _CLASSES:
            return self.exactly(_CLASSES[character][0])
        named = self.named_class(character, start)
        if named is not None:
            return self.opaquely(*named)
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
            ascii_members = tuple(r for r in _complement(ascii_members) if r[0] < 0x80)
        return _normalised((*ascii_members, _BEYOND_ASCII)), f"\\{character}", cost

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
        for members in (narrow[text] for _, text, _ in opaque if text in narrow):
            ranges = [*ranges, *(_complement(members) if negated else members)]
        opaque = [named for named in opaque if named[1] not in narrow]
        exact = _normalised(ranges)
        if not opaque:
            return self.exactly(_complement(exact) if negated else exact)
        source = f"[{'^' * negated}{_range_source(exact)}{''.join(text for _, text, _ in opaque)}]"
        cost = sum(cost for _, _, cost in opaque)
        # The ASCII part of \\d, \\s and \\w is known exactly; \\p{...} is known nowhere.
        union = _normalised([*exact, *(r for superset, _, _ in opaque for r in superset)])
        if not negated:
            return self.opaquely(union, source, cost)
        if any(superset == _ANY for superset, _, _ in opaque):
            return self.opaquely(_ANY, source, cost)
        ascii_part = [r for r in _complement(union) if r[1] < 0x80]
        return self.opaquely(_normalised([*ascii_part, _BEYOND_ASCII]), source, cost)


def _range_source(ranges: Ranges) -> str:
    return "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in ranges)


def _normalised(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, disjoint, touching ranges joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    return tuple(joined)


def _complement(ranges: Ranges) -> Ranges:
    """All other characters. `ranges` must be normalised."""
    missing: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if low > start:
            missing.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        missing.append((start, MAX_CODE_POINT))
    return tuple(missing)


# ---------------------------------------------------------------------------------------------------------------
# Anchors, source, cost
# ---------------------------------------------------------------------------------------------------------------


def _without_anchors(node: Node, text: str, first: bool, last: bool) -> Node:
    """The tree with its anchors replaced by nothing. `first` and `last` say what no character stands before, after."""
    match node:
        case Characters():
            return node
        case Anchor(is_start=True):
            if not first:
                raise invalid(text, node.index, "an anchor for the start can only stand at the start")
            return EMPTY
        case Anchor():
            if not last:
                raise invalid(text, node.index, "an anchor for the end can only stand at the end")
            return EMPTY
        case Repeat(item, low, high):
            once = high == 1
            return Repeat(_without_anchors(item, text, first and once, last and once), low, high)
        case Alternatives(items):
            return Alternatives(tuple(_without_anchors(item, text, first, last) for item in items))
        case Concatenation(items):
            with_text = [i for i, item in enumerate(items) if not _is_zero_width(item)]
            first_text = with_text[0] if with_text else len(items)
            last_text = with_text[-1] if with_text else -1
            return Concatenation(
                tuple(
                    _without_anchors(item, text, first and i <= first_text, last and i >= last_text)
                    for i, item in enumerate(items)
                )
            )
        case _:
            assert_never(node)


def _is_zero_width(node: Node) -> bool:
    return isinstance(node, Anchor) or (isinstance(node, Concatenation) and all(map(_is_zero_width, node.items)))


def _source(node: Node) -> str:
    match node:
        case Characters(source):
            return source
        case Anchor():
            return ""
        case Concatenation(items):
            return "".join(_grouped(item) if isinstance(item, Alternatives) else _source(item) for item in items)
        case Alternatives(items):
            return "|".join(map(_source, items))
        case Repeat(item, low, high):
            return f"{_grouped(item)}{{{low},{'' if high is None else high}}}"
        case _:
            assert_never(node)


def _grouped(node: Node) -> str:
    return f"(?:{_source(node)})"


def _cost(node: Node) -> int:
    match node:
        case Characters(cost=cost):
            return cost
        case Anchor():
            return 0
        case Concatenation(items) | Alternatives(items):
            return 1 + sum(map(_cost, items))
        case Repeat(item, low, high):
            return (low + 1 if high is None else high) * _cost(item)
        case _:
            assert_never(node)


# ---------------------------------------------------------------------------------------------------------------
# Which patterns provably stay small
# ---------------------------------------------------------------------------------------------------------------

MAX_POSITIONS: Final = 600
MAX_HARMLESS_STATES: Final = 1500  # about 30 ms to build


@dataclass(slots=True)
class _Positions:
    """Glushkov's automaton of a tree with its counted repeats written out: one position for each character set."""

    leaves: list[Characters]
    follow: list[set[int]]  # position -> the positions that may come next


@dataclass(frozen=True, slots=True)
class _Part:
    is_nullable: bool
    first: frozenset[int]
    last: frozenset[int]


class _TooMany(Exception):
    """More positions than are worth looking at."""


_NULLABLE: Final = _Part(True, frozenset(), frozenset())


def _stays_small(node: Node) -> bool:
    """Whether the pattern is one-unambiguous: at each point the next character decides where in the regex it stands.

    Then its deterministic automaton has a state for each position and those inside a character's bytes, no more
    (Brueggemann-Klein and Wood, "One-unambiguous regular languages", 1998). The others may grow exponentially.
    """
    if _cost(node) > MAX_HARMLESS_STATES:
        return False
    positions = _Positions([], [])
    try:
        whole = _part(node, positions)
    except _TooMany:
        return False
    states = 0
    for following in (whole.first, *positions.follow):
        leaves = [positions.leaves[p] for p in following]
        states += 1 + sum(leaf.cost for leaf in leaves)
        ranges = sorted(r for leaf in leaves for r in leaf.superset)
        if any(low <= high for (_, high), (low, _) in pairwise(ranges)):
            return False
        if states > MAX_HARMLESS_STATES:
            return False
    return True


def _part(node: Node, positions: _Positions) -> _Part:
    match node:
        case Anchor():
            return _NULLABLE
        case Characters():
            if len(positions.leaves) >= MAX_POSITIONS:
                raise _TooMany
            here = frozenset((len(positions.leaves),))
            positions.leaves.append(node)
            positions.follow.append(set())
            return _Part(False, here, here)
        case Alternatives(items):
            parts = [_part(item, positions) for item in items]
            return _Part(
                any(part.is_nullable for part in parts),
                frozenset().union(*(part.first for part in parts)),
                frozenset().union(*(part.last for part in parts)),
            )
        case Concatenation(items):
            whole = _NULLABLE
            for item in items:
                whole = _joined(whole, _part(item, positions), positions)
            return whole
        case Repeat(item, low, high):
            return _repeated(item, low, high, positions)
        case _:
            assert_never(node)


def _joined(before: _Part, after: _Part, positions: _Positions) -> _Part:
    for position in before.last:
        positions.follow[position] |= after.first
    return _Part(
        before.is_nullable and after.is_nullable,
        before.first | after.first if before.is_nullable else before.first,
        before.last | after.last if after.is_nullable else after.last,
    )


def _repeated(item: Node, low: int, high: int | None, positions: _Positions) -> _Part:
    """item{low,high} written out: the optional copies nested, x(x(x)?)?, the endless one as a loop."""
    tail = _NULLABLE
    if high is None:
        tail = _part(item, positions)
        _joined(tail, tail, positions)
        tail = _Part(True, tail.first, tail.last)
    else:
        for _ in range(high - low):
            tail = _joined(_part(item, positions), tail, positions)
            tail = _Part(True, tail.first, tail.last)
            if not tail.first:  # copies of nothing
                break
    for _ in range(low):
        if not tail.first and tail is not _NULLABLE:
            break
        tail = _joined(_part(item, positions), tail, positions)
    return tail
