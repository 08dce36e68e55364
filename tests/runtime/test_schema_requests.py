"""Schemas and grammars asked of an engine: in sampling_params and in programs, on the bundled model."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator

import pydantic
import pytest

import niwaki as nw
from niwaki.runtime.api import AllOf, ConstraintError, Grammar, JsonSchema, Regex, RequestError
from niwaki.runtime.options.from_dict import options_from_dict

BOOKING = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "format": "date"},
        "guests": {"type": "integer", "minimum": 1, "maximum": 12},
        "rooms": {"type": "array", "items": {"enum": ["single", "double"]}, "maxItems": 2},
    },
    "required": ["day", "guests"],
    "additionalProperties": False,
}


class Folder(pydantic.BaseModel):
    name: str
    made: datetime.date
    inside: list[Folder] = []


@pytest.fixture(scope="module")
def engine() -> Iterator[nw.Engine]:
    with nw.Engine(dtype="float32", kv_tokens=2048) as engine:
        yield engine


def test_the_names_of_constraints_in_sampling_params() -> None:
    assert options_from_dict({"json_schema": {"type": "null"}}).constraint == JsonSchema('{"type": "null"}')
    assert options_from_dict({"json_schema": "{}"}).constraint == JsonSchema("{}")
    assert options_from_dict({"ebnf": 'root ::= "a"'}).constraint == Grammar('root ::= "a"', "ebnf")
    assert options_from_dict({"grammar": 'start: "a"'}).constraint == Grammar('start: "a"', "lark")
    assert options_from_dict({"json_schema": "{}", "json_spacing": "free"}).constraint == JsonSchema("{}", "free")
    assert options_from_dict({"regex": ["a+", ".{2}"]}).constraint == AllOf((Regex("a+"), Regex(".{2}")))
    for pattern in ([], [1], 1):
        with pytest.raises(RequestError, match="regex must be a string or a list of strings"):
            options_from_dict({"regex": pattern})
    for wrong in ({"json_spacing": "spaced"}, {"json_spacing": "wide", "json_schema": "{}"}):
        with pytest.raises(RequestError, match="json_spacing must be one of compact, spaced, free, beside"):
            options_from_dict(wrong)
    with pytest.raises(RequestError, match="at most one constraint"):
        options_from_dict({"json_schema": "{}", "regex": "a"})
    with pytest.raises(RequestError, match="json_schema must be a JSON schema"):
        options_from_dict({"json_schema": object()})


@pytest.mark.parametrize("budget", [24, 32, 64])
def test_sampled_text_is_a_value_of_the_schema_within_any_budget_that_allows_one(
    engine: nw.Engine, budget: int
) -> None:
    params = {"json_schema": BOOKING, "max_new_tokens": budget, "temperature": 1.0, "seed": budget, "n": 2}
    results = engine.generate(["A table for two, please."], params)
    for result in results:
        value = json.loads(str(result["text"]))
        datetime.date.fromisoformat(value["day"])
        assert 1 <= value["guests"] <= 12
        assert set(value) <= {"day", "guests", "rooms"}


def test_a_refused_schema_names_the_keyword_before_anything_runs(engine: nw.Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "not": {"uniqueItems": True}}}}
    with pytest.raises(ConstraintError, match=r"schema at /properties/a/not/uniqueItems: cannot be negated"):
        engine.generate("x", {"json_schema": schema})


def test_programs_take_types_that_no_regex_holds(engine: nw.Engine) -> None:
    @nw.function
    def file(s, text):  # type: ignore[no-untyped-def]  # as users write it
        s += text + nw.gen("folder", dtype=Folder, max_tokens=60, temperature=1.0, seed=4)

    state = file.run(text="A folder: ", backend=engine)
    folder = state["folder"]
    assert isinstance(folder, Folder)
    assert isinstance(folder.made, datetime.date)


def test_programs_take_schemas_and_grammars_as_text(engine: nw.Engine) -> None:
    @nw.function
    def fill(s):  # type: ignore[no-untyped-def]  # as users write it
        s += "Rooms: " + nw.gen("rooms", json_schema=BOOKING["properties"]["rooms"], max_tokens=24)  # type: ignore[index]
        s += "\nSum: " + nw.gen("sum", grammar='root ::= num (" + " num)*\nnum ::= [0-9] [0-9]?', max_tokens=12)

    state = fill.run(backend=engine)
    assert set(json.loads(str(state["rooms"]))) <= {"single", "double"}
    assert all(part.isdigit() for part in str(state["sum"]).split(" + "))
    with pytest.raises(nw.ProgramError, match="regex and grammar; keep one"):
        nw.gen("x", regex="a", grammar='start: "a"')
