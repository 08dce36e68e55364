"""Which keys are present: minProperties and maxProperties by cases, and one unknown key that must come.

The latter becomes `x-witness` of a normal schema, as arrays by automata become `x-automaton`: `pairs` of a pattern of
keys and a schema, one of which must come behind all others, and those that may still come `behind` it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

from msgspec.structs import replace

from niwaki.runtime.constraints.schema.document import Json, refused
from niwaki.runtime.constraints.schema.facts import Way

MAX_VARIANTS: Final = 256  # of one object by which keys are present


def presences(
    way: Way, optional: Sequence[str], is_closed: bool, place: str
) -> Iterator[tuple[frozenset[str], frozenset[str], int, int | None]]:
    """minProperties and maxProperties (validation 6.5.1, 6.5.2) by cases: (present, absent, least, most) of keys.

    The engine counts keys only where all known ones are required, so optional ones are made required or absent.
    """
    none: frozenset[str] = frozenset()
    least = max(0, way.least - len(way.required))  # of keys that are not required
    most = way.most
    if most is not None and is_closed and len(way.required) + len(optional) <= most:
        most = None
    too_many = f"minProperties or maxProperties over {len(optional)} optional keys has too many cases"
    if least == 0 and most is None:
        yield none, none, 0, None
    elif most is None:
        fewer = 0 if is_closed else least  # of the optional keys, beside which unknown ones must come
        if sum(math.comb(len(optional), size) for size in (*range(fewer), least)) > MAX_VARIANTS:
            raise refused(place, too_many)
        for first in combinations(range(len(optional)), least):  # the first `least` of those that are present
            present = frozenset(optional[i] for i in first)
            yield present, frozenset(optional[i] for i in range(first[-1]) if i not in first), 0, None
        for size in range(fewer):
            for chosen in combinations(optional, size):
                yield frozenset(chosen), frozenset(optional) - set(chosen), way.least, None
    else:
        if 2 ** len(optional) > MAX_VARIANTS and optional:
            raise refused(place, too_many)
        for size in range(len(optional) + 1):
            for chosen in combinations(optional, size):
                total = len(way.required) + size
                if total > most or (is_closed and size < least):
                    continue
                free_least = way.least if total < way.least else 0
                yield frozenset(chosen), frozenset(optional) - set(chosen), free_least, None if is_closed else most


def without_count(way: Way) -> Way:
    """The way without counts of keys, as far as an unknown key beside the required ones settles them."""
    if way.most is not None or way.least > len(way.required) + 1:
        raise refused(way.exists[0].pointer, "that one of all keys fails cannot be enforced beside counts of keys")
    return replace(way, least=0)


def witnesses(schema: dict[str, Json], which: str = "pairs") -> list[tuple[str, Json]]:
    """The pairs of an `x-witness`."""
    described = schema["x-witness"]
    assert isinstance(described, dict)
    listed = described[which]
    assert isinstance(listed, list)
    return [(str(pair[0]), pair[1]) for pair in listed if isinstance(pair, list)]
