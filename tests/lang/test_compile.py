"""A compiled program gives what the program gives, without keeping its body waiting for what it only writes on."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import given, settings

import niwaki as nw
from niwaki.lang.arguments import Call
from niwaki.lang.executor import Executor
from niwaki.lang.lazy import LazyExecutor
from niwaki.lang.program import Program
from niwaki.lang.sites import sites_of
from niwaki.lang.state import State
from tests.plans import NAMES, follow, plans_of


def answer(prompt: str) -> str:
    """Another one to every prompt, and always the same."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:6]


@pytest.fixture(scope="module")
def backend() -> Iterator[nw.ScriptedBackend]:
    made = nw.ScriptedBackend(answer, threads=4)
    yield made
    made.shutdown()


def told(state: State, names: list[str]) -> dict[str, object]:
    values = {name: state[name] for name in names if name in state}
    return {"text": state.text(), "ids": state.token_ids, "messages": state.messages(), "usage": state.usage, **values}


def both(program: Program, *args: object, backend: nw.ScriptedBackend) -> tuple[State, State]:
    return program.run(*args, backend=backend), program.compile().run(*args, backend=backend)


# -- the same results -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plan=plans_of())
def test_random_programs_give_the_same_values_texts_tokens_and_calls(
    plan: list[tuple[str, object]], backend: nw.ScriptedBackend
) -> None:
    once: list[str] = []
    twice: list[str] = []
    plain = follow.run(plan, once, backend=backend)
    compiled = follow.compile().run(plan, twice, backend=backend)
    names = [*NAMES, "inner", "turn", "each"]
    assert told(compiled, names) == told(plain, names)
    assert twice == once, "the body ran once, and decided by the same values"


@nw.function
def judge(s: State, question: str) -> str:
    s += nw.user(question)
    forks = s.fork(3)
    forks += lambda i: nw.assistant(f"As judge {i}: " + nw.gen("view"))
    forks.join()
    views = s["view"]
    s += nw.user("The judges said:\n" + "\n".join(s["view"]) + f"\nFirst: {s['view'][0]}")  # type: ignore[arg-type,index]
    s += nw.assistant(nw.gen("verdict"))
    s.user(s["verdict"])  # type: ignore[call-overload]  # a text
    return f"{s['verdict']} of {len(views)}"  # type: ignore[arg-type]  # a list


def test_a_judge_with_turns_and_lists(backend: nw.ScriptedBackend) -> None:
    plain, compiled = both(judge, "Why?", backend=backend)
    assert told(compiled, ["view", "verdict"]) == told(plain, ["view", "verdict"])
    assert compiled.ret_value == plain.ret_value


# -- nobody waits -----------------------------------------------------------------------------------------------------


@nw.function
def refine(s: State, log: list[str]) -> None:
    s += "Draft: " + nw.gen("draft")
    s += f"\nBetter than {s['draft']}: " + nw.gen("better")
    draft = s["draft"]
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += f"{i} " + draft + nw.gen("x")  # type: ignore[operator]  # a text
    forks.join()
    s += " ".join(s["x"])  # type: ignore[arg-type]  # texts
    log.append("the body is done")


def test_the_body_ends_before_anything_is_generated() -> None:
    go_on = threading.Event()

    def wait(prompt: str) -> str:
        assert go_on.wait(60)
        return answer(prompt)

    backend = nw.ScriptedBackend(wait, threads=2)
    log: list[str] = []
    state = refine.compile().run(log, backend=backend)
    assert log == ["the body is done"]
    assert len(backend.calls) <= 1
    go_on.set()
    assert state.text() == refine.run(log, backend=backend).text()
    assert len({call.prompt for call in backend.calls}) == 4, "both asked the same"
    backend.shutdown()


def test_a_value_that_the_body_decides_by_is_the_real_one(backend: nw.ScriptedBackend) -> None:
    @nw.function
    def decide(s: State) -> list[object]:
        s += nw.gen("text") + nw.gen("number", dtype=int) + nw.gen("many", n=2)
        text, number, many = s["text"], s["number"], s["many"]
        s += f"{s['number']} {s['text']}"
        return [type(text), type(number), len(many), text == s["text"], len(s["text"])]  # type: ignore[arg-type]

    digits = nw.ScriptedBackend(lambda prompt: str(len(prompt)))
    state = decide.compile().run(backend=digits)
    assert state.ret_value == [str, int, 2, True, 1]
    assert state.text() == decide.run(backend=digits).text()


def test_a_read_that_is_guarded_raises_where_it_is_guarded() -> None:
    @nw.function
    def guarded(s: State) -> str:
        s += nw.gen("x")
        try:
            s += "So " + s["x"]  # type: ignore[operator]  # a text
        except nw.CapacityError:
            return "caught"
        return "went on"

    for program in (guarded, guarded.compile()):
        state = program.run(backend=nw.ScriptedBackend([nw.CapacityError("full")]))
        assert state._executor._ret_value == "caught"  # reading it would raise, for the state has failed


def test_an_error_is_told_by_every_read_and_ends_what_waits_for_the_value() -> None:
    @nw.function
    def pass_on(s: State) -> None:
        s += nw.gen("x")
        forks = s.fork(1)
        forks += "So " + s["x"] + nw.gen("y")  # type: ignore[operator]  # a text
        forks.join()

    go_on = threading.Event()

    def fail(prompt: str) -> str:
        assert go_on.wait(60)
        raise nw.CapacityError("full")

    backend = nw.ScriptedBackend(fail, threads=1)
    state = pass_on.compile().run(backend=backend)
    go_on.set()
    for _ in range(2):
        with pytest.raises(nw.CapacityError, match="full"):
            state["y"]
    backend.shutdown()


def test_no_text_can_pass_for_a_mark(backend: nw.ScriptedBackend) -> None:
    @nw.function
    def quote(s: State, text: str) -> None:
        s += nw.gen("x")
        s += text + s["x"]  # type: ignore[operator]  # a text

    for text in ("\ue0040\ue005", "\ue004", "\ue0040.0\ue005"):
        plain, compiled = both(quote, text, backend=backend)
        assert compiled.text() == plain.text()


# -- where ------------------------------------------------------------------------------------------------------------


def reads(s: State, other: dict[str, str], flag: bool) -> object:
    s += nw.gen("x")
    s += s["x"]  # type: ignore[arg-type]
    s += "a" + other["x"]
    s += s["x"].upper()  # type: ignore[attr-defined]
    s += "yes" if s["x"] else "no"
    s += f"{s['x']:>5}"
    s += f"{s['x']!r}"
    text = ""
    text += s["x"]  # type: ignore[operator]
    print(s["x"])
    kept = s["x"]
    s += kept  # type: ignore[arg-type]
    s += "-".join(s["x"])  # type: ignore[arg-type]
    seen = s["x"]
    s += seen if seen else ""  # type: ignore[arg-type]
    t = s
    t += t["x"]  # type: ignore[arg-type]
    return s["x"]


def test_only_what_is_seen_to_be_written_on_is_put_off() -> None:
    sites = sites_of(reads)
    first = reads.__code__.co_firstlineno
    found = {(line or 0) - first: kind for (line, *_), kind in sites.kinds.items()}
    assert found == {2: "text", 11: "text", 13: "list", 18: "end"}


def hand_on(s: State) -> object:
    s += nw.gen("x")
    return [s["x"], s.fork(1)]


def test_a_return_that_gives_the_state_to_somebody_may_not_be_the_end() -> None:
    assert sites_of(hand_on).kinds == {}


def test_a_function_without_source_is_run_as_it_is(backend: nw.ScriptedBackend) -> None:
    assert sites_of(len).kinds == {}


def test_an_async_program_is_refused() -> None:
    @nw.function
    async def ask(s: State) -> None:
        s += "x"

    with pytest.raises(nw.ProgramError, match="needs no compile"):
        ask.compile()


def test_it_is_a_program_like_any_other(backend: nw.ScriptedBackend) -> None:
    @nw.function
    def ask(s: State, country: str, tone: Literal["dry", "warm"] = "dry") -> None:
        s += f"{tone} {country}? " + nw.gen("x")
        s += "So: " + s["x"] + nw.gen("y")  # type: ignore[operator]  # a text

    compiled = ask.compile().bind(tone="warm")
    assert compiled.is_compiled
    rows = [("France",), ("Italy",), (1, 2, 3)]
    states = compiled.run_batch(rows, backend=backend)
    plain = ask.bind(tone="warm").run_batch(rows, backend=backend)
    assert [state.text() for state in states[:2] if isinstance(state, State)] == [
        state.text() for state in plain[:2] if isinstance(state, State)
    ]
    assert isinstance(states[2], nw.ProgramError)
    assert asyncio.run(compiled.arun("France", backend=backend)).text() == states[0].text()  # type: ignore[union-attr]
    assert "".join(compiled.stream("France", backend=backend).text_iter("y")) == states[0]["y"]  # type: ignore[index]


# -- rows -------------------------------------------------------------------------------------------------------------


@nw.function
def retell(s: State, text: str) -> None:
    s += f"{text}: " + nw.gen("x")
    s += "So: " + s["x"] + nw.gen("y")  # type: ignore[operator]  # a text


def test_a_batch_compiles_by_itself_what_has_no_effects_but_its_text(backend: nw.ScriptedBackend) -> None:
    seen: list[object] = []

    @nw.function
    def noted(s: State, text: str) -> None:
        s += f"{text}: " + nw.gen("x")
        seen.append(s["x"])

    @nw.function
    async def waited(s: State, text: str) -> None:
        s += text + nw.gen("x")

    assert retell.for_rows().is_compiled
    assert [program.for_rows() for program in (noted, waited)] == [noted, waited]
    compiled = retell.compile()
    assert compiled.for_rows() is compiled
    assert retell.for_rows().bind(text="a").for_rows().is_compiled


@nw.function
def told_of(s: State, what: str) -> None:
    s += f"{what}: " + nw.gen("x")


@nw.function
def read_of(s: State, what: str) -> str:
    s += f"{what}? " + nw.gen("y")
    return s.get_var("y", str)


@nw.function
def in_parts(s: State, text: str) -> list[str]:
    told_of(s, text)
    forks = s.fork(2)
    for fork in forks:
        told_of(fork, "each")
    told_of(forks[1], "the second")
    forks.join("concat")
    s += "So: " + s["x"]  # type: ignore[operator]  # a text
    return [read_of(s, "why"), read_of(s, "when")]


def test_a_program_of_parts_compiles_by_itself_too(backend: nw.ScriptedBackend) -> None:
    assert in_parts.for_rows().is_compiled
    plain, compiled = (program.run("Trees", backend=backend) for program in (in_parts, in_parts.for_rows()))
    assert told(compiled, ["x", "y"]) == told(plain, ["x", "y"])
    assert compiled.ret_value == plain.ret_value


def test_a_program_is_a_part_only_where_it_goes_on_with_the_state() -> None:
    seen: list[str] = []

    @nw.function
    def notes(s: State, text: str) -> None:
        seen.append(text)

    bound = told_of.bind(options={"temperature": 0}, what=nw.ScriptedBackend([]))

    @nw.function
    def runs_it(s: State, text: str) -> None:
        told_of(text)

    @nw.function
    def runs_it_by_name(s: State, text: str) -> None:
        told_of.run(text)

    @nw.function
    def lends_it(s: State, texts: list[str]) -> None:
        s += [str(one) for one in map(told_of, texts)]

    @nw.function
    def has_a_part_with_effects(s: State, text: str) -> None:
        notes(s, text)

    @nw.function
    def binds_what_may_do_anything(s: State) -> None:
        bound(s)

    @nw.function
    def goes_on_with_another(s: State, text: str) -> None:
        s = text  # type: ignore[assignment]  # as it must not be
        told_of(s)  # type: ignore[call-arg]

    for program in (
        runs_it,
        runs_it_by_name,
        lends_it,
        has_a_part_with_effects,
        binds_what_may_do_anything,
        goes_on_with_another,
    ):
        assert program.for_rows() is program


def test_an_awaited_batch_compiles_by_itself_too(backend: nw.ScriptedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type[Executor]] = []
    run_body = Program._run_body

    def noted(program: Program, executor: Executor, call: Call) -> None:
        kinds.append(type(executor))
        run_body(program, executor, call)

    monkeypatch.setattr(Program, "_run_body", noted)

    async def main() -> list[State[None] | Exception]:
        return await retell.arun_batch([("a",), ("b",)], backend=backend)

    states = asyncio.run(main())
    assert kinds == [LazyExecutor, LazyExecutor]
    texts = [state.text() for state in states if isinstance(state, State)]
    assert texts == [retell.run(text, backend=backend).text() for text in ("a", "b")]


def test_a_row_with_objects_that_might_do_anything_is_interpreted(backend: nw.ScriptedBackend) -> None:
    class Name(str):
        __slots__ = ()

    program = retell.for_rows()
    calls = [program._arguments.call((text,), {"backend": backend}) for text in ("a", Name("a"), [Name("a")])]
    kinds = [type(program._new_executor(call)) for call in calls]
    assert kinds == [LazyExecutor, Executor, Executor]
    rows: list[dict[str, object]] = [{"text": "a"}, {"text": Name("a")}]
    texts = [state.text() for state in retell.run_batch(rows, backend=backend) if isinstance(state, State)]
    assert texts == [retell.run("a", backend=backend).text()] * 2


def test_a_row_that_fails_has_the_error_that_it_has_interpreted() -> None:
    def fail(prompt: str) -> str:
        raise nw.CapacityError("full")

    backend = nw.ScriptedBackend(fail)
    (failed,) = retell.run_batch([("a",)], backend=backend)
    assert isinstance(failed, nw.CapacityError)
    backend.shutdown()
