"""How a normal schema is written as a grammar: equal parts once, and nothing that is only to be read over."""

from __future__ import annotations

import json
import re

import pytest

from niwaki.runtime.api import JsonSchema, Spacing
from niwaki.runtime.constraints.grammar_source import GrammarSource, text_of_schema
from niwaki.runtime.constraints.guidance import MAX_SCHEMA_ITEMS, build, byte_tokenizer
from niwaki.runtime.constraints.schema import normalise
from niwaki.runtime.constraints.sources import source_of

QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)+/')
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}
LINE = {"type": "object", "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}}
# The first branch writes the point as it stands, the second refers to it.
LINES = {"anyOf": [{"type": "array", "items": LINE}, LINE], "$defs": {"point": POINT}}
TREE = {
    "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "value": True}}},
    "$ref": "#/$defs/tree",
}
MANY = {
    "type": "object",
    "properties": {
        "any": True,
        "tags": {"type": "array", "items": {"enum": ["a b", "c?d", [1, {"k": 2}]]}, "minItems": 1},
        "pair": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "null"}], "items": False},
        "few": {"type": "array", "contains": {"const": "x"}, "maxItems": 3},
        "map": {"type": "object", "patternProperties": {"^i": LINE}, "additionalProperties": {"type": "boolean"}},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["tags"],
    "$defs": {"point": POINT, **TREE["$defs"]},  # type: ignore[dict-item]  # a mapping
}


def test_what_is_referred_to_and_what_stands_as_it_is_become_one_rule() -> None:
    grammar = text_of_schema(normalise(json.dumps(LINES)).schema)
    rules = [line for line in grammar.split("\n") if re.match(r"[a-z]\w*: ", line)]
    assert sum(line.count('"\\"x\\""') for line in rules) == 1
    assert sum(line.count('"\\"from\\""') for line in rules) == 1


@pytest.mark.parametrize("count", [64, 65, 70, 1000, 3000])
@pytest.mark.parametrize("least", [0, 3])
@pytest.mark.parametrize("others", [False, {"type": "null"}])
def test_an_array_may_end_behind_any_of_many_places(count: int, least: int, others: object) -> None:
    kinds = [{"const": number % 7} for number in range(count)]
    schema = {"type": "array", "prefixItems": kinds, "minItems": least, "items": others}
    source = source_of(JsonSchema(json.dumps(schema)), 10, b"a")
    assert isinstance(source, GrammarSource)
    place = build(source.text, byte_tokenizer(), max_items=MAX_SCHEMA_ITEMS)
    assert place.try_consume_tokens([*b"["]) == 1
    for number in range(count + (2 if others else 1)):
        assert (place.validate_tokens([*b"]"]) == 1) == (number >= least)
        text = (b"," if number else b"") + (b"%d" % (number % 7) if number < count else b"null")
        wrong = (b"," if number else b"") + (b"%d" % ((number + 1) % 7) if number < count else b"1")
        assert place.validate_tokens([*wrong]) < len(wrong)
        fits = number < count or bool(others)
        assert (place.validate_tokens([*text]) == len(text)) == fits
        if fits:
            assert place.try_consume_tokens([*text]) == len(text)


def test_only_definitions_that_hold_themselves_are_named() -> None:
    assert "d_" not in text_of_schema(normalise(json.dumps(LINES)).schema)
    assert text_of_schema(normalise(json.dumps(TREE)).schema).count("\nd_") == 1


@pytest.mark.parametrize("spacing", ["compact", "spaced", "free"])
@pytest.mark.parametrize("schema", [LINES, TREE, MANY])
def test_rules_are_written_without_blanks_and_can_be_read(schema: object, spacing: Spacing) -> None:
    source = source_of(JsonSchema(json.dumps(schema), spacing), 10, b"a")
    assert isinstance(source, GrammarSource)
    assert not build(source.text, byte_tokenizer()).is_error()
    if spacing == "compact":
        for line in source.text.split("\n")[1:]:
            name, _, body = line.partition(": ")
            is_rule = name[:1].islower()
            assert not is_rule or not re.search(r'["(|] | [^A-Za-z]', QUOTED.sub('"', body)), line
