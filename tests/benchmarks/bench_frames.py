"""What a step of the engine costs the API process: its frame, and the streams that it goes on to.

    python -m tests.benchmarks.bench_frames

A real server and real clients, which read streamed completions over sockets, and in place of the engine a process that
sends a token for every stream each STEP_SECONDS. All but the server runs in other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from urllib.parse import urlsplit

import msgspec

from niwaki.runtime import bundled
from niwaki.runtime.api import Delta, FinishReason, Output, SamplingOptions
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.link import frames, wake
from niwaki.runtime.link.engine_client import EngineClient
from niwaki.runtime.link.frames import Message, Order, Report
from niwaki.runtime.link.link import CHUNK_BYTES, LENGTH, Link
from niwaki.runtime.link.remote_engine import RemoteEngine
from niwaki.runtime.server.serve import COLLECTIONS, serving
from niwaki.runtime.server.sse import DONE

BATCHES = (1, 8, 32)
NUM_STEPS = 400
STEP_SECONDS = 0.004  # steps come apart, as an engine's do: a reader that is woken once for many would look cheap
AIM_MICROSECONDS = 150.0
ROUNDS = 5
TOKENIZER = Tokenizer(bundled.MODEL_DIR)
LOADED = frames.Loaded("bench", 4096, 65536, 2048, 256, frames.plain(SamplingOptions()), {}, "")
OUTPUT = Output(" word" * NUM_STEPS, (1000,) * NUM_STEPS, FinishReason("length"), 8, 0)
PROCESSES = multiprocessing.get_context("fork")

# ---------------------------------------------------------------------------------------------------------------
# The other processes, whose time is not counted
# ---------------------------------------------------------------------------------------------------------------


def packed(reports: Sequence[Message]) -> bytes:
    body = msgspec.msgpack.encode(reports)
    return LENGTH.pack(len(body)) + body


def step(numbers: Iterable[int]) -> bytes:
    """The frame of a step with a token for each."""
    return packed(frames.gathered([frames.Piece(number, Delta(" word", (1000 + number,))) for number in numbers]))


def answer(connection: socket.socket, batch: int) -> None:
    """The engine's side: when all have asked, a token for each of them every step."""
    asked: list[int] = []

    def take(orders: Sequence[Order]) -> None:
        asked.extend(order.id for order in orders if isinstance(order, frames.Start))

    orders: Link[Report, Order] = Link(connection.dup(), Order, take, nobody_waits)
    orders.start()
    while len(asked) < batch:
        time.sleep(STEP_SECONDS)
    tell(connection, step(asked))
    connection.sendall(packed([frames.Ended(number, (OUTPUT,), 0, b"") for number in asked]))
    orders.join()


def nobody_waits() -> None:
    """For the end of a link."""


def tell(connection: socket.socket, frame: bytes) -> None:
    for _ in range(NUM_STEPS):
        connection.sendall(frame)
        time.sleep(STEP_SECONDS)


def send(connection: socket.socket, frame: bytes) -> None:
    """For the bare reader."""
    connection.recv(1)
    tell(connection, frame)
    connection.close()


def read_streams(batch: int, url_comes: Connection) -> None:
    """The clients: streams, read to their ends."""
    address = urlsplit(url_comes.recv())
    body = json.dumps({"prompt": "one two three", "max_tokens": NUM_STEPS, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    streams = [socket.create_connection((address.hostname, address.port)) for _ in range(batch)]
    for stream in streams:
        stream.sendall(head.encode() + body)
    for stream in streams:
        came = b""
        while DONE not in came:
            piece = stream.recv(CHUNK_BYTES)
            assert piece, "a stream that ended early"
            came = came[-len(DONE) :] + piece
        stream.close()


def started(target: Callable[..., None], *given: object) -> BaseProcess:
    process = PROCESSES.Process(target=target, args=given)
    process.start()
    return process


# ---------------------------------------------------------------------------------------------------------------
# The server, whose time is counted
# ---------------------------------------------------------------------------------------------------------------


class Steps(Link[Order, Message]):
    """Adds up the processor time in which frames are read, decoded and handed over, without that of waking readers."""

    def __init__(self, connection: socket.socket, client: EngineClient) -> None:
        super().__init__(connection, Message, client.receive, nobody_waits)
        self.seconds = 0.0
        self.begun: list[float] = []  # on the clock of the process
        self._tell_all = wake.tell_all
        wake.tell_all = self._tell_readers

    def _take_in(self) -> bool:
        self.begun.append(time.process_time())
        began = time.thread_time()
        try:
            return super()._take_in()
        finally:
            self.seconds += time.thread_time() - began

    def _tell_readers(self, tells: Iterable[wake.Tell]) -> None:
        began = time.thread_time()
        self._tell_all(tells)
        self.seconds -= time.thread_time() - began


class Heard(EngineClient):
    """Of an engine that says nothing but tokens: no beats."""

    @property
    def is_alive(self) -> bool:
        return True


class Recorded(RemoteEngine):
    """Looks like an engine, and says what `connection` says."""

    def __init__(self, connection: socket.socket) -> None:
        self.tokenizer = TOKENIZER
        self.loaded = LOADED
        self.backend = Heard(TOKENIZER)
        self.steps = Steps(connection, self.backend)

    def start(self) -> None:
        self.steps.start()
        self.backend.connect(self.steps, LOADED)

    def shutdown(self) -> None:
        self.steps.close()
        self.steps.join(5)
        wake.tell_all = self.steps._tell_all

    def read_on(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.steps.read_on(loop)


def served_seconds(batch: int) -> tuple[float, float]:
    """Processor seconds of NUM_STEPS steps with a token for each of `batch` streams.

    Of reading frames, decoding them and handing the tokens to their streams; and of the whole process, with waking the
    streams' tasks, writing events and sending them.
    """
    ours, theirs = socket.socketpair()
    url_goes, url_comes = PROCESSES.Pipe()
    others = [started(answer, theirs, batch), started(read_streams, batch, url_comes)]
    theirs.close()
    with Recorded(ours) as engine:
        with serving(engine) as url:
            gc.collect()
            gc.freeze()  # as `niwaki serve` does
            url_goes.send(url)
            others[1].join()
        steps = engine.steps
        seconds = steps.begun[-1] - steps.begun[0]  # the ends of the answers come last
    for other in others:
        other.join()
        assert other.exitcode == 0
    return steps.seconds, seconds


async def bare_seconds(batch: int) -> float:
    """Processor seconds that the same frames take beside their being read: what waking up costs here and now."""
    ours, theirs = socket.socketpair()
    frame = step(range(1, batch + 1))
    sender = started(send, theirs, frame)
    theirs.close()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    reading = 0.0

    def take() -> None:
        nonlocal reading
        began = time.thread_time()
        came = ours.recv(CHUNK_BYTES)
        reading += time.thread_time() - began
        if not came:
            ended.set()

    loop.add_reader(ours, take)
    with ours:
        before = time.process_time()
        ours.send(b"x")
        await ended.wait()
        seconds = time.process_time() - before
        loop.remove_reader(ours)
    sender.join()
    return seconds - reading


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    gc.set_threshold(*COLLECTIONS)
    is_good = True
    print(f"{os.cpu_count()} processors; microseconds of processor time a step: medians of {ROUNDS} (least to most)")
    print(f"frame: to wake up, read, decode, and hand each stream its token; aim: {AIM_MICROSECONDS:.0f}")
    print(f"{'streams':>7}  {'waking up':>16}  {'frame':>16}  {'with the streams':>18}")
    for batch in BATCHES:
        rounds = [(asyncio.run(bare_seconds(batch)), *served_seconds(batch)) for _ in range(ROUNDS)]
        bare, taken, whole = ([one / NUM_STEPS * 1e6 for one in column] for column in zip(*rounds, strict=True))
        frame = [waking + one for waking, one in zip(bare, taken, strict=True)]
        is_good &= statistics.median(frame) <= AIM_MICROSECONDS
        print(f"{batch:>7}  {said(bare):>16}  {said(frame):>16}  {said(whole):>18}", flush=True)
    return 0 if is_good else 1


def said(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.0f} ({min(figures):.0f} to {max(figures):.0f})"


if __name__ == "__main__":
    raise SystemExit(main())
