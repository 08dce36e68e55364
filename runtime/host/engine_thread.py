"""An engine core on a thread of its own: what callers post is done between two steps, in order.

Only that thread touches the core. Knows no branches, no tokenizer: `local` asks for requests, this sees that they run.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from niwaki.runtime.api import EngineStopped, GenerationError, Pending, RequestError
from niwaki.runtime.api.errors import READ_BEFORE
from niwaki.runtime.host.forked import check_not_forked, engine_starts
from niwaki.runtime.host.inbox import Inbox
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.requests.running import WAITS_FOR_ITSELF

T = TypeVar("T")

log = logging.getLogger("niwaki.engine")

# How long a thread of Python may keep the interpreter's lock from one that wants it. A forward pass gives it up and
# takes it back many times: at the usual 5 ms a step beside threads that compile lasted up to 90 ms.
SWITCH_SECONDS = 0.0005


class EngineThread:
    """Steps the core while it has work, and waits for a post where it has none."""

    def __init__(self, core: EngineCore) -> None:
        """The thread runs from here on."""
        self._core = core
        # Called on the engine thread behind each step, when everybody was told what the step gave.
        self.after_step: Callable[[], None] = lambda: None
        self._inbox = Inbox()
        if sys.getswitchinterval() > SWITCH_SECONDS:
            sys.setswitchinterval(SWITCH_SECONDS)
        engine_starts()
        self._thread = threading.Thread(target=self._run, name="niwaki-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs. False after a shutdown."""
        return self._thread.is_alive() and not self._inbox.is_closed

    @property
    def _is_here(self) -> bool:
        """Whether this is the engine's own thread."""
        return threading.current_thread() is self._thread

    def together(self) -> AbstractContextManager[None]:
        """What this thread starts inside comes to the engine a few dozen at a time, so that its first step is not one
        of the first request alone. Nothing may be waited for inside; after an error the last ones are not started."""
        return self._inbox.together()

    def _between_steps(self, work: Callable[[], T]) -> T:
        """Do it on the engine's thread, and give what it gives or raise what it raises. Raises RequestError there."""
        check_not_forked()
        if self._is_here:
            raise RequestError(WAITS_FOR_ITSELF)
        done: Pending[T] = Pending()

        def run() -> None:
            try:
                done.succeed(work())
            except Exception as error:  # whatever it is, somebody waits for it
                done.fail(error)

        self._inbox.post(run)
        return done.result(timeout=600)

    def _end_thread(self) -> None:
        """Fail what still runs with EngineStopped, and end the thread. Calling it twice is allowed."""
        self._inbox.close()
        if not self._is_here:
            self._thread.join()

    # -- the engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Do what was posted, which is waited for where nothing runs, and take a step. False: the engine is over."""
        core = self._core
        commands, is_stopping = self._inbox.take(None if core.has_work else core.pause)
        for command in commands:
            self._guarded(command)
        if is_stopping:
            core.abort_all(EngineStopped(f"the engine was shut down before the request ended{READ_BEFORE}"))
            core.close()
            return False
        self._guarded(core.step)
        self._guarded(self.after_step)
        return True

    def _guarded(self, work: Callable[[], object]) -> None:
        """A bug of ours: whose requests run are told, the engine goes on."""
        try:
            work()
        except Exception as error:
            log.exception("the engine's step failed")
            self._core.abort_all(GenerationError(f"the engine's step failed: {type(error).__name__}: {error}"))
