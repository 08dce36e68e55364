"""A trace shows what a program will do, runs nothing that has an effect, and says where it has to end."""

from __future__ import annotations

import enum
import functools
import json
import logging
from collections.abc import Callable
from typing import Annotated, Literal

import pytest

import niwaki as nw
from niwaki.lang.effects import check_free_of_effects
from niwaki.lang.program import Program
from niwaki.lang.state import State
from niwaki.lang.trace import Placeholder
from niwaki.runtime.api import Choices, ProgramError
from niwaki.runtime.engine import Engine

LABELS = ["good", "bad"]
INTRO = "Reviews are good or bad.\n"
log: list[str] = []
logger = logging.getLogger(__name__)


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Client:
    def get(self, question: str) -> str:
        log.append(question)
        return question


class Loud(str):
    __slots__ = ()

    def __init__(self, text: str) -> None:
        log.append(text)


client = Client()
Aliased = Annotated[Client, "x"]
Scores = list[int]


def quoted(text: str) -> str:
    return f"> {text}\n"


def noted(text: str) -> str:
    log.append(text)
    return text


def logged(func: Callable[[str], str]) -> Callable[[str], str]:
    @functools.wraps(func)
    def wrapper(text: str) -> str:
        log.append(text)
        return func(text)

    return wrapper


@logged
def wrapped(text: str) -> str:
    return text


@nw.function
def compare(s: State, reviews: list[str], topic: str) -> None:
    s += INTRO + f"The topic is {topic}. "
    forks = s.fork(len(reviews))
    forks += lambda i: quoted(reviews[i])
    forks += nw.select("label", choices=LABELS)
    forks.join()
    s += nw.user("Sum up.") + nw.assistant(nw.gen("summary", dtype=Mood))


def test_a_trace_shows_texts_calls_forks_and_what_all_runs_share() -> None:
    traced = compare.trace(["I liked it.", "Cold."])
    assert str(traced).splitlines() == [
        "compare(reviews: list[str], topic: str)",
        "├ 'Reviews are good or bad.\\nThe topic is {topic}. '",
        "├ fork into 2, on one shared prefix",
        "│ ├ 0",
        "│ │ ├ '> I liked it.\\n'",
        "│ │ ├ select label of 2",
        "│ ├ 1",
        "│ │ ├ '> Cold.\\n'",
        "│ │ ├ select label of 2",
        "├ join",
        "├ user: 'Sum up.'",
        "├ assistant: gen summary: Mood",
        "shared by all runs: 'Reviews are good or bad.\\nThe topic is '",
    ]
    assert traced.stopped is None
    assert repr(traced) == str(traced)


@nw.function
def asks(s: State, question: str) -> None:
    s += f"{question} " + nw.gen("answer", stop="\n")


def test_parts_are_traced() -> None:
    @nw.function
    def f(s: State, topic: str) -> None:
        s += "On trees. "
        asks(s, "Why?")
        forks = s.fork(2)
        for fork in forks:
            asks(fork, topic)
        forks.join()

    traced = f.trace("x")
    assert traced.shared == "On trees. Why? "
    assert str(traced).splitlines()[1:4] == ["├ 'On trees. '", "├ 'Why? '", "├ gen answer"]


def test_each_function_that_a_factory_made_is_looked_at() -> None:
    """They have one code, and name different things."""

    def made(said: Callable[[], str]) -> Program[None]:
        @nw.function
        def part(s: State) -> None:
            s += said()

        return part

    def quiet() -> str:
        return "a"

    def loud() -> str:
        log.append("said")
        return "b"

    quiet_part, loud_part = made(quiet), made(loud)

    @nw.function
    def f(s: State) -> None:
        quiet_part(s)
        quiet_part(s)
        loud_part(s)

    before = len(log)
    with pytest.raises(ProgramError, match="it may change log"):
        f.trace()
    assert len(log) == before


def test_branches_that_are_alike_are_drawn_once() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(50)
        forks += nw.gen("x")

    lines = str(f.trace()).splitlines()
    assert lines[1:-1] == ["├ fork into 50, on one shared prefix", "│ ├ 0 to 49", "│ │ ├ gen x"]


def test_a_trace_ends_where_the_program_reads_a_value() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "Q: " + nw.gen("answer")
        if s["answer"] == "yes":
            s += "never traced"

    traced = f.trace()
    assert traced.stopped is not None
    assert traced.stopped.startswith("the value of 'answer' (test_trace.py:")
    assert "never traced" not in str(traced)
    assert "└ from here on it depends on the value of 'answer'" in str(traced)


@pytest.mark.parametrize(
    "use",
    [
        lambda s, text: len(text),
        lambda s, text: text == "a",
        lambda s, text: text.strip(),
        lambda s, text: [c for c in text],  # noqa: C416  # iteration is what is tried
        lambda s, text: "a" in text,
        lambda s, text: {text: 1},
        lambda s, text: range(text),
        lambda s, text: "b" if text else "c",
        lambda s, text: f"{text:>9}",
        lambda s, text: s.fork(text),
        lambda s, text: text.field.lower(),
        lambda s, text: s.text(),
    ],
)
def test_a_value_that_only_a_run_has_ends_the_trace(use: Callable[[State, str], object]) -> None:
    from niwaki.lang.run import Run
    from niwaki.lang.trace import _Budget, _Stop, _Tracer
    from niwaki.runtime.api import SamplingOptions

    state = State(_Tracer(Run("f", SamplingOptions()), _Budget(10)))  # type: ignore[arg-type]  # as trace() does
    with pytest.raises((_Stop, nw.ProgramError)) as caught:
        use(state, Placeholder("text"))
    assert isinstance(caught.value, _Stop) or "\ue002text\ue003" in str(caught.value)


def test_placeholders_may_be_written_in_every_way() -> None:
    @nw.function
    def f(s: State, person: dict[str, str], text: str) -> None:
        s += text
        s += "a" + text + f"{text}" + "%s" % text + " ".join(["x", text]) + str(text) + text["name"]  # type: ignore[index]  # noqa: UP031
        s += nw.user(text) + [person["name"], text]

    traced = f.trace()
    assert traced.stopped is None
    assert "├ '{text}'" in str(traced)
    assert "'a{text}{text}{text}x {text}{text}{text['name']}'" in str(traced).replace('"', "'")
    assert "{person['name']}" in str(traced)
    assert traced.shared == ""


def refused(body: Callable[..., object], *args: object) -> str:
    before = list(log)
    with pytest.raises(nw.ProgramError, match=r"was not traced|cannot be traced") as caught:
        nw.function(body).trace(*args)
    assert log == before, "it ran"
    return str(caught.value)


def calls_a_method(s: State) -> None:
    s += client.get("x")


def calls_a_helper_with_effects(s: State) -> None:
    s += noted("x")


def changes_a_global(s: State) -> None:
    log.append("x")


def stores_into_a_global(s: State) -> None:
    LABELS[0] = "x"


def opens_a_file(s: State) -> None:
    s += open("/dev/null").read()  # noqa: SIM115  # it must not be opened at all


def prints(s: State) -> None:
    print("x")


def writes_a_global(s: State) -> None:
    global INTRO
    INTRO = "x"


def imports(s: State) -> None:
    import os

    s += os.getcwd()


def logs(s: State) -> None:
    logger.info("x")


def makes_an_object(s: State) -> None:
    s += Client().get("x")


def hides_in_a_lambda(s: State) -> None:
    forks = s.fork(2)
    forks += lambda i: client.get("x")


def renames(s: State) -> None:
    tell = print
    tell("x")


def reaches_inside(s: State) -> None:
    s._executor.cancel()


def runs_another(s: State) -> None:
    s += compare.run([], "x").text()


def uses_the_backend(s: State) -> None:
    nw.set_default_backend(None)


def writes_a_file(s: State) -> None:
    json.__loader__.set_data("x", b"")  # type: ignore[union-attr]


def calls_what_it_names_as_a_type(s: State) -> None:
    s += Aliased().get("x")


def calls_a_function_that_is_wrapped(s: State) -> None:
    s += wrapped("x")


def makes_objects_of_all(s: State) -> None:
    s += str(list(map(Loud, ["x"])))


async def awaits(s: State) -> None:
    s += "x"


@pytest.mark.parametrize(
    "body",
    [
        calls_a_method, calls_a_helper_with_effects, changes_a_global, stores_into_a_global, opens_a_file, prints,
        writes_a_global, imports, logs, makes_an_object, hides_in_a_lambda, renames, reaches_inside, runs_another,
        uses_the_backend, writes_a_file, calls_what_it_names_as_a_type,
        calls_a_function_that_is_wrapped, makes_objects_of_all, awaits,
    ],
)  # fmt: skip
def test_a_body_that_may_have_effects_is_refused_and_not_run(body: Callable[..., object]) -> None:
    refused(body)


def test_a_refusal_names_the_line() -> None:
    assert "it uses client, a Client from outside (test_trace.py:" in refused(calls_a_method)
    assert 's += client.get("x")' in refused(calls_a_method)


def test_an_argument_with_methods_of_its_own_is_refused() -> None:
    def body(s: State, client: Client) -> None:
        s += client.get("x")

    assert "leave that argument out" in refused(body, client)
    assert nw.function(body).trace().stopped is not None


def test_a_body_may_name_the_errors_and_constraints_of_niwaki() -> None:
    def body(s: State) -> None:
        s += nw.gen("first", max_tokens=4)
        if s["first"] == "bad":
            raise ProgramError("bad")
        s += f"not {Choices(('a', 'b')).choices[0]}"

    check_free_of_effects(body, "body")


def test_arguments_are_copied_so_that_the_callers_stay_as_they_are() -> None:
    @nw.function
    def f(s: State, rows: list[str]) -> None:
        rows.append("new")
        s += rows[-1]

    rows = ["old"]
    assert "'new'" in str(f.trace(rows))
    assert rows == ["old"]


def test_a_loop_without_an_end_ends() -> None:
    @nw.function
    def f(s: State) -> None:
        while True:
            s += "again"

    traced = f.trace()
    assert traced.stopped is not None
    assert "without an end" in traced.stopped


def test_a_traced_program_runs_as_before() -> None:
    compare.trace()
    backend = nw.ScriptedBackend(lambda prompt: "good")
    assert compare.run(["a", "b"], "c", backend=backend)["label"] == ["good", "good"]


@nw.function
def passage(s: State, question: str) -> None:
    s += nw.system("You answer from the passage. " * 8)
    s += nw.user("Read it again.\n" + question)
    s += nw.assistant(nw.gen("answer", max_tokens=2))


def test_what_all_runs_begin_with_is_computed_before_any_of_them(bundled_engine: Engine) -> None:
    bundled_engine.flush_cache()
    beginning = passage.cache(backend=bundled_engine)
    assert beginning.text().endswith("Read it again.\n")
    assert (beginning.usage.generated_tokens, beginning.usage.cached_tokens) == (0, 0)
    state = passage.run("Who?", backend=bundled_engine)
    assert state["answer"] is not None
    assert state.usage.cached_tokens == beginning.usage.prompt_tokens == len(beginning.token_ids) > 60
    known = passage.cache("Who?", backend=bundled_engine)
    assert known.text() + str(state["answer"]) in state.text(), "up to the call, its turn's beginning included"


def test_where_nothing_is_shared_nothing_is_asked() -> None:
    @nw.function
    def bare(s: State, question: str) -> None:
        s += question + nw.gen("answer")

    backend = nw.ScriptedBackend(["an answer"])
    assert bare.cache(backend=backend).text() == ""
    assert backend.calls == []
    assert passage.cache(backend=backend).usage.prompt_tokens > 20
    assert passage.run("Who?", backend=backend)["answer"] == "an answer", "the script's first one is still there"


def test_a_body_with_effects_has_no_beginning_that_could_be_found() -> None:
    @nw.function
    def noting(s: State) -> None:
        s += "Q: "
        log.append("x")
        s += nw.gen("answer")

    with pytest.raises(nw.ProgramError, match="trace"):
        noting.cache(backend=nw.ScriptedBackend([]))


def test_the_types_of_its_variables_are_those_of_a_run() -> None:
    @nw.function
    def f(s: State, text: str) -> None:
        s += nw.user(text) + nw.assistant(nw.gen("free", max_tokens=3))
        s += nw.gen("mood", dtype=Mood) + nw.gen("word", dtype=Literal["a", "b"]) + nw.gen("one", choices=LABELS)
        s += nw.gen("scores", dtype=Scores) + nw.gen("age", dtype=int | None) + nw.select("label", choices=LABELS)
        s += nw.gen("number", dtype=Literal[1, 2]) + nw.gen("json", json_schema={"type": "boolean"})
        with s.user():
            s += "ok"
        forks = s.fork(2)
        forks += nw.gen("more", max_tokens=2) + nw.gen("free", dtype=int)
        forks[0] += nw.gen("own", dtype=int)
        forks.join()
        s["seen"] = 3

    assert f.trace().variables == {
        "free": str, "mood": Mood, "word": Literal["a", "b"], "one": str, "scores": list[int], "age": int | None,
        "label": str, "number": Literal[1, 2], "json": str, "more": list[str], "own": list[object], "seen": object,
    }  # fmt: skip


def test_variables_that_not_every_run_has_have_no_types() -> None:
    def decides(s: State) -> None:
        s += nw.gen("x", max_tokens=3)
        if s["x"] == "a":
            s += nw.gen("y", max_tokens=3)

    def returns(s: State) -> str:
        s += nw.gen("x", max_tokens=3)
        return "x"

    def asks_what_is_given(s: State, hint: str | None = None) -> None:
        if hint is not None:
            s += hint
            s += nw.gen("hinted", max_tokens=3)

    def asks_for_a_type(s: State, hint: str | int) -> None:
        s += nw.gen("word" if isinstance(hint, str) else "number", max_tokens=3)

    def asks_in_another(s: State, hint: str | None) -> None:
        asks_what_is_given(s, hint)

    def names_by_what_is_given(s: State, hint: str) -> None:
        s += nw.gen("a_" + hint, max_tokens=3)

    for body in (asks_what_is_given, asks_for_a_type, asks_in_another, names_by_what_is_given):
        assert nw.function(body).trace(hint=Placeholder("hint")).variables is None
    assert nw.function(decides).trace().variables is None
    assert nw.function(returns).trace().variables is None
