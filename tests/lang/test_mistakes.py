"""Mistakes that people make: each is told in words that name the way out, and none passes in silence."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any, cast

import pydantic
import pytest

import niwaki as nw
from niwaki.lang.state import State


@nw.function
def greet(s: State, name: str) -> None:
    s += f"Hello {name}: " + nw.gen("answer")


class Person(pydantic.BaseModel):
    name: str
    age: int


def refused(body: Callable[[State], object], message: str) -> None:
    with pytest.raises(nw.ProgramError, match=message):
        nw.function(body).run(backend=nw.ScriptedBackend(["x"] * 9)).sync()


def test_a_program_is_shown_as_it_was_written_where_types_are_texts() -> None:
    with pytest.raises(nw.ProgramError, match=re.escape("program greet(name: str) has no parameter 'nam'")):
        greet.run(nam="Ada")  # type: ignore[call-arg]


# -- adding up ---------------------------------------------------------------------------------------------------------


def test_a_state_is_appended_to_and_never_added_to_something() -> None:
    def text_behind(s: State) -> None:
        s = s + "text"

    def gen_behind(s: State) -> None:
        s + nw.gen("x")

    def text_before(s: State) -> None:
        "text" + s

    for body in (text_behind, gen_behind, text_before):
        refused(body, re.escape("write state += ..."))


def test_a_gen_is_not_set_as_a_variable() -> None:
    def body(s: State) -> None:
        s["x"] = nw.gen("x")

    refused(body, re.escape("append it, which sets its variable: s += gen('x')"))


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        ((text for text in "ab"), "make a list of it"),
        (nw.gen, "call it: gen(...)"),
        ({"role": "user", "content": "hello"}, "write a turn as system(...), user(...) or assistant(...)"),
    ],
)
def test_what_cannot_be_appended_is_told_how_it_could_be(content: object, remedy: str) -> None:
    with pytest.raises(nw.ProgramError, match=re.escape(remedy)):
        nw.assistant(cast("str", content))


@pytest.mark.parametrize("turn", [nw.system, nw.user, nw.assistant])
def test_a_turn_of_a_text_that_is_missing_is_no_empty_turn(turn: Callable[..., object]) -> None:
    with pytest.raises(nw.ProgramError, match="got None"):
        turn({"text": None}["text"])


@pytest.mark.parametrize("turn", ["system", "user", "assistant"])
def test_a_missing_text_of_a_states_own_turn_is_no_open_turn(turn: str) -> None:
    refused(lambda s: getattr(s, turn)({"text": None}["text"]), "got None")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("gen", "write s += nw.gen(...)"), ("select", "write s += nw.select(...)"), ("append", "write s += ...")]
    + [("answer", "a variable is s['answer'], and += appends")],
)
def test_what_is_no_attribute_of_a_state_is_told_how_it_is_written(name: str, remedy: str) -> None:
    state = greet.run("Ada", backend=nw.ScriptedBackend(lambda prompt: "hello"))
    with pytest.raises(AttributeError, match=re.escape(remedy)):
        getattr(state, name)
    assert not hasattr(state, name)


@pytest.mark.parametrize("name", ["ret_value", "token_ids", "usage"])
def test_a_bodys_own_missing_attribute_is_told_as_itself(name: str) -> None:
    @nw.function
    def f(s: State) -> object:
        s += "Why? "
        return "a text".no_such_method  # type: ignore[attr-defined]  # the mistake

    state = f.stream(backend=nw.ScriptedBackend(lambda prompt: "hello"))
    with pytest.raises(AttributeError, match="'str' object has no attribute 'no_such_method'"):
        getattr(state, name)


def test_what_stands_in_anothers_place_is_told_where_it_goes() -> None:
    with pytest.raises(nw.ProgramError, match="a type is given as dtype=int"):
        nw.gen("x", cast("int", int))
    with pytest.raises(nw.ProgramError, match=re.escape("choices come behind it: select('name', [...])")):
        nw.select(cast("str", ["a", "b"]))


# -- programs and their arguments --------------------------------------------------------------------------------------


def test_a_forgotten_state_is_named() -> None:
    @nw.function
    def ask(question: State) -> None:
        question += "hello"

    with pytest.raises(nw.ProgramError, match=re.escape("the first parameter, 'question', is the state: def ask(s, ")):
        ask.run(question="Why?")  # type: ignore[call-arg]


def test_a_state_that_is_passed_to_a_program_is_one_too_many() -> None:
    def body(s: State) -> None:
        greet.run(s, "Ada")

    refused(body, re.escape("; a run makes a state of its own, and greet(state, ...) goes on with one"))


def test_a_method_is_no_program_but_a_bound_one_is() -> None:
    class Agent:
        def ask(self, s: State, name: str) -> None:
            s += f"Hello {name}: " + nw.gen("answer")

    with pytest.raises(nw.ProgramError, match=re.escape("the first parameter is the state, not an object")):
        nw.function(Agent.ask)
    assert nw.function(Agent().ask).run("Ada", backend=nw.ScriptedBackend(["hi"]))["answer"] == "hi"


def test_a_row_that_is_a_text_is_told_how_to_be_one() -> None:
    (failed,) = greet.run_batch(cast("list[tuple[object]]", ["Ada"]), backend=nw.ScriptedBackend([]))
    assert "write ('Ada',)" in str(failed)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "takes a list of rows, got a NoneType; each is a mapping of arguments or a tuple"),
        ("Ada", "takes a list of rows, got a str"),
        (5, "got a int"),
        ({"name": "Ada"}, "got a dict; write [{'name': 'Ada'}]"),
        (type("DataFrame", (list,), {"iterrows": list})(), "write rows.to_dict('records')"),
    ],
)
@pytest.mark.parametrize("batch", ["run_batch", "arun_batch"])
def test_what_is_no_list_of_rows_is_refused_before_any_runs(batch: str, rows: object, message: str) -> None:
    with pytest.raises(nw.ProgramError, match=re.escape(message)):
        getattr(greet, batch)(rows, backend=nw.ScriptedBackend([]))


class Table(list[dict[str, str]]):
    """Has its columns as a dict, and iterates over its rows, as a dataset of Hugging Face does."""

    def to_dict(self) -> dict[str, list[str]]:
        return {name: [row[name] for row in self] for name in self[0]}


def test_what_iterates_over_rows_is_a_list_of_rows_whatever_else_it_can() -> None:
    (state,) = greet.run_batch(Table([{"name": "Ada"}]), backend=nw.ScriptedBackend(["hi"]))
    assert isinstance(state, State)
    assert state["answer"] == "hi"


def test_the_decorator_may_have_parentheses_and_takes_no_options() -> None:
    @nw.function()
    def hello(s: State) -> None:
        s += "Hello " + nw.gen("x")

    assert hello.run(backend=nw.ScriptedBackend(["you"]))["x"] == "you"
    with pytest.raises(nw.ProgramError, match=re.escape("give temperature=0 to run(), or to bind() for all runs")):
        cast("Any", nw.function)(temperature=0)


@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [
        (re.compile("[ab]+"), "ab", "AB"),
        (re.compile("[ab]+", re.IGNORECASE), "aB", "c"),
        (re.compile("a.", re.DOTALL), "a\n", "b\n"),
        (re.compile("(?i)a"), "A", "b"),
    ],
)
def test_a_compiled_regex_is_taken_with_its_flags(pattern: re.Pattern[str], text: str, other: str) -> None:
    def body(s: State) -> None:
        s += "Go: " + nw.gen("x", regex=pattern)

    assert nw.function(body).run(backend=nw.ScriptedBackend([text]))["x"] == text
    with pytest.raises(nw.ConstraintError, match="does not match the regex"):
        nw.function(body).run(backend=nw.ScriptedBackend([other])).sync()


@pytest.mark.parametrize("pattern", [re.compile("a b", re.VERBOSE), re.compile("a", re.ASCII), re.compile(b"a")])
def test_a_compiled_regex_that_cannot_be_enforced_is_refused(pattern: re.Pattern[str]) -> None:
    with pytest.raises(nw.ConstraintError, match=r"re\.compile"):
        nw.gen("x", regex=pattern)


@pytest.mark.parametrize("stop", [5, (stop for stop in "ab")])
def test_a_stop_that_is_no_list_is_refused(stop: object) -> None:
    with pytest.raises(nw.RequestError, match="stop must be a text or a list of texts, got"):
        nw.gen("x", stop=cast("str", stop))


@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("http://localhost:30000", "use RuntimeEndpoint('http://localhost:30000')"),
        ("my/model", "use Engine('my/model') for a model's folder, or OpenAI('my/model') for a service's model"),
    ],
)
def test_a_text_for_a_backend_is_told_what_to_make_of_it(host: str, remedy: str) -> None:
    with pytest.raises(nw.ConfigError, match=re.escape(remedy)):
        greet.run("Ada", backend=host)  # type: ignore[arg-type]


def test_a_servers_address_with_a_path_is_told_so() -> None:
    with pytest.raises(nw.ConfigError, match="has no path"):
        nw.RuntimeEndpoint("http://127.0.0.1:30000/v1")


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_variable_that_is_unknown_is_told_beside_those_that_are_to_come() -> None:
    def body(s: State) -> object:
        s += "a" + nw.gen("first")
        return s["frist"]

    slow = nw.ScriptedBackend(["x"], threads=1, delay=0.2)
    with pytest.raises(nw.UnknownVariable, match="it has: 'first'"):
        nw.function(body).run(backend=slow)
    slow.shutdown()


def test_a_variable_of_forks_that_were_not_joined_is_told_so() -> None:
    def body(s: State) -> object:
        forks = s.fork(2)
        forks += nw.gen("view")
        return s["view"]

    refused(body, re.escape("its forks set it: join() them first"))


def test_a_variable_of_all_forks_is_told_how_to_read_it() -> None:
    def body(s: State) -> object:
        forks = s.fork(2)
        forks += nw.gen("view")
        return cast("Any", forks)["view"]

    refused(body, re.escape("forks[0]['view'] is the first one's variable, and after forks.join() s['view'] the list"))


@pytest.mark.parametrize(
    ("read", "remedy"), [(lambda s: s.get("x"), 'write s["x"]'), (lambda s: s.wait(), "write s.sync()")]
)
def test_what_is_awaited_is_refused_where_nobody_can_await_it(read: Callable[[State], object], remedy: str) -> None:
    def body(s: State) -> object:
        s += nw.gen("x")
        return read(s)

    refused(body, re.escape(f"no event loop runs here to await it; {remedy}"))


@pytest.mark.parametrize(
    ("text_of", "remedy"),
    [
        (lambda value: f"and {value}", "s.get('x') is still to come; write (await s.get('x'))"),
        (lambda value: "and " + value, "s.get('x') is still to come; write (await s.get('x'))"),
        (lambda value: "and " + str(value), "s.get('x') is still to come; write (await s.get('x'))"),
        (lambda value: value + "!", "s.get('x') is still to come; write (await s.get('x'))"),
    ],
)
def test_a_forgotten_await_never_becomes_text(text_of: Callable[[object], str], remedy: str) -> None:
    async def body(s: State) -> None:
        s += nw.gen("x")
        s += text_of(s.get("x"))

    refused(body, re.escape(remedy))


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value == "yes",
        lambda value: value != "yes",
        lambda value: value in ("yes", "no"),
        lambda value: "yes" if value else "no",
        lambda value: not value,
        lambda value: value["city"],
        lambda value: "y" in value,
        len,
        list,
    ],
)
def test_a_forgotten_await_is_never_compared_or_looked_into(use: Callable[[object], object]) -> None:
    async def body(s: State) -> None:
        s += nw.gen("x")
        use(s.get("x"))

    refused(body, re.escape("s.get('x') is still to come; write (await s.get('x'))"))


def test_a_value_to_come_has_no_attributes_yet_and_can_still_be_awaited() -> None:
    async def main() -> object:
        value: Any = greet.stream("Ada", backend=nw.ScriptedBackend(["hi"])).get("answer")
        with pytest.raises(AttributeError, match=re.escape("write (await s.get('answer')).upper")):
            value.upper()
        other = greet.stream("Ada", backend=nw.ScriptedBackend(["hi"])).get("answer")
        assert len({value, other, value}) == 2
        return await asyncio.gather(value, other, value)

    assert asyncio.run(main(), debug=True) == ["hi", "hi", "hi"]


def test_what_is_to_be_awaited_is_no_content() -> None:
    async def body(s: State) -> None:
        s += nw.gen("x")
        with contextlib.closing(s.get("x")) as value:  # else Python warns that nobody awaited it
            s += value  # type: ignore[arg-type]  # the mistake

    refused(body, re.escape("got <s.get('x'), still to come>; await it first"))


def test_what_is_awaited_may_be_a_task_wait_with_others_and_be_cancelled() -> None:
    async def main() -> tuple[object, ...]:
        state = greet.stream("Ada", backend=nw.ScriptedBackend(["hi"]))
        together = await asyncio.gather(state.get("answer"), state.get("answer"))
        given_up = asyncio.create_task(state.get("nothing"))
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return await asyncio.create_task(state.get("answer")), *together

    assert asyncio.run(main()) == ("hi",) * 3


def test_what_another_task_awaits_goes_on_where_it_was_to_become_text() -> None:
    async def main() -> object:
        state = greet.stream("Ada", backend=nw.ScriptedBackend(lambda prompt: "hi" if held.wait(60) else "", threads=1))
        value = state.get("answer")
        task = asyncio.create_task(value)
        await asyncio.sleep(0)  # it waits inside
        with pytest.raises(nw.ProgramError, match="still to come"):
            str(value)
        held.set()
        return await asyncio.wait_for(task, 60)

    held = threading.Event()
    assert asyncio.run(main()) == "hi"


def test_a_state_of_a_plain_program_is_awaited_where_an_event_loop_runs() -> None:
    async def main() -> object:
        state = await greet.arun("Ada", backend=nw.ScriptedBackend(["hi"]))
        await state.wait()
        return await state.get("answer")

    assert asyncio.run(main()) == "hi"


def test_a_state_is_not_pickled_and_not_copied() -> None:
    state = greet.run("Ada", backend=nw.ScriptedBackend(["hi"]))
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(nw.ProgramError, match=re.escape("take its text() and variables")):
            way(state)
