"""A service that speaks OpenAI's API and knows no model: it says what it is told, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

Body: TypeAlias = dict[str, Any]

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}


@dataclass
class Stub:
    """`answer` makes the text of a request, or an error as (status, code). `asked` are the paths and bodies so far."""

    answer: Callable[[Body], str | tuple[int, str]]
    asked: list[tuple[str, Body]] = field(default_factory=list)
    url: str = ""
    hold: threading.Event | None = None  # answers wait for it
    gone: threading.Event = field(default_factory=threading.Event)  # a client left in the middle of a stream


@contextmanager
def serving(answer: Callable[[Body], str | tuple[int, str]]) -> Iterator[Stub]:
    stub = Stub(answer)
    handler = type("Handler", (_Handler,), {"stub": stub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def log_message(self, format: str, *args: object) -> None:
        """Not on stderr."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.stub.asked.append((self.path, body))
        told = self.stub.answer(body)
        if isinstance(told, tuple):
            status, code = told
            self._send(status, {"error": {"message": "no", "type": "invalid_request_error", "code": code}})
        elif body.get("stream"):
            self._stream(told, self.path.endswith("/chat/completions"))
        elif self.path.endswith("/chat/completions"):
            choice = {"message": {"role": "assistant", "content": told}, "finish_reason": "stop", "logprobs": None}
            choices = [{"index": index, **choice} for index in range(body["n"])]
            self._send(200, {"id": "1", "object": "chat.completion", "choices": choices, "usage": USAGE})
        else:
            prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
            choices = [self._echo(index, prompt) for index, prompt in enumerate(prompts)]
            self._send(200, {"id": "1", "object": "text_completion", "choices": choices, "usage": USAGE})

    def _echo(self, index: int, prompt: str) -> Body:
        """A token is a character; a "b" is likelier than anything else."""
        logprobs = [None, *(-0.1 if letter == "b" else -2.0 for letter in prompt[1:])]
        told = {"tokens": list(prompt), "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}
        return {"index": index, "text": prompt, "finish_reason": "length", "logprobs": told}

    def _stream(self, text: str, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        try:
            for letter in text:
                said: Body = {"delta": {"content": letter}} if is_chat else {"text": letter}
                self._event({"choices": [{"index": 0, "finish_reason": None, **said}]})
                if self.stub.hold is not None:
                    while not self.stub.hold.wait(0.01):
                        self.wfile.write(b": still here\n\n")
            said = {"delta": {}} if is_chat else {"text": ""}
            self._event({"choices": [{"index": 0, "finish_reason": "stop", **said}]})
            self._event({"choices": [], "usage": USAGE})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.stub.gone.set()
        self.close_connection = True

    def _event(self, fields: Body) -> None:
        self.wfile.write(b"data: " + json.dumps({"id": "1", "object": "chunk", **fields}).encode() + b"\n\n")

    def _send(self, status: int, body: Body) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
