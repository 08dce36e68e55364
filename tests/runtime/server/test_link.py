"""The link between the two processes: nothing is lost or turned round, whoever reads, and its end is told once."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from niwaki.runtime.server.link import CHUNK_BYTES, LENGTH, Link


class Reader:
    """Notes what comes in, on which thread, and how often the end was told."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.numbers: list[int] = []
        self.threads: list[threading.Thread] = []
        self.num_ends = 0
        self.came = threading.Semaphore(0)
        self.link: Link[object, list[int]] = Link(ours, list[int], self._receive, self._end)
        self.link.start()

    def send(self, *numbers: int) -> None:
        body = msgspec.msgpack.encode([[number] for number in numbers])
        self.theirs.sendall(LENGTH.pack(len(body)) + body)

    def wait(self) -> None:
        assert self.came.acquire(timeout=60)

    def _receive(self, messages: Sequence[list[int]]) -> None:
        self.numbers += [number for message in messages for number in message]
        self.threads.append(threading.current_thread())
        self.came.release()

    def _end(self) -> None:
        self.num_ends += 1
        self.came.release()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.theirs.close()
    made.link.join(60)
    assert made.num_ends == 1


async def come(reader: Reader) -> None:
    await asyncio.to_thread(reader.wait)


def test_a_frame_larger_than_what_is_read_at_once_is_one_frame(reader: Reader) -> None:
    numbers = range(CHUNK_BYTES)
    reader.send(*numbers)
    reader.wait()
    assert reader.numbers == list(numbers)


def test_reading_moves_to_an_event_loop_and_back_and_keeps_the_order(reader: Reader) -> None:
    async def on_a_loop() -> None:
        reader.link.read_on(asyncio.get_running_loop())
        reader.send(1)  # the thread waits for it, and hands over the link behind it
        await come(reader)
        reader.send(2)
        await come(reader)
        reader.link.read_on(None)
        reader.send(3)
        await come(reader)

    reader.send(0)
    reader.wait()
    asyncio.run(on_a_loop())
    reader.send(4)
    reader.wait()
    assert reader.numbers == [0, 1, 2, 3, 4]
    is_here = [thread is threading.current_thread() for thread in reader.threads]
    assert is_here == [False, False, True, False, False]


def test_a_loop_that_ends_before_the_thread_has_handed_over_leaves_it_the_link(reader: Reader) -> None:
    async def short() -> None:
        reader.link.read_on(asyncio.get_running_loop())
        reader.link.read_on(None)

    asyncio.run(short())
    reader.send(1)
    reader.wait()
    reader.send(2)
    reader.wait()
    assert reader.numbers == [1, 2]


def test_the_end_is_told_on_the_loop_that_reads(reader: Reader) -> None:
    async def until_the_end() -> None:
        reader.link.read_on(asyncio.get_running_loop())
        reader.send(1)
        await come(reader)
        reader.theirs.close()
        await come(reader)
        reader.link.read_on(None)  # there is nothing left to be read

    asyncio.run(until_the_end())
    assert reader.num_ends == 1
