"""A step's masks are filled together, beside the forward pass; each is what its matcher alone would say."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from niwaki.runtime.api import Choices, Constraint, ConstraintError, JsonSchema, Regex
from niwaki.runtime.constraints import CompiledConstraint, ConstraintCompiler, Matcher, Vocabulary
from niwaki.runtime.constraints.grammar_engine import GrammarConstraint, GrammarMatcher
from niwaki.runtime.constraints.grammar_places import Place, Places
from niwaki.runtime.constraints.grammar_source import text_of_schema
from niwaki.runtime.constraints.guidance import MIN_SLICED, build, tokenizer_of
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.masks import MaskFiller
from niwaki.runtime.constraints.schema import normalise
from tests.benchmarks.bench_masks import synthetic_vocabulary
from tests.toy_constraints import make_vocabulary

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
CONSTRAINTS: list[Constraint] = [JsonSchema(json.dumps(SCHEMA)), Regex("[a-z ]+"), Regex("x{3,9}"), Choices(("a", "b"))]


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    return make_vocabulary(tmp_path)


@pytest.fixture
def compiler(vocabulary: Vocabulary) -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(vocabulary, seconds=20)
    yield compiler
    compiler.close()


@pytest.fixture
def filler(vocabulary: Vocabulary) -> Iterator[MaskFiller]:
    filler = MaskFiller(vocabulary.num_words)
    yield filler
    filler.close()


def begun(compiled: CompiledConstraint, vocabulary: Vocabulary) -> Matcher:
    """A text of SCHEMA at a place where nothing is forced, of which nothing is known."""
    matcher = compiled.matcher()
    for byte in b'{"a":"x':
        matcher.accept(vocabulary.token_bytes.index(bytes([byte])))
    return matcher


def test_every_row_is_what_its_matcher_alone_says(
    vocabulary: Vocabulary, compiler: ConstraintCompiler, filler: MaskFiller
) -> None:
    draw = random.Random(2)
    alone = np.zeros(vocabulary.num_words, np.uint32)
    texts: list[Matcher] = [compiler.compile(one).matcher() for one in CONSTRAINTS * 4]
    for step in range(8):
        rows = filler.rows(texts) if step % 2 else filler.start(texts).rows()
        for matcher, row in zip(texts, rows, strict=True):
            assert isinstance(row, np.ndarray)
            matcher.fill_mask(alone)
            assert row.tolist() == alone.tolist()
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if not matcher.is_done:
                matcher.accept(int(draw.choice(allowed)))


def test_a_mask_holds_the_tokens_whose_bytes_may_follow_one_by_one_whatever_is_looked_at_together() -> None:
    pieces = [
        "ab",
        "a b",
        "name",
        "x" * 10,
        "x" * 11,
        "y" * 31,
        'a"',
        '":',
        "a\\",
        "\\n",
        "é",
        "a\x85",
        "z\x7f",
        "漢字",
        "🙂",
    ]
    tokens = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in pieces), b"\t", b"a\n"]
    vocabulary = Vocabulary([*tokens, None], {len(tokens)}, size=MIN_SLICED)
    compiler = ConstraintCompiler(vocabulary, seconds=20)
    schemas: list[object] = [
        SCHEMA,
        {"type": "string", "maxLength": 12},
        {"type": "string", "minLength": 9, "maxLength": 11},
        {"type": "string", "pattern": "^[^b]*$"},
        {"additionalProperties": {"type": "integer"}, "properties": {"na": {}, "name": {"type": "null"}}},
    ]
    draw = random.Random(3)
    row = np.zeros(vocabulary.num_words, np.uint32)
    for schema in schemas:
        compiled = compiler.compile(JsonSchema(json.dumps(schema)))
        for _ in range(6):
            matcher = compiled.matcher()
            assert isinstance(matcher, GrammarMatcher)
            while not matcher.is_done and draw.random() < 0.95:
                matcher.fill_mask(row)
                allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(tokens)]).tolist()
                native = matcher.native
                assert native is not None
                assert allowed == [
                    i for i, token in enumerate(tokens) if native.validate_tokens([*token]) == len(token)
                ]
                longer = [token_id for token_id in allowed if token_id > 255]
                matcher.accept(draw.choice(longer if longer and draw.random() < 0.5 else allowed))
    compiler.close()


def test_rows_of_one_state_are_one_array_and_nothing_wanted_costs_no_thread(
    compiler: ConstraintCompiler, filler: MaskFiller
) -> None:
    compiled = compiler.compile(Regex("[a-z ]+"))
    filler.start([compiled.matcher()]).rows()
    one, other = filler.start([compiled.matcher(), compiled.matcher()]).rows()
    assert one is other
    assert filler.start([]).rows() == []


def test_texts_at_one_place_share_the_mask_of_a_step_also_where_it_is_new(
    vocabulary: Vocabulary, compiler: ConstraintCompiler, filler: MaskFiller
) -> None:
    compiled = compiler.compile(CONSTRAINTS[0])
    matchers = [compiled.matcher() for _ in range(3)]
    matchers[2].accept(vocabulary.token_bytes.index(b"{"))
    one, same, other = filler.start(matchers).rows()
    assert one is same is not other


def test_texts_that_begin_alike_are_masked_once_also_after_a_step_back(
    vocabulary: Vocabulary, compiler: ConstraintCompiler, filler: MaskFiller
) -> None:
    compiled = compiler.compile(CONSTRAINTS[0])
    first, later = compiled.matcher(), compiled.matcher()
    ids = [vocabulary.token_bytes.index(bytes([byte])) for byte in b'{"a":"x'] + [None]
    before = compiled.num_bytes
    for token_id in ids:
        (row,) = filler.start([first]).rows()
        (same,) = filler.start([later]).rows()
        assert isinstance(row, np.ndarray)
        assert isinstance(same, np.ndarray)
        assert later.known_mask(900) is same
        assert row.tolist() == same.tolist()
        if token_id is not None:
            first.accept(token_id)
            later.accept(token_id)
    assert compiled.num_bytes > before
    later.rollback(len(ids) - 1)
    assert later.known_mask(900) is compiled.matcher().known_mask(900) is not None
    later.accept(ids[0] or 0)
    assert later.clone().known_mask(900) is later.known_mask(900) is not None


def test_masks_of_a_text_alone_are_its_own_and_take_no_memory_of_the_constraint(
    vocabulary: Vocabulary, compiler: ConstraintCompiler, filler: MaskFiller
) -> None:
    compiled = compiler.compile(CONSTRAINTS[0])
    assert isinstance(compiled, GrammarConstraint)
    text = compiled.matcher()
    rows = []
    alone = np.zeros(vocabulary.num_words, np.uint32)
    for byte in b'{"a":"x':
        rows += filler.rows([text])
        text.fill_mask(alone)
        assert isinstance(rows[-1], np.ndarray)
        assert rows[-1].tolist() == alone.tolist()
        text.accept(vocabulary.token_bytes.index(bytes([byte])))
    assert len({row.tobytes() for row in rows if isinstance(row, np.ndarray)}) > 3  # none was written over
    assert not compiled.places._masks


def test_masks_that_differ_outside_of_the_sample_by_which_they_are_looked_for_are_told_apart() -> None:
    places = Places("")
    places.expect_text()
    places.expect_text()
    masks = [np.zeros(4096, np.uint32) for _ in range(3)]
    masks[1][1] = masks[2][1] = 5
    one, other, again = (places.learn(Place(number, None), mask) for number, mask in enumerate(masks))
    assert [one.tolist(), other.tolist(), again.tolist()] == [mask.tolist() for mask in masks]
    assert one is not other is again


def test_what_is_forced_is_found_once_for_texts_that_begin_alike(
    vocabulary: Vocabulary, compiler: ConstraintCompiler
) -> None:
    compiled = compiler.compile(CONSTRAINTS[0])
    first, later = compiled.matcher(), compiled.matcher()
    texts = []
    for byte in b'{"a":"x"':
        for matcher in (first, later):
            matcher.accept(vocabulary.token_bytes.index(bytes([byte])))
        texts.append(first.forced_text().text)
        assert later.forced_text() is first.forced_text()
    assert texts == [b'"a":"', b'a":"', b'":"', b':"', b'"', b"", b"", b""]
    later.rollback(len(texts))
    assert later.forced_text().text == b'{"a":"'


def test_a_matcher_that_fails_fails_alone(
    vocabulary: Vocabulary, compiler: ConstraintCompiler, filler: MaskFiller
) -> None:
    for order in (1, -1):
        compiled = compiler.compile(JsonSchema(json.dumps(SCHEMA) + " " * order))  # of which no mask is known yet
        good, bad = begun(compiled, vocabulary), begun(compiled, vocabulary)
        bad.native.consume_token(vocabulary.size - 1)  # type: ignore[attr-defined]  # what it does not allow: it fails
        wanted = [good, bad][::order]
        rows = filler.start(wanted).rows()
        assert isinstance(rows[wanted.index(good)], np.ndarray)
        assert isinstance(rows[wanted.index(bad)], ConstraintError)


def test_a_fault_that_shows_in_a_mask_is_one_texts_alone_where_several_share_it(
    vocabulary: Vocabulary, compiler: ConstraintCompiler, filler: MaskFiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiler.compile(JsonSchema(json.dumps(SCHEMA) + "   "))
    bad, good, same = (begun(compiled, vocabulary) for _ in range(3))
    new_mask = GrammarMatcher.new_mask

    def fails_for_one(matcher: GrammarMatcher) -> Words:
        if matcher is bad:
            raise ConstraintError("too much")
        return new_mask(matcher)

    monkeypatch.setattr(GrammarMatcher, "new_mask", fails_for_one)
    fault, *masks = filler.rows((bad, good, same))
    assert isinstance(fault, ConstraintError)
    assert isinstance(good, GrammarMatcher)
    assert all(np.array_equal(mask, new_mask(good)) for mask in masks if isinstance(mask, np.ndarray))
    assert all(isinstance(mask, np.ndarray) for mask in masks)


def test_a_fault_of_the_filler_reaches_whoever_waits_and_it_goes_on(
    vocabulary: Vocabulary, compiler: ConstraintCompiler, filler: MaskFiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiler.compile(JsonSchema(json.dumps(SCHEMA) + "    "))
    with monkeypatch.context() as patch:
        patch.setattr(MaskFiller, "_fill", lambda *_: 1 / 0)
        masks = filler.start([begun(compiled, vocabulary)])
        with pytest.raises(ZeroDivisionError):
            masks.rows()
    (row,) = filler.start([begun(compiled, vocabulary)]).rows()
    assert isinstance(row, np.ndarray)


def test_the_thread_of_a_filler_ends_with_it_and_what_is_filled_at_once_needs_none(
    vocabulary: Vocabulary, compiler: ConstraintCompiler
) -> None:
    compiled = compiler.compile(JsonSchema(json.dumps(SCHEMA) + "     "))

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "niwaki-masks"]

    before = threads()
    filler = MaskFiller(vocabulary.num_words)
    filler.rows([begun(compiled, vocabulary)])
    assert threads() == before
    matcher = begun(compiled, vocabulary)
    matcher.accept(vocabulary.token_bytes.index(b'"'))
    filler.start([matcher]).rows()
    (mine,) = set(threads()) - set(before)
    del filler, matcher
    mine.join(60)
    assert not mine.is_alive()


def test_looking_at_tokens_together_changes_no_mask() -> None:
    """Of large vocabularies those that are plain text up to some lengths are: in strings with and without bounds."""
    vocabulary = synthetic_vocabulary(MIN_SLICED)
    properties: dict[str, object] = {f"k{most}": {"type": "string", "maxLength": most} for most in (1, 3, 5, 13, 40)}
    schema = {"properties": {**properties, "free": {"type": "string"}}, "required": [*properties, "free"]}
    grammar = text_of_schema(normalise(json.dumps({"type": "object", **schema})).schema)
    ends = sorted(vocabulary.eos_ids)
    matchers = [
        build(grammar, tokenizer_of(vocabulary.token_bytes, ends, vocabulary.size, slices)) for slices in (None, ())
    ]
    rng = random.Random(0)
    for _ in range(8):
        together, alone = (matcher.deep_copy() for matcher in matchers)
        for _ in range(60):
            mask = alone.compute_bitmask()
            assert together.compute_bitmask() == mask
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
            closing = [one for one in allowed if b'"' in (vocabulary.token_bytes[one] or b"")]
            token_id = rng.choice(closing if closing and rng.random() < 0.3 else allowed)
            if not (together.consume_token(token_id) and alone.consume_token(token_id)):
                break
