"""Schemas that are written down without their ways mean what their ways mean."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import TypeAlias
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler
from niwaki.runtime.constraints.grammar_source import source_of_schema
from niwaki.runtime.constraints.schema import normalise
from niwaki.runtime.constraints.schema.plain import Plain
from tests.runtime.test_schema_normal import VOCABULARY, admits, check_both_ways

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

NAMES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
TYPES = NAMES | st.lists(NAMES, min_size=1, max_size=7, unique=True)
SIZE = st.integers(0, 3)
KEYS = st.sampled_from(["a", "b", "c", "a/b", "~"])
LEAVES = st.one_of(
    st.booleans(),
    TYPES.map(lambda found: {"type": found}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", ["string", "null"]])},
        optional={"minLength": SIZE, "maxLength": SIZE, "format": st.just("colour")},  # an annotation
    ),
    st.fixed_dictionaries(
        {"enum": st.lists(st.sampled_from(["a", "b", "é", 1, None]), min_size=1, max_size=3)},
        optional={"type": st.sampled_from(["string", "integer", ["string", "null"], ["null", "boolean"]])},
    ),
    st.fixed_dictionaries({"const": st.sampled_from(["a", "é", None, 1])}, optional={"type": TYPES}),
    st.fixed_dictionaries({"type": TYPES}, optional={"maxLength": SIZE, "minItems": SIZE, "required": st.just(["a"])}),
    st.fixed_dictionaries({}, optional={"minLength": SIZE, "format": st.sampled_from(["colour", "uuid"])}),
)


def _larger(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    objects = st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", ["object"], ["null", "object"], ["object", "string"]]),
            "properties": st.dictionaries(KEYS, inner, max_size=3),
            "required": st.lists(KEYS, max_size=2),
            "additionalProperties": inner,
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.sampled_from(["array", ["array", "null"], ["array", "object"]])},
        optional={"items": inner, "minItems": SIZE, "maxItems": SIZE},
    )
    alternatives = st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=4)})
    return st.one_of(objects, arrays, alternatives)


FORMATS = st.fixed_dictionaries({"type": st.just("string"), "format": st.just("uuid")}, optional={"maxLength": SIZE})
SCHEMAS = st.recursive(st.one_of(LEAVES, FORMATS), _larger, max_leaves=6)
REFERENCES = st.sampled_from([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#"}])
REFERRING = st.recursive(st.one_of(LEAVES, REFERENCES), _larger, max_leaves=4)
BEHIND = REFERRING.filter(lambda schema: not isinstance(schema, dict) or "$ref" not in schema)  # no circles


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20, max_bytes=1)
    yield compiler
    compiler.close()


def normal_form(schema: Json) -> str:
    try:
        return json.dumps(normalise(json.dumps(schema)).schema)
    except ConstraintError as error:
        return str(error)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(schema=SCHEMAS)
def test_a_plain_schema_is_written_as_its_ways_are(schema: Json) -> None:
    with patch.object(Plain, "written", return_value=None), patch.object(Plain, "is_possible", return_value=False):
        by_ways = normal_form(schema)
    assert normal_form(schema) == by_ways


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(one=BEHIND, other=BEHIND, root=REFERRING)
def test_references_among_plain_schemas_lead_where_they_say(
    compiler: ConstraintCompiler, one: Json, other: Json, root: Json
) -> None:
    whole: dict[str, Json] = {"type": ["object", "array"], "additionalProperties": root, "items": root}
    check_both_ways(compiler, {**whole, "$defs": {"a": one, "b": other}}, (4,))


def test_references_in_a_circle_are_refused() -> None:
    with pytest.raises(ConstraintError, match="refers to itself without anything in between"):
        normalise('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}')


IMPOSSIBLE: dict[str, Json] = {"type": "object", "required": ["b"], "maxProperties": 0}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"prefixItems": [{"type": "integer"}, IMPOSSIBLE]}, [[], [1]], [[1, {}], [1, 2]]),
        ({"prefixItems": [{"type": "integer"}, IMPOSSIBLE], "items": {"type": "null"}}, [[], [1]], [[1, None]]),
        ({"type": ["array", "null"], "prefixItems": [IMPOSSIBLE], "minItems": 1}, [None], [[], [{}]]),
        ({"type": ["array", "null"], "items": IMPOSSIBLE, "minItems": 1}, [None], [[], [{}]]),
    ],
)
def test_an_array_ends_before_a_place_that_is_seen_late_to_take_no_value(
    compiler: ConstraintCompiler, schema: dict[str, Json], yes: list[Json], no: list[Json]
) -> None:
    matcher = compiler.compile(JsonSchema(json.dumps({"type": "array"} | schema))).matcher()
    assert [admits(matcher, value) for value in yes] == [True] * len(yes)
    assert [admits(matcher, value) for value in no] == [False] * len(no)


def test_equal_places_by_reference_are_written_once() -> None:
    names = "".join(f'"{name}": {{"$ref": "#/$defs/pair"}}, ' for name in "abcdefgh")
    pair = '{"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}'
    found = normalise(f'{{"type": "object", "properties": {{{names[:-2]}}}, "$defs": {{"pair": {pair}}}}}').schema
    assert json.dumps(found).count('"x"') == 2  # where it is first needed, and for all others


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"oneOf": [{"type": "string", "pattern": "^a+$"}, {"type": "integer", "minimum": 3}]},
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}, "not": {"required": ["b"]}}},
        },
        {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
    ],
)
def test_nothing_of_a_schema_is_left_to_the_collector_of_cycles(schema: dict[str, object]) -> None:
    constraint = JsonSchema(json.dumps(schema))
    source_of_schema(constraint, 20, b"a")
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        source_of_schema(constraint, 20, b"a")
        gc.collect()
        left = [thing for thing in gc.garbage if type(thing).__module__.startswith("niwaki")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
