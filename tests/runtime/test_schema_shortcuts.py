"""What compiling a schema leaves out, or asks once, since it is mostly not needed: the answers are the same."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints.grammar_source import GrammarSource, source_of_schema
from niwaki.runtime.constraints.regex_language import Languages, Term, TooManyTerms
from niwaki.runtime.constraints.schema import array_ends, closings, normalise
from niwaki.runtime.constraints.schema.document import Json
from niwaki.runtime.constraints.schema.strings import MAX_KEPT, MAX_KEPT_TERMS, asked_of

DIGITS: Json = {"type": "string", "pattern": "^[0-9]{3}$"}
UNSEEN: Json = {"type": "array", "contains": {"const": 1}, "items": {"anyOf": [{"const": 1}, DIGITS]}}


def source(schema: Json) -> GrammarSource:
    return source_of_schema(JsonSchema(json.dumps(schema)), 10, b"a")


@pytest.mark.parametrize(
    "schema",
    [
        DIGITS,
        {"properties": {"a": {"properties": {"b": DIGITS}}}},
        {"patternProperties": {"^[0-9]{3}$": {"type": "null"}}, "additionalProperties": False},
        {"not": {"additionalProperties": {"type": "null"}}, "patternProperties": {"^[xy]{2}$": True}},
        {"type": "array", "contains": {"const": 17}, "maxItems": 3},
        {"properties": {"a": UNSEEN}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "prefixItems": [DIGITS], "items": {"$ref": "#"}}}},
    ],
)
def test_what_strings_and_arrays_end_with_is_looked_for_wherever_there_is_something(schema: dict[str, Json]) -> None:
    def unsolved(part: dict[str, Json]) -> bytes:
        raise AssertionError(part)

    normal, found = normalise(json.dumps(schema)).schema, source(schema)
    assert found.closings == closings(normal)
    assert found.array_ends == array_ends(normal, unsolved)
    assert found.closings or found.array_ends


def test_keys_that_are_called_as_keywords_are_no_patterns() -> None:
    named: Json = {"type": "object", "properties": {"patternProperties": {"type": "object", "properties": {"x": {}}}}}
    assert source({"type": "object", "properties": {"properties": named}}).closings == ()


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a/b~c": 5}}, "/properties/a~1b~0c"),
        ({"anyOf": [True, "x"]}, "/anyOf/1"),
        ({"not": None}, "/not"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": 1.5}}}, "/$defs/a/items"),
    ],
)
def test_what_is_no_schema_is_refused_where_it_stands(schema: Json, pointer: str) -> None:
    with pytest.raises(ConstraintError, match="^" + re.escape(f"schema at {pointer}: ")):
        normalise(json.dumps(schema))


@pytest.mark.parametrize("is_any", [True, False])
def test_references_lead_to_true_and_false(is_any: bool) -> None:
    schema = {"anyOf": [{"$ref": "#/$defs/a/0"}, {"type": "null"}], "$defs": {"a": [is_any]}}
    assert normalise(json.dumps(schema)).schema == (True if is_any else {"type": "null"})


def test_the_last_patterns_of_a_thread_are_kept_while_they_are_small() -> None:
    def language(languages: Languages, term: Term) -> Languages:
        return languages

    def much(languages: Languages, term: Term) -> Languages:
        for code in range(MAX_KEPT_TERMS + 1):
            languages.after(term, code)
        return languages

    first = asked_of("^first$", language)
    assert asked_of("^first$", language) is first
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asked_of, "^first$", language).result() is not first
    for number in range(MAX_KEPT):
        asked_of(f"^{number}$", language)
    assert asked_of("^first$", language) is not first
    assert asked_of("^large$", much) is not asked_of("^large$", language)


def test_a_question_that_is_too_much_leaves_the_pattern_as_it_was() -> None:
    def too_much(languages: Languages, term: Term) -> str | None:
        return languages.shortest(term, 1)

    with pytest.raises(TooManyTerms):
        asked_of("^[ab]{9}$", too_much)
    assert asked_of("^[ab]{9}$", lambda languages, term: languages.shortest(term)) == "a" * 9
