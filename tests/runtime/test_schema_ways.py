"""Alternatives that multiply: those that ask for more than another are left out, and nothing else changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    kept = without_stricter(ways, len(ways), lambda way: False)
    assert kept is not None
    for value in OBJECTS:
        assert any(holds(way, value) for way in ways) == any(holds(way, value) for way in kept)
    assert [way for way in ways if way in kept] or not ways
    assert without_stricter(kept, len(kept), lambda way: False) == kept
    assert without_stricter(kept, len(kept) - 1, lambda way: False) is None or not kept
    some = without_stricter(ways, len(ways), lambda way: "a" in way.required)
    assert some == [way for way in kept if "a" not in way.required]


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


def test_branches_that_a_key_beside_them_tells_apart_are_not_kept_apart_again() -> None:
    """Alone they meet, in objects without the key. To say of each that the others fail took seconds where they are as
    large as some real ones."""
    kinds = "abcde"
    fields = {kind: {f"{kind}{number}": {"type": "string"} for number in range(2)} for kind in kinds}
    branches = [{"properties": {"kind": {"enum": [kind]}, "of": {"properties": fields[kind]}}} for kind in kinds]
    schema = {"type": "object", "oneOf": branches}
    told = normalise(json.dumps({**schema, "required": ["kind"]}))
    assert len(told.schema["anyOf"]) == len(kinds)  # type: ignore[arg-type,index,call-overload]  # an "or" of objects
    for required in ([], ["kind"]):
        normal = normalise(json.dumps({**schema, "required": required})).schema
        ours = Draft202012Validator(_plain(normal))
        theirs = Draft202012Validator({**schema, "required": required})
        for kind, other, text in product((*kinds, "z", None), kinds, ("a", 1)):
            value = {"of": {f"{other}1": text}} | ({} if kind is None else {"kind": kind})
            assert ours.is_valid(value) == theirs.is_valid(value), (required, value)


def _plain(schema: object) -> object:
    """Without what our grammar alone reads."""
    assert "x-" not in json.dumps(schema)
    return schema


def test_a_grammar_is_the_same_in_each_process() -> None:
    """Not in the order of a set, which Python draws anew for each."""
    closed = {
        "type": "object",
        "properties": {key: {} for key in ("role", "email", "name", "homepage")},
        "additionalProperties": False,
    }
    patterns = {"^a": {"minimum": 1}, "a$": {"maximum": 9}, "^.a": {"type": "integer"}}
    schema = json.dumps(
        {"type": "object", "properties": {"a": {"type": "object", "not": closed}}, "patternProperties": patterns}
    )
    program = (
        "import sys; from niwaki.runtime.api import JsonSchema;"
        "from niwaki.runtime.constraints.sources import source_of;"
        "sys.stdout.buffer.write(source_of(JsonSchema(sys.argv[1]), 10.0, b'a').to_bytes())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program, schema],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in range(4)
    }
    assert len(found) == 1
