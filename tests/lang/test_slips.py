"""Slips that nothing told of: what was dropped, or went on as something else, is refused where it is written."""

from __future__ import annotations

import copy
import enum
import pickle
import re
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import pydantic
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


def test_what_is_no_text_is_told_how_its_text_comes_in() -> None:
    @nw.function
    def inner(s: nw.State) -> None:
        s += "inner"

    def appends_another_run(s: nw.State) -> None:
        s += inner.run()  # type: ignore[arg-type]  # the mistake

    def appends_what_a_part_returns(s: nw.State) -> None:
        s += inner(s)  # type: ignore[arg-type]  # the mistake

    def appends_a_program(s: nw.State) -> None:
        s += inner  # type: ignore[arg-type]  # the mistake

    def appends_forks(s: nw.State) -> None:
        s += s.fork(2)  # type: ignore[arg-type]  # the mistake

    for wrong, meant in (
        (appends_another_run, "it has a text of its own, state.text(); f(s) goes on with the text of s"),
        (
            appends_what_a_part_returns,
            "got None; a program that is called with the state, f(s, ...), appends by itself",
        ),
        (appends_a_program, "call it with the state, and it appends by itself: f(s, ...)"),
        (appends_forks, "forks.join() brings their variables home"),
    ):
        with pytest.raises(nw.ProgramError, match=re.escape(meant)):
            nw.function(wrong).run(backend=nw.ScriptedBackend([]))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (nw.gen("x"), "program f returns a gen that nothing has appended; write s \\+= ..., and return s\\['x'\\]"),
        (nw.select("x", ["a", "b"]), "returns a select that"),
        ("It is " + nw.gen("x"), "returns a text with gens that"),
    ],
)
def test_a_gen_that_a_body_returns_is_not_lost_without_a_word(returned: object, says: str) -> None:
    @nw.function
    def f(s: nw.State) -> object:
        return returned

    @nw.function
    async def g(s: nw.State) -> object:
        return returned

    with pytest.raises(nw.ProgramError, match=says):
        f.run(backend=nw.ScriptedBackend([]))
    with pytest.raises(nw.ProgramError, match=says.replace("program f", "program g")):
        g.run(backend=nw.ScriptedBackend([])).sync()


def test_a_field_is_no_default_of_a_parameter() -> None:
    def f(s: nw.State, k: int = pydantic.Field(default=2, ge=1)) -> int:
        return k

    def g(s: nw.State, k: Annotated[int, pydantic.Field(ge=1)] = 2) -> int:
        return k

    with pytest.raises(nw.ProgramError, match="default of parameter 'k' would be the Field itself; write k: Annotated"):
        nw.function(f)
    assert nw.function(g).run(backend=nw.ScriptedBackend([])).ret_value == 2


def test_a_group_of_forks_is_shown_as_what_it_is() -> None:
    @nw.function
    def f(s: nw.State) -> list[str]:
        return [repr(s.fork(3)), repr(s.fork(1))]

    assert f.run(backend=nw.ScriptedBackend([])).ret_value == ["<3 forks of f>", "<1 fork of f>"]


def test_a_whole_number_of_another_library_is_told_how_it_is_given() -> None:
    for option in ("seed", "max_tokens"):
        with pytest.raises(nw.RequestError, match=r"got np.int64\(5\); write int\(...\) around it"):
            nw.function(lambda s: None).run(backend=nw.ScriptedBackend([]), **{option: np.int64(5)})


def test_the_class_of_a_backend_is_none() -> None:
    with pytest.raises(nw.ConfigError, match=r"ScriptedBackend is a class and no backend; give an object of it"):
        forecast.run(backend=nw.ScriptedBackend)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    "text",
    [
        lambda: "Paris: %s." % nw.gen("x"),  # noqa: UP031  # the mistake
        lambda: "Paris: " + str(nw.gen("x", regex="a+")),
        lambda: f"Paris: {nw.select('x', choices=['a', 'b'])!s}",
        lambda: str("Paris: " + nw.gen("x")),
    ],
)
def test_a_node_that_was_made_text_of_is_refused_where_it_is_appended(text: Callable[[], str]) -> None:
    def plain(s: nw.State) -> None:
        s += text()

    def in_a_turn(s: nw.State) -> None:
        s += nw.user(text())

    def in_a_list(s: nw.State) -> None:
        s += ["a", text()]

    for body in (plain, in_a_turn, in_a_list):
        with pytest.raises(nw.ProgramError, match=r"^a (gen|select|chain) cannot stand inside a text, where only"):
            nw.function(body).run(backend=nw.ScriptedBackend(["x"])).sync()


def test_an_expression_is_printed_as_its_repr() -> None:
    node = nw.gen("x")
    assert str(node) == repr(node)


def test_a_fork_that_is_not_there_is_told_how_many_there_are() -> None:
    def body(s: nw.State) -> None:
        forks = s.fork(2)
        for index in (2, -3):
            with pytest.raises(nw.ProgramError, match=rf"^forks\[{index}\] is not there: 2 forks, from 0 on$"):
                forks[index]
        with pytest.raises(IndexError, match="1 fork, from 0 on"):
            s.fork(1)[5] += "x"

    nw.function(body).run(backend=nw.ScriptedBackend()).sync()


def test_a_program_of_a_module_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(forecast)) is forecast
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(forecast.bind())


def test_an_endpoint_is_pickled_as_it_was_asked_for() -> None:
    endpoint = nw.RuntimeEndpoint("https://niwaki.example:8443", api_key="secret", timeout=5)
    twin = pickle.loads(pickle.dumps(endpoint))
    assert repr(twin) == repr(endpoint)
    assert twin._asked == ("https://niwaki.example:8443", "secret", 5)
    session = pickle.loads(pickle.dumps(endpoint.session("sess_1")))
    assert (session.id, repr(session.endpoint)) == ("sess_1", repr(endpoint))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("127.0.0.1:30000", "did you mean 'http://127.0.0.1:30000'"),
        ("localhost", "did you mean 'http://localhost'"),
        ("https://niwaki.example/v1", "did you mean 'https://niwaki.example'"),
        ("http://127.0.0.1:port", "as in http://127"),
        ("http://[::1", "as in http://127"),
        ("ftp://127.0.0.1", "as in http://127"),
        ("", "as in http://127"),
        (30000, "as in http://127"),
    ],
)
def test_what_is_no_servers_address_is_told_what_one_is(url: str, says: str) -> None:
    with pytest.raises(nw.ConfigError, match=re.escape(f"{url!r} is no server's address") + f".*{re.escape(says)}"):
        nw.RuntimeEndpoint(url)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout": "5"}, "timeout must be a number of seconds above 0, got '5'"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0, got 0"),
        ({"api_key": b"key"}, "api_key must be a text of printable ASCII"),
        ({"api_key": "key\n"}, "without the line end of its file"),
        ({"api_key": "clé"}, "api_key must be a text of printable ASCII"),
    ],
)
def test_what_no_server_can_be_asked_with_is_refused_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(nw.ConfigError, match=says) as refused:
        nw.RuntimeEndpoint("http://127.0.0.1:30000", **options)
    assert "key\n" not in str(refused.value)


def test_a_title_is_for_a_new_session() -> None:
    with pytest.raises(nw.ProgramError, match="session 'sess_1' is there already; title= is for a new one"):
        nw.RuntimeEndpoint("http://127.0.0.1:9").session("sess_1", title="x")


@pytest.mark.parametrize("model", [5, b"model", ["model"]])
def test_a_model_is_the_path_of_a_folder(model: Any) -> None:
    with pytest.raises(nw.ConfigError, match="model must be the path of a folder, or None for the bundled one"):
        nw.Engine(model)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_tokens": "8GB"}, r"kv_tokens counts tokens.*got '8GB'; kv_memory takes bytes"),
        ({"kv_tokens": 0.5}, r"kv_tokens counts tokens.*got 0\.5; kv_memory takes"),
        ({"kv_memory": "8GB"}, r"got '8GB'; write 8 GiB as 8 \* 2\*\*30"),
    ],
)
def test_memory_is_not_tokens(options: dict[str, Any], says: str) -> None:
    with pytest.raises(nw.ConfigError, match=says):
        nw.Engine(**options)


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_is_not_sent_to_another_process(way: Callable[[object], object]) -> None:
    engine = object.__new__(nw.Engine)
    with pytest.raises(nw.ProgramError, match="make one in each process, or let them share a server"):
        way(engine)
