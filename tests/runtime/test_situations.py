"""Texts of a schema that differ in what no terminal tells apart share their places, and no mask changes by it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest

from niwaki.runtime.api import JsonSchema, Spacing
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary, grammar_places, grammar_situations
from niwaki.runtime.constraints.grammar_engine import GrammarConstraint, GrammarMatcher
from niwaki.runtime.constraints.grammar_rules import Rules
from niwaki.runtime.constraints.grammar_situations import START, Situations
from niwaki.runtime.constraints.grammar_source import text_of_schema
from niwaki.runtime.constraints.grammar_terminals import Unknown
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.protocol import FREE
from niwaki.runtime.constraints.schema import normalise
from niwaki.runtime.constraints.schema.document import Json

PIECES = [
    b'{"', b'":', b'","', b'"}', b'":"', b'",', b'"]', b"],", b"}}", b"12", b"10", b"null,", b"tru", b"ab", b"a", b" a",
    "é".encode(), b"\xc3", b"\xa9a", "\U0001f600".encode(), b'\\"', b"\\u00", b'a","b', b'2,"', b"3]}", b'": ', b", ",
    b'["', b"[{", b"name", b'name":', b"-1", b"0.5", b"e1", b'","name',
]  # fmt: skip
END = 256 + len(PIECES)
SPACINGS: tuple[Spacing, ...] = ("compact", "spaced", "free")
VOCABULARY = Vocabulary([*(bytes([b]) for b in range(256)), *PIECES, None], {END}, size=END + 3)
OPEN: Json = {"type": "object", "properties": {"name": {"type": "string"}, "no": {"type": "integer"}}}
KINDS: list[Json] = [{"const": "a"}, {"type": "string", "pattern": "^a[0-9]+$"}, {"type": "null"}]
SCHEMAS: dict[str, Json] = {
    "strings, patterns and lengths": {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "ab": {"type": "string", "pattern": "^(ab)*a?$"},
            "name": {"type": "string", "minLength": 2, "maxLength": 4},
            "é": {"type": "string", "minLength": 3},
        },
        "required": ["a", "ab", "name", "é"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "array",
        "items": {"anyOf": [{"type": "number"}, {"type": "integer", "minimum": -3, "maximum": 120}, {"const": "1"}]},
        "minItems": 2,
        "maxItems": 5,
    },
    "constants": {
        "type": "array",
        "prefixItems": [
            {"enum": ["a", "ab", "abc", 1, 12, True, None]},
            {"enum": ["a", "b"]},
            {"anyOf": [{"const": "a"}, {"type": "integer"}]},
        ],
        "minItems": 3,
    },
    "many constants": {"type": "array", "items": {"enum": [*(f"a{n}" for n in range(20)), *range(9, 20), None]}},
    "what follows hangs on the value": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": kind, "no": {"const": number}},
                "required": ["name", "no"],
                "additionalProperties": False,
            }
            for number, kind in enumerate(KINDS)
        ]
    },
    "unknown keys": OPEN,
    "keys by pattern": {
        "type": "object",
        "properties": {"a1": {"type": "null"}},
        "patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "boolean"}},
        "additionalProperties": {"type": "string"},
    },
    "anything": {},
    "references": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"no": {"type": "integer"}, "a": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                "required": ["no"],
                "additionalProperties": False,
            }
        },
    },
    "a date": {"type": "array", "items": {"type": "string", "format": "date"}},
    "multiples": {"type": "array", "items": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 12}},
    "what must be contained": {"type": "array", "contains": {"const": 1}, "minContains": 2},
    "what is contained a number of times": {"items": {"enum": [1, "a"]}, "contains": {"const": 1}, "maxContains": 2},
    "no item twice": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    yield compiler
    compiler.close()


def compiled(compiler: ConstraintCompiler, schema: Json, spacing: Spacing = "compact") -> GrammarConstraint:
    found = compiler.compile(JsonSchema(json.dumps(schema), spacing=spacing))
    assert isinstance(found, GrammarConstraint)
    return found


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def written(constraint: GrammarConstraint, text: str) -> GrammarMatcher:
    matcher = constraint.matcher()
    for token_id in ids_of(text):
        matcher.accept(token_id)
    return matcher


def drawn(row: Words, draw: random.Random) -> int | None:
    """A token of the mask, one that closes something as often as any other."""
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    going = [token_id for token_id in allowed if token_id != END]
    closing = [token_id for token_id in going if (VOCABULARY.token_bytes[token_id] or b"")[-1:] in b'"]},:']
    return draw.choice(closing if closing and draw.random() < 0.5 else going) if going else None


@pytest.mark.parametrize("spacing", ["compact", "spaced", "free"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_of_shared_places_are_those_of_a_text_by_itself(
    name: str, spacing: Spacing, compiler: ConstraintCompiler
) -> None:
    constraint = compiled(compiler, SCHEMAS[name], spacing)
    constraint.matcher()  # from the second text on places are shared
    for seed in range(40):
        draw = random.Random(seed)
        matcher, alone = constraint.matcher(), constraint.matcher()._matcher
        own, truth = np.zeros(VOCABULARY.num_words, np.uint32), np.zeros(VOCABULARY.num_words, np.uint32)
        for _ in range(30):
            known = matcher.known_mask(1000)
            if known is None:
                matcher.fill_mask(own)
                matcher.learn(own)
            alone.unsafe_compute_mask_ptr(truth.ctypes.data, truth.nbytes)
            assert not alone.is_error()
            assert np.array_equal(own if known is None else known, truth)
            assert matcher.can_end == alone.is_accepting()
            token_id = drawn(truth, draw)
            if token_id is None:
                assert matcher.is_done
                break
            matcher.forced_text()
            if draw.random() < 0.3:
                assert matcher.follow(token_id, 1000)
            elif not matcher.step(token_id, 1000):
                matcher.accept(token_id)
            if draw.random() < 0.1:
                matcher.rollback(1)
                matcher.accept(token_id)
            assert alone.consume_token(token_id)
        # What it was not told meanwhile, it still is.
        matcher.fill_mask(own)
        alone.unsafe_compute_mask_ptr(truth.ctypes.data, truth.nbytes)
        assert np.array_equal(own, truth)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("unknown keys", '{"name":"a', '{"name":"some é words'),
        ("unknown keys", '{"name":"a","no":12,"x":[', '{"name":"\\n","no":-1,"anything":['),
        ("unknown keys", '{"name":"\\u00', '{"name":"abc \\u00'),
        ("what follows hangs on the value", '{"name":"a1', '{"name":"a987'),
        ("strings, patterns and lengths", '{"a":"x","ab":"aba', '{"a":"another","ab":"ababa'),
        ("strings, patterns and lengths", '{"a":"","ab":"aba","name":"éé",', '{"a":"x","ab":"","name":"abcd",'),
        (
            "strings, patterns and lengths",
            '{"a":"","ab":"","name":"ab","é":"abc',
            '{"a":"","ab":"","name":"ab","é":"xyzé',
        ),
        ("numbers", "[5.25", "[17.123456"),
        ("numbers", '[0.5,"1",', "[1e9,-7.25,"),
        ("constants", '["abc",', "[null,"),
        ("many constants", '[null,"a1",15,', '["a17",'),
        ("anything", '[[1,{"a":[]}],', '[1,"a",null,'),
        ("references", '{"no":1,"a":[{"no":2},', '{"no":17,"a":[{"no":2,"a":[]},{"no":3},'),
        ("references", '{"no":1,"a":[]', '{"no":17,"a":[{"no":2}]'),
        ("what follows hangs on the value", '{"name":"a1",', '{"name":"a987",'),
        ("a date", '["2024-02-29","', '["1999-12-31","'),
    ],
)
def test_texts_that_go_on_alike_are_at_one_place(name: str, one: str, other: str, compiler: ConstraintCompiler) -> None:
    constraint = compiled(compiler, SCHEMAS[name])
    constraint.matcher()
    first, second = written(constraint, one), written(constraint, other)
    assert first.place is not None
    assert first.place is second.place


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("unknown keys", '{"na', '{"nb'),
        ("unknown keys", '{"name":', '{"no":'),
        ("unknown keys", '{"name":"\\', '{"name":"a'),
        ("strings, patterns and lengths", '{"a":"","ab":"a', '{"a":"","ab":"ab'),
        ("strings, patterns and lengths", '{"a":"","ab":"","name":"a', '{"a":"","ab":"","name":"ab'),
        ("numbers", "[12", "[121"),
        ("numbers", "[1,", "[1,2,"),
        ("what follows hangs on the value", '{"name":"a",', '{"name":"a1",'),
        ("what follows hangs on the value", '{"name":"a"', '{"name":null'),
    ],
)
def test_texts_that_go_on_differently_are_not(name: str, one: str, other: str, compiler: ConstraintCompiler) -> None:
    constraint = compiled(compiler, SCHEMAS[name])
    constraint.matcher()
    first, second = written(constraint, one), written(constraint, other)
    assert first.place is not second.place


@pytest.mark.parametrize("spacing", ["compact", "spaced"])
def test_a_part_that_is_not_known_fits_nothing_less_when_it_is_looked_at_again(
    spacing: Spacing, compiler: ConstraintCompiler
) -> None:
    """Many constants that are arrays stand in rules of their own, which are not known here. They were taken for rules
    that admit nothing from the second look on: behind "a" only the 1 that must follow "b" was allowed."""
    pairs: list[Json] = [[n, n + 1] for n in range(14)]
    many: Json = {"enum": [*pairs, "a"]}
    kinds: list[Json] = [{"type": "string"}, many]
    branches: list[Json] = [
        {
            "type": "object",
            "properties": {"k": kind, "no": {"const": number}},
            "required": ["k", "no"],
            "additionalProperties": False,
        }
        for number, kind in enumerate(kinds, 1)
    ]
    constraint = compiled(compiler, {"type": "array", "items": {"anyOf": branches}}, spacing)
    constraint.matcher()
    comma, colon = (", ", ": ") if spacing == "spaced" else (",", ":")

    def item(key: str) -> str:
        return f'{{"k"{colon}"{key}"{comma}"no"{colon}'

    before = f"[{item('b')}1}}{comma}"
    second = written(constraint, before + item("b"))
    assert second.forced_text().text == b"1}"
    other = written(constraint, before + item("a"))
    assert second.place is not other.place
    assert other.forced_text().text == b""  # it may be 1 or 2
    for token_id in ids_of("2}]"):
        other.accept(token_id)
    assert other.is_done


def test_rules_that_lead_to_each_other_admit_the_same() -> None:
    rules = Rules('start: one\none: two | "1"\ntwo: one | "2" | "[" one "]"\nthree: two "," one\n')
    assert rules.values("two") == rules.values("one")
    assert rules.values("one").units == {'"1"', '"2"'}
    assert rules.values("one").brackets == {('"["', "one", '"]"')}
    for _ in range(2):
        with pytest.raises(Unknown):
            rules.values("three")


def test_an_end_of_a_line_that_only_some_know_is_a_character(compiler: ConstraintCompiler) -> None:
    for text in ("a\u2028T0: /a/\u2029b", "a\x85b"):
        schema: Json = {"type": "array", "items": {"enum": [text, 1]}, "minItems": 1, "maxItems": 1}
        for spacing in SPACINGS:
            constraint = compiled(compiler, schema, spacing)
            constraint.matcher()
            assert written(constraint, f'["{text}"]').is_done
        rules = Rules(text_of_schema(normalise(json.dumps(schema), 5).schema))
        assert rules.named.keys() == set()


def test_places_are_shared_from_the_second_text_on(compiler: ConstraintCompiler) -> None:
    constraint = compiled(compiler, {"type": "array", "items": {"type": "string"}, "title": "second"})
    alone = written(constraint, '["one","b').place
    second, third, again = (written(constraint, text).place for text in ('["two","bc', '["three","x', '["one","b'))
    assert second is third
    assert second is again  # what the first text found is found by others, too
    assert alone is not second


def test_new_words_in_a_known_string_are_stepped_over_without_the_engine(compiler: ConstraintCompiler) -> None:
    constraint = compiled(compiler, {"type": "array", "items": {"type": "string"}, "minItems": 1, "title": "steps"})
    constraint.matcher()
    teacher = written(constraint, '["')
    assert teacher.follow(ids_of("a")[0], 1000) is FREE
    row = np.zeros(VOCABULARY.num_words, np.uint32)
    teacher.fill_mask(row)
    teacher.learn(row)
    matcher = written(constraint, '["x')
    assert all(matcher.step(token_id, 1000) for token_id in ids_of("quite another text"))
    assert not matcher.step(ids_of("\n")[0], 1000)
    assert matcher._num_untold >= len("quite another text")
    assert matcher.place is teacher.place
    matcher.rollback(4)
    twin = matcher.clone()
    for token_id in ids_of('word"]'):
        twin.accept(token_id)
    assert twin.is_done
    assert not matcher.can_end


def test_only_schemas_that_are_written_here_have_situations(compiler: ConstraintCompiler) -> None:
    """Not those with checks beside the grammar, nor where the engine reads a part of the schema."""
    distinct = compiled(compiler, SCHEMAS["no item twice"])
    distinct.matcher(), distinct.matcher()
    assert distinct.places.start.situation is None
    multiples = text_of_schema(normalise(json.dumps({"type": "number", "multipleOf": 0.3}), 5).schema)
    assert "%json" in multiples
    assert Situations(multiples).after(START, b"1") is None


def test_a_character_that_no_language_has_ends_it(compiler: ConstraintCompiler) -> None:
    text = text_of_schema(normalise('{"type": "string"}', 5).schema)
    situations = Situations(text)
    assert situations.after(START, b'"a') == situations.after(START, '"é'.encode())
    assert situations.after(START, '"\U0010fffe'.encode()) is None
    assert situations.after(START, b'"a') is None


def test_what_is_kept_is_bounded_and_counted(compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_places, "MAX_PLACES", 40)
    monkeypatch.setattr(grammar_places, "MAX_STEPS", 60)
    monkeypatch.setattr(grammar_situations, "MAX_POINTS", 50)
    constraint = compiled(compiler, {**SCHEMAS["references"], "title": "bounded"})  # type: ignore[dict-item]
    before = constraint.num_bytes
    constraint.matcher()
    row = np.zeros(VOCABULARY.num_words, np.uint32)
    for seed in range(60):
        matcher, draw = constraint.matcher(), random.Random(seed)
        for _ in range(30):
            matcher.fill_mask(row)
            token_id = drawn(row, draw)
            if token_id is None:
                break
            matcher.accept(token_id)
    places = constraint.places
    assert len(places.all) == 40
    assert places._num_steps <= 60
    situations = places._situations
    assert situations is not None
    assert len(situations._points) <= 50
    assert constraint.num_bytes > before + 40 * grammar_places.PLACE_BYTES
