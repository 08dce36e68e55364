"""Numbers between whole bounds: just those that a validator takes, whatever the bounds' size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.grammar_source import source_of_schema
from niwaki.runtime.constraints.schema.ranges import range_regex
from tests.toy_constraints import takes

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
VOCABULARY = Vocabulary([*(bytes([b]) for b in range(256)), None], {256})

BOUNDS = st.integers(-30, 30) | st.integers(-1200, 1200) | st.integers(-(10**30), 10**30)


@st.composite
def ranges(draw: st.DrawFn) -> dict[str, Json]:
    low, high = sorted((draw(BOUNDS), draw(BOUNDS)))
    found: dict[str, Json] = {}
    is_below, is_above = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    if is_below:
        found[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low - 2
    if is_above:
        found[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = high
    return found


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    yield compiler
    compiler.close()


@settings(max_examples=300, deadline=None)
@given(ranges(), st.data())
def test_whole_numbers_are_those_that_a_validator_takes(schema: dict[str, Json], data: st.DataObject) -> None:
    pattern = re.compile(range_regex(schema, is_whole=True))
    validator = Draft202012Validator({"type": "integer", **schema})
    near = st.builds(int.__add__, st.sampled_from([int(str(bound)) for bound in schema.values()]), st.integers(-12, 12))
    for number in data.draw(st.lists(near | BOUNDS, min_size=8, max_size=8)):
        assert (pattern.fullmatch(str(number)) is not None) == validator.is_valid(number), (schema, number)


@settings(max_examples=300, deadline=None)
@given(ranges(), st.data())
def test_decimals_are_those_that_a_validator_takes(schema: dict[str, Json], data: st.DataObject) -> None:
    pattern = re.compile(range_regex(schema, is_whole=False))
    validator = Draft202012Validator({"type": "number", **schema})
    bounds = [int(str(bound)) for bound in schema.values() if abs(int(str(bound))) < 10**9]
    near = [float(bound + step) for bound in bounds for step in (-1, -0.5, -0.001, 0, 0.001, 0.5, 1)]
    some = data.draw(st.lists(st.floats(-2000, 2000, allow_subnormal=False), min_size=5, max_size=5))
    for number in (*near, *some, 1e-05, -1e-05, 2.5e-20):
        if str(number) != "-0.0":
            assert (pattern.fullmatch(str(number)) is not None) == validator.is_valid(number), (schema, number)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "integer", "maximum": 2**64 - 1, "minimum": 0}, [0, 2**63, 2**64 - 1], [-1, 2**64, 10**20]),
        ({"type": "integer", "minimum": 10**20}, [10**20, 10**30], [0, 2**63, 10**20 - 1]),
        ({"type": "integer", "maximum": -(10**20)}, [-(10**20), -(10**30)], [0, -(2**63), 1 - 10**20]),
        ({"type": "integer", "exclusiveMaximum": 10**19}, [10**19 - 1, -5], [10**19]),
        ({"type": "number", "maximum": 2**64 - 1}, [2**64 - 1, 0.5, -3.25, -1e300], [2**64, 1e20]),
        ({"type": "number", "minimum": 10**20 + 1}, [10**20 + 1, 1e21], [10**20, 1e20, 1e19, 0.5]),
        ({"type": "number", "exclusiveMinimum": 0}, [1e-05, 1e-300, 0.5, 1e16, 1e300], [0, -1, -1e-05]),
        ({"type": "number", "exclusiveMinimum": 2**60, "exclusiveMaximum": 2**60 + 2}, [2**60 + 1], [2**60, 2**60 + 2]),
        ({"type": "integer", "minimum": 10**38}, [10**38, 10**301], [0, 10**38 - 1, -(10**40)]),
        ({"type": "number", "minimum": 2**63}, [2**63, 2**63 + 1, 1e20, 1e300], [2**63 - 1, 0.5, 5e18]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, [0, 0.5, 1e-05, 0.0001], [1, -0.5, -1e-05]),
    ],
)  # fmt: skip
def test_bounds_hold_beyond_what_a_double_tells_apart(
    compiler: ConstraintCompiler, schema: Json, taken: list[Json], refused: list[Json]
) -> None:
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    assert [number for number in taken if not takes(matcher, json.dumps(number))] == []
    assert [number for number in refused if takes(matcher, json.dumps(number))] == []


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"maximum": 2**64 - 1}, "18446744073709551614.9"),
        ({"minimum": 2**64 + 1}, "18446744073709551617.5"),
        ({"exclusiveMaximum": 2**60}, "1152921504606846975.9"),
        ({"exclusiveMinimum": 0}, "1e-400"),
    ],
)
def test_no_text_is_taken_that_a_double_rounds_over_a_bound(
    compiler: ConstraintCompiler, schema: dict[str, Json], text: str
) -> None:
    assert not Draft202012Validator(schema).is_valid(json.loads(text))
    assert not takes(compiler.compile(JsonSchema(json.dumps({"type": "number", **schema}))).matcher(), text)


def test_bounds_without_a_double_between_them_are_refused(compiler: ConstraintCompiler) -> None:
    schema = {"type": "number", "exclusiveMinimum": 2**60, "exclusiveMaximum": 2**60 + 1}
    with pytest.raises(ConstraintError):
        compiler.compile(JsonSchema(json.dumps(schema)))


def test_long_bounds_make_no_long_grammar() -> None:
    source = source_of_schema(
        JsonSchema(json.dumps({"type": "integer", "minimum": 10**298, "maximum": 10**299})), 5, b"a"
    )
    assert len(source.text) < 4000


def test_between_large_numbers_so_many_different_ones_must_be_seen(compiler: ConstraintCompiler) -> None:
    items: Json = {"type": "number", "minimum": 10**15, "maximum": 10**15 + 1}
    with pytest.raises(ConstraintError, match="3 different items"):
        compiler.compile(
            JsonSchema(json.dumps({"type": "array", "items": items, "uniqueItems": True, "minItems": 3, "maxItems": 9}))
        )


def test_numbers_between_bounds_may_be_told_apart_in_an_array(compiler: ConstraintCompiler) -> None:
    items: Json = {"type": "number", "minimum": 0, "maximum": 2}
    schema = json.dumps({"type": "array", "items": items, "uniqueItems": True, "minItems": 3})
    matcher = compiler.compile(JsonSchema(schema)).matcher()
    for text in ("[0,0.5,1]", "[2,1.5,1e-05]", "[0.1,0.25,0.2,1,2]"):
        assert takes(matcher, text), text
    for text in ("[0,0.5,0.5]", "[2,1,2]", "[0.5,0.50,1]", "[0,1,3]", "[0,1,2.5]", "[0,-1,2]", "[0.1,0.2]"):
        assert not takes(matcher, text), text


@pytest.mark.parametrize(
    ("items", "taken", "refused"),
    [
        (
            {"type": "number", "minimum": 0.5},
            ["[0.5,0.75,1]", "[100000000000000000000,2]"],
            ["[0.5,0.5]", "[0.5,0.50]", "[0.4]"],
        ),
        ({"type": "number", "minimum": 0.05, "maximum": 0.06}, ["[0.05,0.055]"], ["[0.055,0.0550]", "[0.05,0.061]"]),
    ],
)
def test_numbers_between_broken_bounds_may_be_told_apart_in_an_array(
    compiler: ConstraintCompiler, items: Json, taken: list[str], refused: list[str]
) -> None:
    matcher = compiler.compile(JsonSchema(json.dumps({"type": "array", "items": items, "uniqueItems": True}))).matcher()
    assert [text for text in taken if not takes(matcher, text)] == []
    assert [text for text in refused if takes(matcher, text)] == []


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "number", "exclusiveMaximum": 3}, ["2.9999999999999996", "2"], ["2." + "9" * 20, "3", "3.0"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["5e-324", "1e-05"], ["0." + "0" * 400 + "1", "1e-400", "0.0"]),
        ({"type": "number"}, ["1e+299", "-2.5e-300", "9" * 300], ["1e+999", "1e999", "9" * 310]),
        ({"type": "number", "minimum": 0}, ["1.7976931348623157e+308"], ["1.8e+308", "1e+309"]),
        ({"type": "number", "maximum": 1e23}, ["1e+23", "99999999999999991611392"], ["1" + "0" * 23, "1.1e+23"]),
        ({"const": 1e23}, ["1e+23"], ["99999999999999991611392"]),
        (
            {"type": "number", "multipleOf": 0.01, "maximum": 10**20},
            [f"{10**20}", "0.07", "7.5"],
            [f"{10**20 + 1}", "0.071"],
        ),
        ({"type": "integer", "multipleOf": 5, "minimum": 2**60}, [f"{2**60 + 4}"], [f"{2**60}", f"{2**60 - 1}"]),
    ],
)
def test_numbers_hold_by_their_digits_and_for_readers_of_doubles(
    compiler: ConstraintCompiler, schema: Json, taken: list[str], refused: list[str]
) -> None:
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    assert [text for text in taken if not takes(matcher, text)] == []
    assert [text for text in refused if takes(matcher, text)] == []
