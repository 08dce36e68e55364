"""Arrays of a normal schema whose items never repeat and are too many to list (validation 6.4.3): where they are, and
what their items must be like so that a check beside the mask enforces them exactly.

A value that was used must not come again, and no text may be begun that could only end as such a value. So an item is
either spelled in one way only, where a used one is told by its bytes, or it can always go on with another key or item.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, TypeAlias

from niwaki.runtime.constraints.schema.document import Json, json_text, refused
from niwaki.runtime.constraints.schema.presence import witnesses
from niwaki.runtime.constraints.schema.ranges import is_range, short_decimals

State: TypeAlias = tuple[dict[str, Json], ...]  # the parts of a schema that a value at some place may be read by
DISTINCT: Final = "uniqueItems"  # of a normal array: the pointer of the keyword
# Of a normal object that asks for two unknown keys and more, of which none may come twice: the pointer of the object.
DISTINCT_KEYS: Final = "x-distinct-keys"
ANYTHING: Final[dict[str, Json]] = {}
MAX_PLACES: Final = 5000
WITNESS: Final = "x-witness"
ENDLESS: Final = 1 << 30
MILLION: Final = 10**6
MANY_LETTERS: Final = 64  # of any string that no pattern describes, and more
LOWER: Final = frozenset({"minimum", "exclusiveMinimum"})
UPPER: Final = frozenset({"maximum", "exclusiveMaximum"})
INCLUSIVE: Final = frozenset({"minimum", "maximum"})
BOUNDS: Final = LOWER | UPPER | {"multipleOf"}


class Layout:
    """The places of a normal schema's values: each is the parts that may describe it, "or" and references resolved."""

    def __init__(self, root: Json) -> None:
        self._root = root
        definitions = root.get("$defs") if isinstance(root, dict) else None
        self._definitions = definitions if isinstance(definitions, dict) else {}
        self._states: dict[tuple[int, ...], State] = {}
        self._items: dict[tuple[int, int], State] = {}
        self._members: dict[tuple[int, str | None], State] = {}
        self._constants: dict[str, dict[str, Json]] = {}
        self._once: dict[int, bool] = {}
        self.start = self.of([root])

    def of(self, schemas: list[Json]) -> State:
        found: dict[int, dict[str, Json]] = {}
        passed: set[str] = set()
        stack = schemas[::-1]
        while stack:
            schema = stack.pop()
            if not isinstance(schema, dict):
                if schema:
                    found[id(ANYTHING)] = ANYTHING
            elif isinstance(reference := schema.get("$ref"), str):
                if reference not in passed:
                    passed.add(reference)
                    stack.append(self._definitions[reference.removeprefix("#/$defs/")])
            elif isinstance(branches := schema.get("anyOf"), list):
                stack += reversed(branches)
            elif schema.keys() <= {"$defs"}:
                found[id(ANYTHING)] = ANYTHING
            else:
                found[id(schema)] = schema
        return self._states.setdefault(tuple(found), tuple(found.values()))

    def item(self, state: State, index: int) -> State:
        """What an item at the place may be."""
        index = min(index, self.num_places(state))
        key = (id(state), index)
        if key not in self._items:
            parts = [part for schema in state for part in self._items_of(schema, index)]
            self._items[key] = self.of(parts)
        return self._items[key]

    def num_places(self, state: State) -> int:
        """Behind so many items all others are alike."""
        return max((len(_listed(schema, "prefixItems")) for schema in state), default=0)

    def member(self, state: State, name: str) -> State:
        """What the value of a key may be."""
        key = (id(state), name if self.is_named(state, name) else None)
        if key not in self._members:
            parts = [part for schema in state for part in self._values_of(schema, name)]
            self._members[key] = self.of(parts)
        return self._members[key]

    def is_distinct(self, state: State, keyword: str) -> bool:
        return any(keyword in schema for schema in state)

    def is_named(self, state: State, name: str) -> bool:
        """Whether some part names the key."""
        return any(name in _named(schema) or name in _constant_names(schema) for schema in state)

    def is_alike(self, state: State, index: int) -> bool:
        """Whether the items at this place and the next are read by the same one part."""
        arrays = [schema for schema in state if "array" in kinds_of(schema)]
        if len(arrays) != 1 or "x-automaton" in arrays[0]:
            return False
        return self.item(state, index) is self.item(state, index + 1)

    def spells_once(self, schema: dict[str, Json]) -> bool:
        """Whether every value of the part is spelled in one way only, with what `lark.py` writes for such parts."""
        known = self._once.get(id(schema))
        if known is None:
            known = self._once[id(schema)] = all(_is_spelled_once(part) for part in self._parts_of(schema))
        return known

    def children(self, state: State) -> list[State]:
        names = {name for schema in state for name in (*_named(schema), *_constant_names(schema))}
        found = [self.member(state, name) for name in sorted(names)]
        # No schema has a key of this name, so it stands for all others.
        found.append(self.of([part for schema in state for part in self._values_of(schema, None)]))
        found += [self.item(state, index) for index in range(self.num_places(state) + 1)]
        return [child for child in found if child]

    def _parts_of(self, schema: dict[str, Json]) -> list[dict[str, Json]]:
        """The part and all that its values hold."""
        reached = {id(schema): schema}
        order = [schema]
        for part in order:
            for child in self.children(self.of([part])) if part is not ANYTHING else ():
                for other in child:
                    if id(other) not in reached:
                        reached[id(other)] = other
                        order.append(other)
        return order

    def _items_of(self, schema: dict[str, Json], index: int) -> list[Json]:
        if schema is ANYTHING:
            return [ANYTHING]
        if "enum" in schema:
            return [self._constant(value[index]) for value in _lists(schema) if index < len(value)]
        if "array" not in kinds_of(schema):
            return []
        if isinstance(described := schema.get("x-automaton"), dict):
            edges = described["edges"]
            assert isinstance(edges, list)
            return [edge[0] for found in edges if isinstance(found, list) for edge in found if isinstance(edge, list)]
        most = schema.get("maxItems")
        if isinstance(most, int) and index >= most:
            return []
        places = _listed(schema, "prefixItems")
        return [places[index] if index < len(places) else schema.get("items", True)]

    def _values_of(self, schema: dict[str, Json], name: str | None) -> list[Json]:
        if schema is ANYTHING:
            return [ANYTHING]
        if "enum" in schema:
            return [self._constant(value[name]) for value in _dicts(schema) if name in value]
        if "object" not in kinds_of(schema):
            return []
        if name is not None and name in _named(schema):
            return [_named(schema)[name]]
        patterned = schema.get("patternProperties")
        found = [*patterned.values()] if isinstance(patterned, dict) else []
        if WITNESS in schema:
            found += [value for _, value in (*witnesses(schema), *witnesses(schema, "behind"))]
        return [*found, schema.get("additionalProperties", True)]

    def _constant(self, value: Json) -> Json:
        return self._constants.setdefault(json_text(value), {"enum": [value]})


def check_distinct(root: Json) -> None:
    """Raises ConstraintError where an array's items cannot be kept from repeating exactly."""
    layout = Layout(root)
    order = [layout.start]
    known = {id(layout.start)}
    for state in order:
        pointers = [str(schema[DISTINCT]) for schema in state if DISTINCT in schema]
        if len(order) > MAX_PLACES:
            raise refused("", f"with uniqueItems a schema may have {MAX_PLACES} kinds of places; simplify it")
        if pointers:
            _check_array(layout, state, pointers[0])
        _check_keys(state)
        for child in layout.children(state):
            if id(child) not in known:
                known.add(id(child))
                order.append(child)


def _check_array(layout: Layout, state: State, pointer: str) -> None:
    for schema in state:
        if DISTINCT not in schema and (schema is ANYTHING or "array" in kinds_of(schema) or _lists(schema)):
            raise refused(pointer, "cannot be enforced where an array may also be one whose items may repeat")
    least = max(count if isinstance(count := schema.get("minItems", 0), int) else 0 for schema in state)
    for index in sorted({*range(layout.num_places(state) + 1), max(0, least - 1)}):
        items = layout.item(state, index)
        for kind, can_go_on in (("object", goes_on_as_object), ("array", goes_on_as_array)):
            parts = [part for part in items if part is ANYTHING or kind in kinds_of(part)]
            if not all(map(layout.spells_once, parts)) and not all(map(can_go_on, parts)):
                raise refused(
                    pointer,
                    f"cannot be enforced where an item is an {kind} that can neither always go on nor has one spelling",
                )
        if any("number" in kinds_of(part) and part.keys() & BOUNDS and not is_range(part) for part in items):
            raise refused(pointer, "cannot be enforced over numbers with steps that need not be whole")
        if index < least and _count_of(layout, items) <= index:
            raise refused(pointer, f"cannot be enforced: it is not seen that there are {least} different items")


def _check_keys(state: State) -> None:
    pointers = [str(schema[DISTINCT_KEYS]) for schema in state if DISTINCT_KEYS in schema]
    for schema in state if pointers else ():
        is_object = schema is ANYTHING or "object" in kinds_of(schema)
        if is_object and (WITNESS in schema or not (DISTINCT_KEYS in schema or _spells_keys_once(schema))):
            reason = "cannot be enforced where an object may also be one whose keys may repeat"
            raise refused(f"{pointers[0]}/minProperties", reason)


def _spells_keys_once(schema: dict[str, Json]) -> bool:
    return bool(_named(schema)) or "patternProperties" in schema or schema.get("additionalProperties") is False


def kinds_of(schema: dict[str, Json]) -> list[str]:
    kinds = schema.get("type")
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else [] if kinds is None else [str(kinds)]


def goes_on_as_object(schema: dict[str, Json]) -> bool:
    """Whether every object of the part can have another key."""
    are_few = DISTINCT_KEYS in schema and "patternProperties" in schema  # may be: of such a key only a new one counts
    is_open = schema.get("additionalProperties") is not False and not are_few
    return is_open and not schema.keys() & {"maxProperties", WITNESS}


def goes_on_as_array(schema: dict[str, Json]) -> bool:
    """Whether every array of the part can have another item."""
    return schema.get("items") is not False and not schema.keys() & {"maxItems", "x-automaton", DISTINCT}


def _is_spelled_once(schema: dict[str, Json]) -> bool:
    """Of the part itself, not of what its values hold."""
    if schema is ANYTHING:
        return False
    if "enum" in schema:
        return True
    kinds = kinds_of(schema)
    if "number" in kinds and schema.keys() & BOUNDS and not is_range(schema):
        return False
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return "object" not in kinds or (is_closed and WITNESS not in schema)


def _count_of(layout: Layout, state: State, depth: int = 3) -> int:
    """At least so many values."""
    return sum(_count_of_part(layout, schema, depth) for schema in state)


def _count_of_part(layout: Layout, schema: dict[str, Json], depth: int) -> int:
    if isinstance(values := schema.get("enum"), list):
        return len(values)
    return (
        ENDLESS if schema is ANYTHING else sum(_count_of_kind(layout, kind, schema, depth) for kind in kinds_of(schema))
    )


def _count_of_kind(layout: Layout, kind: str, schema: dict[str, Json], depth: int) -> int:
    match kind:
        case "boolean":
            return 2
        case "string" if "pattern" not in schema:
            most = schema.get("maxLength")
            return MANY_LETTERS ** min(most, 5) if isinstance(most, int) else ENDLESS
        case "integer" | "number":
            low, high = schema.get("minimum"), schema.get("maximum")
            if not schema.keys() & LOWER or not schema.keys() & UPPER:
                return ENDLESS
            if kind == "integer" and "not" in schema:
                return 1
            if isinstance(low, int) and isinstance(high, int) and not schema.keys() & BOUNDS - INCLUSIVE:
                # Between large whole numbers no fraction of so few digits may be left.
                has_fractions = kind == "number" and low < high and min(abs(low), abs(high)) <= MILLION
                return high - low + 1 + (MILLION if has_fractions else 0)
            if kind == "number" and is_range(schema):
                return max(1, len([*islice(short_decimals(schema), MANY_LETTERS)]))
        case "object":
            if goes_on_as_object(schema):
                return ENDLESS
            if depth and not schema.keys() & {WITNESS, "maxProperties"}:
                state = layout.of([schema])
                counts = [_count_of(layout, layout.member(state, name), depth - 1) for name in _named(schema)]
                return max(counts, default=1)
        case "array" if goes_on_as_array(schema):
            return ENDLESS
    return 1


def _listed(schema: dict[str, Json], key: str) -> list[Json]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _named(schema: dict[str, Json]) -> dict[str, Json]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _lists(schema: dict[str, Json]) -> list[list[Json]]:
    return [value for value in _listed(schema, "enum") if isinstance(value, list)]


def _dicts(schema: dict[str, Json]) -> list[dict[str, Json]]:
    return [value for value in _listed(schema, "enum") if isinstance(value, dict)]


def _constant_names(schema: dict[str, Json]) -> list[str]:
    return [name for value in _dicts(schema) for name in value]
