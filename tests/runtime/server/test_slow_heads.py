"""Who does not say what it asks is not waited for, and who did is left alone."""

from __future__ import annotations

import json
import socket
import threading

import httpx2
import pytest

from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import PATIENCE, wait_until
from tests.runtime.server.conftest import held

QUICK = ServerConfig(port=0, head_seconds=0.2)
READY = b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n"


def connected(url: str) -> socket.socket:
    address = httpx2.URL(url)
    return socket.create_connection((address.host, address.port or 0), timeout=PATIENCE)


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes; a timeout where it does not."""
    found = b""
    while piece := connection.recv(4096):
        found += piece
    return found


@pytest.mark.parametrize("head", [b"GET /rea", b"GET /ready HTTP/1.1\r\nhost: localh"])
def test_half_a_head_is_told_and_closed(engine: Engine, head: bytes) -> None:
    with serving(engine, QUICK) as url, connected(url) as slow:
        slow.sendall(head)
        status, _, rest = everything(slow).partition(b"\r\n")
        assert status == b"HTTP/1.1 408 Request Timeout"
        error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
        assert error["message"] == "the request's head did not arrive within 0.2 s"
        assert httpx2.get(f"{url}/ready").status_code == 200


def test_a_connection_that_says_nothing_is_closed(engine: Engine) -> None:
    with serving(engine, QUICK) as url, connected(url) as silent:
        assert everything(silent) == b""


def test_one_byte_now_and_then_gains_no_time(engine: Engine) -> None:
    over = threading.Event()
    with serving(engine, QUICK) as url, connected(url) as slow:

        def drip() -> None:
            while not over.wait(0.02):
                try:
                    slow.sendall(b"x")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            slow.recv(4096)  # the answer or the end: there is one, else this times out
        except ConnectionResetError:
            pass
        finally:
            over.set()
            dripping.join()


def test_the_next_request_of_a_connection_has_as_long_as_the_first(engine: Engine) -> None:
    with serving(engine, QUICK) as url, connected(url) as slow:
        slow.sendall(READY)
        assert slow.recv(4096).startswith(b"HTTP/1.1 200 ")
        slow.sendall(READY[:9])
        assert b"HTTP/1.1 408 " in everything(slow)


def test_an_answer_that_takes_longer_than_its_request_may_is_not_cut_off(engine: Engine) -> None:
    body = {"prompt": "the cat", "max_tokens": 40, "ignore_eos": True}
    answers: list[httpx2.Response] = []
    with serving(engine, QUICK) as url, held(engine) as release:
        asking = threading.Thread(target=lambda: answers.append(httpx2.post(f"{url}/v1/completions", json=body)))
        asking.start()
        wait_until(lambda: bool(engine.stats()["requests_running"]))
        with connected(url) as silent:
            everything(silent)  # opened later, closed: the time of the other one is over, too
        release()
        asking.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 40
