"""Mistakes with types, tools and scripts, each told in words that name the way out, as in `test_mistakes.py`."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import re
import sys
from pathlib import PurePath
from typing import Annotated, Any, Literal, cast

import pydantic
import pytest

import niwaki as nw
from niwaki.lang.state import State
from niwaki.lang.tools import Call
from niwaki.lang.types import value_type
from tests.lang.test_mistakes import Person, greet

LIST, DICT = cast("Any", list), cast("Any", dict)  # of what no type checker lets in

# -- types -------------------------------------------------------------------------------------------------------------


def test_an_object_or_a_name_in_the_place_of_a_type_is_told_so() -> None:
    with pytest.raises(nw.ConstraintError, match="is an object; give its class, Person"):
        nw.gen("x", dtype=Person(name="Ada", age=36))
    with pytest.raises(nw.ConstraintError, match="dtype 'int' is a text; give the type itself"):
        nw.gen("x", dtype="int")


def test_a_schema_or_a_list_in_the_place_of_a_type_is_told_where_it_goes() -> None:
    for schema in ({"type": "object"}, {"name": str}, {}):
        with pytest.raises(nw.ConstraintError, match=r"is a dict; a JSON schema is given as json_schema="):
            nw.gen("x", dtype=schema)
    with pytest.raises(
        nw.ConstraintError, match=r"dtype \['a', 'b'\] is no type; texts to choose from are .* choices="
    ):
        nw.gen("x", dtype=["a", "b"])


def test_a_function_in_the_place_of_a_type_is_never_called_and_told_where_it_goes() -> None:
    def weather(city: str) -> str:
        raise AssertionError(city)

    with pytest.raises(nw.ConstraintError, match=re.escape("dtype weather is a function; give it as tools=[weather]")):
        nw.gen("x", dtype=cast("Any", weather))


@pytest.mark.parametrize("option", ["dtype", "json_schema"])
@pytest.mark.parametrize("wrong", [LIST[{"a": int}], DICT[str, {"a": 1}], nw.gen("y")])
def test_what_is_no_type_inside_of_one_is_refused_in_our_words(option: str, wrong: object) -> None:
    with pytest.raises(nw.ConstraintError):
        cast("Any", nw.gen)("x", **{option: wrong})


def test_a_grammars_file_in_the_place_of_its_text_is_told_to_be_read() -> None:
    for name in ("sql.lark", "grammars/json.gbnf", PurePath("C:/sql.lark")):
        with pytest.raises(nw.ConstraintError, match=r"got the name of a file: '.*'; read it: read_text\(\)"):
            nw.gen("x", grammar=cast("str", name))
    for nothing in ("", "SELECT * FROM people", 5):
        with pytest.raises(nw.ConstraintError, match="grammar must be text with at least one rule, as in 'start: "):
            nw.gen("x", grammar=cast("str", nothing))


def test_a_dataclass_of_names_that_nobody_can_find_is_refused_by_name() -> None:
    @dataclasses.dataclass
    class Inner:
        number: int

    @dataclasses.dataclass
    class Outer:
        inner: Inner

    with pytest.raises(nw.ConstraintError, match="dtype Outer: name 'Inner' is not defined; a dataclass"):
        nw.gen("x", dtype=Outer)


def test_a_type_that_pydantic_cannot_read_is_refused_with_its_reason() -> None:
    @dataclasses.dataclass
    class Code:
        code: Annotated[str, pydantic.Field(pattern=r"(?=.*\d)[a-z\d]{4}")]

    with pytest.raises(nw.ConstraintError, match=r"^dtype Code: Pydantic has no validator for it: error: look-around"):
        nw.gen("x", dtype=Code)


def test_a_type_whose_package_is_missing_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "email_validator", None)
    monkeypatch.setattr("pydantic.networks.email_validator", None, raising=False)
    with pytest.raises(nw.ConstraintError, match=r"dtype EmailStr: .* email-validator is not installed"):
        nw.gen("x", dtype=pydantic.EmailStr)


def test_a_refusal_of_a_type_does_not_begin_with_another_one() -> None:
    with pytest.raises(nw.ConstraintError, match="complex cannot be enforced") as told:
        nw.gen("x", dtype=complex)
    assert told.value.__context__ is None


MONEY = Annotated[decimal.Decimal, pydantic.Field(ge=0, max_digits=8, decimal_places=2)]


def test_a_decimal_of_so_many_digits_is_enforced() -> None:
    @nw.function
    def price(s: State) -> None:
        s += "Price: " + nw.gen("price", dtype=MONEY, max_tokens=30)

    values = [price.run(temperature=3.0, seed=seed)["price"] for seed in range(20)]
    assert all(isinstance(value, decimal.Decimal) and 0 <= value < 10**6 for value in values)
    assert all(value == round(cast("decimal.Decimal", value), 2) for value in values)
    assert any(value != round(cast("decimal.Decimal", value)) for value in values)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (pydantic.Field(max_digits=8), re.escape("max_digits without decimal_places (give both)")),
        (pydantic.Field(max_digits=2, decimal_places=2), "decimal_places=2 of 2 digits"),
    ],
)
def test_digits_of_a_decimal_that_a_schema_cannot_say_are_refused(limits: object, message: str) -> None:
    with pytest.raises(nw.ConstraintError, match=message):
        value_type(Annotated[decimal.Decimal, limits])


# -- tools -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sky:
    colour: str


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Person(name="Ada", age=36), '{"name":"Ada","age":36}'),
        ([Sky("blue")], '[{"colour":"blue"}]'),
        (datetime.date(2026, 11, 23), '"2026-11-23"'),
        ({"price": {decimal.Decimal("1.50")}}, '{"price":["1.50"]}'),
        (None, "null"),
    ],
)
def test_what_a_tool_returns_is_told_as_json(result: object, text: str) -> None:
    _, said, _ = Call("look", {}).turn(result).nodes
    assert getattr(said, "text", None) == text


def test_a_tools_result_without_json_is_told_with_the_tools_name() -> None:
    with pytest.raises(nw.ProgramError, match=r"the result of tool 'look' has no JSON: .*; give turn\(\) its text"):
        Call("look", {}).turn(object())


def test_a_tools_result_that_was_not_awaited_is_told_so() -> None:
    async def look() -> str:
        return "rain"

    coming: Any = Call("look", {}, function=look).run()
    with pytest.raises(nw.ProgramError, match=re.escape("the result of tool 'look' is still to come; write await")):
        Call("look", {}).turn(coming)
    coming.close()


# -- scripts -----------------------------------------------------------------------------------------------------------


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


@pytest.mark.parametrize(
    ("dtype", "answer"),
    [
        (Person, Person(name="Ada", age=36)),
        (Person, {"name": "Ada", "age": 36}),
        (int, 5),
        (bool, True),
        (list[int], [1, 2]),
        (Mood, Mood.BAD),
        (Literal["a", 1], 1),
        (datetime.date, datetime.date(2026, 11, 23)),
    ],
)
def test_a_script_answers_with_values(dtype: object, answer: object) -> None:
    @nw.function
    def program(s: State) -> None:
        s += "x" + nw.gen("x", dtype=dtype)

    value = program.run(backend=nw.ScriptedBackend([answer]))["x"]
    assert value == (Person(name="Ada", age=36) if dtype is Person else answer)


def test_a_scripted_answer_with_blanks_in_its_json_is_told_what_is_wrong_with_it() -> None:
    @nw.function
    def program(s: State) -> None:
        s += "x" + nw.gen("x", dtype=Person)

    with pytest.raises(nw.ConstraintError, match="JSON is written without blanks: give the value itself"):
        program.run(backend=nw.ScriptedBackend(['{"name": "Ada", "age": 36}'])).sync()


def test_a_scripted_answer_is_shown_beside_the_beginning_of_a_long_regex() -> None:
    wide = pydantic.create_model("Wide", **{f"field_{i}": (str, ...) for i in range(50)})  # type: ignore[call-overload]

    @nw.function
    def program(s: State) -> None:
        s += "x" + nw.gen("x", dtype=wide)

    with pytest.raises(nw.ConstraintError, match=r"does not match the regex .*field_0.*[.]{3}'") as refusal:
        program.run(backend=nw.ScriptedBackend(['{"field_1":"a"}'])).sync()
    assert len(str(refusal.value)) < 800


def test_a_scripted_answer_without_json_is_refused() -> None:
    with pytest.raises(nw.GenerationError, match="must be a text, or have JSON"):
        greet.run("Ada", backend=nw.ScriptedBackend([object()])).sync()


@pytest.mark.parametrize(
    ("option", "remedy"),
    [("batch_size", "num_threads of run_batch"), ("name", "stand in the rows"), ("temprature", "mean 'temperature'?")],
)
def test_an_option_that_no_batch_has_is_told_what_there_is(option: str, remedy: str) -> None:
    with pytest.raises(nw.ProgramError, match=f"a batch has no option '{option}'.*{re.escape(remedy)}"):
        greet.run_batch([("Ada",)], **{option: 3})  # type: ignore[call-overload]  # such an option
