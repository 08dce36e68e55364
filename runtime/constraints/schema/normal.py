"""From a schema's text to its normal form: one schema of plain keywords that the engine enforces exactly.

Every schema becomes, for each kind of value, an "or" of facts (`ways.py`, looked into by `reader.py`); this file writes
them down again, each state once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Final

from msgspec.structs import replace

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.schema.arrays import MAX_STATES, Step, Wanted, automaton
from niwaki.runtime.constraints.schema.constants import are_too_many
from niwaki.runtime.constraints.schema.cost import cost_of
from niwaki.runtime.constraints.schema.distinct import DISTINCT, DISTINCT_KEYS, check_distinct
from niwaki.runtime.constraints.schema.document import Json, Watch, canonical, identity, nothing, read_schema, refused
from niwaki.runtime.constraints.schema.facts import Contains, State, Way
from niwaki.runtime.constraints.schema.free_keys import has_free_keys
from niwaki.runtime.constraints.schema.numbers import number_schemas, whole_numbers
from niwaki.runtime.constraints.schema.plain import MAX_OPTIONAL, united
from niwaki.runtime.constraints.schema.presence import presences, without_count
from niwaki.runtime.constraints.schema.reader import Reader
from niwaki.runtime.constraints.schema.references import Document
from niwaki.runtime.constraints.schema.strings import joined
from niwaki.runtime.constraints.schema.unknown_keys import UnknownKeys

MAX_NODES: Final = 20_000
DISTINCT_BYTES: Final = 16  # that an item may need beyond its shortest text to be another one
MAX_LEVELS: Final = 90  # of parts within parts: what reads them calls itself, up to eight calls deep for each


@dataclasses.dataclass(frozen=True, slots=True)
class NormalSchema:
    """A schema that the engine enforces exactly, and what it costs.

    `value` and `inside` are those of `grammar_source.Commitments`. `is_small` where compiling it is provably quick,
    `is_tame` where it takes time in proportion to its length: up to 75 ms for 38 KiB (22 November 2026). `has_witness`:
    one of its objects asks for an unknown key (`presence.py`). `is_distinct`: one of its arrays allows no item twice
    and is no automaton, or one of its objects no key (`distinct.py`). `has_patterns`, of strings or of keys, and
    `has_automata`, of arrays: as far as some part that is no item of an automaton has them.
    """

    schema: Json
    num_nodes: int
    value: int
    inside: int
    is_small: bool
    is_tame: bool
    has_witness: bool
    is_distinct: bool
    has_patterns: bool
    has_automata: bool


def normalise(text: str, seconds: float = 10.0, wait_for_pause: Callable[[], None] = nothing) -> NormalSchema:
    """The normal form. `wait_for_pause`: called before each part of the schema, that others' work goes first.

    Raises:
        TookTooLong: working it out took this thread more processor time.
        ConstraintError: not a schema, or a keyword that cannot be enforced exactly, with its pointer.
    """
    try:
        return _normalised(text, Watch(seconds, wait_for_pause))
    except RecursionError:  # all of it is plain Python, where this is an exception like any other
        raise _too_deep() from None


def _normalised(text: str, watch: Watch) -> NormalSchema:
    document = Document(read_schema(text))
    writer = _Writer(document, watch)
    root = writer.schema_of(((document.root, True),))
    if root is False:
        raise ConstraintError("the schema admits no text: no value satisfies all of its keywords")
    if definitions := writer.definitions:
        root = {**(root if isinstance(root, dict) else {}), "$defs": definitions}
    cost = cost_of(root, watch)
    if writer.is_distinct:
        check_distinct(root)
        cost = dataclasses.replace(cost, value=cost.widest + DISTINCT_BYTES, inside=cost.inside + DISTINCT_BYTES)
    return NormalSchema(
        root, writer.num_nodes, cost.value, cost.inside, cost.is_small, cost.is_tame, cost.has_witness,
        writer.is_distinct, cost.has_patterns, cost.has_automata,
    )  # fmt: skip


def _too_deep() -> ConstraintError:
    return ConstraintError("the schema's references lead through too many schemas; nest them less deeply")


class _Writer:
    def __init__(self, document: Document, watch: Watch) -> None:
        self._watch = watch
        self._reader = Reader(document, watch)
        self._names: dict[State, str] = {}
        self._written: dict[State, Json] = {}
        self._keys = UnknownKeys(self._reader, watch)
        self.num_nodes = 0
        self.is_distinct = False  # an array's items never repeat, or an object's keys, see distinct.py

    @property
    def definitions(self) -> dict[str, Json]:
        """The schemas that stand at several places. Each behind those that it leads to, but for itself."""
        named = ((state, schema) for state, schema in self._written.items() if state in self._names)
        return {self._names[state]: schema for state, schema in named if schema is not False}

    def schema_of(self, state: State) -> Json:
        """The state as one plain schema; False where no value is in it."""
        state = self._reader.plain.behind(state)
        if not state:
            return True
        if state in self._reader.being_written:
            name = self._names.setdefault(state, f"n{len(self._names)}")
            return {"$ref": f"#/$defs/{name}"}
        if state in self._written:
            return self._shared(state)
        if len(self._reader.being_written) >= MAX_LEVELS:
            raise _too_deep()
        self._watch.place = state[-1][0]
        self._watch.check()
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise refused(state[-1][0], f"the schema has more than {MAX_NODES} parts when written out; simplify it")
        self._reader.being_written.add(state)
        try:
            schema = self._reader.plain.written(state, self.schema_of)
            if schema is None:
                schema = self._union(self._reader.all_ways(state), state[-1][0])
        finally:
            self._reader.being_written.discard(state)
        self._written[state] = schema
        if state in self._names:
            return self._shared(state)
        return schema

    def _shared(self, state: State) -> Json:
        """A schema that stands at several places: by name, unless it is short."""
        schema = self._written[state]
        if state not in self._names:
            if not isinstance(schema, dict) or not schema.keys() & {"properties", "items", "prefixItems", "anyOf"}:
                return schema
            self._names[state] = f"n{len(self._names)}"
        return {"$ref": f"#/$defs/{self._names[state]}"}

    def _union(self, ways: Sequence[Way], place: str) -> Json:
        constants: list[Json] = []
        branches: list[dict[str, Json]] = []
        for way in ways:
            if way.beyond:
                raise refused(*way.beyond[0])
            if way.values is not None and not (way.kind == "boolean" and len(way.values) == 2) and way.kind != "null":
                constants += [canonical(value) for value in way.values]
            else:
                branches += self._branches(way, place)
        if constants:
            distinct = list({identity(value): value for value in constants}.values())
            if are_too_many(distinct):
                raise refused(place, f"{len(distinct)} constants that share too little are too large; simplify it")
            constants = distinct
        return united(branches, constants)

    def _branches(self, way: Way, place: str) -> list[dict[str, Json]]:
        match way.kind:
            case "number":
                return number_schemas(way, place)
            case "string":
                return [self._reader.strings.schema(way)]
            case "array":
                return self._array_schemas(way, place)
            case "object":
                return self._object_schemas(way, place)
            case _:
                return [{"type": way.kind}]

    # objects

    def _object_schemas(self, way: Way, place: str) -> list[dict[str, Json]]:
        if way.excluded:
            raise refused(place, "that an object is not a certain one cannot be enforced")
        way = self._reader.with_listed_names(way)
        names = self._reader.known_names(way)
        keys = self._keys.pattern_of(self._reader.ways(way.names, "string")) if way.names else None
        states = {name: self._reader.field_state(way, name) for name in names}
        impossible = {name for name in names if self._reader.is_impossible(states[name])}
        asked = frozenset(way.required)
        if asked & impossible:
            return []
        possible = {name: states[name] for name in names if name not in impossible}
        rest, patterns = self._keys.regions(way, keys, possible, place)
        is_closed = not patterns and self._reader.is_impossible(rest)
        witness: Json = None
        if way.exists:
            witness = self._witness(way, names, rest, patterns)
            if witness is None:
                return []
            way = without_count(way)
        optional = [name for name in names if name not in asked and name not in impossible]
        if len(optional) > MAX_OPTIONAL:
            reason = f"{len(optional)} keys of one object may be left out, at most {MAX_OPTIONAL}"
            raise refused(f"{place}/properties", f"{reason}; require them, or divide them among objects")
        written: list[dict[str, Json]] = []
        for present, absent, least, most in presences(way, optional, is_closed, place):
            properties: dict[str, Json] = {}
            for name in names:
                properties[name] = False if name in impossible or name in absent else self.schema_of(states[name])
                if properties[name] is False and (name in asked or name in present):
                    break
            else:
                required: list[Json] = [name for name in names if name in asked or name in present]
                schema: dict[str, Json] = {"type": "object"}
                if properties:
                    schema["properties"] = properties
                if required:
                    schema["required"] = required
                regions = {regex: self.schema_of(state) for regex, state in patterns}
                if regions:
                    schema["patternProperties"] = regions
                additional = self.schema_of(rest)
                if least > len(required) and additional is False and not any(regions.values()):
                    continue  # what is asked of its keys no value satisfies, which was seen when it was written
                if additional is not True:
                    schema["additionalProperties"] = additional
                if least > len(required):
                    schema["minProperties"] = least
                if most is not None:
                    schema["maxProperties"] = most
                if witness is not None:
                    schema["x-witness"] = witness
                if least > len(required) + 1:
                    if not has_free_keys(schema, least - len(required), place):
                        continue
                    schema[DISTINCT_KEYS] = place
                    self.is_distinct = True
                written.append(schema)
        return written

    def _witness(self, way: Way, names: list[str], rest: State, regions: list[tuple[str, State]]) -> Json:
        """An unknown key that is as it must not be, for what negates `additionalProperties`, `patternProperties` and
        `propertyNames` (core 10.3.2): the pairs of which one must come, and those that may come behind it. As a later
        pair replaces an earlier one of the same key, these have other keys. None where there is no such pair.
        """
        wanted = way.exists[0]
        meant = list(wanted.patterns)
        if wanted.keys:
            keys = self._reader.ways(wanted.keys, "string")
            if not keys:
                return None
            meant.append(self._keys.pattern_of(keys))
        sources = (regex for group in way.fields for regex, _ in group.patterns)
        others = [regex for regex in sources if not self._reader.strings.is_universal(regex, wanted.pointer)]
        covered = [([regex], list[str](), state) for regex, state in regions]
        covered.append(([], others, rest))
        pairs: list[Json] = []
        behind: list[Json] = []
        others_than = sorted(wanted.names)  # a set's own order is another in each process
        asked = joined(meant, wanted.without, others_than) if meant or wanted.without or others_than else ""
        for found, without, state in covered:
            key = joined([*found, *meant], [*without, *wanted.without], [*names, *others_than])
            self._add_pair(pairs, key, (*state, *wanted.state), wanted.pointer)
            if asked:
                self._add_pair(behind, joined(found, [*without, asked], names), state, wanted.pointer)
        return {"pairs": pairs, "behind": behind} if pairs else None

    def _add_pair(self, pairs: list[Json], key: str, state: State, pointer: str) -> None:
        """A pair of a key that matches and of a value of the state, where there is such a pair."""
        if self._reader.is_impossible(tuple(dict.fromkeys(state))):
            return
        term = self._reader.strings.term(key, pointer)
        if term is None:
            raise refused(pointer, "its patterns cannot be enforced together")
        value = self.schema_of(state) if self._reader.strings.languages.is_empty(term) is not True else False
        if value is not False:
            pairs.append([key, value])

    # arrays

    def _array_schemas(self, way: Way, place: str) -> list[dict[str, Json]]:
        if way.excluded:
            raise refused(place, "that an array is not a certain one cannot be enforced")
        length = max([0, *(len(group.prefix) for group in way.items), *(found.start for found in way.others)])
        most = way.most
        for index in range(length + 1):
            if (most is None or index < most) and self._reader.is_impossible(self._reader.item_state(way, index)):
                most = index
        if most is not None and way.least > most:
            return []
        way = replace(way, most=most)
        is_unique = way.unique_at is not None and (most is None or most > 1)
        contains = [found for found in way.contains if found.low > 0 or found.high is not None]
        distinct: dict[str, Json] = {}
        if is_unique and not self._are_few(way, length):
            is_unique, distinct = False, {DISTINCT: way.unique_at}
            self.is_distinct = True
        if is_unique or contains or way.others:
            described = self._array_automaton(way, contains, is_unique, length)
            return [] if described is None else [{**described, **distinct}]
        count = length + 1 if most is None else min(most, length + 1)  # the last: all behind the others
        written = [self.schema_of(self._reader.item_state(way, index)) for index in range(count)]
        if False in written:  # that no value is in it was seen when it was written
            most = written.index(False)
            if way.least > most:
                return []
        schema: dict[str, Json] = {"type": "array"}
        if prefix := written[: length if most is None else min(most, length)]:
            schema["prefixItems"] = prefix
        if (most is None or most > length) and written[length] is not True:
            schema["items"] = written[length]
        if way.least:
            schema["minItems"] = way.least
        if most is not None:
            schema["maxItems"] = most
        return [{**schema, **distinct}]

    def _are_few(self, way: Way, length: int) -> bool:
        """Whether all arrays of different items are few enough for an automaton."""
        values: set[str] = set()
        for index in range(length + 1) if way.most is None or way.most > length else range(way.most):
            found = self._finite(self._reader.item_state(way, index))
            if found is None:
                return False
            values.update(map(identity, found))
        most = len(values) if way.most is None else min(way.most, len(values))
        return sum(math.comb(len(values), size) for size in range(most + 1)) <= MAX_STATES

    def _array_automaton(
        self, way: Way, contains: Sequence[Contains], is_unique: bool, length: int
    ) -> dict[str, Json] | None:
        pointers = [*((way.unique_at,) if is_unique and way.unique_at else ()), *(f.pointer for f in contains)]
        pointer = [*pointers, *(found.pointer for found in way.others)][0]
        known: dict[int, list[Step]] = {}
        numbers: dict[str, int] = {}

        def steps(index: int) -> list[Step]:
            if index not in known:
                known[index] = [
                    step
                    for state in _item_states(way, index, self._reader.item_state(way, index))
                    for step in (
                        self._unique_steps(state, contains, numbers)
                        if is_unique
                        else self._counted_steps(state, contains)
                    )
                ]
            return known[index]

        wanted = [Wanted(found.low, found.high) for found in contains]
        return automaton(steps, length, way.least, way.most, wanted, pointer)

    def _unique_steps(self, state: State, contains: Sequence[Contains], numbers: dict[str, int]) -> Iterator[Step]:
        """uniqueItems (validation 6.4.3) over a few values: each is used once."""
        for value in self._finite(state) or ():
            counts = frozenset(i for i, found in enumerate(contains) if self._reader.accepts(found.state, value))
            item: Json = {"enum": [canonical(value)]}
            yield Step(item, counts, numbers.setdefault(identity(value), len(numbers)))

    def _counted_steps(self, state: State, contains: Sequence[Contains]) -> Iterator[Step]:
        """Items by which `contains` they count for. Where only enough is asked for, an item need not count; where too
        many are forbidden, one that does not count must fail."""
        for chosen in product((True, False), repeat=len(contains)):
            for atoms in product(
                *(self._counting(found, counts) for found, counts in zip(contains, chosen, strict=True))
            ):
                item = self.schema_of((*state, *(atom for part in atoms for atom in part)))
                if item is not False:
                    yield Step(item, frozenset(i for i, counts in enumerate(chosen) if counts))

    def _counting(self, found: Contains, counts: bool) -> list[State]:
        if counts:
            return [found.state]
        return [()] if found.high is None else [((pointer, not holds),) for pointer, holds in found.state]

    def _finite(self, state: State) -> list[Json] | None:
        """All values of a state, or None where they are not listed."""
        listed: dict[str, Json] = {}
        for way in self._reader.all_ways(state):
            if way.beyond:
                raise refused(*way.beyond[0])
            values = whole_numbers(way) if way.values is None else way.values
            if values is None:
                return None
            listed |= {identity(value): value for value in values}
        return list(listed.values())


def _item_states(way: Way, index: int, state: State) -> Iterator[State]:
    """In which states an item at the place may be, where some say what is asked of all others."""
    asked = [(*found.unless, found.state) for found in way.others if index >= found.start]
    for chosen in product(*asked):
        yield tuple(dict.fromkeys((*state, *(atom for option in chosen for atom in option))))
