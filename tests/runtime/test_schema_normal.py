"""The rewriting of JSON schemas: what the mask admits is what a validator accepts, on random schemas and on cases."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary
from tests.toy_constraints import takes

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

WORDS = [b'{"a":', b'","', b'"}', b"true", b"[0", b'{"', b"]}"]
END = 256 + len(WORDS)
VOCABULARY = Vocabulary([*(bytes([b]) for b in range(256)), *WORDS, None], {END})

DATE = "2024-01-01"
DATE_OR_X: dict[str, Json] = {"enum": [DATE, "x"]}
VALUES: list[Json] = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    -1,
    1.5,
    12,
    "",
    "a",
    "ab",
    "b",
    "abc",
    "é",
    [],
    [0],
    [1],
    ["a"],
    [0, 1],
    [1, 0],
    [1, 1],
    [0, "a", None],
    [[], []],
    [1, 2, 3],
    {},
    {"a": 0},
    {"a": "a"},
    {"b": 1},
    {"a": 0, "b": 1},
    {"a": "ab", "c": 0},
    {"c": 1, "d": 2},
    {"b": 2, "c": "a"},
    {"a": 1, "b": 1, "c": 1},
    {"a": {}, "b": []},
    {"a": None},
    {"x": 1},
    {"a": {"a": 0}},
    {"b": {"b": "a"}},
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20, max_bytes=1)
    yield compiler
    compiler.close()


def orders(value: Json) -> Iterator[Json]:
    """The value with its keys in every order."""
    if isinstance(value, dict):
        for keys in permutations(value):
            yield {key: value[key] for key in keys}
    else:
        yield value


def admits(matcher: Matcher, value: Json) -> bool:
    return any(takes(matcher, json.dumps(v, ensure_ascii=False, separators=(",", ":"))) for v in orders(value))


def drawn(matcher: Matcher, rng: random.Random, budget: int) -> str:
    row = np.zeros(VOCABULARY.num_words, np.uint32)
    text = b""
    for remaining in range(budget, 0, -1):
        matcher.fill_mask_within(row, remaining)
        tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        first = [token for token in tokens if token >= 256 and rng.random() < 0.3]
        order = rng.sample(first, len(first)) + rng.sample(tokens, len(tokens))
        token = next(token for token in order if matcher.admits(token, remaining))
        matcher.accept(token)
        if token == END:
            break
        text += VOCABULARY.token_bytes[token] or b""
    assert matcher.can_end
    return text.decode("utf-8", "strict")


KEYS = st.sampled_from(["a", "b", "c"])
SMALL = st.integers(0, 3)
LEAVES = st.one_of(
    st.booleans(),
    st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"]).map(lambda t: {"type": t}),
    st.lists(st.sampled_from(VALUES[:20]), min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from(VALUES).map(lambda value: {"const": value}),
    st.fixed_dictionaries(
        {}, optional={"minimum": SMALL, "exclusiveMaximum": SMALL, "multipleOf": st.sampled_from([1, 2, 0.5])}
    ),
    st.fixed_dictionaries(
        {}, optional={"minLength": SMALL, "maxLength": SMALL, "pattern": st.sampled_from(["^a", "b$", "a|é"])}
    ),
    st.fixed_dictionaries(
        {},
        optional={"required": st.lists(KEYS, max_size=2, unique=True), "minProperties": SMALL, "maxProperties": SMALL},
    ),
    st.fixed_dictionaries({}, optional={"minItems": SMALL, "maxItems": SMALL, "uniqueItems": st.booleans()}),
    st.dictionaries(KEYS, st.lists(KEYS, max_size=2, unique=True), max_size=2).map(lambda d: {"dependentRequired": d}),
)


def _larger(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    some = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(KEYS, inner, max_size=2)
    objects = st.fixed_dictionaries(
        {"properties": named},
        optional={
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "^x"]), inner, max_size=1),
            "propertyNames": st.sampled_from([{"maxLength": 1}, {"enum": ["a", "b"]}, {"pattern": "^[ab]"}]),
            "required": st.lists(KEYS, max_size=1),
            "type": st.just("object"),
            "unevaluatedProperties": st.just(False),
        },
    )
    arrays = st.fixed_dictionaries(
        {},
        optional={
            "prefixItems": some,
            "items": inner,
            "contains": inner,
            "maxItems": SMALL,
            "type": st.just("array"),
            "unevaluatedItems": st.just(False),
        },
    )
    return st.one_of(
        objects,
        arrays,
        some.map(lambda s: {"anyOf": s}),
        some.map(lambda s: {"oneOf": s}),
        some.map(lambda s: {"allOf": s}),
        inner.map(lambda s: {"not": s}),
        st.tuples(inner, inner, inner).map(lambda t: {"if": t[0], "then": t[1], "else": t[2]}),
        st.dictionaries(KEYS, inner, max_size=2).map(lambda d: {"dependentSchemas": d}),
        st.tuples(inner, inner).map(lambda t: {**_as_object(t[0]), **_as_object(t[1])}),
    )


def _as_object(schema: Json) -> dict[str, Json]:
    return schema if isinstance(schema, dict) else {}


SCHEMAS = st.recursive(LEAVES, _larger, max_leaves=5)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS)
def test_a_mask_admits_exactly_the_values_that_a_validator_accepts(compiler: ConstraintCompiler, schema: Json) -> None:
    check_both_ways(compiler, schema, (4,))


def admitting_as(compiler: ConstraintCompiler, schema: Json, validator: Any) -> Matcher | None:
    """What admits of VALUES those that `validator` accepts; None where the schema is refused, as it may be unless it is
    said to admit nothing."""
    valid = [validator.is_valid(value) for value in VALUES]
    try:
        matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    except ConstraintError as error:
        if "admits no text" in str(error) and any(valid):
            pytest.fail(f"{schema} admits values, but was refused: {error}")
        return None
    for value, is_valid in zip(VALUES, valid, strict=True):
        assert admits(matcher, value) == is_valid, (schema, value)
    return matcher


def check_both_ways(compiler: ConstraintCompiler, schema: Json, budgets: Sequence[int]) -> None:
    """Values against a validator, and texts drawn at random from the masks with so many tokens more than the least."""
    validator = Draft202012Validator(schema)
    matcher = admitting_as(compiler, schema, validator)
    if matcher is None:
        return
    rng = random.Random(0)
    for extra in budgets:
        text = drawn(matcher.clone(), rng, matcher.distance + extra)
        assert validator.is_valid(json.loads(text)), (schema, text)


ITEMS = st.sampled_from(
    [{"type": "string"}, {"type": "integer"}, {"const": "a"}, {"enum": [0, 1, "a"]}, {"minimum": 1}]
)
COUNTED = st.fixed_dictionaries(
    {},
    optional={
        "prefixItems": st.lists(ITEMS, min_size=1, max_size=2),
        "contains": ITEMS,
        "minContains": st.integers(0, 2),
        "maxContains": st.integers(0, 2),
    },
)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    schema=COUNTED,
    beside=st.sampled_from(["allOf", "anyOf", "oneOf"]),
    parts=st.lists(COUNTED, min_size=1, max_size=2),
    rest=st.one_of(st.just(False), ITEMS),
    is_unique=st.booleans(),
)
def test_what_contains_has_met_is_evaluated(
    compiler: ConstraintCompiler, schema: dict[str, Json], beside: str, parts: list[Json], rest: Json, is_unique: bool
) -> None:
    whole = {**schema, "type": "array", beside: parts, "unevaluatedItems": rest, "uniqueItems": is_unique}
    check_both_ways(compiler, whole, (3, 12, 20))


KEY_SCHEMAS = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(KEYS, LEAVES, max_size=2),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "^x", "b"]), LEAVES, min_size=1, max_size=2),
        "additionalProperties": LEAVES,
        "propertyNames": st.one_of(
            st.sampled_from([{"maxLength": 1}, {"enum": ["a", "b"]}, {"pattern": "^[ab]"}, {"minLength": 1}]),
            st.sampled_from([{"not": {"const": "a"}}, {"anyOf": [{"const": "c"}, {"minLength": 2}]}]),
        ),
        "required": st.lists(KEYS, max_size=1),
    },
)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=KEY_SCHEMAS, negated=KEY_SCHEMAS)
def test_what_negates_keys_holds_both_ways(
    compiler: ConstraintCompiler, schema: dict[str, Json], negated: dict[str, Json]
) -> None:
    check_both_ways(compiler, {**schema, "type": "object", "not": negated}, (3, 8, 15, 30))


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (
            {"type": "object", "patternProperties": {"a*": {"type": "integer"}, "aaa*": {"maximum": 20}}},
            [{"a": 21, "aaaa": 18}, {"b": 30}],
            [{"a": "x"}, {"aaa": 31}, {"b": None}],
        ),
        (
            {"not": {"propertyNames": {"maxLength": 1}}},
            [{"aa": 1}, {"a": 1, "bb": 2, "c": 3}],
            [{"a": 1}, {}],
        ),
        (
            {
                "type": "object",
                "not": {"patternProperties": {"^x": {"type": "integer"}}},
                "additionalProperties": {"maxLength": 1},
            },
            [{"x": "a"}, {"a": 1, "xy": "s", "b": 1}],
            [{"x": "ab"}, {"x": 1}, {"a": "a"}],
        ),
        (
            {
                "properties": {"a": {}, "x": {}},
                "required": ["a"],
                "not": {"patternProperties": {"^x": False}},
                "type": "object",
            },
            [{"a": 1, "x": 2}, {"a": 1, "xx": None}],
            [{"x": 1}, {"a": 1}, {"a": 1, "b": 1}],
        ),
        (
            {"anyOf": [{"type": "string", "pattern": "^a", "format": "uri-reference"}, {"type": "array"}]},
            ["ab", []],
            ["b", "a b", None],
        ),
        (
            {
                "type": "object",
                "allOf": [{"patternProperties": {"^a": {"type": "integer"}}}, {"properties": {"ab": {}}}],
            },
            [{"ab": 1}, {"ac": 2, "b": "x"}],
            [{"ab": "x"}, {"ac": "x"}],
        ),
        (
            {
                "oneOf": [
                    {"properties": {"k": {"const": 1}}, "required": ["k"]},
                    {"properties": {"k": {"type": "integer"}}},
                ]
            },
            [{}, {"k": 2}],
            [{"k": 1}, {"k": "x"}],
        ),
        (
            {"$ref": "#t", "$defs": {"t": {"$anchor": "t", "type": "array", "items": {"$ref": "#t"}, "maxItems": 1}}},
            [[], [[[]]]],
            [[1], [[], []]],
        ),
        ({"type": "string", "not": {"enum": ["a", "ab", ""]}}, ["b", "abc", "aa"], ["a", "ab", "", 1]),
        ({"type": "integer", "minimum": 1.5, "not": {"enum": [3]}}, [2, 4], [1, 3, 2.5]),
        ({"type": "string", "format": "no-such-format"}, ["x", ""], [1]),
        ({"type": "string", "not": {"pattern": "^a|b$"}, "maxLength": 2}, ["", "c", "ba"], ["a", "ab", "b", "abc"]),
        ({"type": "string", "not": {"format": "ipv4"}}, ["1.2.3", "é"], ["1.2.3.4"]),
        ({"type": "string", "pattern": "^(?!.*--)[a-z-]+$"}, ["a-b"], ["a--b", "A"]),
        ({"type": "array", "contains": {"minimum": 5, "type": "number"}}, [[5], [1, "a", 7]], [[], [1], ["a"]]),
        ({"type": "array", "contains": {"enum": ["a", 0]}}, [[0, 1], [1, "a", None]], [[], [1], [True]]),
        (  # names of ours are keys like others
            {"type": "object", "properties": {"x-automaton": {"type": "integer"}, "x-witness": {"type": "integer"}}},
            [{"x-automaton": 1}, {"x-witness": 2}, {}],
            [{"x-automaton": "a"}, {"x-witness": []}],
        ),
        ({"enum": [{"x-automaton": 1, "type": "array"}]}, [{"x-automaton": 1, "type": "array"}], [{}]),
        (  # none may be in it, and one must be
            {"contains": {"type": "integer"}, "maxContains": 0, "enum": [[], [1], ["a"], 9]},
            [9],
            [[], [1], ["a"]],
        ),
        (
            {
                "type": "array",
                "contains": {"type": "string"},
                "minContains": 2,
                "maxContains": 3,
                "items": {"maxLength": 1},
            },
            [["a", "b"], ["a", 1, "b", None, "c"]],
            [["a"], ["a", "b", "c", "d"], ["a", "bb"], [1, 2]],
        ),
        (
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 6, "multipleOf": 2},
                "uniqueItems": True,
            },
            [[], [4, 0, 2]],
            [[4, 4], [1], [6]],
        ),
        (
            {
                "items": {"enum": ["a", "b", 1]},
                "uniqueItems": True,
                "minItems": 2,
                "type": "array",
                "contains": {"const": 1},
            },
            [["a", 1], [1, "b", "a"]],
            [["a", "b"], [1, 1], [1], ["a", "a", 1]],
        ),
        (
            {
                "type": "object",
                "patternProperties": {"a": {"type": "integer"}, "^.b": {"minimum": 3}},
                "maxProperties": 1,
            },
            [{"a": 1}, {"ab": 3}, {"xb": "x"}, {"xb": 4.5}],
            [{"ab": 1}, {"ab": 3.5}, {"xb": 1}, {"a": "a"}],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^[ab]", "maxLength": 2, "not": {"const": "ab"}}},
            [{"a": 1, "b": 2}, {"aa": 0}],
            [{"ab": 1}, {"c": 1}, {"aaa": 1}],
        ),
        ({"type": "number", "not": {"type": "integer"}}, [0.5, -1.25, 1e-07], [1, 0, "a"]),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{"a": 1}, {"A": "x"}], [{"a": "x"}]),
        ({"const": {"a": [1, {"b": "x\u0000"}], "c": []}}, [{"a": [1, {"b": "x\u0000"}], "c": []}], [{}, []]),
        (  # that no additional key is possible is seen late
            {
                "type": ["object", "null"],
                "additionalProperties": {"type": "array", "items": {"type": "string"}, "contains": {"type": "integer"}},
                "minProperties": 1,
            },
            [None],
            [{}, {"a": [1]}],
        ),
        (
            {
                "anyOf": [
                    {"type": "null"},
                    {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
                ]
            },
            [None, {"a": None}, {"a": {"b": None}}],
            [{}, {"a": {}}, 1],
        ),
    ],
)
def test_schemas_by_example(compiler: ConstraintCompiler, schema: Json, yes: list[Json], no: list[Json]) -> None:
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    assert [admits(matcher, value) for value in yes] == [True] * len(yes)
    assert [admits(matcher, value) for value in no] == [False] * len(no)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (
            {"items": DATE_OR_X, "contains": {"format": "date"}, "minContains": 2},
            [[DATE] * 2],
            [["x"] * 2, ["x", DATE]],
        ),
        ({"items": DATE_OR_X, "contains": {"format": "date"}, "maxContains": 1}, [["x", DATE]], [["x"], [DATE, DATE]]),
        ({"allOf": [DATE_OR_X, {"format": "date"}]}, [DATE], ["x"]),
        ({"propertyNames": {"format": "date"}, "properties": {"x": {}, DATE: {}}}, [{DATE: 1}], [{"x": 1}]),
        ({**DATE_OR_X, "format": "date"}, [DATE, "x"], ["2024-01-02"]),
        ({"not": {**DATE_OR_X, "format": "date"}, "maxLength": 10}, ["2024-01-02", ""], [DATE, "x"]),
    ],
)
def test_a_format_is_asked_of_constants_that_it_does_not_stand_beside(
    compiler: ConstraintCompiler, schema: dict[str, Json], yes: list[Json], no: list[Json]
) -> None:
    """Constants were taken to have every format, and at once to lack it: two of `x` held two dates."""
    kind = "array" if "items" in schema else "object" if "properties" in schema else "string"
    matcher = compiler.compile(JsonSchema(json.dumps({"type": kind, **schema}))).matcher()
    assert [admits(matcher, value) for value in yes] == [True] * len(yes)
    assert [admits(matcher, value) for value in no] == [False] * len(no)


def test_a_known_key_in_another_spelling_does_not_pass_for_an_unknown_one(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(JsonSchema('{"type": "object", "properties": {"a": {"type": "integer"}}}')).matcher()
    assert takes(matcher, '{"a":1}')
    assert not takes(matcher, '{"\\u0061":"x"}')
    assert takes(matcher, '{"b":"\\u0061\\ud83d\\ude00"}')  # in values any spelling will do
    assert not takes(matcher, '{"b":"\\ud83d"}')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {"a": {"not": {"uniqueItems": True}}}},
            "schema at /properties/a/not/uniqueItems: cannot be negated",
        ),
        ({"not": {"contains": {"type": "null"}, "unevaluatedItems": False}}, r"unevaluated\* cannot be negated"),
        ({"$ref": "other.json"}, r"schema at /\$ref: 'other.json' leads out of the schema"),
        ({"$ref": "#/$defs/x"}, r"schema at /\$ref: '#/\$defs/x' leads to no schema"),
        ({"allOf": [{"$ref": "#"}]}, "refers to itself without anything in between"),
        ({"type": "text"}, "schema at /type: 'text' is no type"),
        ({"pattern": r"(?:\bno)*x"}, "schema at /pattern: regex .* is not valid at 4: "),
        ({"contains": {"minimum": 1}, "maxContains": 2000}, "schema at /contains: its arrays have more than"),
        (
            {"type": "object", "not": {"additionalProperties": {"type": "null"}}, "minProperties": 2},
            "that one of all keys fails cannot be enforced beside counts of keys",
        ),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "admits no text"),
        ({"required": "a"}, "schema at /required: must be a list of keys"),
        ({"multipleOf": 0}, "schema at /multipleOf: must be above 0"),
    ],
)
def test_what_cannot_be_enforced_is_refused_at_its_keyword(
    compiler: ConstraintCompiler, schema: Json, message: str
) -> None:
    with pytest.raises(ConstraintError, match=message):
        compiler.compile(JsonSchema(json.dumps(schema)))
