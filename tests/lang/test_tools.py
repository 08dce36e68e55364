"""Programs that call tools: typed calls, what the model hears, reasoning first, refusals with their place."""

from __future__ import annotations

import asyncio
import datetime
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Literal

import pydantic
import pytest

import niwaki as nw
from niwaki.lang.export import exported
from niwaki.lang.state import State
from niwaki.lang.tools import Call, ask_of, offers_of
from niwaki.runtime.api import Backend, JsonSchema, OffersTools, Reasoned, Regex, SamplingParams, ToolCalls
from niwaki.runtime.engine import Engine


class Trip(pydantic.BaseModel):
    start: str
    day: datetime.date


class Loose(pydantic.BaseModel, extra="allow"):
    start: str


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    The second one may be left out.
    """
    return a + b


async def book(trip: Trip, kind: Literal["train", "bus"]) -> str:
    """Book a trip"""
    return f"{kind} from {trip.start} on {trip.day:%d.%m.}"


PING = {"type": "function", "function": {"name": "ping", "description": "Say pong"}}
ADD = '<|call|>{"name":"add","arguments":{"a":12,"b":31}}<|/call|>'


def params(backend: nw.ScriptedBackend, index: int = -1) -> SamplingParams:
    found = backend.calls[index].params
    assert found is not None
    return found


@nw.function
def agent(s: State, asked: dict[str, object]) -> object:
    s += nw.system("Help.", tools=[add, book, PING])
    s += nw.user("What is 12 plus 31?")
    s += nw.assistant(nw.gen("x", tools=[add, book, PING], **asked))  # type: ignore[arg-type]  # gen's own options
    return s["x"]


def test_a_script_may_answer_with_calls_as_values() -> None:
    one, two = {"name": "add", "arguments": {"a": 12, "b": 31}}, {"name": "add", "arguments": {"a": 1}}
    call = agent.run({}, backend=nw.ScriptedBackend([one]))["x"]
    assert isinstance(call, Call)
    assert call.run() == 43
    both = agent.run({"parallel_tool_calls": True}, backend=nw.ScriptedBackend([[one, two]]))["x"]
    assert isinstance(both, list)
    assert [call.arguments for call in both] == [one["arguments"], two["arguments"]]
    other = {"name": "nobody", "arguments": {}}
    assert agent.run({}, backend=nw.ScriptedBackend([other]))["x"] == '{"name":"nobody","arguments":{}}'
    with pytest.raises(nw.ConstraintError, match="makes no call of the tools"):
        agent.run({"tool_choice": "required"}, backend=nw.ScriptedBackend([other]))


def test_calls_in_an_output_row_are_their_names_and_arguments() -> None:
    """As `niwaki run` and the server write what a program says."""
    one, two = {"name": "add", "arguments": {"a": 12, "b": 31}}, {"name": "add", "arguments": {"a": 1}}
    state = agent.run({}, backend=nw.ScriptedBackend([one]))
    assert exported(state) == {"value": one}

    @nw.function
    def unsaid(s: State) -> None:
        s["seen"] = {"calls": agent(s, {"parallel_tool_calls": True})}

    assert exported(unsaid.run(backend=nw.ScriptedBackend([[one, two]]))) == {
        "seen": {"calls": [one, two]},
        "x": [one, two],
    }
    told = agent.run({}, backend=nw.ScriptedBackend(["I add them. " + ADD]))
    assert exported(told) == {"value": one | {"content": "I add them. "}}


def test_what_has_no_json_is_named_in_an_output_row() -> None:
    @nw.function
    def odd(s: State) -> None:
        s["x"] = add

    with pytest.raises(ValueError, match="'x' has no JSON: Unable to serialize"):
        exported(odd.run(backend=nw.ScriptedBackend([])))


def test_a_call_is_a_value_that_runs_and_answers() -> None:
    backend = nw.ScriptedBackend([ADD, "It is 43."])

    @nw.function
    def f(s: State) -> object:
        s += nw.user("What is 12 plus 31?", tools=[add])
        s += nw.assistant(nw.gen("call", tools=[add]))
        call = s["call"]
        assert isinstance(call, Call)
        s += call.turn(call.run())
        s += nw.assistant(nw.gen("answer", tools=[add]))
        return s["answer"]

    state = f.run(backend=backend)
    assert state.ret_value == "It is 43."
    assert state["call"] == Call("add", {"a": 12, "b": 31})
    assert "add: Add two numbers." in state.text()
    assert state.text().count("Add two numbers") == 1
    assert state.messages()[2] == {"role": "tool", "content": "43"}


def test_arguments_come_as_the_types_that_the_function_declares() -> None:
    arguments = {"trip": {"start": "Porto", "day": "2026-11-21"}, "kind": "bus"}
    call = Call("book", arguments, function=book)
    result = call.run()
    assert asyncio.iscoroutine(result)
    assert asyncio.run(result) == "bus from Porto on 21.11."
    assert Call("add", {"a": 2}, function=add).run() == 3
    with pytest.raises(nw.ProgramError, match="'ping' was given as a schema"):
        Call("ping", {}).run()


def test_text_before_a_call_several_calls_and_no_call() -> None:
    two = ADD + '<|call|>{"name":"ping","arguments":{}}<|/call|>'
    spoken = agent.run({}, backend=nw.ScriptedBackend(["Hm. " + ADD])).ret_value
    assert spoken == Call("add", {"a": 12, "b": 31}, "Hm. ")
    assert agent.run({}, backend=nw.ScriptedBackend(["43, of course."])).ret_value == "43, of course."
    several = agent.run({"parallel_tool_calls": True}, backend=nw.ScriptedBackend([two])).ret_value
    assert several == [Call("add", {"a": 12, "b": 31}), Call("ping", {})]


def test_the_choice_of_tools_and_the_form_of_the_answer_are_one_constraint() -> None:
    def asked(**options: object) -> object:
        backend = nw.ScriptedBackend([ADD if options.get("tool_choice") in ("required", add) else "yes"])
        agent.run(options, backend=backend).sync()
        return params(backend).constraint

    auto, required, named = asked(), asked(tool_choice="required"), asked(tool_choice=add)
    assert isinstance(auto, ToolCalls)
    assert isinstance(required, ToolCalls)
    assert isinstance(named, ToolCalls)
    assert [tool.name for tool in auto.tools] == ["add", "book", "ping"]
    assert (auto.is_required, required.is_required, named.is_required) == (False, True, True)
    assert [tool.name for tool in named.tools] == ["add"]
    assert asked(tool_choice="none") is None
    both = asked(regex="yes|no")
    assert isinstance(both, ToolCalls)
    assert both.answer == Regex("yes|no")


def test_reasoning_comes_first_and_is_a_variable_of_its_own() -> None:
    @nw.function
    def f(s: State, separate_reasoning: bool) -> None:
        s += nw.user("Really?")
        s += nw.assistant(nw.gen("x", reasoning=9, max_new_tokens=40, separate_reasoning=separate_reasoning))

    backend = nw.ScriptedBackend(["<think>Well.</think>Yes."] * 2)
    state = f.run(True, backend=backend)
    assert (state["x"], state["x_reasoning_content"]) == ("Yes.", "Well.")
    assert params(backend).constraint == Reasoned("<think>", "</think>", 9, None)
    assert f.run(False, backend=backend)["x"] == "<think>Well.</think>Yes."

    @nw.function
    def g(s: State) -> None:
        s += nw.user("Really?")
        s += nw.assistant(nw.separate_reasoning(nw.gen("x", dtype=bool, max_new_tokens=40), model_type="any"))

    typed = nw.ScriptedBackend(["<think>Well.</think>true"])
    assert g.run(backend=typed)["x"] is True
    constraint = params(typed).constraint
    assert isinstance(constraint, Reasoned)
    assert constraint.max_tokens == 20


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([], "at least one"),
        ("add", "list of functions"),
        ([add, add], "two tools are named 'add'"),
        ([lambda x: x], "named Python function"),
        ([{"name": "my tool"}], r"letters \(a to z\), digits, _ and -, got 'my tool'"),
        ([{"name": "größe"}], "got 'größe'; rename it"),
        ([{"description": "no name"}], "dict with name"),
        ([Trip], "tool 'Trip' is a model, which nothing calls; give a function with a parameter of it"),
        ([{"name": "f", "parameters": {"x": {1}}}], "tool 'f' must hold JSON values"),
    ],
)
def test_what_is_no_tool_is_refused_where_it_is_written(tools: object, reason: str) -> None:
    with pytest.raises((nw.ProgramError, nw.ConstraintError), match=reason):
        nw.gen("x", tools=tools)  # type: ignore[arg-type]  # wrong on purpose


def test_a_parameter_that_cannot_be_told_is_named() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]  # wrong on purpose
        return x

    def starred(*x: int) -> None:
        pass

    def opaque(x: Engine) -> None:
        pass

    for function, reason in ((untyped, "'x' has no type"), (starred, "by name"), (opaque, "tool 'opaque'")):
        with pytest.raises(nw.ConstraintError, match=reason):
            offers_of([function])


def test_objects_among_a_functions_arguments_have_the_fields_of_their_types_alone() -> None:
    def call(trips: list[Trip], other: Loose, prices: dict[str, int]) -> None:
        pass

    (offered,) = offers_of([call])
    schema = json.loads(offered.tool.parameters)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Trip"]["additionalProperties"] is False
    assert schema["$defs"]["Loose"]["additionalProperties"] is True
    assert schema["properties"]["prices"]["additionalProperties"] == {"type": "integer"}


class Titled(pydantic.BaseModel):
    properties: Inner
    title: str = "none"


class Inner(pydantic.BaseModel):
    x: int


def test_fields_that_are_called_as_words_of_a_schema_are_fields() -> None:
    def call(properties: dict[str, int], titled: Titled = Titled(properties=Inner(x=1), title="a")) -> None:  # noqa: B008
        pass

    schema = json.loads(offers_of([call])[0].tool.parameters)
    assert schema["properties"]["properties"] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert schema["properties"]["titled"]["default"] == {"properties": {"x": 1}, "title": "a"}
    assert schema["$defs"]["Titled"]["properties"]["title"] == {"type": "string", "default": "none"}
    assert schema["$defs"]["Titled"]["properties"]["properties"] == {"$ref": "#/$defs/Inner"}


def test_options_that_exclude_each_other_are_refused() -> None:
    for options, reason in (
        ({"tool_choice": "add"}, "need tools"),
        ({"tools": [add], "parallel_tool_calls": "no"}, "parallel_tool_calls must be True or False, got 'no'"),
        ({"tools": [add], "tool_choice": "sub"}, r"one of \['add'\]"),
        ({"reasoning": 0}, "at least 1"),
        ({"tools": [add], "choices": ["a", "b"]}, "a select"),
    ):
        with pytest.raises(nw.ProgramError, match=reason):
            nw.gen("x", **options)
    assert ask_of(None, None, None, None, True) is None


def test_a_backend_without_tools_and_tools_told_late_are_refused() -> None:
    class Bare:
        """A backend's methods, less those of tools."""

        def __init__(self, inner: Backend) -> None:
            for name in ("info", "open", "fork", "close", "append", "generate", "score", "render", "usage"):
                setattr(self, name, getattr(inner, name))

    bare = Bare(nw.ScriptedBackend([ADD]))
    assert not isinstance(bare, OffersTools)
    with pytest.raises(nw.UnsupportedByBackend, match="of no tools"):
        agent.run({}, backend=bare)  # type: ignore[arg-type]

    @nw.function
    def late(s: State) -> None:
        s += nw.user("Hi")
        s += nw.assistant("Hi")
        s += nw.user("What now?", tools=[add])

    assert isinstance(late.run(backend=nw.ScriptedBackend()).error(), nw.ProgramError)


def test_a_call_that_breaks_off_names_the_budget() -> None:
    backend = nw.ScriptedBackend([ADD])
    with pytest.raises(nw.GenerationError, match="larger max_tokens"):
        agent.run({"max_new_tokens": 8}, backend=backend)


def test_a_regex_may_be_several_and_a_text_may_stop_at_one() -> None:
    backend = nw.ScriptedBackend(["abc"])

    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", regex=["[a-z]+", ".{1,4}"], stop_regex="c")

    @nw.function
    def compiled(s: State) -> None:
        s += nw.gen("x", stop_regex=re.compile("C", re.IGNORECASE))

    f.run(backend=backend).sync()
    asked = params(backend)
    assert asked.stop_regex == "c"
    backend = nw.ScriptedBackend(["abc"])
    compiled.run(backend=backend).sync()
    assert params(backend).stop_regex == "(?i)C"

    @nw.function
    def plain(s: State) -> None:
        s += nw.gen("x")

    backend = nw.ScriptedBackend(["abc"])
    plain.run(backend=backend, stop_regex=re.compile("c")).sync()
    assert params(backend).stop_regex == "c"
    assert "AllOf" in repr(asked.constraint)


@pytest.mark.parametrize("pattern", ["(", re.compile("a", re.VERBOSE)])
def test_a_stop_regex_is_refused_where_it_is_written(pattern: str | re.Pattern[str]) -> None:
    reason = r"stop_regex '\(' is not valid at 1" if pattern == "(" else "has a flag that cannot be enforced"
    with pytest.raises(nw.ConstraintError, match=reason):
        nw.gen("x", stop_regex=pattern)

    @nw.function
    def plain(s: State) -> None:
        s += nw.gen("x")

    with pytest.raises(nw.ConstraintError, match=reason):
        plain.run(backend=nw.ScriptedBackend(["abc"]), stop_regex=pattern)


def get_weather(city: str) -> str:
    """Current weather"""
    return "rain"


def test_a_list_of_functions_that_differ_may_have_a_name() -> None:
    """Of which mypy holds that it is no list of Callables; `mypy tests` looks at the calls."""
    several = [get_weather, add]
    assert nw.system("You can call tools.", tools=several) is not None
    assert nw.gen("x", tools=several) is not None
    for wrong in ("rain", 3):
        with pytest.raises(nw.ConstraintError, match=f"named Python function or a dict with its schema, got {wrong!r}"):
            nw.gen("x", tools=[get_weather, wrong])


def test_the_bundled_model_calls_what_it_was_offered(bundled_engine: Engine) -> None:
    @nw.function
    def f(s: State, question: str) -> object:
        s += nw.user(question, tools=[add, PING])
        s += nw.assistant(nw.gen("x", tools=[add, PING], max_new_tokens=64))
        s += nw.user("And a line of text?")
        s += nw.assistant(nw.gen("y", regex=["[a-z ]+", "(?!.*the).{1,12}"], reasoning=4, max_new_tokens=40))
        return s["x"]

    state = f.run("What is 12 plus 31?", temperature=0, backend=bundled_engine)
    assert state.ret_value == Call("add", {"a": 12, "b": 31})
    text = str(state["y"])
    assert 1 <= len(text) <= 12
    assert "the" not in text
    ids = bundled_engine.tokenizer.special_ids
    assert list(state.token_ids).count(ids["<|call|>"]) == 1


def test_the_example_calls_its_functions(bundled_engine: Engine) -> None:
    path = Path(__file__).parent.parent.parent / "examples" / "tools.py"
    spec = importlib.util.spec_from_file_location("example_tools", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    state = example.agent.run(question="How much is the lamp?", temperature=0, backend=bundled_engine)
    assert state["step0"] == Call("get_price", {"product": "lamp"})
    assert "40" in state.ret_value


def test_a_number_beside_tools_is_ended_by_its_schema_and_not_by_a_stop() -> None:
    backend = nw.ScriptedBackend([ADD, "43"])

    @nw.function
    def f(s: State, name: str) -> object:
        s += nw.gen(name, dtype=int, tools=[add])
        return s[name]

    assert f.run("x", backend=backend).ret_value == Call("add", {"a": 12, "b": 31})
    asked = params(backend)
    assert asked.stop == ()
    assert isinstance(asked.constraint, ToolCalls)
    assert isinstance(asked.constraint.answer, JsonSchema)
    assert f.run("y", backend=backend).ret_value == 43
