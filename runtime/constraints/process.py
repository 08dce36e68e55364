"""The process that compiles what may never end, and that is killed when it does not.

Owns one warm child, started on first use. The child knows nothing of niwaki (see worker.py, grammar_worker.py) and
gets patterns or grammars only; what it answers is read as plain numbers or bytes.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Final

from niwaki.runtime.constraints.schema.document import TookTooLong
from niwaki.runtime.constraints.worker import LENGTH, OK, Transitions

WORKER: Final = Path(__file__).with_name("worker.py")
START_SECONDS: Final = 30.0  # until the child says that it is ready, on a machine that has other things to do
# How much slower than alone the child may be on a busy machine. Its own timer ends it by its processor time.
PATIENCE: Final = 10.0
MAX_MEMORY: Final = 2 * 1024**3  # of the child, address space
MAX_ANSWER: Final = 256 * 1024**2


class CompileProcess:
    """Asks `script` to compile one source at a time, each within `seconds` of processor time, and of the clock within
    PATIENCE times that. Any thread may ask; they wait for each other."""

    def __init__(self, seconds: float, script: Path = WORKER) -> None:
        self._seconds = seconds
        self._script = script
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], CompileProcess] | None = None

    def compile(self, source: str) -> Transitions:
        """The automaton of a pattern in the Rust dialect. Raises as `ask` does."""
        return Transitions.from_bytes(self.ask(source))

    def ask(self, source: str) -> bytes:
        """What the script answers.

        Raises:
            TookTooLong: not done in time, or out of memory. The child was replaced.
            ValueError: it refuses the source.
            OSError: no child could be started.
        """
        with self._lock:
            if self._child is not None and self._child.poll() is not None:  # killed by someone since the last call
                self._stop()
            child = self._child or self._started()
            try:
                body = self._exchange(child, source.encode())
            except (TookTooLong, OSError) as error:
                self._stop()
                raise TookTooLong(f"not done within {self._seconds:g} s") from error
        if body[:1] == OK:
            return body[1:]
        raise ValueError(body[1:].decode(errors="replace"))

    def close(self) -> None:
        """End the child. A later `compile` starts another."""
        with self._lock:
            self._stop()

    @property
    def pid(self) -> int | None:
        """Of the child, where one runs."""
        return self._child.pid if self._child is not None else None

    def _started(self) -> subprocess.Popen[bytes]:
        # -P: the script's folder must not come first in sys.path.
        command = [sys.executable, "-P", str(self._script), str(self._seconds), str(MAX_MEMORY)]
        child = subprocess.Popen(  # noqa: S603  # our own script, nothing of a user's in it
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._child = child
        self._finalizer = weakref.finalize(self, _end, child)
        try:
            _read_frame(child, time.monotonic() + START_SECONDS)
        except TookTooLong:
            self._stop()
            raise OSError(f"the compile process did not start: {' '.join(command)}") from None
        return child

    def _exchange(self, child: subprocess.Popen[bytes], request: bytes) -> bytes:
        assert child.stdin is not None
        child.stdin.write(LENGTH.pack(len(request)) + request)  # at most 1 MiB, and the child reads all of it
        return _read_frame(child, time.monotonic() + PATIENCE * self._seconds)

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _read_frame(child: subprocess.Popen[bytes], deadline: float) -> bytes:
    length = LENGTH.unpack(_read(child, LENGTH.size, deadline))[0]
    if length > MAX_ANSWER:
        raise TookTooLong(f"an answer of {length} bytes")
    return _read(child, length, deadline)


def _read(child: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert child.stdout is not None
    parts: list[bytes] = []
    while size > 0:
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        part = child.stdout.read(min(size, 1 << 20)) if ready else b""
        if not part:
            raise TookTooLong("no answer")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
