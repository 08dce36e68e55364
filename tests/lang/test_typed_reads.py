"""Types for type checkers: what a body returns, and what a variable is read as. `mypy tests` holds the assert_types."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, assert_type, cast

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # before Python 3.12 Pydantic takes no other

import niwaki as nw
from niwaki.lang.arguments import RUN_NAMES, RunOptions

Mood = Literal["good", "bad"]


class Contact(BaseModel):
    name: str


@dataclass(frozen=True)
class Point:
    x: int


class Colour(enum.Enum):
    RED = "red"


class Ours:
    """Nothing that Pydantic knows."""


class Row(TypedDict):
    a: int


def made(**values: object) -> nw.State[None]:
    @nw.function
    def f(s: nw.State) -> None:
        for name, value in values.items():
            s[name] = value

    return f.run(backend=nw.ScriptedBackend([]))


def test_a_value_is_read_as_its_type() -> None:
    ada = Contact(name="Ada")
    state = made(i=1, mood="good", ada=ada, all=[ada], age=None, red=Colour.RED, at=Point(1), raw={"a": [1]})
    assert assert_type(state.get_var("i", int), int) == 1
    assert assert_type(state.get_var("mood", Mood), Mood) == "good"
    assert assert_type(state.get_var("ada", Contact), Contact) is ada
    assert assert_type(state.get_var("all", list[Contact]), list[Contact])[0] is ada
    assert assert_type(state.get_var("age", int | None), int | None) is None
    assert assert_type(state.get_var("red", Colour), Colour) is Colour.RED
    assert assert_type(state.get_var("at", Point), Point) == Point(1)
    assert assert_type(state.get_var("raw", dict[str, list[int]]), dict[str, list[int]]) == {"a": [1]}
    assert assert_type(state.get_var("i", Annotated[int, Field(ge=0)]), int) == 1
    assert assert_type(state.get_var("ada", Annotated[Contact, "told"]), Contact) is ada
    assert assert_type(state.get_var("at", Annotated[Point, "told"]), Point) == Point(1)
    assert assert_type(state.get_var("all", Sequence[Contact]), Sequence[Contact]) == [ada]
    assert assert_type(state.get_var("i"), object) == 1


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, str),
        ("1", int),
        (None, int),
        ("fine", Mood),
        (["Ada"], list[Contact]),
        ([{"name": "Ada"}], list[Contact]),
        ({"name": "Ada"}, Contact),
        ([Contact(name="Ada"), None], list[Contact]),
        ("1", int | None),
        ("red", Colour),
        (True, Literal[1]),
        (1, Literal[True]),
    ],
)
def test_nothing_is_converted_into_a_type(value: object, dtype: type) -> None:
    state = made(x=value)
    with pytest.raises(nw.ProgramError, match=r"variable 'x' is .*, which is no "):
        state.get_var("x", dtype)
    assert state["x"] == value, "and the state goes on"


def test_an_iterable_is_looked_into() -> None:
    state = made(x=[1, 2], once=iter([1, 2]))
    assert assert_type(state.get_var("x", Iterable[int]), Iterable[int]) == [1, 2]
    assert state.get_var("x", Iterable[int] | None) == [1, 2]
    with pytest.raises(nw.ProgramError, match=r"is \[1, 2\], which is no collections.abc.Iterable\[str\]"):
        state.get_var("x", Iterable[str])
    with pytest.raises(nw.ProgramError, match="which is no"):
        state.get_var("once", Iterable[int])
    assert list(cast("list[int]", state["once"])) == [1, 2], "looking did not use it up"


def test_a_long_value_is_not_told_whole() -> None:
    state = made(x="word " * 10_000)
    with pytest.raises(
        nw.ProgramError, match=r"variable 'x' is 'word word .*\.\.\. \(a str\), which is no int"
    ) as raised:
        state.get_var("x", int)
    assert len(str(raised.value)) < 300


def test_what_is_no_type_is_refused() -> None:
    state = made(x=1)
    for wrong in (5, nw.gen, [int]):
        with pytest.raises(nw.ProgramError, match="is no type that a value can be held against"):
            state.get_var("x", cast("type[int]", wrong))
    with pytest.raises(nw.ProgramError, match="dtype 'int' is a text; give the type itself"):
        state.get_var("x", cast("type[int]", "int"))


def test_objects_of_any_class_and_typed_dicts_are_looked_at_inside_of_lists() -> None:
    ours, row = Ours(), Row(a=1)
    state = made(all=[ours], row=row, wrong={"a": "1"})
    assert state.get_var("all", list[Ours]) == [ours]
    assert assert_type(state.get_var("row", Row), Row) is row
    for name, dtype in (("all", list[Row]), ("wrong", Row), ("row", list[Ours])):
        with pytest.raises(nw.ProgramError, match="which is no"):
            state.get_var(name, cast("type", dtype))


def test_a_list_that_a_join_made_is_no_value_of_one_fork() -> None:
    @nw.function
    def f(s: nw.State) -> list[int]:
        forks = s.fork(2)
        forks += "How many? " + nw.gen_int("count")
        forks.join()
        with pytest.raises(nw.ProgramError, match=r"variable 'count' is \[3, 3\], which is no int"):
            s.get_var("count", int)
        return s.get_var("count", list[int])

    state = f.run(backend=nw.ScriptedBackend({"many? ": "3"}))
    assert assert_type(state.ret_value, list[int]) == [3, 3]


def test_what_the_body_returns_is_known_of_every_way_to_run_it() -> None:
    @nw.function()
    def f(s: nw.State, i: int) -> int:
        return i + 1

    @nw.function
    async def g(s: nw.State, i: int) -> str:
        return str(i)

    backend = nw.ScriptedBackend([])
    assert assert_type(f.run(1, backend=backend).ret_value, int) == 2
    assert assert_type(f(1, backend=backend).ret_value, int) == 2
    assert assert_type(f.bind(backend=backend).compile().stream(1).ret_value, int) == 2
    assert assert_type(g.run(1, backend=backend).ret_value, str) == "1"

    async def main() -> str:
        return (await g.arun(7, backend=backend)).ret_value

    assert asyncio.run(main()) == "7"
    for result in f.run_batch([(1,), (2,)], backend=backend):
        assert not isinstance(result, Exception)
        assert assert_type(result.ret_value, int) in (2, 3)


def test_an_async_read_has_its_type_too() -> None:
    @nw.function
    async def f(s: nw.State) -> int:
        s += "How many? " + nw.gen_int("count")
        with pytest.raises(nw.ProgramError, match="variable 'count' is 3, which is no str"):
            await s.get("count", str)
        return assert_type(await s.get("count", int), int)

    assert f.run(backend=nw.ScriptedBackend({"many? ": "3"})).ret_value == 3


# ---------------------------------------------------------------------------------------------------------------
# A program as a part of another one
# ---------------------------------------------------------------------------------------------------------------


@nw.function
def field(s: nw.State, name: str, end: str = "\n") -> str:
    s += f"{name}: " + nw.gen(name, stop="\n") + end
    return s.get_var(name, str)


def test_a_program_goes_on_with_a_state_that_it_is_given() -> None:
    backend = nw.ScriptedBackend({"name: ": "Ada", "town: ": "London"})

    @nw.function
    def card(s: nw.State) -> str:
        s += "Card\n"
        name = assert_type(field(s, "name"), str)
        field(s, "town", end=".")
        return name

    state = card.run(backend=backend)
    assert state.text() == "Card\nname: Ada\ntown: London."
    assert (state.ret_value, state["town"]) == ("Ada", "London")
    assert [call.prompt for call in backend.calls] == ["Card\nname: ", "Card\nname: Ada\ntown: "], "one text, one run"


def test_a_program_goes_on_with_forks_and_with_finished_states() -> None:
    @nw.function
    def both(s: nw.State) -> None:
        s += "Card\n"
        forks = s.fork(2)
        for name, fork in zip(("name", "town"), forks, strict=True):
            field(fork, name)
        forks.join()

    state = both.run(backend=nw.ScriptedBackend({"name: ": "Ada", "town: ": "London", "year: ": "1815"}))
    assert (state["name"], state["town"]) == (["Ada", None], [None, "London"])
    assert field(state, "year") == "1815"
    assert state.text() == "Card\nyear: 1815\n"


def test_an_async_program_goes_on_with_a_state_when_it_is_awaited() -> None:
    @nw.function
    async def part(s: nw.State) -> object:
        s += "name: " + nw.gen("name")
        return await s.get("name")

    @nw.function
    async def whole(s: nw.State) -> object:
        s += "Card\n"
        return await part(s)

    state = whole.run(backend=nw.ScriptedBackend({"Card\nname: ": "Ada"}))
    assert (state.ret_value, state.text()) == ("Ada", "Card\nname: Ada")


def test_an_async_part_is_not_left_unawaited_by_a_def_program() -> None:
    @nw.function
    async def part(s: nw.State) -> None:
        s += "never"

    @nw.function
    def whole(s: nw.State) -> object:
        return part(s)

    with pytest.raises(
        nw.ProgramError, match=r"part\(state, ...\) is async; write await part\(...\) in an async program"
    ):
        whole.run(backend=nw.ScriptedBackend([]))


def test_forks_and_no_state_at_all_are_told_what_to_do() -> None:
    @nw.function
    def whole(s: nw.State) -> None:
        field(s.fork(2), "name")

    with pytest.raises(nw.ProgramError, match=r"forks go on one by one: for fork in forks: field\(fork, ...\)"):
        whole.run(backend=nw.ScriptedBackend([]))
    with pytest.raises(nw.ProgramError, match=r"a state is made by a run: .*, and call f.run\(\)"):
        nw.State()


def test_what_a_part_raises_is_the_whole_programs_error_and_names_its_line() -> None:
    @nw.function
    def card(s: nw.State) -> str:
        return field(s, "name")

    with pytest.raises(nw.GenerationError, match="broken") as caught:
        card.run(backend=nw.ScriptedBackend([nw.GenerationError("broken")]))
    assert caught.value.__notes__[0].startswith("in program card, test_typed_reads.py:")


def test_a_part_takes_arguments_and_no_options() -> None:
    state = made()
    with pytest.raises(nw.ProgramError, match=r"program field\(name: str, .*\): missing a required argument: 'name'"):
        field(state)  # type: ignore[call-arg]
    with pytest.raises(nw.ProgramError, match="goes on with the run of that state, and takes no options"):
        field(state, "x", temperature=0)  # type: ignore[call-arg]
    with pytest.raises(nw.ProgramError, match="goes on with the run of that state, and takes no options"):
        field.bind(timeout=1)(state, "x")
    assert state.text() == ""


def test_a_part_that_is_async_is_awaited_for_what_it_returns() -> None:
    @nw.function
    async def part(s: nw.State, i: int = 1) -> int:
        s += "x"
        return i + 1

    bound = part.bind(i=3)

    @nw.function
    async def whole(s: nw.State) -> tuple[int, int]:
        return assert_type(await part(s, 1), int), assert_type(await bound(s), int)

    state = whole.run(backend=nw.ScriptedBackend([]))
    assert assert_type(state.ret_value, tuple[int, int]) == (2, 4)
    assert state.text() == "xx"
    assert assert_type(part.run(backend=nw.ScriptedBackend([])).ret_value, int) == 2


def test_the_making_of_a_variable_has_types() -> None:
    @nw.function
    def f(s: nw.State) -> None:
        s += "Q: " + nw.gen("x", return_logprob=True) + nw.select("y", choices=["a", "b"])

    state = f.run(backend=nw.ScriptedBackend([" yes", "b"]))
    meta = state.get_meta_info("x")
    assert assert_type(meta["completion_tokens"], int) + 1 == 2
    assert assert_type(meta["complete"], bool) is True
    assert meta["finish_reason"]["type"] == "stop"
    assert [text for _, _, text in meta["output_token_logprobs"]] == [" yes"]
    assert sum(assert_type(state.get_meta_info("y")["probabilities"], list[float])) == pytest.approx(1)


# ---------------------------------------------------------------------------------------------------------------
# What a run is given: `mypy tests` runs with the plugin, and an ignore that nothing needs is an error there
# ---------------------------------------------------------------------------------------------------------------


@nw.function
def greet(s: nw.State, name: str, times: int = 1) -> str:
    s += f"Hello {name}. " * times
    return s.text()


@nw.function
async def greet_async(s: nw.State, name: str, *, stop: int) -> int:
    return assert_type(await greet_async(s, name, stop=stop - 1), int) if stop else 0


@nw.function
def many(s: nw.State, *names: str, **more: int) -> None:
    s += " ".join(names)


def never_run(rows: list[str], fields: dict[str, str]) -> None:
    greet.run("Ada", 2, temperature=0, backend=nw.ScriptedBackend([]), stop=["."])
    greet("Ada", max_tokens=3)
    greet.run(nam="Ada")  # type: ignore[call-arg]
    greet.run(3)  # type: ignore[arg-type]
    greet.run()  # type: ignore[call-arg]
    greet.run("Ada", temperature="hot")  # type: ignore[arg-type]
    greet.run("Ada", temprature=0)  # type: ignore[call-arg]
    greet.stream(3)  # type: ignore[arg-type]
    greet(3)  # type: ignore[arg-type]
    greet.compile().run(3)  # type: ignore[arg-type]
    greet_async.run("Ada", stop=3, timeout=1.5)
    greet_async.run("Ada", stop=".")  # type: ignore[arg-type]  # of that name it has a parameter
    greet_async.arun("Ada")  # type: ignore[call-arg,unused-coroutine]
    greet.bind(name="Ada").run(times=3)
    greet.bind(temperature=0).run()  # type: ignore[call-arg]
    assert_type(greet.bind(name="Ada").run().ret_value, str)
    many.run("Ada", "Bob", temperature=0, x=3)
    greet.run(*rows, **fields)  # nobody knows what is in them


def test_a_program_knows_its_parameters() -> None:
    assert greet.run("Ada", backend=nw.ScriptedBackend([])).ret_value == "Hello Ada. "


def test_the_types_of_a_runs_options_are_those_of_all_that_there_are() -> None:
    assert set(RunOptions.__annotations__) == RUN_NAMES | {"options", "max_tokens"}
