"""Keywords as an "or" of facts about values of one kind, for holding and for not.

A keyword is one small function `(schema, pointer, kind, holds, exact) -> ways`; `exact` says that what was evaluated
matters, for `unevaluated*`. Those that apply other schemas in place are `ways.Expander`'s. Section numbers are those of
JSON Schema 2020-12: "core" and "validation".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Final, TypeAlias

from msgspec.structs import replace

from niwaki.runtime.constraints.schema.document import Json, as_bound, escaped, identity, refused
from niwaki.runtime.constraints.schema.facts import (
    FREE,
    NEVER,
    Contains,
    Exists,
    Fields,
    Items,
    Others,
    State,
    Way,
    both,
)
from niwaki.runtime.constraints.schema.formats import FORMAT_PATTERNS, KNOWN_FORMATS
from niwaki.runtime.constraints.schema.steps import last_digits_tell
from niwaki.runtime.constraints.schema.strings import has_boundary

Ways: TypeAlias = list[Way]
Keyword: TypeAlias = Callable[[dict[str, Json], str, str, bool, bool], Ways]
LARGEST_LEAST: Final = 1 << 16  # of characters, items or keys: a shortest text is written out
LARGEST_MOST: Final = 10**9  # more is no limit: no context holds so much
TWO_WORDS: Final = "ECMAScript and Unicode have different words, so what has no boundary of a word here has one there"
TYPES: Final = {"null", "boolean", "number", "integer", "string", "array", "object"}

# -- any kind (validation 6.1)


def type_(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """type (validation 6.1.1). 1.0 is an integer, and is written 1."""
    names = type_names(schema, pointer)
    if kind == "number" and "integer" in names and "number" not in names:
        return [Way(kind, is_whole=holds)]
    return [FREE[kind]] if (kind in names) == holds else []


def type_names(schema: dict[str, Json], pointer: str) -> list[Json]:
    """What `type` lists. Raises ConstraintError: one that is no type."""
    found = schema["type"]
    names: list[Json] = found if isinstance(found, list) else [found]
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise refused(f"{pointer}/type", f"{name!r} is no type; types are {', '.join(sorted(TYPES))}")
    return names


def _enum(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """enum (validation 6.1.2)."""
    values = schema["enum"]
    if not isinstance(values, list):
        raise refused(f"{pointer}/enum", f"must be a list of values, got {values!r}")
    return _values(values, kind, holds)


def _const(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
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


def _bounds(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
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


def _multiple_of(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """multipleOf (validation 6.2.1), `divisibleBy` of draft 3 not."""
    if kind != "number":
        return [FREE[kind]] if holds else []
    step = _fraction(schema["multipleOf"], f"{pointer}/multipleOf")
    if step <= 0:
        raise refused(f"{pointer}/multipleOf", f"must be above 0, got {schema['multipleOf']!r}")
    if holds:
        return [Way(kind, multiples=(step,))]
    beyond = ((f"{pointer}/multipleOf", "what is no multiple cannot be enforced"),)
    found = [Way(kind, is_whole=False, beyond=() if step.denominator == 1 else beyond)]
    if last_digits_tell(step.numerator):
        found += [Way(kind, is_whole=True, no_multiples=(step.numerator,))] if step.numerator > 1 else []
    else:
        found.append(Way(kind, is_whole=True, beyond=beyond))
    return found


def _fraction(value: Json, place: str) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(place, f"must be a number, got {value!r}")
    return as_bound(value)


# -- sizes (validation 6.3.1, 6.3.2, 6.4.1, 6.4.2, 6.5.1, 6.5.2)


def _size(of_kind: str, keyword: str) -> Keyword:
    is_least = keyword.startswith("min")

    def handler(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        if kind != of_kind:
            return [FREE[kind]] if holds else []
        limit = schema[keyword]
        whole = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        if isinstance(whole, bool) or not isinstance(whole, int) or whole < 0:
            raise refused(f"{pointer}/{keyword}", f"must be a whole number from 0 on, got {limit!r}")
        if is_least == holds:
            least = whole if holds else whole + 1
            if least > LARGEST_LEAST:
                raise refused(f"{pointer}/{keyword}", f"asks for {least:.4g} or more: at most {LARGEST_LEAST}")
            return [Way(kind, least=least)]
        most = whole if holds else whole - 1
        if most > LARGEST_MOST:
            return [FREE[kind]]
        return [Way(kind, most=most)] if most >= 0 else []

    handler.__doc__ = f"{keyword} of a value of kind {of_kind}."
    return handler


# -- strings (validation 6.3.3 and 7)


def _pattern(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """pattern (validation 6.3.3): found anywhere in the string."""
    if kind != "string":
        return [FREE[kind]] if holds else []
    pattern = schema["pattern"]
    if not isinstance(pattern, str):
        raise refused(f"{pointer}/pattern", f"must be a string, got {pattern!r}")
    if holds:
        return [Way(kind, patterns=((pattern, f"{pointer}/pattern"),))]
    if has_boundary(pattern):
        return [Way(kind, beyond=((f"{pointer}/pattern", TWO_WORDS),))]
    return [Way(kind, without=((pattern, f"{pointer}/pattern"),))]


def _format(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """format (validation 7): those of 7.3 are enforced, any other name is an annotation (7.2.3). So is one beside
    constants, which often have another form: an empty text, or a name."""
    name = schema["format"]
    is_known = isinstance(name, str) and name in KNOWN_FORMATS and not schema.keys() & {"enum", "const"}
    if kind != "string" or not isinstance(name, str) or not is_known:
        return [FREE[kind]] if holds else []
    place = f"{pointer}/format"
    if holds:
        return [Way(kind, formats=((name, place),))]
    return [Way(kind, without=((FORMAT_PATTERNS[name], place),))]


# -- objects (core 10.3.2, validation 6.5)


def _fields(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """properties, patternProperties, additionalProperties (core 10.3.2.1 to 10.3.2.3)."""
    if kind != "object":
        return [FREE[kind]] if holds else []
    named = dict_at(schema, pointer, "properties")
    patterned = dict_at(schema, pointer, "patternProperties")
    has_rest = "additionalProperties" in schema
    for regex in filter(has_boundary, patterned):  # what other keys must be is asked of those that it is not found in
        raise refused(f"{pointer}/patternProperties/{escaped(regex)}", TWO_WORDS)
    if holds:
        rest: State | None = ((f"{pointer}/additionalProperties", True),) if has_rest else None
        fields = Fields(
            tuple((name, ((f"{pointer}/properties/{escaped(name)}", True),)) for name in named),
            tuple((regex, ((f"{pointer}/patternProperties/{escaped(regex)}", True),)) for regex in patterned),
            rest,
        )
        way = Way(kind, fields=(fields,))
        if exact:
            way = replace(way, seen_names=frozenset(named), seen_patterns=frozenset(patterned), seen_all=has_rest)
        return [way]
    failing = [
        Way(kind, required=(name,), fields=(Fields(((name, ((f"{pointer}/properties/{escaped(name)}", False),)),)),))
        for name in named
    ]
    for regex in patterned:
        place = f"{pointer}/patternProperties"
        failed: State = ((f"{place}/{escaped(regex)}", False),)
        failing.append(Way(kind, exists=(Exists(failed, place, patterns=(regex,)),)))
    if has_rest and schema["additionalProperties"] is not True:
        place = f"{pointer}/additionalProperties"
        other = Exists(((place, False),), place, names=frozenset(named), without=tuple(patterned))
        failing.append(Way(kind, exists=(other,)))
    return failing


def _required(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """required (validation 6.5.3). A boolean, as in draft 3, says nothing."""
    names = schema["required"]
    if kind != "object" or isinstance(names, bool):
        return [FREE[kind]] if holds else []
    keys = keys_in(names, f"{pointer}/required")
    return [Way(kind, required=tuple(dict.fromkeys(keys)))] if holds else [absent(key) for key in keys]


def _property_names(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """propertyNames (core 10.3.2.4)."""
    place = f"{pointer}/propertyNames"
    if kind != "object":
        return [FREE[kind]] if holds else []
    if holds:
        return [Way(kind, names=((place, True),))]
    return [Way(kind, exists=(Exists((), place, keys=((place, False),)),))]


def absent(name: str) -> Way:
    return Way("object", fields=(Fields(((name, NEVER),)),))


# -- arrays (core 10.3.1, validation 6.4)


def _items(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
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
        way = Way(kind, items=(Items(tuple(((place, True),) for place in places), rest),))
        return [replace(way, seen_items=len(places), seen_all_items=has_rest) if exact else way]
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


def _contains(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
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
        return [Way(kind, contains=(Contains(state, low, high, place),), seen_contained=(state,) if exact else ())]
    failing = []
    if low > 0:
        failing.append(Way(kind, contains=(Contains(state, 0, low - 1, place),)))
    if high is not None:
        failing.append(Way(kind, contains=(Contains(state, high + 1, None, place),)))
    return failing


def _unique_items(schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
    """uniqueItems (validation 6.4.3)."""
    if kind != "array" or schema["uniqueItems"] is not True:
        return [FREE[kind]] if holds else []
    place = f"{pointer}/uniqueItems"
    return [Way(kind, unique_at=place)] if holds else [Way(kind, beyond=((place, "cannot be negated"),))]


# -- what was not evaluated (core 11)


def unevaluated_properties(schema: dict[str, Json], pointer: str, ways: Ways) -> Ways:
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


def unevaluated_items(schema: dict[str, Json], pointer: str, ways: Ways, *, is_2019: bool) -> Ways:
    """unevaluatedItems (core 11.2): as items behind all that held in this way, but those that `contains` was met by
    (core 10.3.1.3; not so in 2019-09)."""
    if "unevaluatedItems" not in schema:
        return ways
    state: State = ((f"{pointer}/unevaluatedItems", True),)
    found: Ways = []
    for way in ways:
        if way.kind == "array" and not way.seen_all_items:
            if way.seen_contained and not is_2019:
                others = Others(way.seen_items, way.seen_contained, state, f"{pointer}/unevaluatedItems")
                way = replace(way, others=(*way.others, others), seen_all_items=True)
            else:
                way = replace(way, items=(*way.items, Items(((),) * way.seen_items, state)), seen_all_items=True)
        found.append(way)
    return found


KEYWORDS: Final[dict[str, Keyword]] = {
    "type": type_,
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
}

# Of what kind of value a keyword speaks; the others speak of all.
KIND_OF: Final = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minItems", "maxItems", "items", "prefixItems", "additionalItems"), "array"),
    **dict.fromkeys(("contains", "minContains", "maxContains", "uniqueItems"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties", "required", "propertyNames"), "object"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), "object"),
    **dict.fromkeys(("dependentSchemas", "dependentRequired", "dependencies"), "object"),
}


def branches_at(schema: dict[str, Json], pointer: str, keyword: str) -> list[str]:
    branches = schema[keyword]
    if not isinstance(branches, list) or not branches:
        raise refused(f"{pointer}/{keyword}", f"must be a list of schemas, got {branches!r}")
    return [f"{pointer}/{keyword}/{index}" for index in range(len(branches))]


def dict_at(schema: dict[str, Json], pointer: str, keyword: str) -> dict[str, Json]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise refused(f"{pointer}/{keyword}", f"must be an object, got {value!r}")
    return value


def keys_in(value: Json, place: str) -> list[str]:
    if not isinstance(value, list):
        raise refused(place, f"must be a list of keys, got {value!r}")
    names = [item for item in value if isinstance(item, str)]
    if len(names) < len(value):
        raise refused(place, f"must be a list of keys, got {value!r}")
    return names
