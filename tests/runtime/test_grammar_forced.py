"""What a grammar forces is worked out once, and with it the mask behind it. llguidance's own answer is the truth."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest

from niwaki.runtime.api import Grammar, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary, grammar_engine, grammar_forced
from niwaki.runtime.constraints.grammar_engine import GrammarConstraint, GrammarMatcher
from niwaki.runtime.constraints.grammar_forced import Ahead, look_ahead
from niwaki.runtime.constraints.grammar_places import Places
from niwaki.runtime.constraints.grammar_vocabulary import GrammarVocabulary
from niwaki.runtime.constraints.guidance import Native
from niwaki.runtime.constraints.protocol import NOTHING_FORCED, Forced

WORDS = [b'{"', b'":"', b'","', b"name", b'name"', b"na", b"me", b'{"na', b'"ab', b"ab", b'":', b'"}', b"},", b"ge"]
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), *WORDS, None], {256 + len(WORDS)})
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"enum": [1, 12]},
        "tags": {"type": "array", "items": {"const": "ab"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ONCE = {"type": "object", "properties": {"pair": {"type": "array", "uniqueItems": True}, "end": {"const": "ab"}}}
LONG = "name" + "abcd" * 200  # more than is told at once
CONSTRAINTS: dict[str, JsonSchema | Grammar] = {
    "schema": JsonSchema(json.dumps(PERSON)),
    "spaced": JsonSchema(json.dumps(PERSON), "spaced"),
    "checked": JsonSchema(json.dumps(ONCE)),
    "long": JsonSchema(json.dumps({"type": "object", "properties": {"name": {"const": LONG}}, "required": ["name"]})),
    "grammar": Grammar('start: "name: " /[a-c]+/ ", age: " ("1" | "12") "."'),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(VOCABULARY)
    yield made
    made.close()


def compiled(compiler: ConstraintCompiler, name: str) -> GrammarConstraint:
    constraint = compiler.compile(CONSTRAINTS[name])
    assert isinstance(constraint, GrammarConstraint)
    return constraint


def accept_text(matcher: GrammarMatcher, text: bytes) -> None:
    for byte in text:
        matcher.accept(byte)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[Ahead]:
    """What was worked out, in order."""
    found: list[Ahead] = []

    def look(matcher: Native, words: GrammarVocabulary) -> Ahead:
        found.append(look_ahead(matcher, words))
        return found[-1]

    monkeypatch.setattr(grammar_engine, "look_ahead", look)
    return found


def test_what_is_forced_is_worked_out_once_and_with_it_the_mask_behind(
    looked: list[Ahead], compiler: ConstraintCompiler
) -> None:
    constraint = compiler.compile(JsonSchema(json.dumps(PERSON) + " "))  # of which nothing is known
    assert isinstance(constraint, GrammarConstraint)
    matcher = constraint.matcher()
    assert [ahead.forced.text for ahead in looked] == [b'{"name":"']
    native = constraint._start.deep_copy()
    for written in (b"", b'{"', b"na", b"me", b'"', b":"):
        accept_text(matcher, written)
        assert native.consume_tokens([*written])
        rest = native.compute_ff_bytes()
        assert matcher.forced_text() == Forced(rest, looked[0].forced.follow)
        assert not matcher.can_end
    matcher.accept(ord('"'))
    assert matcher._num_untold == 9  # not one token was told
    assert matcher.forced_text() == NOTHING_FORCED
    known = matcher.known_mask(1000)
    assert known is not None
    assert native.consume_token(ord('"'))
    assert known.tobytes() == native.compute_bitmask()
    assert len(looked) == 1


def test_another_text_of_the_same_constraint_begins_with_what_is_known(
    looked: list[Ahead], compiler: ConstraintCompiler
) -> None:
    constraint = compiler.compile(JsonSchema(json.dumps(PERSON) + "  "))
    first, second = constraint.matcher(), constraint.matcher()
    assert first.forced_text() is second.forced_text()
    assert len(looked) == 1


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_and_what_is_forced_are_llguidances_whoever_asks_for_what(
    name: str, compiler: ConstraintCompiler
) -> None:
    constraint = compiled(compiler, name)
    words, size = constraint.words, VOCABULARY.size
    for seed in range(60):
        draw = random.Random(seed)
        if seed % 3:
            constraint.places = Places(constraint.places._grammar)
        matcher, alone = constraint.matcher(), constraint._start.deep_copy()
        own, truth = (np.zeros(VOCABULARY.num_words, np.uint32) for _ in range(2))
        for _ in range(40):
            alone.unsafe_compute_mask_ptr(truth.ctypes.data, truth.nbytes)
            assert not alone.is_error()
            for _ in range(draw.randint(0, 2)):
                if draw.random() < 0.5:
                    assert matcher.forced_text() == look_ahead(alone, words).forced
                else:
                    known = matcher.known_mask(1000)
                    matcher.fill_mask(own)
                    assert own.tobytes() == truth.tobytes()
                    assert known is None or known.tobytes() == truth.tobytes()
            if draw.random() < 0.3:
                assert matcher.can_end == alone.is_accepting()
                assert matcher.is_done == (alone.is_accepting() and not (truth & ~VOCABULARY.eos_words).any())
            allowed = np.flatnonzero(np.unpackbits(truth.view(np.uint8), bitorder="little")[: size - 1])
            if not len(allowed):
                assert matcher.is_done
                break
            forced = matcher.forced_text().text if draw.random() < 0.5 else b""
            fits = [token for token in allowed if forced.startswith(VOCABULARY.bytes_of(int(token)) or b"-")]
            token_id = int(draw.choice(fits or allowed))
            if draw.random() < 0.3:
                assert matcher.follow(token_id, 1000)
            elif not matcher.step(token_id, 1000):
                matcher.accept(token_id)
            if draw.random() < 0.1:
                matcher.rollback(1)
                matcher.accept(token_id)
            if draw.random() < 0.1:
                matcher = matcher.clone()
            assert alone.consume_token(token_id)


def test_masks_along_a_run_are_known_from_its_first_one_on(compiler: ConstraintCompiler) -> None:
    """Where no token writes more than the rest of it; each is the one that llguidance would work out."""
    constraint = compiled(compiler, "schema")
    constraint.places = Places(constraint.places._grammar)
    matcher, alone = constraint.matcher(), constraint._start.deep_copy()
    truth = np.zeros(VOCABULARY.num_words, np.uint32)
    accept_text(matcher, b'{"name":"a"')
    assert alone.consume_tokens([*b'{"name":"a"'])
    known = []
    for byte in b',"age":':
        mask = matcher.known_mask(1000)
        known.append(mask is not None)
        mask = matcher.new_mask() if mask is None else mask
        alone.unsafe_compute_mask_ptr(truth.ctypes.data, truth.nbytes)
        assert np.array_equal(mask, truth)
        assert not matcher.can_end
        matcher.accept(byte)
        assert alone.consume_token(byte)
    assert known == [False, *[True] * 6]
    assert matcher.forced_text().text == b"1"


@pytest.mark.parametrize(("name", "text"), [("schema", b'{"name":"'), ("long", b'{"name":"%s"' % LONG.encode())])
def test_texts_at_several_places_of_a_run_have_the_masks_of_their_own_places(
    compiler: ConstraintCompiler, name: str, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_forced, "ROWS_BYTES", 2 * 4 * VOCABULARY.num_words)
    monkeypatch.setattr(Places, "learn", lambda self, place, mask: mask)  # else they learn from each other
    constraint = compiled(compiler, name)
    constraint.places = Places("")
    truth = np.zeros(VOCABULARY.num_words, np.uint32)
    rng = random.Random(1)
    matchers = [constraint.matcher() for _ in range(5)]
    alone = [constraint._start.deep_copy() for _ in matchers]
    at = [0] * len(matchers)
    while any(place < len(text) for place in at):
        number = rng.choice([number for number, place in enumerate(at) if place < len(text)])
        for _ in range(rng.choice([1, 2, 30])):
            if at[number] == len(text):
                break
            mask = matchers[number].known_mask(5000)
            mask = matchers[number].new_mask() if mask is None else mask
            alone[number].unsafe_compute_mask_ptr(truth.ctypes.data, truth.nbytes)
            assert np.array_equal(mask, truth), (number, at)
            matchers[number].accept(text[at[number]])
            assert alone[number].consume_token(text[at[number]])
            at[number] += 1
