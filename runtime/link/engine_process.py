"""The engine process, watched: started, told to load a model, started again when it dies or hangs, ended with us.

What it is asked goes through `backend`; this file owns the process and the socket only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import niwaki.runtime
from niwaki.runtime import bundled
from niwaki.runtime.api import EngineStopped, NiwakiError, Pending
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.link import frames
from niwaki.runtime.link.engine_client import EngineClient
from niwaki.runtime.link.frames import Message, Order
from niwaki.runtime.link.link import Link
from niwaki.runtime.link.remote_engine import RemoteEngine

log = logging.getLogger("niwaki.server")

MAX_RESTARTS = 5  # within RESTART_SECONDS; an engine that dies more often needs somebody to look at it
RESTART_SECONDS = 600.0
HANGING_SECONDS = 30.0  # without a beat; then it is killed
WATCH_SECONDS = 0.25
AGAIN_SECONDS = 1.0  # until a process is tried for again that the system did not start
END_SECONDS = 10.0  # for it to end by itself when the socket does


class EngineProcess(RemoteEngine):
    """An engine in a process of its own.

    When the process dies, whoever waits gets EngineStopped at once, and another one is started: at most
    `max_restarts` times in RESTART_SECONDS.
    """

    def __init__(
        self,
        model: Path | None = None,
        options: Mapping[str, object] | None = None,
        *,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self._model = model
        self._options = dict(options or {})
        self._max_restarts = max_restarts
        self._hanging_seconds = HANGING_SECONDS
        self._restarted_at: deque[float] = deque()
        self._child: _Child | None = None
        self._looping = threading.Lock()  # the field below
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="niwaki-watch", daemon=True)

    def launch(self) -> None:
        """Start the process and do not wait. Calling it twice is allowed; `start` does what is left."""
        if self._child is None:
            self._child = _Child(self._model, self._options)

    def start(self) -> None:
        """Start the process and wait until its model is loaded.

        Raises:
            ConfigError, ModelError: as `Engine`. EngineStopped: it died on the way.
        """
        self.launch()
        assert self._child is not None
        self.tokenizer = Tokenizer(bundled.MODEL_DIR if self._model is None else self._model)
        self.backend = EngineClient(self.tokenizer)
        self.loaded = self._child.connect(self.backend)
        self._watching.start()

    def read_on(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with self._looping:
            self._loop = loop
            if self._child is not None:
                self._child.link.read_on(loop)

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._child is None else self._child.process.pid

    @property
    def num_restarts(self) -> int:
        """Within the last RESTART_SECONDS."""
        return len(self._restarted_at)

    def shutdown(self) -> None:
        """End the process; who still waits gets EngineStopped. Calling it twice is allowed."""
        self._is_over.set()
        if self._child is not None and not self._child.loaded.is_done:
            self._child.kill()  # it is being started again, which nobody needs any more
        if self._watching.ident is not None and threading.current_thread() is not self._watching:
            self._watching.join()
        if self._child is not None:
            self._child.end()
            self._child = None

    # -- watching, on a thread of its own ---------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_over.is_set():
            child = self._child
            assert child is not None
            if child.is_gone.wait(WATCH_SECONDS):
                code = child.kill()
                if self._is_over.is_set():
                    return
                log.error("the engine process died with code %s", code)
                if not self._restart():
                    return
            elif self.backend.silent_seconds > self._hanging_seconds:
                log.error("the engine process hangs for %.0f s: it is killed", self.backend.silent_seconds)
                child.kill()

    def _restart(self) -> bool:
        """Start until one lives or they are too many; False: the server stays without an engine."""
        while not self._is_over.is_set():
            now = time.monotonic()
            while self._restarted_at and now - self._restarted_at[0] > RESTART_SECONDS:
                self._restarted_at.popleft()
            if len(self._restarted_at) >= self._max_restarts:
                log.critical("the engine process died %d times: it is not started again", self._max_restarts + 1)
                return False
            began = time.monotonic()
            try:
                child = _Child(self._model, self._options)
            except OSError as error:  # no descriptor, no thread or no memory is left, for now: no engine has died of it
                log.error("the engine process could not be started: %s", error)
                self._is_over.wait(AGAIN_SECONDS)
                continue
            self._restarted_at.append(now)
            self._child = child
            if self._is_over.is_set():  # who ended it meanwhile knows nothing of this one, and waits for its model
                child.kill()
                return False
            try:
                child.connect(self.backend)
                with self._looping:
                    child.link.read_on(self._loop)
            except NiwakiError as error:
                log.error("the engine process did not start again: %s", error)
                child.kill()
                continue
            log.warning("the engine process runs again after %.1f s", time.monotonic() - began)
            return True
        return False


# Whoever answers clients goes before the engine's steps, which take all processors there are: under four times the load
# that two can serve, 99 % of refusals took 8 and 11 ms instead of 49 and 87 (2026-11-24, Zen 4).
NICENESS = 5
# Cycles are looked for when all is loaded (engine_host.py): until then there are none, and much to go through. Threads
# are as nice as the one that starts them: it begins with that.
CODE = f"import gc, os; gc.disable(); os.nice({NICENESS}); from niwaki.runtime.link.engine_host import start; start()"


def _started(socket_there: socket.socket) -> subprocess.Popen[bytes]:
    """The process, which has that end of a socket. Raises OSError: there is no descriptor or no memory for it."""
    return subprocess.Popen(  # noqa: S603  # our own module, nothing of a user's in it
        [sys.executable, "-P", "-c", CODE, str(socket_there.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[socket_there.fileno()],
        env={**os.environ, "PYTHONPATH": _python_path()},
        process_group=0,  # Ctrl-C is for us: we drain first
    )


class _Child:
    """One process and the link to it."""

    def __init__(self, model: Path | None, options: Mapping[str, object]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(ours.close)
            self.process = _started(theirs)
            failed.pop_all()
        self.loaded: Pending[frames.Loaded] = Pending()
        self.is_gone = threading.Event()
        self._receive: Callable[[Sequence[Message]], None] = self._take_first
        self._first_beat: frames.Beat | None = None
        self._lock = threading.Lock()  # the two fields below
        self._is_lost = False
        self._client: EngineClient | None = None
        self.link: Link[Order, Message] = Link(ours, Message, lambda reports: self._receive(reports), self._lose)
        try:
            self.link.start()
        except RuntimeError as error:  # no thread is left
            self.kill()
            ours.close()
            raise OSError(errno.EAGAIN, str(error)) from error
        self.link.post(frames.Load(None if model is None else str(model), dict(options)))

    def connect(self, client: EngineClient) -> frames.Loaded:
        """Wait for the model and let the client use it. Raises what loading failed with."""
        loaded = self.loaded.result()
        with self._lock:
            if self._first_beat is not None:
                client.receive([self._first_beat])
            self._receive = client.receive  # before anybody can ask, who may be answered at once
            client.connect(self.link, loaded)
            self._client = client
            if self._is_lost:
                client.disconnect(EngineStopped("the engine process died"))
        return loaded

    def kill(self) -> int:
        """Its exit code. Calling it twice is allowed."""
        self.process.kill()
        code = self.process.wait()
        self.link.close()
        return code

    def end(self) -> None:
        """Let it end what it does, which the end of the socket tells it to; then it must."""
        self.link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.kill()
        self.link.join()

    def _take_first(self, reports: Sequence[Message]) -> None:
        for report in reports:
            match report:
                case frames.Loaded():
                    self.loaded.succeed(report)
                case frames.Failed():
                    self.loaded.fail(frames.error_of(report))
                case frames.Beat():
                    self._first_beat = report
                case _:
                    raise AssertionError("nobody has asked yet")

    def _lose(self) -> None:
        self.loaded.fail(EngineStopped("the engine process died while it loaded the model"))
        with self._lock:
            self._is_lost = True
            if self._client is not None:
                self._client.disconnect(EngineStopped("the engine process died"))
        self.is_gone.set()  # at last: who sees it may start the next one


def _python_path() -> str:
    """So that the child finds the package that this process runs, wherever that came from."""
    root = str(Path(next(iter(niwaki.runtime.__path__))).parents[1])
    given = os.environ.get("PYTHONPATH")
    return root if not given else os.pathsep.join((root, given))
