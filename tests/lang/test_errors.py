"""Whatever goes wrong comes out where it is read, with the program's own line, from every read, and nothing hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import niwaki as nw
from niwaki.lang.state import State
from niwaki.runtime.api.choices import ChoicesMethod
from tests.lang.waiting import PATIENCE, wait_until

BROKEN = "the kernel is on fire"


def broken() -> nw.ScriptedBackend:
    return nw.ScriptedBackend({"boom": nw.GenerationError(BROKEN), "": "ok"})


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


READS: dict[str, Callable[[State], object]] = {
    "variable": lambda s: s["x"],
    "earlier variable": lambda s: s["before"],
    "get_var": lambda s: s.get_var("x"),
    "text": lambda s: s.text(),
    "str": str,
    "messages": lambda s: s.messages(),
    "sync": lambda s: s.sync(),
    "meta": lambda s: s.get_meta_info("x"),
    "usage": lambda s: s.usage,
    "token_ids": lambda s: s.token_ids,
    "text_iter": lambda s: list(s.text_iter()),
    "text_iter of a variable": lambda s: list(s.text_iter("x")),
    "contains": lambda s: "x" in s,
    "fork": lambda s: s.fork(2)[1].text(),
    "copy": lambda s: s.fork(1)[0]["before"],
}


@nw.function
def failing(s: State) -> None:
    s += "a" + nw.gen("before")
    s += "boom" + nw.gen("x")
    s += "more" + nw.gen("after")


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_every_read_of_a_failed_state_raises_the_original_error_every_time(
    read: Callable[[State], object], threads: int
) -> None:
    original = nw.GenerationError(BROKEN)
    backend = nw.ScriptedBackend({"boom": original, "": "ok"}, threads=threads)
    state = failing.run(backend=backend, timeout=PATIENCE)
    assert state.error() is original
    for _ in range(2):
        with pytest.raises(nw.GenerationError, match=BROKEN) as caught:
            read(state)
        assert caught.value is original
    backend.shutdown()


def test_the_error_names_the_program_and_its_line() -> None:
    error = failing.run(backend=broken()).error()
    assert error is not None
    (note,) = notes(error)
    assert note.startswith("in program failing, test_errors.py:")
    assert note.endswith('s += "boom" + nw.gen("x")')


def test_reading_again_and_again_does_not_grow_the_traceback() -> None:
    state = failing.run(backend=broken())
    lengths = []
    for _ in range(5):
        with pytest.raises(nw.GenerationError) as caught:
            state["x"]
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1


def test_nothing_after_the_failure_runs() -> None:
    backend = broken()
    state = failing.run(backend=backend)
    state += "later" + nw.gen("later")
    state["y"] = 1
    with state.user():
        state += "hi"
    assert isinstance(state.error(), nw.GenerationError)
    assert [call.prompt for call in backend.calls] == ["a", "aokboom"]


def test_an_error_in_the_body_comes_out_of_run_and_out_of_the_state() -> None:
    seen: list[State] = []

    @nw.function
    def f(s: State) -> None:
        seen.append(s)
        s += nw.gen("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        f.run(backend=broken())
    with pytest.raises(ValueError, match="no"):
        seen[0].text()


def test_an_error_that_the_body_reads_comes_out_of_run() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "boom" + nw.gen("x")
        s["x"]

    with pytest.raises(nw.GenerationError, match=BROKEN) as caught:
        f.run(backend=broken())
    assert len(notes(caught.value)) == 1


def test_a_body_may_catch_the_error_of_a_fork_and_go_on() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += ["boom", "fine"]
        forks += nw.gen("x")
        with pytest.raises(nw.GenerationError):
            forks[0]["x"]
        assert forks[1]["x"] == "ok"
        s += "then" + nw.gen("y")

    assert f.run(backend=broken())["y"] == "ok"


def test_the_error_of_a_fork_comes_out_of_its_parent_after_the_join() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(3)
        forks += ["fine", "boom", "fine"]
        forks += nw.gen("x")
        forks.join()

    error = f.run(backend=broken()).error()
    assert isinstance(error, nw.GenerationError)
    line, which = notes(error)
    assert 'forks += nw.gen("x")' in line
    assert which == (
        "forks[1] of 3 that were joined failed; there are forks[0]['x'], forks[2]['x']; join(on_error='return') goes on"
    )


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_join_that_returns_errors_has_them_in_their_place_and_the_parent_goes_on(is_compiled: bool) -> None:
    @nw.function
    def f(s: State) -> list[object]:
        forks = s.fork(3)
        forks += ["fine", "boom", "fine"]
        forks += nw.gen("x")
        forks[1] += nw.gen("late")  # dropped, or not: it never runs
        forks.join(on_error="return")
        good = [x for x in s.get_var("x", list[object]) if not isinstance(x, Exception)]
        s += f"{len(good)} then" + nw.gen("y")
        return good

    backend = broken()
    state = (f.compile() if is_compiled else f).run(backend=backend)
    assert state.ret_value == ["ok", "ok"]
    assert state["y"] == "ok"
    assert state.text() == "2 thenok"
    x = state.get_var("x", list[object])
    assert [type(one) for one in x] == [str, nw.GenerationError, str]
    with pytest.raises(nw.ProgramError, match="which is no list"):
        state.get_var("x", list[str])
    assert state.error() is None


def test_an_error_that_a_join_returned_has_json_in_a_row(tmp_path: Path) -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += ["fine", "boom"]
        forks += nw.gen("x")
        forks.join(on_error="return")

    [row] = f.run_batch([{}], backend=broken(), checkpoint=tmp_path / "out.jsonl")
    assert row == {"x": ["ok", {"error": {"type": "GenerationError", "message": BROKEN}}]}


def test_texts_of_failed_forks_are_left_out_where_their_errors_are_returned() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(3)
        forks += ["fine ", "boom", "good "]
        forks += nw.gen("x")
        forks.join("concat", on_error="return")

    assert f.run(backend=broken()).text() == "fine okgood ok"


def test_a_join_whose_forks_all_failed_has_all_their_errors() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += "boom"
        forks += nw.gen("x")
        for fork in forks:
            assert isinstance(fork.error(), nw.GenerationError)
        forks.join(on_error="return")

    state = f.run(backend=broken())
    with pytest.raises(nw.UnknownVariable) as caught:
        state["never"]
    assert "x" in str(caught.value)
    x = state.get_var("x", list[object])
    assert [type(one) for one in x] == [nw.GenerationError] * 2


def test_a_run_that_ends_ends_at_its_join_too_whatever_that_returns() -> None:
    backend = slow()

    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += nw.gen("x")
        forks.join(on_error="return")

    state = f.run(backend=backend)
    state.cancel()
    with pytest.raises(nw.Cancelled):
        state["x"]
    backend.shutdown()


def test_a_join_knows_two_ways_with_errors() -> None:
    @nw.function
    def f(s: State) -> None:
        s.fork(2).join(on_error="keep")  # type: ignore[arg-type]

    with pytest.raises(nw.ProgramError, match="on_error is 'raise' or 'return', got 'keep'"):
        f.run(backend=broken())


def test_an_error_before_a_fork_comes_out_of_the_forks() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "boom" + nw.gen("x")
        forks = s.fork(2)
        forks += nw.gen("y")
        inner = forks[0].fork(2)
        inner.join()
        forks.join()
        inner[1]["y"]

    with pytest.raises(nw.GenerationError, match=BROKEN):
        f.run(backend=broken())


def test_an_error_in_a_program_inside_comes_out_of_the_outer_one() -> None:
    @nw.function
    def inner(s: State) -> None:
        s += "boom" + nw.gen("x")

    @nw.function
    def outer(s: State) -> None:
        s["x"] = inner.run()["x"]

    with pytest.raises(nw.GenerationError, match=BROKEN) as caught:
        outer.run(backend=broken())
    assert "in program inner" in notes(caught.value)[0]


def test_ctrl_c_in_the_body_stops_the_forks() -> None:
    started = threading.Event()
    forks_seen: list[State] = []

    def answer(prompt: str) -> str:
        started.set()
        return "x " * 1000

    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += "go" + nw.gen("x", max_tokens=100_000)
        forks_seen.extend(forks)
        assert started.wait(PATIENCE)
        raise KeyboardInterrupt

    backend = nw.ScriptedBackend(answer, threads=2, delay=0.01)
    with pytest.raises(KeyboardInterrupt):
        f.run(backend=backend)
    for fork in forks_seen:
        with pytest.raises(KeyboardInterrupt):
            fork.text()
    wait_until(lambda: backend.num_open_branches == 0)
    backend.shutdown()


# -- unknown variables ------------------------------------------------------------------------------------------------


def test_reading_a_variable_that_nothing_sets_raises_at_once_and_names_those_that_exist() -> None:
    @nw.function
    def f(s: State) -> None:
        s["a"] = 1
        s += nw.gen("b")
        s["c"]

    with pytest.raises(nw.UnknownVariable, match="no variable 'c'; it has: 'a', 'b'"):
        f.run(backend=broken())


def test_an_unknown_variable_is_also_a_key_error() -> None:
    state = failing.run(backend=nw.ScriptedBackend(lambda prompt: "ok"))
    with pytest.raises(KeyError):
        state["nothing"]
    assert state["x"] == "ok"  # asking for what is not there does not fail the state


def test_an_unknown_variable_after_a_join_raises_when_the_join_is_done() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += nw.gen("x")
        forks.join()
        s["y"]

    with pytest.raises(nw.UnknownVariable, match="it has: 'x'"):
        f.run(backend=broken(), timeout=PATIENCE)


def test_meta_info_of_a_variable_that_was_not_generated_is_unknown() -> None:
    @nw.function
    def f(s: State) -> None:
        s["x"] = 1
        s.get_meta_info("x")

    with pytest.raises(nw.UnknownVariable, match="was not generated"):
        f.run(backend=broken())


def test_a_variable_that_is_generated_again_is_read_anew() -> None:
    backend = nw.ScriptedBackend(["one", "two"], threads=1, delay=0.005)
    seen: list[object] = []

    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x")
        seen.append(s["x"])
        s += nw.gen("x")
        seen.append(s["x"])
        s["x"] = 3
        seen.append(s["x"])

    f.run(backend=backend, timeout=PATIENCE)
    assert seen == ["one", "two", 3]
    backend.shutdown()


# -- time -------------------------------------------------------------------------------------------------------------


def slow() -> nw.ScriptedBackend:
    """Takes longer for an answer than any test waits."""
    return nw.ScriptedBackend(lambda prompt: "word " * 100, threads=1, delay=1.0)


def test_a_run_that_is_not_done_in_time_fails_with_timed_out() -> None:
    backend = slow()

    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x")

    started = time.monotonic()
    state = f.run(backend=backend, timeout=0.05)
    with pytest.raises(nw.TimedOut, match=r"program f was not done within its timeout, of 0\.05 s"):
        state["x"]
    with pytest.raises(nw.TimedOut):
        state.text()
    assert time.monotonic() - started < PATIENCE
    backend.shutdown()


def test_a_run_inside_another_ends_with_it() -> None:
    backend = slow()

    @nw.function
    def inner(s: State) -> None:
        s += nw.gen("x")
        s["x"]

    @nw.function
    def outer(s: State) -> None:
        inner.run(timeout=60)

    with pytest.raises(nw.TimedOut):
        outer.run(backend=backend, timeout=0.05)
    backend.shutdown()


def test_a_cancelled_state_raises_cancelled_and_its_forks_too() -> None:
    backend = slow()

    @nw.function
    def f(s: State) -> list[State]:
        forks = s.fork(2)
        forks += nw.gen("x")
        return list(forks)

    state = f.run(backend=backend)
    forks = state.ret_value
    assert isinstance(forks, list)
    started = time.monotonic()
    state.cancel()
    for one in (state, *forks):
        with pytest.raises(nw.Cancelled, match="program f was cancelled"):
            one.text()
    assert time.monotonic() - started < PATIENCE
    backend.shutdown()


def test_a_cancelled_fork_is_not_taken_for_the_program() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += nw.gen("x")
        forks[0].cancel()
        forks.join()

    backend = broken()
    with pytest.raises(nw.Cancelled, match=r"^a fork of program f was cancelled\n"):
        f.run(backend=backend).text()


# -- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, 5, 1.5, {"a": 1}, b"bytes", ["a", None]])
def test_only_text_and_nodes_can_be_appended(content: object) -> None:
    @nw.function
    def f(s: State) -> None:
        s += content  # type: ignore[arg-type]  # that is the point

    with pytest.raises(nw.ProgramError, match="a program is made of text, nodes and lists of them"):
        f.run(backend=broken())


def turn_in_turn(s: State) -> None:
    with s.user(), s.assistant():
        pass


def begin_in_turn(s: State) -> None:
    s += nw.user_begin()
    s += nw.user("x")


def end_of_another(s: State) -> None:
    s += nw.user_begin()
    s += nw.assistant_end()


def end_of_nothing(s: State) -> None:
    s += nw.user_end()


def turn_in_expression(s: State) -> None:
    s += nw.user("a" + nw.assistant("b"))


def turn_in_an_answer(s: State) -> None:
    s += nw.assistant(nw.user("a"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (turn_in_turn, "an assistant turn begins inside a user turn"),
        (begin_in_turn, "a user turn begins inside a user turn"),
        (end_of_another, "a user turn is open"),
        (end_of_nothing, "no turn is open"),
        (turn_in_an_answer, "a user turn stands inside an assistant turn"),
        (turn_in_expression, "an assistant turn stands inside a user turn; .* do not nest"),
    ],
)
def test_turns_that_do_not_follow_each_other_are_refused_on_their_line(
    body: Callable[[State], None], message: str
) -> None:
    with pytest.raises(nw.ProgramError, match=message) as caught:
        nw.function(body).run(backend=broken())
    assert any(frame.path.name == "test_errors.py" and frame.name == body.__name__ for frame in caught.traceback)  # type: ignore[union-attr]  # a path here


def test_a_turn_left_by_an_exception_is_closed() -> None:
    @nw.function
    def f(s: State) -> None:
        try:
            with s.user():
                s += "half"
                raise ValueError("caught below")
        except ValueError:
            s += nw.user("whole")

    assert [message["content"] for message in f.run(backend=broken()).messages()] == ["half", "whole"]


def test_a_node_in_an_f_string_is_refused() -> None:
    with pytest.raises(nw.ProgramError, match="cannot stand inside an f-string"):
        f"Answer: {nw.gen('x')}"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nw.gen("x", regex="a", dtype=int), nw.ProgramError, "one constraint, got dtype and regex"),
        (lambda: nw.gen("x", regex="a", choices=["a"]), nw.ProgramError, "regex and choices"),
        (lambda: nw.gen("x", regex="(a"), nw.ConstraintError, r"regex '\(a' is not valid at 1"),
        (lambda: nw.gen("x", regex="[z-a]"), nw.ConstraintError, "not valid at 2"),
        (lambda: nw.gen("x", regex=cast("str", 5)), nw.ConstraintError, "must be a string, got 5"),
        (lambda: nw.gen("x", choices=["a"], n=2), nw.ProgramError, "takes no n"),
        (lambda: nw.gen("x", choices=["a"], max_tokens=2), nw.ProgramError, "takes no max_new_tokens"),
        (lambda: nw.gen("x", choices=["a"], temperature=0.5), nw.ProgramError, "temperature must be 0, got 0.5"),
        (lambda: nw.gen("x", max_tokens=2, max_new_tokens=2), nw.ProgramError, "same option"),
        (lambda: nw.gen("x", choices_method=nw.token_length_normalized), nw.ProgramError, "needs choices"),
        (lambda: nw.gen("x", temperature=-1), nw.RequestError, "temperature .* got -1"),
        (lambda: nw.gen("x", max_tokens=-1), nw.RequestError, "max_new_tokens"),
        (lambda: nw.gen("x", n=17), nw.RequestError, "n must be a whole number from 1 to 16, got 17"),
        (lambda: nw.gen("x", max_tokens=cast("int", "10")), nw.RequestError, "max_new_tokens .* got '10'"),
        (lambda: nw.gen("x", seed=cast("int", "7")), nw.RequestError, "seed must be a whole number .* got '7'"),
        (lambda: nw.gen("x", seed=cast("int", 0.5)), nw.RequestError, "seed must be a whole number .* got 0.5"),
        (lambda: nw.gen("x", logit_bias=cast("Any", {"a": 1})), nw.RequestError, "keys of logit_bias .* got 'a'"),
        (lambda: nw.gen("x", logit_bias=cast("Any", [5])), nw.RequestError, r"logit_bias must map .* got \[5\]"),
        (lambda: nw.gen("x", logit_bias=cast("Any", {5: "a"})), nw.RequestError, r"logit_bias\[5\] must .* got 'a'"),
        (lambda: nw.gen("x", stop_token_ids=cast("Any", "x")), nw.RequestError, "must be token ids, got 'x'"),
        (lambda: nw.gen("x", ignore_eos=cast("bool", "no")), nw.RequestError, "ignore_eos must be True or False"),
        (lambda: nw.gen("x", json_schema=cast("Any", True)), nw.ConstraintError, "json_schema True is none; give"),
        (
            lambda: nw.gen("x", json_schema={"name": "verdict", "strict": True, "schema": {"type": "object"}}),
            nw.ConstraintError,
            r"OpenAI's format of an answer; give what stands in its \['schema'\]",
        ),
        (
            lambda: nw.gen("x", json_schema='{"type": "json_schema", "json_schema": {"name": "v", "schema": {}}}'),
            nw.ConstraintError,
            r"give what stands in its \['json_schema'\]\['schema'\]",
        ),
        (lambda: nw.gen("x", stop=""), nw.RequestError, "stop strings"),
        (lambda: nw.gen(""), nw.ProgramError, "name must be a non-empty string"),
        (lambda: nw.gen(cast("str", 5)), nw.ProgramError, "name must be a non-empty string, got 5"),
        (lambda: nw.gen("x", dtype=object), nw.ConstraintError, "object cannot be enforced"),
        (lambda: nw.gen_int("x", regex="a"), nw.ProgramError, "takes no regex"),
        (lambda: nw.gen_int("x", maxtokens=3), nw.ProgramError, "maxtokens"),
        (lambda: nw.select("x"), nw.ProgramError, "needs a list of choices, got None"),
        (lambda: nw.select("x", choices=[]), nw.ProgramError, "needs a list of choices"),
        (lambda: nw.gen("x", choices=[]), nw.ProgramError, r"gen\(choices=...\) needs a list of choices, got \[\]"),
        (
            lambda: nw.gen("x", choices=["a"], temperature=1),
            nw.ProgramError,
            r"gen\(choices=...\) compares scores and does not sample: temperature must be 0, got 1",
        ),
        (lambda: nw.select("x", choices="abc"), nw.ProgramError, "needs a list of choices, got 'abc'"),
        (lambda: nw.select("x", choices=["a", ""]), nw.ProgramError, "non-empty strings, got ''"),
        (lambda: nw.select("x", choices=["a", cast("str", 1)]), nw.ProgramError, "non-empty strings, got 1"),
        (lambda: nw.select("x", choices=["a", "b", "a"]), nw.ProgramError, "choice 'a' is given twice"),
        (
            lambda: nw.select("x", choices=["a"], choices_method=cast("ChoicesMethod", max)),
            nw.ProgramError,
            "must be a ChoicesMethod",
        ),
    ],
)
def test_misuse_is_refused_where_it_is_written(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_an_option_that_only_fails_together_with_another_one_fails_on_its_line() -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x", min_tokens=50)

    assert f.run(backend=broken(), max_new_tokens=60)["x"] == "ok"
    with pytest.raises(nw.RequestError, match="min_tokens 50 is above max_new_tokens 40") as caught:
        f.run(backend=broken(), max_new_tokens=40)["x"]
    assert 's += nw.gen("x", min_tokens=50)' in notes(caught.value)[0]


def test_a_state_is_not_iterable() -> None:
    @nw.function
    def f(s: State) -> None:
        list(s)

    with pytest.raises(TypeError, match="not iterable"):
        f.run(backend=broken())
