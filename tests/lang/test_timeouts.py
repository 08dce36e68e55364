"""What takes too long, or is no longer wanted, ends: by the clock, though nobody reads."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import niwaki as nw
from niwaki.lang.clock import MANY, Clock
from niwaki.lang.state import State
from niwaki.runtime.api.readiness import Readiness, readiness
from tests.lang.passing_time import passing_time
from tests.lang.waiting import PATIENCE, interrupted, press_ctrl_c, wait_until
from tests.toy import make_model

LIMIT = 0.3  # seconds: what the programs below are given, enough for a loaded machine to start them
LONG = "word " * 2000  # takes longer than that, and next to no work: a thread that still makes it holds its branch


def failure(state: State) -> BaseException | None:
    """The error so far. Never waits: these tests are about who ends a state that nobody reads."""
    return state._executor._error


@pytest.fixture
def slow() -> Iterator[nw.ScriptedBackend]:
    backend = nw.ScriptedBackend(lambda prompt: LONG, threads=4, delay=0.1)
    yield backend
    wait_until(lambda: not any_branch_is_open(backend))
    backend.shutdown()


def any_branch_is_open(backend: nw.ScriptedBackend) -> bool:
    gc.collect()
    return backend.num_open_branches > 0


@nw.function
def endless(s: State, limit: float | None = None) -> None:
    s += "go" + nw.gen("x", max_tokens=100_000, timeout=limit)


# -- a run's time -----------------------------------------------------------------------------------------------------


def test_a_run_ends_when_its_time_is_over_although_nobody_reads(slow: nw.ScriptedBackend) -> None:
    state = endless.run(backend=slow, timeout=LIMIT)
    wait_until(lambda: failure(state) is not None)
    error = failure(state)
    assert isinstance(error, nw.TimedOut)
    assert str(error) == f"program endless was not done within its timeout, of {LIMIT} s"
    wait_until(lambda: not any_branch_is_open(slow))  # though the state is still held


def test_a_timeout_comes_soon_after_its_time() -> None:
    late = []
    for _ in range(5):  # the best of five, on a machine that does other things too
        rung = threading.Event()

        class Bell:
            def __init__(self, rung: threading.Event) -> None:
                self.ring = rung.set

            def go(self) -> None:
                self.ring()

        bell = Bell(rung)
        when = time.monotonic() + LIMIT
        Clock().at(when, bell.go)
        assert rung.wait(PATIENCE)
        late.append(time.monotonic() - when)
    assert 0 <= min(late) < 0.2


def test_the_time_of_a_run_ends_its_forks_too(slow: nw.ScriptedBackend) -> None:
    @nw.function
    def f(s: State) -> list[State]:
        forks = s.fork(3)
        forks += "go" + nw.gen("x", max_tokens=100_000)
        inner = forks[0].fork(1)[0]
        return [*forks, inner]

    with passing_time() as later:
        state = f.run(backend=slow, timeout=600)
        forks = state.ret_value
        assert isinstance(forks, list)
        assert [failure(fork) for fork in forks] == [None] * 4
        later(600)
        wait_until(lambda: all(isinstance(failure(fork), nw.TimedOut) for fork in forks))
    assert state.error() is None  # it was done: the body had returned, and nothing was left to run
    with pytest.raises(nw.TimedOut):
        forks[0]["x"]


def test_the_time_of_a_run_ends_the_runs_inside_of_it_and_theirs_may_end_before(slow: nw.ScriptedBackend) -> None:
    @nw.function
    def f(s: State) -> list[State]:
        return [endless.run(timeout=timeout) for timeout in (None, 600, 100)]

    with passing_time() as later:
        inner = f.run(backend=slow, timeout=300).ret_value
        assert isinstance(inner, list)
        later(100)
        wait_until(lambda: failure(inner[2]) is not None)
        assert [failure(state) for state in inner[:2]] == [None, None]
        later(200)
        wait_until(lambda: all(isinstance(failure(state), nw.TimedOut) for state in inner))


def test_a_body_that_is_still_busy_is_told_at_its_next_read() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "ok")
    seen: list[State] = []

    @nw.function
    def f(s: State, later: Callable[[float], None]) -> None:
        s += nw.gen("x")
        s.sync()
        seen.append(s)
        later(600)  # a long computation
        wait_until(lambda: failure(s) is not None)
        s["x"]

    with passing_time() as later, pytest.raises(nw.TimedOut, match="program f was not done"):
        f.run(later, backend=backend, timeout=600)
    assert len(seen) == 1


def test_what_was_done_in_time_stays_readable() -> None:
    with passing_time() as later:
        state = endless.run(backend=nw.ScriptedBackend(lambda prompt: "ok"), timeout=600)
        state.sync()
        later(601)
        assert state["x"] == "ok"
        state += nw.gen("y")
        with pytest.raises(nw.TimedOut):
            state["y"]


def test_each_row_of_a_batch_has_its_own_time(slow: nw.ScriptedBackend) -> None:
    results = endless.run_batch([{}, {}, {}], backend=slow, timeout=LIMIT)
    assert [type(result) for result in results] == [nw.TimedOut] * 3


def test_an_async_body_that_waits_for_something_else_ends_too() -> None:
    @nw.function
    async def f(s: State) -> None:
        await asyncio.Event().wait()

    with pytest.raises(nw.TimedOut, match=r"program f was not done within its timeout, of 0\.3 s"):
        f.run(backend=nw.ScriptedBackend(), timeout=LIMIT)


def test_an_awaited_read_ends_with_the_time_of_its_run(slow: nw.ScriptedBackend) -> None:
    @nw.function
    async def f(s: State) -> None:
        s += nw.gen("x", max_tokens=100_000)
        await s.get("x")

    with pytest.raises(nw.TimedOut, match="program f was not done within"):
        asyncio.run(f.arun(backend=slow, timeout=LIMIT))


def test_a_timeout_error_of_the_body_itself_stays_what_it_is() -> None:
    @nw.function
    async def f(s: State) -> None:
        raise TimeoutError("of something else")

    with pytest.raises(TimeoutError, match="of something else") as caught:
        f.run(backend=nw.ScriptedBackend(), timeout=60)
    assert not isinstance(caught.value, nw.TimedOut)


# -- a gen's time -----------------------------------------------------------------------------------------------------


def test_a_gen_ends_when_its_own_time_is_over_although_nobody_reads(slow: nw.ScriptedBackend) -> None:
    state = endless.run(LIMIT, backend=slow)
    wait_until(lambda: failure(state) is not None)
    error = failure(state)
    assert isinstance(error, nw.TimedOut)
    assert str(error) == "gen 'x' was not done within its timeout of 0.3 s; give it more time or fewer tokens"
    assert 's += "go" + nw.gen("x"' in error.__notes__[0]
    wait_until(lambda: not any_branch_is_open(slow))


def test_a_select_has_a_time_of_its_own_too() -> None:
    gate = threading.Event()
    backend = nw.ScriptedBackend(lambda prompt: "a" if gate.wait(PATIENCE) else "", threads=1)

    @nw.function
    def f(s: State) -> None:
        s += "go" + nw.select("x", choices=["a", "b"], timeout=600)

    with passing_time() as later:
        state = f.run(backend=backend)
        later(601)
        with pytest.raises(nw.TimedOut, match=r"select 'x' was not done within its timeout of 600 s"):
            state["x"]
    gate.set()
    backend.shutdown()


def test_the_time_of_a_gen_ends_the_forks_of_its_state_and_no_other(slow: nw.ScriptedBackend) -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        inner = forks[0].fork(1)[0]
        inner += "go" + nw.gen("y", max_tokens=100_000)
        forks[0] += "go" + nw.gen("x", max_tokens=100_000, timeout=LIMIT)
        wait_until(lambda: isinstance(failure(inner), nw.TimedOut))
        assert isinstance(failure(forks[0]), nw.TimedOut)
        assert failure(forks[1]) is None
        assert failure(s) is None

    f.run(backend=slow)


def test_a_gen_that_is_done_in_time_is_left_alone() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "ok")

    @nw.function
    def f(s: State, later: Callable[[float], None]) -> None:
        s += nw.gen("x", timeout=60) + nw.gen("y", choices=["ok"], timeout=60)
        s.sync()
        later(61)
        s += nw.gen("z", timeout=60)

    with passing_time() as later:
        assert f.run(later, backend=backend)["z"] == "ok"


@pytest.mark.parametrize("timeout", [-1, True, "1", float("nan")])
def test_a_timeout_that_is_no_number_of_seconds_is_refused_where_it_is_written(timeout: float) -> None:
    for make in (
        lambda: nw.gen("x", timeout=timeout),
        lambda: nw.select("x", choices=["a"], timeout=timeout),
        lambda: endless.run(backend=nw.ScriptedBackend(), timeout=timeout),
    ):
        with pytest.raises(nw.ProgramError, match="timeout must be a number of seconds of at least 0"):
            make()


@pytest.mark.parametrize("timeout", [float("inf"), 1e10])
def test_a_timeout_that_no_clock_counts_is_refused_where_it_is_written(timeout: float) -> None:
    for make in (
        lambda: nw.gen("x", timeout=timeout),
        lambda: nw.select("x", choices=["a"], timeout=timeout),
        lambda: endless.run(backend=nw.ScriptedBackend(), timeout=timeout),
    ):
        with pytest.raises(nw.ProgramError, match="of at most 9223372036; leave it out for no limit"):
            make()


# -- the clock itself -------------------------------------------------------------------------------------------------


class Bell:
    def __init__(self) -> None:
        self.rung: list[int] = []

    def ring(self, number: int) -> None:
        self.rung.append(number)

    def fail(self) -> None:
        raise ValueError("a bug in a callback")


class Holding:
    """Holds a clock up until it is let go, however long it takes to set the alarms of a test."""

    def __init__(self, clock: Clock) -> None:
        self._is_over = threading.Event()
        clock.at(0.0, self._hold)

    def _hold(self) -> None:
        self._is_over.wait(PATIENCE)

    def let_go(self) -> None:
        self._is_over.set()


def test_alarms_go_off_in_order_and_cancelled_ones_do_not() -> None:
    clock, bell, now = Clock(), Bell(), time.monotonic()
    holding = Holding(clock)
    clock.at(now + 0.06, bell.ring, 3)
    clock.at(now + 0.02, bell.ring, 1)
    clock.at(now + 0.04, bell.ring, 2).cancel()
    holding.let_go()
    wait_until(lambda: bell.rung[-1:] == [3])
    assert bell.rung == [1, 3]


def test_an_alarm_keeps_nothing_alive_and_one_that_fails_stops_no_other() -> None:
    clock, bell, gone = Clock(), Bell(), Bell()
    rung, now = gone.rung, time.monotonic()
    holding = Holding(clock)
    clock.at(now + 0.02, gone.ring, 1)
    del gone
    gc.collect()
    clock.at(now + 0.03, bell.fail)
    clock.at(now + 0.04, bell.ring, 2)
    holding.let_go()
    wait_until(lambda: bell.rung == [2])
    assert rung == []


def test_cancelled_alarms_do_not_pile_up() -> None:
    clock, bell = Clock(), Bell()
    kept = [clock.at(time.monotonic() + 3600, bell.ring, i) for i in range(10)]
    for i in range(5 * MANY):
        clock.at(time.monotonic() + 3600, bell.ring, i).cancel()
    assert len(kept) <= clock.num_alarms <= 2 * MANY


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_cancel_ends_the_state_and_its_forks_and_gives_their_branches_back(slow: nw.ScriptedBackend) -> None:
    @nw.function
    def f(s: State) -> list[State]:
        forks = s.fork(2)
        forks += "go" + nw.gen("x", max_tokens=100_000)
        forks.join()
        return list(forks)

    state = f.run(backend=slow)
    forks = state.ret_value
    assert isinstance(forks, list)
    state.cancel()
    for one in (state, *forks):
        with pytest.raises(nw.Cancelled, match="program f was cancelled"):
            one.text()
    wait_until(lambda: not any_branch_is_open(slow))
    state.cancel()  # again does nothing


def test_ctrl_c_in_run_ends_the_program_and_its_forks(slow: nw.ScriptedBackend) -> None:
    states: list[State] = []

    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += "go" + nw.gen("x", max_tokens=100_000)
        states.extend([s, *forks])
        press = threading.Timer(0.05, press_ctrl_c)
        press.start()
        forks[0]["x"]

    with pytest.raises(KeyboardInterrupt):
        f.run(backend=slow)
    assert [type(failure(state)) for state in states] == [KeyboardInterrupt] * 3


def test_ctrl_c_in_run_of_an_async_program_ends_it(slow: nw.ScriptedBackend) -> None:
    states: list[State] = []

    @nw.function
    async def f(s: State) -> None:
        s += "go" + nw.gen("x", max_tokens=100_000)
        states.append(s)
        press = threading.Timer(0.05, press_ctrl_c)
        press.start()
        await s.get("x")

    with pytest.raises(KeyboardInterrupt):
        f.run(backend=slow)
    assert isinstance(failure(states[0]), nw.Cancelled)


@pytest.mark.parametrize("how", ["run", "stream", "fork", "text_iter", "sync"])
def test_ctrl_c_in_a_read_outside_of_the_body_ends_what_was_waited_for(slow: nw.ScriptedBackend, how: str) -> None:
    @nw.function
    def forked(s: State) -> State:
        fork, other = s.fork(2)
        fork += "go" + nw.gen("x", max_tokens=100_000)
        other += nw.gen("y", max_tokens=100_000)
        return fork

    if how == "fork":
        whole = forked.run(backend=slow)
        state = whole.ret_value
    else:
        state = endless.stream(backend=slow) if how == "stream" else endless.run(backend=slow)
    reads: dict[str, Callable[[], object]] = {"text_iter": lambda: list(state.text_iter("x")), "sync": state.sync}
    with pytest.raises(KeyboardInterrupt):
        interrupted(reads.get(how, lambda: state["x"]))
    with pytest.raises(nw.Cancelled, match="was cancelled, by Ctrl-C where it was waited for"):
        state["x"]
    if how == "fork":
        assert failure(whole) is None, "and of the others nobody said anything"
        whole.cancel()
    wait_until(lambda: not any_branch_is_open(slow))


def test_ctrl_c_that_a_body_catches_ends_nothing(slow: nw.ScriptedBackend) -> None:
    @nw.function
    def f(s: State) -> State:
        fork = s.fork(1)[0]
        fork += "go" + nw.gen("x", max_tokens=100_000)
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda: fork["x"])
        return fork

    fork = f.run(backend=slow).ret_value
    assert failure(fork) is None
    fork.cancel()


INTERRUPTED = """
import os, signal, sys, threading, time, traceback
import niwaki as nw

def press_ctrl_c():
    main = threading.main_thread().ident
    names = set()
    while not {"wait", "__getitem__"} <= names:
        names = {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])}
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

@nw.function
def f(s):
    s += "the cat" + nw.gen("x", max_tokens=98_000, ignore_eos=True)

with nw.Engine(sys.argv[1], kv_tokens=100_000) as engine:
    state = f.run(backend=engine)
    next(state.text_iter("x"))
    threading.Thread(target=press_ctrl_c, daemon=True).start()  # once the read waits
    try:
        state["x"]
    except KeyboardInterrupt:
        pass
    while engine.stats()["requests_running"]:
        pass
    print(int(engine.stats()["generated_tokens"]), state.error())
"""


def test_sigint_in_a_read_ends_the_generation_in_the_engine(tmp_path: Path) -> None:
    model = make_model(tmp_path / "long", max_position_embeddings=99_000)
    command = [sys.executable, "-c", INTERRUPTED, str(model)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert child.returncode == 0, child.stderr
    generated, _, error = child.stdout.partition(" ")
    assert int(generated) < 98_000
    assert error == "program f was cancelled, by Ctrl-C where it was waited for\n"


@pytest.mark.parametrize("is_async", [False, True])
def test_ctrl_c_in_run_batch_ends_the_rows_that_run_and_starts_no_other(
    slow: nw.ScriptedBackend, is_async: bool
) -> None:
    states: list[State] = []
    ended: list[BaseException] = []

    def begin(s: State) -> None:
        s += "go" + nw.gen("x", max_tokens=100_000)
        states.append(s)
        if len(states) == 2:
            threading.Timer(0.05, press_ctrl_c).start()

    @nw.function
    def f(s: State, i: int) -> None:
        begin(s)
        try:
            s["x"]
        except BaseException as error:
            ended.append(error)
            raise

    @nw.function
    async def af(s: State, i: int) -> None:
        begin(s)
        try:
            await s.get("x")
        except BaseException as error:
            ended.append(error)
            raise

    with pytest.raises(KeyboardInterrupt):
        (af if is_async else f).run_batch([(i,) for i in range(10)], num_threads=2, backend=slow)
    wait_until(lambda: len(ended) == 2)
    assert len(states) == 2
    assert [type(failure(state)) for state in states] == [nw.Cancelled] * 2


def test_leaving_a_batch_early_cancels_the_rows_that_run() -> None:
    gate = threading.Event()

    def answer(prompt: str) -> str:
        return "done" if prompt.startswith("0") else LONG

    backend = nw.ScriptedBackend(answer, threads=4, delay=0.1)
    ended: list[BaseException] = []
    together = threading.Barrier(3)  # a row that had not begun when the batch is left would never run

    @nw.function
    def f(s: State, i: int) -> None:
        together.wait(PATIENCE)
        try:
            s += f"{i}: " + nw.gen("x", max_tokens=100_000)
            s["x"]
        except BaseException as error:
            ended.append(error)
            gate.set()
            raise

    for result in f.run_batch([(i,) for i in range(3)], num_threads=3, backend=backend, generator_style=True):
        assert isinstance(result, State)
        break
    del result
    assert gate.wait(PATIENCE)
    wait_until(lambda: len(ended) == 2)
    assert {type(error) for error in ended} == {nw.Cancelled}
    wait_until(lambda: not any_branch_is_open(backend))
    backend.shutdown()


# -- what no time-out counts ------------------------------------------------------------------------------------------


@nw.function
def brief(s: State, limit: float | None = None) -> None:
    s += "go" + nw.gen("x", timeout=limit)


@nw.function
async def brief_async(s: State) -> None:
    s += "go" + nw.gen("x")
    await s.get("x")


@pytest.fixture
def late() -> Iterator[nw.ScriptedBackend]:
    """Answers behind twice the time that the programs have."""

    def answer(prompt: str) -> str:
        time.sleep(2 * LIMIT)
        return "done"

    backend = nw.ScriptedBackend(answer, threads=1)
    yield backend
    backend.shutdown()


@pytest.mark.parametrize(("of_run", "of_gen"), [(LIMIT, None), (None, LIMIT)])
def test_time_stands_still_while_the_process_gets_ready(
    late: nw.ScriptedBackend, of_run: float | None, of_gen: float | None
) -> None:
    with readiness:
        state = brief.run(of_gen, backend=late, options={} if of_run is None else {"timeout": of_run})
        assert state["x"] == "done"


def test_the_time_of_an_async_body_stands_still_too(late: nw.ScriptedBackend) -> None:
    with readiness:
        assert brief_async.run(backend=late, timeout=LIMIT)["x"] == "done"


def test_time_goes_on_when_the_process_is_ready(slow: nw.ScriptedBackend) -> None:
    with readiness:
        state = endless.run(backend=slow, timeout=LIMIT)
        time.sleep(2 * LIMIT)
        assert failure(state) is None
    with pytest.raises(nw.TimedOut):
        state["x"]


def test_what_several_threads_make_ready_at_once_counts_once() -> None:
    clock = Readiness()
    began = time.monotonic()
    with clock, clock:
        time.sleep(0.01)
    clock.end()  # one too many, as an interrupt may leave it
    seconds = clock.seconds()
    assert 0.01 <= seconds <= time.monotonic() - began
    assert clock.seconds() == seconds
