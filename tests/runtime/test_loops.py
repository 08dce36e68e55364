"""One text of a schema stays at one place inside free strings and behind points, and no mask changes by it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest

from niwaki.runtime.api import JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler
from niwaki.runtime.constraints.grammar_engine import GrammarConstraint
from niwaki.runtime.constraints.grammar_loops import NO_LOOP, NUMBER, STRING, Loops, open_behind, open_string
from niwaki.runtime.constraints.grammar_places import Places
from niwaki.runtime.constraints.grammar_source import text_of_schema
from niwaki.runtime.constraints.schema import normalise
from niwaki.runtime.constraints.schema.document import Json
from tests.benchmarks.bench_exact import bundled_vocabulary
from tests.runtime.test_situations import SCHEMAS, SPACINGS, VOCABULARY, drawn


def told_apart(one: Json, other: Json) -> Json:
    """Behind one of a kind the array ends, behind another kind another value comes."""
    short: Json = {"type": "array", "prefixItems": [one], "minItems": 1, "items": False}
    return {"anyOf": [short, {"type": "array", "prefixItems": [other, True], "minItems": 2, "items": False}]}


FREE: Json = {"type": "string"}
MORE: dict[str, tuple[Json, str]] = {  # with a text in which a mask hangs on what was written last
    "a constant": (told_apart({"const": "abc"}, FREE), '["abcd",1]'),
    "a length": (told_apart({"type": "string", "minLength": 1, "maxLength": 3}, FREE), '["a\u00e9cde",1]'),
    "at least": (told_apart({"type": "string", "minLength": 3}, FREE), '["abcde",1]'),
    "a pattern": (told_apart({"type": "string", "pattern": "^[0-9]{3}$"}, FREE), '["1234",1]'),
    "one of several letters": (told_apart({"type": "string", "pattern": "^[ab]c+d"}, FREE), '["accde",1]'),
    "an endless pattern": (told_apart({"type": "string", "pattern": "ab"}, FREE), '["xxaby",1]'),
    "a number": (told_apart({"const": 12.25}, {"type": "number"}), "[12.253,1]"),
    "bounds": (told_apart({"type": "number", "minimum": 1, "maximum": 3}, {"type": "number"}), "[3.001,1]"),
    "multiples": (told_apart({"type": "number", "multipleOf": 0.25}, {"type": "number"}), "[3.2512,1]"),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20, max_bytes=1)
    yield compiler
    compiler.close()


def compiled(compiler: ConstraintCompiler, schema: Json, spacing: str) -> GrammarConstraint:
    found = compiler.compile(JsonSchema(json.dumps(schema), spacing=spacing))  # type: ignore[arg-type]  # one of them
    assert isinstance(found, GrammarConstraint)
    return found


def loops_of(schema: Json) -> Loops:
    return Loops(text_of_schema(normalise(json.dumps(schema)).schema))


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_of_one_text_are_those_of_llguidance(name: str, spacing: str, compiler: ConstraintCompiler) -> None:
    constraint = compiled(compiler, SCHEMAS[name], spacing)
    grammar = constraint.places._grammar
    for seed in range(20):
        # Each is the first text, of which nothing is known.
        constraint.places = Places(grammar)
        draw = random.Random(seed)
        matcher, alone = constraint.matcher(), constraint._start.deep_copy()
        truth = np.zeros(VOCABULARY.num_words, np.uint32)
        for _ in range(40):
            known = matcher.known_mask(1000)
            found = matcher.new_mask() if known is None else known
            alone.unsafe_compute_mask_ptr(truth.ctypes.data, truth.nbytes)
            assert not alone.is_error()
            assert np.array_equal(found, truth)
            assert matcher.can_end == alone.is_accepting()
            token_id = drawn(truth, draw)
            if token_id is None:
                assert matcher.is_done
                break
            matcher.accept(token_id)
            if draw.random() < 0.1:
                matcher.rollback(1)
                matcher.accept(token_id)
            assert alone.consume_token(token_id)


def test_one_text_is_looked_up_where_it_stays(compiler: ConstraintCompiler) -> None:
    constraint = compiled(compiler, {"type": "object", "properties": {"name": {"type": "string"}}}, "compact")
    matcher = constraint.matcher()
    known = []
    for byte in b'{"name":"namely, some \xc3\xa9 words"':
        if matcher.known_mask(1000) is None:
            matcher.new_mask()
            known.append(False)
        else:
            known.append(True)
        matcher.accept(byte)
    assert known[:2] == [False, True]  # behind what the start forces
    assert known[2:] == [False] * 13 + [True] * 8 + [False] * 4 + [True] * 4  # it is looked for behind a word


KEYED: Json = {"type": "object", "additionalProperties": {"type": "array", "items": FREE}, "maxProperties": 3}
PAIRED: Json = {"type": "array", "items": {"type": "object", "properties": {"ab": FREE}, "required": ["ab"]}}
OPENED: list[tuple[Json, str, bytes, int]] = [
    (FREE, "compact", b'"', STRING),
    ({"type": "array", "items": FREE}, "compact", b'["', STRING),
    ({"type": "array", "items": FREE}, "free", b'["a b', STRING),
    (KEYED, "compact", b'{"a', STRING),
    (KEYED, "spaced", b'{"a": ["b", "', STRING),
    (PAIRED, "compact", b'[{"ab":"c', STRING),
    (PAIRED, "free", b'[{"ab":"c","d', STRING),  # a key that is spelled in one way
    (told_apart(FREE, {"type": "string", "minLength": 2}), "compact", b'["abc', STRING),
]


@pytest.mark.parametrize(("schema", "spacing", "text", "loop"), OPENED)
def test_the_mask_inside_a_free_string_is_put_together(schema: Json, spacing: str, text: bytes, loop: int) -> None:
    """As llguidance works it out, of tokens that close the string and go on, too."""
    vocabulary = bundled_vocabulary()[1]
    compiler = ConstraintCompiler(vocabulary, seconds=20)
    constraint = compiled(compiler, schema, spacing)
    words, (matcher, alone) = constraint.words, (constraint.matcher(), constraint._start.deep_copy())
    matcher.accept_bytes(text)
    assert alone.consume_tokens([words.ids[byte] for byte in text])
    found, truth = matcher.new_mask(), np.zeros(vocabulary.num_words, np.uint32)
    place = matcher.place
    assert place is not None
    assert place.loop == loop
    alone.unsafe_compute_mask_ptr(truth.ctypes.data, truth.nbytes)
    assert np.array_equal(found, truth)
    compiler.close()


@pytest.mark.parametrize("name", MORE)
def test_what_may_still_tell_a_text_apart_is_not_passed_over(name: str, compiler: ConstraintCompiler) -> None:
    schema, text = MORE[name]
    constraint = compiled(compiler, schema, "compact")
    matcher, alone = constraint.matcher(), constraint._start.deep_copy()
    truth = np.zeros(VOCABULARY.num_words, np.uint32)
    for byte in text.encode():
        known = matcher.known_mask(1000)
        found = matcher.new_mask() if known is None else known
        alone.unsafe_compute_mask_ptr(truth.ctypes.data, truth.nbytes)
        assert np.array_equal(found, truth)
        matcher.accept(byte)
        assert alone.consume_token(byte)


NAMED: Json = {"type": "object", "properties": {"ab": {"type": "null"}}}
SHORT: Json = [FREE, {"type": "array", "items": {"type": "string", "maxLength": 2}}]
DIGITS: Json = [FREE, {"type": "array", "items": {"type": "string", "pattern": "^[0-9]{3}$"}}]
LETTERS: Json = [FREE, {"type": "array", "items": {"type": "string", "pattern": "^a*b"}}]
NUMBERS: Json = [{"type": "number"}, {"type": "array", "items": {"enum": [12.25, "a"]}}]
BOUNDS: Json = [{"type": "number"}, {"type": "array", "items": {"type": "number", "minimum": 0}}]


@pytest.mark.parametrize(
    ("schema", "opened", "found"),
    [
        (FREE, b'"', STRING),
        (FREE, b'"a\xc3', NO_LOOP),
        (FREE, b'"a\\n', NO_LOOP),
        ({"enum": ["ab"]}, b'"', NO_LOOP),
        (NAMED, b'"a', NO_LOOP),
        (NAMED, b'"ac', STRING),
        ({"type": "string", "minLength": 3}, b'"ab', NO_LOOP),
        ({"type": "string", "minLength": 3}, b'"abc', STRING),
        ({"type": "string", "minLength": 3}, b'"\xc3\xa91', NO_LOOP),
        ({"anyOf": SHORT}, b'"ab', NO_LOOP),
        ({"anyOf": SHORT}, b'"abc', STRING),
        ({"anyOf": DIGITS}, b'"1a', NO_LOOP),
        ({"anyOf": DIGITS}, b'"a1', STRING),
        ({"anyOf": LETTERS}, b'"c', NO_LOOP),
        ({"type": "number"}, b"1", NO_LOOP),
        ({"type": "number"}, b"-1.", NO_LOOP),
        ({"type": "number"}, b"-1.0", NUMBER),
        ({"type": "number"}, b"1.0e1", NO_LOOP),
        ({"anyOf": NUMBERS}, b"12.2", NO_LOOP),
        ({"anyOf": NUMBERS}, b"12.3", NUMBER),
        ({"anyOf": BOUNDS}, b"1.2", NO_LOOP),
    ],
)
def test_where_a_text_stays(schema: Json, opened: bytes, found: int) -> None:
    assert loops_of(schema).at(opened) == found


def test_what_is_open_is_told_from_the_text() -> None:
    assert open_behind(b"", b'{"a":"b\\"c') == b'"b\\"c'
    assert open_behind(b'"b', b'c","d') == b'"d'
    assert open_behind(b'"b', b"cd") == b'"bcd'
    assert open_behind(b'"b\\', b'"c"') == b""
    assert open_behind(b"12", b".5") == b"12.5"
    assert open_behind(b"", b'["1",-12.5') == b"-12.5"
    assert open_string(b',"ab') == b'"ab'
    assert open_string(b'"ab') is None
    assert open_string(b'a\\"b') is None
