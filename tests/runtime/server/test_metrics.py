"""/metrics: each number that docs/operation.md names is there, and moves when what it counts happens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import torch

from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Batch, Runner
from niwaki.runtime.kv.tiers import Tiers
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import wait_until
from tests.runtime.server.conftest import held

TOKENS = 512  # that the pool holds
ANSWER = {"max_tokens": 5, "ignore_eos": True, "temperature": 0}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"the cat sat on the mat": {"type": "boolean"}},
        "required": ["the cat sat on the mat"],
        "additionalProperties": False,
    }
)
Numbers = dict[str, float]


def read(client: httpx2.Client) -> Numbers:
    lines = client.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@pytest.fixture(scope="module")
def small_engine(toy_folder: Path) -> Iterator[Engine]:
    """Its pool is soon full, above a tier in memory, which pays however quick the toy is."""
    with (
        pytest.MonkeyPatch.context() as patch,
        Engine(toy_folder, kv_tokens=TOKENS, host_cache_bytes=2**24) as engine,
    ):
        patch.setattr(Tiers, "computed", lambda *_: None)
        yield engine


@pytest.fixture(scope="module")
def small(small_engine: Engine) -> Iterator[httpx2.Client]:
    with serving(small_engine) as url, httpx2.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def grown(small: httpx2.Client) -> Callable[[str], float]:
    """By how much a number has grown since the test began."""
    before = read(small)
    return lambda name: read(small).get(name, 0) - before.get(name, 0)


def complete(client: httpx2.Client, prompt: str, **more: object) -> None:
    answer = client.post("/v1/completions", json={"prompt": prompt, **ANSWER, **more})
    assert answer.status_code == 200, answer.text


def test_times_and_tokens_of_a_streamed_request(
    small: httpx2.Client, small_engine: Engine, grown: Callable[[str], float]
) -> None:
    body = {"prompt": "the cat", **ANSWER, "stream": True}
    with held(small_engine, steps=3) as release, small.stream("POST", "/v1/completions", json=body) as stream:
        for _ in stream.iter_lines():
            release()  # behind the first piece: who begins to read late gets several as one
    for name in ("time_to_first_token", "request", "queue"):
        assert grown(f"niwaki_{name}_seconds_count") == 1
    assert grown("niwaki_inter_token_seconds_count") > 0
    assert grown("niwaki_generated_tokens_total") == 5
    assert grown("niwaki_steps_total") > 0
    assert 0 < read(small)["niwaki_kv_use"] <= 1


def test_errors_by_status(small: httpx2.Client, grown: Callable[[str], float]) -> None:
    small.post("/v1/completions", json={})
    small.get("/nowhere")
    assert grown('niwaki_http_responses_total{status="400"}') == 1
    assert grown('niwaki_http_responses_total{status="404"}') == 1


def test_who_is_refused_has_not_left(small: httpx2.Client, grown: Callable[[str], float]) -> None:
    for wrong in ({"regex": "a{3"}, {"max_tokens": 10 * TOKENS}):
        assert small.post("/v1/completions", json={"prompt": "the", **wrong}).status_code == 400
    assert grown("niwaki_aborted_sequences_total") == 0


@pytest.mark.parametrize("streams", [False, True])
def test_answers_that_end_with_one_that_failed_have_failed_not_left(
    small: httpx2.Client, grown: Callable[[str], float], monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    def broken(runner: Runner, batch: Batch) -> torch.Tensor:
        raise RuntimeError("of the test")

    monkeypatch.setattr(Runner, "forward", broken)
    answer = small.post("/v1/completions", json={"prompt": "the", **ANSWER, "n": 3, "stream": streams})
    assert "server_error" in answer.text
    wait_until(lambda: read(small)["niwaki_sequences_in_flight"] == 0)
    assert grown('niwaki_failed_sequences_total{error="GenerationError"}') == 3
    assert grown("niwaki_aborted_sequences_total") == 0


def test_grammars_their_cache_and_the_tokens_that_they_write(
    small: httpx2.Client, grown: Callable[[str], float]
) -> None:
    for _ in range(2):
        complete(small, "the", json_schema=SCHEMA, max_tokens=60, ignore_eos=False)
    assert grown("niwaki_grammars_compiled_total") == 1
    assert grown("niwaki_grammar_compile_seconds_total") > 0
    assert grown("niwaki_grammar_cache_hits_total") >= 1
    assert grown("niwaki_forced_tokens_total") > 0, "drafts of a grammar, each accepted"
    now = read(small)
    assert now["niwaki_drafted_tokens_total"] <= now["niwaki_guessed_tokens_total"], "those of an echo may be wrong"


def test_hits_evictions_and_the_tier_below(small: httpx2.Client, grown: Callable[[str], float]) -> None:
    first = "the cat sat on the mat " * 8
    for _ in range(2):
        complete(small, first)
    assert grown("niwaki_cached_tokens_total") > 0
    assert read(small)['niwaki_hit_rate{tier="device"}'] > 0
    for number in range(40):
        complete(small, f"{number} dogs and {number} logs " * 5)
    assert grown("niwaki_evicted_pages_total") > 0
    assert read(small)["niwaki_tier_memory_pages"] > 0
    complete(small, first)
    assert grown("niwaki_tier_restored_tokens_total") > 0
    assert read(small)['niwaki_hit_rate{tier="lower"}'] > 0
    evicted = grown("niwaki_evicted_pages_total")
    assert small.post("/flush_cache").status_code == 200
    assert grown("niwaki_evicted_pages_total") == evicted, "what is flushed was not evicted for want of room"


def test_what_runs_what_waits_and_who_left(toy_folder: Path) -> None:
    body = {"prompt": "the", **ANSWER, "max_tokens": 100, "stream": True}
    with (
        Engine(toy_folder, kv_tokens=TOKENS) as engine,
        serving(engine) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
        held(engine) as release,
    ):
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # held: an iterator that is dropped closes the connection
            next(lines)
            now = read(client)
            assert now["niwaki_requests_running"] == now["niwaki_sequences_in_flight"] == 1
            assert now["niwaki_requests_waiting"] == 0
        wait_until(lambda: read(client)["niwaki_aborted_sequences_total"] == 1)
        assert read(client)["niwaki_sequences_in_flight"] == 0
        release()
        wait_until(lambda: read(client)["niwaki_requests_running"] == 0)
