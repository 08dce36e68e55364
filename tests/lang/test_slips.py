"""Slips that nothing told of: what was dropped, or went on as something else, is refused where it is written."""

from __future__ import annotations

import enum
from collections.abc import Callable

import pytest

import niwaki as nw


class Mood(enum.Enum):
    GOOD = "good"


def weather(city: str, days: int = 1) -> str:
    """The weather of a city"""
    return f"{city}: rain for {days}"


@nw.function
def forecast(s: nw.State) -> None:
    s += nw.user("Porto?") + nw.assistant(nw.gen("step", tools=[weather]))


def test_an_attribute_of_a_state_is_no_variable() -> None:
    def body(s: nw.State) -> None:
        s.answer = 5  # type: ignore[attr-defined]  # the mistake

    def hides_a_method(s: nw.State) -> None:
        s.text = "Hello"  # type: ignore[method-assign,assignment]  # the mistake

    for wrong, name in ((body, "answer"), (hides_a_method, "text")):
        with pytest.raises(AttributeError, match=f"a variable is set by s\\['{name}'\\] = "):
            nw.function(wrong).run(backend=nw.ScriptedBackend([])).sync()


def test_the_class_of_a_backend_is_none() -> None:
    with pytest.raises(nw.ConfigError, match=r"ScriptedBackend is a class and no backend; give an object of it"):
        forecast.run(backend=nw.ScriptedBackend)


def test_a_classmethod_gets_no_state_and_says_so() -> None:
    with pytest.raises(nw.ProgramError, match=r"make a program of the bound method: function\(cls.ask\)"):

        class Asker:
            @classmethod
            @nw.function
            def ask(cls, s: nw.State) -> None: ...


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        (Mood, "write gen\\('x', dtype=Mood\\)"),
        ((word for word in ("a", "b")), "make a list of it"),
        ({"a", "b"}, "make a list of it"),
        ([1, 2], "values of other types: gen\\(dtype=Literal"),
        ([Mood.GOOD], "or an Enum\\)"),
    ],
)
def test_choices_that_are_no_list_of_texts_say_how_they_are_written(choices: object, says: str) -> None:
    make: Callable[..., object] = nw.select
    with pytest.raises(nw.ProgramError, match=says):
        make("x", choices=choices)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"name": "weather", "arguments": {"town": "Porto"}}, "the scripted call of 'weather' lacks 'city'"),
        ({"name": "weather", "arguments": {"city": "Porto", "unit": "c"}}, "has 'unit', which is no parameter"),
    ],
)
def test_a_scripted_call_that_no_model_could_make_is_refused(call: object, says: str) -> None:
    with pytest.raises(nw.ConstraintError, match=says):
        forecast.run(backend=nw.ScriptedBackend([call])).sync()


def test_a_scripted_call_may_leave_out_what_has_a_default() -> None:
    state = forecast.run(backend=nw.ScriptedBackend([{"name": "weather", "arguments": {"city": "Porto"}}]))
    assert state["step"].run() == "Porto: rain for 1"  # type: ignore[attr-defined]  # a Call
