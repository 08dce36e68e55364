"""What one way to satisfy a schema asks of a value of one kind: facts, and how two ways hold at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain
from operator import attrgetter
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import fields, replace

from niwaki.runtime.constraints.schema.document import Json, identity

KINDS: Final = ("null", "boolean", "number", "string", "array", "object")

# A schema of the document by its pointer, and whether it must hold or must not. A state holds where all atoms do.
Atom: TypeAlias = tuple[str, bool]
State: TypeAlias = tuple[Atom, ...]
NEVER: Final[State] = (("!never", True),)

# Structs, not dataclasses: thousands are made for a large schema, in a quarter of the time.


class Fields(msgspec.Struct, frozen=True):
    """`properties`, `patternProperties` and `additionalProperties` of one schema object: they see each other."""

    properties: tuple[tuple[str, State], ...] = ()
    patterns: tuple[tuple[str, State], ...] = ()
    additional: State | None = None


class Items(msgspec.Struct, frozen=True):
    """`prefixItems` and `items` of one schema object."""

    prefix: tuple[State, ...] = ()
    rest: State | None = None


class Contains(msgspec.Struct, frozen=True):
    state: State
    low: int
    high: int | None
    pointer: str


class Others(msgspec.Struct, frozen=True):
    """Items from place `start` on that are in none of `unless` are in `state`."""

    start: int
    unless: tuple[State, ...]
    state: State
    pointer: str


class Exists(msgspec.Struct, frozen=True):
    """There is a key whose value is in `state`. The key is none of `names`, all of `patterns` are found in it, none of
    `without`, and it is itself in `keys`."""

    state: State
    pointer: str
    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    keys: State = ()


class Way(msgspec.Struct, frozen=True):
    """A conjunction of facts about values of one kind. The fields of other kinds stay as they are by default."""

    kind: str
    values: tuple[Json, ...] | None = None  # None: not finite
    excluded: tuple[Json, ...] = ()
    # numbers: (bound, whether the bound itself is out)
    low: tuple[Fraction, bool] | None = None
    high: tuple[Fraction, bool] | None = None
    is_whole: bool | None = None
    multiples: tuple[Fraction, ...] = ()
    no_multiples: tuple[int, ...] = ()  # whole numbers that last digits tell, see `steps.py`
    # strings
    patterns: tuple[tuple[str, str], ...] = ()  # (pattern, pointer)
    without: tuple[tuple[str, str], ...] = ()  # patterns that are not found
    formats: tuple[tuple[str, str], ...] = ()
    # sizes: of a string in characters, of an array in items, of an object in keys
    least: int = 0
    most: int | None = None
    # objects
    fields: tuple[Fields, ...] = ()
    required: tuple[str, ...] = ()
    names: State = ()
    exists: tuple[Exists, ...] = ()
    # arrays
    items: tuple[Items, ...] = ()
    contains: tuple[Contains, ...] = ()
    others: tuple[Others, ...] = ()
    unique_at: str | None = None  # the pointer of `uniqueItems`
    # what is asked but cannot be enforced: (pointer, reason)
    beyond: tuple[tuple[str, str], ...] = ()
    # annotations: what was evaluated, for unevaluatedProperties and unevaluatedItems
    seen_names: frozenset[str] = frozenset()
    seen_patterns: frozenset[str] = frozenset()
    seen_all: bool = False
    seen_items: int = 0
    seen_all_items: bool = False
    seen_contained: tuple[State, ...] = ()

    @property
    def is_free(self) -> bool:
        """Every value of the kind is in it."""
        return self.without_annotations() == FREE[self.kind]

    @property
    def has_annotations(self) -> bool:
        keys = self.seen_names or self.seen_patterns or self.seen_all
        return bool(keys or self.seen_items or self.seen_all_items or self.seen_contained)

    def key(self) -> tuple[object, ...]:
        """Equal for equal ways, and hashable."""
        values = None if self.values is None else tuple(map(identity, self.values))
        return (values, tuple(map(identity, self.excluded)), *_HASHABLE(self))

    def without_annotations(self) -> Way:
        if not self.has_annotations:
            return self
        return replace(
            self,
            seen_names=frozenset(),
            seen_patterns=frozenset(),
            seen_all=False,
            seen_items=0,
            seen_all_items=False,
            seen_contained=(),
        )


FREE: Final = {kind: Way(kind) for kind in KINDS}  # every value of the kind; handed out as these objects
_HASHABLE: Final = attrgetter(*(field.name for field in fields(Way) if field.name not in ("values", "excluded")))
CONTRADICTION: Final = object()  # whole and not whole
_FACTS: Final = tuple((field.name, field.default) for field in fields(Way) if field.name != "kind")
_VALUES: Final = attrgetter(*(name for name, _ in _FACTS))


def both(one: Way, other: Way) -> Way | None:
    """The facts of both ways; None where they contradict each other plainly."""
    free = FREE[one.kind]
    if one is free or other is free:
        return other if one is free else one
    values = [
        a if b is default or a is b else b if a is default else _both_of(fact, a, b)
        for fact, a, b in zip(_FACTS, _VALUES(one), _VALUES(other), strict=True)
        for default in (fact[1],)
    ]
    way = Way(one.kind, *values)  # type: ignore[arg-type]  # each value is of its field's type
    return None if contradicts(way) else way


def _both_of(fact: tuple[str, object], a: object, b: object) -> object:
    name, default = fact
    return a if b == default or a == b else b if a == default else _joined(name, a, b)


def without_stricter(ways: Sequence[Way], most: int, is_empty: Callable[[Way], bool]) -> list[Way] | None:
    """The same values in fewer ways: without those that ask for all that another does, and more, and without those
    that are empty. None where more than `most` are left."""
    numbers: dict[object, int] = {}
    facts = [[numbers.setdefault(fact, len(numbers)) for fact in _facts(way)] for way in ways]
    counts = Counter(chain.from_iterable(facts))
    # Who asks for all that another does asks for its rarest fact, too: all pairs of 8,000 ways took five seconds.
    known: dict[int, list[int]] = {}  # facts as bits, by the rarest of them
    kept: list[int] = []
    for place in sorted(range(len(ways)), key=lambda place: len(facts[place])):
        asked = sum(1 << fact for fact in facts[place])
        if any(other & asked == other for fact in facts[place] for other in known.get(fact, ())):
            continue
        known.setdefault(min(facts[place], key=counts.__getitem__), []).append(asked)
        if not is_empty(ways[place]):
            kept.append(place)
        if len(kept) > most:
            return None
    return [ways[place] for place in sorted(kept)]


def _facts(way: Way) -> set[object]:
    """Each of them narrows the way. What is evaluated is told of values, and no way of another is left out for it."""
    found: set[object] = {("seen", way.seen_names, way.seen_patterns, way.seen_all, way.seen_items)}
    found.add(("seen", way.seen_all_items, way.seen_contained))
    for (name, default), value in zip(_FACTS, _VALUES(way), strict=True):
        if value is default or value == default or name.startswith("seen"):
            continue
        if name == "values":
            found.add((name, tuple(map(identity, value))))
        elif name == "excluded":
            found.update((name, identity(one)) for one in value)
        elif isinstance(default, tuple) and name != "names":
            found.update((name, one) for one in value)
        else:
            found.add((name, value))
    return found


def _joined(name: str, a: object, b: object) -> object:
    match name:
        case "values":
            return _common(a, b)
        case "low":
            return _tighter(a, b, lowest=True)
        case "high":
            return _tighter(a, b, lowest=False)
        case "is_whole":
            return CONTRADICTION
        case "least" | "seen_items":
            return max(a, b)  # type: ignore[call-overload]  # both are int
        case "most":
            return min(x for x in (a, b) if isinstance(x, int))
        case "unique_at":
            return a or b
        case "seen_all" | "seen_all_items":
            return bool(a or b)
        case "seen_names" | "seen_patterns":
            return a | b  # type: ignore[operator]  # both are frozensets
        case _:  # tuples of facts: all of them, each once, in order
            assert isinstance(a, tuple)
            assert isinstance(b, tuple)
            return a + tuple(item for item in b if item not in a)


def _common(a: object, b: object) -> object:
    if not isinstance(a, tuple) or not isinstance(b, tuple):
        return a if isinstance(a, tuple) else b
    known = {identity(value) for value in b}
    return tuple(value for value in a if identity(value) in known)


def _tighter(a: object, b: object, *, lowest: bool) -> object:
    if not isinstance(a, tuple) or not isinstance(b, tuple):
        return a if isinstance(a, tuple) else b
    if a[0] == b[0]:
        return (a[0], a[1] or b[1])
    return a if (a[0] > b[0]) == lowest else b


def contradicts(way: Way) -> bool:
    """Whether no value can satisfy the facts, as far as they show without looking into states."""
    if way.values == () or way.is_whole is CONTRADICTION:
        return True
    if way.most is not None and way.least > way.most:
        return True
    if way.low is not None and way.high is not None:
        low, high = way.low[0], way.high[0]
        if low > high or (low == high and (way.low[1] or way.high[1])):
            return True
    return False
