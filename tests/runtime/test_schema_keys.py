"""A key that must come, of those that patterns match."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler
from niwaki.runtime.constraints.schema import normalise
from tests.runtime.test_schema_normal import KEY_SCHEMAS, VOCABULARY, Json, admits, check_both_ways, drawn


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(VOCABULARY, seconds=20)
    yield made
    made.close()


PATTERNS = [
    {"^a.*z$": True},
    {"^x-": {"type": "string"}, "^[0-9]{2,}$": {"type": "integer"}},
    {"c": True, "^$": False, "^[0-9]{2,}$": False},
    {"^a+$": {"type": "integer"}, "b$": {"type": "string"}},
    {"^(foo|bar)$": {"type": "null"}, "^f": {"enum": [None, 1]}},
    {"^a": {"$ref": "#"}},
]
PATTERN_KEYS = ["", "a", "aa", "az", "abz", "x-", "x-1", "12", "c", "acb", "b", "ab", "foo", "bar", "f", "fo"]


@pytest.mark.parametrize("rest", [False, {"type": "boolean"}])
@pytest.mark.parametrize("patterns", PATTERNS, ids=list)
def test_one_key_at_least_of_those_that_patterns_match(
    patterns: dict[str, Json], rest: Json, compiler: ConstraintCompiler
) -> None:
    part: dict[str, Json] = {
        "type": "object", "patternProperties": patterns, "additionalProperties": rest, "minProperties": 1
    }  # fmt: skip
    schema: Json = {"anyOf": [{"const": 1}, part]}
    validator = Draft202012Validator(schema)
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    values: list[Json] = [0, "s", None, True, 1, {}]
    instances: list[Json] = [1, {}, *({key: value} for key in PATTERN_KEYS for value in values)]
    for value in instances:
        assert admits(matcher, value) == validator.is_valid(value), value
    rng = random.Random(0)
    for budget in (*range(10, 40), 80):
        written = json.loads(drawn(matcher.clone(), rng, budget))
        assert validator.is_valid(written), written


def test_listed_keys_of_which_more_is_asked_than_can_be_enforced_are_refused(compiler: ConstraintCompiler) -> None:
    names: Json = {"enum": ["ab", "cd e"], "not": {"pattern": r"\bab\b|\bx"}}
    schema: Json = {"type": "object", "propertyNames": names, "minProperties": 1}
    with pytest.raises(ConstraintError, match="different words"):
        compiler.compile(JsonSchema(json.dumps(schema)))


@pytest.mark.parametrize("where", [{}, {"additionalProperties": False}])
def test_an_object_that_would_have_to_hold_another_one_is_no_way_and_alone_it_is_refused(
    where: dict[str, Json], compiler: ConstraintCompiler
) -> None:
    endless: Json = {
        "type": "object", "patternProperties": {"^a": {"$ref": "#/$defs/e"}}, "minProperties": 1,
        "additionalProperties": {"$ref": "#/$defs/e"}, **where,
    }  # fmt: skip
    either = {"anyOf": [{"const": 12}, {"$ref": "#/$defs/e"}], "$defs": {"e": endless}}
    matcher = compiler.compile(JsonSchema(json.dumps(either))).matcher()
    assert drawn(matcher, random.Random(0), 2) == "12"
    with pytest.raises(
        ConstraintError, match="the schema admits no text: every value of it would have to hold another"
    ):
        compiler.compile(JsonSchema(json.dumps({"$ref": "#/$defs/e", "$defs": {"e": endless}})))


LISTED = st.lists(st.sampled_from(["a", "b", "x", "y"]), min_size=1, max_size=3, unique=True)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=KEY_SCHEMAS, failing=st.lists(LISTED, min_size=1, max_size=3), most=st.none() | st.integers(1, 3))
def test_some_key_of_several_lists_must_come_for_each_of_them(
    compiler: ConstraintCompiler, schema: dict[str, Json], failing: list[list[str]], most: int | None
) -> None:
    limit: dict[str, Json] = {} if most is None else {"maxProperties": most}
    lists: list[list[Json]] = [[*names] for names in failing]
    none_comes: list[Json] = [{"propertyNames": {"not": {"enum": names}}} for names in lists]
    whole: dict[str, Json] = {**schema, **limit, "type": "object", "not": {"anyOf": none_comes}}
    check_both_ways(compiler, whole, (3, 12))


def test_keys_that_are_listed_are_no_unknown_ones_of_which_only_one_can_be_asked_for(
    compiler: ConstraintCompiler,
) -> None:
    lists: list[list[Json]] = [["1", "3"], ["2", "3"]]
    parts: list[Json] = [{"propertyNames": {"not": {"enum": names}}} for names in lists]
    schema: dict[str, Json] = {"type": "object", "not": {"anyOf": parts}, "maxProperties": 2}
    validator = Draft202012Validator(schema)
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    for keys in ("", "1", "2", "3", "12", "13", "23", "123", "4", "34", "124"):
        value: Json = dict.fromkeys(keys)
        assert admits(matcher, value) == validator.is_valid(value), value


@pytest.mark.parametrize("last", [[], ["key_699"]])
def test_hundreds_of_keys_may_be_left_out(last: list[str], compiler: ConstraintCompiler) -> None:
    """At more than 500 the text was given up behind its first value; where the last must come no end was found behind
    an early one."""
    names = [f"key_{number}" for number in range(700)]
    schema: Json = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": [*last]}
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    text = b'{"key_1":"a","key_3":"b"'
    for byte in text:
        matcher.accept(byte)
    ending = matcher.shortest_ending(1000)
    assert ending is not None
    written = b"".join(VOCABULARY.token_bytes[token] or b"" for token in ending)
    assert written == (b',"key_699":""}' if last else b"}")
    start = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    values: list[Json] = [{"key_1": "", "key_2": ""}, {"key_650": "", "key_699": ""}]
    values += [{"key_650": 1}, {"key_699": "", "z": 1}]
    for value in values:
        assert admits(start, value) == Draft202012Validator(schema).is_valid(value), value


@pytest.mark.parametrize("form", ["plain", "ways"])
def test_thousands_of_keys_that_may_be_left_out_are_refused_at_once(form: str) -> None:
    schema: dict[str, Json] = {"type": "object", "properties": {f"key_{number}": {} for number in range(2001)}}
    if form == "ways":
        schema["not"] = {"type": "null"}
    with pytest.raises(ConstraintError, match=r"^schema at /properties: 2001 keys of one object may be left out"):
        normalise(json.dumps(schema))
    schema["required"] = ["key_2"]
    normalise(json.dumps(schema))
