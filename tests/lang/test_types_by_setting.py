"""Types whose limits stand beside their fields, and types too large for a regex: what is written is what they take."""

from __future__ import annotations

import dataclasses
import enum
import random
import re
from typing import Annotated, Literal

import pydantic
import pydantic.dataclasses
import pytest
from pydantic import Field

import niwaki as nw
from niwaki.lang.pattern_size import num_states
from niwaki.lang.types import MAX_STATES, value_type
from niwaki.runtime.api import JsonSchema, Regex
from niwaki.runtime.constraints import ConstraintCompiler
from niwaki.runtime.constraints.pattern import parse
from tests.benchmarks.draws import VOCABULARY, fault


class Numbers(pydantic.RootModel[list[int]]):
    pass


class Team(pydantic.BaseModel):
    sizes: Numbers
    others: list[Numbers]


class Nested(pydantic.RootModel["int | list[Nested]"]):
    pass


class Short(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(str_min_length=2, str_max_length=3)

    code: str


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(str_max_length=2))
class ShortPoint:
    label: str


@pydantic.dataclasses.dataclass
class Ranked:
    rank: int = Field(ge=100, le=120)


@pydantic.dataclasses.dataclass
class Renamed:
    rank: int = Field(alias="order")


@dataclasses.dataclass
class Plain:
    rank: int = Field(ge=100, le=120)


class Letter(enum.StrEnum):
    A = "a"
    B = "b"


class OneLetter(pydantic.BaseModel):
    letter: Literal[Letter.A]


Many = enum.Enum("Many", {f"N{number}": f"value number {number}" for number in range(2000)})  # type: ignore[misc]  # made for the test


class Sorted(pydantic.BaseModel):
    kind: Many
    other: Many | None


class Card(pydantic.BaseModel):
    title: str = Field(max_length=200)
    text: str = Field(max_length=200)
    author: str = Field(max_length=200)


@pytest.mark.parametrize(
    "dtype",
    [
        pydantic.RootModel[list[int]],
        Numbers,
        Team,
        Nested,
        Short,
        ShortPoint,
        Ranked,
        Renamed,
        Plain,
        OneLetter,
        Sorted,
        Card,
        list[Annotated[bytes, Field(min_length=2)]],
    ],
)
def test_what_such_a_type_admits_its_validator_takes(dtype: object) -> None:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    try:
        kind = value_type(dtype)
        compiled = compiler.compile(kind.constraint)
        for seed in range(6):
            assert fault(kind, compiled, random.Random(seed), 30) is None
    finally:
        compiler.close()


def test_a_root_model_is_written_without_a_key() -> None:
    kind = value_type(Numbers)
    assert isinstance(kind.constraint, Regex)
    assert re.fullmatch(kind.constraint.pattern, "[1,2]")
    assert kind.parse("[1,2]") == Numbers([1, 2])


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class OneColour(pydantic.BaseModel):
    colour: Literal[Colour.RED]


class Blob(pydantic.BaseModel):
    data: Annotated[bytes, Field(max_length=3)]


class Coded(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(val_json_bytes="base64")

    data: bytes


class Aliased(pydantic.BaseModel):
    name: str = Field(validation_alias=pydantic.AliasChoices("name", "title"))


class NoColour(enum.Enum):
    pass


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (OneColour, "dtype OneColour, field 'colour': a Literal of an Enum's members"),
        (Blob, "dtype Blob, field 'data': max_length of bytes"),
        (Coded, "dtype Coded, field 'data': bytes in base64 or hex"),
        (Aliased, "dtype Aliased, field 'name': only an alias that is one string is supported"),
        (NoColour, "dtype NoColour has no values"),
    ],
)
def test_what_the_validator_would_refuse_is_refused_before(dtype: object, message: str) -> None:
    with pytest.raises(nw.ConstraintError, match=re.escape(message)) as caught:
        nw.gen("x", dtype=dtype)
    assert type(caught.value) is nw.ConstraintError  # by its public name, which tables of errors hold


def test_a_type_too_large_for_a_regex_is_a_grammar() -> None:
    assert isinstance(value_type(Sorted).constraint, JsonSchema)
    assert isinstance(value_type(Card).constraint, JsonSchema)
    assert isinstance(value_type(Short).constraint, JsonSchema)


class Named(pydantic.BaseModel):
    kind: Literal["näme", "place", "(thing)"]
    tags: list[str]


def test_the_size_of_a_pattern_is_about_that_of_its_automaton() -> None:
    listed = Annotated[list[Annotated[str, Field(min_length=3, max_length=9)]], Field(max_length=9)]
    for dtype in (list[int], list[float], Named, listed, Annotated[list[bool], Field(max_length=30)]):
        constraint = value_type(dtype).constraint
        assert isinstance(constraint, Regex)
        assert 0.6 < num_states(constraint.pattern) / parse(constraint.pattern).cost < 1.2
        assert num_states(constraint.pattern) < MAX_STATES


def test_a_class_is_described_once() -> None:
    assert value_type(Card) is value_type(Card)
