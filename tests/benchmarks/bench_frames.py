"""What the engine's frames cost the API process: processor time a step, from the socket to the event loop's readers.

python -m tests.benchmarks.bench_frames
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

import msgspec
import numpy as np

from niwaki.runtime import bundled
from niwaki.runtime.api import Delta, SamplingOptions, SamplingParams
from niwaki.runtime.server import frames
from niwaki.runtime.server.engine_client import EngineClient
from niwaki.runtime.server.feed import Feed, Piece
from niwaki.runtime.server.frames import Report
from niwaki.runtime.server.link import CHUNK_BYTES, LENGTH, Link
from niwaki.runtime.server.metrics import Metrics
from niwaki.runtime.tokenizer import Tokenizer

BATCHES = (1, 8, 32)
NUM_STEPS = 400
STEP_SECONDS = 0.004  # steps come apart, as an engine's do: a reader that is woken once for many would look cheap
AIM_MICROSECONDS = 150.0
PAIRS = 5
TOKENIZER = Tokenizer(bundled.MODEL_DIR)
PROMPT = np.arange(8, dtype=np.int32)
LOADED = frames.Loaded("bench", 4096, 65536, 2048, 256, frames.plain(SamplingOptions()), {}, "")


def send(connection: socket.socket, frame: bytes) -> None:
    """The engine's side, in a process of its own: its processor time is not counted."""
    connection.recv(1)
    for _ in range(NUM_STEPS):
        connection.sendall(frame)
        time.sleep(STEP_SECONDS)
    connection.close()


async def drain(feed: Feed, count: int) -> None:
    """What a stream's reader does, up to where it would write its own format."""
    seen = 0
    async for events in feed.batches():
        seen += sum(isinstance(event, Piece) for event in events)
        if seen == count:
            return


class TimedLink(Link[frames.Order, Report]):
    """Counts the processor time in which frames are read, decoded and handed over."""

    seconds = 0.0

    def _take_in(self) -> bool:
        began = time.thread_time()
        try:
            return super()._take_in()
        finally:
            self.seconds += time.thread_time() - began


async def seconds_of(batch: int) -> tuple[float, float]:
    """Processor seconds for NUM_STEPS steps, each with one token for every one of `batch` streams.

    Of what reads frames, decodes them and hands the tokens over; and of the whole process, the streams' readers on the
    event loop and their histograms included.
    """
    ours, theirs = socket.socketpair()
    client = EngineClient(TOKENIZER)
    link = TimedLink(ours, Report, client.receive, lambda: None)
    client.connect(link, LOADED)
    feeds = [Feed(1, Metrics(dict)) for _ in range(batch)]
    for feed in feeds:
        feed.add(client.start(PROMPT, SamplingParams()))
    sender = started(batch, theirs)
    link.read_on(asyncio.get_running_loop())
    link.start()  # what `start` posted goes out now, and the sender begins
    before = time.process_time()
    await asyncio.gather(*(drain(feed, NUM_STEPS) for feed in feeds))
    seconds = time.process_time() - before
    link.read_on(None)
    sender.join()
    link.join(5)
    return link.seconds, seconds


async def bare_seconds(batch: int) -> float:
    """Processor seconds that the same frames take beside their being read: what waking up costs here and now."""
    ours, theirs = socket.socketpair()
    sender = started(batch, theirs)
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


def started(batch: int, theirs: socket.socket) -> BaseProcess:
    body = msgspec.msgpack.encode([frames.Piece(n, Delta(" word", (1000 + n,))) for n in range(1, batch + 1)])
    sender = multiprocessing.get_context("fork").Process(target=send, args=(theirs, LENGTH.pack(len(body)) + body))
    sender.start()
    theirs.close()
    return sender


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args(argv)
    is_good = True
    print(
        f"{os.cpu_count()} processors; microseconds of processor time a step: medians of {PAIRS} runs (least to most)"
    )
    print(f"aim: {AIM_MICROSECONDS:.0f} to hand over; in it `bare`, the waking up alone")
    for batch in BATCHES:
        runs = [(asyncio.run(bare_seconds(batch)), *asyncio.run(seconds_of(batch))) for _ in range(PAIRS)]
        bare, taken, whole = ([one / NUM_STEPS * 1e6 for one in column] for column in zip(*runs, strict=True))
        handed = [waking + one for waking, one in zip(bare, taken, strict=True)]
        is_good &= statistics.median(handed) <= AIM_MICROSECONDS
        print(
            f"batch {batch:>2}: {said(bare)} bare, {said(handed)} to hand over, {said(whole)} with the streams' readers"
        )
    return 0 if is_good else 1


def said(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.0f} ({min(figures):.0f} to {max(figures):.0f})"


if __name__ == "__main__":
    raise SystemExit(main())
