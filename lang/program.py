"""`@function`: a Python function becomes a program, and a call of it a run."""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial, update_wrapper
from pathlib import Path
from typing import Literal, TypeAlias, cast, overload

from niwaki.lang.async_batch import DEFAULT_ASYNC_CONCURRENCY, Batch, iterate_on_a_loop, run_rows_async
from niwaki.lang.backends import Host, model_name
from niwaki.lang.batch import DEFAULT_CONCURRENCY, run_rows, with_progress_bar
from niwaki.lang.checkpoint import StoredRow, fingerprint_of, run_with_checkpoint
from niwaki.lang.executor import Executor
from niwaki.lang.expressions import check_options, check_timeout
from niwaki.lang.run import Run, running_loop
from niwaki.lang.state import State
from niwaki.lang.trace import Placeholder, Trace, trace
from niwaki.runtime.api import NiwakiError, ProgramError, SamplingOptions

Row: TypeAlias = Mapping[str, object] | tuple[object, ...]

SAMPLING_NAMES = frozenset(f.name for f in fields(SamplingOptions)) - {"constraint"}
# The last is SGLang's, and changes nothing: tokens are always told with their texts.
RUN_NAMES = SAMPLING_NAMES | {"backend", "stream", "timeout", "return_text_in_logprobs"}

# The run around the code that runs now: a program called inside another one is part of its run.
_current_run: contextvars.ContextVar[Run | None] = contextvars.ContextVar("niwaki_current_run", default=None)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, taken apart: what the function gets, and what the run gets."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    options: SamplingOptions
    backend: Host | None
    stream: bool
    timeout: float | None


class Program:
    """A function whose first parameter is the state. Made by `@function`; calling it runs it."""

    def __init__(self, func: Callable[..., object], bound: Mapping[str, object] | None = None) -> None:
        self.func = func
        self.name = getattr(func, "__name__", repr(func))
        self.is_async = inspect.iscoroutinefunction(func)
        self._bound = dict(bound or {})
        self._signature = _signature(func, self.name)
        self._parameters = tuple(self._signature.parameters.values())[1:]
        update_wrapper(self, func)

    def __call__(self, *args: object, **kwargs: object) -> State:
        return self.run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<program {self.name}{self._signature}>"

    def run(self, *args: object, **kwargs: object) -> State:
        """Run the program and return its state when the body has returned; generations may go on, and reads wait.

        Takes the program's own arguments, and the options of the run: any field of `SamplingOptions` (temperature,
        max_new_tokens, stop, ...), `backend`, `stream` (see `stream`) and `timeout` in seconds for the whole run.
        Where the program has a parameter of such a name, it gets the value; the run's option then goes into
        `options={...}`.

        An `async def` program runs on an event loop of its own; where one runs already, await `arun` instead.

        Raises:
            ProgramError: the arguments do not fit the program, or it would block the event loop that runs here.
            RequestError: an option is out of its bounds.
            What the body raises.
        """
        call = self._call(args, kwargs)
        if call.stream:
            return self._stream(call)
        self._check_may_block("arun")
        executor = Executor(self._new_run(call))
        if not self.is_async:
            self._run_body(executor, call)
        else:
            self._run_on_a_loop(self._arun_body(executor, call), "arun")
        return State(executor)

    async def arun(self, *args: object, **kwargs: object) -> State:
        """Run the program and return its state when everything in it has run, without blocking the event loop.

        Takes what `run` takes. The body of an `async def` program runs on this loop, that of a `def` program on a
        thread of its own. Cancelling the call cancels the state and its forks.

        Raises:
            What `run` raises, and the error that the state failed with.
        """
        call = self._call(args, kwargs)
        if call.stream:
            return self._stream(call)
        executor = Executor(self._new_run(call))
        try:
            await executor.run.load_backend()
            if self.is_async:
                await self._arun_body(executor, call)
            else:
                self._start_thread(partial(self._run_body, executor, call))
            await executor.sync_async(outside=True)
        except asyncio.CancelledError:
            executor.cancel()
            raise
        return State(executor)

    def stream(self, *args: object, **kwargs: object) -> State:
        """Start the program and return its state at once: for `text_iter` and `text_async_iter` while it runs.

        An `async def` program runs on the event loop that runs here; any other on a thread of its own.
        """
        return self._stream(self._call(args, kwargs))

    @overload
    def run_batch(
        self,
        rows: Iterable[Row],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        checkpoint: None = None,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> list[State | Exception]: ...
    @overload
    def run_batch(
        self,
        rows: Iterable[Row],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[True],
        checkpoint: None = None,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> Iterator[State | Exception]: ...
    @overload
    def run_batch(
        self,
        rows: Iterable[Row],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        checkpoint: str | Path,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> list[StoredRow | Exception]: ...
    @overload
    def run_batch(
        self,
        rows: Iterable[Row],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[True],
        checkpoint: str | Path,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> Iterator[StoredRow | Exception]: ...
    def run_batch(
        self,
        rows: Iterable[Row],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        checkpoint: str | Path | None = None,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> Sequence[State | StoredRow | Exception] | Iterator[State | StoredRow | Exception]:
        """Run the program once for each row: a mapping of arguments, or a tuple of them in order.

        Returns the finished states in the order of the rows, and in the place of a row that failed its exception;
        on_error="raise" raises the first one instead. `generator_style` yields them as they come, in constant memory.
        The options of `run` hold for every row.

        With `checkpoint="out.jsonl"` each finished row goes into that file, and a call made again after a kill gives
        what stands there without running it. Results are then what the file holds, for rows new and old: a mapping of
        the row's variables (or of what the program returned) as JSON values. Another program, other options, another
        model or other rows are refused.

        Raises:
            ConfigError: num_threads or on_error is not valid.
            ProgramError, RequestError: an option of the run is not valid. At once, before any row.
            JournalError: the checkpoint was made by another run.
        """
        options = _batch_options(kwargs)
        total = len(rows) if isinstance(rows, Sequence) else None
        if checkpoint is None:
            states = self._run_batch(rows, num_threads, options, on_error=on_error)
            results = with_progress_bar(states, total) if progress_bar else states
            return results if generator_style else list(results)
        run = partial(self._run_batch, num_threads=num_threads, options=options, on_error="return")
        fingerprint = fingerprint_of(self.func, {**self._bound, **options}, model_name(options.get("backend")))
        stored = run_with_checkpoint(run, rows, Path(checkpoint), fingerprint, raises=on_error == "raise")
        stored = with_progress_bar(stored, total) if progress_bar else stored
        return stored if generator_style else list(stored)

    def _run_batch(
        self,
        rows: Iterable[Row],
        num_threads: int | Literal["auto"],
        options: Mapping[str, object],
        *,
        on_error: Literal["return", "raise"],
    ) -> Iterator[State | Exception]:
        if self.is_async:
            self._check_no_loop("arun_batch")
            return iterate_on_a_loop(
                self._arun_batch(rows, num_threads, options, on_error=on_error, progress_bar=False)
            )
        self._check_may_block("arun_batch")
        num = DEFAULT_CONCURRENCY if num_threads == "auto" else num_threads
        under_way = _UnderWay()

        def run_one(row: Row) -> State:
            args, named = _row_arguments(row, self.name)
            call = self._call(args, {**named, "options": options})
            executor = Executor(self._new_run(call))
            with under_way.has(executor):
                self._run_body(executor, call)
                executor.sync()
            executor.release()
            return State(executor)

        return under_way.ended_with(run_rows(run_one, rows, num_threads=num, on_error=on_error))

    def arun_batch(
        self,
        rows: Iterable[Row],
        *,
        concurrency: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> Batch[State]:
        """`run_batch` on the event loop that runs here: `await` it for the list, or `async for` in constant memory.

        Results come in the order of the rows, an exception in the place of a row that failed; on_error="raise" raises
        the first one instead. At most `concurrency` rows run at once ("auto": 256 of an `async def` program, 32 of a
        `def` program, each of which takes a thread). Whoever stops early cancels what still runs.

        Raises:
            ConfigError: concurrency or on_error is not valid.
            ProgramError, RequestError: an option of the run is not valid. At once, before any row.
        """
        options = _batch_options(kwargs)
        return self._arun_batch(rows, concurrency, options, on_error=on_error, progress_bar=progress_bar)

    def trace(self, *args: object, **kwargs: object) -> Trace:
        """What the program will do, whatever the model says: print it. Arguments that are not given are placeholders.

        The body runs once, without a backend, up to the first value that only a run has.

        Raises:
            ProgramError: the body may have effects beyond its state. It was not run.
        """
        named = {parameter.name for parameter in self._parameters[: len(args)]} | set(kwargs) | set(self._bound)
        missing = {
            parameter.name: Placeholder(parameter.name)
            for parameter in self._parameters
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.name not in named
        }
        call = self._call(args, {**kwargs, **missing})
        return trace(self.func, self.name, call.args, call.kwargs, self.name + self._shown())

    def bind(self, **arguments: object) -> Program:
        """The same program with defaults for some of its arguments or options; a call may override them.

        Raises:
            ProgramError: the program has no such parameter, and no run such an option.
        """
        for name in arguments:
            if not self._takes(name) and name not in RUN_NAMES | {"options"}:
                raise self._unknown(name)
        return Program(self.func, {**self._bound, **arguments})

    # -- one call -----------------------------------------------------------------------------------------------------

    def _stream(self, call: _Call) -> State:
        executor = Executor(self._new_run(call))
        if not self.is_async:
            self._start_thread(partial(self._run_body, executor, call))
        elif running_loop() is None:
            self._start_thread(lambda: asyncio.run(self._arun_body(executor, call)))
        else:
            _start_task(self._arun_body(executor, call))
        return State(executor, is_outside=True)

    def _start_thread(self, body: Callable[[], object]) -> None:
        context = contextvars.copy_context()

        def run() -> None:
            with suppress(BaseException):  # the state holds it, and every read raises it
                context.run(body)

        threading.Thread(target=run, name=f"niwaki-{self.name}", daemon=True).start()

    def _run_body(self, executor: Executor, call: _Call) -> None:
        token = _current_run.set(executor.run)
        try:
            executor.end_body(self.func(State(executor), *call.args, **call.kwargs))
        except BaseException as error:
            executor.abort(error)
            raise
        finally:
            _current_run.reset(token)

    async def _arun_body(self, executor: Executor, call: _Call) -> None:
        run = executor.run
        run.loop = asyncio.get_running_loop()
        token = _current_run.set(run)
        limit = asyncio.timeout(run.remaining())
        try:
            await run.load_backend()
            async with limit:  # ends also a body that waits for something else than its state
                body = cast("Awaitable[object]", self.func(State(executor), *call.args, **call.kwargs))
                executor.end_body(await body)
        except asyncio.CancelledError:
            executor.cancel()
            raise
        except BaseException as error:
            if limit.expired() and not isinstance(error, NiwakiError):
                executor.abort(run.timed_out())
                executor.raise_error()
            executor.abort(error)
            raise
        finally:
            _current_run.reset(token)

    def _arun_batch(
        self,
        rows: Iterable[Row],
        concurrency: int | Literal["auto"],
        options: Mapping[str, object],
        *,
        on_error: Literal["return", "raise"],
        progress_bar: bool,
    ) -> Batch[State]:
        async def run_one(row: Row) -> State:
            args, named = _row_arguments(row, self.name)
            state = await self.arun(*args, **named, options=options)
            state._executor.release()
            return state

        default = DEFAULT_ASYNC_CONCURRENCY if self.is_async else DEFAULT_CONCURRENCY
        num = default if concurrency == "auto" else concurrency
        return run_rows_async(run_one, rows, concurrency=num, on_error=on_error, progress_bar=progress_bar)

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

    def _new_run(self, call: _Call) -> Run:
        around = _current_run.get()
        if around is None:
            return Run(self.name, call.options, call.backend, call.timeout)
        host = around.backend if call.backend is None else call.backend
        return Run(self.name, call.options.over(around.options), host, call.timeout, around.deadline)

    def _call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> _Call:
        """Sort what was given into arguments of the program and options of the run."""
        named, options = dict(self._bound), _mapping(self._bound.get("options"))
        named.pop("options", None)
        options |= _mapping(kwargs.pop("options", None))
        # What is given by position overrides what was bound by name.
        for parameter in self._parameters[: len(args)]:
            named.pop(parameter.name, None)
        named |= kwargs
        arguments = {name: value for name, value in named.items() if self._takes(name, is_option=name in RUN_NAMES)}
        for name, value in named.items():
            if name in arguments:
                continue
            if name not in RUN_NAMES:
                raise self._unknown(name)
            options[name] = value
        try:
            bound = self._signature.bind(None, *args, **arguments)
        except TypeError as error:
            raise ProgramError(f"program {self.name}{self._shown()}: {error}") from None
        sampling, backend, stream, timeout = _run_options(options)
        return _Call(bound.args[1:], bound.kwargs, sampling, backend, stream, timeout)

    def _takes(self, name: str, *, is_option: bool = False) -> bool:
        """Is it an argument of the program? One that takes **anything leaves options to the run."""
        for parameter in self._parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                if not is_option:
                    return True
            elif parameter.name == name and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                return True
        return False

    def _unknown(self, name: str) -> ProgramError:
        known = [parameter.name for parameter in self._parameters]
        close = difflib.get_close_matches(name, [*known, *RUN_NAMES], 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return ProgramError(
            f"program {self.name}{self._shown()} has no parameter {name!r}, and it is no option of a run{hint}"
        )

    def _shown(self) -> str:
        return "(" + ", ".join(str(parameter) for parameter in self._parameters) + ")"


class _UnderWay:
    """The rows of a batch that run now. Whoever stops reading the batch, by Ctrl-C too, stops them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executors: set[Executor] = set()
        self._is_over = False

    @contextmanager
    def has(self, executor: Executor) -> Iterator[None]:
        with self._lock:
            self._executors.add(executor)
            is_late = self._is_over
        if is_late:
            executor.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._executors.discard(executor)

    def ended_with(self, results: Iterator[State | Exception]) -> Iterator[State | Exception]:
        try:
            yield from results
        finally:
            with self._lock:
                self._is_over = True
                left = list(self._executors)
            for executor in left:
                executor.cancel()


def function(func: Callable[..., object]) -> Program:
    """Make a program of a function whose first parameter is the state.

    Raises:
        ProgramError: the function cannot be a program.
    """
    return Program(func)


def _signature(func: Callable[..., object], name: str) -> inspect.Signature:
    if not callable(func):
        raise ProgramError(f"@function goes above a def, got {func!r}")
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise ProgramError(f"program {name} must be a def or an async def without yield; return the value instead")
    signature = inspect.signature(func)
    parameters = tuple(signature.parameters.values())
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in by_position:
        raise ProgramError(f"program {name}{signature} needs the state as its first parameter: def {name}(s, ...)")
    if "options" in (parameter.name for parameter in parameters[1:]):
        raise ProgramError(f"program {name}: a parameter may not be called 'options', where a run's options go")
    return signature


def _run_options(options: Mapping[str, object]) -> tuple[SamplingOptions, Host | None, bool, float | None]:
    """Check the options of a run, one by one.

    Raises:
        ProgramError: an unknown name, or a value of the wrong type.
        RequestError: a sampling option is out of its bounds.
    """
    for name in options:
        if name not in RUN_NAMES:
            close = difflib.get_close_matches(name, RUN_NAMES, 1)
            raise ProgramError(f"a run has no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    said = {name: value for name, value in options.items() if name in SAMPLING_NAMES}
    sampling = SamplingOptions(**said)  # type: ignore[arg-type]  # names are fields; values are checked on the next line
    check_options(sampling)
    timeout = options.get("timeout")
    check_timeout(timeout)
    stream = options.get("stream", False)
    if not isinstance(stream, bool):
        raise ProgramError(f"stream must be True or False, got {stream!r}")
    return sampling, cast("Host | None", options.get("backend")), stream, cast("float | None", timeout)


def _mapping(options: object) -> dict[str, object]:
    if options is None:
        return {}
    if isinstance(options, SamplingOptions):
        return {name: value for name in SAMPLING_NAMES if (value := getattr(options, name)) is not None}
    if isinstance(options, Mapping):
        return dict(options)
    raise ProgramError(f"options must be a mapping of option names to values, got {options!r}")


def _batch_options(given: dict[str, object]) -> dict[str, object]:
    """The options of every row's run, checked once instead of in every row."""
    if "stream" in given:
        raise ProgramError("a batch cannot stream; iterate over it to get states as they finish")
    options = {**_mapping(given.pop("options", None)), **given}
    _run_options(options)
    return options


def _start_task(body: Coroutine[object, object, None]) -> None:
    """Run it on the loop that runs here. Its error is the state's, which every read raises."""

    def forget(task: asyncio.Task[None]) -> None:
        _tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: asyncio would log it otherwise

    task = asyncio.get_running_loop().create_task(body)
    _tasks.add(task)  # the loop itself holds tasks only weakly
    task.add_done_callback(forget)


_tasks: set[asyncio.Task[None]] = set()


def _row_arguments(row: Row, program: str) -> tuple[tuple[object, ...], dict[str, object]]:
    if isinstance(row, Mapping):
        return (), dict(row)
    if isinstance(row, tuple):
        return row, {}
    raise ProgramError(f"a row of program {program} is a mapping of arguments or a tuple of them, got {row!r}")
