"""Which regexes provably have a small deterministic automaton."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, assert_never

from niwaki.runtime.constraints.regex_tree import (
    Alternatives,
    Anchor,
    Characters,
    Concatenation,
    Look,
    Node,
    Repeat,
    cost_of,
)

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


def stays_small(node: Node) -> bool:
    """Whether the pattern is one-unambiguous: at each point the next character decides where in the regex it stands.

    Then its deterministic automaton has a state for each position and those inside a character's bytes, no more
    (Brueggemann-Klein and Wood, "One-unambiguous regular languages", 1998). The others may grow exponentially.
    """
    return cost_of(node) <= MAX_HARMLESS_STATES and _is_unambiguous(node)


def stands_once(node: Node) -> bool:
    """Whether the same holds of the pattern with whatever counts: then who reads a text stands at one place of the
    regex at a time, however large its automaton would be. Two or three copies show what any number does."""
    return _is_unambiguous(_with_few_copies(node))


def farthest_end(node: Node) -> int:
    """So many bytes are enough to end a text of a regex that stands once, from whatever place in it."""
    match node:
        case Anchor() | Look():
            return 0
        case Characters(superset=superset, classes=classes):  # whose characters are not listed
            return 4 if classes or not superset else len(chr(superset[0][0]).encode("utf-8", "surrogatepass"))
        case Concatenation(items):
            return sum(map(farthest_end, items))
        case Alternatives(items):
            return max(map(farthest_end, items), default=0)
        case Repeat(item, low, _):
            return max(1, low) * farthest_end(item)
        case _:
            assert_never(node)


def _with_few_copies(node: Node) -> Node:
    match node:
        case Concatenation(items):
            return Concatenation(tuple(map(_with_few_copies, items)))
        case Alternatives(items):
            return Alternatives(tuple(map(_with_few_copies, items)))
        case Repeat(item, low, high):
            few = min(low, 2)
            most = high if high is None else min(high, max(2, few + (high > low)))
            return Repeat(_with_few_copies(item), few, most)
        case _:
            return node


def _is_unambiguous(node: Node) -> bool:
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
        case Anchor() | Look():
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
