"""The end of a server: what runs may end, new work is refused, and who outlives that is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from niwaki.lang.remote_wire import params_json
from niwaki.radix.outline import OutlineNode
from niwaki.runtime.api import Regex, SamplingParams
from niwaki.runtime.engine import Engine
from niwaki.runtime.server import serve
from niwaki.runtime.server.branches import Branches, HeldBranch
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.listen import bind, url_of
from niwaki.runtime.server.serve import make_server, serving
from tests.lang.waiting import PATIENCE, wait_until
from tests.runtime.server.conftest import compiling_held, held, wait_until_idle

LONG = {"prompt": "the cat", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


def test_draining_refuses_new_work_and_finishes_the_old(toy_folder: Path) -> None:
    config = ServerConfig(port=0, drain_seconds=60)
    answers: list[httpx2.Response] = []

    def ask(url: str) -> None:
        answers.append(httpx2.post(f"{url}/v1/completions", json=LONG, timeout=120))

    def come_late(url: str, release: Callable[[], None]) -> None:
        wait_until(lambda: httpx2.get(f"{url}/ready").status_code == 503)
        ask(url)
        release()

    with Engine(toy_folder, kv_tokens=2048) as engine, held(engine) as release:
        with serving(engine, config) as url:
            first = threading.Thread(target=ask, args=(url,))
            first.start()
            wait_until(lambda: bool(engine.stats()["requests_running"]))
            assert httpx2.get(f"{url}/ready").status_code == 200
            late = threading.Thread(target=come_late, args=(url, release))
            late.start()
        for thread in (first, late):
            thread.join()
    assert [answer.status_code for answer in answers] == [503, 200]
    assert answers[1].json()["usage"]["completion_tokens"] == 500


def test_who_outlives_the_drain_is_told(toy_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(port=0, drain_seconds=0)
    lines: list[str] = []
    with Engine(toy_folder, kv_tokens=2048) as engine, held(engine):

        def read(url: str) -> None:
            with httpx2.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as answer:
                lines.extend(answer.iter_lines())

        with serving(engine, config) as url:
            asking = threading.Thread(target=read, args=(url,))
            asking.start()
            wait_until(lambda: bool(engine.stats()["requests_running"]))
        asking.join()
    written = [line for line in lines if line]
    assert written[-1] == "data: [DONE]"
    error = json.loads(written[-2].removeprefix("data: "))["error"]
    assert error["code"] == "overloaded"
    why = "the server is shutting down, and the 0 s that it leaves to requests are over"
    assert error["message"] == f"{why}; try again"
    assert [record.getMessage() for record in caplog.records] == [f"1 sequences were cut off: {why}"]


def test_a_script_that_still_compiles_when_the_drain_is_over_is_told(toy_folder: Path) -> None:
    config = ServerConfig(port=0, drain_seconds=0)
    answers: list[httpx2.Response] = []
    params = params_json(SamplingParams(max_new_tokens=8, constraint=Regex("(cut|off)+")))
    ops = [{"do": "say", "parts": ["a"]}, {"do": "generate", "call": 0, "params": params}]

    def ask(url: str) -> None:
        answers.append(httpx2.post(f"{url}/scripts", json={"branches": [ops], "is_over": True}, timeout=60))

    with Engine(toy_folder, kv_tokens=2048) as engine, compiling_held() as begun:
        with serving(engine, config) as url:
            asking = threading.Thread(target=ask, args=(url,))
            asking.start()
            assert begun.acquire(timeout=60)
        asking.join()
        assert not begun.acquire(blocking=False)
    (answer,) = answers
    assert answer.status_code == 503
    why = "the server is shutting down, and the 0 s that it leaves to requests are over; try again"
    assert answer.json()["error"]["message"] == why


def test_who_still_compiles_or_waits_for_that_when_the_drain_is_over_is_told(toy_folder: Path) -> None:
    config = ServerConfig(port=0, drain_seconds=0)
    answers: list[httpx2.Response] = []

    def ask(url: str, place: int) -> None:
        body = LONG | {"regex": f"(cut|off|{place})+"}
        answers.append(httpx2.post(f"{url}/v1/completions", json=body, timeout=60))

    with Engine(toy_folder, kv_tokens=2048) as engine, compiling_held() as begun:
        with serving(engine, config) as url:
            asking = [threading.Thread(target=ask, args=(url, place)) for place in range(3)]
            for thread in asking:
                thread.start()
            for _ in range(2):
                assert begun.acquire(timeout=60)
            wait_until(lambda: "niwaki_sequences_in_flight 3.0" in httpx2.get(f"{url}/metrics").text)
        for thread in asking:
            thread.join()
    why = "the server is shutting down, and the 0 s that it leaves to requests are over; try again"
    assert [answer.status_code for answer in answers] == [503, 503, 503]
    assert {answer.json()["error"]["message"] for answer in answers} == {why}


@pytest.mark.parametrize("call", ["score", "generate"])
def test_a_call_on_a_branch_that_is_still_tokenized_when_the_drain_is_over_is_told(
    toy_folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Nor does another call get the branch while its thread is at work on it."""
    about = {"score": ("continuations", ["a", "b"]), "generate": ("params", params_json(SamplingParams()))}
    body = dict([("delta", [{"text": "the"}]), about[call]])
    back: list[HeldBranch] = []
    begun, gate, has_gone = threading.Event(), threading.Event(), threading.Event()
    config = ServerConfig(port=0, drain_seconds=0)
    with Engine(toy_folder, kv_tokens=2048) as engine, ThreadPoolExecutor(1) as pool:
        real = getattr(engine.backend, call)

        def slow(*args: object, **options: object) -> object:
            begun.set()
            assert gate.wait(PATIENCE)
            try:
                return real(*args, **options)
            finally:
                has_gone.set()

        monkeypatch.setattr(engine.backend, call, slow)
        monkeypatch.setattr(Branches, "give_back", lambda self, held: back.append(held))
        with serving(engine, config) as url:
            branch = httpx2.post(f"{url}/branches", json={}).json()["id"]
            asked = pool.submit(httpx2.post, f"{url}/branches/{branch}/{call}", json=body, timeout=60)
            assert begun.wait(PATIENCE)
        answer = asked.result()
        gate.set()
        assert has_gone.wait(PATIENCE)
        wait_until_idle(engine)
    assert answer.status_code == 503
    why = "the server is shutting down, and the 0 s that it leaves to requests are over; try again"
    assert answer.json()["error"]["message"] == why
    assert back == []


def test_who_is_told_a_second_time_to_end_waits_no_longer(engine: Engine) -> None:
    config = ServerConfig(port=0, drain_seconds=3600)
    with bind(config) as listener, held(engine):
        server = make_server(config, engine)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        server.has_started.wait()
        url = url_of(config, listener.getsockname()[1])
        with httpx2.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as answer:
            server.stop()
            wait_until(lambda: httpx2.get(f"{url}/ready").status_code == 503)
            server.stop()
            lines = [line for line in answer.iter_lines() if line]
        thread.join()
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["message"]) == ("overloaded", "the server is shutting down; try again")


def test_who_waits_for_an_engine_at_work_at_the_end_of_all_is_told(
    toy_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "CLOSING_SECONDS", 1)
    answers: list[httpx2.Response] = []
    is_asked, is_over = threading.Event(), threading.Event()

    with Engine(toy_folder, kv_tokens=2048) as engine:
        outline = engine.backend.outline

        def busy(*about: Any) -> tuple[OutlineNode, ...]:
            is_asked.set()
            is_over.wait(60)
            return outline(*about)

        monkeypatch.setattr(engine.backend, "outline", busy)
        with serving(engine) as url:
            asking = threading.Thread(target=lambda: answers.append(httpx2.get(f"{url}/debug/tree", timeout=60)))
            asking.start()
            is_asked.wait()
        is_over.set()
        asking.join()
    assert [answer.status_code for answer in answers] == [503]
    assert answers[0].json()["error"]["message"] == "the server is shutting down"
    assert [record for record in caplog.records if record.exc_info] == []
