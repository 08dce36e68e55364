"""Typed values: the constraint admits exactly the texts that the parser reads, and what cannot be held is refused."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import re
import sys
import typing
from fractions import Fraction
from typing import Annotated, Any, Literal, Optional

import annotated_types
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import niwaki as nw
from niwaki.lang.nodes import Gen
from niwaki.lang.number_patterns import int_pattern
from niwaki.lang.remote_wire import params_json
from niwaki.lang.state import State
from niwaki.lang.types import ValueType, grammar_type, schema_type, value_type
from niwaki.runtime.api import Choices, Grammar, JsonSchema, Regex, SamplingParams
from niwaki.runtime.server.branch_shapes import SchemaBody


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Contact(pydantic.BaseModel):
    name: str
    email: str | None
    age: Optional[int]  # noqa: UP045  # the older spelling must work too
    mood: Mood
    kind: Literal["person", 'a "firm"', 3] | None
    score: float
    active: bool


class Tags(pydantic.BaseModel):
    tags: list[str]
    owner: Contact
    level: Level


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Box:
    corner: Point
    label: str


def pattern_of(dtype: object) -> str:
    constraint = value_type(dtype).constraint
    assert isinstance(constraint, Regex)
    return constraint.pattern


def admits(kind: ValueType, text: str) -> bool:
    match kind.constraint:
        case Regex(pattern=pattern):
            return re.fullmatch(pattern, text) is not None
        case Choices(choices=choices):
            return text in choices
        case other:
            raise AssertionError(f"{other} is not checked by hand here")


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [
        (int, "0", 0),
        (int, "-12", -12),
        (int, "999999999999999999", 10**18 - 1),
        (float, "3.25", 3.25),
        (float, "-0.5", -0.5),
        (float, "7", 7.0),
        (bool, "true", True),
        (bool, "false", False),
        (str, '"Ada"', "Ada"),
        (str, r'"a\"b\\c\nd\u00e9ü中😀"', 'a"b\\c\ndéü中😀'),
        (str, '""', ""),
        (Literal["yes", "no"], "no", "no"),
        (Literal[1, True, "x"], "True", True),
        (Mood, "bad", Mood.BAD),
        (Level, "2", Level.HIGH),
        (int | None, "null", None),
        (int | str, '"5"', "5"),
        (list[int], "[1,2,3]", [1, 2, 3]),
        (list[str], "[]", []),
        (list[bool], "[" + "true," * 99 + "true]", [True] * 100),
        (Point, '{"x":1,"y":2.5}', Point(1, 2.5)),
        (Box, '{"corner":{"x":1,"y":2},"label":"b"}', Box(Point(1, 2.0), "b")),
    ],
)
def test_a_value_is_read_back_as_its_type(dtype: object, text: str, value: object) -> None:
    kind = value_type(dtype)
    assert admits(kind, text)
    read = kind.parse(text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (int, "007"),
        (int, "+1"),
        (int, "-0"),
        (int, "1.5"),
        (int, ""),
        (int, "1" * 19),
        (float, ".5"),
        (float, "1."),
        (float, "1e5"),
        (float, "NaN"),
        (bool, "True"),
        (str, "Ada"),
        (str, '"a\nb"'),
        (str, '"\\x"'),
        (str, '"\\ud800"'),
        (Literal["yes"], "Yes"),
        (Mood, "GOOD"),
        (int | None, "None"),
        (list[int], "[1, 2]"),
        (list[int], "[1,]"),
        (Point, '{"y":2.5,"x":1}'),
        (Point, '{"x":1}'),
    ],
)
def test_other_texts_are_not_admitted(dtype: object, text: str) -> None:
    assert not admits(value_type(dtype), text)


def test_after_a_number_a_terminator_may_come_which_is_a_stop_string() -> None:
    kind = value_type(int)
    assert set(" \n,;)]}") == set(kind.stop)
    assert all(admits(kind, f"42{stop} and more") for stop in kind.stop)
    assert not admits(kind, "42x")
    assert not admits(kind, " 42")


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def objects(**fields: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects whose keys stand in this order."""
    return st.tuples(*fields.values()).map(lambda values: dict(zip(fields, values, strict=True)))


json_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=40)
contacts = objects(
    name=json_text,
    email=st.none() | json_text,
    age=st.none() | st.integers(-(10**18) + 1, 10**18 - 1),
    mood=st.sampled_from(["good", "bad"]),
    kind=st.sampled_from(["person", 'a "firm"', 3, None]),
    score=st.decimals(-1000, 1000, places=3).map(float),
    active=st.booleans(),
)
tags = objects(tags=st.lists(json_text, max_size=8), owner=contacts, level=st.sampled_from([1, 2]))


@settings(max_examples=40)
@given(tags)
def test_the_json_of_every_value_within_the_limits_is_admitted(value: dict[str, Any]) -> None:
    kind = value_type(Tags)
    assert admits(kind, compact(value))
    read = kind.parse(compact(value))
    assert isinstance(read, Tags)
    assert read.owner.name == value["owner"]["name"]
    assert read == Tags.model_validate(value)


CONTACT = value_type(Contact)


@settings(max_examples=40)
@given(st.from_regex(pattern_of(Contact), fullmatch=True))
def test_every_admitted_text_is_read(text: str) -> None:
    text = re.sub("[\ud800-\udfff]", "?", text)  # the automaton is over UTF-8, which has no lone surrogates
    assert isinstance(CONTACT.parse(text), Contact)


@given(st.integers(-5000, 5000), st.integers(0, 3000), st.integers(-10000, 10000))
def test_bounds_of_whole_numbers_are_exact(low: int, width: int, number: int) -> None:
    pattern = int_pattern(low, low + width)
    assert (re.fullmatch(pattern, str(number)) is not None) == (low <= number <= low + width)
    assert re.fullmatch(pattern, str(low))
    assert re.fullmatch(pattern, str(low + width))
    assert not re.fullmatch(pattern, str(low - 1))
    assert not re.fullmatch(pattern, str(low + width + 1))


def test_field_constraints_are_enforced_exactly() -> None:
    class Limited(pydantic.BaseModel):
        age: int = pydantic.Field(ge=0, lt=120)
        positive: pydantic.PositiveInt
        price: float = pydantic.Field(ge=0)
        code: str = pydantic.Field(min_length=2, max_length=3)
        picks: list[int] = pydantic.Field(min_length=1, max_length=2)
        inner: Annotated[int, annotated_types.Interval(ge=5, le=7)]
        named: int = pydantic.Field(alias="the name")
        maybe: int | None = pydantic.Field(ge=0, le=9)

    kind = value_type(Limited)
    good = {"age": 119, "positive": 1, "price": 0.5, "code": "ab", "picks": [1], "inner": 5, "the name": 1, "maybe": 9}
    assert admits(kind, compact(good))
    assert kind.parse(compact(good)) == Limited.model_validate(good)
    assert admits(kind, compact({**good, "maybe": None}))
    for key, value in [
        ("age", 120),
        ("age", -1),
        ("positive", 0),
        ("price", -0.5),
        ("code", "a"),
        ("code", "abcd"),
        ("picks", []),
        ("picks", [1, 2, 3]),
        ("inner", 8),
        ("maybe", 10),
    ]:
        assert not admits(kind, compact({**good, key: value})), (key, value)


class Recursive(pydantic.BaseModel):
    child: Recursive | None


def model_with(annotation: object, field: object = ...) -> type[pydantic.BaseModel]:
    return pydantic.create_model("Made", bad=(annotation, field))  # type: ignore[arg-type]  # made at run time


Share = Annotated[float, pydantic.Field(ge=0, le=1, multiple_of=0.125)]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (object, "dtype object: object cannot be enforced"),
        ("int", "is a text; give the type itself"),
        (5, "cannot be enforced"),
        (Literal["a", ""], "an empty text cannot be generated"),
        (Literal[1, "1"], "written alike"),
        (model_with(int | str, pydantic.Field(ge=5)), "field 'bad'.*cannot be enforced exactly"),
        (model_with(complex), "dtype Made, field 'bad': complex cannot be enforced"),
        (model_with(re.Pattern), "field 'bad': regex cannot be enforced"),
        (model_with(pydantic.PastDate), "field 'bad': a limit on date cannot be enforced"),
        (model_with(Fraction), "field 'bad': Fraction cannot be enforced"),
        (model_with(decimal.Decimal, pydantic.Field(max_digits=3)), "max_digits without decimal_places"),
        (
            set[Share],
            r"dtype set\[.*\]: schema at /uniqueItems: cannot be enforced over numbers with steps",
        ),
        (model_with(list[set[Share]]), "dtype Made, field 'bad': schema at /properties/bad/items/uniqueItems"),
        (list[model_with(set[Share])], r"dtype list\[.*\], Made, field 'bad': .*uniqueItems"),  # type: ignore[misc]  # made
        (
            model_with(str, pydantic.Field(pattern="^aaa$", max_length=2)),
            "Made, field 'bad': the schema admits no text",
        ),
        (model_with(model_with(float, pydantic.Field(gt=5, lt=5))), "field 'bad', field 'bad': .*admits no text"),
        (dict[float, int], r"dtype dict\[float, int\]: a dict with such keys \(float\) cannot be enforced"),
        (model_with(dict[Literal[1], int]), "field 'bad': a dict with such keys"),
        (model_with(int, pydantic.Field(validation_alias=pydantic.AliasPath("a", 0))), "field 'bad'.*alias"),
    ],
)
def test_what_cannot_be_enforced_is_refused_naming_the_field(dtype: object, message: str) -> None:
    with pytest.raises(nw.ConstraintError, match=message):
        nw.gen("x", dtype=dtype)


def test_a_set_holds_each_item_once_whatever_is_drawn(bundled_engine: nw.Engine) -> None:
    for dtype, kind in ((set[Literal["a", "b"]], set), (frozenset[int], frozenset), (list[set[bool]], list)):

        @nw.function
        def f(s: State, dtype: object) -> None:
            s += "Values: "
            s += nw.gen("text", dtype=dtype, max_tokens=24, temperature=2.0)

        for seed in range(4):
            state = f.run(dtype, backend=bundled_engine, seed=seed)
            written = json.loads(state.text().removeprefix("Values: "))
            assert isinstance(state["text"], kind)
            for items in written if kind is list else [written]:
                assert len(set(items)) == len(items)


def run(dtype: object, answer: str, **options: object) -> State:
    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", dtype=dtype)

    return f.run(backend=nw.ScriptedBackend([answer]), **options)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (dict, {"a": [1]}),
        (list, [1, "a"]),
        (dict[str, int], {"a": 1}),
        (datetime.date, "2026-11-20"),
        (Recursive, {"child": {"child": None}}),
        (model_with(datetime.date), {"bad": "2026-11-20"}),
        (model_with(Any), {"bad": [None]}),
        (model_with(str, pydantic.Field(pattern="a+")), {"bad": "baa"}),
        (model_with(float, pydantic.Field(gt=0, le=1)), {"bad": 0.5}),
        (model_with(str, pydantic.Field(max_length=100_000)), {"bad": "a"}),
        (model_with(list[datetime.date]), {"bad": ["2026-11-20"]}),
    ],
)
def test_what_no_regex_holds_goes_through_the_types_json_schema(dtype: object, value: object) -> None:
    kind = value_type(dtype)
    assert isinstance(kind.constraint, JsonSchema)
    assert kind.parse(compact(value)) == pydantic.TypeAdapter[object](dtype).validate_python(value)  # type: ignore[arg-type]


def test_the_schema_of_a_model_is_closed_and_asks_for_every_field() -> None:
    class Inner(pydantic.BaseModel):
        at: datetime.date
        note: str = ""

    class Outer(pydantic.BaseModel):
        inner: list[Inner]
        properties: dict[str, int] = {}

    kind = value_type(Outer)
    assert isinstance(kind.constraint, JsonSchema)
    schema = json.loads(kind.constraint.schema)
    inner = schema["$defs"]["Inner"]
    assert (schema["required"], schema["additionalProperties"]) == (["inner", "properties"], False)
    assert (inner["required"], inner["additionalProperties"]) == (["at", "note"], False)
    assert schema["properties"]["properties"]["additionalProperties"] == {"type": "integer"}


def test_a_schema_and_a_grammar_give_their_text() -> None:
    assert schema_type({"type": "integer"}).constraint == JsonSchema('{"type": "integer"}')
    assert schema_type('{"type": "null"}').parse("null") == "null"
    typed = schema_type(Contact)
    assert isinstance(typed.constraint, JsonSchema)
    assert list(json.loads(typed.constraint.schema)["properties"]) == [*Contact.model_fields]
    assert grammar_type('root ::= "a"').constraint == Grammar('root ::= "a"', "ebnf")
    assert grammar_type('start: "a"').constraint == Grammar('start: "a"', "lark")
    with pytest.raises(nw.ConstraintError, match="not valid JSON"):
        schema_type("{")
    with pytest.raises(nw.ConstraintError, match="JSON values only"):
        schema_type({"const": object()})
    with pytest.raises(nw.ConstraintError, match="at least one rule"):
        grammar_type(" ")


def test_a_program_reads_the_typed_value() -> None:
    state = run(Point, '{"x":1,"y":2}')
    assert state["x"] == Point(1, 2.0)
    assert state.text() == '{"x":1,"y":2}'


def test_the_short_forms_are_typed() -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.gen_int("i") + nw.gen_float("f") + nw.gen_bool("b") + nw.gen_string("s", max_tokens=9)

    state = f.run(backend=nw.ScriptedBackend(["5", "2.5", "true", '"x"']))
    assert [state[name] for name in "ifbs"] == [5, 2.5, True, "x"]
    assert state.text() == '52.5true"x"'


def test_a_typed_gen_keeps_the_stops_of_its_author() -> None:
    backend = nw.ScriptedBackend(["5"])

    @nw.function
    def f(s: State) -> None:
        s += nw.gen_int("x", stop=["END", ","])

    f.run(backend=backend).sync()
    params = backend.calls[0].params
    assert params is not None
    assert params.stop == ("END", ",", " ", "\n", ";", ")", "]", "}")


def test_typed_samples_are_a_list_of_the_type() -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", dtype=int, n=3)

    state = f.run(backend=nw.ScriptedBackend(["1", "2", "3"]))
    assert state["x"] == [1, 2, 3]
    assert state.text() == "1"
    samples = state.get_meta_info("x")["samples"]
    assert isinstance(samples, list)
    assert len(samples) == 3


def test_a_value_cut_by_the_budget_is_an_error_that_says_so() -> None:
    with pytest.raises(
        nw.GenerationError, match=r"gen 'x' used up its 3 tokens before its Point was complete.*max_tokens"
    ):
        run(Point, '{"x":1,"y":2}', max_new_tokens=3)["x"]


def test_a_value_cut_by_a_stop_is_an_error_that_names_the_stop() -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", dtype=Point, stop='"y"')

    with nw.Engine(kv_tokens=2048) as engine:
        state = f.run(backend=engine, temperature=0)
        with pytest.raises(nw.GenerationError, match=r"gen 'x' was stopped at '\"y\"' before its Point was complete"):
            state["x"]


def test_a_value_that_the_authors_validator_refuses_is_an_error_with_its_message() -> None:
    def even(value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value

    dtype = Annotated[int, pydantic.AfterValidator(even)]
    assert run(list[dtype], "[2]")["x"] == [2]
    with pytest.raises(nw.GenerationError, match="must be even"):
        run(list[dtype], "[3]")["x"]


def test_a_regex_gives_its_text() -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", regex=r"[0-9]{4}-[0-9]{2}")

    assert f.run(backend=nw.ScriptedBackend(["2024-05"]))["x"] == "2024-05"
    with pytest.raises(nw.ConstraintError, match="does not match the regex"):
        f.run(backend=nw.ScriptedBackend(["May"]))["x"]


def test_the_spacing_of_a_typed_value_reaches_its_constraint() -> None:
    node = nw.gen("x", dtype=Point, json_spacing="spaced")
    assert isinstance(node, Gen)
    assert node.type is not None
    constraint = node.type.constraint
    assert isinstance(constraint, JsonSchema)
    assert constraint.spacing == "spaced"
    assert node.type.parse('{"x": 1, "y": 2}') == Point(1, 2.0)
    sent = params_json(SamplingParams(constraint=constraint))["constraint"]
    assert SchemaBody.model_validate(sent).spacing == "spaced"
    with pytest.raises(nw.ConstraintError, match="one of compact, spaced, free, got 'wide'"):
        nw.gen("x", dtype=Point, json_spacing="wide")  # type: ignore[arg-type]  # what a caller may get wrong
    with pytest.raises(nw.ProgramError, match="give one of them"):
        nw.gen("x", regex="a", json_spacing="free")


@pytest.mark.parametrize(
    "longest",
    ["PT999999H999999M99999999S", "PT9999999M99999999S", "PT999999999S", "P999999Y9999M9999DT999999H999999M99999999S"],
)
def test_the_longest_durations_that_may_come_out_are_read(longest: str) -> None:
    constraint = value_type(datetime.timedelta).constraint
    assert isinstance(constraint, JsonSchema)
    pattern = json.loads(constraint.schema)["pattern"]
    assert re.search(pattern, longest)
    assert not re.search(pattern, longest.replace("9", "99", 1))
    pydantic.TypeAdapter(datetime.timedelta).validate_python(longest)


class Plain(typing.TypedDict):
    number: int


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Pydantic reads it from 3.12 on")
def test_a_typed_dict_that_pydantic_cannot_read_names_the_one_that_it_can() -> None:
    with pytest.raises(nw.ConstraintError, match=r"dtype Plain: .* write from typing_extensions import TypedDict"):
        value_type(Plain)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (list[Point], "list[Point]"),
        (dict[str, Point | None], "dict[str, Point | None]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Optional[list[Point]], "list[Point] | None"),  # noqa: UP045  # as above
        (Literal["a.b"], "Literal['a.b']"),
        (Annotated[int, pydantic.Field(ge=1)], None),
    ],
)
def test_a_type_is_named_as_its_author_writes_it(dtype: object, name: str | None) -> None:
    found = value_type(dtype).name
    assert found == name if name is not None else found.startswith("Annotated[int, ")
