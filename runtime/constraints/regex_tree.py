"""The tree of a regex: its nodes, its sets of characters, its source in the Rust dialect. Knows no tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, assert_never

from niwaki.runtime.api import ConstraintError

# The last two code points of Unicode are noncharacters, and stand for the ends of the text in the automaton builder:
# no set holds them.
MAX_CODE_POINT: Final = 0x10FFFD

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set.

    `source` is the set in the Rust dialect. `superset` holds at least the characters of the set (exactly those where
    it names them one by one). `cost` is about how many states of a byte automaton one occurrence takes. `classes`
    are those in it whose characters are not listed, such as \\p{L}: the set is `listed` and these, or all others.
    """

    source: str
    superset: Ranges
    cost: int
    classes: tuple[str, ...] = ()
    listed: Ranges = ()
    is_negated: bool = False
    ignores_case: bool = False


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
    """^ or $: dropped at the ends of the text, where a full match holds them anyway; elsewhere a look-around."""

    is_start: bool
    index: int


@dataclass(frozen=True, slots=True)
class Look:
    """(?=...), (?!...), (?<=...) or (?<!...): what follows here, or what stood before."""

    item: Node
    is_ahead: bool
    is_negated: bool
    index: int


Node = Characters | Concatenation | Alternatives | Repeat | Anchor | Look

EMPTY: Final = Concatenation(())


def shown(text: str, limit: int = 60) -> str:
    """The pattern in quotes, shortened for a message, with lone surrogates (which nothing can print) escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return f"'{text}'" if len(text) <= limit else f"'{text[: limit - 3]}...'"


def invalid(text: str, index: int, reason: str) -> ConstraintError:
    """The error for a fault at text[index]."""
    return ConstraintError(f"regex {shown(text)} is not valid at {index + 1}: {reason}")


def range_source(ranges: Ranges) -> str:
    return "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in ranges)


def normalised(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, disjoint, touching ranges joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    return tuple(joined)


def complement(ranges: Ranges) -> Ranges:
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


def holds(ranges: Ranges, code: int) -> bool:
    """Whether the character is in a set. `ranges` must be normalised."""
    place = bisect_right(ranges, (code, MAX_CODE_POINT + 1))
    return place > 0 and ranges[place - 1][1] >= code


def meet(one: Ranges, other: Ranges) -> Ranges:
    """The characters in both, which are normalised. One of them is mostly of a few ranges, the other of a whole \\w."""
    few, many = (one, other) if len(one) <= len(other) else (other, one)
    found: list[tuple[int, int]] = []
    for low, high in few:
        for place in range(max(0, bisect_left(many, (low, low)) - 1), len(many)):
            first, last = many[place]
            if first > high:
                break
            if last >= low:
                found.append((low if low > first else first, high if high < last else last))
    return tuple(found)


def source_of(node: Node) -> str:
    match node:
        case Characters(source):
            return source
        case Anchor() | Look():
            return ""
        case Concatenation(items):
            return "".join(_grouped(item) if isinstance(item, Alternatives) else source_of(item) for item in items)
        case Alternatives(items):
            return "|".join(map(source_of, items))
        case Repeat(item, low, high):
            return f"{_grouped(item)}{{{low},{'' if high is None else high}}}"
        case _:
            assert_never(node)


def _grouped(node: Node) -> str:
    return f"(?:{source_of(node)})"


def cost_of(node: Node) -> int:
    match node:
        case Characters(cost=cost):
            return cost
        case Anchor() | Look():
            return 0
        case Concatenation(items) | Alternatives(items):
            return 1 + sum(map(cost_of, items))
        case Repeat(item, low, high):
            return (low + 1 if high is None else high) * cost_of(item)
        case _:
            assert_never(node)
