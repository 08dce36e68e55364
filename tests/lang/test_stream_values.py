"""Typed values while they fill: each of its class, growing, and the finished one last, on threads and on loops."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import enum
import json
import re
import threading
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple, TypedDict, assert_type

import pydantic
import pytest

import niwaki as nw
from niwaki.lang.partial import NOTHING, partial_value
from niwaki.lang.state import State
from tests.lang.waiting import PATIENCE


class Pet(pydantic.BaseModel):
    name: str
    legs: int


class Pets(pydantic.RootModel[list[Pet]]):
    pass


class Person(pydantic.BaseModel):
    name: str
    age: int | None
    pets: list[Pet]


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    label: str

    def __post_init__(self) -> None:
        if self.label is None:
            raise ValueError("a point has a label")


class Row(TypedDict):
    id: int
    tags: list[str]


class Color(enum.Enum):
    RED = "red"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    lives: int


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int
    unit: ClassVar[str] = "m"


class Place(NamedTuple):
    x: int
    y: int
    name: str


class Named(pydantic.BaseModel):
    name: str = pydantic.Field(validation_alias=pydantic.AliasChoices("first", "last"))


ADA = '{"name":"Ada Lovelace","age":36,"pets":[{"name":"Rex","legs":4}]}'


def test_a_type_checker_takes_the_values_for_what_the_last_one_is_held_to() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "Who? " + nw.gen("who", dtype=Person)

    state = f.run(backend=nw.ScriptedBackend({"Who? ": ADA}))
    for value in state.stream_value("who", Person):
        assert assert_type(value, Person).name == "Ada Lovelace"

    async def last() -> Person:
        return [value async for value in state.stream_value("who", Person)][-1]

    assert asyncio.run(last()) == state["who"]
    assert assert_type(next(iter(state.stream_value("who"))), object) == state["who"]
    with pytest.raises(nw.ProgramError, match=r"variable 'who' is Person\(.*\), which is no Pet"):
        list(state.stream_value("who", Pet))


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [
        (None, "any te", "any te"),
        (str, '"half a te', "half a te"),
        (str, '"a \\', "a "),
        (str, "", NOTHING),
        (int, "3", NOTHING),
        (bool, "tr", NOTHING),
        (Literal["a", "b"], "a", NOTHING),
        (Color, "re", NOTHING),
        (list[int], "[1,2", [1]),
        (list[int], "[1,2,", [1, 2]),
        (list[str], '["a","12', ["a", "12"]),
        (list[float], "[-1.5e", []),
        (Row, '{"id":7,"tags":["x","y', {"id": 7, "tags": ["x", "y"]}),
        (dict[str, Pet], '{"a":{"name":"R', {"a": Pet.model_construct(name="R", legs=None)}),
        (Pet | None, '{"name":"Re', Pet.model_construct(name="Re", legs=None)),
        (list[Pet | int], '[1,{"legs":4,', [1, Pet.model_construct(name=None, legs=4)]),
        (list[Color], '["red","r', [Color.RED, None]),
        (list[Literal["ab"]], '["a', [None]),
        (list[datetime.date], '["2020-01', [None]),
        (Annotated[list[int], "a comment"], "[5 ", [5]),
        (list[int], "[x", NOTHING),
        (tuple[int, Pet], '[1,{"name":"R', (1, Pet.model_construct(name="R", legs=None))),
        (tuple[int, ...], "[1,2,", (1, 2)),
        (tuple[int, str] | None, "[1,", (1,)),
        (tuple, '["a",', ("a",)),
        (set[int], "[1,2,", {1, 2}),
        (frozenset[str], '["a","b', frozenset({"a", "b"})),
        (Mapping[str, Pet], '{"a":{"name":"R', {"a": Pet.model_construct(name="R", legs=None)}),
        (Pets, '[{"name":"R', Pets.model_construct([Pet.model_construct(name="R", legs=None)])),
        (Pets | None, '[{"name":"R', Pets.model_construct([Pet.model_construct(name="R", legs=None)])),
        (dict[str, Pet] | None, '{"a":{"name":"R', {"a": Pet.model_construct(name="R", legs=None)}),
        (Cat | Dog, '{"kind":"d', Dog.model_construct(kind=None, lives=None)),
        (list[Cat | Dog], '[{"kind":"dog","lives":1', [Dog.model_construct(kind="dog", lives=None)]),
        (Slotted, '{"x":3,', Slotted(3)),
        (Place, '[1,2,"a', Place(1, 2, "a")),
        (Place, "[1,", Place(1, None, None)),  # type: ignore[arg-type]  # to come
        (deque[int], "[1,2,", deque([1, 2])),
        (AbstractSet[int], "[1,2,", frozenset({1, 2})),
        (Named, '{"first":"A', Named.model_construct(name="A")),
    ],
)
def test_a_partial_value_says_what_has_come_so_far(dtype: object, text: str, value: object) -> None:
    found = partial_value(dtype, text)
    assert found == value
    assert type(found) is type(value)


def test_a_partial_object_is_of_its_class_with_none_in_what_is_to_come() -> None:
    person = partial_value(Person, '{"name":"Ada","age":3')
    assert isinstance(person, Person)
    assert person.__dict__ == {"name": "Ada", "age": None, "pets": None}  # 3 may yet become 36
    point = partial_value(Point, '{"x":1,')
    assert isinstance(point, Point)
    assert dataclasses.asdict(point) == {"x": 1, "label": None}


def test_every_beginning_of_a_value_is_a_value_that_only_grows() -> None:
    names = []
    for cut in range(1, len(ADA) + 1):
        value = partial_value(Person, ADA[:cut])
        if value is NOTHING:
            continue
        assert isinstance(value, Person)
        names.append(value.name or "")
        assert value.age in (None, 36)
        assert all(pet.legs in (None, 4) for pet in value.pets or [])
    assert all(later.startswith(earlier) for earlier, later in pairwise(names))
    assert partial_value(Person, ADA) == Person.model_validate_json(ADA)


@nw.function
def describe(s: State) -> None:
    s += "Person: " + nw.gen("person", dtype=Person)
    s += " Why: " + nw.gen("why")
    s += " How many: " + nw.gen_int("count")
    s += nw.select("mood", choices=["calm", "wild"])
    s["set"] = 5


def backend() -> nw.ScriptedBackend:
    script: dict[str | re.Pattern[str], str] = {"Person: ": ADA, "Why: ": "it is so", "How many: ": "36", "": "calm"}
    return nw.ScriptedBackend(script, threads=1, delay=0.0005)


def test_a_streamed_value_grows_and_ends_as_the_typed_one() -> None:
    scripted = backend()
    state = describe.stream(backend=scripted, timeout=PATIENCE)
    values = list(state.stream_value("person"))
    assert values
    assert all(isinstance(value, Person) for value in values)
    assert values[-1] == Person.model_validate_json(ADA) == state["person"]
    assert values[-1] is state["person"]
    assert all(a != b for a, b in pairwise(values[:-1]))  # each says something new
    scripted.shutdown()


def test_a_text_grows_word_by_word() -> None:
    @nw.function
    def explain(s: State) -> None:
        s += "Why: " + nw.gen("why")

    gate = threading.Semaphore(0)

    def wait() -> float:
        assert gate.acquire(timeout=PATIENCE)
        return 0.0

    gated = nw.ScriptedBackend({"Why: ": "it is so"}, threads=1, delay=wait)
    values = iter(explain.stream(backend=gated, timeout=PATIENCE).stream_value("why"))
    seen = []
    for _ in range(3):
        gate.release()
        seen.append(next(values))  # each comes before the next word may be said
    gate.release(10)
    assert [*seen, *values] == ["it", "it is", "it is so"]
    gated.shutdown()


@pytest.mark.parametrize(("name", "values"), [("count", [36]), ("mood", ["calm"]), ("set", [5])])
def test_what_cannot_be_half_comes_whole(name: str, values: list[object]) -> None:
    scripted = backend()
    assert list(describe.stream(backend=scripted, timeout=PATIENCE).stream_value(name)) == values
    scripted.shutdown()


def test_several_values_are_streamed_at_once_on_a_loop() -> None:
    scripted = backend()

    async def read(state: State, name: str) -> list[object]:
        return [value async for value in state.stream_value(name)]

    async def main() -> None:
        state = describe.stream(backend=scripted, timeout=PATIENCE)
        persons, whys, counts = await asyncio.gather(*(read(state, name) for name in ("person", "why", "count")))
        assert persons[-1] == Person.model_validate_json(ADA)
        assert [whys[-1], *set(map(type, persons))] == ["it is so", Person]
        assert set(whys) <= {"it", "it is", "it is so"}  # a reader that is late finds several words at once
        assert counts == [36]

    asyncio.run(main())
    scripted.shutdown()


def test_several_values_are_streamed_at_once_on_threads() -> None:
    scripted = backend()
    state = describe.stream(backend=scripted, timeout=PATIENCE)
    values: dict[str, list[object]] = {}

    def read(name: str) -> None:
        values[name] = list(state.stream_value(name))

    readers = [threading.Thread(target=read, args=(name,)) for name in ("person", "why", "mood")]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert values["person"][-1] == state["person"]
    assert values["why"][-1] == "it is so"
    assert values["mood"] == ["calm"]
    scripted.shutdown()


def test_a_late_stream_gives_the_finished_value_alone() -> None:
    state = describe.run(backend=nw.ScriptedBackend({"Person: ": ADA, "Why: ": "so", "How many: ": "36", "": "calm"}))
    state.sync()
    assert list(state.stream_value("person")) == [Person.model_validate_json(ADA)]


def test_of_several_samples_only_the_list_comes() -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", n=2, dtype=list[int])

    answer = json.dumps([1, 2, 3], separators=(",", ":"))
    assert list(f.stream(backend=nw.ScriptedBackend(lambda prompt: answer)).stream_value("x")) == [[[1, 2, 3]] * 2]


def test_a_stream_of_values_may_be_left_early_and_raises_what_the_state_failed_with() -> None:
    scripted = backend()
    state = describe.stream(backend=scripted, timeout=PATIENCE)
    for _ in state.stream_value("person"):
        break
    assert state["mood"] == "calm"
    with pytest.raises(nw.UnknownVariable, match="no variable 'nothing'"):
        list(state.stream_value("nothing"))
    with pytest.raises(nw.ProgramError, match="name must be a non-empty string"):
        state.stream_value("")
    failing = describe.stream(backend=nw.ScriptedBackend([nw.GenerationError("on fire")]))
    with pytest.raises(nw.GenerationError, match="on fire"):
        list(failing.stream_value("person"))
    scripted.shutdown()
