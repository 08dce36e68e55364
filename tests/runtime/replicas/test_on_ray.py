"""Two replicas of the bundled model on Ray Serve, on this machine: `make test-ray`. They take a minute to start."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import httpx2
import numpy as np
import pytest

from niwaki.runtime.api import Cancelled, Choices, Output, SamplingParams, Segment
from niwaki.runtime.engine import Engine
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.replicas.config import ReplicaConfig
from niwaki.runtime.replicas.engines import RayEngines
from niwaki.runtime.replicas.routing import Routing
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.serve import serving
from tests.runtime.replicas.test_routing import few_shot_prompts

pytestmark = [
    pytest.mark.skipif(not os.environ.get("NIWAKI_RAY"), reason="make test-ray runs it"),
    pytest.mark.filterwarnings("ignore"),  # those of Ray
]
ROOT = Path(__file__).parents[3]
KV_TOKENS = 4 * (512 + 64)  # of a replica: half of W1's eight prefixes, and some questions
ONE = SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True)
GREEDY = SamplingParams(max_new_tokens=16, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engines() -> Iterator[RayEngines]:
    with RayEngines(None, {"kv_tokens": KV_TOKENS}, ReplicaConfig(2, 2)) as started:
        yield started


@pytest.fixture(scope="module")
def client(engines: RayEngines) -> Iterator[httpx2.Client]:
    config = ServerConfig(port=0, sessions="sqlite://")
    with serving(engines, config) as url, httpx2.Client(base_url=url, timeout=120) as made:
        yield made


def hit_rate(ask: Callable[[TokenIds], tuple[Output, ...]], prompts: list[TokenIds]) -> float:
    return sum(ask(ids)[0].cached_tokens for ids in prompts) / sum(map(len, prompts))


def test_what_replicas_generate_is_what_an_engine_here_generates(engines: RayEngines, bundled_engine: Engine) -> None:
    stands = []
    for backend in (engines.backend, bundled_engine.backend):
        branch = backend.open(namespace="a")
        backend.append(branch, [Segment("The cat sat on")])
        (output,) = backend.generate(branch, [Segment(" the")], GREEDY).result(60)
        twin = backend.fork(branch)
        backend.generate(twin, [Segment(" mat")], GREEDY).result(60)
        scores = backend.score(branch, [Segment(" and")], [" a", " the dog"]).result(60)
        chosen = backend.generate(twin, [Segment(" or")], SamplingParams(constraint=Choices((" so", " not"))))
        assert chosen.result(60)[0].text in (" so", " not")
        stands.append((output.text, list(branch.token_ids), [score.text for score in scores]))
        backend.close(branch)
        backend.close(twin)
    assert stands[0] == stands[1]


def test_two_replicas_hit_as_one_cache_of_twice_the_size(engines: RayEngines) -> None:
    prompts = few_shot_prompts(1)
    assert engines.backend.flush()
    routed = hit_rate(lambda ids: engines.backend.start(ids, ONE).result(120), prompts)
    with Engine(kv_tokens=2 * KV_TOKENS) as big:
        one = hit_rate(lambda ids: big.backend.start(ids, ONE).result(120), prompts)
    with Engine(kv_tokens=KV_TOKENS) as first, Engine(kv_tokens=KV_TOKENS) as second:
        turns = cycle((first, second))
        in_turn = hit_rate(lambda ids: next(turns).backend.start(ids, ONE).result(120), prompts)
    print(f"hit rates: {routed:.3f} routed, {one:.3f} one big cache, {in_turn:.3f} in turn")
    assert routed >= 0.9 * one
    assert routed >= 1.8 * in_turn


@pytest.mark.parametrize("asks", ["never", "at once", "while it runs"])
def test_pieces_come_from_a_replica_to_those_who_ask_for_them(engines: RayEngines, asks: str) -> None:
    ids, heard = np.arange(300, 340, dtype=np.int32), list[str]()
    # Greedy text repeats itself, which is guessed: it was over before anybody asked.
    params = SamplingParams(max_new_tokens=1500, temperature=1.0, seed=3, ignore_eos=True)
    generation = engines.backend.start(ids, params, streams=None)
    if asks == "while it runs":
        time.sleep(0.1)
    if asks != "never":
        generation.add_delta_callback(lambda delta: heard.append(delta.text))
    (output,) = generation.result(60)
    assert len(list(generation.deltas())) > 3 if heard else len(list(generation.deltas())) == 1
    assert bool(heard) == (asks != "never")
    assert "".join(delta.text for delta in generation.deltas()) == output.text


def test_a_client_that_leaves_stops_its_generation(engines: RayEngines, client: httpx2.Client) -> None:
    body = {"prompt": "the cat", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    deadline = time.monotonic() + 60
    while engines.backend.usage().get("requests_running") != 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_serve_says_nothing_of_clients_that_leave(engines: RayEngines, caplog: pytest.LogCaptureFixture) -> None:
    told = logging.getLogger("ray.serve")  # it hands nothing on to the root
    told.addHandler(caplog.handler)
    ids = np.arange(300, 340, dtype=np.int32)
    running = [engines.backend.start(ids, ONE, streams=False) for _ in range(100)]
    for one in running:
        one.cancel()
    for one in running:
        with suppress(Cancelled):
            one.result(120)
    told.removeHandler(caplog.handler)
    assert not caplog.messages


def test_what_is_over_no_longer_weighs_at_its_replica(engines: RayEngines) -> None:
    """However soon it is: of the shortest requests Ray may tell the end before it has told the beginning."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(300, 2000, 40).astype(np.int32) for _ in range(300)]
    running = [engines.backend.start(ids, ONE, streams=False) for ids in prompts]
    for number, one in enumerate(running):
        if number % 3 == 0:
            one.cancel()
    for number, one in enumerate(running):
        if number % 3:
            one.result(120)
    (routing,) = (one for one in gc.get_objects() if isinstance(one, Routing) and len(one._replicas) == 2)
    deadline = time.monotonic() + 60
    while any(replica.running for replica in routing._replicas.values()):
        assert time.monotonic() < deadline, [replica.running for replica in routing._replicas.values()]
        time.sleep(0.1)


def test_a_replica_that_is_killed_takes_no_acknowledged_turn_along(engines: RayEngines, client: httpx2.Client) -> None:
    """Conversations go on while it dies: their requests are answered by the other one, or told."""
    names = [client.post("/v1/sessions", json={}).json()["id"] for _ in range(6)]
    acknowledged: dict[str, list[str]] = {name: [] for name in names}
    statuses: list[int] = []
    is_over = threading.Event()

    def talk(name: str) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            said = {"role": "user", "content": f"This is turn {number}."}
            body = {"messages": [said], "max_tokens": 12, "ignore_eos": True}
            answer = client.post(f"/v1/sessions/{name}/chat/completions", json=body)
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                acknowledged[name].append(answer.json()["choices"][0]["message"]["content"])
            else:
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "overloaded"

    def num_turns() -> int:
        return sum(map(len, acknowledged.values()))

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + 120
        while num_turns() < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    talking = [threading.Thread(target=talk, args=(name,)) for name in names]
    for thread in talking:
        thread.start()
    wait_for(12)
    before = engines.process_ids()
    os.kill(before[0], signal.SIGKILL)
    wait_for(num_turns() + 18)
    is_over.set()
    for thread in talking:
        thread.join(60)
    for name in names:
        stored = [
            m["content"] for m in client.get(f"/v1/sessions/{name}").json()["messages"] if m["role"] == "assistant"
        ]
        assert stored == acknowledged[name]
    print(f"{num_turns()} turns, {statuses.count(503)} requests told of {len(statuses)}")
    deadline = time.monotonic() + 240
    while len(engines.process_ids()) < 2:  # Serve starts another one
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert before[0] not in engines.process_ids()
    assert client.get("/health").status_code == 200


def test_run_maps_a_file_through_ray_data(tmp_path: Path) -> None:
    """Two engines of their own; the rows are those of one engine here, in order, with the error of a bad one."""
    rows = [{"text": f"I am Lena Fischer, a nurse from Dresden, number {number}."} for number in range(70)]
    lines = [json.dumps(row) for row in rows]
    lines[5] = "no JSON"
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    for name, more in (("ray", ["--ray", "2"]), ("here", [])):
        command = [sys.executable, "-m", "niwaki", "run", str(ROOT / "examples" / "extract.py") + ":extract"]
        files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / f"{name}.jsonl")]
        done = subprocess.run([*command, *files, *more], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert "70 records" in done.stdout
        assert "1 of them with an error (the first is record 5: RecordError: line 6" in done.stdout
    assert (tmp_path / "ray.jsonl").read_text() == (tmp_path / "here.jsonl").read_text()
