"""`@function`: a Python function becomes a program, and a call of it a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, Self, overload

from niwaki.lang.arguments import Row, batch_options, check_rows, row_arguments
from niwaki.lang.async_batch import DEFAULT_ASYNC_CONCURRENCY, Batch, iterate_on_a_loop, run_rows_async
from niwaki.lang.backends import model_identity, usage_of
from niwaki.lang.batch import DEFAULT_CONCURRENCY, check_batch, run_rows
from niwaki.lang.behind import Keep
from niwaki.lang.checkpoint import (
    StoredRow,
    check_checkpoint,
    fingerprint_of,
    run_with_checkpoint,
    run_with_checkpoint_async,
)
from niwaki.lang.effects import is_free_of_effects
from niwaki.lang.executor import Executor
from niwaki.lang.foreign_names import PROGRAM, public
from niwaki.lang.nodes import Gen, NoContent, Text
from niwaki.lang.origin import here
from niwaki.lang.progress import with_async_progress_bar, with_progress_bar
from niwaki.lang.run import running_loop, start_thread
from niwaki.lang.running import Running
from niwaki.lang.state import ForkGroup, P, R_co, State
from niwaki.lang.trace import Placeholder, Trace, trace
from niwaki.lang.under_way import UnderWay
from niwaki.runtime.api import ProgramError, SamplingOptions
from niwaki.runtime.api.names import hint


class Program(Running[R_co], NoContent, Generic[R_co, P]):
    """A function whose first parameter is the state, made by `@function`.

    `program(...)` is `program.run(...)`. `program(state, ...)` continues that state, as a plain function would, and
    returns what the body returns.

    For type checkers: R_co is what the function returns (what awaiting an `async def` gives), P its parameters after
    the state. Python's types cannot say that a run takes these and options; the plugin `niwaki.mypy` tells mypy.
    """

    _remedy = "call it with the state, and it appends by itself: f(s, ...)"

    @overload
    def __call__(  # type: ignore[overload-overlap]  # only where a State is taken for a mere object
        self, state: State, *args: object, **kwargs: object
    ) -> R_co: ...
    @overload
    def __call__(self, *args: object, **kwargs: object) -> State[R_co]: ...
    def __call__(self, *args: object, **kwargs: object) -> object:
        """`run`. With a state as the first argument: go on with that one, as a plain function would."""
        if args and isinstance(args[0], State | ForkGroup):
            state, call = self._arguments.call_inside(args[0], args[1:], kwargs)
            if self.is_async and running_loop() is None:
                raise ProgramError(
                    f"{self.name}(state, ...) is async; write await {self.name}(...) in an async program"
                )
            return self.func(state, *call.args, **call.kwargs)
        return self.run(*args, **kwargs)

    if not TYPE_CHECKING:  # a type checker is to see that there is no such attribute

        def __getattr__(self, name: str) -> object:
            if hasattr(type(self), name):  # as in `State`
                return object.__getattribute__(self, name)
            remedy = "" if name.startswith("_") else hint(name, PROGRAM, public(Program))
            raise AttributeError(f"a program has no attribute {name!r}{remedy}")

    def __repr__(self) -> str:
        return f"<program {self.name}{self._arguments.signature}>"

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> State[R_co]: ...
    @overload
    def run(self, *args: object, **kwargs: object) -> State[R_co]: ...
    def run(self, *args: object, **kwargs: object) -> State[R_co]:
        """Run the program, and return its state once the body has returned; reads wait for generations that still run.

        Takes the program's own arguments and the options of the run:

        - any option of a generation (temperature, stop, max_tokens, ...), for all calls that do not set it themselves;
        - `backend`, what it runs on; `stream=True`, which is the method `stream`;
        - `timeout`, in seconds, of the whole run;
        - `chat_template`, in place of the model's own: "chatml", "llama-3", "plain", or a function that is given the
          turns (mappings with role and content) and whether an assistant turn begins, and returns their text;
        - `options={...}`, for options whose name the program has as a parameter.

        An `async def` program runs on an event loop of its own. If an event loop already runs here, await `arun`.

        Raises:
            ProgramError: the arguments do not fit the program, or it would block the event loop that runs here.
            RequestError: an option is out of its bounds.
            Exception: what the body raises.
        """
        call = self._arguments.call(args, kwargs)
        if call.stream:
            return self._stream(call)
        self._check_may_block("arun")
        executor = self._new_executor(call)
        if not self.is_async:
            self._run_body(executor, call)
        else:
            self._run_on_a_loop(self._arun_body(executor, call), "arun")
        return State(executor)

    @overload
    async def arun(self, *args: P.args, **kwargs: P.kwargs) -> State[R_co]: ...
    @overload
    async def arun(self, *args: object, **kwargs: object) -> State[R_co]: ...
    async def arun(self, *args: object, **kwargs: object) -> State[R_co]:
        """Run the program, and return its state once everything in it has run, without blocking the event loop.

        Takes what `run` takes. The body of an `async def` program runs on this loop, that of a `def` program on a
        thread of its own. Cancelling the call cancels the state and its forks.

        Raises:
            Exception: what `run` raises, and the error that the state failed with.
        """
        call = self._arguments.call(args, kwargs)
        if call.stream:
            return self._stream(call)
        executor = self._new_executor(call)
        try:
            await executor.run.load_backend()
            if self.is_async:
                await self._arun_body(executor, call)
            else:
                start_thread(partial(self._run_body, executor, call), self.name)
            await executor.sync_async(outside=True)
        except asyncio.CancelledError:
            executor.cancel()
            raise
        return State(executor)

    @overload
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> State[R_co]: ...
    @overload
    def stream(self, *args: object, **kwargs: object) -> State[R_co]: ...
    def stream(self, *args: object, **kwargs: object) -> State[R_co]:
        """Start the program and return its state at once: for `text_iter` and `text_async_iter` while it runs.

        An `async def` program runs on the event loop that runs here; any other on a thread of its own.
        """
        return self._stream(self._arguments.call(args, kwargs))

    @overload
    def run_batch(
        self,
        rows: Iterable[Row],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        checkpoint: None = None,
        retry_failed: Literal[False] = False,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> list[State[R_co] | Exception]: ...
    @overload
    def run_batch(
        self,
        rows: Iterable[Row],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[True],
        checkpoint: None = None,
        retry_failed: Literal[False] = False,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> Iterator[State[R_co] | Exception]: ...
    @overload
    def run_batch(
        self,
        rows: Iterable[Row],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        checkpoint: str | Path,
        retry_failed: bool = False,
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
        retry_failed: bool = False,
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
        retry_failed: bool = False,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> Sequence[State[R_co] | StoredRow | Exception] | Iterator[State[R_co] | StoredRow | Exception]:
        """Run the program once for each row: a mapping of arguments, or a tuple of them in order.

        Returns the finished states in the order of the rows, and in the place of a row that failed its exception;
        on_error="raise" raises the first one instead. At most `num_threads` rows run at once. With `generator_style`
        the result is an iterator, in the same order and in constant memory. The options of `run` hold for every row. A
        program whose body only appends, forks, joins and computes runs compiled (see `compile`).

        With `checkpoint="out.jsonl"` each finished row is written to that file. If the call is made again after a kill,
        rows that the file has are not run again. The results are then what the file has, for all rows: a mapping of the
        row's variables (or of what the program returned) as JSON values. A file of another program, other options,
        another model or other rows is refused.

        With `retry_failed` the rows of the file that failed also run again; the others stay as they are. What ran again
        is in PATH.retry until all of it is there, and a call made again after a kill continues with that.

        Raises:
            ConfigError: num_threads or on_error is not valid, or retry_failed has no checkpoint or not all of its rows.
            ProgramError, RequestError: these are not rows, or an option of the run is not valid. Raised at once.
            JournalError: another run made the checkpoint, or failed rows of it were being run again.
        """
        check_rows(rows, self.name)
        check_checkpoint(checkpoint, retry_failed=retry_failed)
        options = batch_options(kwargs, self.run_batch)
        results: Iterator[State[R_co] | StoredRow | Exception]
        if checkpoint is None:
            results = self._run_batch(rows, None, num_threads, options, on_error=on_error)
        else:
            check_batch("num_threads", 1 if num_threads == "auto" else num_threads, on_error)
            run = partial(self._run_batch, num_threads=num_threads, options=options, on_error="return")
            results = run_with_checkpoint(
                run,
                rows,
                Path(checkpoint),
                self._fingerprint(options),
                retry_failed=retry_failed,
                raises=on_error == "raise",
            )
        if progress_bar:
            results = with_progress_bar(results, rows, partial(usage_of, options.get("backend")))
        return results if generator_style else list(results)

    def _fingerprint(self, options: Mapping[str, object]) -> Mapping[str, str]:
        return fingerprint_of(self.func, {**self._arguments.bound, **options}, model_identity(options.get("backend")))

    def _run_batch(
        self,
        rows: Iterable[Row],
        keep: Keep[State[R_co]] | None,
        num_threads: int | Literal["auto"],
        options: Mapping[str, object],
        *,
        on_error: Literal["return", "raise"],
    ) -> Iterator[State[R_co] | Exception]:
        if self.is_async:
            self._check_no_loop("arun_batch")
            return iterate_on_a_loop(self._arun_batch(rows, keep, num_threads, options, on_error=on_error))
        self._check_may_block("arun_batch")
        num = DEFAULT_CONCURRENCY if num_threads == "auto" else num_threads
        under_way = UnderWay()
        program = self.for_rows()

        def run_one(row: Row) -> State[R_co]:
            args, named = row_arguments(row, self.name)
            call = self._arguments.call(args, {**named, "options": options})
            executor = program._new_executor(call)
            with under_way.has(executor):
                program._run_body(executor, call)
                executor.sync()
            executor.release()
            return State(executor)

        return under_way.ended_with(run_rows(run_one, rows, num_threads=num, on_error=on_error, keep=keep))

    @overload
    def arun_batch(
        self,
        rows: Iterable[Row],
        *,
        concurrency: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        checkpoint: None = None,
        retry_failed: Literal[False] = False,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> Batch[State[R_co]]: ...
    @overload
    def arun_batch(
        self,
        rows: Iterable[Row],
        *,
        concurrency: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        checkpoint: str | Path,
        retry_failed: bool = False,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> Batch[StoredRow]: ...
    def arun_batch(
        self,
        rows: Iterable[Row],
        *,
        concurrency: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        checkpoint: str | Path | None = None,
        retry_failed: bool = False,
        on_error: Literal["return", "raise"] = "return",
        **kwargs: object,
    ) -> Batch[State[R_co]] | Batch[StoredRow]:
        """`run_batch` on the event loop that runs here: `await` it for the list, or use `async for` in constant memory.

        Results come in the order of the rows, with an exception in the place of a row that failed; on_error="raise"
        raises the first one instead. At most `concurrency` rows run at once ("auto": 256 of an `async def` program, 32
        of a `def` program, each of which takes a thread). Leaving the `async for` early cancels what still runs.
        `checkpoint` and `retry_failed` are as in `run_batch`, and either method continues the other's file.

        Raises:
            ConfigError: as `run_batch`, of concurrency instead of num_threads.
            ProgramError, RequestError: these are not rows, or an option of the run is not valid. Raised at once.
            JournalError: as `run_batch`. Raised when the first result is asked for.
        """
        check_rows(rows, self.name)
        check_checkpoint(checkpoint, retry_failed=retry_failed)
        options = batch_options(kwargs, self.arun_batch)
        counters = partial(usage_of, options.get("backend"))
        if checkpoint is None:
            states = self._arun_batch(rows, None, concurrency, options, on_error=on_error)
            return Batch(with_async_progress_bar(states, rows, counters) if progress_bar else states)
        check_batch("concurrency", 1 if concurrency == "auto" else concurrency, on_error)
        run = partial(self._arun_batch, concurrency=concurrency, options=options, on_error="return")
        stored = run_with_checkpoint_async(
            run,
            rows,
            Path(checkpoint),
            self._fingerprint(options),
            retry_failed=retry_failed,
            raises=on_error == "raise",
        )
        return Batch(with_async_progress_bar(stored, rows, counters) if progress_bar else stored)

    def _arun_batch(
        self,
        rows: Iterable[Row],
        keep: Keep[State[R_co]] | None,
        concurrency: int | Literal["auto"],
        options: Mapping[str, object],
        *,
        on_error: Literal["return", "raise"],
    ) -> AsyncGenerator[State[R_co] | Exception, None]:
        program = self.for_rows()

        async def run_one(row: Row) -> State[R_co]:
            args, named = row_arguments(row, self.name)
            state = await program.arun(*args, **named, options=options)
            state._executor.release()
            return state

        default = DEFAULT_ASYNC_CONCURRENCY if self.is_async else DEFAULT_CONCURRENCY
        num = default if concurrency == "auto" else concurrency
        return run_rows_async(run_one, rows, concurrency=num, on_error=on_error, keep=keep)

    def trace(self, *args: object, **kwargs: object) -> Trace:
        """What the program will do whatever the model says, as a graph to print. Missing arguments are placeholders.

        The body runs once, without a backend, up to the first read of a value that only a run has.

        Raises:
            ProgramError: the body may have effects beyond its state; it was not run.
        """
        missing = {name: Placeholder(name) for name in self._arguments.missing(args, kwargs)}
        call = self._arguments.call(args, {**kwargs, **missing})
        return trace(self.func, self.name, call.args, call.kwargs, self.name + self._arguments.shown)

    def cache(self, *args: object, **kwargs: object) -> State:
        """Compute beforehand what all runs with these arguments begin with.

        That is the text before the first call and before the first argument that is not given. It stays in the
        backend's cache as long as the returned state lives.

        Raises:
            ProgramError: as `trace`, which finds the text; or the run has a session.
            Exception: what the backend fails with.
        """
        beginning = self.trace(*args, **kwargs).beginning
        call = self._arguments.call(args, kwargs | dict.fromkeys(self._arguments.missing(args, kwargs), ""))
        if call.session is not None:
            raise ProgramError(f"{call.session!r} begins with its turns, which are cached; cache for its endpoint")
        executor = Executor(self._new_run(call))
        if any(not isinstance(step, Text) or step.text for step in beginning):
            executor.submit((*beginning, Gen(None, SamplingOptions(max_new_tokens=0))), here())
        executor.end_body(None)
        executor.sync()
        return State(executor)

    def bind(self, **arguments: object) -> Self:
        """The same program with defaults for some of its arguments or options; a call may override them.

        Raises:
            ProgramError: the program has no such parameter, and no run such an option.
        """
        bound = self._arguments.bound_with(arguments)
        return type(self)(self.func, bound, is_compiled=self.is_compiled, only_plain=self._only_plain)

    def compile(self) -> Program[R_co, P]:
        """The same program, but its body does not wait for values that it only appends, as in `s += "So: " + s["x"]`.

        The body still runs once, up to its end or to the first value that it decides by; what it appended runs without
        its thread. Values, texts and tokens are those of the program itself. But an error that a read in the body would
        have raised is raised by reads outside of it.

        Raises:
            ProgramError: the program is async; it keeps no thread waiting anyway.
        """
        if self.is_async:
            raise ProgramError(
                f"program {self.name} is async, and waits without a thread as it is; it needs no compile()"
            )
        return Program(self.func, self._arguments.bound, is_compiled=True)

    def for_rows(self) -> Program[R_co, P]:
        """The same program as `run_batch` and `niwaki run` run it: compiled if only the clock can tell that.

        That is so if its body does nothing but append, fork, join and compute on plain data, its arguments included.
        """
        if self.is_async or self.is_compiled or not is_free_of_effects(self.func):
            return self
        return Program(self.func, self._arguments.bound, is_compiled=True, only_plain=True)

    @property
    def is_compiled(self) -> bool:
        return self._sites is not None
