"""Forks share what stands before them, run at the same time, and come home in order."""

from __future__ import annotations

import threading
import time

import pytest

import niwaki as nw
from niwaki.lang.state import State
from tests.lang.waiting import PATIENCE


def test_forks_start_with_all_that_the_parent_has() -> None:
    backend = nw.ScriptedBackend({": ": "ok", "? ": ["a", "b", "c"]})

    @nw.function
    def f(s: State) -> None:
        s += "Start: " + nw.gen("first")
        s["given"] = 7
        forks = s.fork(3)
        forks += lambda i: f" {i}? "
        forks += nw.gen("x")
        assert len(forks) == 3
        assert [fork["given"] for fork in forks] == [7, 7, 7]
        assert [fork["first"] for fork in forks] == ["ok"] * 3
        assert [fork.text() for fork in forks] == ["Start: ok 0? a", "Start: ok 1? b", "Start: ok 2? c"]

    f.run(backend=backend)


def test_the_shared_prefix_is_prefilled_once_also_right_after_an_append() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "x")

    @nw.function
    def f(s: State) -> None:
        s += "one two three four five six seven eight"
        forks = s.fork(10)
        forks += " next" + nw.gen("x")
        forks.join()
        s.sync()

    f.run(backend=backend)
    assert backend.usage()["prefilled_tokens"] == 8 + 10


def test_a_fork_that_goes_on_behind_its_join_is_not_sent_again() -> None:
    may_answer = threading.Event()

    def answer(prompt: str) -> str:
        may_answer.wait(PATIENCE)
        return " x"

    backend = nw.ScriptedBackend(answer, threads=2)

    @nw.function
    def f(s: State) -> None:
        s += "one two three four five six seven eight"
        forks = s.fork(2)
        forks += " next" + nw.gen("x")
        forks.join()
        forks += " more" + nw.gen("y")  # it stands behind the join before that was reached
        may_answer.set()
        for fork in forks:
            fork.sync()
        s.sync()

    f.run(backend=backend)
    assert backend.usage()["prefilled_tokens"] == 8 + 2 * 2


def test_join_gathers_new_variables_into_lists_in_order() -> None:
    backend = nw.ScriptedBackend(lambda prompt: prompt[-1])

    @nw.function
    def f(s: State) -> None:
        s["old"] = "parent"
        forks = s.fork(3)
        forks += ["a", "b", "c"]
        forks += nw.gen("x")
        forks[0]["old"] = "child"
        forks[1]["only"] = 1
        forks.join()

    state = f.run(backend=backend)
    assert state["x"] == ["a", "b", "c"]
    assert state["only"] == [None, 1, None]
    assert state["old"] == "parent"
    assert state.text() == ""


def test_nested_forks_give_nested_lists() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            inner = fork.fork(2)
            inner += [f"{i}0", f"{i}1"]
            inner += nw.gen("x")
            inner.join()
        forks.join()

    assert f.run(backend=nw.ScriptedBackend(lambda prompt: prompt))["x"] == [["00", "01"], ["10", "11"]]


@pytest.mark.parametrize("mode", ["concat", "concate_and_append"])
def test_join_can_append_the_texts_in_order(mode: str) -> None:
    backend = nw.ScriptedBackend({"> ": ["one", "two"], "= ": "sum"})

    @nw.function
    def f(s: State) -> None:
        s += "Start"
        forks = s.fork(2)
        forks += lambda i: f" {i}> " + nw.gen("x")
        forks.join(mode)
        s += " = " + nw.gen("all")

    state = f.run(backend=backend)
    assert state.text() == "Start 0> one 1> two = sum"
    assert "x" not in state


def test_joined_forks_stay_readable_and_can_go_on() -> None:
    backend = nw.ScriptedBackend({"a": "1", "b": "2"})

    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += "a" + nw.gen("x")
        forks.join()
        forks[1] += "b" + nw.gen("y")
        assert forks[1].text() == "a1b2"
        assert forks[0].text() == "a1"
        assert s["x"] == ["1", "1"]

    f.run(backend=backend)


def test_join_takes_what_was_appended_before_it() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(1)
        forks[0]["early"] = 1
        forks.join()
        forks[0]["late"] = 2
        assert s["early"] == [1]
        assert "late" not in s

    f.run(backend=nw.ScriptedBackend())


def test_copy_is_a_fork_of_one_that_comes_home_at_the_end_of_the_block() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "a"
        with s.copy() as c:
            c += "b" + nw.gen("x")
        s += "c"

    state = f.run(backend=nw.ScriptedBackend(lambda prompt: prompt))
    assert (state["x"], state.text()) == (["ab"], "ac")


def test_forks_run_at_the_same_time() -> None:
    running, at_once = threading.Barrier(4, timeout=PATIENCE), []

    def answer(prompt: str) -> str:
        at_once.append(running.wait())  # breaks unless four arrive together
        return "ok"

    @nw.function
    def f(s: State) -> None:
        forks = s.fork(4)
        forks += "?" + nw.gen("x")
        forks.join()

    assert f.run(backend=nw.ScriptedBackend(answer, threads=4))["x"] == ["ok"] * 4
    assert sorted(at_once) == [0, 1, 2, 3]


def test_neither_append_nor_fork_nor_join_waits() -> None:
    gate = threading.Event()

    def answer(prompt: str) -> str:
        assert gate.wait(PATIENCE)
        return "ok"

    @nw.function
    def f(s: State) -> None:
        s += "a" + nw.gen("x")
        forks = s.fork(2)
        forks += nw.gen("y")
        forks.join()
        s += nw.select("z", choices=["ok", "no"])
        assert "x" in s  # known to come
        gate.set()
        assert s["z"] == "ok"
        assert s["y"] == ["ok", "ok"]

    f.run(backend=nw.ScriptedBackend(answer, threads=2), timeout=PATIENCE)


def test_a_fork_inside_an_open_turn_goes_on_with_the_turn() -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.user("hi")
        s += nw.assistant_begin()
        s += "I say "
        forks = s.fork(2)
        forks += nw.gen("x")
        forks += nw.assistant_end()
        for fork in forks:
            assert fork.messages()[-1] == {"role": "assistant", "content": "I say yes"}
        s += "no" + nw.assistant_end()
        assert s.messages()[-1]["content"] == "I say no"

    f.run(backend=nw.ScriptedBackend(lambda prompt: "yes"))


def test_a_group_is_a_sequence() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(3)
        assert [fork is forks[i] for i, fork in enumerate(forks)] == [True] * 3
        assert len(forks[1:]) == 2
        assert [a is b for a, b in zip(forks, list(forks), strict=True)] == [True] * 3

    f.run(backend=nw.ScriptedBackend())


def test_64_forks_with_random_delays_all_come_home_twenty_times() -> None:
    """Callbacks arrive on four threads while the author's thread appends, reads, forks and joins."""
    import random

    rng = random.Random(7)
    lock = threading.Lock()

    def delay() -> float:
        with lock:
            return rng.choice((0.0, 0.0, 0.0001, 0.001))

    backend = nw.ScriptedBackend(lambda prompt: prompt.rsplit("#", 1)[1], threads=4, delay=delay)

    @nw.function
    def f(s: State, round: int) -> None:
        s += f"round {round}" + "#r" + nw.gen("head")
        forks = s.fork(64)
        forks += lambda i: f"#{i}"
        forks += nw.gen("x")
        for fork in forks:
            if len(str(fork["x"])) == 2:
                inner = fork.fork(2)
                inner += lambda j: f"#{j}"
                inner += nw.gen("y")
                inner.join()
        forks.join()
        s += "#done" + nw.gen("tail")

    started = time.monotonic()
    for round_number in range(20):
        state = f.run(round_number, backend=backend, timeout=PATIENCE)
        assert state["tail"] == "done"
        assert state["x"] == [str(i) for i in range(64)]
        assert state["y"] == [None] * 10 + [["0", "1"]] * 54
    assert time.monotonic() - started < PATIENCE
    backend.shutdown()


# -- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "3", 10_001])
def test_a_fork_count_that_cannot_be_is_refused(count: object) -> None:
    @nw.function
    def f(s: State) -> None:
        s.fork(count)  # type: ignore[arg-type]  # that is the point

    with pytest.raises(nw.ProgramError, match="fork needs a count"):
        f.run(backend=nw.ScriptedBackend())


def test_joining_twice_is_refused() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks.join()
        forks.join()

    with pytest.raises(nw.ProgramError, match="joined already"):
        f.run(backend=nw.ScriptedBackend())


def test_an_unknown_way_to_join_is_refused() -> None:
    @nw.function
    def f(s: State) -> None:
        s.fork(2).join("zip")

    with pytest.raises(nw.ProgramError, match=r"join knows .*'zip'"):
        f.run(backend=nw.ScriptedBackend())


def test_a_list_of_another_length_is_refused() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += ["a", "b", "c"]

    with pytest.raises(nw.ProgramError, match="3 items cannot be spread over 2 forks"):
        f.run(backend=nw.ScriptedBackend())


def test_an_exception_in_a_lambda_appends_to_no_fork() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(3)
        with pytest.raises(ZeroDivisionError):
            forks += lambda i: str(1 // (1 - i))
        assert [fork.text() for fork in forks] == ["", "", ""]
        forks += lambda i: str(1 // (1 - i))

    with pytest.raises(ZeroDivisionError):
        f.run(backend=nw.ScriptedBackend())


def test_a_fork_cannot_be_replaced() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks[0] = forks[1]

    with pytest.raises(nw.ProgramError, match="fork 0 cannot be replaced"):
        f.run(backend=nw.ScriptedBackend())


def test_texts_of_forks_that_opened_turns_cannot_be_appended() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += nw.user("hi")
        forks.join("concat")
        s.sync()

    with pytest.raises(nw.ProgramError, match="opened chat turns"):
        f.run(backend=nw.ScriptedBackend())
