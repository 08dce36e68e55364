"""A step's masks are filled together, beside the forward pass; each is what its matcher alone would say."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from niwaki.runtime.api import Choices, Constraint, ConstraintError, JsonSchema, Regex
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary
from niwaki.runtime.constraints.masks import MaskFiller
from niwaki.runtime.tokenizer import Tokenizer
from tests.toy import make_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
CONSTRAINTS: list[Constraint] = [JsonSchema(json.dumps(SCHEMA)), Regex("[a-z ]+"), Regex("x{3,9}"), Choices(("a", "b"))]


def test_every_row_is_what_its_matcher_alone_says(tmp_path: Path) -> None:
    vocabulary = Vocabulary(Tokenizer(make_tokenizer(tmp_path)).token_bytes, {1}, 450)
    compiler = ConstraintCompiler(vocabulary, seconds=20)
    filler = MaskFiller(vocabulary.num_words)
    draw = random.Random(2)
    alone = np.zeros(vocabulary.num_words, np.uint32)
    texts = [(compiler.compile(one).matcher(), draw.randint(2, 30)) for one in CONSTRAINTS * 4]
    for step in range(8):
        wanted: list[tuple[Matcher, int]] = [(matcher, max(1, left - step)) for matcher, left in texts]
        rows = filler.start(wanted).rows()
        for (matcher, left), row in zip(wanted, rows, strict=True):
            assert isinstance(row, np.ndarray)
            matcher.fill_mask_within(alone, left)
            assert row.tolist() == alone.tolist()
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if not matcher.is_done:
                matcher.accept(int(draw.choice(allowed)))
    filler.close()
    compiler.close()


def test_rows_of_one_state_are_one_array_and_nothing_wanted_costs_no_thread(tmp_path: Path) -> None:
    vocabulary = Vocabulary(Tokenizer(make_tokenizer(tmp_path)).token_bytes, {1}, 450)
    compiler = ConstraintCompiler(vocabulary)
    filler = MaskFiller(vocabulary.num_words)
    compiled = compiler.compile(Regex("[a-z ]+"))
    filler.start([(compiled.matcher(), 50)]).rows()
    one, other = filler.start([(compiled.matcher(), 50), (compiled.matcher(), 50)]).rows()
    assert one is other
    assert filler.start([]).rows() == []
    filler.close()
    compiler.close()


def test_texts_that_begin_alike_are_masked_once_also_after_a_step_back(tmp_path: Path) -> None:
    vocabulary = Vocabulary(Tokenizer(make_tokenizer(tmp_path)).token_bytes, {1}, 450)
    compiler = ConstraintCompiler(vocabulary, seconds=20)
    filler = MaskFiller(vocabulary.num_words)
    compiled = compiler.compile(CONSTRAINTS[0])
    first, later = compiled.matcher(), compiled.matcher()
    ids = [vocabulary.token_bytes.index(bytes([byte])) for byte in b'{"a":"x'] + [None]
    before = compiled.num_bytes
    for token_id in ids:
        (row,) = filler.start([(first, 900)]).rows()
        (same,) = filler.start([(later, 900)]).rows()
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
    filler.close()
    compiler.close()


def test_a_matcher_that_fails_fails_alone(tmp_path: Path) -> None:
    vocabulary = Vocabulary(Tokenizer(make_tokenizer(tmp_path)).token_bytes, {1}, 450)
    compiler = ConstraintCompiler(vocabulary, seconds=20)
    filler = MaskFiller(vocabulary.num_words)
    good, bad = (compiler.compile(CONSTRAINTS[0]).matcher() for _ in range(2))
    bad.native.consume_token(vocabulary.size - 1)  # type: ignore[attr-defined]  # what it does not allow: it fails
    rows = filler.start([(good, 90), (bad, 90)]).rows()
    assert isinstance(rows[0], np.ndarray)
    assert isinstance(rows[1], ConstraintError)
    filler.close()
    compiler.close()
