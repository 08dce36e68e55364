"""One run of a program: what all of its states share."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import cached_property
from types import TracebackType

from niwaki.lang.backends import Host, backend_of, default_host, is_default_ready
from niwaki.lang.batch_places import current_batch
from niwaki.lang.chat import ChatTemplate, template_by, template_of
from niwaki.lang.clock import SHORTEST, Countdown
from niwaki.lang.history import History
from niwaki.lang.templates import TemplateFunction
from niwaki.runtime.api import Backend, Branch, ProgramError, SamplingOptions, TimedOut

# What a program's pieces of text are: pieces of one text, wherever they were cut.
PROGRAM_DEFAULTS = SamplingOptions(heal=True)


class Run:
    """Backend, options, time limits, and chat template (None: the model's). `host` None: the default backend, looked up
    when it is first needed. `around`: the limits of the run that this one is inside of.

    `loop` is the event loop that an `async def` body runs on, from its start on; what would block it is refused.
    """

    def __init__(
        self,
        program: str,
        options: SamplingOptions,
        host: Host | None = None,
        timeout: float | None = None,
        around: tuple[Countdown, ...] = (),
        template: TemplateFunction | None = None,
        shortened: dict[str, None] | None = None,
    ) -> None:
        self.template = template
        self.program = program
        self.history = History(program)  # of the run's first state
        # The gens whose values their budgets made shorter, in the order in which that was seen: a set that keeps it.
        # What runs inside of another run notes its own there.
        self.shortened: dict[str, None] = {} if shortened is None else shortened
        self.loop: asyncio.AbstractEventLoop | None = None
        self.body_thread: int | None = None  # on which its body runs now: Ctrl-C there ends the body, and so the run
        self.options = options
        self.timeout = timeout
        # A run inside another one may end sooner than that, never later.
        self.limits = around if timeout is None else (*around, Countdown(timeout))
        self._backend: Backend | None = None if host is None else backend_of(host)
        self._batch = current_batch()

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            self._backend = backend_of(default_host())
        return self._backend

    def open(self) -> Branch:
        """A new branch. Those of a batch's rows take their places in the engine together."""
        return self.backend.open() if self._batch is None else self._batch.open(self.backend)

    @cached_property
    def defaults(self) -> SamplingOptions:
        """What holds for a gen that says nothing: the run's options, over the model's own, over the programs'."""
        return self.options.over(self.backend.info().defaults).over(PROGRAM_DEFAULTS)

    @cached_property
    def chat(self) -> ChatTemplate:
        """How turns are written: by the run's own template, or the model's."""
        return template_of(self.backend) if self.template is None else template_by(self.template)

    async def load_backend(self) -> None:
        """Let `backend` be there without having blocked the event loop: loading a model takes seconds."""
        if self._backend is None and not is_default_ready():
            await asyncio.to_thread(default_host)

    def remaining(self) -> float | None:
        """Seconds that are left of its time, at least 0. None: there is no limit."""
        return min((limit.left() for limit in self.limits), default=None)

    def patience(self) -> float | None:
        """Seconds until whoever waits is to look at `remaining` again. None: never."""
        left = self.remaining()
        return None if left is None else max(left, SHORTEST)

    @property
    def is_on_its_loop(self) -> bool:
        """Is this code on the event loop of an async program? Then waiting would stop every program on it."""
        return self.loop is not None and self.loop is running_loop()

    def check_may_block(self) -> None:
        """Raises ProgramError where waiting would stop the event loop that all its programs share."""
        if self.is_on_its_loop:
            raise ProgramError(
                f"program {self.program} is async, and this read would stop every program on its event loop until the "
                'value is there; write await s.get("x"), or await s.wait() before other reads'
            )

    def timed_out(self) -> TimedOut:
        limit = "that of the run around it" if self.timeout is None else f"of {self.timeout} s"
        return TimedOut(f"program {self.program} was not done within its timeout, {limit}")


class TimeOfBody:
    """`asyncio.timeout` by a run's own time, which may stand still: around the body of an async program."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._limit = asyncio.timeout(None)
        self._look_again: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        """Whether the body was ended by it."""
        return self._limit.expired()

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._look()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
        await self._limit.__aexit__(kind, error, place)

    def _look(self) -> None:
        left, loop = self._run.remaining(), asyncio.get_running_loop()
        if left == 0.0:
            self._limit.reschedule(loop.time())
        elif left is not None:
            self._look_again = loop.call_later(max(left, SHORTEST), self._look)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs this code, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def start_thread(body: Callable[[], object], program: str) -> None:
    """Run it on a thread of its own. Its error is the state's, which every read raises."""
    context = contextvars.copy_context()

    def run() -> None:
        with suppress(BaseException):
            context.run(body)

    threading.Thread(target=run, name=f"niwaki-{program}", daemon=True).start()


def start_task(body: Coroutine[object, object, None]) -> None:
    """Run it on the loop that runs here. Its error is the state's, which every read raises."""

    async def run() -> None:
        with suppress(KeyboardInterrupt, SystemExit):  # out of a task they would end the loop, and all that runs on it
            await body

    def forget(task: asyncio.Task[None]) -> None:
        _tasks.discard(task)
        body.close()  # one that was cancelled before it began
        if not task.cancelled():
            task.exception()  # seen: asyncio would log it otherwise

    task = asyncio.get_running_loop().create_task(run())
    _tasks.add(task)  # the loop itself holds tasks only weakly
    task.add_done_callback(forget)


_tasks: set[asyncio.Task[None]] = set()
