"""Arrays that `items` alone cannot say, as automata over their items: what is contained, and values that never repeat.

A state is how many items there are (as far as that matters), how many count for each `contains`, and which values were
used. It becomes `x-automaton` of a normal schema, the one keyword there that is not JSON Schema's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from niwaki.runtime.constraints.schema.document import Json, refused

MAX_STATES: Final = 1100  # nine values that never repeat, with room for a length
Place: TypeAlias = tuple[int, tuple[int, ...], frozenset[int]]
# The edges (item, next state) of each state, and the states in which the array may end.
Automaton: TypeAlias = tuple[list[list[tuple[Json, int]]], frozenset[int]]


@dataclass(frozen=True, slots=True)
class Step:
    """One item: its schema, which `contains` it counts for (by their order), and the value it uses up."""

    item: Json
    counts: frozenset[int]
    value: int | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many items must count for one `contains`. Above `low` nothing is counted where there is no `high`."""

    low: int
    high: int | None


def automaton(
    steps: Callable[[int], Iterable[Step]],
    length: int,
    least: int,
    most: int | None,
    wanted: Sequence[Wanted],
    pointer: str,
) -> dict[str, Json] | None:
    """A normal schema of the arrays of `least` to `most` items in which the counts are as wanted; None where there are
    none. steps(i) are the items at place i, the same from `length` on."""
    start: Place = (0, (0,) * len(wanted), frozenset())
    last = max(length, least) if most is None else most
    numbers: dict[Place, int] = {start: 0}
    edges: list[list[tuple[Json, int]]] = []
    ends: list[int] = []
    for place in (order := [start]):  # grows while we walk
        if len(order) > MAX_STATES:
            raise refused(
                pointer, f"its arrays have more than {MAX_STATES} states; list fewer values, or bound the array"
            )
        index, counts, _ = place
        if index >= least and all(count >= want.low for count, want in zip(counts, wanted, strict=True)):
            ends.append(numbers[place])
        found: dict[int, list[Json]] = {}
        for step in steps(min(index, length)) if most is None or index < most else ():
            behind = _after(place, step, last, wanted)
            if behind is not None:
                if behind not in numbers:
                    numbers[behind] = len(order)
                    order.append(behind)
                found.setdefault(numbers[behind], []).append(step.item)
        edges.append([(_either(items), target) for target, items in found.items()])
    return _trimmed(edges, ends)


def _after(place: Place, step: Step, last: int, wanted: Sequence[Wanted]) -> Place | None:
    index, counts, used = place
    if step.value is not None and step.value in used:
        return None
    after = []
    for number, (count, want) in enumerate(zip(counts, wanted, strict=True)):
        grown = count + (number in step.counts)
        if want.high is not None and grown > want.high:
            return None
        after.append(grown if want.high is not None else min(grown, want.low))
    return min(index + 1, last), tuple(after), used if step.value is None else used | {step.value}


def _either(items: list[Json]) -> Json:
    listed = [_listed(item) for item in items if isinstance(item, dict) and item.keys() == {"enum"}]
    if len(listed) == len(items) > 1:
        return {"enum": [value for values in listed for value in values]}
    return items[0] if len(items) == 1 else {"anyOf": items}


def _listed(item: dict[str, Json]) -> list[Json]:
    values = item["enum"]
    return values if isinstance(values, list) else []


def _trimmed(edges: list[list[tuple[Json, int]]], ends: list[int]) -> dict[str, Json] | None:
    """Without the states from which no end is reached."""
    alive = set(ends)
    before: list[set[int]] = [set() for _ in edges]
    for source, found in enumerate(edges):
        for _, target in found:
            before[target].add(source)
    queue = list(ends)
    while queue:
        for source in before[queue.pop()] - alive:
            alive.add(source)
            queue.append(source)
    if 0 not in alive:
        return None
    number = {state: index for index, state in enumerate(sorted(alive))}
    kept: list[Json] = [
        [[item, number[target]] for item, target in edges[state] if target in alive] for state in sorted(alive)
    ]
    return {"type": "array", "x-automaton": {"edges": kept, "ends": [number[state] for state in sorted(ends)]}}


def read_automaton(schema: dict[str, Json]) -> Automaton:
    """That of an `x-automaton`."""
    described = schema["x-automaton"]
    assert isinstance(described, dict)
    edges, ends = described["edges"], described["ends"]
    assert isinstance(edges, list)
    assert isinstance(ends, list)
    states: list[list[tuple[Json, int]]] = []
    for found in edges:
        assert isinstance(found, list)
        pairs = [edge for edge in found if isinstance(edge, list)]
        states.append([(item, target) for item, target in pairs if isinstance(target, int)])
    return states, frozenset(end for end in ends if isinstance(end, int))


def least_items(automaton: Automaton, text_of: Callable[[Json], bytes | None], start: int = 0) -> list[bytes] | None:
    """The items of a shortest array of an automaton, from a state on, where `text_of` an item is known."""
    states, ends = automaton
    queue: list[tuple[int, int, list[bytes]]] = [(0, start, [])]
    done: set[int] = set()
    while queue:
        length, state, items = heapq.heappop(queue)
        if state in ends:
            return items
        if state in done:
            continue
        done.add(state)
        for item, target in states[state]:
            text = text_of(item)
            if text is not None:
                heapq.heappush(queue, (length + len(text) + 1, target, [*items, text]))
    return None


def least_path(schema: dict[str, Json], length_of: Callable[[Json], int | None]) -> int | None:
    """The length of a shortest array of an `x-automaton`."""

    def blank(item: Json) -> bytes | None:
        length = length_of(item)
        return None if length is None else b" " * length

    items = least_items(read_automaton(schema), blank)
    return None if items is None else 2 + sum(len(item) + 1 for item in items)
