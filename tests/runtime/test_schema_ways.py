"""Alternatives that multiply: those that ask for more than another are left out, and nothing else changes."""

from __future__ import annotations

import json
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from niwaki.runtime.constraints.schema import normalise
from niwaki.runtime.constraints.schema.facts import Way, without_stricter

NAMES = "abcd"
WAYS = st.builds(
    lambda required, least, values, excluded: Way(
        "object", required=tuple(required), least=least, values=values, excluded=tuple(excluded)
    ),
    st.lists(st.sampled_from(NAMES), unique=True),
    st.integers(0, 2),
    st.none() | st.sampled_from([({"a": 1},), ({"a": 1}, {"b": 1, "c": 1})]),
    st.lists(st.sampled_from([{}, {"a": 1}, {"d": 1}]), max_size=2),
)
OBJECTS = [
    {name: 1 for name, is_there in zip(NAMES, chosen, strict=True) if is_there} for chosen in product((0, 1), repeat=4)
]


def holds(way: Way, value: dict[str, int]) -> bool:
    return (
        all(name in value for name in way.required)
        and len(value) >= way.least
        and (way.values is None or value in way.values)
        and value not in way.excluded
    )


@given(st.lists(WAYS, max_size=8))
def test_without_the_stricter_ways_the_same_values_are_left(ways: list[Way]) -> None:
    kept = without_stricter(ways)
    for value in OBJECTS:
        assert any(holds(way, value) for way in ways) == any(holds(way, value) for way in kept)
    assert [way for way in ways if way in kept] or not ways
    assert len(without_stricter(kept)) == len(kept)


def test_negations_that_share_a_way_to_fail_do_not_multiply() -> None:
    one_of = [
        {"properties": {"kind": {"enum": [kind]}, "at": {"type": "array"}}, "required": ["kind", "at"]}
        for kind in "abcdefg"
    ]
    normal = normalise(json.dumps({"type": "object", "not": {"anyOf": one_of}}))
    branches = normal.schema["anyOf"]  # type: ignore[index,call-overload]  # an "or" of objects
    assert len(branches) <= 200  # type: ignore[arg-type]  # and not 3 ** 7, which is refused


def test_conditions_on_one_key_do_not_multiply() -> None:
    kinds = "abcdefghijkl"
    conditions = [
        {
            "if": {"properties": {"kind": {"const": kind}}},
            "then": {"anyOf": [{"required": [f"{kind}1"]}, {"required": [f"{kind}2"]}, {"required": [f"{kind}3"]}]},
        }
        for kind in kinds
    ]
    normal = normalise(json.dumps({"type": "object", "required": ["kind"], "allOf": conditions}))
    assert len(normal.schema["anyOf"]) == 3 * len(kinds) + 1  # type: ignore[index,call-overload,arg-type]  # an "or"
    validator = Draft202012Validator(normal.schema)
    for kind, name in product((*kinds, "z"), ("a1", "l3", "z")):
        assert validator.is_valid({"kind": kind, name: 0}) == (kind == "z" or name[0] == kind), (kind, name)
