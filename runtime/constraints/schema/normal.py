"""From a schema's text to its normal form: one schema of plain keywords that the engine enforces exactly.

Every schema becomes, for each kind of value, an "or" of facts (`ways.py`); this file looks into them (is one empty?
does it hold for a constant?) and writes them down again, each state once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_language import Term
from niwaki.runtime.constraints.schema.arrays import Step, Wanted, automaton
from niwaki.runtime.constraints.schema.cost import cost_of
from niwaki.runtime.constraints.schema.document import Json, canonical, identity, json_text, read_schema, refused
from niwaki.runtime.constraints.schema.facts import (
    KINDS,
    NEVER,
    Atom,
    Contains,
    Exists,
    Fields,
    State,
    Way,
    both,
    contradicts,
)
from niwaki.runtime.constraints.schema.numbers import number_satisfies, number_schemas, whole_numbers
from niwaki.runtime.constraints.schema.presence import presences
from niwaki.runtime.constraints.schema.references import Document
from niwaki.runtime.constraints.schema.strings import Strings, escaped_text, joined
from niwaki.runtime.constraints.schema.ways import Circular, Expander, kind_of

MAX_OVERLAPPING: Final = 4  # patterns of keys
MAX_NODES: Final = 20_000
MAX_LOOKS: Final = 8  # how deep emptiness looks into required values
UNIVERSAL_PATTERNS: Final = frozenset({"", ".*", "^.*", "^", "[\\s\\S]*"})  # found in every string


@dataclass(frozen=True, slots=True)
class NormalSchema:
    """A schema that the engine enforces exactly, and what it costs.

    `value` and `inside` are those of `grammar_engine.Commitments`. `is_small` where compiling it is provably quick.
    """

    schema: Json
    num_nodes: int
    value: int
    inside: int
    is_small: bool


def normalise(text: str) -> NormalSchema:
    """The normal form.

    Raises:
        ConstraintError: not a schema, or a keyword that cannot be enforced exactly, with its pointer.
    """
    try:
        return _normalised(text)
    except RecursionError:  # all of it is plain Python, where this is an exception like any other
        raise ConstraintError("the schema's references lead through too many schemas; nest them less deeply") from None


def _normalised(text: str) -> NormalSchema:
    writer = _Writer(Document(read_schema(text)))
    root = writer.schema_of((("", True),))
    if root is False:
        raise ConstraintError("the schema admits no text: no value satisfies all of its keywords")
    if writer.definitions:
        root = {**(root if isinstance(root, dict) else {}), "$defs": writer.definitions}
    cost = cost_of(root)
    return NormalSchema(root, writer.num_nodes, cost.value, cost.inside, cost.is_small)


class _Writer:
    def __init__(self, document: Document) -> None:
        self._expander = Expander(document)
        self._expander.is_empty = self.is_empty
        self._strings = Strings()
        self._ways: dict[tuple[State, str], list[Way]] = {}
        self._names: dict[State, str] = {}
        self._written: dict[State, Json] = {}
        self._in_progress: set[State] = set()
        self._looks = 0
        self.definitions: dict[str, Json] = {}
        self.num_nodes = 0

    # -- looking

    def ways(self, state: State, kind: str) -> list[Way]:
        """The ways of a state, finite ones reduced to the values that satisfy everything."""
        state = tuple(dict.fromkeys(state))
        key = (state, kind)
        if key not in self._ways:
            self._ways[key] = [done for way in self._expander.of_state(state, kind) for done in self._settled(way)]
        return self._ways[key]

    def _settled(self, way: Way) -> Iterator[Way]:
        way = way.without_annotations()
        if way.values is None and way.kind in ("null", "boolean"):
            values: tuple[Json, ...] = (None,) if way.kind == "null" else (True, False)
            way = replace(way, values=values)
        if way.values is not None:
            if way.beyond:
                yield way
                return
            facts = replace(way, values=None)
            values = tuple(value for value in way.values if self._satisfies(value, facts))
            if values:
                yield Way(way.kind, values=values)
            return
        for closed in self._without_exists(way):
            if not self.is_empty(closed):
                yield closed

    def _without_exists(self, way: Way) -> Iterator[Way]:
        """Where no keys but known ones are possible, "some other key" is one of these."""
        if not way.exists:
            yield way
            return
        first, rest = way.exists[0], replace(way, exists=way.exists[1:])
        if first.patterns or not self._is_closed(way):
            yield replace(rest, beyond=(*rest.beyond, (first.pointer, "additional keys that fail cannot be enforced")))
            return
        for name in self._known_names(way):
            if name not in first.names:
                fields = Fields(((name, first.state),))
                found = both(rest, Way("object", required=(name,), fields=(fields,)))
                if found is not None:
                    yield from self._without_exists(found)

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
                return any(self.is_impossible(self._field_state(way, name)) for name in way.required)
            if way.kind == "string":
                return self._strings.is_empty(way)
            if way.kind == "array":
                return any(self.is_impossible(self._item_state(way, i)) for i in range(min(way.least, 32)))
            return False
        except Circular:
            return False
        finally:
            self._looks -= 1

    def is_impossible(self, state: State) -> bool:
        """Whether provably no value at all is in the state."""
        if any(self._expander.is_never(atom) for atom in state):
            return True
        if state in self._in_progress:
            return False
        return all(self.is_empty(way) for kind in KINDS for way in self.ways(state, kind))

    def accepts(self, state: State, value: Json) -> bool:
        kind = kind_of(value)
        for way in self.ways(state, kind):
            if way.values is not None:
                if identity(value) in map(identity, way.values):
                    return True
            elif self._satisfies(value, way):
                return True
        return False

    def _satisfies(self, value: Json, way: Way) -> bool:
        """Whether a value of the way's kind satisfies its facts. Formats are not asked of constants."""
        if way.beyond:
            raise refused(*way.beyond[0])
        if identity(value) in map(identity, way.excluded):
            return False
        if isinstance(value, str):
            found = (self._strings.matches(pattern, value, place) for pattern, place in way.patterns)
            lost = (self._strings.matches(pattern, value, place) for pattern, place in way.without)
            return _fits(len(value), way) and all(found) and not any(lost)
        if isinstance(value, list):
            return self._array_satisfies(value, way)
        if isinstance(value, dict):
            return self._object_satisfies(value, way)
        return value is None or isinstance(value, bool) or number_satisfies(value, way)

    def _array_satisfies(self, value: list[Json], way: Way) -> bool:
        if not _fits(len(value), way) or (way.unique_at and len(set(map(identity, value))) < len(value)):
            return False
        if not all(self.accepts(self._item_state(way, index), item) for index, item in enumerate(value)):
            return False
        return all(
            found.low <= sum(self.accepts(found.state, item) for item in value) <= (found.high or math.inf)
            if found.high != 0
            else not any(self.accepts(found.state, item) for item in value)
            for found in way.contains
        )

    def _object_satisfies(self, value: dict[str, Json], way: Way) -> bool:
        if not _fits(len(value), way) or any(name not in value for name in way.required):
            return False
        if way.names and not all(self.accepts(way.names, name) for name in value):
            return False
        if not all(self.accepts(self._field_state(way, name), item) for name, item in value.items()):
            return False
        return all(self._has(value, wanted) for wanted in way.exists)

    def _has(self, value: dict[str, Json], wanted: Exists) -> bool:
        return any(
            name not in wanted.names
            and not any(self._strings.matches(regex, name, wanted.pointer) for regex in wanted.patterns)
            and self.accepts(wanted.state, item)
            for name, item in value.items()
        )

    # -- objects and arrays as seen from one key or place

    def _field_state(self, way: Way, name: str) -> State:
        """What is asked of the value of a key."""
        if way.names and not self.accepts(way.names, name):
            return NEVER
        atoms: list[tuple[str, bool]] = []
        for group in way.fields:
            found = [state for key, state in group.properties if key == name]
            found += [
                state for regex, state in group.patterns if self._strings.matches(regex, name, "patternProperties")
            ]
            if not found and group.additional is not None:
                found = [group.additional]
            atoms += [atom for state in found for atom in state]
        return tuple(dict.fromkeys(atoms))

    def _known_names(self, way: Way) -> list[str]:
        """In the order in which they are written: as `properties` lists them, those that must be absent last."""
        named = [(name, state) for group in way.fields for name, state in group.properties]
        wanted = [name for name, state in named if state != NEVER]
        return list(dict.fromkeys((*wanted, *way.required, *(name for name, _ in named))))

    def _is_closed(self, way: Way) -> bool:
        """Whether only known keys are possible."""
        if any(group.patterns for group in way.fields):
            return False
        return any(group.additional is not None and self.is_impossible(group.additional) for group in way.fields)

    def _item_state(self, way: Way, index: int) -> State:
        atoms: list[tuple[str, bool]] = []
        for group in way.items:
            state = group.prefix[index] if index < len(group.prefix) else group.rest
            atoms += state or ()
        return tuple(dict.fromkeys(atoms))

    # -- writing

    def schema_of(self, state: State) -> Json:
        """The state as one plain schema; False where no value is in it."""
        state = tuple(dict.fromkeys(state))
        if not state:
            return True
        if state in self._in_progress:
            name = self._names.setdefault(state, f"n{len(self._names)}")
            return {"$ref": f"#/$defs/{name}"}
        if state in self._written:
            return self._shared(state)
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise ConstraintError(f"the schema has more than {MAX_NODES} parts when written out; simplify it")
        self._in_progress.add(state)
        try:
            schema = self._union([way for kind in KINDS for way in self.ways(state, kind)], state[-1][0])
        finally:
            self._in_progress.discard(state)
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
        name = self._names[state]
        self.definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}

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
            branches.append({"enum": distinct})
        if not branches:
            return False
        types = [branch.get("type") for branch in branches]
        if set(map(str, types)) == set(KINDS) and all(branch.keys() == {"type"} for branch in branches):
            return True
        if len(branches) == 1:
            return branches[0]
        if None not in types and len(set(map(str, types))) == len(types) and not {"integer", "number"} <= set(types):
            merged: dict[str, Json] = {"type": types}
            keys = [key for branch in branches for key in branch if key != "type"]
            if len(keys) == len(set(keys)) and "not" not in keys:  # which would bind the other kinds as well
                for branch in branches:
                    merged |= {key: value for key, value in branch.items() if key != "type"}
                return merged
        distinct_branches = list({json_text(branch): branch for branch in branches}.values())
        return {"anyOf": list[Json](distinct_branches)} if len(distinct_branches) > 1 else distinct_branches[0]

    def _branches(self, way: Way, place: str) -> list[dict[str, Json]]:
        match way.kind:
            case "number":
                return number_schemas(way, place)
            case "string":
                return [self._strings.schema(way)]
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
        names = self._known_names(way)
        keys: str | None = None
        if way.names:
            allowed = self.ways(way.names, "string")
            if all(found.values is not None for found in allowed):
                listed = [str(value) for found in allowed for value in found.values or ()]
                names = list(dict.fromkeys((*[name for name in names if name in listed], *listed)))
                way = replace(way, fields=(*way.fields, Fields(tuple((n, ()) for n in listed), (), NEVER)), names=())
            else:
                keys = self._key_pattern(allowed)
        states = {name: self._field_state(way, name) for name in names}
        impossible = {name for name in names if self.is_impossible(states[name])}
        if any(name in impossible for name in way.required):
            return []
        possible = {name: states[name] for name in names if name not in impossible}
        rest, patterns = self._regions(way, keys, possible, place)
        is_closed = not patterns and self.is_impossible(rest)
        optional = [name for name in names if name not in way.required and name not in impossible]
        written: list[dict[str, Json]] = []
        for present, absent, least, most in presences(way, optional, is_closed, place):
            properties: dict[str, Json] = {}
            for name in names:
                properties[name] = False if name in impossible or name in absent else self.schema_of(states[name])
                if properties[name] is False and (name in way.required or name in present):
                    break
            else:
                required: list[Json] = [name for name in names if name in way.required or name in present]
                schema: dict[str, Json] = {"type": "object"}
                if properties:
                    schema["properties"] = properties
                if required:
                    schema["required"] = required
                regions = {regex: self.schema_of(state) for regex, state in patterns}
                if regions:
                    schema["patternProperties"] = regions
                additional = self.schema_of(rest)
                if additional is not True:
                    schema["additionalProperties"] = additional
                if least > len(required):
                    schema["minProperties"] = least
                if most is not None:
                    schema["maxProperties"] = most
                written.append(schema)
        return written

    def _key_pattern(self, ways: Sequence[Way]) -> str:
        """propertyNames as one pattern of keys."""
        options = []
        for way in ways:
            if way.values is not None:
                options.append(f"^(?:{'|'.join(escaped_text(str(value)) for value in way.values)})$")
            else:
                schema = self._strings.schema(way)
                bounds = f"{{{way.least},{'' if way.most is None else way.most}}}"
                lengths = [rf"^[\s\S]{bounds}$"] if way.least or way.most is not None else []
                options.append(joined([*([str(schema["pattern"])] if "pattern" in schema else []), *lengths]))
        return options[0] if len(options) == 1 else "|".join(f"(?:{option})" for option in options)

    def _regions(
        self, way: Way, keys: str | None, known: dict[str, State], place: str
    ) -> tuple[State, list[tuple[str, State]]]:
        """What is asked of keys that no name covers: the rest, and disjoint patterns of keys with theirs.

        Overlapping patterns become one region for each set of them that a key can match.
        """
        sources = dict.fromkeys(regex for group in way.fields for regex, _ in group.patterns)
        patterns = [regex for regex in sources if regex not in UNIVERSAL_PATTERNS]
        terms = {regex: self._strings.term(regex, f"{place}/patternProperties") for regex in patterns}
        regions: list[tuple[frozenset[str], str]] = []
        for chosen in self._overlaps(patterns, terms, place):
            others = [regex for regex in patterns if regex not in chosen and self._meet(terms, regex, chosen)]
            wanted = [*chosen, *([keys] if keys is not None else [])]
            regions.append((frozenset(chosen), joined(wanted, others)))
        if keys is not None:
            regions.append((frozenset(), joined([keys], patterns)))
        merged: dict[State, list[str]] = {}
        for matched, regex in regions:
            state = _state_of_key(way, matched)
            if self.is_impossible(state) and not patterns:
                continue
            # A written pattern also binds the known keys that match it, where they are not bound as much already.
            bound = [
                name
                for name, found in known.items()
                if not set(state) <= set(found) and self._strings.matches(regex, name, place)
            ]
            merged.setdefault(state, []).append(joined([regex], names=bound) if bound else regex)
        found = [
            (regexes[0] if len(regexes) == 1 else "|".join(f"(?:{regex})" for regex in regexes), state)
            for state, regexes in merged.items()
        ]
        rest = NEVER if keys is not None else _state_of_key(way, frozenset())
        if self.is_impossible(rest):
            found = [(regex, state) for regex, state in found if not self.is_impossible(state)]
        return rest, found

    def _overlaps(self, patterns: list[str], terms: dict[str, Term | None], place: str) -> Iterator[tuple[str, ...]]:
        """The sets of patterns that one key can match, but the empty one."""
        yield from ((regex,) for regex in patterns)
        meeting = [(one, other) for one, other in combinations(patterns, 2) if self._meet(terms, one, (other,))]
        involved = [regex for regex in patterns if any(regex in pair for pair in meeting)]
        if len(involved) > MAX_OVERLAPPING:
            raise refused(f"{place}/patternProperties", f"{len(involved)} patterns overlap, at most {MAX_OVERLAPPING}")
        for size in range(2, len(involved) + 1):
            for chosen in combinations(involved, size):
                if all(pair in meeting for pair in combinations(chosen, 2)):
                    yield chosen

    def _meet(self, terms: dict[str, Term | None], regex: str, others: Sequence[str]) -> bool:
        """Whether a key may match the pattern and all the others."""
        found = [terms[name] for name in (regex, *others)]
        known = [term for term in found if term is not None]
        if len(known) < len(found):
            return True
        languages = self._strings.languages
        return languages.is_empty(languages.all_of(known)) is not True

    # arrays

    def _array_schemas(self, way: Way, place: str) -> list[dict[str, Json]]:
        if way.excluded:
            raise refused(place, "that an array is not a certain one cannot be enforced")
        length = max((len(group.prefix) for group in way.items), default=0)
        rest = self._item_state(way, length)
        most = way.most
        for index in range(length + 1):
            if (most is None or index < most) and self.is_impossible(self._item_state(way, index)):
                most = index
        if most is not None and way.least > most:
            return []
        way = replace(way, most=most)
        is_unique = way.unique_at is not None and (most is None or most > 1)
        contains = [found for found in way.contains if found.low > 0 or found.high is not None]
        if is_unique or contains:
            described = self._array_automaton(way, contains, is_unique, length)
            return [] if described is None else [described]
        prefix = [self.schema_of(self._item_state(way, index)) for index in range(length)]
        if most is not None:
            prefix = prefix[:most]
        schema: dict[str, Json] = {"type": "array"}
        if prefix:
            schema["prefixItems"] = prefix
        if most is None or most > len(prefix):
            items = self.schema_of(rest)
            if items is not True:
                schema["items"] = items
        if way.least:
            schema["minItems"] = way.least
        if most is not None:
            schema["maxItems"] = most
        return [schema]

    def _array_automaton(
        self, way: Way, contains: Sequence[Contains], is_unique: bool, length: int
    ) -> dict[str, Json] | None:
        pointer = (way.unique_at if is_unique else None) or contains[0].pointer
        known: dict[int, list[Step]] = {}
        numbers: dict[str, int] = {}

        def steps(index: int) -> list[Step]:
            if index not in known:
                state = self._item_state(way, index)
                known[index] = list(
                    self._unique_steps(state, contains, numbers, pointer)
                    if is_unique
                    else self._counted_steps(state, contains)
                )
            return known[index]

        wanted = [Wanted(found.low, found.high) for found in contains]
        return automaton(steps, length, way.least, way.most, wanted, pointer)

    def _unique_steps(
        self, state: State, contains: Sequence[Contains], numbers: dict[str, int], pointer: str
    ) -> Iterator[Step]:
        """uniqueItems (validation 6.4.3) over finitely many values: each is used once."""
        values = self._finite(state)
        if values is None:
            raise refused(pointer, "can be enforced only where the items are finitely many, or at most one")
        for value in values:
            counts = frozenset(i for i, found in enumerate(contains) if self.accepts(found.state, value))
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
        for way in (way for kind in KINDS for way in self.ways(state, kind)):
            values = whole_numbers(way) if way.values is None else way.values
            if values is None:
                return None
            listed |= {identity(value): value for value in values}
        return list(listed.values())


def _state_of_key(way: Way, matched: frozenset[str]) -> State:
    """What is asked of the value of a key that matches just these patterns, and that no name covers."""
    atoms: list[Atom] = []
    for group in way.fields:
        found = [state for regex, state in group.patterns if regex in matched or regex in UNIVERSAL_PATTERNS]
        if not found and group.additional is not None:
            found = [group.additional]
        atoms += [atom for state in found for atom in state]
    return tuple(dict.fromkeys(atoms))


def _fits(size: int, way: Way) -> bool:
    return way.least <= size and (way.most is None or size <= way.most)
