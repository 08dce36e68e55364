"""Schemas that are written down as they stand, without their ways: those that ask for a type, for keys or for items and
for nothing else. Most parts of most schemas are such."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final, TypeAlias

from niwaki.runtime.constraints.schema.document import Json, escaped
from niwaki.runtime.constraints.schema.facts import KINDS, NEVER, State
from niwaki.runtime.constraints.schema.formats import KNOWN_FORMATS
from niwaki.runtime.constraints.schema.keywords import LARGEST_LEAST, LARGEST_MOST, TYPES
from niwaki.runtime.constraints.schema.references import Document

TYPE: Final = frozenset({"type"})
REFERENCE: Final = frozenset({"$ref"})
OF_OBJECTS: Final = frozenset({"type", "properties", "required", "additionalProperties"})
OF_ARRAYS: Final = frozenset({"type", "items", "minItems", "maxItems"})
OF_LENGTHS: Final = frozenset({"type", "minLength", "maxLength"})
OF_TEXTS: Final = frozenset({"type", "enum"})
# With nothing but these, an empty object or array or any value of the type is in it.
UNDEMANDING: Final = TYPE | {
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "items",
    "prefixItems",
    "additionalItems",
}
ORDER: Final = {"integer": KINDS.index("number")} | {kind: place for place, kind in enumerate(KINDS)}

Write: TypeAlias = Callable[[State], Json]


class Plain:
    """The plain schemas of one document. `asking`: the keywords that ask for something."""

    def __init__(self, document: Document, asking: AbstractSet[str]) -> None:
        self._document = document
        self._asking = asking

    def behind(self, state: State) -> State:
        """The state with each reference that stands alone followed to what it leads to. Raises as `Document.target`."""
        return tuple(dict.fromkeys([(self._target(pointer) if holds else pointer, holds) for pointer, holds in state]))

    def _target(self, pointer: str) -> str:
        if pointer == NEVER[0][0]:
            return pointer
        place, passed = pointer, {pointer}
        while isinstance(schema := self._document.node(place), dict) and "$ref" in schema:
            if not self._document.is_old and self._asking & schema.keys() != REFERENCE:
                break
            place = self._document.target(place, "$ref", schema["$ref"])
            if place in passed:
                return pointer  # refers to itself, which its ways refuse
            passed.add(place)
        return place

    def is_possible(self, state: State) -> bool:
        """Whether some value is surely in the state."""
        schema = self._schema(state)
        if not isinstance(schema, dict):
            return schema is True
        asked = self._asking & schema.keys()
        return asked <= UNDEMANDING and ("type" not in asked or bool(_types(schema)))

    def written(self, state: State, write: Write) -> Json:
        """What the ways of the state would be written as, its parts by `write`; None where they must be asked."""
        schema = self._schema(state)
        if not isinstance(schema, dict):
            return schema if isinstance(schema, bool) else None
        asked = self._asking & schema.keys()
        if not asked:
            return True
        if "format" in asked and isinstance(schema["format"], str) and schema["format"] not in KNOWN_FORMATS:
            asked = asked - {"format"}
        if asked <= OF_TEXTS and _are_texts(schema.get("enum")) and schema.get("type", "string") == "string":
            return {"enum": list(dict.fromkeys(schema["enum"]))}  # type: ignore[arg-type]  # texts
        if "type" not in asked or not (names := _types(schema)):
            return None
        if asked == TYPE:
            return _of_types(names)
        others = [name for name in names if name != "null"]
        found = _of_type(others[0], asked, schema, state[0][0], write) if len(others) == 1 else None
        if found is None or len(names) == 1:
            return found
        return {**found, "type": ["null", others[0]]} if isinstance(found, dict) else {"type": "null"}

    def _schema(self, state: State) -> Json:
        """The one schema that the state says must hold; None where it says something else."""
        if len(state) != 1 or state[0] == NEVER[0] or not state[0][1]:
            return None
        return self._document.node(state[0][0])


def _are_texts(values: Json) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def _types(schema: dict[str, Json]) -> list[str]:
    """What `type` lists, each once; nothing where it lists what is no type."""
    found = schema["type"]
    names = found if isinstance(found, list) else [found]
    texts = [name for name in names if isinstance(name, str) and name in TYPES]
    return list(dict.fromkeys(texts)) if len(texts) == len(names) else []


def _of_types(names: list[str]) -> Json:
    distinct = set(names) - ({"integer"} if "number" in names else set())
    if distinct == set(KINDS):
        return True
    ordered: list[Json] = [*sorted(distinct, key=ORDER.__getitem__)]
    return {"type": ordered if len(ordered) > 1 else ordered[0]}


def _of_type(name: str, asked: AbstractSet[str], schema: dict[str, Json], pointer: str, write: Write) -> Json:
    if name == "object" and asked <= OF_OBJECTS:
        return _object(schema, pointer, write)
    if name == "array" and asked <= OF_ARRAYS:
        return _array(schema, pointer, write)
    if name == "string" and asked <= OF_LENGTHS:
        return _string(schema)
    return None


def _string(schema: dict[str, Json]) -> Json:
    return _sized({"type": "string"}, schema, "minLength", "maxLength")


def _sized(found: dict[str, Json], schema: dict[str, Json], low: str, high: str) -> Json:
    """`found` with bounds of a size; None where they are no plain ones."""
    least, most = schema.get(low, 0), schema.get(high)
    if type(least) is not int or least < 0 or (most is not None and (type(most) is not int or most < 0)):
        return None
    if least > LARGEST_LEAST:
        return None
    if most is not None and least > most:
        return False
    if least:
        found[low] = least
    if most is not None and most <= LARGEST_MOST:
        found[high] = most
    return found


def _object(schema: dict[str, Json], pointer: str, write: Write) -> Json:
    known, asked = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(known, dict) or not isinstance(asked, list) or not all(isinstance(name, str) for name in asked):
        return None
    rest: State = ((f"{pointer}/additionalProperties", True),) if "additionalProperties" in schema else ()
    wanted = set(asked)
    properties: dict[str, Json] = {}
    for name in dict.fromkeys((*known, *map(str, asked))):
        place: State = ((f"{pointer}/properties/{escaped(name)}", True),) if name in known else rest
        properties[name] = write(place)
        if properties[name] is False and name in wanted:
            return False
    found: dict[str, Json] = {"type": "object"}
    if properties:
        found["properties"] = properties
    if wanted:
        found["required"] = [name for name in properties if name in wanted]
    additional = write(rest)
    if additional is not True:
        found["additionalProperties"] = additional
    return found


def _array(schema: dict[str, Json], pointer: str, write: Write) -> Json:
    if isinstance(schema.get("items", True), list):
        return None  # as prefixItems were written up to 2019-09
    items = True if schema.get("maxItems") == 0 else write(((f"{pointer}/items", True),) if "items" in schema else ())
    if items is False:
        return None
    return _sized(
        {"type": "array"} if items is True else {"type": "array", "items": items}, schema, "minItems", "maxItems"
    )
