"""From a schema's text to its normal form: one schema of plain keywords that the engine enforces exactly.

Every schema becomes, for each kind of value, an "or" of facts (`ways.py`); this file looks into them (is one empty?
does it hold for a constant?) and writes them down again, each state once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, permutations, product
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.schema.cost import cost_of
from niwaki.runtime.constraints.schema.document import Json, canonical, identity, json_text, read_schema, refused
from niwaki.runtime.constraints.schema.facts import KINDS, NEVER, Exists, Fields, Items, State, Way, both, contradicts
from niwaki.runtime.constraints.schema.formats import FORMAT_PATTERNS
from niwaki.runtime.constraints.schema.patterns import all_but, matches
from niwaki.runtime.constraints.schema.references import Document
from niwaki.runtime.constraints.schema.ways import Circular, Expander, kind_of

MAX_VARIANTS: Final = 256  # of one object by which keys are present, of one array by which item is contained
MAX_ARRANGEMENTS: Final = 2000  # of a finite array of unique items
MAX_EXCLUDED_NUMBERS: Final = 16
MAX_CONTAINED: Final = 16
MAX_NODES: Final = 20_000
MAX_LOOKS: Final = 8  # how deep emptiness looks into required values
EXACT_WHOLE: Final = 2**53  # the engine reads bounds as float64
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
            return _fits(len(value), way) and all(matches(pattern, value, place) for pattern, place in way.patterns)
        if isinstance(value, list):
            return self._array_satisfies(value, way)
        if isinstance(value, dict):
            return self._object_satisfies(value, way)
        return value is None or isinstance(value, bool) or _number_satisfies(value, way)

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
            and not any(matches(regex, name, wanted.pointer) for regex in wanted.patterns)
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
            found += [state for regex, state in group.patterns if matches(regex, name, "patternProperties")]
            if not found and group.additional is not None:
                found = [group.additional]
            atoms += [atom for state in found for atom in state]
        return tuple(dict.fromkeys(atoms))

    def _known_names(self, way: Way) -> list[str]:
        named = [name for group in way.fields for name, _ in group.properties]
        return list(dict.fromkeys((*named, *way.required)))

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
            if len(keys) == len(set(keys)) and "allOf" not in keys:  # which would bind the other kinds as well
                for branch in branches:
                    merged |= {key: value for key, value in branch.items() if key != "type"}
                return merged
        distinct_branches = list({json_text(branch): branch for branch in branches}.values())
        return {"anyOf": list[Json](distinct_branches)} if len(distinct_branches) > 1 else distinct_branches[0]

    def _branches(self, way: Way, place: str) -> list[dict[str, Json]]:
        match way.kind:
            case "number":
                return _number_schemas(way, place)
            case "string":
                return [_string_schema(way)]
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
        key_pattern: str | None = None
        if way.names:
            allowed = self.ways(way.names, "string")
            if all(found.values is not None for found in allowed):
                listed = [str(value) for found in allowed for value in found.values or ()]
                names = list(dict.fromkeys((*[name for name in names if name in listed], *listed)))
                way = replace(way, fields=(*way.fields, Fields(tuple((n, ()) for n in listed), (), NEVER)), names=())
            else:
                key_pattern = _key_pattern(allowed, way.names[0][0])
        states = {name: self._field_state(way, name) for name in names}
        impossible = {name for name in names if self.is_impossible(states[name])}
        if any(name in impossible for name in way.required):
            return []
        rest, patterns = self._regions(way, key_pattern)
        if self.is_impossible(rest):
            patterns = [(regex, state) for regex, state in patterns if not self.is_impossible(state)]
        for regex, state in patterns:
            # A written pattern also binds the known keys that match it, so they must be bound as much already.
            for name in names:
                if name not in impossible and matches(regex, name, place) and not set(state) <= set(states[name]):
                    raise refused(place, f"the pattern {regex!r} and the key {name!r} cannot be enforced together")
        is_closed = not patterns and self.is_impossible(rest)
        optional = [name for name in names if name not in way.required and name not in impossible]
        written: list[dict[str, Json]] = []
        for present, absent, least, most in _presences(way, optional, is_closed, place):
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

    def _regions(self, way: Way, key_pattern: str | None) -> tuple[State, list[tuple[str, State]]]:
        """What is asked of keys that no name covers: the rest, and those of each pattern (which must be disjoint)."""
        everywhere: list[tuple[str, bool]] = []
        by_pattern: dict[str, list[tuple[str, bool]]] = {}
        for group in way.fields:
            for regex, state in group.patterns:
                if regex in UNIVERSAL_PATTERNS:
                    everywhere += state
                else:
                    by_pattern.setdefault(regex, [])
        if key_pattern is not None:
            if by_pattern and list(by_pattern) != [key_pattern]:
                raise refused(way.names[0][0], "a pattern of keys beside patternProperties cannot be enforced")
            by_pattern.setdefault(key_pattern, [])
        rest: list[tuple[str, bool]] = list(everywhere)
        for group in way.fields:
            known = dict(group.patterns)
            covers_all = any(regex in UNIVERSAL_PATTERNS for regex in known)
            for regex, atoms in by_pattern.items():
                if regex in known:
                    atoms += known[regex]
                elif group.additional is not None and not covers_all:
                    atoms += group.additional
            if group.additional is not None and not covers_all:
                rest += group.additional
        if key_pattern is not None:
            rest = list(NEVER)
        patterns = [(regex, tuple(dict.fromkeys((*everywhere, *atoms)))) for regex, atoms in by_pattern.items()]
        merged: dict[State, list[str]] = {}
        for regex, state in patterns:  # equal ones may overlap, as one pattern
            merged.setdefault(state, []).append(regex)
        joined = [
            (found[0] if len(found) == 1 else "|".join(f"(?:{regex})" for regex in found), state)
            for state, found in merged.items()
        ]
        return tuple(dict.fromkeys(rest)), joined

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
        if way.contains:
            return [schema for variant in self._contained(way) for schema in self._array_schemas(variant, place)]
        if way.unique_at is not None and (most is None or most > 1):
            arrangements = self._arrangements(way, length)
            return [{"enum": list[Json](arrangements)}] if arrangements else []
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

    def _contained(self, way: Way) -> Iterator[Way]:
        """`contains` one by one: no item, all items, or in a short array one item at each place."""
        first, others = way.contains[0], replace(way, contains=way.contains[1:])
        place = first.pointer
        fails: State = tuple((pointer, not holds) for pointer, holds in first.state)
        if first.low == 0 and first.high is None:
            yield others
        elif first.high == 0:
            if len(first.state) != 1:
                raise refused(place, "cannot be enforced here")
            yield replace(others, items=(*others.items, Items((), fails)))
        elif first.high is None and all(
            self.is_impossible((*self._item_state(way, i), *fails)) for i in range(_prefix_length(way) + 1)
        ):
            found = replace(others, least=max(way.least, first.low))  # every item is one
            if not contradicts(found):
                yield found
        elif first.low == 1 and first.high is None and way.most is not None and way.most <= MAX_CONTAINED:
            for index in range(way.most):
                prefix = (*(fails for _ in range(index)), first.state)
                found = replace(others, least=max(way.least, index + 1), items=(*others.items, Items(prefix)))
                if not self.is_empty(found):
                    yield found
        else:
            raise refused(
                place,
                f"can be enforced only in arrays of at most {MAX_CONTAINED} items (maxItems), "
                "without minContains and maxContains",
            )

    def _arrangements(self, way: Way, length: int) -> list[list[Json]]:
        """All arrays of a way whose items are finite and distinct."""
        place = way.unique_at or ""
        longest = way.most
        choices: list[list[Json]] = []
        for index in range(length + 1):
            values = self._finite(self._item_state(way, index))
            if values is None:
                raise refused(place, "can be enforced only where the items are finitely many, or at most one")
            choices.append(values)
        distinct = {identity(value) for values in choices for value in values}
        longest = len(distinct) if longest is None else min(longest, len(distinct))
        found: list[list[Json]] = []
        for size in range(way.least, longest + 1):
            places = [choices[min(index, length)] for index in range(size)]
            candidates = permutations(places[0], size) if length == 0 and size else product(*places)
            for items in candidates:
                if len(set(map(identity, items))) == size:
                    found.append([canonical(item) for item in items])
                if len(found) > MAX_ARRANGEMENTS:
                    raise refused(place, f"its arrays are more than {MAX_ARRANGEMENTS} when written out")
        return found

    def _finite(self, state: State) -> list[Json] | None:
        """All values of a state, or None where they are not listed."""
        ways = [way for kind in KINDS for way in self.ways(state, kind)]
        if any(way.values is None for way in ways):
            return None
        return list({identity(value): value for way in ways for value in way.values or ()}.values())


def _presences(
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
    elif least >= 2 and not is_closed:
        raise refused(
            place,
            f"minProperties {way.least}: where any keys are allowed, at most one beside the required ones can be asked "
            "for (a key could come twice); list the keys, or set additionalProperties to false",
        )
    elif most is None:
        if math.comb(len(optional), least) > MAX_VARIANTS:
            raise refused(place, too_many)
        for first in combinations(range(len(optional)), least):  # the first `least` of those that are present
            present = frozenset(optional[i] for i in first)
            yield present, frozenset(optional[i] for i in range(first[-1]) if i not in first), 0, None
        if not is_closed:
            yield none, frozenset(optional), len(way.required) + least, None
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


def _key_pattern(ways: Sequence[Way], pointer: str) -> str:
    """propertyNames as one pattern of keys."""
    if not ways:
        raise refused(pointer, "no key satisfies it; set additionalProperties to false instead")
    if len(ways) > 1 or ways[0].values is not None or ways[0].excluded:
        raise refused(pointer, "only a list of keys, a pattern or a length can be enforced for keys")
    way = ways[0]
    patterns = [pattern for pattern, _ in way.patterns]
    patterns += [FORMAT_PATTERNS[name] for name, _ in way.formats if name in FORMAT_PATTERNS]
    is_known = len(patterns) == len(way.patterns) + len(way.formats)
    if not is_known or len(patterns) > 1 or (patterns and (way.least > 0 or way.most is not None)):
        raise refused(pointer, "only one pattern or a length can be enforced for keys")
    if patterns:
        return patterns[0]
    return f"^[\\s\\S]{{{way.least},{'' if way.most is None else way.most}}}$"


def _prefix_length(way: Way) -> int:
    return max((len(group.prefix) for group in way.items), default=0)


def _fits(size: int, way: Way) -> bool:
    return way.least <= size and (way.most is None or size <= way.most)


def _number_satisfies(value: float, way: Way) -> bool:
    exact = Fraction(value) if isinstance(value, int) else Fraction(repr(value))
    if way.low is not None and (exact < way.low[0] or (exact == way.low[0] and way.low[1])):
        return False
    if way.high is not None and (exact > way.high[0] or (exact == way.high[0] and way.high[1])):
        return False
    if way.is_whole is not None and (exact.denominator == 1) != way.is_whole:
        return False
    return all((exact / step).denominator == 1 for step in way.multiples)


def _number_schemas(way: Way, place: str) -> list[dict[str, Json]]:
    """Bounds, with the excluded numbers cut out of the range."""
    if way.is_whole is False:
        raise refused(place, "that a number is not whole cannot be enforced")
    numbers = sorted(
        Fraction(value) if isinstance(value, int) else Fraction(repr(value))
        for value in way.excluded
        if isinstance(value, int | float)
    )
    if len(numbers) > MAX_EXCLUDED_NUMBERS:
        raise refused(place, f"{len(numbers)} excluded numbers are too many: at most {MAX_EXCLUDED_NUMBERS}")
    pieces = [way]
    for number in numbers:
        cuts = [Way("number", high=(number, True)), Way("number", low=(number, True))]
        pieces = [found for piece in pieces for cut in cuts if (found := both(piece, cut)) is not None]
    return [schema for piece in pieces if (schema := _range_schema(piece, place)) is not None]


def _range_schema(way: Way, place: str) -> dict[str, Json] | None:
    schema: dict[str, Json] = {"type": "integer" if way.is_whole else "number"}
    low, high = way.low, way.high
    if way.is_whole:
        if low is not None:
            bound = math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
            low = (Fraction(bound), False)
        if high is not None:
            bound = math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
            high = (Fraction(bound), False)
        if low is not None and high is not None and low[0] > high[0]:
            return None
    if low is not None:
        schema["exclusiveMinimum" if low[1] else "minimum"] = _as_number(low[0], 1, place)
    if high is not None:
        schema["exclusiveMaximum" if high[1] else "maximum"] = _as_number(high[0], -1, place)
    if way.multiples:
        step = way.multiples[0]
        for other in way.multiples[1:]:  # the least common multiple of fractions
            step = Fraction(math.lcm(step.numerator, other.numerator), math.gcd(step.denominator, other.denominator))
        if not (way.is_whole and step == 1):
            schema["multipleOf"] = _as_number(step, 0, place)
    return schema


def _as_number(value: Fraction, towards: int, place: str) -> Json:
    """The bound as the engine reads it, a float64: where that is not exact, the next one inside the range."""
    if value.denominator == 1 and abs(value) <= EXACT_WHOLE:
        return int(value)
    near = float(value)
    if Fraction(repr(near)) == value and (value.denominator != 1 or Fraction(near) == value):
        return int(value) if value.denominator == 1 else near
    if towards == 0:
        raise refused(place, f"multipleOf {value} cannot be enforced exactly")
    while (Fraction(near) - value) * towards < 0:
        near = math.nextafter(near, math.inf * towards)
    return int(near) if near.is_integer() else near


def _string_schema(way: Way) -> dict[str, Json]:
    patterns = [pattern for pattern, _ in way.patterns]
    formats = [name for name, _ in way.formats if name not in FORMAT_PATTERNS]
    patterns += [FORMAT_PATTERNS[name] for name, _ in way.formats if name in FORMAT_PATTERNS]
    if way.excluded:
        patterns.append(all_but([value for value in way.excluded if isinstance(value, str)]))
    schema: dict[str, Json] = {"type": "string"}
    if way.least:
        schema["minLength"] = way.least
    if way.most is not None:
        schema["maxLength"] = way.most
    if patterns:
        schema["pattern"] = patterns[0]
    if formats:
        schema["format"] = formats[0]
    more: list[Json] = [{"type": "string", "pattern": pattern} for pattern in patterns[1:]]
    more += [{"type": "string", "format": name} for name in formats[1:]]
    if not more:
        return schema
    return {"type": "string", "allOf": [schema, *more]}
