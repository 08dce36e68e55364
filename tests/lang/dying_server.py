"""Servers that are no help: none at all, and one that dies in the middle of an answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INFO = b'{"model": "dying", "context_length": 4096, "defaults": {}}'


@contextmanager
def nobody() -> Iterator[str]:
    """An address that refuses every connection: it is taken, but nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


class _Dying(BaseHTTPRequestHandler):
    """Opens branches, begins each answer, and ends the connection behind its first words."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(INFO)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/branches":
            self._answer(b'{"id": "1"}')
            return
        self._begin("text/event-stream", 1000)
        self.wfile.write(b'data: {"delta": {"text": "wor", "token_ids": [1], "logprobs": [], "top_logprobs": []}}\n\n')
        self.close_connection = True

    def do_DELETE(self) -> None:
        self._answer(b"{}")

    def _answer(self, body: bytes) -> None:
        self._begin("application/json", len(body))
        self.wfile.write(body)

    def _begin(self, kind: str, length: int) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(length))
        self.end_headers()

    def log_message(self, *given: object) -> None:
        """Nothing: it is a test."""


@contextmanager
def dying_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Dying) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:  # whoever asks it raises: a thread that serves a closed socket would turn on a core for good
            server.shutdown()
            thread.join()
