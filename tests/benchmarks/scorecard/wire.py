"""A server in its own processes, and clients that cost little beside it: HTTP/1.1 by hand, on one event loop."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

import psutil

Json = Mapping[str, object]

SETTLING_SECONDS = 1.0
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found

    @property
    def text(self) -> str:
        """Of the one completion, streamed or not."""
        if self.headers["content-type"].startswith("text/event-stream"):
            events = [json.loads(line[6:]) for line in self.body.split(b"\n") if line.startswith(b"data: {")]
            return "".join(choice["text"] for event in events for choice in event["choices"])
        return str(json.loads(self.body)["choices"][0]["text"])


class Gone(Exception):
    """The server closed the connection before its answer was whole."""


class Wire:
    """One connection, which stays open from request to request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: Server) -> None:
        self._reader, self.writer, self._server = reader, writer, server
        self._num_answers = 0

    @classmethod
    async def open(cls, server: Server) -> Self:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**23)
        return cls(reader, writer, server)

    def request(self, method: str, path: str, body: Json | bytes | None = None, **headers: str) -> bytes:
        return self._server.request(method, path, body, **headers)

    async def ask(self, method: str, path: str, body: Json | bytes | None = None, **headers: str) -> Answer:
        """Raises Gone, but not for a connection that was closed because it was idle."""
        request = self.request(method, path, body, **headers)
        self.writer.write(request)
        try:
            return await self.answer()
        except Gone:
            if self._num_answers:
                self._reader, self.writer = await asyncio.open_connection("127.0.0.1", self._server.port, limit=2**23)
                self._num_answers = 0
                self.writer.write(request)
                return await self.answer()
            raise

    async def answer(self) -> Answer:
        """Raises Gone."""
        try:
            status, told = await self.head()
            pieces = [piece async for piece in self.pieces(told)]
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Gone from error
        self._num_answers += 1
        return Answer(status, told, b"".join(pieces))

    async def head(self) -> tuple[int, Mapping[str, str]]:
        came = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        named = (line.partition(":") for line in came[1:] if line)
        return int(came[0].split()[1]), {name.lower(): value.strip() for name, _, value in named}

    async def pieces(self, head: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body behind a head, as it comes."""
        if "content-length" in head:
            yield await self._reader.readexactly(int(head["content-length"]))
            return
        while True:
            size = int((await self._reader.readuntil(b"\r\n"))[:-2], 16)
            piece = (await self._reader.readexactly(size + 2))[:-2]
            if size == 0:
                return
            yield piece

    def close(self) -> None:
        self.writer.close()


@dataclass(frozen=True, slots=True)
class Standing:
    """What must be after a test as it was before."""

    pages: float
    running: float
    descriptors: int
    threads: int


@dataclass(slots=True)
class Server:
    """`niwaki serve` in its two processes."""

    process: psutil.Process
    port: int
    errors: str  # the file that its stderr goes to
    found: list[str] = field(default_factory=list)

    @property
    def engine(self) -> psutil.Process:
        """The process with the model: the largest of the server's."""
        return max(self.process.children(), key=lambda one: one.memory_info().rss)

    @property
    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def memory(self) -> int:
        return sum(one.memory_info().rss for one in self.family)

    def processor_seconds(self) -> float:
        return sum(one.cpu_times().user + one.cpu_times().system for one in self.family)

    def request(self, method: str, path: str, body: Json | bytes | None = None, **headers: str) -> bytes:
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"host": f"127.0.0.1:{self.port}", "content-length": str(len(content))}
        head |= {} if body is None else {"content-type": "application/json"}
        head |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        return "\r\n".join(lines).encode() + content

    async def ask(self, method: str, path: str, body: Json | None = None) -> Answer:
        wire = await Wire.open(self)
        try:
            return await wire.ask(method, path, body)
        finally:
            wire.close()

    async def numbers(self) -> dict[str, float]:
        """Of /metrics, those without labels; and the answers by status."""
        text = (await self.ask("GET", "/metrics")).body.decode()
        plain = {name: float(value) for name, value in re.findall(r"^(\w+) ([-+.\deE]+)$", text, re.M)}
        by_status = re.findall(r'^niwaki_http_responses_total\{status="(\d+)"\} ([.\deE+]+)$', text, re.M)
        return plain | {status: float(value) for status, value in by_status}

    async def standing(self) -> Standing:
        numbers = await self.numbers()
        return Standing(
            pages=numbers["niwaki_pages_free"] + numbers["niwaki_pages_tree"],
            running=numbers["niwaki_requests_running"] + numbers["niwaki_requests_waiting"],
            descriptors=sum(one.num_fds() for one in self.family),
            threads=sum(one.num_threads() for one in self.family),
        )

    async def idle(self, seconds: float = 30.0) -> float:
        """Wait until nothing runs; how long that took."""
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            numbers = await self.numbers()
            running = [numbers.get(f"niwaki_requests_{where}") for where in ("running", "waiting")]
            if running == [0, 0]:  # None: the engine has not told yet
                break
            await asyncio.sleep(0.005)
        return time.perf_counter() - began


@contextmanager
def server(*options: str, sessions: str = "sqlite://") -> Iterator[Server]:
    with ExitStack() as stack:
        errors = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".log"))
        command = [sys.executable, "-m", "niwaki", "serve", "--port", "0", "--sessions", sessions, *options]
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        process = psutil.Process(started.pid)
        try:
            assert started.stdout is not None
            said = started.stdout.readline()
            yield Server(process, int(said.rpartition(":")[2]), errors.name)
        finally:
            with suppress(psutil.NoSuchProcess):
                process.resume()
            started.terminate()
            try:
                started.wait(40)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many are not above."""
    assert values
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
