"""Keys, hashed in files, and how much each may ask; on a clock of the test."""

from __future__ import annotations

import argparse
import hashlib
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from niwaki.runtime.api import ConfigError, Generation, Segment
from niwaki.runtime.engine import Engine
from niwaki.runtime.server import service
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.keys import KeyLimits, digest_of, read_keys
from niwaki.runtime.server.options import add_options, config_of
from niwaki.runtime.server.rates import Rates
from niwaki.runtime.server.serve import serving
from niwaki.runtime.server.service import LONG_BODY, ROWS
from tests.lang.waiting import PATIENCE, wait_until
from tests.runtime.server.conftest import held, nobody_waits

KEY = "a-key-of-ours"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(rates: Rates, key: bytes = b"") -> ApiError:
    with pytest.raises(ApiError) as caught:
        rates.admit(key)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return caught.value


def test_a_file_holds_keys_and_digests_with_limits_of_their_own() -> None:
    found = read_keys(
        f"# the team's\n\nplain-key-1 concurrent=2\nsha256:{DIGEST} requests_per_minute=5 tokens_per_minute=100\n",
        KeyLimits(concurrent=7),
    )
    assert found == {
        digest_of("plain-key-1"): KeyLimits(concurrent=2),
        digest_of(KEY): KeyLimits(5, 100, 7),
    }
    assert digest_of(KEY) == digest_of(f"sha256:{DIGEST}")


@pytest.mark.parametrize(
    "line",
    ["short", "sha256:abc", "long-enough what=3", "long-enough concurrent=x", "long-enough concurrent=0", "schlüssel"],
)
def test_a_wrong_line_is_told_by_its_number_and_not_by_its_text(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2 of the key file") as caught:
        read_keys(f"another-good-key\n{line}\n")
    assert line not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["a-key-of-ours\n", " a-key-of-ours", "a-key\tof-ours", "a-schlüssel", "\ufeffa-key-of-ours"]
)
def test_a_key_that_no_header_brings_as_it_is_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        digest_of(key)


def test_a_key_file_may_begin_with_a_mark_and_must_be_utf8(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.set_defaults(disk_cache_dir=None)
    path = tmp_path / "keys"
    options = parser.parse_args(["--api-key-file", str(path)])
    path.write_text(f"{KEY}\n", "utf-8-sig")
    assert config_of(options).key_digests == (digest_of(KEY),)
    path.write_text(f"{KEY}\n", "utf-16")
    with pytest.raises(ConfigError, match="keys is not UTF-8 text, at byte 0"):
        config_of(options)


def test_requests_come_back_evenly_over_the_minute() -> None:
    clock = Clock()
    rates = Rates({}, KeyLimits(requests_per_minute=6), clock)
    for _ in range(6):
        rates.admit(b"")
    assert refusal(rates).retry_after == 10
    clock.now = 9.9
    assert refusal(rates).retry_after == 1
    clock.now = 10.0
    rates.admit(b"")
    refusal(rates)
    clock.now = 10_000.0  # a long rest saves up a minute's worth, not more
    for _ in range(6):
        rates.admit(b"")
    refusal(rates)


def test_tokens_are_counted_when_they_were_used() -> None:
    clock = Clock()
    rates = Rates({}, KeyLimits(tokens_per_minute=60), clock)
    rates.admit(b"")
    rates.enter(b"")
    rates.leave(b"", 100)
    assert refusal(rates).retry_after == 41
    clock.now = 41.0
    rates.admit(b"")


def test_every_key_has_a_measure_of_its_own() -> None:
    rates = Rates({b"few": KeyLimits(concurrent=1)}, KeyLimits(concurrent=3))
    for key in (b"few", b"other"):
        rates.admit(key)
        rates.enter(key)
    refusal(rates, b"few")
    rates.admit(b"other")
    rates.leave(b"few", 0)
    rates.admit(b"few")


def test_the_server_refuses_who_asked_too_much_and_says_when_to_come_back(engine: Engine) -> None:
    config = ServerConfig(
        port=0,
        key_digests=digests([KEY, "another-key"]),
        key_limits=((digest_of(KEY), KeyLimits(requests_per_minute=1, tokens_per_minute=1000)),),
    )
    body = {"prompt": "the cat", "max_tokens": 2}
    with serving(engine, config) as url, httpx2.Client(base_url=url, timeout=120) as client:
        mine, other = ({"authorization": f"Bearer {key}"} for key in (KEY, "another-key"))
        statuses = [client.post("/v1/completions", json=body, headers=mine).status_code for _ in range(2)]
        assert statuses == [200, 429]
        refused = client.post("/v1/completions", json=body, headers=mine)
        assert refused.json()["error"]["type"] == "requests"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert client.post("/v1/completions", json=body, headers=other).status_code == 200
        metrics = client.get("/metrics", headers=other).text
        assert 'niwaki_refused_requests_total{code="rate_limit_exceeded"} 2.0' in metrics


def test_who_asked_too_much_is_told_so_before_the_body_comes(engine: Engine) -> None:
    config = ServerConfig(port=0, limits=KeyLimits(requests_per_minute=1))
    fields = "host: localhost\r\ncontent-type: application/json\r\ncontent-length: 6"
    head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n"
    with serving(engine, config) as url:
        assert httpx2.post(f"{url}/v1/completions", json={"prompt": "the", "max_tokens": 1}).status_code == 200
        address = urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as wire:
            wire.sendall(head.encode())
            assert wire.recv(64).startswith(b"HTTP/1.1 429 ")


def test_long_answers_use_up_the_tokens_of_a_minute(engine: Engine) -> None:
    config = ServerConfig(port=0, limits=KeyLimits(tokens_per_minute=20))
    body = {"prompt": "the cat", "max_tokens": 40, "ignore_eos": True, "stream": True}
    with serving(engine, config) as url, httpx2.Client(base_url=url, timeout=120) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        # Its tokens count when the server, too, is done with it.
        wait_until(lambda: nobody_waits(client))
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "tokens"


def test_who_may_have_one_request_at_once_has_the_next_when_it_is_over(engine: Engine) -> None:
    config = ServerConfig(port=0, limits=KeyLimits(concurrent=1))
    body = {"prompt": "the cat", "max_tokens": 20, "ignore_eos": True}
    with serving(engine, config) as url, httpx2.Client(base_url=url, timeout=120) as client:
        with held(engine) as release, client.stream("POST", "/v1/completions", json=body | {"stream": True}) as running:
            refused = client.post("/v1/completions", json=body)
            release()
            running.read()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        wait_until(lambda: nobody_waits(client))
        assert client.post("/v1/completions", json=body).status_code == 200


def test_who_may_have_one_request_at_once_has_no_second_while_one_is_prepared(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, begun, gate = engine.backend.score, threading.Event(), threading.Event()

    def slow(*args: object, **options: object) -> object:
        if not begun.is_set():
            begun.set()
            assert gate.wait(PATIENCE)
        return score(*args, **options)  # type: ignore[arg-type]  # what it was given

    body = {"delta": [{"text": "the"}], "continuations": ["a", "b"]}
    config = ServerConfig(port=0, limits=KeyLimits(concurrent=1))
    monkeypatch.setattr(engine.backend, "score", slow)
    with (
        serving(engine, config) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        first, second = (client.post("/branches", json={}).json()["id"] for _ in range(2))
        running = pool.submit(client.post, f"/branches/{first}/score", json=body)
        assert begun.wait(PATIENCE)
        refused = client.post(f"/branches/{second}/score", json=body)
        gate.set()
        assert refused.status_code == 429
        assert running.result().status_code == 200


def test_who_is_alone_may_ask_for_more_than_the_queue_holds(toy_folder: Path) -> None:
    with (
        Engine(toy_folder, kv_tokens=2048, max_running_requests=2) as engine,
        serving(engine, ServerConfig(port=0, max_queued=0)) as url,
    ):
        answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "the cat", "n": 4, "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 4


def test_a_choice_among_many_takes_more_than_one_place_in_the_queue(toy_folder: Path) -> None:
    """Each text that is scored holds the tokens of what stands before it."""
    long = {"prompt": "the cat", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
    many = [f"{number}" for number in range(ROWS + 1)]
    script = [{"do": "say", "parts": ["a"]}, {"do": "choose", "call": 0, "choices": many, "method": "exact"}]
    with (
        Engine(toy_folder, kv_tokens=2048, max_running_requests=2) as engine,
        serving(engine, ServerConfig(port=0, max_queued=0)) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        branch = client.post("/branches", json={}).json()["id"]
        asked = {
            f"/branches/{branch}/score": {"delta": [{"text": "a"}], "continuations": many},
            "/scripts": {"branches": [script], "is_over": True},
        }
        with held(engine), client.stream("POST", "/v1/completions", json=long):
            for page, body in asked.items():
                refused = client.post(page, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        for page, body in asked.items():
            wait_until(lambda: "niwaki_sequences_in_flight 0.0" in client.get("/metrics").text)
            assert client.post(page, json=body).status_code == 200


@pytest.mark.parametrize(
    ("page", "prompts", "more"),
    [
        ("/generate", "text", {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 4}),
        ("/v1/completions", "prompt", {"echo": True, "logprobs": 4}),
    ],
)
def test_log_probabilities_of_many_prompts_are_told_up_to_a_bound_and_of_one_all(
    url: str, page: str, prompts: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_PROMPT_LOGPROBS", 30)
    with httpx2.Client(base_url=url, timeout=60) as client:
        refused = client.post(page, json={prompts: ["the cat sat on the mat"] * 3, **more})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
        assert "of several prompts at most 30" in refused.json()["error"]["message"]
        for few in ("the cat sat on the mat", ["a", "b"]):
            assert client.post(page, json={prompts: few, **more}).status_code == 200


def test_an_answer_that_nobody_waited_for_uses_tokens_up_too(engine: Engine) -> None:
    config = ServerConfig(port=0, limits=KeyLimits(tokens_per_minute=1))
    body = b'{"prompt": "the cat", "max_tokens": 400, "ignore_eos": true, "temperature": 0}'
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    with serving(engine, config) as url, httpx2.Client(base_url=url, timeout=60) as client:
        with held(engine):
            with socket.create_connection((client.base_url.host, client.base_url.port)) as leaving:
                leaving.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
                wait_until(lambda: "niwaki_time_to_first_token_seconds_count 1.0" in client.get("/metrics").text)
            wait_until(lambda: nobody_waits(client))
        assert client.post("/v1/completions", json={"prompt": "the cat"}).status_code == 429


@pytest.mark.parametrize(
    ("page", "body", "streams"),
    [
        ("/v1/completions", {"prompt": "the"}, False),
        ("/v1/completions", {"prompt": "the", "stream": True}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2}, False),
        ("/v1/responses", {"input": "the", "max_output_tokens": 2, "store": False}, False),
        ("/generate", {"text": "the"}, False),
        ("/generate", {"text": "the", "rid": "it may be aborted"}, None),
    ],
)
def test_pieces_are_asked_for_where_somebody_reads_them(
    client: httpx2.Client,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    page: str,
    body: object,
    streams: bool | None,
) -> None:
    asked: list[object] = []
    start = engine.backend.start

    def noted(*args: object, **options: object) -> Generation:
        asked.append(options["streams"])
        return start(*args, **options)  # type: ignore[arg-type]  # what it was given

    monkeypatch.setattr(engine.backend, "start", noted)
    assert client.post(page, json=body).status_code == 200
    assert asked == [streams]


@pytest.mark.parametrize("streams", [False, True])
def test_who_is_held_to_tokens_a_minute_is_no_reader_for_that(
    engine: Engine, started: list[Generation], streams: bool
) -> None:
    body = {"prompt": "the cat", "max_tokens": 4, "stream": streams}
    with serving(engine, ServerConfig(port=0, limits=KeyLimits(tokens_per_minute=1000))) as url:
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    assert [(bool(one.is_streamed), bool(one.is_read)) for one in started] == [(True, streams)]


def test_a_file_without_keys_opens_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from niwaki.__main__ import main

    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    assert main(["serve", "--port", "0", "--api-key-file", str(path)]) == 1
    assert "holds no key" in capsys.readouterr().err


def test_long_bodies_are_prepared_beside_all_others(
    client: httpx2.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many come, and however long they take."""
    encode, gate, begun = engine.tokenizer.encode, threading.Event(), threading.Event()

    def slow(segments: Sequence[Segment], *, at_start: bool = False) -> list[int]:
        if sum(len(segment.text) for segment in segments) > LONG_BODY:
            begun.set()
            gate.wait(PATIENCE)
        return encode(segments, at_start=at_start)

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    monkeypatch.setattr(engine.tokenizer, "most_chars", None)  # such as a normaliser makes: else none were tokenized
    with ThreadPoolExecutor(8) as clients:
        ask = partial(client.post, "/v1/completions", timeout=PATIENCE)
        try:
            long = [clients.submit(ask, json={"prompt": "a" * (LONG_BODY + 1)}) for _ in range(8)]
            begun.wait(PATIENCE)
            wait_until(lambda: "niwaki_sequences_in_flight 8.0" in client.get("/metrics").text)
            assert client.post("/v1/completions", json={"prompt": "the cat", "max_tokens": 2}).status_code == 200
        finally:
            gate.set()
        refusals = [one.result().json()["error"]["code"] for one in long]
    assert refusals == ["context_length_exceeded"] * 8


@pytest.mark.parametrize(
    ("page", "body", "param", "count"),
    [
        ("/v1/completions", {"prompt": "the cat " * 40_000}, "prompt", "at least "),
        ("/v1/completions", {"prompt": [[5], [5] * 513]}, "prompt", "513 "),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "cat " * 40_000}] * 2}, "messages", "at le"),
        ("/generate", {"text": ["a", "the cat " * 40_000]}, "text", "at least "),
        ("/generate", {"input_ids": [5] * 513}, "input_ids", "513 "),
    ],
)
def test_what_can_never_fit_is_refused_before_it_is_tokenized(
    client: httpx2.Client,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    page: str,
    body: dict[str, object],
    param: str,
    count: str,
) -> None:
    """It would wait for other bodies of its length, each of which may take seconds."""
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *given, **options: pytest.fail("it was tokenized"))
    refused = client.post(page, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith(f"{param} has {count}")


MEMORY = """
import psutil
from niwaki.runtime import bundled
from niwaki.runtime.api import Segment
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.server.service import give_memory_back

tokenizer, process = Tokenizer(bundled.MODEL_DIR), psutil.Process()
tokenizer.encode([Segment("The cat sat on the mat. ")])
before = process.memory_info().rss
tokenizer.encode([Segment("The cat sat on the mat. " * 40_000)])
after = process.memory_info().rss
give_memory_back()
print(after - before, process.memory_info().rss - before)
"""


@pytest.mark.skipif(service._TRIM is None, reason="this C library cannot give memory back when it is told to")
def test_the_memory_of_a_long_text_is_given_back(
    client: httpx2.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, kept = subprocess.run(
        [sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True
    ).stdout.split()
    assert int(kept) < int(taken) / 2
    told: list[str] = []
    monkeypatch.setattr(engine.tokenizer, "most_chars", None)
    monkeypatch.setattr(service, "give_memory_back", lambda: told.append(threading.current_thread().name))
    for size in (10, LONG_BODY + 1):
        client.post("/v1/completions", json={"prompt": "a" * size, "max_tokens": 1}, timeout=PATIENCE)
    assert [name.startswith("niwaki-prepare-long") for name in told] == [True]
