"""Schemas that say in `$schema` which draft they are of mean what a validator of that draft takes them for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # ships no types
import pytest
import referencing.exceptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, Matcher
from tests.runtime.test_schema_normal import VALUES, VOCABULARY, Json, admits, admitting_as

DRAFTS = {
    "http://json-schema.org/draft-04/schema#": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-06/schema#": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema.Draft202012Validator,
}
KEYS = st.sampled_from(["a", "b", "c"])
TYPED = st.sampled_from(["integer", "string", "array", "object", "number"]).map(lambda name: {"type": name})
SMALL = st.integers(0, 2)
PART: st.SearchStrategy[Any] = st.one_of(
    TYPED,
    st.fixed_dictionaries({"minimum": SMALL}, optional={"exclusiveMinimum": st.booleans()}),
    st.fixed_dictionaries({"maximum": SMALL}, optional={"exclusiveMaximum": st.booleans()}),
    st.fixed_dictionaries({"exclusiveMinimum": SMALL}),
    st.just({"$ref": "#/definitions/d"}),
    TYPED.map(lambda typed: {"$ref": "#/definitions/d", **typed}),
)
WORDS = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(KEYS, PART, max_size=2),
        "additionalProperties": st.one_of(st.booleans(), PART),
        "items": st.one_of(PART, st.lists(PART, min_size=1, max_size=2)),
        "additionalItems": st.one_of(st.booleans(), PART),
        "prefixItems": st.lists(PART, min_size=1, max_size=2),
        "contains": PART,
        "minContains": SMALL,
        "maxContains": SMALL,
        "const": st.sampled_from(VALUES),
        "propertyNames": st.just({"maxLength": 1}),
        "dependencies": st.dictionaries(KEYS, st.one_of(st.lists(KEYS, min_size=1, max_size=1), PART), max_size=1),
        "dependentRequired": st.dictionaries(KEYS, st.lists(KEYS, min_size=1, max_size=1), max_size=1),
        "if": PART,
        "then": PART,
        "not": PART,
    },
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20, max_bytes=1)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("dialect", [dialect for dialect in DRAFTS if "draft-0" in dialect])
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(words=WORDS, definition=TYPED)
def test_what_is_enforced_is_what_a_validator_of_the_draft_says(
    dialect: str, words: dict[str, Json], definition: Json, compiler: ConstraintCompiler
) -> None:
    schema = {"$schema": dialect, **words, "definitions": {"d": definition}}
    try:
        DRAFTS[dialect].check_schema(schema)
    except jsonschema.SchemaError:
        return
    admitting_as(compiler, schema, DRAFTS[dialect](schema))


@pytest.mark.parametrize(
    ("dialect", "schema", "place"),
    [
        ("draft-04", {"properties": {"a": {"const": 1}}}, "/properties/a/const"),
        ("draft-06", {"if": {"type": "integer"}, "then": {"minimum": 3}}, "/if"),
        ("draft-07", {"type": "array", "contains": {"const": 1}, "minContains": 0}, "/minContains"),
        ("draft-07", {"not": {"dependentRequired": {"a": ["b"]}}}, "/not/dependentRequired"),
        ("2019-09", {"prefixItems": [{"type": "integer"}]}, "/prefixItems"),
    ],
)
def test_a_word_of_a_later_draft_is_refused_at_its_place(
    dialect: str, schema: dict[str, Json], place: str, compiler: ConstraintCompiler
) -> None:
    (said,) = (uri for uri in DRAFTS if dialect in uri)
    with pytest.raises(ConstraintError) as caught:
        compiler.compile(JsonSchema(json.dumps({"$schema": said, **schema})))
    assert str(caught.value).startswith(f"schema at {place}: {dialect} does not know it")
    assert compiler.compile(JsonSchema(json.dumps(schema))).num_states > 0


def test_what_only_looks_like_a_later_word_is_none(compiler: ConstraintCompiler) -> None:
    """A property's name, and what stands beside a reference that draft 7 alone looks at."""
    said = {"$schema": "http://json-schema.org/draft-07/schema#"}
    named = {**said, "properties": {"prefixItems": {"type": "integer"}}, "required": ["prefixItems"], "type": "object"}
    assert admits(compiler.compile(JsonSchema(json.dumps(named))).matcher(), {"prefixItems": 3})
    beside = {**said, "$ref": "#/definitions/d", "prefixItems": [], "definitions": {"d": {"type": "integer"}}}
    assert admits(compiler.compile(JsonSchema(json.dumps(beside))).matcher(), 12)


def test_a_part_that_is_a_document_of_its_own_is_of_its_own_draft(compiler: ConstraintCompiler) -> None:
    """Beside a `$ref` draft 7 alone looks at nothing, and it knows no `prefixItems`."""
    old = {
        "$id": "old",
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"d": {"type": "integer"}},
    }
    beside = {**old, "items": {"$ref": "#/definitions/d", "maximum": 3}, "type": "array"}
    whole: dict[str, Json] = {"prefixItems": [{"$ref": "old"}, {"$ref": "old#/definitions/d", "maximum": 3}]}
    compiled = compiler.compile(JsonSchema(json.dumps({**whole, "type": "array", "$defs": {"old": beside}})))
    assert admits(compiled.matcher(), [[9], 3])
    assert not admits(compiled.matcher(), [[9], 4])
    late = {**old, "prefixItems": [True]}
    with pytest.raises(ConstraintError, match=r"/\$defs/old/prefixItems: draft-07 does not know it"):
        compiler.compile(JsonSchema(json.dumps({**whole, "type": "array", "$defs": {"old": late}})))


@pytest.mark.parametrize("around", [None, *DRAFTS])
@pytest.mark.parametrize(("word", "own"), [("id", "draft-04"), ("$id", "draft-07")])
def test_the_draft_around_a_part_says_which_word_makes_it_a_document(
    around: str | None, word: str, own: str, compiler: ConstraintCompiler
) -> None:
    """A part of draft 4 with an `id` in a whole of a later draft was one: what it said of the whole was refused."""
    said = {} if around is None else {"$schema": around}
    part = {word: "http://parts.example/part", "$schema": f"http://json-schema.org/{own}/schema#", "type": "array"}
    for defined in ({}, {"definitions": {"d": {"type": "string"}}}):
        inner = {**part, "items": {"$ref": "#/definitions/d"}, **defined}
        definitions = {"part": inner, "d": {"type": "integer"}}
        schema = {**said, "$ref": "#/definitions/part", "definitions": definitions}
        validator = DRAFTS.get(around or "", jsonschema.Draft202012Validator)(schema)
        try:
            valid = [value for value in VALUES if validator.is_valid(value)]
        except referencing.exceptions.Unresolvable:
            with pytest.raises(ConstraintError, match="leads to no schema"):
                compiler.compile(JsonSchema(json.dumps(schema)))
            continue
        compiled = compiler.compile(JsonSchema(json.dumps(schema)))
        assert [value for value in VALUES if admits(compiled.matcher(), value)] == valid
        assert [1] in valid or ["a"] in valid


def test_a_name_that_two_schemas_have_is_refused_where_it_is_used(compiler: ConstraintCompiler) -> None:
    """The first or the last of them was taken."""

    def named(kind: str, **names: str) -> Json:
        return {**names, "type": kind}

    def compiled(reference: str, *parts: Json) -> Matcher:
        schema = {"$ref": reference, "$defs": {str(n): part for n, part in enumerate(parts)}}
        return compiler.compile(JsonSchema(json.dumps(schema))).matcher()

    for name, reference in (("$id", "d"), ("$anchor", "#d"), ("$dynamicAnchor", "#d")):
        one, other = named("integer", **{name: "d"}), named("string", **{name: "d"})
        with pytest.raises(ConstraintError, match=r"schema at /\$ref: two schemas"):
            compiled(reference, one, other)
        assert admits(compiled(reference, one), 1)
    same = [named("integer", **{"$id": "d"})] * 2
    assert admits(compiled("d", *same), 1)


def test_a_fragment_alone_stays_in_the_part_that_it_is_in(compiler: ConstraintCompiler) -> None:
    """Also where another has the same `$id`."""

    def part(kind: str) -> Json:
        own: Json = {"type": kind, "$anchor": "d"}
        return {
            "$id": "part",
            "prefixItems": [{"$ref": "#d"}, {"$ref": "#/$defs/d"}],
            "$defs": {"d": own},
            "minItems": 2,
        }

    schema: Json = {"type": "array", "prefixItems": [part("integer"), part("string")], "minItems": 2}
    compiled = compiler.compile(JsonSchema(json.dumps(schema)))
    assert admits(compiled.matcher(), [[1, 2], ["a", "b"]])
    wrong_ones: list[Json] = [[[1, 2], [1, 2]], [["a", 1], ["a", "b"]], [[1, "a"], ["a", "b"]]]
    for wrong in wrong_ones:
        assert not admits(compiled.matcher(), wrong)
