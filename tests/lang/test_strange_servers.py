"""What answers at a `RuntimeEndpoint`'s address may be no niwaki server: that is told in one line, whatever it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import niwaki as nw
from niwaki.lang.remote import RuntimeEndpoint
from niwaki.lang.remote_branch import RemoteBranch
from niwaki.lang.state import State
from niwaki.runtime.api import GenerationError, Message, SamplingParams

JSON, EVENTS = "application/json", "text/event-stream"
NO_JSON = (b"<html>", b"\xff", b"[" * 100_000, b"[]", b"null")
NO_ANSWERS = (b"{}", b'{"error": 3}', b'{"outputs": [{}]}', b'{"call": 77, "words": ""}', b'{"branches": 3}')
ANSWERS = [
    *((JSON, said) for said in (*NO_JSON, *NO_ANSWERS)),
    *((EVENTS, b"data: " + said + b"\n\n") for said in (*NO_JSON, *NO_ANSWERS, b'{"delta": 3}', b'{"scores": 3}')),
]


class Stranger(ThreadingHTTPServer):
    """Answers whatever it is asked with `says`, of its `kind`."""

    kind, says = JSON, b""


class Answer(BaseHTTPRequestHandler):
    server: Stranger

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", "0")))
        self.send_response(200)
        self.send_header("content-type", self.server.kind)
        self.send_header("content-length", str(len(self.server.says)))
        self.end_headers()
        self.wfile.write(self.server.says)

    do_GET = do_DELETE = do_POST  # noqa: N815  # names that the library asks for

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def stranger() -> Iterator[Stranger]:
    with Stranger(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@nw.function
def ask(s: State) -> None:
    s += "a" + nw.gen("x", max_tokens=2)


ASKED: dict[str, Callable[[RuntimeEndpoint], object]] = {
    "info": lambda endpoint: endpoint.info(),
    "open": lambda endpoint: endpoint.open(),
    "render": lambda endpoint: endpoint.render([Message("user", "a")], add_generation_prompt=True),
    "generate": lambda endpoint: endpoint.generate(RemoteBranch(endpoint, "b"), [], SamplingParams()).result(60),
    "score": lambda endpoint: endpoint.score(RemoteBranch(endpoint, "b"), [], ["a"]).result(60),
    "token_ids": lambda endpoint: RemoteBranch(endpoint, "b").token_ids,
    "session": lambda endpoint: endpoint.session("s").turns(),
    "program": lambda endpoint: ask.run(backend=endpoint)["x"],
}


@pytest.mark.parametrize("asked", ASKED)
def test_whatever_says_something_else_than_a_niwaki_server_is_told_so(stranger: Stranger, asked: str) -> None:
    with RuntimeEndpoint(f"http://127.0.0.1:{stranger.server_port}", timeout=60) as endpoint:
        for stranger.kind, stranger.says in ANSWERS:
            with pytest.raises((GenerationError, nw.EngineStopped, nw.RequestError)):
                ASKED[asked](endpoint)
