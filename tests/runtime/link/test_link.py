"""The link between the two processes: nothing is lost or turned round, and its end is told once."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from niwaki.runtime.api import Delta, GenerationError
from niwaki.runtime.link import frames
from niwaki.runtime.link.link import CHUNK_BYTES, LENGTH, Link


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


class Writer:
    """Posts numbers; what comes out at the other end is read when a test wants it."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(60)
        self.link: Link[list[int], object] = Link(ours, object, lambda _: None, lambda: None)
        self.link.start()
        self._came = b""

    def frame(self) -> list[list[int]]:
        """The next one."""
        size = LENGTH.unpack(self._read(LENGTH.size))[0]
        return list(msgspec.msgpack.decode(self._read(size), type=list[list[int]]))

    def _read(self, size: int) -> bytes:
        while len(self._came) < size:
            came = self.theirs.recv(CHUNK_BYTES)
            assert came, "the end"
            self._came += came
        found, self._came = self._came[:size], self._came[size:]
        return found


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.theirs.close()
    made.link.close()
    made.link.join(60)


def test_what_is_flushed_is_sent_on_the_thread_that_flushes_it(writer: Writer) -> None:
    writer.link.post([1], flush=False)
    writer.theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        writer.frame()
    writer.link.flush()
    assert writer.frame() == [[1]], "it is there: nobody was waited for"
    writer.link.flush()
    writer.link.post([2], flush=False)
    writer.link.post([3])
    assert writer.frame() == [[2], [3]]


def test_who_posts_more_than_the_socket_takes_does_not_wait_and_nothing_is_lost(writer: Writer) -> None:
    large = list(range(1 << 20))
    writer.link.post(large)
    for number in range(100):  # nobody has read a byte
        writer.link.post([number])
    frames = [writer.frame()]
    while frames[-1][-1] != [99]:
        frames.append(writer.frame())
    assert frames[0] == [large]
    assert [message for frame in frames[1:] for message in frame] == [[number] for number in range(100)]


def test_posts_of_many_threads_all_arrive_those_of_each_in_order(writer: Writer) -> None:
    def post(thread: int) -> None:
        for number in range(500):
            writer.link.post([thread, number, *[0] * (thread * 1000)], flush=number % 3 == 0 or number == 499)

    posting = [threading.Thread(target=post, args=(thread,)) for thread in range(6)]
    for one in posting:
        one.start()
    came: dict[int, list[int]] = {thread: [] for thread in range(6)}
    while sum(map(len, came.values())) < 3000:
        for thread, number, *_ in writer.frame():
            came[thread].append(number)
    for one in posting:
        one.join()
    assert all(numbers == list(range(500)) for numbers in came.values())


def test_what_was_posted_before_the_close_is_sent(writer: Writer) -> None:
    large = list(range(1 << 20))
    writer.link.post(large)
    writer.link.post([1], flush=False)
    writer.link.close()
    assert writer.frame() == [large]
    assert writer.frame() == [[1]]
    assert writer.theirs.recv(1) == b""


def test_what_the_socket_does_not_take_before_the_threads_begin_is_written_by_them() -> None:
    """It was forgotten, and the next frame stood in the middle of this one."""
    ours, theirs = socket.socketpair()
    reader = Reader()
    writing: Link[list[int], object] = Link(ours, object, lambda _: None, lambda: None)
    writing.post([*range(CHUNK_BYTES)] * 20)  # more than a socket holds
    writing.start()
    reading: Link[object, list[int]] = Link(theirs, list[int], reader._receive, reader._end)
    reading.start()
    reader.wait()
    writing.post([1])
    reader.wait()
    writing.close()
    writing.join(60)
    reading.join(60)
    assert reader.numbers == [*[*range(CHUNK_BYTES)] * 20, 1]
    reader.theirs.close()
    reader.link.join(60)


def test_a_report_that_cannot_be_written_takes_no_other_along_and_is_told_as_a_failure() -> None:
    theirs, ours = socket.socketpair()
    told: list[frames.Message] = []
    come = threading.Semaphore(0)

    def receive(reports: Sequence[frames.Message]) -> None:
        told.extend(reports)
        come.release()

    link: Link[frames.Report, object] = Link(
        ours, object, lambda _: None, lambda: None, frames.gathered, frames.unwritten
    )
    reading: Link[object, frames.Message] = Link(theirs, frames.Message, receive, lambda: None)
    link.start()
    reading.start()
    torn = Delta("\ud800")
    link.post(frames.Piece(1, Delta("a")), flush=False)
    link.post(frames.Piece(2, torn), flush=False)
    link.post(frames.Piece(3, Delta("b")), flush=False)
    link.post(frames.CallFailed(4, 7, "RequestError", "\ud800"), flush=False)
    link.post(frames.Beat({"unknown": object()}), flush=False)  # type: ignore[dict-item]  # no number
    link.post(frames.Flushed(5, is_done=True))
    assert come.acquire(timeout=60)
    reason = GenerationError.__name__, "UnicodeEncodeError in the engine process"
    assert told == [
        frames.Pieces.of([1, 3], [Delta("a"), Delta("b")]),
        frames.Failed(2, *reason),
        frames.CallFailed(4, 7, *reason),
        frames.Flushed(5, is_done=True),
    ]
    link.close()
    for one in (link, reading):
        one.join(60)


def test_a_message_that_is_none_takes_no_other_along_and_is_told() -> None:
    theirs, ours = socket.socketpair()
    come: list[frames.Order] = []
    misread: list[object] = []
    have_come = threading.Semaphore(0)

    def receive(orders: Sequence[frames.Order]) -> None:
        come.extend(orders)
        have_come.release()

    link: Link[object, frames.Order] = Link(
        ours, frames.Order, receive, lambda: None, misread=lambda message, error: misread.append(message)
    )
    link.start()
    for orders in ([frames.Close(1), [7, 2, None, ""], frames.Close(3)], [frames.Close(4)]):
        body = msgspec.msgpack.encode(orders)
        theirs.sendall(LENGTH.pack(len(body)) + body)
        assert have_come.acquire(timeout=60)
    assert come == [frames.Close(1), frames.Close(3), frames.Close(4)]
    assert misread == [[7, 2, None, ""]]
    theirs.close()
    link.join(60)


def test_who_posts_what_cannot_be_written_is_told_and_the_others_are_sent(writer: Writer) -> None:
    writer.link.post([1], flush=False)
    with pytest.raises(TypeError, match="object"):
        writer.link.post([object()])  # type: ignore[list-item]  # which msgpack has no type for
    assert writer.frame() == [[1]]
    writer.link.post([2])
    assert writer.frame() == [[2]]
