"""The ways to satisfy a schema: each keyword as an "or" of facts about values of one kind, for holding and for not.

A keyword is one small function `(schema, pointer, kind, holds) -> ways`. Keywords of a schema hold together (product),
and fail one at a time (union). Section numbers are those of JSON Schema 2020-12: "core" and "validation".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Final, TypeAlias

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.schema.document import Json, escaped, identity, refused
from niwaki.runtime.constraints.schema.facts import (
    FREE,
    KINDS,
    NEVER,
    Atom,
    Contains,
    Exists,
    Fields,
    Items,
    State,
    Way,
    both,
)
from niwaki.runtime.constraints.schema.formats import FORMAT_PATTERNS, KNOWN_FORMATS
from niwaki.runtime.constraints.schema.references import Document

Ways: TypeAlias = list[Way]
MAX_WAYS: Final = 1000  # of one schema, for one kind
MAX_STEPS: Final = 40_000  # of joining two ways, in one document: about a second
MAX_EXACT_BRANCHES: Final = 6  # of anyOf under unevaluated*: every subset of them is a way of its own

# Read after the others, so that keys are written in the order of `properties`, not in that of a condition on them.
LAST: Final = frozenset("not if anyOf oneOf dependencies dependentSchemas dependentRequired".split())
# Keywords that say nothing about which values are valid (core 8.3, validation 8 and 9), and those that are read with
# others. Unknown keywords are annotations too (core 6.5), which is why a misspelled one is no error.
DRAFT_TYPES: Final = {"null", "boolean", "number", "integer", "string", "array", "object"}


class Circular(ConstraintError):
    """A schema that must be known before itself."""


class Expander:
    """Expands the schemas of one document, each once."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._known: dict[tuple[str, bool, str, bool], Ways] = {}
        self._open: set[tuple[str, bool, str, bool]] = set()
        self._steps = 0
        self.is_empty: Callable[[Way], bool] = lambda way: False  # set by the reader, which looks into states

    def of_state(self, state: State, kind: str) -> Ways:
        """The ways in which all atoms hold."""
        ways = [FREE[kind]]
        for pointer, holds in state:
            ways = self._product(ways, self.of(pointer, kind, holds, False), pointer)
        return ways

    def is_never(self, atom: Atom) -> bool:
        """Whether the atom alone plainly admits nothing."""
        pointer, holds = atom
        return holds if pointer == NEVER[0][0] else self._document.node(pointer) is (not holds)

    def of(self, pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """The ways in which a schema holds or does not. `exact`: what each evaluates matters."""
        if pointer == "!never":
            return [] if holds else [FREE[kind]]
        key = (pointer, holds, kind, exact)
        if key in self._known:
            return self._known[key]
        if key in self._open:
            raise Circular(f"schema at {pointer or 'its root'}: it refers to itself without anything in between")
        self._open.add(key)
        try:
            ways = self._expanded(pointer, kind, holds, exact)
        finally:
            self._open.discard(key)
        self._known[key] = ways
        return ways

    def _expanded(self, pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        schema = self._document.node(pointer)
        if isinstance(schema, bool):  # core 4.3.2
            return [FREE[kind]] if schema == holds else []
        if not isinstance(schema, dict):
            raise refused(pointer, f"a schema must be an object or a boolean, got {schema!r}")
        keywords = ["type", *schema] if "type" in schema else list(schema)
        if "$ref" in schema and self._document.is_old:
            keywords = ["$ref"]  # up to draft 7 whatever stands beside a $ref is ignored
        elif "type" in schema and holds and not _type(self, schema, pointer, kind, True, False):
            return []  # as below, for most kinds at once
        needs_all = exact or "unevaluatedProperties" in schema or "unevaluatedItems" in schema
        relevant = RELEVANT[kind]
        keywords.sort(key=LAST.__contains__)
        handlers = list(dict.fromkeys(relevant[name] for name in keywords if name in relevant))
        if holds:
            ways = [FREE[kind]]
            for handler in handlers:
                if not ways:
                    return []
                ways = self._product(ways, handler(self, schema, pointer, kind, True, needs_all), pointer)
            for last in (_unevaluated_properties, _unevaluated_items):
                ways = last(self, schema, pointer, ways)
            return ways
        if kind in ("object", "array") and ("unevaluatedProperties" in schema or "unevaluatedItems" in schema):
            return [Way(kind, beyond=((pointer, "unevaluated* cannot be negated"),))]
        failing: Ways = []
        for handler in handlers:
            failing += handler(self, schema, pointer, kind, False, False)
        return [way.without_annotations() for way in self._limited(failing, pointer)]

    def _product(self, ways: Ways, others: Ways, pointer: str) -> Ways:
        free = FREE[ways[0].kind] if ways else None
        if len(ways) == 1 and ways[0] is free:
            return others
        if len(others) == 1 and others[0] is free:
            return ways
        self._steps += len(ways) * len(others)
        if self._steps > MAX_STEPS:
            raise refused(pointer, "its combinations are too many to work out; simplify it")
        joined = [way for one in ways for other in others if (way := both(one, other)) is not None]
        return self._limited(joined, pointer)

    def _limited(self, ways: Ways, pointer: str) -> Ways:
        if len(ways) < 2:
            return ways
        if any(way.is_free for way in ways) and not any(way.has_annotations for way in ways):
            return [FREE[ways[0].kind]]
        kept: Ways = []
        for way in ways:
            if way not in kept:
                kept.append(way)
        if len(kept) > MAX_WAYS:
            raise refused(pointer, f"it has {len(kept)} alternatives when written out, at most {MAX_WAYS}; simplify it")
        return kept

    # -- applicators in place (core 10.2)

    def all_of(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """allOf (core 10.2.1.1): every branch."""
        places = _branches(schema, pointer, "allOf")
        if not holds:
            return [way for place in places for way in self.of(place, kind, False, False)]
        ways = [FREE[kind]]
        for place in places:
            ways = self._product(ways, self.of(place, kind, True, exact), pointer)
        return ways

    def any_of(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """anyOf (core 10.2.1.2): at least one branch."""
        places = _branches(schema, pointer, "anyOf")
        if not holds:
            return self._none_of(places, kind, pointer)
        if not exact:
            return self._limited([way for place in places for way in self.of(place, kind, True, False)], pointer)
        if len(places) > MAX_EXACT_BRANCHES:
            raise refused(f"{pointer}/anyOf", f"at most {MAX_EXACT_BRANCHES} branches under unevaluated keywords")
        found: Ways = []
        for chosen in product((True, False), repeat=len(places)):
            if any(chosen):
                ways = [FREE[kind]]
                for place, is_chosen in zip(places, chosen, strict=True):
                    ways = self._product(ways, self.of(place, kind, is_chosen, True), pointer)
                found += ways
        return self._limited(found, pointer)

    def one_of(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """oneOf (core 10.2.1.3): one branch, and no other that could hold as well."""
        places = _branches(schema, pointer, "oneOf")
        per_place = [self.of(place, kind, True, exact) for place in places]
        meets = [[False] * len(places) for _ in places]
        for i in range(len(places)):
            for j in range(i):
                common = self._product(per_place[i], per_place[j], pointer)
                meets[i][j] = meets[j][i] = any(not self.is_empty(way) for way in common)
        found: Ways = [] if holds else [*self._none_of(places, kind, pointer)]
        for i, ways in enumerate(per_place):
            if holds:
                for j, place in enumerate(places):
                    if meets[i][j]:
                        ways = self._product(ways, self.of(place, kind, False, False), pointer)
                found += ways
            else:
                for j in range(i):
                    if meets[i][j]:
                        found += self._product(ways, per_place[j], pointer)
        return self._limited(found, pointer)

    def not_(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """not (core 10.2.1.4)."""
        return [way.without_annotations() for way in self.of(f"{pointer}/not", kind, not holds, False)]

    def if_then_else(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """if, then, else (core 10.2.2.1 to 10.2.2.3)."""
        if "if" not in schema or ("then" not in schema and "else" not in schema and not exact):
            return [FREE[kind]] if holds else []
        condition = f"{pointer}/if"
        found: Ways = []
        for met, branch in ((True, "then"), (False, "else")):
            ways = [FREE[kind]] if holds else []
            if branch in schema:
                ways = self.of(f"{pointer}/{branch}", kind, holds, exact)
            found += self._product(self.of(condition, kind, met, exact), ways, pointer)
        return self._limited(found, pointer)

    def reference(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """$ref and $dynamicRef (core 8.2.3)."""
        ways = [FREE[kind]] if holds else []
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                found = self.of(self._document.target(pointer, keyword, schema[keyword]), kind, holds, exact)
                ways = self._product(ways, found, pointer) if holds else ways + found
        return ways

    def dependent(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """dependentSchemas (core 10.2.2.4), dependentRequired (validation 6.5.4), dependencies (up to draft 7)."""
        ways = [FREE[kind]] if holds else []
        if kind != "object":
            return ways
        for keyword in ("dependentSchemas", "dependentRequired", "dependencies"):
            for name, needed in _object(schema, pointer, keyword).items():
                place = f"{pointer}/{keyword}/{escaped(name)}"
                present = Way(kind, required=(name,))
                if isinstance(needed, list) and keyword != "dependentSchemas":
                    names = _strings(needed, place)
                    then = [Way(kind, required=tuple(names))] if holds else [_absent(other) for other in names]
                elif keyword != "dependentRequired":
                    then = self.of(place, kind, holds, exact)
                else:
                    raise refused(place, f"must be a list of keys, got {needed!r}")
                met = self._product([present], then, place)
                ways = self._product(ways, [_absent(name), *met], place) if holds else ways + met
        return ways

    def _none_of(self, places: Sequence[str], kind: str, pointer: str) -> Ways:
        ways = [FREE[kind]]
        for place in places:
            ways = self._product(ways, self.of(place, kind, False, False), pointer)
        return ways


Keyword: TypeAlias = Callable[[Expander, dict[str, Json], str, str, bool, bool], Ways]

# -- any kind (validation 6.1)


def _type(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """type (validation 6.1.1). 1.0 is an integer, and is written 1."""
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for name in names:
        if not isinstance(name, str) or name not in DRAFT_TYPES:
            raise refused(f"{pointer}/type", f"{name!r} is no type; types are {', '.join(sorted(DRAFT_TYPES))}")
    if kind == "number" and "integer" in names and "number" not in names:
        return [Way(kind, is_whole=holds)]
    return [FREE[kind]] if (kind in names) == holds else []


def _enum(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """enum (validation 6.1.2)."""
    values = schema["enum"]
    if not isinstance(values, list):
        raise refused(f"{pointer}/enum", f"must be a list of values, got {values!r}")
    return _values(values, kind, holds)


def _const(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """const (validation 6.1.3)."""
    return _values([schema["const"]], kind, holds)


def _values(values: Iterable[Json], kind: str, holds: bool) -> Ways:
    chosen = {identity(value): value for value in values if kind_of(value) == kind}
    if not holds:
        return [Way(kind, excluded=tuple(chosen.values()))]
    return [Way(kind, values=tuple(chosen.values()))] if chosen else []


def kind_of(value: Json) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


# -- numbers (validation 6.2)


def _bounds(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """minimum, exclusiveMinimum, maximum, exclusiveMaximum (validation 6.2.2 to 6.2.5; booleans as in draft 4)."""
    if kind != "number":
        return [FREE[kind]] if holds else []
    limits: list[tuple[bool, Fraction, bool]] = []  # is it a lower bound, the bound, is it itself out
    for is_low, inclusive, exclusive in (
        (True, "minimum", "exclusiveMinimum"),
        (False, "maximum", "exclusiveMaximum"),
    ):
        limit, strict = schema.get(inclusive), schema.get(exclusive)
        if limit is not None:
            limits.append((is_low, _fraction(limit, f"{pointer}/{inclusive}"), strict is True))
        if strict is not None and not isinstance(strict, bool):
            limits.append((is_low, _fraction(strict, f"{pointer}/{exclusive}"), True))
    found = [
        Way(kind, low=(bound, is_out)) if is_low == holds else Way(kind, high=(bound, is_out))
        for is_low, bound, is_out in ((a, b, c if holds else not c) for a, b, c in limits)
    ]
    if not holds:
        return found
    ways = [FREE[kind]]
    for way in found:
        joined = both(ways[0], way)
        if joined is None:
            return []
        ways = [joined]
    return ways


def _multiple_of(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """multipleOf (validation 6.2.1), `divisibleBy` of draft 3 not."""
    if kind != "number":
        return [FREE[kind]] if holds else []
    step = _fraction(schema["multipleOf"], f"{pointer}/multipleOf")
    if step <= 0:
        raise refused(f"{pointer}/multipleOf", f"must be above 0, got {schema['multipleOf']!r}")
    if holds:
        return [Way(kind, multiples=(step,))]
    if step == 1:
        return [Way(kind, is_whole=False)]
    return [Way(kind, beyond=((f"{pointer}/multipleOf", "what is no multiple cannot be enforced"),))]


def _fraction(value: Json, place: str) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(place, f"must be a number, got {value!r}")
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


# -- sizes (validation 6.3.1, 6.3.2, 6.4.1, 6.4.2, 6.5.1, 6.5.2)


def _size(of_kind: str, keyword: str) -> Keyword:
    is_least = keyword.startswith("min")

    def handler(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        if kind != of_kind:
            return [FREE[kind]] if holds else []
        limit = schema[keyword]
        whole = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        if isinstance(whole, bool) or not isinstance(whole, int) or whole < 0:
            raise refused(f"{pointer}/{keyword}", f"must be a whole number from 0 on, got {limit!r}")
        if is_least == holds:
            return [Way(kind, least=whole if holds else whole + 1)]
        if not holds:
            whole -= 1
        return [Way(kind, most=whole)] if whole >= 0 else []

    handler.__doc__ = f"{keyword} of a value of kind {of_kind}."
    return handler


# -- strings (validation 6.3.3 and 7)


def _pattern(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """pattern (validation 6.3.3): found anywhere in the string."""
    if kind != "string":
        return [FREE[kind]] if holds else []
    pattern = schema["pattern"]
    if not isinstance(pattern, str):
        raise refused(f"{pointer}/pattern", f"must be a string, got {pattern!r}")
    if holds:
        return [Way(kind, patterns=((pattern, f"{pointer}/pattern"),))]
    return [Way(kind, without=((pattern, f"{pointer}/pattern"),))]


def _format(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """format (validation 7): those of 7.3 are enforced, any other name is an annotation (7.2.3)."""
    name = schema["format"]
    if kind != "string" or not isinstance(name, str) or name not in KNOWN_FORMATS:
        return [FREE[kind]] if holds else []
    place = f"{pointer}/format"
    if holds:
        return [Way(kind, formats=((name, place),))]
    return [Way(kind, without=((FORMAT_PATTERNS[name], place),))]


# -- objects (core 10.3.2, validation 6.5)


def _fields(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """properties, patternProperties, additionalProperties (core 10.3.2.1 to 10.3.2.3)."""
    if kind != "object":
        return [FREE[kind]] if holds else []
    named = _object(schema, pointer, "properties")
    patterned = _object(schema, pointer, "patternProperties")
    has_rest = "additionalProperties" in schema
    if holds:
        rest: State | None = ((f"{pointer}/additionalProperties", True),) if has_rest else None
        fields = Fields(
            tuple((name, ((f"{pointer}/properties/{escaped(name)}", True),)) for name in named),
            tuple((regex, ((f"{pointer}/patternProperties/{escaped(regex)}", True),)) for regex in patterned),
            rest,
        )
        return [
            Way(
                kind,
                fields=(fields,),
                seen_names=frozenset(named),
                seen_patterns=frozenset(patterned),
                seen_all=has_rest,
            )
        ]
    failing = [
        Way(kind, required=(name,), fields=(Fields(((name, ((f"{pointer}/properties/{escaped(name)}", False),)),)),))
        for name in named
    ]
    failing += [
        Way(kind, beyond=((f"{pointer}/patternProperties", "keys of a pattern that fail cannot be enforced"),))
        for _ in patterned
    ]
    if has_rest and schema["additionalProperties"] is not True:
        place = f"{pointer}/additionalProperties"
        failing.append(Way(kind, exists=(Exists(frozenset(named), tuple(patterned), ((place, False),), place),)))
    return failing


def _required(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """required (validation 6.5.3). A boolean, as in draft 3, says nothing."""
    names = schema["required"]
    if kind != "object" or isinstance(names, bool):
        return [FREE[kind]] if holds else []
    keys = _strings(names, f"{pointer}/required")
    return [Way(kind, required=tuple(dict.fromkeys(keys)))] if holds else [_absent(key) for key in keys]


def _property_names(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """propertyNames (core 10.3.2.4)."""
    place = f"{pointer}/propertyNames"
    if kind != "object":
        return [FREE[kind]] if holds else []
    return [Way(kind, names=((place, True),))] if holds else [Way(kind, beyond=((place, "cannot be negated"),))]


def _absent(name: str) -> Way:
    return Way("object", fields=(Fields(((name, NEVER),)),))


# -- arrays (core 10.3.1, validation 6.4)


def _items(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """prefixItems and items (core 10.3.1.1, 10.3.1.2); a list in `items` and additionalItems (up to 2019-09)."""
    if kind != "array":
        return [FREE[kind]] if holds else []
    listed, prefix_key, rest_key = schema.get("prefixItems"), "prefixItems", "items"
    if isinstance(schema.get("items"), list):
        listed, prefix_key, rest_key = schema["items"], "items", "additionalItems"
    if listed is None:
        listed = []
    if not isinstance(listed, list):
        raise refused(f"{pointer}/{prefix_key}", f"must be a list of schemas, got {listed!r}")
    places = [f"{pointer}/{prefix_key}/{index}" for index in range(len(listed))]
    has_rest = rest_key in schema
    if holds:
        rest: State | None = ((f"{pointer}/{rest_key}", True),) if has_rest else None
        return [
            Way(
                kind,
                items=(Items(tuple(((place, True),) for place in places), rest),),
                seen_items=len(places),
                seen_all_items=has_rest,
            )
        ]
    failing = [
        Way(kind, least=index + 1, items=(Items((*((),) * index, ((place, False),))),))
        for index, place in enumerate(places)
    ]
    if has_rest:
        place = f"{pointer}/{rest_key}"
        if places and schema[rest_key] is False:
            failing.append(Way(kind, least=len(places) + 1))
        elif places:
            failing.append(Way(kind, beyond=((place, "what fails behind the first items cannot be enforced"),)))
        else:
            failing.append(Way(kind, contains=(Contains(((place, False),), 1, None, place),)))
    return failing


def _contains(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """contains (core 10.3.1.3), minContains and maxContains (validation 6.4.4, 6.4.5)."""
    if kind != "array" or "contains" not in schema:
        return [FREE[kind]] if holds else []
    place = f"{pointer}/contains"
    low, high = schema.get("minContains", 1), schema.get("maxContains")
    low = int(low) if isinstance(low, float) and low.is_integer() else low
    high = int(high) if isinstance(high, float) and high.is_integer() else high
    if not isinstance(low, int) or not isinstance(high, int | None) or isinstance(low, bool) or isinstance(high, bool):
        raise refused(place, f"minContains and maxContains must be whole numbers, got {low!r} and {high!r}")
    state: State = ((place, True),)
    if holds:
        beyond = ((place, "contains together with unevaluatedItems cannot be enforced"),) if exact else ()
        return [Way(kind, contains=(Contains(state, low, high, place),), beyond=beyond)]
    failing = []
    if low > 0:
        failing.append(Way(kind, contains=(Contains(state, 0, low - 1, place),)))
    if high is not None:
        failing.append(Way(kind, contains=(Contains(state, high + 1, None, place),)))
    return failing


def _unique_items(at: Expander, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """uniqueItems (validation 6.4.3)."""
    if kind != "array" or schema["uniqueItems"] is not True:
        return [FREE[kind]] if holds else []
    place = f"{pointer}/uniqueItems"
    return [Way(kind, unique_at=place)] if holds else [Way(kind, beyond=((place, "cannot be negated"),))]


# -- what was not evaluated (core 11)


def _unevaluated_properties(at: Expander, schema: dict[str, Json], pointer: str, ways: Ways) -> Ways:
    """unevaluatedProperties (core 11.3): as additionalProperties beside all that held in this way."""
    if "unevaluatedProperties" not in schema:
        return ways
    state: State = ((f"{pointer}/unevaluatedProperties", True),)
    return [
        way
        if way.kind != "object" or way.seen_all
        else replace(
            way,
            fields=(
                *way.fields,
                Fields(
                    tuple((name, ()) for name in sorted(way.seen_names)),
                    tuple((regex, ()) for regex in sorted(way.seen_patterns)),
                    state,
                ),
            ),
            seen_all=True,
        )
        for way in ways
    ]


def _unevaluated_items(at: Expander, schema: dict[str, Json], pointer: str, ways: Ways) -> Ways:
    """unevaluatedItems (core 11.2): as items behind all that held in this way."""
    if "unevaluatedItems" not in schema:
        return ways
    state: State = ((f"{pointer}/unevaluatedItems", True),)
    return [
        way
        if way.kind != "array" or way.seen_all_items
        else replace(way, items=(*way.items, Items(((),) * way.seen_items, state)), seen_all_items=True)
        for way in ways
    ]


KEYWORDS: Final[dict[str, Keyword]] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bounds),
    "multipleOf": _multiple_of,
    **{name: _size("string", name) for name in ("minLength", "maxLength")},
    **{name: _size("array", name) for name in ("minItems", "maxItems")},
    **{name: _size("object", name) for name in ("minProperties", "maxProperties")},
    "pattern": _pattern,
    "format": _format,
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), _fields),
    "required": _required,
    "propertyNames": _property_names,
    **dict.fromkeys(("items", "prefixItems", "additionalItems"), _items),
    **dict.fromkeys(("contains", "minContains", "maxContains"), _contains),
    "uniqueItems": _unique_items,
    "allOf": Expander.all_of,
    "anyOf": Expander.any_of,
    "oneOf": Expander.one_of,
    "not": Expander.not_,
    **dict.fromkeys(("if", "then", "else"), Expander.if_then_else),
    **dict.fromkeys(("$ref", "$dynamicRef"), Expander.reference),
    **dict.fromkeys(("dependentSchemas", "dependentRequired", "dependencies"), Expander.dependent),
}

# What a keyword says is about one kind of value, or about all: `type` first, which leaves most kinds out.
_KINDS_OF: Final = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        *("minItems", "maxItems", "items", "prefixItems", "additionalItems"),
        *("contains", "minContains", "maxContains", "uniqueItems"),
    ),
    "object": (
        *("minProperties", "maxProperties", "properties", "patternProperties", "additionalProperties"),
        *("required", "propertyNames", "dependentSchemas", "dependentRequired", "dependencies"),
    ),
}
RELEVANT: Final = {
    kind: {
        name: handler
        for name, handler in KEYWORDS.items()
        if not any(name in names for other, names in _KINDS_OF.items() if other != kind)
    }
    for kind in KINDS
}


def _branches(schema: dict[str, Json], pointer: str, keyword: str) -> list[str]:
    branches = schema[keyword]
    if not isinstance(branches, list) or not branches:
        raise refused(f"{pointer}/{keyword}", f"must be a list of schemas, got {branches!r}")
    return [f"{pointer}/{keyword}/{index}" for index in range(len(branches))]


def _object(schema: dict[str, Json], pointer: str, keyword: str) -> dict[str, Json]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise refused(f"{pointer}/{keyword}", f"must be an object, got {value!r}")
    return value


def _strings(value: Json, place: str) -> list[str]:
    if not isinstance(value, list):
        raise refused(place, f"must be a list of keys, got {value!r}")
    names = [item for item in value if isinstance(item, str)]
    if len(names) < len(value):
        raise refused(place, f"must be a list of keys, got {value!r}")
    return names
