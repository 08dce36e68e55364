"""$dynamicRef and $recursiveRef: where they lead is decided by the way to them, as a validator decides it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft201909Validator, Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary

VOCABULARY = Vocabulary([*(bytes([b]) for b in range(256)), None], {256})
NAMES = ("a", "b", "c")
VALUES: list[Any] = [  # of one key at most: the order in which several are written is another matter
    None, 1, "s", {}, {"p": 1}, {"p": "s"}, {"p": {}}, {"q": 1}, {"q": "s"}, {"p": {"p": 1}}, {"p": {"p": "s"}},
    {"p": {"q": 1}}, {"q": {"p": 1}}, {"q": {"q": "s"}}, {"p": {"p": {"p": 1}}}, {"q": {"p": {"q": "s"}}},
    {"p": {"q": {"p": "s"}}}, {"q": {"q": {"p": 1}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20, max_bytes=1)
    yield compiler
    compiler.close()


def admitted(compiler: ConstraintCompiler, schema: object) -> list[Any]:
    matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
    found = []
    for value in VALUES:
        place = matcher.clone()
        try:
            for byte in json.dumps(value, separators=(",", ":")).encode():
                place.accept(byte)
        except ConstraintError:
            continue
        if place.can_end:
            found.append(value)
    return found


TYPES = st.sampled_from(["integer", "string", "object", "null"]).map(lambda name: {"type": name})
LEAD = st.one_of(
    TYPES,
    st.sampled_from(NAMES).map(lambda name: {"$ref": name}),
    st.just({"$dynamicRef": "#n"}),
    st.sampled_from(NAMES).map(lambda name: {"$dynamicRef": f"{name}#n"}),
    st.sampled_from(NAMES).map(lambda name: {"$ref": f"{name}#/$defs/n"}),
)
KEYS = st.fixed_dictionaries({}, optional={"p": LEAD, "q": LEAD})


@st.composite
def resources(draw: st.DrawFn) -> dict[str, Any]:
    """A resource for each name, each with an anchor `n`, dynamic or not, and one more inside another."""

    def body(kind: str) -> dict[str, Any]:
        anchor = {kind: "n", **draw(st.one_of(TYPES, KEYS.map(lambda keys: {"properties": keys})))}
        return {"properties": draw(KEYS), "$defs": {"n": anchor}}

    kinds = st.sampled_from(["$anchor", "$dynamicAnchor"])
    found = {name: {"$id": name, **body(draw(kinds))} for name in NAMES}
    found["a"]["$defs"]["inner"] = {"$id": "inner", **body("$dynamicAnchor")}
    found["a"]["properties"]["q"] = draw(st.sampled_from([{"$ref": "inner"}, {"$ref": "inner#/properties/p"}, {}]))
    found["b"]["properties"]["q"] = {"$id": "nested", **body("$dynamicAnchor")}
    if "p" not in found["a"]["$defs"]["inner"]["properties"]:
        found["a"]["$defs"]["inner"]["properties"]["p"] = {"$dynamicRef": "#n"}
    return {"$id": "https://resources.example/root", "$ref": draw(st.sampled_from(NAMES)), "$defs": found}


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=resources())
def test_a_dynamic_reference_leads_where_a_validator_follows_it(
    compiler: ConstraintCompiler, schema: dict[str, Any]
) -> None:
    validator = Draft202012Validator(schema)
    try:
        valid = [value for value in VALUES if validator.is_valid(value)]
    except RecursionError:
        with pytest.raises(ConstraintError, match="refers to itself without anything in between"):
            compiler.compile(JsonSchema(json.dumps(schema)))
        return
    try:
        found = admitted(compiler, schema)
    except ConstraintError as error:
        if valid or "admits no" not in str(error):
            pytest.fail(f"{schema} was refused: {error}")
    else:
        assert found == valid, schema


def test_a_strict_tree_extends_a_loose_one(compiler: ConstraintCompiler) -> None:
    tree = {
        "$id": "tree",
        "$dynamicAnchor": "node",
        "type": "object",
        "properties": {"p": True, "q": {"$dynamicRef": "#node"}},
    }
    strict = {
        "$id": "https://trees.example/strict",
        "$dynamicAnchor": "node",
        "$ref": "tree",
        "unevaluatedProperties": False,
        "required": ["p"],
        "$defs": {"tree": tree},
    }
    assert admitted(compiler, strict) == [value for value in VALUES if Draft202012Validator(strict).is_valid(value)]
    assert {"p": {"q": 1}} in admitted(compiler, strict)
    assert {"q": {"p": 1}} not in admitted(compiler, strict)


def test_a_recursive_reference_of_2019_09_leads_to_the_outermost_resource(compiler: ConstraintCompiler) -> None:
    def strict(is_anchor: bool) -> dict[str, Any]:
        tree = {
            "$id": "tree",
            "$recursiveAnchor": True,
            "type": "object",
            "properties": {"p": {"type": "integer"}, "q": {"$recursiveRef": "#"}},
        }
        return {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "$id": "https://trees.example/strict",
            "$recursiveAnchor": is_anchor,
            "allOf": [{"$ref": "tree"}],
            "required": ["q"],
            "$defs": {"tree": tree},
        }

    for is_anchor in (False, True):
        schema = strict(is_anchor)
        if is_anchor:  # each tree would have to hold another one
            with pytest.raises(ConstraintError, match="admits no"):
                compiler.compile(JsonSchema(json.dumps(schema)))
            schema["properties"] = {"q": {"type": ["null", "object"]}}
            del schema["required"]
        assert admitted(compiler, schema) == [v for v in VALUES if Draft201909Validator(schema).is_valid(v)]
    with pytest.raises(ConstraintError, match=r"schema at /items/\$recursiveRef: must be '#'"):
        compiler.compile(JsonSchema('{"items": {"$recursiveRef": "#/x"}}'))


def test_a_resource_inside_another_is_entered_where_it_stands(compiler: ConstraintCompiler) -> None:
    other = {
        "$id": "other",
        "properties": {"p": {"$dynamicRef": "#n"}},
        "$defs": {"n": {"$dynamicAnchor": "n", "type": "integer"}},
    }
    around = {"$id": "around", "$defs": {"n": {"$dynamicAnchor": "n", "type": "string"}}, "$ref": "other"}
    schema = {
        "$id": "https://resources.example/root",
        "type": "object",
        "properties": {"p": {"$ref": "other"}, "q": around},
        "$defs": {"other": other},
    }
    found = admitted(compiler, schema)
    assert found == [value for value in VALUES if Draft202012Validator(schema).is_valid(value)]
    assert {"p": {"p": 1}} in found
    assert {"q": {"p": 1}} not in found


def test_what_is_refused_in_a_scope_is_named_by_its_pointer(compiler: ConstraintCompiler) -> None:
    schema = {
        "$dynamicAnchor": "n",
        "properties": {"p": {"$ref": "other"}},
        "$defs": {
            "o": {"$id": "other", "$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}, "not": {"uniqueItems": True}}
        },
    }
    with pytest.raises(ConstraintError, match=r"schema at /\$defs/o/not/uniqueItems: "):
        compiler.compile(JsonSchema(json.dumps(schema)))
