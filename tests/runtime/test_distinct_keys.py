"""Objects that ask for two unknown keys and more: no key comes twice in them, so that as many come as are counted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from niwaki.runtime.api import ConstraintError, JsonSchema, Spacing
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.distinct import DistinctMatcher
from niwaki.runtime.constraints.grammar_engine import GrammarMatcher
from tests.runtime.test_distinct import Json, compiled
from tests.toy_constraints import allowed, check_masks_byte_by_byte, drawn_within, takes

WORDS = [
    b'","', b'"a"', b'"a":', b'"b":0', b'":', b'":0,"', b'{"', b'{"a":0,"a', b'{"c":0,"c":', b',"a"', b'0,"', b"},{",
    b'"}', b'"},"', b'{"":', b'"":0', b'""', b', "', b'ab"', b'b":1,"b"', b"0}", b"\n", b'":{"c":0,"c":0', b'b","b":',
]  # fmt: skip
END = 256 + len(WORDS)
VOCABULARY = Vocabulary([*(bytes([b]) for b in range(256)), *WORDS, None], {END})
BUDGET = 90

VALUES_OF_KEYS: list[Json] = [{}, {"type": "integer"}, {"type": "string", "maxLength": 2}, {"enum": [0, "a"]}]
PATTERNS: list[Json] = [{"^[bc]$": {"type": "integer"}}, {"^a": {}}, {"^[ab]{0,2}$": {"enum": [0, 1]}}]
OBJECTS = st.builds(
    lambda least, more, properties, required, patterns, rest, names: {
        "type": "object",
        "minProperties": least,
        **({"maxProperties": least + more} if more is not None else {}),
        **({"properties": dict(sorted(properties.items()))} if properties else {}),
        **({"required": [name for name in required if name in properties]} if required else {}),
        **({"patternProperties": patterns} if patterns is not None else {}),
        **({"additionalProperties": rest} if rest is not None else {}),
        **({"propertyNames": names} if names is not None else {}),
    },
    st.integers(2, 4),
    st.none() | st.integers(0, 2),
    st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from([*VALUES_OF_KEYS, False]), max_size=2),
    st.lists(st.sampled_from(["a", "b"]), max_size=1),
    st.none() | st.sampled_from(PATTERNS),
    st.none() | st.sampled_from([*VALUES_OF_KEYS, False]),
    st.none() | st.none() | st.sampled_from([{"pattern": "^[a-c]*$"}, {"maxLength": 1}]),
)
SCHEMAS = st.one_of(
    OBJECTS,
    st.builds(lambda inner: {"type": "object", "properties": {"o": inner}, "required": ["o"]}, OBJECTS),
    st.builds(lambda inner: {**inner, "additionalProperties": inner}, OBJECTS),
    st.builds(lambda inner: {"type": "array", "items": inner, "uniqueItems": True, "maxItems": 2}, OBJECTS),
    st.builds(lambda one, other: {"anyOf": [one, other, {"type": "boolean"}]}, OBJECTS, OBJECTS),
)
OBJECT_VALUES: list[Json] = [
    {}, {"a": 0}, {"a": 0, "b": 0}, {"b": 0, "c": 0}, {"a": "a", "b": 0}, {"a": 0, "b": 0, "c": 0}, {"": 0, "c": 1},
    {"c": 0, "d": 0}, {"c": 0, "cc": 0, "d": 0}, {"a": 0, "b": 0, "aa": 0, "c": 0, "d": 0}, {"é": 0, "\\": 0, '"': 0},
    {"aa": 0, "ab": 1, "bb": 0, "": 0}, {"c": {"c": 0, "d": 0}, "d": {"c": 0, "d": 0}}, {"\n": 0, "\x01": 1, "c": 0},
    {"x": "a", "y": "a", "z": 0, "zz": 0, "zzz": 0, "zzzz": 0, "b1": 0},
]  # fmt: skip
VALUES: list[Json] = [
    *OBJECT_VALUES, *({"o": value} for value in OBJECT_VALUES), *([value] for value in OBJECT_VALUES),
    *([OBJECT_VALUES[2], value] for value in OBJECT_VALUES), [], True, 0,
]  # fmt: skip


def with_first(value: Json, first: str | None) -> Json:
    if isinstance(value, list):
        return [with_first(item, first) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: with_first(value[key], first) for key in sorted(value, key=lambda key: key != first)}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    yield compiler
    compiler.close()


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS)
def test_the_mask_takes_what_a_validator_takes(compiler: ConstraintCompiler, schema: Json) -> None:
    matcher = compiled(compiler, schema)
    if matcher is None:  # another test tells that it is refused rightly
        return
    validator = Draft202012Validator(schema)
    for value in VALUES:
        # Keys that the schema names come first.
        texts = {
            json.dumps(with_first(value, key), separators=(",", ":"), ensure_ascii=False) for key in (None, "a", "b")
        }
        assert any(takes(matcher, text) for text in texts) == validator.is_valid(value), (schema, value)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 1 << 30), st.sampled_from(["compact", "spaced", "free"]))
def test_what_is_drawn_ends_in_its_budget_and_validates(
    compiler: ConstraintCompiler, schema: Json, seed: int, spacing: Spacing
) -> None:
    matcher = compiled(compiler, schema, spacing)
    if matcher is None or not matcher.fits(BUDGET):
        return
    # Without likely bytes most texts are empty, or one long string.
    text = drawn_within(matcher, VOCABULARY, BUDGET, random.Random(seed), b'",:abc01{} -', 0.95)
    assert matcher.can_end, (schema, text)
    assert Draft202012Validator(schema).is_valid(json.loads(text)), (schema, text)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 1 << 30))
def test_a_mask_holds_just_the_tokens_that_are_taken_byte_by_byte(
    compiler: ConstraintCompiler, schema: Json, seed: int
) -> None:
    matcher = compiled(compiler, schema)
    if matcher is None:
        return
    likely, singles = b'",{}:ab0', b'",:{}[]abc 01'
    check_masks_byte_by_byte(matcher, VOCABULARY, END, 14, random.Random(seed), likely, str(schema), singles)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(OBJECTS)
def test_an_object_that_asks_for_several_unknown_keys_is_refused_only_where_there_is_none(
    compiler: ConstraintCompiler, schema: Json
) -> None:
    if compiled(compiler, schema) is None:
        with pytest.raises(ConstraintError, match="admits no text"):
            compiler.compile(JsonSchema(json.dumps(schema)))
        validator = Draft202012Validator(schema)
        assert not any(map(validator.is_valid, OBJECT_VALUES)), schema


def test_no_key_comes_twice_where_they_are_counted_and_none_is_begun_that_could_only_be_a_used_one(
    compiler: ConstraintCompiler,
) -> None:
    matcher = compiled(
        compiler, {"minProperties": 2, "patternProperties": {"^[ab]$": {}}, "additionalProperties": False}
    )
    assert matcher is not None
    for byte in b'{"a":0,"':
        matcher.accept(byte)
    assert [token for token in allowed(matcher, VOCABULARY) if token < 256] == [ord("b")]
    for byte in b'b":0':
        matcher.accept(byte)
    assert {ord("}")} == {token for token in allowed(matcher, VOCABULARY) if token < 256 and chr(token) in ",}"}


def test_a_key_may_still_come_twice_where_known_ones_are_enough(compiler: ConstraintCompiler) -> None:
    """As in every other object: a validator sees the last one, and the required keys are there whatever it is."""
    matcher = compiled(compiler, {"type": "object", "required": ["a", "b"], "minProperties": 2})
    assert isinstance(matcher, GrammarMatcher)
    assert not isinstance(matcher._native, DistinctMatcher)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {
                "anyOf": [
                    {"type": "object", "minProperties": 2},
                    {"type": "object", "additionalProperties": {"const": 1}},
                ]
            },
            "schema at /minProperties: cannot be enforced where an object may also be one whose keys may repeat",
        ),
        (
            {"type": "object", "minProperties": 60, "patternProperties": {"^x": {}}, "additionalProperties": False},
            "schema at its root: minProperties: beside patterns of keys at most 50 more can be asked for",
        ),
        ({"type": "object", "minProperties": 3, "propertyNames": {"pattern": "^[ab]$"}}, "admits no text"),
    ],
    ids=str,
)
def test_what_cannot_be_counted_is_refused_with_its_reason(
    compiler: ConstraintCompiler, schema: Json, reason: str
) -> None:
    with pytest.raises(ConstraintError, match=reason):
        compiler.compile(JsonSchema(json.dumps(schema)))
