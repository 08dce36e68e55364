"""The processes that compile what may never end, and that are killed when it does not.

Owns warm children, started when they are needed; what they answer is read as plain numbers, text or bytes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from niwaki.runtime.constraints.guidance import OF_PROCESSES
from niwaki.runtime.constraints.schema.document import TookTooLong

PROGRAM: Final = "niwaki.runtime.constraints.compile_worker"
# It is nice before it reads its modules, which takes 0.3 s of a processor: one is started for each that is killed.
CODE: Final = f"import os; os.nice({OF_PROCESSES}); from {PROGRAM} import main; main()"
ROOT: Final = str(Path(__file__).parents[3])  # where the package lies: niwaki/runtime/constraints/process.py
LENGTH: Final = struct.Struct("<I")
PROCESSES: Final = 2  # so that one who asks for too much holds up nobody else
START_SECONDS: Final = 120.0  # until the child says that it is ready: nice, on a machine that has other things to do
STARTS: Final = 3  # of children that end before they are ready, in a row: then something is wrong with all of them
# How much slower than alone the child may be on a busy machine. Its own timer ends it by its processor time.
PATIENCE: Final = 10.0
LOOK_SECONDS: Final = 1.0  # between two looks at the clock while a child is waited for
MAX_MEMORY: Final = 2 * 1024**3  # of the child, address space
MAX_ANSWER: Final = 256 * 1024**2


class CompilePool:
    """Several processes. Any thread may ask; it takes an idle one, the last that was used first."""

    def __init__(self, seconds: float, size: int = PROCESSES) -> None:
        self._processes = [CompileProcess(seconds) for _ in range(size)]
        self._idle: queue.LifoQueue[CompileProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)

    def ask(self, request: bytes) -> bytes:
        """Raises as `CompileProcess.ask`."""
        process = self._idle.get()
        try:
            return process.ask(request)
        finally:
            self._idle.put(process)

    @property
    def pids(self) -> list[int]:
        """Of those that run."""
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        """End them, once they have answered. A later `ask` starts one again."""
        for process in self._processes:
            process.close()


class CompileProcess:
    """Asks one thing at a time, within `seconds` of processor time, and of the clock within PATIENCE times that."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], CompileProcess] | None = None

    def ask(self, request: bytes) -> bytes:
        """What the program answers.

        Raises:
            TookTooLong: not done in time, or out of memory. The child is being replaced.
            OSError: no child could be started.
        """
        with self._lock:
            was_late = False
            while True:
                child = self._ready()
                try:
                    return self._answer(child, request)
                except (TookTooLong, OSError) as error:
                    self._stop()
                    # By the clock alone, before our patience ended: it went on while a container was paused.
                    if child.returncode == -signal.SIGALRM and not was_late:
                        was_late = True
                        continue
                    self._started()  # the next one finds it warm
                    raise TookTooLong from error

    def _answer(self, child: subprocess.Popen[bytes], request: bytes) -> bytes:
        assert child.stdin is not None
        child.stdin.write(LENGTH.pack(len(request)) + request)  # the child reads all of it
        return _read_frame(child, Patience(PATIENCE * self._seconds))

    def close(self) -> None:
        """End the child. A later `ask` starts another."""
        with self._lock:
            self._stop()

    @property
    def pid(self) -> int | None:
        """Of the child, where one runs."""
        return self._child.pid if self._child is not None else None

    def _started(self) -> subprocess.Popen[bytes]:
        known = os.environ.get("PYTHONPATH")
        child = subprocess.Popen(  # noqa: S603  # our own program, nothing of a user's in it
            # -P: the working directory must not come first in sys.path.
            [sys.executable, "-P", "-c", CODE, str(self._seconds), str(MAX_MEMORY)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{known}" if known else ROOT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            process_group=0,  # not a session of its own: from a shell Linux shares processors among those, however nice
        )
        self._child, self._is_ready = child, False
        self._finalizer = weakref.finalize(self, _end, child)
        return child

    def _ready(self) -> subprocess.Popen[bytes]:
        """A child that waits to be asked. One that somebody killed, also while it started, is replaced: no request is
        to blame for that."""
        patience = Patience(START_SECONDS)
        for _ in range(STARTS):
            if self._child is not None and self._child.poll() is not None:
                self._stop()
            child = self._child or self._started()
            if self._is_ready:
                return child
            try:
                _read_frame(child, patience)
            except TookTooLong:
                self._stop()
            else:
                self._is_ready = True
                return child
            if not patience.left():
                break
        raise OSError(f"the compile process did not start: {sys.executable} -c {CODE!r}")

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None


class Patience:
    """For how long one waits. Time in which nobody looked counts as LOOK_SECONDS: where a container is paused or a
    machine suspended, the child and this process stand still together."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left = seconds
        self._clock = clock
        self._looked_at = clock()

    def left(self) -> float:
        """In seconds. Look again within LOOK_SECONDS."""
        now = self._clock()
        self._left = max(0.0, self._left - min(now - self._looked_at, LOOK_SECONDS))
        self._looked_at = now
        return self._left


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _read_frame(child: subprocess.Popen[bytes], patience: Patience) -> bytes:
    length = LENGTH.unpack(_read(child, LENGTH.size, patience))[0]
    if length > MAX_ANSWER:
        raise TookTooLong
    return _read(child, length, patience)


def _read(child: subprocess.Popen[bytes], size: int, patience: Patience) -> bytes:
    assert child.stdout is not None
    parts: list[bytes] = []
    while size > 0:
        left = patience.left()
        ready, _, _ = select.select([child.stdout], [], [], min(left, LOOK_SECONDS))
        if not ready and left:
            continue
        part = child.stdout.read(min(size, 1 << 20)) if ready else b""
        if not part:
            raise TookTooLong
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
