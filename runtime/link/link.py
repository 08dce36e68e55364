"""The way between the API process and the engine process: messages of `frames` over a Unix socket.

A frame is four bytes of length and a msgpack array of messages. Whoever posts writes what the socket takes at once, and
never waits: a thread of the link writes the rest, and what was posted until it gets to it is one frame. Another one
reads, or an event loop does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

log = logging.getLogger("niwaki.server")

LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 30  # both ends are ours; more than this is a torn stream
CHUNK_BYTES = 1 << 16
READER = "niwaki-link-read"  # name of the threads on which what comes in is handed over

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class Link(Generic[Sent, Received]):
    """One end of the socket. Any thread may post; `receive` and then, once, `ended` are called on a thread of the link,
    or on the event loop that it was told to `read_on`.

    `kind` is what comes in. The link owns the socket.
    """

    def __init__(
        self,
        connection: socket.socket,
        kind: object,
        receive: Callable[[Sequence[Received]], None],
        ended: Callable[[], None],
        gather: Callable[[Sequence[Sent]], Sequence[object]] | None = None,
        instead: Callable[[Sent, Exception], Sent | None] | None = None,
        misread: Callable[[object, Exception], None] | None = None,
    ) -> None:
        """`gather` may make fewer messages of those of a frame. `instead`: what is sent for one that cannot be written,
        for the reason that is given; without it whoever posts is told. `misread` is told of one that came and is none
        of `kind`, as the plain data that it is; without it that is the link's end."""
        self._connection = connection
        self._kind = kind
        self._decoder: msgspec.msgpack.Decoder[list[Received]] = msgspec.msgpack.Decoder(list[kind])  # type: ignore[valid-type]  # a union as a value
        self._encoder = msgspec.msgpack.Encoder()
        self._receive = receive
        self._ended = ended
        self._gather = gather
        self._instead = instead
        self._misread = misread
        self._chunk = memoryview(bytearray(CHUNK_BYTES))  # read into, each frame anew
        self._unread = bytearray()  # what came in behind the last whole frame
        self._read_by: asyncio.AbstractEventLoop | None = None  # None: a thread; used on the loop only
        self._changed = threading.Condition()  # the fields below
        self._wanted: asyncio.AbstractEventLoop | None = None  # that is to read
        self._posted: list[Sent] = []
        self._unsent = b""  # what the socket did not take of the last frame
        self._must_write = False  # by the thread, which then has the socket's other end to itself
        self._is_closed = False
        self._reading = self._reader()
        self._writing = threading.Thread(target=self._write, name="niwaki-link-write", daemon=True)

    def start(self) -> None:
        self._reading.start()
        self._writing.start()

    def read_on(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Read on this event loop from the next frame on, which spares two wake-ups a frame. None, said on the loop
        before it ends: on a thread again."""
        with self._changed:
            self._wanted = loop
        if loop is None and self._read_by is not None:
            self._leave_loop()
            self._read_on_thread()

    def post(self, message: Sent, *, flush: bool = True) -> None:
        """Send it soon; without `flush`, with the next one that has it. Lost when the link is down: `ended` tells.

        Raises what it cannot be written for, where nothing is sent instead; all others are sent.
        """
        with self._changed:
            self._posted.append(message)
            if flush:
                self._send()

    def flush(self) -> None:
        """Send what was posted, as one frame."""
        with self._changed:
            if self._posted:
                self._send()

    def close(self) -> None:
        """Send what was posted, then end both directions. The other side's `ended` is called."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        for thread in (self._reading, self._writing):
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _send(self) -> None:
        """Write what was posted, as far as that needs no waiting. Called with the lock held."""
        if self._must_write or self._is_closed:
            return
        frame, error = self._frame()
        try:
            num_sent = self._connection.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            num_sent = 0
        except OSError:  # nobody reads any more: the reading side finds out, too
            num_sent = len(frame)
        if num_sent < len(frame):
            self._unsent = frame[num_sent:]
            self._must_write = True
            self._changed.notify()
        if error is not None:
            raise error

    def _write(self) -> None:
        while True:
            with self._changed:
                # Flushed while it wrote, or left over before it began to.
                self._must_write = self._must_write and bool(self._posted or self._unsent)
                self._changed.wait_for(lambda: self._must_write or self._is_closed)
                frames, self._unsent = self._unsent, b""
                frames += self._frame()[0] if self._posted else b""
                is_closed = self._is_closed
            try:
                self._connection.sendall(frames)
            except OSError:
                is_closed = True
            if is_closed:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                return

    def _frame(self) -> tuple[bytes, Exception | None]:
        """Of all that was posted, and why one of them is missing in it. Called with the lock held."""
        posted, self._posted = self._posted, []
        error: Exception | None = None
        try:
            body = self._written(posted)
        except Exception:  # one fault must not take along what others wait for
            posted, error = self._writable(posted)
            body = self._written(posted)
        return LENGTH.pack(len(body)) + body, error

    def _written(self, posted: Sequence[Sent]) -> bytes:
        return self._encoder.encode(posted if self._gather is None else self._gather(posted))

    def _writable(self, posted: Sequence[Sent]) -> tuple[list[Sent], Exception | None]:
        """Those that can be written, what is sent for the others, and of one for which nothing is, the reason."""
        kept: list[Sent] = []
        left_out: Exception | None = None
        for message in posted:
            try:
                self._encoder.encode(message)
                kept.append(message)
            except Exception as error:
                log.exception("a message could not be written")
                told = None if self._instead is None else self._instead(message, error)
                if told is not None:
                    kept.append(told)
                elif self._instead is None:
                    left_out = error
        return kept, left_out

    # -- reading ----------------------------------------------------------------------------------------------------

    def _reader(self) -> threading.Thread:
        return threading.Thread(target=self._read, name=READER, daemon=True)

    def _read(self) -> None:
        while not self._goes_to_loop() and self._take_in():
            pass

    def _goes_to_loop(self) -> bool:
        """Whether a loop reads from now on. One that is taken away later runs once more, and finds what waits here."""
        with self._changed:
            if self._wanted is not None:
                self._wanted.call_soon_threadsafe(self._enter_loop)
            return self._wanted is not None

    def _enter_loop(self) -> None:
        loop = self._wanted
        if loop is None:
            self._read_on_thread()
        else:
            loop.add_reader(self._connection, self._take_in)
            self._read_by = loop

    def _leave_loop(self) -> None:
        if self._read_by is not None:
            self._read_by.remove_reader(self._connection)
            self._read_by = None

    def _read_on_thread(self) -> None:
        self._reading = self._reader()
        self._reading.start()

    def _take_in(self) -> bool:
        """Wait for something to come in; hand over the frames that are whole. False: that was the end."""
        is_open = False
        try:
            size = self._connection.recv_into(self._chunk)
            body = size - LENGTH.size
            if not self._unread and body >= 0 and LENGTH.unpack_from(self._chunk)[0] == body:  # nearly always
                self._receive(self._decoded(self._chunk[LENGTH.size : size]))
            else:
                self._unread += self._chunk[:size]
                while (frame := self._next_frame()) is not None:
                    self._receive(self._decoded(frame))
            is_open = size > 0
        except OSError:
            pass
        finally:
            if not is_open:
                self.close()
                self._leave_loop()
                self._ended()
                self._connection.close()
        return is_open

    def _decoded(self, frame: bytes | memoryview) -> Sequence[Received]:
        try:
            return self._decoder.decode(frame)
        except msgspec.ValidationError:  # one fault must not take along what others wait for
            if self._misread is None:
                raise
            return self._readable(frame, self._misread)

    def _readable(self, frame: bytes | memoryview, misread: Callable[[object, Exception], None]) -> list[Received]:
        found: list[Received] = []
        for message in msgspec.msgpack.decode(frame, type=list[msgspec.Raw]):
            try:
                found.append(msgspec.msgpack.decode(message, type=self._kind))
            except msgspec.ValidationError as error:
                log.exception("a message could not be read")
                misread(msgspec.msgpack.decode(message), error)
        return found

    def _next_frame(self) -> bytes | None:
        """Without its length; None while it is not whole."""
        start = LENGTH.size
        if len(self._unread) < start:
            return None
        size = LENGTH.unpack_from(self._unread)[0]
        assert size <= MAX_FRAME, "a torn stream"
        if len(self._unread) < start + size:
            return None
        frame = bytes(self._unread[start : start + size])
        del self._unread[: start + size]
        return frame
