"""A full queue costs those whom it turns away nothing but a head: their bodies are not waited for."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import httpx2
import pytest

from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import PATIENCE
from tests.runtime.server.conftest import held

KEY = "a-key-of-ours"
ORIGIN = "https://team.example"
KNOWN = {"authorization": f"Bearer {KEY}", "origin": ORIGIN}
LONG = {"prompt": "the cat", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
PAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate", "/scripts", "/branches",
    "/branches/some/generate", "/branches/some/score", "/v1/sessions/some/chat/completions",
    "/v1/sessions/some/branches", "/programs/some", "/programs/some/batch",
)  # fmt: skip


@contextmanager
def full(folder: Path) -> Iterator[httpx2.Client]:
    """A server with a key, and with as many sequences as it takes."""
    config = ServerConfig(port=0, max_queued=0, key_digests=digests([KEY]), cors_origins=(ORIGIN,))
    with (
        Engine(folder, kv_tokens=2048, max_running_requests=2) as engine,
        serving(engine, config) as url,
        httpx2.Client(base_url=url, timeout=PATIENCE) as client,
        held(engine),
        client.stream("POST", "/v1/completions", json=LONG | {"n": 2, "stream": True}, headers=KNOWN),
    ):
        yield client


def status_of_next(answers: BinaryIO) -> int:
    """Of the next answer of a connection, which is read whole."""
    status = int(answers.readline().split()[1])
    lengths = [int(line.split()[1]) for line in iter(answers.readline, b"\r\n") if line.startswith(b"content-length:")]
    assert len(answers.read(sum(lengths))) == sum(lengths) > 0
    return status


@pytest.fixture(scope="module")
def turned_away(toy_folder: Path) -> Iterator[httpx2.Client]:
    with full(toy_folder) as client:
        yield client


@pytest.mark.parametrize("page", PAGES)
def test_no_body_is_waited_for(turned_away: httpx2.Client, page: str) -> None:
    url = turned_away.base_url
    head = f"POST {page} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\ncontent-length: 6\r\n\r\n"
    with (
        socket.create_connection((url.host, url.port or 0), timeout=PATIENCE) as wire,
        wire.makefile("rb") as answers,
    ):
        wire.sendall(head.encode())
        assert status_of_next(answers) == 503
        wire.sendall(b'{"a":1' + b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")  # the body, and who asks next
        assert status_of_next(answers) == 200


@pytest.mark.parametrize("page", ["/tokenize", "/branches/some/append", "/branches/some/fork", "/v1/sessions"])
def test_what_generates_nothing_is_answered(turned_away: httpx2.Client, page: str) -> None:
    assert turned_away.post(page, json={}, headers=KNOWN).status_code != 503


def test_pages_of_other_origins_can_read_the_refusal(turned_away: httpx2.Client) -> None:
    refused = turned_away.post("/v1/completions", json=LONG, headers=KNOWN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    assert refused.headers["retry-after"] == "1"
    assert "x-request-id" in refused.headers


def test_who_has_no_key_learns_nothing_of_the_queue(turned_away: httpx2.Client) -> None:
    assert turned_away.post("/v1/completions", json=LONG).status_code == 401


def test_the_refusals_are_counted(turned_away: httpx2.Client) -> None:
    def counted() -> float:
        lines = turned_away.get("/metrics", headers=KNOWN).text.splitlines()
        name = 'niwaki_refused_requests_total{code="overloaded"} '
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = counted()
    turned_away.post("/generate", json={"text": "the"}, headers=KNOWN)
    assert counted() == before + 1
