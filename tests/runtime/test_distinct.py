"""Arrays that allow no item twice, by a check beside the mask: just those that a validator takes, and no dead ends."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from niwaki.runtime.api import ConstraintError, JsonSchema, Spacing
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary
from niwaki.runtime.constraints.distinct import DistinctMatcher
from niwaki.runtime.constraints.grammar_engine import GrammarMatcher
from tests.toy_constraints import allowed, check_masks_byte_by_byte, drawn_within, takes

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

WORDS = [
    b'","', b'"a"', b'"a","a"', b'"]', b'"}', b'},{"', b"0,", b"0,0", b",0", b",1", b"[0,0]", b"12", b"true",
    b"true,true", b", ", b'""', b"ab", b'b"', b'","a"', b"]}", b'{"a":', b"]]", b"],[", b"1]", b"[1,1],", b'{"', b"\n",
]  # fmt: skip
END = 256 + len(WORDS)
VOCABULARY = Vocabulary([*(bytes([b]) for b in range(256)), *WORDS, None], {END}, size=END + 40)
BUDGET = 60


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    yield compiler
    compiler.close()


SCALARS: list[Json] = [
    {"type": "string"},
    {"type": "string", "maxLength": 1},
    {"type": "string", "pattern": "^[ab]{0,2}$"},
    {"type": "integer"},
    {"type": "integer", "minimum": -1, "maximum": 11},
    {"type": "integer", "minimum": 1},
    {"type": "integer", "multipleOf": 5},
    {"type": "number"},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 11},
    {"type": ["boolean", "null", "integer"]},
    {"enum": [*range(12), "a", "ab", None, True, [1], [1, 1], {"a": 0}]},
    {"anyOf": [{"const": "aa"}, {"type": "string", "minLength": 3, "maxLength": 3}]},
]
CONTAINERS: list[Json] = [
    True,
    {"type": "array"},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
    {"type": "array", "items": {"enum": [*"abcdefghijkl"]}, "uniqueItems": True, "maxItems": 2},
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
        "additionalProperties": False,
    },
]
INTEGERS: Json = {"type": "array", "items": {"type": "integer"}}
ITEMS = st.sampled_from([*SCALARS, *CONTAINERS])
ARRAYS = st.builds(
    lambda items, prefix, least, more, contained: {
        "type": "array",
        "uniqueItems": True,
        "items": items,
        **({"prefixItems": prefix} if prefix else {}),
        **({"minItems": least} if least else {}),
        **({"maxItems": least + more} if more is not None else {}),
        **({"contains": contained} if contained is not None else {}),
    },
    ITEMS,
    st.lists(st.sampled_from(SCALARS), max_size=2),
    st.integers(0, 3),
    st.none() | st.integers(1, 3),
    st.none() | st.none() | st.sampled_from([{"const": 1}, {"type": "string"}]),
)
SCHEMAS = st.one_of(
    ARRAYS,
    st.builds(lambda array: {"type": "object", "properties": {"a": array}, "required": ["a"]}, ARRAYS),
    st.builds(lambda array: {"type": "array", "items": array, "maxItems": 2}, ARRAYS),
    st.builds(lambda array: {"anyOf": [array, {"type": "boolean"}]}, ARRAYS),
)
VALUES: list[Json] = [
    [], [0], [0, 0], [0, 1], [1, 0, 1], [1, 11, 1], [10, 5, 0], [-1, 1], ["a"], ["a", "a"], ["a", "b", ""],
    ["aa", "aaa"],
    ["aaa", "aa", "aab"], [True, 1, None], [True, True], [None, 0, None], [1.5, 0.1], [1.5, 1.5], [1e-05, 0.0001, 1],
    [[]], [[], []], [[1], [1, 2]], [[1, 2], [2, 1]], [[1, 1]], [[1], [1]], [[True], [1]], [["a", "b"], ["b", "a"]],
    [["a", "b"], ["a", "b"]], [{"a": 0}], [{"a": 0}, {"a": 1}], [{"a": 0}, {"a": 0}], [{"a": 0, "b": None}, {"a": 0}],
    [{"x": 1, "y": 2}, {"y": 2, "x": 1}], [{"x": 1, "y": 2}, {"y": 1, "x": 1}], [{"a": [1, 2]}, {"a": [2, 1]}],
    [{"a": [1, 1]}], [0, "0"], ["a", ["a"], {"a": "a"}], [*range(12)], [1, "x", "y", 1], [12, 1, 2], ["\\", '"', "é"],
    ["é", "é"], [{"a": 1, "c": {"x": 1, "y": [1]}}, {"a": 1, "c": {"y": [1], "x": 1}}],
]  # fmt: skip
TEXTS: list[Json] = [*VALUES, *({"a": value} for value in VALUES), *([value] for value in VALUES), [[0], [0]], True]


def compiled(compiler: ConstraintCompiler, schema: Json, spacing: Spacing = "compact") -> Matcher | None:
    try:
        return compiler.compile(JsonSchema(json.dumps(schema), spacing=spacing)).matcher()
    except ConstraintError:
        return None  # honest, and counted by a test of its own


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS)
def test_the_mask_takes_what_a_validator_takes(compiler: ConstraintCompiler, schema: Json) -> None:
    matcher = compiled(compiler, schema)
    if matcher is None:
        return
    validator = Draft202012Validator(schema)
    for value in TEXTS:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        assert takes(matcher, text) == validator.is_valid(value), (schema, text)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 1 << 30), st.sampled_from(["compact", "spaced", "free"]))
def test_what_is_drawn_ends_in_its_budget_and_validates(
    compiler: ConstraintCompiler, schema: Json, seed: int, spacing: Spacing
) -> None:
    matcher = compiled(compiler, schema, spacing)
    if matcher is None or not matcher.fits(BUDGET):
        return
    # Without likely bytes most texts are empty, or one long string.
    text = drawn_within(matcher, VOCABULARY, BUDGET, random.Random(seed), b'",:ab01nt{[ -', 0.9)
    assert matcher.can_end, (schema, text)
    assert Draft202012Validator(schema).is_valid(json.loads(text)), (schema, text)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 1 << 30))
def test_a_mask_holds_just_the_tokens_that_are_taken_byte_by_byte(
    compiler: ConstraintCompiler, schema: Json, seed: int
) -> None:
    matcher = compiled(compiler, schema)
    if matcher is None:
        return
    likely = b'",]}:ab01nt{['
    check_masks_byte_by_byte(matcher, VOCABULARY, END, 10, random.Random(seed), likely, str(schema))


def test_an_item_that_only_could_become_a_used_one_is_not_begun(compiler: ConstraintCompiler) -> None:
    matcher = compiled(
        compiler, {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 19}, "uniqueItems": True}
    )
    assert matcher is not None
    for byte in b"[2,1,":
        matcher.accept(byte)
    follow = {VOCABULARY.token_bytes[token] for token in allowed(matcher, VOCABULARY)}
    assert {b"1", b"3", b"0"} <= follow  # 1 may become 10
    assert not {b"2", b"0,0"} & follow
    for number in range(10, 20):
        for byte in b"%d," % number:
            matcher.accept(byte)
    follow = {VOCABULARY.token_bytes[token] for token in allowed(matcher, VOCABULARY)}
    assert b"1" not in follow
    assert b"3" in follow


def test_an_array_ends_when_every_item_is_used(compiler: ConstraintCompiler) -> None:
    schema: Json = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 12}, "uniqueItems": True}
    matcher = compiled(compiler, schema)
    assert matcher is not None
    for byte in json.dumps([*range(12, 0, -1)], separators=(",", ":")).encode()[:-1]:
        matcher.accept(byte)
    assert [VOCABULARY.token_bytes[token] for token in allowed(matcher, VOCABULARY)] == [b"]"]


def test_a_kind_that_is_used_up_leaves_only_what_fits_the_budget(compiler: ConstraintCompiler) -> None:
    names = [f"key number {number:02}" for number in range(20)]
    items: Json = {
        "type": ["boolean", "null", "object"],
        "properties": {name: {"type": "integer"} for name in names},
        "required": [*names],
        "additionalProperties": False,
    }
    matcher = compiled(compiler, {"type": "array", "items": items, "uniqueItems": True})
    assert matcher is not None
    remaining = 200
    for byte in b"[true,null,false":
        assert matcher.admits(byte, remaining)
        matcher.accept(byte)
        remaining -= 1
    assert not matcher.admits(ord(","), remaining)  # only an object may follow, of 340 tokens
    assert matcher.admits(ord("]"), remaining)


def test_items_share_what_was_used_before_them(compiler: ConstraintCompiler) -> None:
    matcher = compiled(compiler, {"type": "array", "items": {"type": "string"}, "uniqueItems": True})
    assert matcher is not None
    text = ",".join(f'"{number}"' for number in range(400))
    for byte in f"[{text}".encode():
        matcher.accept(byte)
    assert isinstance(matcher, GrammarMatcher)
    native = matcher._native
    assert isinstance(native, DistinctMatcher)
    kept = {id(layer): layer for reader in native._readers if reader.top for layer in reader.top.values._layers}
    assert sum(map(len, kept.values())) < 400 * 12  # 80,000 where each is a set of its own
    assert takes(matcher, ',"400"]')
    assert not any(takes(matcher, f',"{number}"]') for number in (0, 7, 398, 399))


def test_a_number_of_thousands_of_digits_is_told_from_others(compiler: ConstraintCompiler) -> None:
    matcher = compiled(compiler, {"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    assert matcher is not None
    digits = 5000 * "1"
    for byte in f"[{digits},{digits}".encode():
        matcher.accept(byte)
    assert takes(matcher, "2]")
    assert not takes(matcher, "]")


def test_an_item_that_cannot_be_read_is_an_error_that_says_so(compiler: ConstraintCompiler) -> None:
    matcher = compiled(compiler, {"type": "array", "items": {}, "uniqueItems": True})
    assert matcher is not None
    with pytest.raises(ConstraintError, match="nested too deeply"):  # noqa: PT012  # somewhere on the way out
        for byte in b"[" + 2000 * b"[" + 2000 * b"]":
            matcher.accept(byte)


def test_a_token_that_is_refused_leaves_the_text_as_it_was(compiler: ConstraintCompiler) -> None:
    """One that the grammar does not take, one that repeats an item, and one that does not exist."""
    matcher = compiler.compile(
        JsonSchema('{"type": "array", "items": {"type": "string"}, "uniqueItems": true}')
    ).matcher()
    for byte in b'["a",':
        matcher.accept(byte)
    for wrong in (ord("}"), 256 + WORDS.index(b'"a"'), VOCABULARY.size - 1):
        with pytest.raises(ConstraintError, match="is not allowed"):
            matcher.accept(wrong)
    for byte in b'"b"]':
        matcher.accept(byte)
    assert matcher.is_done


def test_taking_back_forgets_what_was_used(compiler: ConstraintCompiler) -> None:
    matcher = compiled(compiler, {"type": "array", "items": {"type": "string"}, "uniqueItems": True})
    assert matcher is not None
    for byte in b'["a","':
        matcher.accept(byte)
    twin = matcher.clone()
    matcher.rollback(6)
    for byte in b'["b","a"]':
        matcher.accept(byte)
    assert matcher.can_end
    assert takes(twin, 'b"]')
    assert not takes(twin, 'a"]')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"anyOf": [{"type": "array", "uniqueItems": True, "items": {"type": "string"}}, INTEGERS]}, "may also be one"),
        ({"type": "array", "uniqueItems": True, "items": {"type": "number", "multipleOf": 0.5}}, "steps"),
        (
            {
                "type": "array",
                "uniqueItems": True,
                "items": {"type": "object", "properties": {"a": {"type": "object"}}, "additionalProperties": False},
            },
            "neither always go on nor has one spelling",
        ),
        (
            {"type": "array", "uniqueItems": True, "minItems": 2, "items": {"type": "string", "pattern": "^a+$"}},
            "2 different",
        ),
        ({"type": "array", "uniqueItems": True, "minItems": 13, "items": {"enum": [*range(12)]}}, "different|no text"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_distinct_exactly_is_refused(
    compiler: ConstraintCompiler, schema: Json, reason: str
) -> None:
    with pytest.raises(ConstraintError, match=reason):
        compiler.compile(JsonSchema(json.dumps(schema)))


def test_most_of_these_schemas_are_enforced(compiler: ConstraintCompiler) -> None:
    """The tests above pass over what is refused."""
    taken = sum(
        compiled(compiler, {"type": "array", "uniqueItems": True, "items": item, "minItems": least}) is not None
        for item in [*SCALARS, *CONTAINERS]
        for least in (0, 1)
    )
    assert taken >= 36


def test_the_meta_schema_is_enforced_with_its_parts_under_defs(compiler: ConstraintCompiler) -> None:
    parts = {uri: REGISTRY.contents(uri) for uri in REGISTRY if "draft/2020-12" in uri}
    matcher = compiled(compiler, {"$ref": "https://json-schema.org/draft/2020-12/schema", "$defs": parts})
    assert matcher is not None
    for value in (
        {}, True, {"type": "object"}, {"type": "x"}, {"type": ["null", "null"]}, {"type": ["null", "array"]},
        {"required": ["a", "b"]}, {"required": ["a", "a"]}, {"$defs": {"a": {"minLength": 1}}}, {"minLength": -1},
        {"$defs": {"a": {"minLength": -1}}}, {"items": {"enum": [1, 1]}}, {"items": {"required": ["a", "a"]}}, 3,
    ):  # fmt: skip
        is_valid = Draft202012Validator(Draft202012Validator.META_SCHEMA).is_valid(value)
        assert takes(matcher, json.dumps(value, separators=(",", ":"))) == is_valid, value


def test_the_check_stands_only_beside_schemas_that_need_it(compiler: ConstraintCompiler) -> None:
    few = compiled(compiler, {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3]}})
    many = compiled(compiler, {"type": "array", "uniqueItems": True, "items": {"type": "integer"}})
    assert isinstance(few, GrammarMatcher)
    assert isinstance(many, GrammarMatcher)
    assert few.native is not None
    assert many.native is None
    assert isinstance(many._native, DistinctMatcher)
