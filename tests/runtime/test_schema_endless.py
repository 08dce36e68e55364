"""Parts of a schema that every value of would have to hold another one of never begin: a text could not end behind
them, however many tokens it may have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from niwaki.runtime.api import JsonSchema, Spacing
from niwaki.runtime.constraints import CompiledConstraint, ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.schema import lark, normalise
from niwaki.runtime.constraints.schema.document import Json
from niwaki.runtime.constraints.schema.endless import all_end, without_endless
from niwaki.runtime.constraints.schema.lark import lark_of

END = 256
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), None], {END}, size=END + 1)
ENDLESS: Json = {"type": "object", "properties": {"x": {"$ref": "#/$defs/endless"}}, "required": ["x"]}
LISTS: Json = {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1}
PART: Json = {"$ref": "#/$defs/endless"}
CLOSED: dict[str, Json] = {"type": "object", "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    yield compiler
    compiler.close()


def compiled(
    compiler: ConstraintCompiler, schema: dict[str, Json], endless: Json, spacing: Spacing
) -> CompiledConstraint:
    return compiler.compile(JsonSchema(json.dumps({**schema, "$defs": {"endless": endless}}), spacing=spacing))


def follow(compiled: CompiledConstraint, text: str) -> bytes:
    matcher = compiled.matcher()
    for byte in text.encode():
        matcher.accept(byte)
    row = np.zeros(VOCABULARY.num_words, np.uint32)
    matcher.fill_mask(row)
    return bytes(byte for byte in range(256) if row[byte >> 5] >> (byte & 31) & 1)


@pytest.mark.parametrize("endless", [ENDLESS, LISTS])
@pytest.mark.parametrize("spacing", ["compact", "spaced"])
@pytest.mark.parametrize(
    ("schema", "text", "behind"),
    [
        ({**CLOSED, "properties": {"a": PART, "b": {"type": "null"}}}, '{"', b"b"),
        ({**CLOSED, "properties": {"a": PART}}, "{", b"}"),
        ({"type": "array", "items": PART}, "[", b"]"),
        ({"type": "array", "prefixItems": [{"const": 1}, PART, {}]}, "[1", b"]"),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": PART, "maxItems": 5}, "[1", b"]"),
        ({"anyOf": [PART, {"type": "null"}]}, "", b"n"),
        ({"type": "array", "items": {"anyOf": [PART, {"const": 1}]}}, "[", b"1]"),
        ({"type": "object", "additionalProperties": PART}, "{", b"}"),
        ({"type": "object", "patternProperties": {"^a": PART}, "additionalProperties": False}, "{", b"}"),
    ],
)
def test_what_never_ends_does_not_begin(
    schema: dict[str, Json], text: str, behind: bytes, endless: Json, spacing: Spacing, compiler: ConstraintCompiler
) -> None:
    assert follow(compiled(compiler, schema, endless, spacing), text) == behind


def test_what_may_end_stays_as_it_is() -> None:
    tree: Json = {"type": "array", "items": {"$ref": "#"}, "maxItems": 3}
    normal = normalise(json.dumps(tree), 5).schema
    text = lark_of(normal)
    assert "d_" in text
    assert without_endless(text) == text
    grammar = (
        'start: a | b\na: "[" a "]"\nb: ("x" a)? "\\"|(" (c | a){2,3} | a+ | (a | "") b*\nc: %json {"type": 1}\nD: /a/'
    )
    assert without_endless(grammar) == ('start: b\nb: "\\"|(" (c){2,3} | ("") b*\nc: %json {"type": 1}\nD: /a/')
    alone = 'start: "[" start "]"'
    assert without_endless(alone) == alone


def test_a_text_that_is_spelled_as_a_rule_is_none() -> None:
    assert without_endless('start: "a" b\na: "[" a "]"\nb: "x"') == 'start: "a" b\nb: "x"'


def test_a_rule_leads_through_others_to_an_endless_one() -> None:
    grammar = 'start: (a | "0") d?\na: "," b\nb: "," c\nc: "[" c "]"\nd: "x"'
    assert without_endless(grammar) == 'start: ("0") d?\nd: "x"'


def test_a_text_with_an_endless_part_beside_it_ends_within_its_budget(compiler: ConstraintCompiler) -> None:
    schema: dict[str, Json] = {**CLOSED, "properties": {"a": PART, "b": {"type": "null"}}}
    matcher = compiled(compiler, schema, ENDLESS, "compact").matcher()
    row = np.zeros(VOCABULARY.num_words, np.uint32)
    for remaining in range(100, 0, -1):
        matcher.fill_mask(row)
        allowed = [byte for byte in b'ax{":b}nul' if row[byte >> 5] >> (byte & 31) & 1]
        if not allowed:
            break
        matcher.forced_text()
        matcher.accept(next(byte for byte in allowed if matcher.admits(byte, remaining)))
    assert matcher.is_done


NEXT: Json = {"$ref": "#/$defs/n1"}
PARTS: list[Json] = [
    True,
    {"type": "integer"},
    {"enum": [[], {}]},
    {"$ref": "#/$defs/n0"},
    NEXT,
    {"type": "object", "properties": {"a": NEXT}, "required": ["a"]},
    {"type": "object", "properties": {"a": NEXT, "b": {"$ref": "#/$defs/n0"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": NEXT, "minProperties": 1},
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": NEXT, "required": ["c"]},
    {"type": "object", "additionalProperties": NEXT},
    {"type": "object", "patternProperties": {"^a": NEXT}, "additionalProperties": False, "minProperties": 1},
    {"type": ["array", "object"], "items": NEXT, "minItems": 1, "required": ["a"], "additionalProperties": NEXT},
    {"type": ["array", "null"], "items": NEXT, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, NEXT], "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": NEXT, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": NEXT, "minItems": 2},
    {"type": "array", "x-automaton": {"edges": [[[NEXT, 1]], []], "ends": [1]}},
    {"anyOf": [NEXT, {"type": "array", "items": {"$ref": "#/$defs/n0"}, "minItems": 1}]},
]


def test_where_all_definitions_surely_end_no_rule_is_endless() -> None:
    seen = set()
    for one, other in product(PARTS, repeat=2):
        definitions = {"n0": one, "n1": other}
        rules = _all_rules(definitions)
        has_none = without_endless(rules) == rules
        seen.add((all_end(definitions), has_none))
        assert has_none or not all_end(definitions), definitions
    assert seen == {(True, True), (False, False), (False, True)}  # unsure is no fault, only slower


def _all_rules(definitions: dict[str, Json]) -> str:
    """As `lark_of` writes them before it looks for endless ones."""
    writer = lark._Writer({"anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions], "$defs": definitions})
    shared = [f"d_{name}: {writer.part(part)}" for name, part in definitions.items()]
    return "\n".join(["start: d_n0 | d_n1", *shared, *writer.lines])
