"""A script beside an engine: what follows a call is in the very next step, whoever carries the script out."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import niwaki as nw
from niwaki.lang.program import Program
from niwaki.lang.state import State
from niwaki.runtime.api import Pending, SamplingParams, Segment
from niwaki.runtime.api.script import Choose, Generate, Lane, Say, Script, Split
from niwaki.runtime.engine import Engine
from niwaki.runtime.host.local_branch import LocalBranch
from niwaki.runtime.link import frames
from niwaki.runtime.link import lanes as lanes_module
from niwaki.runtime.link import orders as orders_module
from niwaki.runtime.link.engine_client import EngineClient
from niwaki.runtime.link.engine_process import EngineProcess
from niwaki.runtime.link.frames import Order, Report, ScriptReport
from niwaki.runtime.link.lanes import Lanes
from niwaki.runtime.link.orders import Orders
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import PATIENCE, wait_until
from tests.runtime.server.conftest import LONG_TOKENS
from tests.runtime.server.test_scripts import VALUES, decide, judge
from tests.runtime.server.test_scripts import told as results

CALLS, TOKENS = 6, 3
PARAMS = SamplingParams(max_new_tokens=TOKENS, temperature=0, ignore_eos=True)


def chain(first_call: int) -> Lane:
    """Calls of one branch, each behind the text of the one before."""
    ops: list[Say | Generate] = []
    for call in range(first_call, first_call + CALLS):
        ops += [Say(("\nand then", call - 1)), Generate(call, PARAMS)]
    return tuple(ops)


# Beside the chain a branch of one long call, so that the engine is never idle: a step that the chain misses is counted.
SLOW = Generate(1, replace(PARAMS, max_new_tokens=CALLS * TOKENS))
BESIDE = Script(((Say(("the cat",)), Generate(0, PARAMS), Split(1), Split(2)), (SLOW,), chain(2)[1:]), is_over=True)


class Told:
    """Reports, until the last one."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.is_over: Pending[None] = Pending()

    def __call__(self, report: Report) -> None:
        self.reports.append(report)
        if isinstance(report, frames.ScriptOver):
            self.is_over.succeed(None)

    def post(self, message: Report, *, flush: bool = True) -> None:
        self(message)

    def flush(self) -> None:
        pass

    def texts(self) -> dict[int, str]:
        self.is_over.result(60)
        return {report.call: report.text for report in self.reports if isinstance(report, frames.CallEnded)}


def steps_of(engine: Engine, start: Callable[[], object], wait: Callable[[], object]) -> float:
    """Steps until it has ended, of what is started between two steps."""
    before = engine.stats()["steps"]
    engine.backend._between_steps(start)
    wait()
    return engine.stats()["steps"] - before


def test_what_follows_a_call_is_in_the_next_step(engine: Engine) -> None:
    told = Told()
    lanes = Lanes(engine.backend, BESIDE, "", told)
    assert steps_of(engine, lanes.start, told.texts) == TOKENS * (1 + CALLS)
    assert len(told.texts()) == CALLS + 2
    lanes.cancel()


def test_in_the_engine_process_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.backend, "after_step", engine.backend.after_step)  # which the orders will set
    told = Told()
    orders = Orders(engine.backend, told)
    order = frames.RunScript(7, frames.plain(BESIDE), "", ())
    assert steps_of(engine, lambda: orders.take(order), told.texts) == TOKENS * (1 + CALLS)
    assert {report.id for report in told.reports if not isinstance(report, frames.Beat | frames.Loaded)} == {7}
    orders.take(frames.Cancel(7))
    orders.close()


def test_a_compiled_program_in_process_loses_no_step_to_its_interpreter(engine: Engine) -> None:
    @nw.function
    def beside(s: State) -> None:
        s += "the cat" + nw.gen("first")
        forks = s.fork(2)
        forks[0] += nw.gen("long", max_tokens=CALLS * TOKENS)
        for call in range(CALLS):
            forks[1] += f"\nand then {call}:" + nw.gen(f"x{call}")
        forks.join()

    made: list[State] = []
    options = {"backend": engine, "temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "heal": False}
    run = beside.compile().run
    steps = steps_of(engine, lambda: made.append(run(options=options)), lambda: made[0].text())
    assert steps == TOKENS * (1 + CALLS)


def test_a_long_text_is_tokenized_on_another_thread_and_comes_out_the_same(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "QUICK_CHARS", 20)
    long = " and the mat sat on the log"
    ops = (Say(("the cat",)), Generate(0, PARAMS), Say((long,)), Generate(1, PARAMS))
    choose = (*ops, Choose(2, ("a" + long, "b" + long), "exact", heal=True), Say((2,)), Generate(3, PARAMS))
    script = Script((choose,), is_over=True)
    put: list[Callable[[], None]] = []
    found: list[dict[int, str]] = []
    with ThreadPoolExecutor(1) as pool:

        def apart(work: Callable[[], None]) -> None:
            put.append(work)
            pool.submit(work)

        for way in (None, apart):
            told = Told()
            lanes = Lanes(engine.backend, script, "", told, apart=way)
            lanes.start()
            found.append(told.texts())
            lanes.cancel()
    assert found[0] == found[1]
    assert set(found[0]) == {0, 1, 2, 3}
    assert len(put) == 3, "the long text, the long choices, and what was chosen"


def test_a_long_text_of_a_branch_that_starts_behind_a_call_is_tokenized_on_another_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "QUICK_CHARS", 20)
    long = " and the mat sat on the log"
    put: list[Callable[[], None]] = []
    ops = (Say(("the cat",)), Generate(0, PARAMS), Split(1), Generate(1, PARAMS))
    told = Told()
    with ThreadPoolExecutor(1) as pool:

        def apart(work: Callable[[], None]) -> None:
            put.append(work)
            pool.submit(work)

        lanes = Lanes(engine.backend, Script((ops, (Say((long,)), Generate(2, PARAMS))), True), "", told, apart=apart)
        lanes.start()
        assert set(told.texts()) == {0, 1, 2}
    lanes.cancel()
    assert len(put) == 1


LONG = " and the mat sat on the log"
LONG_SAY = (Say((LONG,)), Generate(0, PARAMS))
SLOW_ORDERS = {
    "text": frames.RunScript(7, frames.plain(Script((LONG_SAY,), True)), "", ()),
    "of a branch": frames.RunScript(7, frames.plain(Script(((Say(("the cat",)), Split(1)), LONG_SAY), True)), "", ()),
    "choices": frames.Weigh(7, 1, 0, frames.packed(np.array([5, 6], np.int32)), "", 0, (LONG, "a"), False, False, 1),
}


@pytest.mark.parametrize("order", SLOW_ORDERS.values(), ids=SLOW_ORDERS)
def test_a_long_text_of_an_order_is_tokenized_where_other_orders_do_not_wait_for_it(
    order: Order, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.backend, "after_step", engine.backend.after_step)  # which the orders will set
    for module in (lanes_module, orders_module):
        monkeypatch.setattr(module, "QUICK_CHARS", 20)
    tokenizing: list[threading.Thread] = []
    encode = engine.tokenizer.encode

    def noted(segments: Sequence[Segment], *, at_start: bool = False) -> list[int]:
        if any(LONG in segment.text for segment in segments):
            tokenizing.append(threading.current_thread())
        return encode(segments, at_start=at_start)

    monkeypatch.setattr(engine.tokenizer, "encode", noted)
    told = Told()
    orders = Orders(engine.backend, told)
    orders.take(order)
    wait_until(lambda: any(isinstance(one, frames.ScriptOver | frames.Weighed) for one in told.reports))
    assert tokenizing
    assert threading.current_thread() not in tokenizing
    orders.take(frames.Cancel(7))
    orders.close()


def test_what_is_cancelled_is_told_and_gives_its_pages_back(engine: Engine) -> None:
    told = Told()
    lanes = Lanes(engine.backend, BESIDE, "", told)

    def start_and_cancel() -> None:
        lanes.start()
        lanes.cancel()

    engine.backend._between_steps(start_and_cancel)
    assert told.texts() == {}
    assert [(report.call, report.kind) for report in told.reports if isinstance(report, frames.CallFailed)] == [
        (0, "Cancelled")
    ]


@pytest.mark.parametrize(("most", "in_all"), [(50, 1000), (1000, 50)])
def test_a_script_says_no_text_again_for_ever(
    engine: Engine, most: int, in_all: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number in its body stands for a whole text of a call."""
    monkeypatch.setattr(lanes_module, "MOST_QUOTED", most)
    monkeypatch.setattr(lanes_module, "MOST_QUOTED_IN_ALL", in_all)
    told = Told()
    first = (Say(("the cat",)), Generate(0, PARAMS), Split(1))
    script = Script(((*first, Say((0,) * 60), Generate(1, PARAMS)), (Say((0,)), Generate(2, PARAMS))), is_over=True)
    engine.backend._between_steps(Lanes(engine.backend, script, "", told).start)
    assert set(told.texts()) == {0, 2}
    (failed,) = [report for report in told.reports if isinstance(report, frames.CallFailed)]
    assert (failed.call, failed.kind) == (1, "CapacityError")
    assert told.reports[-1] == frames.ScriptOver(0, None)


def test_a_lane_that_fails_behind_another_which_starts_from_it_takes_that_one_not_along(engine: Engine) -> None:
    told = Told()
    too_long = Generate(1, replace(PARAMS, max_new_tokens=100_000))
    script = Script(((Say(("the cat",)), Split(1), too_long), (Generate(2, PARAMS),)), is_over=True)
    engine.backend._between_steps(Lanes(engine.backend, script, "", told).start)
    assert set(told.texts()) == {2}
    assert [report.call for report in told.reports if isinstance(report, frames.CallFailed)] == [1]


def test_a_lane_whose_last_text_does_not_fit_tells_no_tokens_without_it(engine: Engine) -> None:
    told = Told()
    script = Script(((Say(("the cat",)), Generate(0, PARAMS), Say(("the cat " * 4000,))),), is_over=True)
    engine.backend._between_steps(Lanes(engine.backend, script, "", told).start)
    assert set(told.texts()) == {0}
    assert told.reports[-1] == frames.ScriptOver(0, None)


def test_what_a_script_leaves_open_is_told_before_the_call_that_ends_it(engine: Engine) -> None:
    told: list[ScriptReport] = []
    is_over: Pending[None] = Pending()

    def tell(report: ScriptReport) -> None:
        told.append(report)
        if isinstance(report, frames.ScriptOver):
            is_over.succeed(None)

    script = Script(((Say(("the cat",)), Split(1), Generate(0, PARAMS)), ()), is_over=False)
    lanes = Lanes(engine.backend, script, "", tell)
    engine.backend._between_steps(lanes.start)
    is_over.result(60)
    kinds = [type(report) for report in told]
    assert kinds.index(frames.LaneEnded) < kinds.index(frames.ScriptBegun), "lane 1 has nothing to wait for"
    assert [report.lane for report in told if isinstance(report, frames.LaneEnded)] == [1, 0]
    assert kinds[-2:] == [frames.CallEnded, frames.ScriptOver]
    taken, left = lanes.take(1), lanes._lanes[0].branch
    lanes.cancel()
    assert isinstance(taken, LocalBranch)
    assert isinstance(left, LocalBranch)
    assert (taken.is_closed, left.is_closed) == (False, True)
    engine.backend.close(taken)


class Loop:
    """A link to orders on an engine here, both ways at once."""

    def __init__(self, engine: Engine) -> None:
        self.client = EngineClient(engine.tokenizer)
        self.orders = Orders(engine.backend, self)
        self.scripts = 0

    def post(self, message: Order | Report, *, flush: bool = True) -> None:
        if isinstance(message, Order):
            self.scripts += isinstance(message, frames.RunScript)
            self.orders.take(message)
        else:
            self.client.receive([message])

    def flush(self) -> None:
        pass


def test_where_each_call_may_go_to_another_engine_the_client_moves_the_lanes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.backend, "after_step", engine.backend.after_step)  # which the orders will set
    loop = Loop(engine)
    texts = []
    for keeps_branches in (True, False):
        loop.client.connect(loop, frames.loaded_by(engine), keeps_branches=keeps_branches)
        told = Told()
        there = loop.client.run_script(BESIDE, "", told)
        texts.append(told.texts())
        there.cancel()
    assert texts[0] == texts[1]
    assert (len(texts[0]), loop.scripts) == (CALLS + 2, 1)
    loop.orders.close()


@pytest.fixture(scope="module")
def process(long_folder: Path) -> Iterator[EngineProcess]:
    with EngineProcess(long_folder, {"kv_tokens": LONG_TOKENS + 512}) as started:
        yield started


@pytest.mark.parametrize(("program", "names"), [(judge, VALUES["judge"]), (decide, VALUES["decide"])])
def test_a_script_on_another_process_gives_what_the_program_gives(
    program: Program, names: list[str], process: EngineProcess, engine: Engine
) -> None:
    """Branches that it leaves open are gone on with there."""
    expected = results(program, engine, names, "Why the cat?")
    with serving(process) as url, nw.RuntimeEndpoint(url) as endpoint:
        assert results(program.compile(), endpoint, names, "Why the cat?") == expected


def test_when_the_engine_process_dies_so_does_the_script(process: EngineProcess) -> None:
    @nw.function
    def endless(s: State) -> None:
        s += "the cat" + nw.gen("first", max_tokens=2)
        s += nw.gen("x", max_tokens=LONG_TOKENS, ignore_eos=True, timeout=PATIENCE)

    with serving(process) as url, nw.RuntimeEndpoint(url) as endpoint:
        state = endless.compile().run(backend=endpoint)
        assert isinstance(state["first"], str)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(nw.EngineStopped):
            state["x"]
