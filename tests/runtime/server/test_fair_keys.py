"""Callers share the engine: who asks a hundred times at once does not hold up another's only request."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from niwaki.runtime.api import Generation
from niwaki.runtime.engine import Engine
from niwaki.runtime.loop.fairness import owner_of
from niwaki.runtime.requests.request import Request
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.serve import make_server, serving
from tests.lang.waiting import wait_until
from tests.runtime.server.conftest import held

KEYS = ("a-key-of-ours", "another-key")
MANY = 8


def asked(number: int) -> dict[str, object]:
    return {"prompt": f"the cat {number}", "max_tokens": 6, "ignore_eos": True}


def test_the_places_are_shared_by_key(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by who asks for a cache of its own each time."""
    admitted: list[str] = []
    started: list[Generation] = []
    with (
        Engine(toy_folder, kv_tokens=2048, max_running_requests=2) as engine,
        serving(engine, ServerConfig(port=0, key_digests=digests(KEYS))) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(MANY + 1) as clients,
    ):
        roster = engine.backend._core._roster
        admit = roster._admit

        def note(request: Request) -> None:
            admitted.append(owner_of(request.namespace))
            admit(request)

        monkeypatch.setattr(roster, "_admit", note)
        busy, other = ({"authorization": f"Bearer {key}"} for key in KEYS)

        def ask(number: int, who: dict[str, str], **more: object) -> int:
            return client.post("/v1/completions", json=asked(number) | more, headers=who).status_code

        start = engine.backend.start

        def counted(*args: object, **options: object) -> Generation:
            begun = start(*args, **options)  # type: ignore[arg-type]  # what it was given
            started.append(begun)
            return begun

        monkeypatch.setattr(engine.backend, "start", counted)
        with held(engine, steps=1):
            answers = [  # no two of a length: both places would be free at once, and one of them is the first caller's
                clients.submit(ask, number, busy, cache_salt=f"{number}", max_tokens=6 + number)
                for number in range(MANY)
            ]
            wait_until(lambda: len(started) == MANY)
            answers.append(clients.submit(ask, MANY, other))
            wait_until(lambda: len(started) == MANY + 1)
        assert {answer.result() for answer in answers} == {200}
    assert sorted(Counter(admitted).values()) == [1, MANY], "however many caches a key has"
    (alone,) = (owner for owner, count in Counter(admitted).items() if count == 1)
    assert admitted.index(alone) <= 2, "the first that ends makes room for it"


def test_a_caller_is_known_by_its_namespaces_and_none_tells_its_key(engine: Engine) -> None:
    server = make_server(ServerConfig(port=0, sessions="sqlite://"), engine)
    try:
        service = server._service
        first, second = digests(KEYS)
        mine = [service.namespace(first, salt) for salt in (None, "a", "b", "a/b")]
        assert len(set(mine)) == 4
        assert {owner_of(namespace) for namespace in mine} == {mine[0]}
        assert mine[0] != service.namespace(second, None)
        assert service.namespace(b"", None) == "" == owner_of(service.namespace(b"", "a"))
        assert not any(key.hex() in namespace for key in (first, second) for namespace in mine)
    finally:
        service.close()
