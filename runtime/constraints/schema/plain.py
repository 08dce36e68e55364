"""Schemas that are written down as they stand, without their ways: those that ask for a type, for keys or for items,
for one of some texts or for one of such schemas, and for nothing else. Most parts of most schemas are such."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple, TypeAlias

from niwaki.runtime.constraints.schema.document import Json, escaped, json_text
from niwaki.runtime.constraints.schema.facts import KINDS, NEVER, State
from niwaki.runtime.constraints.schema.formats import FORMAT_PATTERNS, KNOWN_FORMATS
from niwaki.runtime.constraints.schema.keywords import KIND_OF, LARGEST_LEAST, LARGEST_MOST, TYPES
from niwaki.runtime.constraints.schema.references import Document

TYPE: Final = frozenset({"type"})
REFERENCE: Final = frozenset({"$ref"})
ANY_OF: Final = frozenset({"anyOf"})
MOST_BRANCHES: Final = 32  # of anyOf; among more, those that no value satisfies are looked for first
OF_FORMATS: Final = frozenset({"type", "format"})
OF_TYPE: Final = {
    "object": frozenset({"type", "properties", "required", "additionalProperties"}),
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "string": frozenset({"type", "minLength", "maxLength", "format"}),
    **dict.fromkeys(("null", "boolean", "integer", "number"), TYPE),
}
SIZED_TEXT: Final = frozenset({"type", "minLength", "maxLength"})
ENUM: Final = frozenset({"type", "enum"})
COUNTING: Final = frozenset({"type", "required", "minItems", "maxItems", "minLength", "maxLength"})
OF_CONSTANTS: Final = (frozenset({"enum"}), frozenset({"const"}))
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
MAX_HOPS: Final = 8  # of anyOf in anyOf
MAX_OPTIONAL: Final = 2000  # keys of one object: the engine takes some 10 ms for each that is written
ORDER: Final = {"integer": KINDS.index("number")} | {kind: place for place, kind in enumerate(KINDS)}

Write: TypeAlias = Callable[[State], Json]


class Plain:
    """The plain schemas of one document. `asking`: the keywords that ask for something."""

    def __init__(self, document: Document, asking: AbstractSet[str]) -> None:
        self._document = document
        self._asking = asking
        self._possible: dict[str, bool] = {}  # by pointer, whether some value is surely there

    def behind(self, state: State) -> State:
        """The state with each reference that stands alone followed to what it leads to. Raises as `Document.target`."""
        if len(state) == 1:
            pointer, holds = state[0]
            target = self._target(pointer) if holds else pointer
            return state if target is pointer else ((target, holds),)
        return tuple(dict.fromkeys([(self._target(pointer) if holds else pointer, holds) for pointer, holds in state]))

    def _target(self, pointer: str) -> str:
        if pointer == NEVER[0][0]:
            return pointer
        place, passed = pointer, {pointer}
        while isinstance(schema := self._document.node(place), dict) and "$ref" in schema:
            if self._asking & schema.keys() != REFERENCE and not self._document.dialect(place).is_old:
                break
            place = self._document.target(place, "$ref", schema["$ref"])
            if place in passed:
                return pointer  # refers to itself, which its ways refuse
            passed.add(place)
        return place

    def is_possible(self, state: State) -> bool:
        """Whether some value is surely in the state."""
        if self._schema(state) is None:
            return False
        return self._has_value(state[0][0])

    def _has_value(self, pointer: str) -> bool:
        """Whether some value is surely in the schema there; what is asked again meanwhile is not known."""
        known = self._possible.get(pointer)
        if known is None:
            self._possible[pointer] = False
            known = self._possible[pointer] = self._surely_has_value(pointer)
        return known

    def _surely_has_value(self, pointer: str) -> bool:
        target = self._target(pointer)
        if target is not pointer:
            return self._has_value(target)
        schema = self._document.node(pointer)
        if not isinstance(schema, dict):
            return schema is True
        asked = self._asking & schema.keys()
        if asked == ANY_OF:
            places = self._branches(pointer, schema["anyOf"], MAX_HOPS)
            return any(map(self._has_value, places or ()))
        names = _types(schema) if "type" in asked else KINDS
        if asked <= UNDEMANDING:
            return bool(names)
        if asked <= SIZED_TEXT and "string" in names:
            return isinstance(_string(schema), dict)
        values = schema.get("enum")
        if isinstance(values, list) and asked <= ENUM:
            return any(isinstance(value, str) for value in values) and "string" in names
        if asked <= OF_TYPE["object"] and names == ["object"]:
            return self._has_required(schema, pointer)
        return False

    def _has_required(self, schema: dict[str, Json], pointer: str) -> bool:
        """Whether each key that must be there surely has a value."""
        known, asked = schema.get("properties", {}), schema["required"]
        if (
            not isinstance(known, dict)
            or not isinstance(asked, list)
            or not all(isinstance(name, str) for name in asked)
        ):
            return False
        rest = f"{pointer}/additionalProperties" if "additionalProperties" in schema else None
        places = (f"{pointer}/properties/{escaped(str(name))}" if name in known else rest for name in asked)
        return all(place is None or self._has_value(place) for place in places)

    def written(self, state: State, write: Write) -> Json:
        """What the ways of the state would be written as, its parts by `write`; None where they must be asked."""
        schema = self._schema(state)
        if not isinstance(schema, dict):
            return schema if isinstance(schema, bool) else None
        asked = self._asking & schema.keys()
        if not asked:
            return True
        pointer = state[0][0]
        if asked == ANY_OF:
            return self._any_of(pointer, schema["anyOf"], write)
        if isinstance(name := schema.get("type"), str) and name in TYPES and asked <= OF_TYPE[name]:  # most are such
            return {"type": name} if len(asked) == 1 else _of_type(name, asked, schema, pointer, write)
        found = self._asked(schema, asked, pointer)
        if found is None:
            return None
        options = _options(found, schema, pointer, write)
        return None if options is None else united(options, found.texts)

    def _any_of(self, pointer: str, branches: Json, write: Write) -> Json:
        places = self._branches(pointer, branches, MAX_HOPS)
        if places is None:
            return None
        asking: list[tuple[str, dict[str, Json], _Asked]] = []
        for place in places:
            schema = self._document.node(place)
            if not isinstance(schema, dict) or not (asked := self._asking & schema.keys()):
                return None
            found = self._asked(schema, asked, place)
            if found is None:
                return None
            asking.append((place, schema, found))
        free = {name for _, _, found in asking for name, words in found.kinds if words <= TYPE}
        if "number" in free:
            free.add("integer")
        options: list[dict[str, Json]] = [{"type": name} for name in free if name != "integer" or "number" not in free]
        for place, schema, found in asking:
            for name, words in found.kinds:
                if name in free:  # which admits it anyway
                    continue
                option = _of_type(name, words, schema, place, write)
                if option is None:
                    return None
                if isinstance(option, dict) and not (words <= COUNTING and option in options):
                    options.append(option)
        texts = [] if "string" in free else [text for _, _, found in asking for text in found.texts]
        return united(sorted(options, key=_place), list(dict.fromkeys(texts)))

    def _branches(self, pointer: str, branches: Json, hops: int) -> list[str] | None:
        """Where the branches of an `anyOf` stand, those of one that is a branch itself instead of it; None where they
        are too many, too deep or no branches."""
        if not isinstance(branches, list) or not 0 < len(branches) <= MOST_BRANCHES or not hops:
            return None
        places: list[str] = []
        for index in range(len(branches)):
            place = self._target(f"{pointer}/anyOf/{index}")
            schema = self._document.node(place)
            if isinstance(schema, dict) and self._asking & schema.keys() == ANY_OF:
                inner = self._branches(place, schema["anyOf"], hops - 1)
                if inner is None:
                    return None
                places += inner
            else:
                places.append(place)
        return places if len(places) <= MOST_BRANCHES else None

    def _asked(self, schema: dict[str, Json], asked: AbstractSet[str], pointer: str) -> _Asked | None:
        """What a schema with keywords asks; None where it is not plain."""
        if "format" in asked and isinstance(schema["format"], str) and schema["format"] not in KNOWN_FORMATS:
            asked = asked - {"format"}
        names = _types(schema) if "type" in asked else [*KINDS]
        if not names:
            return None
        if any(words & asked and asked <= words | TYPE for words in OF_CONSTANTS):
            self._document.check_words(pointer, schema)  # `const` came with draft 6
            return _constants(schema["enum"] if "enum" in asked else [schema["const"]], names)
        kinds: list[tuple[str, AbstractSet[str]]] = []
        for name in sorted(set(names) - ({"integer"} if "number" in names else set()), key=ORDER.__getitem__):
            kind = "number" if name == "integer" else name
            words = frozenset(
                word for word in asked if KIND_OF.get(word, kind) == kind and not _asks_nothing(word, schema[word])
            )
            if not words <= OF_TYPE[name]:
                return None
            kinds.append((name, words))
        return _Asked(kinds, [])

    def _schema(self, state: State) -> Json:
        """The one schema that the state says must hold; None where it says something else."""
        if len(state) != 1 or state[0] == NEVER[0] or not state[0][1]:
            return None
        return self._document.node(state[0][0])


class _Asked(NamedTuple):
    """By a plain schema: of each type of values by which keywords, and which texts."""

    kinds: Sequence[tuple[str, AbstractSet[str]]]
    texts: Sequence[Json]


def _options(asked: _Asked, schema: dict[str, Json], pointer: str, write: Write) -> list[dict[str, Json]] | None:
    """A plain schema for each type of values; None where their ways must be asked."""
    options: list[dict[str, Json]] = []
    for name, words in asked.kinds:
        found: Json = {"type": name} if words <= TYPE else _of_type(name, words, schema, pointer, write)
        if isinstance(found, dict):
            options.append(found)
        elif found is None:
            return None
    return options


def united(options: Sequence[dict[str, Json]], constants: Sequence[Json]) -> Json:
    """One schema of those of single kinds of values and of constants; False where there are none."""
    branches: list[dict[str, Json]] = [*options, {"enum": list(constants)}] if constants else list(options)
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
    distinct = _distinct(branches)
    return {"anyOf": list[Json](distinct)} if len(distinct) > 1 else distinct[0]


def _distinct(branches: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """Each once. Only those of the same outline, keywords and keys, are compared as texts."""
    outlines: dict[tuple[object, ...], list[dict[str, Json]]] = {}
    for branch in branches:
        keys = branch.get("properties")
        outline = (str(branch.get("type")), *branch, "", *(keys if isinstance(keys, dict) else ()))
        outlines.setdefault(outline, []).append(branch)
    if len(outlines) == len(branches):
        return list(branches)
    return list({json_text(branch): branch for branch in branches}.values())


def _place(option: dict[str, Json]) -> int:
    return ORDER[str(option["type"])]


def _constants(values: Json, names: Sequence[str]) -> _Asked | None:
    """Texts and null as far as the types admit them; None where there are others."""
    if not isinstance(values, list) or not all(value is None or isinstance(value, str) for value in values):
        return None
    texts = [value for value in values if isinstance(value, str)] if "string" in names else []
    return _Asked([("null", TYPE)] if None in values and "null" in names else [], [*dict.fromkeys(texts)])


def _asks_nothing(word: str, value: Json) -> bool:
    return (word in ("minLength", "minItems") and type(value) is int and value == 0) or (
        word == "required" and value == []
    )


def _types(schema: dict[str, Json]) -> list[str]:
    """What `type` lists, each once; nothing where it lists what is no type."""
    found = schema["type"]
    names = found if isinstance(found, list) else [found]
    texts = [name for name in names if isinstance(name, str) and name in TYPES]
    return list(dict.fromkeys(texts)) if len(texts) == len(names) else []


def _of_type(name: str, asked: AbstractSet[str], schema: dict[str, Json], pointer: str, write: Write) -> Json:
    """`asked`: some of OF_TYPE."""
    if name == "object":
        return _object(schema, pointer, write)
    if name == "array":
        return _array(schema, pointer, write)
    if "format" not in asked:
        return _string(schema)
    name = str(schema["format"])
    is_alone = name in KNOWN_FORMATS and asked <= OF_FORMATS
    return {"type": "string", "pattern": FORMAT_PATTERNS[name]} if is_alone else None


def _string(schema: dict[str, Json]) -> Json:
    return _sized({"type": "string"}, schema, "minLength", "maxLength")


def _sized(found: dict[str, Json], schema: dict[str, Json], low: str, high: str) -> Json:
    """`found` with bounds of a size; None where they are no plain ones."""
    least, most = schema.get(low, 0), schema.get(high)
    if type(least) is not int or least < 0 or (high in schema and (type(most) is not int or most < 0)):
        return None
    if least > LARGEST_LEAST:
        return None
    if type(most) is int and least > most:
        return False
    if least:
        found[low] = least
    if type(most) is int and most <= LARGEST_MOST:
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
    if len(properties) - len(wanted) > MAX_OPTIONAL:
        return None  # whoever writes its ways refuses it
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
