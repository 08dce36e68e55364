"""The engine in a process of its own: the same answers, and an end of it that everybody is told of."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest

import niwaki as nw
from niwaki.lang.state import State
from niwaki.runtime.api import (
    Backend,
    Choices,
    ConstraintError,
    EngineStopped,
    ModelError,
    Regex,
    RequestError,
    SamplingParams,
    Segment,
)
from niwaki.runtime.engine import Engine
from niwaki.runtime.link import engine_process, frames
from niwaki.runtime.link.engine_client import EngineClient, EngineLink
from niwaki.runtime.link.engine_process import EngineProcess
from niwaki.runtime.link.link import Link
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import PATIENCE, wait_until
from tests.runtime.server.conftest import LONG_TOKENS

GREEDY = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
STARTING_SECONDS = 400  # of a new engine on a busy machine
LONG = SamplingParams(max_new_tokens=LONG_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def process(long_folder: Path) -> Iterator[EngineProcess]:
    with EngineProcess(long_folder, {"kv_tokens": LONG_TOKENS + 512}) as started:
        yield started


def test_its_counters_are_there_before_anybody_can_ask(long_folder: Path) -> None:
    with EngineProcess(long_folder, {"kv_tokens": 4096}) as started:
        usage = started.backend.usage()
    assert (usage["requests_running"], usage["requests_waiting"]) == (0, 0)
    assert usage["pages_free"] > 0


def test_what_it_did_to_be_warm_is_not_counted(long_folder: Path) -> None:
    with EngineProcess(long_folder, {"kv_tokens": 4096}) as started:
        usage = started.backend.usage()
    totals = {name: count for name, count in usage.items() if not name.startswith(("pages_", "requests_"))}
    assert {name for name, count in totals.items() if count} == set()
    assert {"steps", "finished", "generated_tokens", "grammars_compiled"} < set(totals)


def test_all_of_its_threads_give_way_to_the_process_that_answers(process: EngineProcess) -> None:
    assert process.pid is not None
    expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + engine_process.NICENESS)
    threads = [thread.id for thread in psutil.Process(process.pid).threads()]
    niceness = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    assert min(niceness) == expected


def test_who_asks_as_soon_as_it_is_there_is_answered(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the threads of a server do when the next engine has come."""
    answered: list[bool] = []

    class Asking(EngineClient):
        def connect(self, link: EngineLink, loaded: frames.Loaded, *, keeps_branches: bool = True) -> None:
            super().connect(link, loaded, keeps_branches=keeps_branches)
            asking = threading.Thread(target=lambda: answered.append(self.flush()), daemon=True)
            asking.start()
            asking.join(PATIENCE)

    monkeypatch.setattr(engine_process, "EngineClient", Asking)
    with EngineProcess(toy_folder, {"kv_tokens": 512}):
        assert answered == [True]


def ids_of(process: EngineProcess, text: str) -> TokenIds:
    return np.array(process.tokenizer.encode([Segment(text)], at_start=True), dtype=np.int32)


def test_what_it_generates_is_what_an_engine_here_generates(process: EngineProcess, engine: Engine) -> None:
    ids = ids_of(process, "the cat sat")
    there = process.backend.start(ids, GREEDY)
    here = engine.backend.start(ids, GREEDY)
    assert there.result(60)[0].token_ids == here.result(60)[0].token_ids
    assert "".join(d.text for d in there.deltas()) == "".join(d.text for d in here.deltas()) == here.result()[0].text


def test_what_nobody_reads_as_it_grows_is_told_once_at_its_end(process: EngineProcess) -> None:
    ids = ids_of(process, "the cat sat")
    whole, streamed = (process.backend.start(ids, GREEDY, streams=streams) for streams in (False, True))
    assert whole.result(60)[0].token_ids == streamed.result(60)[0].token_ids
    assert len(list(whole.deltas())) <= 1
    assert "".join(delta.text for delta in streamed.deltas()) == streamed.result()[0].text


def test_a_constraint_behind_a_call_of_a_script_keeps_nobody_waiting(process: EngineProcess, engine: Engine) -> None:
    """It is sent from the thread that would bring the news that it is compiled."""

    @nw.function
    def two(s: State) -> None:
        s += "the cat " + nw.gen("x", max_tokens=3, ignore_eos=True)
        s += f"{s['x']} is " + nw.gen("y", regex="[ab]{3}c{1,4}d")

    with serving(process) as url, nw.RuntimeEndpoint(url) as endpoint:
        state = two.compile().run(options={"backend": endpoint, "temperature": 0}, timeout=120)
        assert state.text() == two.run(options={"backend": engine, "temperature": 0}).text()


def healed(backend: Backend) -> tuple[object, ...]:
    """Where a branch stands whose end was cut anew, before a generation and by what was scored."""
    branch = backend.open()
    backend.append(branch, [Segment("the cat sat on ")])
    (output,) = backend.generate(branch, [], replace(GREEDY, max_new_tokens=3, heal=True)).result(60)
    ids = list(branch.token_ids)
    scores = backend.score(branch, [Segment(" and the ")], ["dog", "mat"], heal=True, unconditional=True).result(60)
    told = [[token.text for token in score.logprobs] for score in scores]
    assert told == [[" dog"], [" mat"]] * 2
    backend.append(branch, [Segment("dog")])
    assert list(branch.token_ids)[: len(ids)] == ids, "what the model wrote stays"
    backend.close(branch)
    return ids, list(branch.token_ids), output.text


def test_branches_stand_where_they_stand_in_an_engine_here(process: EngineProcess, engine: Engine) -> None:
    stands = []
    for backend in (process.backend, engine.backend):
        branch = backend.open(namespace="a")
        backend.append(branch, [Segment("the cat sat on")])
        backend.generate(branch, [Segment(" the")], GREEDY).result(60)
        twin = backend.fork(branch)
        output = backend.generate(twin, [Segment(" mat")], SamplingParams(max_new_tokens=4, temperature=0)).result(60)
        scores = backend.score(branch, [Segment(" and")], [" a", " the dog"]).result(60)
        texts = output[0].text, [score.text for score in scores]
        assert output[0].cached_tokens > 10
        assert scores[0].logprobs[0].logprob is not None
        stands.append((list(branch.token_ids), list(twin.token_ids), *texts, *healed(backend)))
        backend.close(branch)
        backend.close(twin)
    assert stands[0] == stands[1]


def test_the_tree_over_there_can_be_looked_at_and_emptied(process: EngineProcess) -> None:
    process.backend.start(ids_of(process, "the cat sat"), GREEDY, "looked at").result(60)
    nodes = process.backend.outline(10, "looked at")
    assert sum(node.num_tokens for node in nodes) > 3
    assert process.backend.flush()
    assert process.backend.outline(10, "looked at") == ()


def test_a_constraint_is_refused_at_once_and_a_good_one_is_kept(process: EngineProcess) -> None:
    ids = ids_of(process, "x")
    with pytest.raises(ConstraintError, match="missing"):
        process.backend.start(ids, SamplingParams(constraint=Regex("a{3")))
    chosen = process.backend.start(ids, SamplingParams(max_new_tokens=9, constraint=Choices(("the cat", "a dog"))))
    assert chosen.result(60)[0].text in ("the cat", "a dog")


def test_an_order_that_it_cannot_read_is_refused_and_the_engine_lives(process: EngineProcess) -> None:
    """Past the types that the client declares."""
    pid, client = process.pid, process.backend
    with pytest.raises(RequestError, match="cannot read the order"):
        client.score(client.open(), [], [3]).result(60)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="cannot read the order"):
        client.outline(1.5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="cannot be sent"):
        client.outline(2**70)
    assert client.start(np.array([5, 6], np.int32), GREEDY).result(60)
    assert process.pid == pid


def test_what_is_cancelled_ends_there_too(process: EngineProcess) -> None:
    generation = process.backend.start(ids_of(process, "the"), LONG)
    next(iter(generation.deltas(60)))
    generation.cancel()
    with pytest.raises(nw.Cancelled):
        generation.result(60)


def test_programs_run_on_it(process: EngineProcess) -> None:
    @nw.function
    def two(s: State) -> None:
        s += "the "
        forks = s.fork(2)
        forks += nw.gen("word", choices=["cat", "dog"])
        forks.join()

    words: Any = two.run(backend=process.backend)["word"]
    assert set(words) <= {"cat", "dog"}
    assert len(words) == 2


def test_nothing_of_the_bodies_of_messages_is_lost_on_the_way() -> None:
    params = SamplingParams(
        seed=3, stop=("a", "b"), logit_bias=((1, 2.0),), constraint=Choices(("x", "y")), top_logprobs_num=2
    )
    assert frames.meant(frames.plain(params)) == params
    failed = frames.failed(7, ConstraintError("so"))
    assert isinstance(frames.error_of(failed), ConstraintError)
    assert "secret" not in frames.failed(7, RuntimeError("secret")).message


def test_a_model_that_is_not_there_is_told_by_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError), EngineProcess(tmp_path / "nowhere"):
        pass


def test_when_it_is_killed_every_request_is_answered_and_it_comes_back(
    process: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_restart = threading.Event()
    restart = process._restart
    monkeypatch.setattr(process, "_restart", lambda: may_restart.wait(PATIENCE) and restart())
    monkeypatch.setattr(process, "_hanging_seconds", 2 * PATIENCE)
    monkeypatch.setattr("niwaki.runtime.link.engine_client.ALIVE_SECONDS", 2 * PATIENCE)
    body = {"prompt": "the cat", "max_tokens": 480, "ignore_eos": True}
    answers: list[httpx2.Response] = []
    branch = process.backend.open()
    process.backend.generate(branch, [Segment("the cat")], GREEDY).result(60)
    before = list(branch.token_ids)
    with serving(process, ServerConfig(port=0)) as url, httpx2.Client(base_url=url, timeout=60) as client:
        asking = [
            threading.Thread(target=lambda: answers.append(httpx2.post(f"{url}/v1/completions", json=body, timeout=60)))
            for _ in range(4)
        ]
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that nothing ends before it is killed, however fast the machine
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            for thread in asking:
                thread.start()
            wait_until(lambda: "niwaki_sequences_in_flight 5.0" in client.get("/metrics").text)
            os.kill(pid, signal.SIGKILL)
            lines = [line for line in stream.iter_lines() if line]
            for thread in asking:
                thread.join(60)
        assert "overloaded" in lines[-2]
        assert lines[-1] == "data: [DONE]"
        assert [answer.status_code for answer in answers] == [503] * 4
        assert answers[0].headers["retry-after"] == "1"
        assert "engine stopped" in answers[0].json()["error"]["message"]
        assert 'niwaki_failed_sequences_total{error="EngineStopped"} 5.0' in client.get("/metrics").text
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=body).status_code == 503
        may_restart.set()
        wait_until(lambda: process.backend.is_alive, STARTING_SECONDS)
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        assert client.post("/v1/completions", json=body | {"max_tokens": 2}).status_code == 200
    assert process.pid != pid
    # The branch's text stands here: the new engine computes it again, and goes on.
    output = process.backend.generate(branch, [Segment(" and")], GREEDY).result(60)[0]
    assert output.prompt_tokens > len(before)
    assert list(branch.token_ids)[: len(before)] == before


def test_an_engine_that_dies_too_often_stays_away(toy_folder: Path) -> None:
    with EngineProcess(toy_folder, {"kv_tokens": 1024}, max_restarts=0) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not process.backend.is_alive)
        with pytest.raises(EngineStopped, match="not running"):
            process.backend.start(ids_of(process, "x"), GREEDY)
        assert process.num_restarts == 0


def test_when_the_system_starts_no_process_it_is_tried_again(
    process: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of descriptors, of memory or of threads, which others give back."""
    start, start_threads = subprocess.Popen, Link.start
    refused: list[Exception] = []

    def refusing(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        if not refused:
            refused.append(OSError(errno.EMFILE, "Too many open files"))
            raise refused[-1]
        return start(*given, **options)

    def refusing_threads(link: Link[Any, Any]) -> None:
        if len(refused) == 1:
            refused.append(RuntimeError("can't start new thread"))
            raise refused[-1]
        start_threads(link)

    monkeypatch.setattr(engine_process, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(process, "_restarted_at", deque())
    monkeypatch.setattr(subprocess, "Popen", refusing)
    monkeypatch.setattr(Link, "start", refusing_threads)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process._watching.is_alive() or (len(refused) == 2 and process.backend.is_alive))
    assert process._watching.is_alive()
    assert process.pid != pid
    assert process.backend.start(ids_of(process, "x"), GREEDY).result(60)
    assert process.num_restarts == 1


def test_one_that_is_being_started_again_when_all_ends_is_not_waited_for(
    toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()
    children: list[engine_process._Child] = []
    connected: list[engine_process._Child] = []

    class Late(engine_process._Child):
        """Made while all ends."""

        def __init__(self, *given: Any) -> None:
            if children:
                begun.set()
                assert ended.wait(PATIENCE)
            super().__init__(*given)
            children.append(self)

        def connect(self, client: EngineClient) -> frames.Loaded:
            connected.append(self)
            return super().connect(client)

    monkeypatch.setattr(engine_process, "_Child", Late)
    with EngineProcess(toy_folder, {"kv_tokens": 1024}) as process:
        is_over = process._is_over

        def end() -> None:
            threading.Event.set(is_over)
            ended.set()

        monkeypatch.setattr(is_over, "set", end)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert begun.wait(PATIENCE)
    first, second = children
    assert connected == [first]
    assert second.process.poll() is not None


def test_one_that_is_stopped_is_not_healthy_and_one_that_hangs_is_replaced(
    process: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("niwaki.runtime.link.engine_client.ALIVE_SECONDS", 1.2)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    waiting = process.backend.start(ids_of(process, "x"), GREEDY)
    wait_until(lambda: not process.backend.is_alive)
    monkeypatch.setattr(process, "_hanging_seconds", 1.5)
    with pytest.raises(EngineStopped):
        waiting.result(60)
    monkeypatch.undo()
    wait_until(lambda: process.backend.is_alive, STARTING_SECONDS)
    assert process.pid != pid


def test_without_its_parent_it_ends(toy_folder: Path) -> None:
    script = (
        "import os, sys, signal\n"
        "from pathlib import Path\n"
        "from niwaki.runtime.link.engine_process import EngineProcess\n"
        f"with EngineProcess(Path({str(toy_folder)!r}), {{'kv_tokens': 1024}}) as process:\n"
        "    print(process.pid, 'torch' in sys.modules, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    pid, has_torch = done.stdout.split()
    assert has_torch == "False"  # the server's own process stays small
    wait_until(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
