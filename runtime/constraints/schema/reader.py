"""The states of a schema, looked into: in which ways each can hold, whether none does, whether a constant is in it.

A state is a conjunction of schemas of the document. Writes nothing: `normal.py` does.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from niwaki.runtime.constraints.schema.document import Json, Watch, identity, refused
from niwaki.runtime.constraints.schema.facts import FREE, NEVER, Exists, Fields, State, Way, both, contradicts
from niwaki.runtime.constraints.schema.formats import FORMAT_PATTERNS
from niwaki.runtime.constraints.schema.keywords import kind_of
from niwaki.runtime.constraints.schema.numbers import number_satisfies
from niwaki.runtime.constraints.schema.plain import Plain
from niwaki.runtime.constraints.schema.references import Document
from niwaki.runtime.constraints.schema.strings import Strings
from niwaki.runtime.constraints.schema.ways import ASKING, Circular, Expander

LITERALS: Final = {"null": Way("null", values=(None,)), "boolean": Way("boolean", values=(True, False))}
MAX_LOOKS: Final = 8  # how deep emptiness looks into required values


class Reader:
    """`being_written`: the states that are being written down, which may hold themselves; its writer's to change."""

    def __init__(self, document: Document, watch: Watch) -> None:
        self._expander = Expander(document, watch)
        this = weakref.proxy(self)  # no circle: what is known of a schema goes with its reader
        self._expander.is_empty = lambda way: bool(this.is_empty(way))
        self.plain = Plain(document, ASKING)
        self.strings = Strings(watch)
        self._ways: dict[tuple[State, str], list[Way]] = {}
        self.being_written: set[State] = set()
        self._looks = 0
        self._possible: set[State] = set()  # some value is surely in them: mostly asked again and again
        self._by_name: dict[int, tuple[Fields, dict[str, list[State]]]] = {}  # by identity, so with what it is that of

    def ways(self, state: State, kind: str) -> list[Way]:
        """The ways of a state, finite ones reduced to the values that satisfy everything."""
        state = tuple(dict.fromkeys(state))
        key = (state, kind)
        if key not in self._ways:
            self._ways[key] = [done for way in self._expander.of_state(state, kind) for done in self._settled(way)]
        return self._ways[key]

    def all_ways(self, state: State) -> list[Way]:
        return [way for kind in self._expander.kinds(state) for way in self.ways(state, kind)]

    def _settled(self, way: Way) -> Iterator[Way]:
        way = way.without_annotations()
        if way.values is None and way.kind in LITERALS:
            if way is FREE[way.kind]:
                yield LITERALS[way.kind]
                return
            way = replace(way, values=LITERALS[way.kind].values)
        if way.values is not None:
            if way.beyond:
                yield way
                return
            facts = replace(way, values=None)
            values = tuple(value for value in way.values if self._satisfies(value, facts))
            if values:
                yield Way(way.kind, values=values)
            return
        for found in self._by_witness(way):
            if not self.is_empty(found):
                yield found

    def _by_witness(self, way: Way) -> Iterator[Way]:
        """Each "some key" by cases: it is a known one, or one of those that are listed for it, or neither. At most one
        that is neither is left in `exists`."""
        if not way.exists:
            yield way
            return
        way = self.with_listed_names(way)
        first, rest = way.exists[0], replace(way, exists=way.exists[1:])
        listed = self._listed(first.keys)
        for name in dict.fromkeys((*self.known_names(way), *(listed or ()))):
            if self._is_meant(name, first):
                fields = Fields(((name, first.state),))
                found = both(rest, Way("object", required=(name,), fields=(fields,)))
                if found is not None:
                    yield from self._by_witness(found)
        if listed is not None or self._is_closed(way):
            return
        for found in self._by_witness(rest):
            if found.exists:
                reason = "that one of all keys fails cannot be enforced twice"
                yield replace(found, exists=(), beyond=(*found.beyond, (first.pointer, reason)))
            else:
                yield replace(found, exists=(first,))

    def with_listed_names(self, way: Way) -> Way:
        """The way with the names that propertyNames lists as known keys, and no others."""
        listed = self._listed(way.names)
        if listed is None:
            return way
        fields = Fields(tuple((name, ()) for name in listed), (), NEVER)
        return replace(way, fields=(*way.fields, fields), names=())

    def _listed(self, keys: State) -> list[str] | None:
        """All keys that are in the state; None where they are not listed."""
        found = self.ways(keys, "string") if keys else []
        if not keys or any(way.values is None or way.beyond for way in found):
            return None
        return [str(value) for way in found for value in way.values or ()]

    def _is_meant(self, name: str, wanted: Exists) -> bool:
        """Whether the key is one of those of which one must exist."""
        place = wanted.pointer
        return (
            name not in wanted.names
            and all(self.strings.matches(regex, name, place) for regex in wanted.patterns)
            and not any(self.strings.matches(regex, name, place) for regex in wanted.without)
            and (not wanted.keys or self.accepts(wanted.keys, name))
        )

    def is_empty(self, way: Way) -> bool:
        """Whether provably no value satisfies the facts. False where that is not known."""
        if contradicts(way):
            return True
        if self._looks >= MAX_LOOKS:
            return False
        self._looks += 1
        try:
            if way.values is not None:
                return not way.beyond and not any(self._satisfies(v, replace(way, values=None)) for v in way.values)
            if way.kind == "object":
                return any(self.is_impossible(self.field_state(way, name)) for name in way.required)
            if way.kind == "string":
                return self.strings.is_empty(way)
            if way.kind == "array":
                return any(self.is_impossible(self.item_state(way, i)) for i in range(min(way.least, 32)))
            return False
        except Circular:
            return False
        finally:
            self._looks -= 1

    def is_impossible(self, state: State) -> bool:
        """Whether provably no value at all is in the state."""
        if state in self._possible:
            return False
        if any(self._expander.is_never(atom) for atom in state):
            return True
        if state in self.being_written:
            return False
        if self.plain.is_possible(state):
            self._possible.add(state)
            return False
        ways = (way for kind in self._expander.kinds(state) for way in self.ways(state, kind))
        return all(way.values is None and self.is_empty(way) for way in ways)  # values were tried when they were listed

    def accepts(self, state: State, value: Json) -> bool:
        kind = kind_of(value)
        for way in self.ways(state, kind):
            if way.values is not None:
                if identity(value) in map(identity, way.values):
                    if way.beyond:
                        raise refused(*way.beyond[0])
                    return True
            elif self._satisfies(value, way):
                return True
        return False

    def _satisfies(self, value: Json, way: Way) -> bool:
        """Whether a value of the way's kind satisfies its facts."""
        if way.beyond:
            raise refused(*way.beyond[0])
        if identity(value) in map(identity, way.excluded):
            return False
        if isinstance(value, str):
            wanted = (*way.patterns, *((FORMAT_PATTERNS[name], place) for name, place in way.formats))
            found = (self.strings.matches(pattern, value, place) for pattern, place in wanted)
            lost = (self.strings.matches(pattern, value, place) for pattern, place in way.without)
            return _fits(len(value), way) and all(found) and not any(lost)
        if isinstance(value, list):
            return self._array_satisfies(value, way)
        if isinstance(value, dict):
            return self._object_satisfies(value, way)
        return value is None or isinstance(value, bool) or number_satisfies(value, way)

    def _array_satisfies(self, value: list[Json], way: Way) -> bool:
        if not _fits(len(value), way) or (way.unique_at and len(set(map(identity, value))) < len(value)):
            return False
        if not all(self.accepts(self.item_state(way, index), item) for index, item in enumerate(value)):
            return False
        for others in way.others:
            options = (*others.unless, others.state)
            if not all(any(self.accepts(option, item) for option in options) for item in value[others.start :]):
                return False
        counts = [(found, sum(self.accepts(found.state, item) for item in value)) for found in way.contains]
        return all(found.low <= count <= (math.inf if found.high is None else found.high) for found, count in counts)

    def _object_satisfies(self, value: dict[str, Json], way: Way) -> bool:
        if not _fits(len(value), way) or any(name not in value for name in way.required):
            return False
        if way.names and not all(self.accepts(way.names, name) for name in value):
            return False
        if not all(self.accepts(self.field_state(way, name), item) for name, item in value.items()):
            return False
        return all(self._has(value, wanted) for wanted in way.exists)

    def _has(self, value: dict[str, Json], wanted: Exists) -> bool:
        return any(self._is_meant(name, wanted) and self.accepts(wanted.state, item) for name, item in value.items())

    # -- objects and arrays as seen from one key or place

    def field_state(self, way: Way, name: str) -> State:
        """What is asked of the value of a key."""
        if way.names and not self.accepts(way.names, name):
            return NEVER
        atoms: list[tuple[str, bool]] = []
        for group in way.fields:
            found = self._properties_named(group, name)
            if group.patterns:
                matches = self.strings.matches
                found = [
                    *found,
                    *(state for regex, state in group.patterns if matches(regex, name, "patternProperties")),
                ]
            if not found and group.additional is not None:
                found = [group.additional]
            atoms += [atom for state in found for atom in state]
        return tuple(dict.fromkeys(atoms))

    def _properties_named(self, group: Fields, name: str) -> list[State]:
        """None or one: `properties` has each key once. Looked up where they are many, else all keys of an object with
        `n` took n * n steps, of each of its ways."""
        if len(group.properties) == 1:  # of what is negated
            key, state = group.properties[0]
            return [state] if key == name else []
        known = self._by_name.get(id(group))
        if known is None:
            named = {key: [state] for key, state in group.properties}
            known = self._by_name[id(group)] = group, named
        return known[1].get(name) or []

    def known_names(self, way: Way) -> list[str]:
        """In the order in which they are written: as `properties` lists them, those that must be absent last."""
        named = [(name, state) for group in way.fields for name, state in group.properties]
        wanted = [name for name, state in named if state != NEVER]
        return list(dict.fromkeys((*wanted, *way.required, *(name for name, _ in named))))

    def _is_closed(self, way: Way) -> bool:
        """Whether only known keys are possible."""
        if any(group.patterns for group in way.fields):
            return False
        return any(group.additional is not None and self.is_impossible(group.additional) for group in way.fields)

    def item_state(self, way: Way, index: int) -> State:
        atoms: list[tuple[str, bool]] = []
        for group in way.items:
            state = group.prefix[index] if index < len(group.prefix) else group.rest
            atoms += state or ()
        return tuple(dict.fromkeys(atoms))


def _fits(size: int, way: Way) -> bool:
    return way.least <= size and (way.most is None or size <= way.most)
