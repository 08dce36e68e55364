"""The interpreter: one executor per state, driven by events, with no thread of its own.

`submit` puts steps into a queue and runs what can run. A generation leaves the executor waiting; the backend's
callback, on whatever thread it comes, records the result and runs on. Only reads wait.
"""

from __future__ import annotations

import time
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TypeAlias, TypeVar, assert_never

from niwaki.lang.backends import Lease
from niwaki.lang.chat import template_of
from niwaki.lang.clock import Alarm, clock
from niwaki.lang.history import Called, History, num_tokens
from niwaki.lang.meta import Outcome, Selected, Usage, usage_of
from niwaki.lang.nodes import (
    Gen,
    Node,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    SetVariable,
    Text,
    variables_of,
)
from niwaki.lang.origin import Origin, add_origin
from niwaki.lang.run import Run
from niwaki.lang.scoring import parted, scores_for
from niwaki.lang.waiting import Changes, Question
from niwaki.runtime.api import (
    Backend,
    Branch,
    Cancelled,
    Delta,
    Generation,
    GenerationError,
    Message,
    Output,
    Pending,
    ProgramError,
    SamplingParams,
    Score,
    Segment,
    TimedOut,
    UnknownVariable,
)


@dataclass(frozen=True, slots=True)
class Fork:
    """Let the children start from here."""

    children: tuple[Executor, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a state has made since it was forked."""

    variables: Mapping[str, object]
    segments: tuple[Segment, ...]
    has_turns: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """Hand over a snapshot when everything before has run."""

    reached: Pending[Snapshot]


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for the marks of the children; gather their variables, or append their texts."""

    marks: tuple[Pending[Snapshot], ...]
    appends: bool
    histories: tuple[History, ...] = ()


@dataclass(frozen=True, slots=True)
class Flush:
    """Hand all text to the branch now."""


Step: TypeAlias = Node | Fork | Mark | Join | Flush

T = TypeVar("T")


@dataclass(slots=True)
class Span:
    """Chunks [start, end) of the text. `end` is None while it grows."""

    start: int
    end: int | None = None
    dtype: object = None  # what the text is to become; None: it stays text
    fills: bool = True  # False: the value does not grow with the text


@dataclass(slots=True)
class Cursor:
    """How far somebody has read the text, or that of the variable `name`. The reader owns it, the executor moves it."""

    name: str | None
    outside: bool
    span: Span | None = None  # None until it is known where the variable begins
    start: int = 0  # the last piece was chunks [start, stop)
    stop: int = 0
    is_done: bool = False


@dataclass(slots=True)
class OpenTurn:
    role: str
    content: Span


@dataclass(eq=False, slots=True)
class Active:
    """What the executor waits for. `streamed` counts the characters that deltas brought."""

    origin: Origin
    pending: tuple[Pending[tuple[Output, ...]] | Pending[tuple[Score, ...]], ...] = ()
    marks_left: int = 0
    is_streaming: bool = False
    streamed: list[str] = field(default_factory=list)
    num_streamed: int = 0  # tokens
    textless: list[Delta] = field(default_factory=list)  # tokens that have shown no text yet
    alarm: Alarm | None = None
    since: float = field(default_factory=time.perf_counter)


class Executor:
    """The text, the variables and the queue of one state. Thread-safe.

    Steps run one after the other, by whoever pumps: `_is_pumping` makes that one thread at a time, so a step needs
    the lock only where readers look. Neither the backend nor an author's code is ever called with the lock held.
    """

    def __init__(self, run: Run, *, parent: Executor | None = None) -> None:
        self.run = run
        self._changed = Changes()
        # The queue and what happens to it.
        self._queue: deque[tuple[Step, Origin]] = deque()
        self._is_started = parent is None  # a fork starts when its parent gets there
        self._is_pumping = False
        self._active: Active | None = None
        self._error: BaseException | None = None
        self._traceback: types.TracebackType | None = None
        self._is_body_done = parent is not None
        self._ret_value: object = None
        # What has been submitted, and so is known to come.
        self._expected: Counter[str] = Counter()
        self._num_joins = 0
        self._submitted_turn: str | None = None if parent is None else parent._submitted_turn
        self._forks: list[weakref.ref[Executor]] = []
        # What has run.
        self._chunks: list[str] = []  # the text, in pieces as they came
        self._spans: dict[str, Span] = {}
        self._variables: dict[str, object] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._usage = Usage()
        self._messages: list[Message] = []
        self._turn: OpenTurn | None = None
        self._scopes: list[Span] = []
        self._tail = ""  # template text that stands after the last content
        self._is_streaming = False
        self._deltas: dict[int, tuple[Delta, ...]] = {}  # chunk -> the deltas that it came in
        # The branch, and how far it has got. All text stays here as segments, so that a branch can be let go.
        self._lease: Lease | None = None
        self._segments: list[Segment] = []
        self._num_sent = 0
        # What came from the parent.
        self._inherited_variables: frozenset[str] = frozenset()
        self._num_inherited_segments = 0
        self._num_inherited_messages = 0
        # What happened, for whoever wants to see it: nothing here reads it back.
        self.history = History(run.program)
        if parent is None:
            self.history.start()
            if run.deadline is not None:
                clock.at(run.deadline, self.end_late)

    # -- writing ------------------------------------------------------------------------------------------------------

    def submit(self, steps: Sequence[Step], origin: Origin) -> bool:
        """Queue the steps and run what can run. Returns without waiting for any generation.

        False: the state has failed, and dropped them; the next read tells.

        Raises:
            ProgramError: the steps open or close turns or scopes in an order that cannot be.
        """
        with self._changed:
            if self._error is not None:
                return False
            for step in steps:
                self._expect(step)
                self._queue.append((step, origin))
        self._pump()
        return True

    def fork(self, count: int, origin: Origin) -> tuple[Executor, ...]:
        """`count` executors that start when everything submitted so far has run. Does not wait for that."""
        children = tuple(Executor(self.run, parent=self) for _ in range(count))
        with self._changed:
            self._forks = [ref for ref in self._forks if ref() is not None]
            self._forks += [weakref.ref(child) for child in children]
        if not self.submit((Fork(children),), origin):
            assert self._error is not None
            for child in children:
                child.fail(self._error)
        return children

    def mark(self, origin: Origin) -> Pending[Snapshot]:
        """A snapshot of the state as it is when everything submitted so far has run."""
        reached: Pending[Snapshot] = Pending()
        if not self.submit((Mark(reached),), origin):
            assert self._error is not None
            reached.fail(self._error)
        return reached

    def end_body(self, ret_value: object) -> None:
        with self._changed:
            self._ret_value = ret_value
            self._is_body_done = True
            self._changed.notify_all()

    def fail(self, error: BaseException, origin: Origin | None = None) -> None:
        """End the state with `error`: queued steps are dropped, every read raises it. The first error stays."""
        if origin is not None:
            add_origin(error, self.run.program, origin)
        with self._changed:
            if self._error is not None:
                return
            self._error, self._traceback = error, error.__traceback__
            self.history.failed(error)
            self._is_body_done = True
            dropped, self._queue = self._queue, deque()
            active, self._active = self._active, None
            lease, self._lease = self._lease, None
            self._num_sent = 0
            self._changed.notify_all()
        del lease  # closes the branch
        if active is not None:
            self._stop_alarm(active)
            for pending in active.pending:
                pending.cancel()
        for step, _ in dropped:
            if isinstance(step, Mark):
                step.reached.fail(error)
            elif isinstance(step, Fork):
                for child in step.children:
                    child.fail(error)

    def abort(self, error: BaseException) -> None:
        """`fail`, for this state and for all that were forked from it."""
        self.fail(error)
        for child in self._living_forks():
            child.abort(error)

    def end_late(self) -> None:
        """The run's time is over: end what is not done. What was done in time stays readable."""
        with self._changed:
            was_done = self._is_settled(outside=True)
        if not was_done:
            self._time_out()
            return
        for child in self._living_forks():
            child.end_late()

    def _time_out(self) -> None:
        """Names the line that it was waiting for, where there is one."""
        error = self.run.timed_out()
        active = self._active
        if active is not None:
            add_origin(error, self.run.program, active.origin)
        self.abort(error)

    def _end_late_call(self, active: Active, node: Gen | Select) -> None:
        """A gen's own time is over."""
        with self._changed:
            if self._active is not active:
                return
        kind = type(node).__name__.lower()
        what = f"a {kind}" if node.name is None else f"{kind} {node.name!r}"
        error = TimedOut(
            f"{what} was not done within its timeout of {node.timeout} s; give it more time or fewer tokens"
        )
        add_origin(error, self.run.program, active.origin)
        self.abort(error)

    def _living_forks(self) -> list[Executor]:
        with self._changed:
            return [fork for ref in self._forks if (fork := ref()) is not None]

    def cancel(self) -> None:
        self.abort(Cancelled(f"program {self.run.program} was cancelled"))

    def release(self) -> None:
        """Let the branch go as soon as the state is idle. Text added later is sent again from the start."""
        with self._changed:
            if self._is_idle():
                self._lease, self._num_sent = None, 0

    # -- reading ------------------------------------------------------------------------------------------------------

    def sync(self, *, outside: bool = False) -> None:
        """Wait until everything submitted has run. `outside`: and until the program's body has ended.

        Raises:
            The error that the state failed with.
        """
        self._read(partial(self._is_settled, outside), lambda: None)

    async def sync_async(self, *, outside: bool = False) -> None:
        """`sync` without blocking the event loop."""
        await self._read_async(partial(self._is_settled, outside), lambda: None)

    def error(self, *, outside: bool = False) -> BaseException | None:
        """The error that the state failed with, or None when everything has run."""
        try:
            self.sync(outside=outside)
        except BaseException as error:
            if error is not self._error:
                raise  # the waiting itself was interrupted
        return self._error

    def settle(self, *, outside: bool = False) -> None:
        """Wait for this state and for the forks that somebody holds, whether they fail or not."""
        self.error(outside=outside)
        with self._changed:
            forks = [fork for ref in self._forks if (fork := ref()) is not None]
        for fork in forks:
            fork.settle()

    def text(self, *, outside: bool = False) -> str:
        return self._read(partial(self._is_settled, outside), lambda: "".join(self._chunks))

    def text_so_far(self) -> str:
        with self._changed:
            return "".join(self._chunks)

    def messages(self, *, outside: bool = False) -> list[Message]:
        return self._read(partial(self._is_settled, outside), lambda: list(self._messages))

    def usage(self, *, outside: bool = False) -> Usage:
        return self._read(partial(self._is_settled, outside), lambda: self._usage)

    def ret_value(self) -> object:
        return self._read(lambda: self._is_body_done, lambda: self._ret_value)

    def token_ids(self, *, outside: bool = False) -> Sequence[int]:
        """The ids of the whole text, as they stand on the branch."""
        self.submit((Flush(),), Origin("token_ids", 0))
        lease = self._read(partial(self._is_settled, outside), lambda: self._lease)
        assert lease is not None, "the flush opened the branch"
        return tuple(lease.branch.token_ids)

    def variable(self, name: str, *, outside: bool = False) -> object:
        """The variable's value, once every submitted step that sets it has run.

        Raises:
            UnknownVariable: nothing that was submitted sets it.
        """
        return self._read(partial(self._is_decided, name, outside), partial(self._variable, name))

    async def variable_async(self, name: str, *, outside: bool = False) -> object:
        """`variable` without blocking the event loop."""
        return await self._read_async(partial(self._is_decided, name, outside), partial(self._variable, name))

    def _variable(self, name: str) -> object:
        if name not in self._variables:
            raise self._unknown(name)
        return self._variables[name]

    def outcome(self, name: str, *, outside: bool = False) -> Outcome:
        return self._read(partial(self._is_decided, name, outside), partial(self._outcome, name))

    def _outcome(self, name: str) -> Outcome:
        if name in self._outcomes:
            return self._outcomes[name]
        if name in self._variables:
            raise UnknownVariable(f"variable {name!r} was not generated, so nothing is known about its making")
        raise self._unknown(name)

    def has_variable(self, name: str, *, outside: bool = False) -> bool:
        """Is it set, or will a submitted step set it?"""
        return self._read(
            lambda: self._expected[name] > 0 or name in self._variables or self._is_decided(name, outside),
            lambda: self._expected[name] > 0 or name in self._variables,
        )

    # -- reading a text as it comes -----------------------------------------------------------------------------------

    def next_piece(self, cursor: Cursor) -> str | None:
        """Wait for text behind the cursor, and move it on. The piece may be empty; None: that was the whole text.

        Raises:
            UnknownVariable: nothing that was submitted sets the cursor's variable.
            The error that the state failed with, after the text that came before it.
        """
        self._start_streaming()
        with self._changed:
            self._wait_or_time_out(partial(self._has_news, cursor))
            return self._take_news(cursor)

    async def next_piece_async(self, cursor: Cursor) -> str | None:
        """`next_piece` without blocking the event loop."""
        self._start_streaming()
        return await self._when(partial(self._has_news, cursor), partial(self._take_news, cursor))

    def _has_news(self, cursor: Cursor) -> bool:
        if self._error is not None or cursor.is_done:
            return True
        if cursor.name is None:
            return len(self._chunks) > cursor.stop or self._is_settled(cursor.outside)
        if cursor.span is None:
            return cursor.name in self._spans or self._is_decided(cursor.name, cursor.outside)
        return len(self._chunks) > cursor.stop or cursor.span.end is not None

    def _take_news(self, cursor: Cursor) -> str | None:
        name = cursor.name
        if cursor.is_done:
            return None
        if cursor.span is None:
            if name is None:
                cursor.span = Span(0)
            elif name in self._spans:
                cursor.span = self._spans[name]
                cursor.stop = cursor.span.start
            else:
                self.raise_error()
                value = self._variable(name)  # set by the program, at once
                cursor.is_done = True
                return str(value)
        cursor.start = cursor.stop
        cursor.stop = len(self._chunks) if cursor.span.end is None else cursor.span.end
        piece = "".join(self._chunks[cursor.start : cursor.stop])
        if piece:
            return piece
        self.raise_error()
        cursor.is_done = self._is_settled(cursor.outside) if name is None else cursor.span.end is not None
        return None if cursor.is_done else ""

    def deltas_of(self, cursor: Cursor) -> tuple[Delta, ...]:
        """What the piece that the cursor took last was made of. Text that the program wrote has none."""
        with self._changed:
            return tuple(d for at in range(cursor.start, cursor.stop) for d in self._deltas.get(at, ()))

    def _start_streaming(self) -> None:
        """Ask for deltas, also those of a generation that runs already."""
        with self._changed:
            self._is_streaming = True
            active = self._active
            if active is None or active.is_streaming:
                return
            active.is_streaming = True
        # Without the lock: a generation calls back while holding its own.
        for pending in active.pending:
            if isinstance(pending, Generation):
                pending.add_delta_callback(partial(self._on_delta, active))

    # -- questions about the state, asked with the lock held ----------------------------------------------------------

    def _is_idle(self) -> bool:
        return self._is_started and not self._queue and self._active is None and not self._is_pumping

    def _is_settled(self, outside: bool) -> bool:
        return self._is_idle() and (self._is_body_done or not outside)

    def _is_decided(self, name: str, outside: bool) -> bool:
        """Can no submitted step change whether the variable is there, and what it is?"""
        if not self._is_started or self._expected[name] > 0:
            return False
        if name in self._variables:
            return True
        return self._num_joins == 0 and (self._is_body_done or not outside)

    def _unknown(self, name: str) -> UnknownVariable:
        known = ", ".join(repr(other) for other in self._variables) or "none"
        return UnknownVariable(f"program {self.run.program} has no variable {name!r}; it has: {known}")

    def raise_error(self) -> None:
        """Raise the error that the state failed with, if it has."""
        if self._error is not None:
            # With its first traceback: each raise would otherwise grow it.
            raise self._error.with_traceback(self._traceback)

    # -- waiting for the answer ---------------------------------------------------------------------------------------

    def _read(self, is_ready: Question, read: Callable[[], T]) -> T:
        """Wait until the answer is yes, and read. Both are called with the lock held.

        Raises:
            The error that the state failed with.
        """
        with self._changed:
            self._wait_or_time_out(lambda: self._error is not None or is_ready())
            self.raise_error()
            return read()

    async def _read_async(self, is_ready: Question, read: Callable[[], T]) -> T:
        """`_read` without blocking the event loop."""

        def read_or_raise() -> T:
            self.raise_error()
            return read()

        return await self._when(lambda: self._error is not None or is_ready(), read_or_raise)

    async def _when(self, is_ready: Question, read: Callable[[], T]) -> T:
        """Read as soon as the answer is yes, without blocking the event loop. A time-out is the clock's business."""
        while True:
            await self._changed.until(is_ready)
            with self._changed:
                if is_ready():
                    return read()

    def _wait_or_time_out(self, is_ready: Question) -> None:
        """Wait with the lock held."""
        if is_ready():
            return
        self.run.check_may_block()
        if not self._changed.wait_for(is_ready, self.run.remaining()):
            with self._changed.released():
                self._time_out()

    # -- keeping count of what was submitted --------------------------------------------------------------------------

    def _expect(self, step: Step) -> None:
        match step:
            case RoleBegin(role=role):
                if self._submitted_turn is not None:
                    raise ProgramError(
                        f"a {role} turn begins inside a {self._submitted_turn} turn; turns do not nest: end that first"
                    )
                self._submitted_turn = role
            case RoleEnd(role=role):
                if self._submitted_turn != role:
                    raise ProgramError(
                        f"{role}_end() without {role}_begin(): "
                        + (f"a {self._submitted_turn} turn is open" if self._submitted_turn else "no turn is open")
                    )
                self._submitted_turn = None
            case Join():
                self._num_joins += 1
            case Text() | Gen() | Select() | ScopeBegin() | ScopeEnd() | SetVariable() | Fork() | Mark() | Flush():
                pass
            case _:
                assert_never(step)
        if isinstance(step, Gen | Select | ScopeEnd | SetVariable):
            self._expected.update(variables_of(step))

    # -- running ------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Run steps until one has to wait or none is left. Whoever finds another thread at it leaves it to that one."""
        with self._changed:
            if self._is_pumping or not self._is_started:
                return
            self._is_pumping = True
        while True:
            with self._changed:
                if self._error is not None or self._active is not None or not self._queue:
                    self._is_pumping = False
                    self._changed.notify_all()
                    return
                step, origin = self._queue.popleft()
            try:
                self._execute(step, origin)
            except BaseException as error:
                self.fail(error, origin)
                if isinstance(step, Mark):
                    step.reached.fail(error)
                elif isinstance(step, Fork):
                    for child in step.children:
                        child.fail(error)
                if not isinstance(error, Exception):  # Ctrl-C: the state has failed, and the author's thread must know
                    with self._changed:
                        self._is_pumping = False
                    raise

    def _execute(self, step: Step, origin: Origin) -> None:
        match step:
            case Text(text=text):
                self._append(Segment(text))
            case Gen():
                self._generate(step, origin)
            case Select():
                self._score(step, origin)
            case RoleBegin():
                self._begin_turn(step)
            case RoleEnd():
                self._end_turn()
            case ScopeBegin(name=name):
                self._begin_scope(name)
            case ScopeEnd(name=name):
                self._end_scope(name)
            case SetVariable(name=name, value=value):
                self._set(name, value)
            case Fork(children=children):
                self._start_children(children, origin)
            case Mark(reached=reached):
                self._reach(reached)
            case Join():
                self._wait_for_marks(step, origin)
            case Flush():
                self._flush()
            case _:
                assert_never(step)

    def _append(self, *segments: Segment) -> None:
        with self._changed:
            for segment in segments:
                self._segments.append(segment)
                self._chunks.append(segment.text)
            self.history.wrote(segments)
            if self._is_streaming:
                self._changed.notify_all()

    def _set(self, name: str, value: object) -> None:
        with self._changed:
            self._variables[name] = value
            self._outcomes.pop(name, None)
            self._spans.pop(name, None)
            self.history.assigned(name, value)
            self._expected[name] -= 1
            self._changed.notify_all()

    def _begin_scope(self, name: str) -> None:
        with self._changed:
            self._scopes.append(Span(len(self._chunks)))
            self._spans[name] = self._scopes[-1]
            self._changed.notify_all()

    def _end_scope(self, name: str) -> None:
        with self._changed:
            span = self._spans[name] = self._scopes.pop()
            span.end = len(self._chunks)
            self._variables[name] = "".join(self._chunks[span.start :])
            self.history.assigned(name, self._variables[name])
            self._outcomes.pop(name, None)
            self._expected[name] -= 1
            self._changed.notify_all()

    # -- generating ---------------------------------------------------------------------------------------------------

    def _generate(self, node: Gen, origin: Origin) -> None:
        backend = self.run.backend
        params = self._params(node, backend)
        branch, delta = self._branch_and_delta(backend)
        call = self.history.calls(node, params, branch, origin)
        generation = backend.generate(branch, delta, params)
        call.end = num_tokens(branch)
        with self._changed:
            self._num_sent = len(self._segments)
            span = Span(len(self._chunks), dtype=node.dtype, fills=params.n == 1)
            if node.name is not None:
                self._spans[node.name] = span
            active = Active(origin, (generation,), is_streaming=self._is_streaming)
            has_failed = self._error is not None
            if not has_failed:
                self._active = active
                self._changed.notify_all()
        if has_failed:  # cancelled while it was being sent
            generation.cancel()
            return
        self._set_alarm(active, node)
        if active.is_streaming:
            generation.add_delta_callback(partial(self._on_delta, active))
        generation.add_done_callback(partial(self._on_generated, active, generation, node, span, call))

    def _set_alarm(self, active: Active, node: Gen | Select) -> None:
        if node.timeout is not None:
            active.alarm = clock.at(time.monotonic() + node.timeout, self._end_late_call, active, node)

    def _stop_alarm(self, active: Active) -> None:
        if active.alarm is not None:
            active.alarm.cancel()

    def _params(self, node: Gen, backend: Backend) -> SamplingParams:
        """The node's options over the run's, over the model's own, over the defaults; with the type's constraint."""
        if self.run.remaining() == 0.0:
            raise self.run.timed_out()
        options = node.options.over(self.run.options).over(backend.info().defaults)
        if node.type is None:
            return options.resolve()
        said = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())
        stop = tuple(dict.fromkeys((*said, *node.type.stop)))
        return replace(options, constraint=node.type.constraint, stop=stop or None).resolve()

    def _on_delta(self, active: Active, delta: Delta) -> None:
        with self._changed:
            if self._active is not active:
                return
            active.num_streamed += len(delta.token_ids)
            active.textless.append(delta)
            if delta.text:
                active.streamed.append(delta.text)
                self._append_piece(delta.text, active)
                self._changed.notify_all()

    def _on_generated(self, active: Active, generation: Generation, node: Gen, span: Span, call: Called) -> None:
        self._stop_alarm(active)
        try:
            outputs = generation.result(0)
            values = [_value(output, node) for output in outputs]
            with self._changed:
                if self._active is not active:
                    return
                self._take_output(active, outputs[0], span)
                self.history.answered(call, outputs)
                self._usage = self._usage.plus(usage_of(outputs))
                if node.name is not None:
                    self._variables[node.name] = values[0] if len(values) == 1 else values
                    self._outcomes[node.name] = outputs
                    self._expected[node.name] -= 1
                self._active = None
                self._changed.notify_all()
        except BaseException as error:  # nothing may escape into the backend's thread
            self.fail(error, active.origin)
        self._pump()

    def _take_output(self, active: Active, output: Output, span: Span) -> None:
        """The text of the first output, less what deltas brought already. The branch holds it by itself."""
        streamed = "".join(active.streamed)
        if not output.text.startswith(streamed):
            raise GenerationError(f"the backend streamed {streamed!r} and then ended with {output.text!r}")
        if len(output.text) > len(streamed):
            rest, seen = output.text[len(streamed) :], active.num_streamed
            tokens = output.token_ids[seen:], output.logprobs[seen:], output.top_logprobs[seen:]
            active.textless.append(Delta(rest, *tokens))
            self._append_piece(rest, active)
        span.end = len(self._chunks)
        self._segments.append(Segment(output.text))
        self._num_sent = len(self._segments)

    def _append_piece(self, text: str, active: Active) -> None:
        self._deltas[len(self._chunks)] = tuple(active.textless)
        self._chunks.append(text)
        active.textless = []

    # -- selecting ----------------------------------------------------------------------------------------------------

    def _score(self, node: Select, origin: Origin) -> None:
        if self.run.remaining() == 0.0:
            raise self.run.timed_out()
        backend = self.run.backend
        branch, delta = self._branch_and_delta(backend)
        call = self.history.calls(node, None, branch, origin)
        scoring = scores_for(node, backend, branch, delta)
        call.end = num_tokens(branch)
        active = Active(origin, (scoring,))
        with self._changed:
            self._num_sent = len(self._segments)
            has_failed = self._error is not None
            if not has_failed:
                self._active = active
        if has_failed:
            scoring.cancel()
            return
        self._set_alarm(active, node)
        scoring.add_done_callback(partial(self._on_scored, active, scoring, node, call))

    def _on_scored(self, active: Active, scoring: Pending[tuple[Score, ...]], node: Select, call: Called) -> None:
        self._stop_alarm(active)
        try:
            scores, unconditional = parted(node, scoring.result(0))
            decision = node.method.decide(scores, unconditional)
            choice = node.choices[decision.index]
            with self._changed:
                if self._active is not active:
                    return
                self._chunks.append(choice)
                self._segments.append(Segment(choice))
                outcome = Selected(node.choices, scores, decision)
                self.history.answered(call, outcome)
                self._usage = self._usage.plus(usage_of(outcome))
                if node.name is not None:
                    self._spans[node.name] = Span(len(self._chunks) - 1, len(self._chunks))
                    self._variables[node.name] = choice
                    self._outcomes[node.name] = outcome
                    self._expected[node.name] -= 1
                self._active = None
                self._changed.notify_all()
        except BaseException as error:  # nothing may escape into the backend's thread
            self.fail(error, active.origin)
        self._pump()

    # -- chat turns ---------------------------------------------------------------------------------------------------

    def _begin_turn(self, node: RoleBegin) -> None:
        template = template_of(self.run.backend)
        text = template.opening(self._roles(), node.role, self._tail, generates=node.generates)
        self.history.role = node.role
        if text:
            self._append(Segment(text, control=True))
        with self._changed:
            self._turn = OpenTurn(node.role, Span(len(self._chunks)))

    def _end_turn(self) -> None:
        turn = self._turn
        assert turn is not None, "submit refuses an end without a beginning"
        tail = template_of(self.run.backend).closing(self._roles(), turn.role)
        with self._changed:
            content = "".join(self._chunks[turn.content.start :])
            self._messages.append(Message(turn.role, content))
            self._turn, self._tail = None, tail
        if tail:
            self._append(Segment(tail, control=True))
        self.history.role = None

    def _roles(self) -> tuple[str, ...]:
        return tuple(message.role for message in self._messages)

    # -- forking and joining ------------------------------------------------------------------------------------------

    def _start_children(self, children: tuple[Executor, ...], origin: Origin) -> None:
        backend = self.run.backend
        branch = self._flush()  # before the fork, so that the children share it
        text = "".join(self._chunks)
        self.history.forked([child.history for child in children], origin)
        for child in children:
            child._start(self, Lease(backend, backend.fork(branch)), text)
        for child in children:
            child._pump()

    def _start(self, parent: Executor, lease: Lease, text: str) -> None:
        """Called by the parent's pump, so the parent does not change meanwhile."""
        with self._changed:
            if self._error is not None:
                return
            self._lease = lease
            self._chunks = [text] if text else []
            self._segments = list(parent._segments)
            self._num_sent = self._num_inherited_segments = len(self._segments)
            self._variables = dict(parent._variables)
            self._inherited_variables = frozenset(self._variables)
            self._outcomes = dict(parent._outcomes)
            self._messages = list(parent._messages)
            self._num_inherited_messages = len(self._messages)
            self._tail = parent._tail
            if parent._turn is not None:
                self._inherit_turn(parent, parent._turn)
            self.history.start(parent.history.role)
            self._is_started = True
            self._changed.notify_all()

    def _inherit_turn(self, parent: Executor, turn: OpenTurn) -> None:
        """The open turn's content so far becomes a chunk of its own, so that its start can be told."""
        content = "".join(parent._chunks[turn.content.start :])
        before = "".join(self._chunks)[: -len(content)] if content else "".join(self._chunks)
        self._chunks = [before, content]
        self._turn = OpenTurn(turn.role, Span(1))

    def _reach(self, reached: Pending[Snapshot]) -> None:
        """Hand over the snapshot. A joined fork is done with its branch, as far as anybody knows."""
        with self._changed:
            made = {k: v for k, v in self._variables.items() if k not in self._inherited_variables}
            snapshot = Snapshot(
                made,
                tuple(self._segments[self._num_inherited_segments :]),
                self._turn is not None or len(self._messages) > self._num_inherited_messages,
            )
            lease = self._lease
            if not self._queue:
                self._lease, self._num_sent = None, 0
        del lease
        reached.succeed(snapshot)

    def _wait_for_marks(self, node: Join, origin: Origin) -> None:
        active = Active(origin, marks_left=len(node.marks))
        with self._changed:
            if self._error is not None:
                return
            self._active = active
        for mark in node.marks:
            mark.add_done_callback(partial(self._on_mark, active, node))

    def _on_mark(self, active: Active, node: Join) -> None:
        with self._changed:
            active.marks_left -= 1
            if active.marks_left > 0 or self._active is not active:
                return
        try:
            snapshots = [mark.result(0) for mark in node.marks]
            names = tuple(dict.fromkeys(name for snapshot in snapshots for name in snapshot.variables))
            self.history.has_joined(node.histories, () if node.appends else names, active.origin, active.since)
            if node.appends:
                self._append_texts(snapshots)
            else:
                self._gather(snapshots)
            with self._changed:
                self._num_joins -= 1
                self._active = None
                self._changed.notify_all()
        except BaseException as error:  # nothing may escape into the thread that finished the last child
            self.fail(error, active.origin)
        self._pump()

    def _gather(self, snapshots: Sequence[Snapshot]) -> None:
        names = dict.fromkeys(name for snapshot in snapshots for name in snapshot.variables)
        with self._changed:
            for name in names:
                if name not in self._variables:
                    self._variables[name] = [snapshot.variables.get(name) for snapshot in snapshots]

    def _append_texts(self, snapshots: Sequence[Snapshot]) -> None:
        if any(snapshot.has_turns for snapshot in snapshots):
            raise ProgramError(
                "join('concat') of forks that opened chat turns; gather their variables with join() instead"
            )
        self._append(*(segment for snapshot in snapshots for segment in snapshot.segments))

    # -- the branch ---------------------------------------------------------------------------------------------------

    def _flush(self) -> Branch:
        backend = self.run.backend
        branch, delta = self._branch_and_delta(backend)
        if delta:
            position = num_tokens(branch)
            backend.append(branch, delta)
            self.history.sent(position, branch)
        with self._changed:
            self._num_sent = len(self._segments)
        return branch

    def _branch_and_delta(self, backend: Backend) -> tuple[Branch, tuple[Segment, ...]]:
        """The branch, opened where there is none, and the text that it does not hold yet."""
        with self._changed:
            lease = self._lease
        if lease is None:
            lease = Lease(backend, backend.open())
            with self._changed:
                if self._error is not None:
                    raise self._error
                self._lease, self._num_sent = lease, 0
        # One text, however many pieces it was written in: where the pieces met must not show in the tokens.
        unsent = self._segments[self._num_sent :]
        delta = tuple(
            Segment("".join(segment.text for segment in run), control)
            for control, run in groupby(unsent, key=lambda segment: segment.control)
        )
        return lease.branch, delta


def _value(output: Output, node: Gen) -> object:
    """The value that the variable gets.

    Raises:
        GenerationError: the text cannot be read as the type. A constraint excludes it, unless the budget ran out.
    """
    if node.type is None:
        return output.text
    try:
        return node.type.parse(output.text)
    except Exception as error:
        name = "a gen" if node.name is None else f"gen {node.name!r}"
        if not output.complete or output.finish_reason.type == "length":
            raise GenerationError(
                f"{name} used up its {output.completion_tokens} tokens before its {node.type.name} was complete "
                f"({output.text!r}); give it a larger max_tokens"
            ) from error
        raise GenerationError(f"{name} generated {output.text!r}, which {node.type.name} refuses: {error}") from error
