"""One call of a program: its body on this thread, on one of its own, or on an event loop, and the run that it is."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial, update_wrapper
from typing import Generic, SupportsIndex, cast

from niwaki.lang.arguments import Arguments, Call
from niwaki.lang.effects import Part, is_plain
from niwaki.lang.executor import Executor
from niwaki.lang.lazy import LazyExecutor, Shared
from niwaki.lang.nodes import Chain, Gen, Select
from niwaki.lang.origin import here
from niwaki.lang.run import Run, TimeOfBody, running_loop, start_task, start_thread
from niwaki.lang.sessions import Visit
from niwaki.lang.sites import sites_of
from niwaki.lang.state import R_co, State
from niwaki.runtime.api import NiwakiError, ProgramError

_SHOWN = {Gen: "a gen", Select: "a select", Chain: "a text with gens"}

# The run around the code that runs now: a program called inside another one is part of its run.
_current_run: contextvars.ContextVar[Run | None] = contextvars.ContextVar("niwaki_current_run", default=None)


class Running(Part, Generic[R_co]):
    """What `Program` has for a single call: the function, and how its body is run. R_co is as there."""

    def __init__(
        self,
        func: Callable[..., object],
        bound: Mapping[str, object] | None = None,
        *,
        is_compiled: bool = False,
        only_plain: bool = False,
    ) -> None:
        """`only_plain`: a call with arguments that are no plain data is interpreted all the same."""
        super().__init__(func, bound or {})
        self.name = getattr(func, "__name__", repr(func))
        self.is_async = inspect.iscoroutinefunction(func)
        self._arguments = Arguments(func, self.name, self.bound)
        self._sites = sites_of(func) if is_compiled else None
        self._only_plain = only_plain
        update_wrapper(cast("Callable[..., object]", self), func)  # a program can be called

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """By its name, as a function is. In a script's own module by what it is made of, which cloudpickle can send."""
        module, name = self.func.__module__, self.func.__qualname__
        if module != "__main__" and getattr(sys.modules.get(module), name, None) is self:
            return name
        return super().__reduce_ex__(protocol)

    def _stream(self, call: Call) -> State[R_co]:
        executor = self._new_executor(call)
        if not self.is_async:
            start_thread(partial(self._run_body, executor, call, is_streamed=True), self.name)
        elif (loop := running_loop()) is None:
            start_thread(lambda: asyncio.run(self._arun_body(executor, call)), self.name)
        else:
            executor.run.loop = loop  # what would block it is refused from now on: the body has not begun
            start_task(self._arun_body(executor, call))
        return State(executor, is_outside=True)

    def _run_body(self, executor: Executor, call: Call, *, is_streamed: bool = False) -> None:
        visit = Visit(call.session, executor)
        token = _current_run.set(executor.run)
        executor.run.body_thread = threading.get_ident()
        try:
            visit.begin()
            if isinstance(executor, LazyExecutor) and not is_streamed:  # what a script gives comes call by call
                executor.write_script()
            returned = self.func(State(executor), *call.args, **call.kwargs)
            visit.end()
            executor.end_body(self._checked(returned))
        except BaseException as error:
            executor.abort(error)
            raise
        finally:
            executor.run.body_thread = None
            _current_run.reset(token)

    def _checked(self, returned: object) -> object:
        """What the body returned. Raises ProgramError for what was to be appended: it would be lost without a word."""
        if isinstance(returned, Gen | Select | Chain):
            raise ProgramError(
                f"program {self.name} returns {_SHOWN[type(returned)]} that nothing has appended; write s += ..., and "
                "return s['x']"
            )
        return returned

    async def _arun_body(self, executor: Executor, call: Call) -> None:
        run = executor.run
        run.loop = asyncio.get_running_loop()
        visit = Visit(call.session, executor)
        token = _current_run.set(run)
        limit = TimeOfBody(run)
        try:
            await run.load_backend()
            async with limit:  # ends also a body that waits for something else than its state
                if call.session is not None:
                    await asyncio.to_thread(visit.begin)
                returned = await cast("Awaitable[object]", self.func(State(executor), *call.args, **call.kwargs))
                if call.session is not None:
                    await executor.sync_async()
                    await asyncio.to_thread(visit.end)
                executor.end_body(self._checked(returned))
        except asyncio.CancelledError:
            executor.cancel()
            raise
        except BaseException as error:
            if limit.is_over and not isinstance(error, NiwakiError):
                executor.abort(run.timed_out())
                executor.raise_error()
            executor.abort(error)
            raise
        finally:
            _current_run.reset(token)

    def _run_on_a_loop(self, body: Coroutine[object, object, None], instead: str) -> None:
        try:
            self._check_no_loop(instead)
        except ProgramError:
            body.close()
            raise
        asyncio.run(body)

    def _check_may_block(self, instead: str) -> None:
        around = _current_run.get()
        if around is not None and around.is_on_its_loop:
            raise ProgramError(
                f"{self.name}.{instead[1:]}() would stop every program on the event loop of async program "
                f"{around.program}; write await {self.name}.{instead}(...)"
            )

    def _check_no_loop(self, instead: str) -> None:
        if running_loop() is not None:
            raise ProgramError(
                f"program {self.name} is async, and an event loop runs here already; "
                f"write await {self.name}.{instead}(...)"
            )

    def _new_executor(self, call: Call) -> Executor:
        run = self._new_run(call)
        around = _current_run.get()
        if around is not None:
            around.history.called(run.history, here())
        is_any = self._only_plain and not all(map(is_plain, (*call.args, *call.kwargs.values())))
        if self._sites is None or is_any or call.session is not None:  # a script begins from an empty text
            return Executor(run)
        return LazyExecutor(run, Shared(self._sites))

    def _new_run(self, call: Call) -> Run:
        around = _current_run.get()
        if around is None:
            return Run(self.name, call.options, call.backend, call.timeout, template=call.template)
        host = around.backend if call.backend is None else call.backend
        options, template = call.options.over(around.options), call.template or around.template
        return Run(self.name, options, host, call.timeout, around.limits, template, around.shortened)
