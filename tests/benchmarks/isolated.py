"""Parts of a run in processes of their own: what crashes, hangs or loses its device takes one part with it.

A worker is a process that is handed one part after another over a pipe and tells of each line that it finds. Where it
dies, loses its device or takes too long it is ended, with all that it started, and another goes on with the next part.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import IO, Final

Json = dict[str, object]

START_SECONDS: Final = 90.0  # in which a worker must be ready: loading torch and CUDA for the first time is slow
OPTION: Final = "--worker"  # of the program that is a worker, with the pipe that it answers on


@dataclass(slots=True)
class Isolated:
    """Runs parts by workers that `command` starts. `tell(part, line)` is given each line, by one thread at a time;
    a part that is not run to its end has a line with the reason, "failed" or "left out"."""

    command: Sequence[str]
    tell: Callable[[str, Json], object]
    learn: Callable[[Json], object]  # is given what each worker says about its machine
    knowledge: Json = field(default_factory=dict)  # what each worker is told with a part
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _cannot_start: str = ""

    def run(
        self, parts: Sequence[str], *, seconds: Callable[[str], float], ends: float, stops: float, workers: int = 1
    ) -> None:
        """Each part within its seconds; none is begun behind `ends`, or goes on behind `stops`, of
        `time.monotonic`."""
        waiting: SimpleQueue[str] = SimpleQueue()
        for part in parts:
            waiting.put(part)
        threads = [
            threading.Thread(target=self._work, args=(waiting, seconds, ends, stops))
            for _ in range(min(workers, len(parts)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, waiting: SimpleQueue[str], seconds: Callable[[str], float], ends: float, stops: float) -> None:
        worker: Worker | None = None
        while True:
            try:
                part = waiting.get_nowait()
            except Empty:
                break
            if time.monotonic() >= ends:
                self._say(part, {"left out": "no time left"})
                continue
            if worker is None and not self._cannot_start:
                worker = self._started(stops)
            if worker is None:
                self._say(part, {"failed": self._cannot_start})
            elif not self._done(worker, part, min(time.monotonic() + seconds(part), stops)):
                worker.end()
                worker = None
        if worker is not None:
            worker.close()

    def _started(self, stops: float) -> Worker | None:
        worker = Worker(self.command)
        until = min(time.monotonic() + START_SECONDS, stops)
        for answer in worker.answers(until):
            if isinstance(about := answer.get("ready"), dict):
                with self._lock:
                    self.learn(about)
                return worker
        self._cannot_start = f"no worker starts: {worker.fate(until)}"
        worker.end()
        return None

    def _done(self, worker: Worker, part: str, until: float) -> bool:
        """Whether the worker can be given another part."""
        worker.ask({"part": part, **self.knowledge})
        for answer in worker.answers(until):
            if "done" in answer:
                return answer["done"] is True
            self._say(part, answer)
        self._say(part, {"failed": worker.fate(until)})
        return False

    def _say(self, part: str, line: Json) -> None:
        with self._lock:
            self.tell(part, line)


class Worker:
    """A process of its own group, and the two pipes to it."""

    def __init__(self, command: Sequence[str]) -> None:
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [*command, OPTION, str(write)], stdin=subprocess.PIPE, pass_fds=[write], start_new_session=True, text=True
        )
        os.close(write)
        self._read = read
        self._rest = b""
        self._began = time.monotonic()

    def ask(self, part: Json) -> None:
        self._began = time.monotonic()
        stdin = self._process.stdin
        assert stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):  # where it has died there will be no answers either
            stdin.write(json.dumps(part) + "\n")
            stdin.flush()

    def answers(self, until: float) -> Iterator[Json]:
        """What it says, as it comes, until it ends or `until` has come."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while True:
                *whole, self._rest = self._rest.split(b"\n")
                for line in whole:
                    yield json.loads(line)
                if not selector.select(max(0.0, until - time.monotonic())):
                    return
                got = os.read(self._read, 1 << 16)
                if not got:
                    return
                self._rest += got

    def fate(self, until: float) -> str:
        """Why there are no answers any more."""
        if time.monotonic() >= until:
            return f"it took longer than {until - self._began:.0f} s"
        code = self._process.wait()
        return f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"

    def close(self) -> None:
        """When it has done all that it was given."""
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self.end()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with what it has started
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        os.close(self._read)


def serve(
    pipe: int,
    run: Callable[[str, Json], Iterator[Json]],
    is_lost: Callable[[], bool],
    in_short: Callable[[BaseException], str],
    about: Json,
) -> None:
    """The life of a worker: what it is handed over stdin it runs, and tells of over `pipe`, until stdin ends, or its
    device is lost."""
    with os.fdopen(pipe, "w", encoding="utf-8") as answers:
        _answer(answers, {"ready": about})
        for asked in sys.stdin:
            told: Json = json.loads(asked)
            is_whole = True
            try:
                for line in run(str(told["part"]), told):
                    _answer(answers, line)
            except ModuleNotFoundError as error:
                _answer(answers, {"left out": f"{error.name} is not installed"})
            except Exception as error:
                traceback.print_exc()
                _answer(answers, {"failed": in_short(error)})
                is_whole = not is_lost()
            _answer(answers, {"done": is_whole})
            if not is_whole:
                return


def _answer(answers: IO[str], line: Json) -> None:
    answers.write(json.dumps(line) + "\n")
    answers.flush()
