"""Many constants of a schema that are arrays or objects: those that are listed, however they share, and no others."""

from __future__ import annotations

import json
import random
from typing import Final, TypeAlias

import pytest

from niwaki.runtime.api import ConstraintError, JsonSchema, Spacing
from niwaki.runtime.constraints.grammar_source import source_of_schema
from niwaki.runtime.constraints.guidance import build, byte_tokenizer
from niwaki.runtime.constraints.schema import normalise
from niwaki.runtime.constraints.schema.constants import END, MAX_EDGES, automaton_of
from niwaki.runtime.constraints.sources import quick_source

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
SEPARATORS: Final[dict[Spacing, tuple[str, str]]] = {"compact": (",", ":"), "spaced": (", ", ": ")}


def some_value(rng: random.Random, depth: int) -> Json:
    match rng.randrange(3) if depth else 2:
        case 0:
            return [some_value(rng, depth - 1) for _ in range(rng.randrange(3))]
        case 1:
            return {rng.choice("ab,:"): some_value(rng, depth - 1) for _ in range(rng.randrange(3))}
        case _:
            return rng.choice([0, 1, 10, 1.5, -1, "", "a", "ab", ",", "]", "\x7f", True, None])


def some_values(rng: random.Random, count: int) -> list[Json]:
    """Different ones, as JSON holds them different."""
    return [
        *{json.dumps(found, sort_keys=True): found for found in (some_value(rng, 3) for _ in range(count))}.values()
    ]


def accepted(schema: Json, values: list[Json], spacing: Spacing) -> list[bool]:
    text = source_of_schema(JsonSchema(json.dumps(schema), spacing), 10, b"abc").text
    start = build(text, byte_tokenizer())
    found = []
    for value in values:
        data = [*json.dumps(value, ensure_ascii=False, separators=SEPARATORS[spacing]).encode()]
        place = start.deep_copy()
        found.append(place.try_consume_tokens(data) == len(data) and place.is_accepting())
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("spacing", SEPARATORS)
def test_just_the_listed_constants_are_accepted(seed: int, spacing: Spacing) -> None:
    rng = random.Random(seed)
    values = some_values(rng, 120)
    listed = values[::2]
    assert accepted({"enum": [*listed]}, values, spacing) == [index % 2 == 0 for index in range(len(values))]


def test_constants_stand_beside_arrays_and_objects_that_begin_like_them() -> None:
    listed: list[Json] = [[i, i + 1] for i in range(20)]
    others: list[Json] = [["a"], ["a", "b"], [], [1], [1, 3], [1, "a"]]
    schema: Json = {"anyOf": [{"enum": listed}, {"type": "array", "items": {"type": "string"}}]}
    assert accepted(schema, [*listed, *others], "compact") == [True] * 20 + [True, True, True, False, False, False]


def test_what_constants_share_is_written_once() -> None:
    places = automaton_of([[number, {"a": "b"}] for number in range(1000)])
    assert sum(len(set(edges.values())) for edges in places) == len(places) - 1 == 9
    assert places[END] == {}


def test_twenty_thousand_constants_that_differ_in_one_value_are_a_small_grammar() -> None:
    found = source_of_schema(JsonSchema(json.dumps({"enum": [[i] for i in range(20_000)]})), 60, b"abc")
    assert found.text.count("\n") < 8
    assert found.shortest == b"[0]"


def test_constants_that_share_too_little_are_refused_with_their_place() -> None:
    values = [[i, i * 7919 % 10007] for i in range(MAX_EDGES // 2 + 50)]
    with pytest.raises(ConstraintError, match=r"^schema at /properties/a: \d+ constants .*too large"):
        normalise(json.dumps({"properties": {"a": {"enum": values}}}))
    assert quick_source(JsonSchema(json.dumps({"enum": values[:40]})), 60, b"abc") is not None
