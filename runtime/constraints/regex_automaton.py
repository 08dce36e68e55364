"""The automaton over characters of a small regular language, and its drawing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import atan2, cos, sin
from typing import Final

from niwaki.runtime.constraints.regex_language import Languages, Term
from niwaki.runtime.constraints.regex_tree import MAX_CODE_POINT, Ranges, normalised

COLUMN, ROW, RADIUS, MARGIN = 150, 90, 22, 60
LOOP: Final = 40  # above the first row: an edge that leads back to its state
MAX_LABEL: Final = 18
LETTER, LINE = 7.0, 12.0  # of a label
# Where on its edge a label may stand: first nearer to the start, as edges that cross do so in their middle.
ALONG: Final = (0.35, 0.2, 0.5, 0.65, 0.8)


@dataclass(frozen=True, slots=True)
class CharacterAutomaton:
    """Deterministic; state 0 is the start. Every state leads to an accepting one."""

    num_states: int
    edges: tuple[tuple[int, Ranges, int], ...]
    accepting: frozenset[int]


def automaton_of(languages: Languages, term: Term, max_states: int) -> CharacterAutomaton | None:
    """The automaton of a language; None where it has more states.

    Raises:
        TooManyTerms: that is not found out quickly.
    """
    classes = languages.classes(term)
    numbers = {term: 0}
    order = [term]
    edges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place in order:  # grows while we walk
        for ranges in classes:
            behind = languages.after(place, ranges[0][0])
            if languages.is_empty(behind) is True:
                continue
            if behind not in numbers:
                if len(order) >= max_states:
                    return None
                numbers[behind] = len(order)
                order.append(behind)
            edges.setdefault((numbers[place], numbers[behind]), []).extend(ranges)
    accepting = frozenset(number for place, number in numbers.items() if place.is_nullable)
    joined = tuple((source, normalised(ranges), target) for (source, target), ranges in edges.items())
    return CharacterAutomaton(len(order), joined, accepting)


def drawn(automaton: CharacterAutomaton) -> str:
    """The automaton as SVG: states in columns by how many characters lead to them, accepting ones with two rings."""
    depths = _depths(automaton)
    columns = [list(states) for _, states in groupby(sorted(depths, key=lambda s: (depths[s], s)), depths.__getitem__)]
    tallest = max(map(len, columns))
    places = {
        state: (MARGIN + COLUMN * column, MARGIN + ROW * (row + (tallest - len(states)) / 2 + 0.5))
        for column, states in enumerate(columns)
        for row, state in enumerate(states)
    }
    bends = [_bend(depths[target] - depths[source]) // 2 for source, _, target in automaton.edges]
    above, below = max([LOOP, *bends]), max([0, *(-bend for bend in bends)])
    beside = max([0, *(abs(_sideways(places[source], places[target])) // 2 for source, _, target in automaton.edges)])
    width, height = 2 * MARGIN + COLUMN * (len(columns) - 1) + beside, above + MARGIN + ROW * tallest + below
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {MARGIN - above} {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        f'aria-label="An automaton of {len(places)} states and {len(automaton.edges)} edges" '
        'font-family="sans-serif" font-size="12">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        f'<rect y="{MARGIN - above}" width="100%" height="100%" fill="#fff"/>',
    ]
    taken: list[_Label] = []
    for source, ranges, target in automaton.edges:
        parts += _edge(places[source], places[target], label(ranges), depths[target] - depths[source], taken)
    parts += [
        f'<text x="{one.x:.1f}" y="{one.y:.1f}" text-anchor="middle" fill="#333" '  # whatever crosses it
        f'stroke="#fff" stroke-width="3" paint-order="stroke">{escape(one.text)}</text>'
        for one in taken
    ]
    for state, (x, y) in places.items():
        rings = (RADIUS, RADIUS - 4) if state in automaton.accepting else (RADIUS,)
        parts += [f'<circle cx="{x:g}" cy="{y:g}" r="{r}" fill="#fff" stroke="#2b5" stroke-width="2"/>' for r in rings]
        parts.append(f'<text x="{x:g}" y="{y + 4:g}" text-anchor="middle">{state}</text>')
    x, y = places[0]
    parts.append(f'<path d="M{x - RADIUS - 24:g} {y:g}h22" stroke="#555" marker-end="url(#tip)"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def label(ranges: Ranges) -> str:
    """A set of characters in a few signs."""
    if ranges == ((0, MAX_CODE_POINT),):
        return "any"
    text = " ".join(_shown(low) if low == high else f"{_shown(low)}-{_shown(high)}" for low, high in ranges)
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 3] + "..."


def _shown(code: int) -> str:
    char = chr(code)
    return char if char.isprintable() and char != " " else f"U+{code:04X}"


def _depths(automaton: CharacterAutomaton) -> dict[int, int]:
    depths = {0: 0}
    queue = [0]
    for state in queue:  # grows while we walk
        for source, _, target in automaton.edges:
            if source == state and target not in depths:
                depths[target] = depths[state] + 1
                queue.append(target)
    return depths


def _bend(forward: int) -> int:
    """Edges over several columns pass over what lies between, those that go back underneath: the longer the further."""
    return 40 * (forward - 1) if forward else 0


def _sideways(start: tuple[float, float], end: tuple[float, float]) -> float:
    """Edges in a column lead beside it: down on the right, up on the left, around the states between."""
    rows = (end[1] - start[1]) / ROW if start[0] == end[0] else 0.0
    return (60 * abs(rows) - 20) * (1 if rows > 0 else -1) if rows else 0.0


@dataclass(frozen=True, slots=True)
class _Label:
    x: float  # its middle
    y: float
    text: str

    def is_clear_of(self, other: _Label) -> bool:
        across = LETTER * (len(self.text) + len(other.text)) / 2
        return abs(self.x - other.x) >= across or abs(self.y - other.y) >= LINE


def _on_curve(t: float, start: float, control: float, end: float) -> float:
    return (1 - t) * (1 - t) * start + 2 * t * (1 - t) * control + t * t * end


def _edge(
    start: tuple[float, float], end: tuple[float, float], text: str, forward: int, taken: list[_Label]
) -> Iterable[str]:
    """Its line. Its label goes behind those that are `taken`, where it is clear of them."""
    (x, y), (u, v) = start, end
    if start == end:
        path = (
            f"M{x - 10:g} {y - RADIUS + 2:g}C{x - 30:g} {y - 62:g} {x + 30:g} {y - 62:g} {x + 10:g} {y - RADIUS + 2:g}"
        )
        taken.append(_Label(x, y - 56, text))
    else:
        control = ((x + u) / 2 + _sideways(start, end), (y + v) / 2 - _bend(forward))
        one, other = atan2(control[1] - y, control[0] - x), atan2(control[1] - v, control[0] - u)
        x, y = x + RADIUS * cos(one), y + RADIUS * sin(one)
        u, v = u + RADIUS * cos(other), v + RADIUS * sin(other)
        path = f"M{x:.1f} {y:.1f}Q{control[0]:.1f} {control[1]:.1f} {u:.1f} {v:.1f}"
        tried = [_Label(_on_curve(t, x, control[0], u), _on_curve(t, y, control[1], v) - 5, text) for t in ALONG]
        taken.append(next((one for one in tried if all(map(one.is_clear_of, taken))), tried[0]))
    yield f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#tip)"/>'
