"""Ends of texts that no text seen before shows: they are found with the effort of one place all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema  # type: ignore[import-untyped]  # ships no types
import pytest

from niwaki.runtime.api import JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.grammar_engine import GrammarMatcher
from niwaki.runtime.constraints.grammar_way import PLACE_EFFORT
from niwaki.runtime.constraints.guidance import SINGLE_BYTES, Effort, build, byte_tokenizer, straight_text

END = 256
VOCABULARY = Vocabulary([*(bytes([b]) for b in range(256)), None], {END})
KEYS = [f"a key of some length, number {number:03}" for number in range(80)]
ROWS: dict[str, object] = {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}
MANY: dict[str, object] = {"properties": {key: {"type": "string"} for key in KEYS}, "required": KEYS, "type": "object"}
FEWER: dict[str, object] = {**MANY, "required": KEYS[1::2]}
NESTED: dict[str, object] = {"properties": {**{key: {"type": "null"} for key in KEYS[:20]}, KEYS[0]: FEWER}}
NESTED |= {"required": KEYS[:20], "type": "object"}
LONG_KEYS = [f"{key} of a list that is longer than others are, and still is no list" for key in KEYS[:60]]
NUMBERS: dict[str, object] = {"required": LONG_KEYS}
NAMED: dict[str, object] = {"type": "object", "additionalProperties": False}
NAMES = {
    key: {"type": "string", "minLength": 3} for key in ("label of this one", "place where it is", "what it is for")
}
LEAF = {**NAMED, "properties": {**NAMES, "value": {}}, "required": [*NAMES, "value"]}
GROUPS = {
    **NAMED,
    "properties": {"groups": {"type": "array", "minItems": 1, "items": {"anyOf": [LEAF, {"$ref": "#"}]}}, **NAMES},
    "required": ["groups", *NAMES],
}

ASKING: dict[str, object] = {"type": ["array", "string"], "contains": {"type": "null"}, "maxContains": 3}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    ("wanted", "begun"),
    [
        pytest.param({"properties": {"rows": ROWS}}, '{"rows":[[":","tw', id="brackets in turn"),
        pytest.param({"properties": {"rows": {"type": "array", "items": ROWS}}}, '{"rows":[[["', id="more of them"),
        pytest.param({"properties": {"o": MANY}}, f'{{"o":{{"{KEYS[0]}":"x', id="many keys"),
        pytest.param(
            {"properties": {"o": NESTED}, "required": ["o"]},
            f'{{"o":{{"{KEYS[0]}":{{' + "".join(f'"{key}":"x",' for key in KEYS[:40]) + f'"{KEYS[40]}":"x',
            id="in a known end, too",
        ),
        pytest.param(
            NUMBERS, "{" + "".join(f'"{key}":841,' for key in LONG_KEYS[:8]) + f'"{LONG_KEYS[8]}":[3.', id="more"
        ),
        pytest.param(GROUPS, '{"groups":[{"groups":[{"', id="what may hold itself"),
        pytest.param({"properties": {"r": {"pattern": "[a-z]{162}", "type": "string"}}}, '{"r":"}x!', id="letters"),
        pytest.param({"properties": {"r": {"pattern": "(^|-)a", "type": "string"}}}, '{"r":"}x]', id="a bracket"),
        pytest.param({"properties": {"r": {"minLength": 500, "type": "string"}}}, '{"r":"x}', id="a length"),
        pytest.param({"properties": {"r": ASKING}}, '{"r":[', id="an item that is asked for"),
        pytest.param({"properties": {"r": ASKING}}, '{"r":["","null]",[null],{"k":null', id="behind others"),
        pytest.param({"properties": {"r": {**ASKING, "minContains": 3}}}, '{"r":[1,null,1', id="several of them"),
    ],
)
def test_an_end_is_found_where_several_things_must_close(
    wanted: dict[str, object], begun: str, compiler: ConstraintCompiler
) -> None:
    schema = {"type": "object", **wanted}
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    for byte in begun.encode():
        matcher.accept(byte)
    ending = matcher.clone().shortest_ending(10_000)
    assert ending is not None
    jsonschema.validate(json.loads(begun + bytes(ending).decode()), schema)
    assert matcher.fits(len(ending))


@pytest.mark.parametrize(("least", "most"), [(1, 9), (5, 5), (5, 8), (64, 64), (65, 90), (300, 400), (512, 512)])
def test_no_more_letters_are_written_than_a_string_must_have(least: int, most: int) -> None:
    place = build(f'start: /"[a-c]{{{least},{most}}}"/', byte_tokenizer())
    assert straight_text(place, SINGLE_BYTES, Effort(20)) == b'"' + b"a" * least + b'"'


def test_what_one_token_spends_comes_back_with_the_next_ones() -> None:
    effort = Effort(10)
    assert not effort.take(15)
    effort.add(4, 6)
    assert effort.left == 4
    effort.add(4, 6)
    assert effort.left == 6
    part = effort.part(5)
    assert (part.left, effort.left) == (5, 1)


def test_a_token_that_another_text_has_written_gives_its_effort_once(compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(JsonSchema('{"type": "string", "minLength": 9}'))
    for is_known in (False, True):
        matcher = compiled.matcher()
        assert isinstance(matcher, GrammarMatcher)
        for byte in b'"abc':
            assert bool(matcher._native)
            matcher._way.effort.left = 0
            matcher.accept(byte)
            assert bool(matcher._num_untold) == (is_known or byte == ord('"'))  # which is forced
            assert bool(matcher._native), "it is told"
            assert matcher._way.effort.left == PLACE_EFFORT


LATE: dict[str, object] = {
    "type": "array",
    "prefixItems": [{"const": 1}, {"anyOf": [{"type": "integer"}, {"enum": ["", "b"]}]}],
    "contains": {"type": "string", "format": "date"},
    "maxContains": 1,
}


def test_what_an_array_asks_for_ends_it_also_where_no_short_one_has_it(compiler: ConstraintCompiler) -> None:
    """A constant may be what is asked for, and a shortest array has it; behind its place a date must come."""
    matcher = compiler.compile(JsonSchema(json.dumps({"type": "array", "items": LATE}))).matcher()
    text = b"[[1,2" + b",[3,{},null]" * 6
    for byte in text:
        matcher.accept(byte)
    ending = b',"0001-01-01"]]'
    assert matcher.fits(len(ending))


class Counted:
    """A place that counts how often it is asked what may follow."""

    def __init__(self, place: object) -> None:
        self._place = place
        self.num_asked = 0

    def __getattr__(self, name: str) -> object:
        self.num_asked += name == "validate_tokens"
        return getattr(self._place, name)


@pytest.mark.parametrize(("item", "text"), [("integer", b"[7"), ("string", b'["x"')])
def test_of_an_array_of_many_items_not_each_rest_is_tried(item: str, text: bytes, compiler: ConstraintCompiler) -> None:
    """Where the budget is too small each was, at each token: 32 texts of 64 tokens took two seconds."""
    schema = {"type": "array", "items": {"type": item}, "minItems": 50}
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    assert isinstance(matcher, GrammarMatcher)
    for byte in text:
        matcher.accept(byte)
    bool(matcher._native)  # the place is told what was written
    place = Counted(matcher._native)
    end = matcher._way._search(None).known_end(place, 20)  # type: ignore[arg-type]  # it has what is asked
    assert end is not None
    assert len(json.loads(text + end)) >= 50
    assert place.num_asked <= 30


def test_an_end_is_looked_for_near_where_the_last_one_was(compiler: ConstraintCompiler) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 50}
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    assert isinstance(matcher, GrammarMatcher)
    text = b"[7,8,9"
    for byte in text:
        matcher.accept(byte)
    known = matcher._way.found(matcher._native, 0)
    assert known is not None
    for byte in b",1":
        matcher.accept(byte)
    bool(matcher._native)
    place = Counted(matcher._native)
    end = matcher._way._search(known).known_end(place, 20)  # type: ignore[arg-type]  # it has what is asked
    assert end is not None
    assert len(json.loads(text + b",1" + end)) == 50
    assert place.num_asked <= 24
