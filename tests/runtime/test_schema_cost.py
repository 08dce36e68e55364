"""How far a token can move the end of a schema's text away: no further than is said, and no more is said than that."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
import pytest

from niwaki.runtime.api import JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.schema import normalise, shortest_text

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
PIECES: Final = [b'{"', b'":', b'","', b'":"', b'":[', b'["', b'"]', b'"}', b"},", b"],", b"ab", b"12", b'":{"']
BYTES: Final = Vocabulary([*(bytes([byte]) for byte in range(256)), *PIECES, None], {256 + len(PIECES)})


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(BYTES, seconds=20)
    yield compiler
    compiler.close()


def with_keys(num_keys: int, **others: Json) -> dict[str, Json]:
    names = [f"a_long_name_{number}" for number in range(num_keys)]
    return {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": [*names], **others}


def value_of(schema: Json) -> int:
    return normalise(json.dumps(schema)).value


def test_what_the_whole_object_needs_is_no_tokens_to_ask_for() -> None:
    closed: dict[str, Json] = {"additionalProperties": False}
    alone = value_of(with_keys(1, **closed))
    assert value_of(with_keys(20, **closed)) <= alone + 1  # a digit more
    others: list[Json] = [
        {"type": "object", "properties": {"a": with_keys(20)}},
        {"anyOf": [with_keys(20), {"type": "string"}]},
        {"type": "array", "items": with_keys(20)},
        with_keys(20, properties={"again": {"$ref": "#"}}),
    ]
    for schema in others:
        assert value_of(schema) > 10 * alone


def test_whole_numbers_ask_for_no_more_than_their_digits() -> None:
    assert normalise('{"type": "integer", "minimum": -999, "maximum": 50}').inside <= 8
    assert normalise('{"type": "number", "minimum": -999, "maximum": 50}').inside >= 20
    assert normalise(json.dumps({"type": "integer", "maximum": 10**30})).inside >= 31


def some_part(rng: random.Random, depth: int) -> Json:
    match rng.randrange(9 if depth else 5):
        case 0:
            return {"type": "integer", "minimum": rng.randrange(10**6), "maximum": 10**6 + rng.randrange(10**9)}
        case 1:
            return {"enum": ["a" * rng.randrange(12), "b" * rng.randrange(12), rng.randrange(10**9)]}
        case 2:
            return {"type": "string", "minLength": rng.randrange(9)}
        case 3:
            return {"type": rng.choice(["boolean", "null", "number", "string"])}
        case 4:
            return {"type": "integer", "exclusiveMaximum": -rng.randrange(1, 10**9)}
        case 5:
            return {"type": "array", "items": some_part(rng, depth - 1), "minItems": rng.randrange(3)}
        case 6:
            return {"anyOf": [some_part(rng, depth - 1), some_part(rng, depth - 1)]}
        case _:
            return some_object(rng, depth - 1)


def some_object(rng: random.Random, depth: int) -> dict[str, Json]:
    names = [f"{'key' * rng.randrange(4)}{number}" for number in range(rng.randrange(1, 6))]
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: some_part(rng, depth) for name in names}
    others: Json = rng.choice([False, some_part(rng, 0)])
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": others}


@pytest.mark.parametrize("opening", ["{", "["])
def test_of_several_kinds_none_is_begun_that_does_not_fit(compiler: ConstraintCompiler, opening: str) -> None:
    kinds: list[Json] = ["string", "object", "array"]
    schema = with_keys(20, items={"const": "x" * 50}, minItems=9) | {"type": kinds}
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    assert matcher.distance == 2
    for budget in (40, 100, 150, 250):
        assert not matcher.admits(ord(opening), budget)
    assert matcher.admits(ord(opening), 2000)


@pytest.mark.parametrize("seed", range(24))
def test_texts_end_within_any_budget_that_the_shortest_fits(compiler: ConstraintCompiler, seed: int) -> None:
    rng = random.Random(seed)
    schema = some_object(rng, 3)
    compiled = compiler.compile(JsonSchema(json.dumps(schema)))
    shortest = compiled.matcher().distance
    row = np.zeros(BYTES.num_words, np.uint32)
    for spare in (0, 1, 2, 4, 7, 12, 20, 33):
        matcher = compiled.matcher()
        left = shortest + spare
        while left and not matcher.is_done:
            matcher.fill_mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            tried = [int(token_id) for token_id in rng.sample([*allowed], len(allowed))]
            tried.sort(key=lambda token_id: token_id in BYTES.eos_ids)
            chosen = next(token_id for token_id in tried if matcher.admits(token_id, left))
            if chosen in BYTES.eos_ids:
                break
            matcher.accept(chosen)
            left -= 1
        assert matcher.can_end, (schema, shortest, spare)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"minProperties": 1}, b'{"":0}'),
        ({"minProperties": 1, "properties": {"a": {"type": "string"}, "": {"type": "null"}}}, b'{"0":0}'),
        ({"minProperties": 2, "required": ["a"], "additionalProperties": {"minimum": 7, "type": "integer"}}, None),
        (
            {"minProperties": 1, "maxProperties": 1, "additionalProperties": {"minItems": 1, "type": "array"}},
            b'{"":[0]}',
        ),
    ],
)
def test_a_key_of_any_name_is_written_without_a_search(
    compiler: ConstraintCompiler, schema: dict[str, Json], text: bytes | None
) -> None:
    def solve(part: dict[str, Json]) -> bytes:
        raise AssertionError(part)

    text = text or b'{"a":7,"":7}'
    whole = json.dumps({"type": "object", **schema})
    assert shortest_text(normalise(whole).schema, solve, lambda size: b"a" * size) == text
    matcher = compiler.compile(JsonSchema(whole)).matcher()
    for byte in text:
        matcher.accept(byte)
    assert matcher.is_done


def test_a_quote_behind_a_comma_that_strings_must_hold_opens_none(compiler: ConstraintCompiler) -> None:
    held: dict[str, Json] = {"a": {"type": "string", "pattern": ","}}
    schema = {"type": "object", "properties": held, "required": ["x1"], "minProperties": 2}
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    for byte in b'{"x1":15,".ba7{b}{]xa[}72":{"x2:2,,a{{x5':
        matcher.accept(byte)
    ending = matcher.shortest_ending(40)
    assert ending is not None
    for token_id in ending:
        matcher.accept(token_id)
    assert matcher.can_end


@pytest.mark.parametrize("missing", [",", "}", "]", ":}"])
def test_a_string_that_must_not_hold_a_sign_is_closed_at_once(compiler: ConstraintCompiler, missing: str) -> None:
    schema = {"type": "array", "items": {"type": "string", "not": {"pattern": f"[{re.escape(missing)}]"}}}
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    for byte in b'["ab':
        matcher.accept(byte)
    assert matcher.distance == 1  # `"]` is one token
