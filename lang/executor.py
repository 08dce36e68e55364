"""The interpreter: one executor per state, driven by events, with no thread of its own.

`submit` puts steps into a queue and runs what can run. A generation leaves the executor waiting; the backend's
callback, on whatever thread it comes, records the result and runs on. Only reads wait.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import assert_never

from niwaki.lang.backends import Lease
from niwaki.lang.calling import Active, Calling
from niwaki.lang.clock import clock
from niwaki.lang.joining import brought_home
from niwaki.lang.nodes import (
    Gen,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    SetVariable,
    Text,
    turn_named,
    variables_of,
)
from niwaki.lang.origin import Origin, add_origin
from niwaki.lang.run import Run
from niwaki.lang.steps import Borrow, Flush, Fork, Join, Mark, Snapshot, Step, Tell
from niwaki.lang.transcript import Start
from niwaki.runtime.api import Branch, Cancelled, Message, Pending, ProgramError, Segment


class Executor(Calling):
    """The queue of one state, and what its steps do. Thread-safe.

    Steps run one after the other, by whoever pumps: `_is_pumping` makes that one thread at a time, so a step needs
    the lock only where readers look. Neither the backend nor an author's code is ever called with the lock held.
    """

    def __init__(self, run: Run, *, parent: Executor | None = None) -> None:
        super().__init__(run, is_fork=parent is not None)
        self._queue: deque[tuple[Step, Origin]] = deque()
        self._is_pumping = False
        self._submitted_turn: str | None = None if parent is None else parent._submitted_turn
        self._forks: list[weakref.ref[Executor]] = []
        self._named = f"program {run.program}" if parent is None else f"a fork of program {run.program}"
        if parent is None:
            self.history.start()
            for limit in run.limits:
                clock.at_end_of(limit, self.end_late)

    def stand_on(self, branch: Branch, segments: Sequence[Segment], messages: Sequence[Message]) -> None:
        """Begin on a branch that holds these segments, the last of which ends the last of these messages."""
        self._append(*segments)
        with self._lock:
            self._place.hold(Lease(self.run.backend, branch))
            self._place.all_sent()
            self._made.messages += messages

    # -- writing ------------------------------------------------------------------------------------------------------

    def submit(self, steps: Sequence[Step], origin: Origin) -> bool:
        """Queue the steps and run what can run. Returns without waiting for any generation.

        False: the state has failed, and dropped them; the next read tells.

        Raises:
            ProgramError: the steps open or close turns or scopes in an order that cannot be.
        """
        with self._lock:
            if self._error is not None:
                return False
            for step in steps:
                self._expect(step)
                self._queue.append((step, origin))
        self._pump()
        return True

    def fork(self, count: int, origin: Origin) -> tuple[Executor, ...]:
        """`count` executors that start when everything submitted so far has run. Does not wait for that."""
        children = tuple(self._child() for _ in range(count))
        with self._lock:
            self._forks = [ref for ref in self._forks if ref() is not None]
            self._forks += [weakref.ref(child) for child in children]
        if not self.submit((Fork(children),), origin):
            assert self._error is not None
            for child in children:
                child.fail(self._error)
        return children

    def _child(self) -> Executor:
        return Executor(self.run, parent=self)

    def mark(self, origin: Origin) -> Pending[Snapshot]:
        """A snapshot of the state as it is when everything submitted so far has run."""
        reached: Pending[Snapshot] = Pending()
        if not self.submit((Mark(reached),), origin):
            assert self._error is not None
            reached.fail(self._error)
        return reached

    def submitted_names(self) -> tuple[str, ...]:
        """The variables that were given to it to set, whether it did or not."""
        with self._lock:
            return tuple(self._expected)

    def end_body(self, ret_value: object) -> None:
        with self._lock:
            self._ret_value = ret_value
            self._is_body_done = True
            self._changed.notify_all()

    def fail(self, error: BaseException, origin: Origin | None = None) -> None:
        """End the state with `error`: queued steps are dropped, every read raises it. The first error stays."""
        if origin is not None:
            add_origin(error, self.run.program, origin)
        with self._lock:
            if self._error is not None:
                return
            self._error, self._traceback = error, error.__traceback__
            self.history.failed(error)
            self._is_body_done = True
            dropped, self._queue = self._queue, deque()
            active, self._active = self._active, None
            lease = self._place.let_go()
            self._changed.notify_all()
        del lease  # closes the branch
        if active is not None:
            self._stop_alarm(active)
            for pending in active.pending:
                pending.cancel()
        for step, _ in dropped:
            _fail_those_behind(step, error)

    def abort(self, error: BaseException) -> None:
        """`fail`, for this state and for all that were forked from it."""
        self.fail(error)
        for child in self._living_forks():
            child.abort(error)

    def end_late(self) -> None:
        """The run's time is over: end what is not done. What was done in time stays readable."""
        with self._lock:
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

    def _is_in_forks(self, name: str) -> bool:
        # Without the locks of the forks, which may want this one: a look at a dict needs none.
        forks = [fork for ref in self._forks if (fork := ref()) is not None]
        return any(name in fork._expected or name in fork._made.variables for fork in forks)

    def _living_forks(self) -> list[Executor]:
        with self._lock:
            return [fork for ref in self._forks if (fork := ref()) is not None]

    def cancel(self) -> None:
        self.abort(Cancelled(f"{self._named} was cancelled"))

    def _interrupt(self) -> None:
        self.abort(Cancelled(f"{self._named} was cancelled, by Ctrl-C where it was waited for"))

    def release(self) -> None:
        """Let the branch go as soon as the state is idle. Text added later is sent again from the start."""
        with self._lock:
            if self._is_idle():
                self._place.let_go()

    def settle(self, *, outside: bool = False) -> None:
        """Wait for this state and for the forks that somebody holds, whether they fail or not."""
        self.error(outside=outside)
        for fork in self._living_forks():
            fork.settle()

    def token_ids(self, *, outside: bool = False) -> Sequence[int]:
        """The ids of the whole text, as they stand on the branch."""
        self.submit((Flush(),), Origin("token_ids", 0))
        lease = self._read(partial(self._is_settled, outside), lambda: self._place.lease)
        assert lease is not None, "the flush opened the branch"
        return tuple(lease.branch.token_ids)

    def _is_idle(self) -> bool:
        return self._is_started and not self._queue and self._active is None and not self._is_pumping

    # -- keeping count of what was submitted --------------------------------------------------------------------------

    def _expect(self, step: Step) -> None:
        match step:
            case RoleBegin(role=role):
                if self._submitted_turn is not None:
                    raise ProgramError(
                        f"{turn_named(role)} begins inside {turn_named(self._submitted_turn)}; "
                        "turns do not nest: end that first"
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
            case Text() | Gen() | Select() | ScopeBegin() | ScopeEnd() | SetVariable():
                pass
            case Fork() | Mark() | Tell() | Borrow() | Flush():
                pass
            case _:
                assert_never(step)
        if isinstance(step, Gen | Select | ScopeEnd | SetVariable):
            for name in variables_of(step):
                self._expected[name] = self._expected.get(name, 0) + 1

    # -- running ------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Run steps until one has to wait or none is left. Whoever finds another thread at it leaves it to that one."""
        with self._lock:
            if self._is_pumping or not self._is_started:
                return
            self._is_pumping = True
        while True:
            with self._lock:
                if self._error is not None or self._active is not None or not self._queue:
                    self._is_pumping = False
                    self._changed.notify_all()
                    return
                step, origin = self._queue.popleft()
            try:
                self._execute(step, origin)
            except BaseException as error:
                self.fail(error, origin)
                _fail_those_behind(step, error)
                if not isinstance(error, Exception):  # Ctrl-C: the state has failed, and the author's thread must know
                    with self._lock:
                        self._is_pumping = False
                    raise

    def _execute(self, step: Step, origin: Origin) -> None:
        match step:
            case Text(text=text):
                self._append(Segment(text))
            case Gen():
                select = self.as_select(step)
                if select is None:
                    self._generate(step, origin)
                else:
                    self._score(select, origin)
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
            case Tell(name=name, told=told, index=index):
                value = self._made.variable(name)
                told.succeed(value[index] if index is not None and isinstance(value, list) else value)
            case Borrow(told=told):
                self._wait_for_text(told, origin)
            case Flush():
                self._flush()
            case _:
                assert_never(step)

    def _append(self, *segments: Segment) -> None:
        with self._lock:
            self._place.add(segments)
            for segment in segments:
                self._made.write(segment.text)
            self.history.wrote(segments)
            if self._is_streaming:
                self._changed.notify_all()

    def _set(self, name: str, value: object) -> None:
        with self._lock:
            self._made.assign(name, value)
            self.history.assigned(name, value)
            self._expected[name] -= 1
            self._changed.notify_all()

    def _begin_scope(self, name: str) -> None:
        with self._lock:
            self._made.begin_scope(name)
            self._changed.notify_all()

    def _end_scope(self, name: str) -> None:
        with self._lock:
            self.history.assigned(name, self._made.end_scope(name))
            self._expected[name] -= 1
            self._changed.notify_all()

    # -- chat turns ---------------------------------------------------------------------------------------------------

    def _begin_turn(self, node: RoleBegin) -> None:
        if node.tools:
            if self._made.messages:
                raise ProgramError(f"tools are told with the first turn; this {node.role} turn is not the first")
            self._made.tools = node.tools
        made = self._made
        text = self.run.chat.opening(made.roles, node.role, made.tail, generates=node.generates, tools=made.tools)
        self.history.role = node.role
        if text:
            self._append(Segment(text, control=True))
        with self._lock:
            self._made.begin_turn(node.role)

    def _end_turn(self) -> None:
        turn = self._made.turn
        assert turn is not None, "submit refuses an end without a beginning"
        tail = self.run.chat.closing(self._made.roles, turn.role, self._made.tools)
        with self._lock:
            self._made.end_turn(turn, tail)
        if tail:
            self._append(Segment(tail, control=True))
        self.history.role = None

    # -- forking and joining ------------------------------------------------------------------------------------------

    def _start_children(self, children: tuple[Executor, ...], origin: Origin) -> None:
        backend = self.run.backend
        branch = self._flush()  # before the fork, so that the children share it
        start = self._made.start_of_forks()
        self.history.forked([child.history for child in children], origin)
        for child in children:
            child._start(self, Lease(backend, backend.fork(branch)), start)
        for child in children:
            if child._queue:
                child._pump()

    def _start(self, parent: Executor, lease: Lease, start: Start) -> None:
        """Called by the parent's pump, so the parent does not change meanwhile."""
        with self._lock:
            if self._error is not None:
                return
            self._place.inherit(parent._place, lease)
            self._made.inherit(parent._made, start)
            self.history.start(parent.history.role)
            self._is_started = True
            self._changed.notify_all()

    def _reach(self, reached: Pending[Snapshot]) -> None:
        """Hand over the snapshot. A joined fork is done with its branch, as far as anybody knows."""
        with self._lock:
            snapshot = Snapshot(
                self._made.own_variables(), self._place.own_segments(), has_turns=self._made.has_own_turns
            )
            lease = self._place.lease
            if not self._queue:
                self._place.let_go()
        del lease
        reached.succeed(snapshot)

    def _wait_for_marks(self, node: Join, origin: Origin) -> None:
        active = Active(origin, marks_left=len(node.marks))
        with self._lock:
            if self._error is not None:
                return
            self._active = active
        for mark in node.marks:
            mark.add_done_callback(partial(self._on_mark, active, node))

    def _on_mark(self, active: Active, node: Join) -> None:
        with self._lock:
            active.marks_left -= 1
            if active.marks_left > 0 or self._active is not active:
                return
        try:
            snapshots = brought_home(node)
            names = tuple(dict.fromkeys(name for snapshot in snapshots for name in snapshot.variables))
            self.history.has_joined(node.histories, () if node.appends else names, active.origin, active.since)
            if node.appends:
                self._append_texts(snapshots)
            else:
                self._gather(snapshots)
            with self._lock:
                self._num_joins -= 1
                self._active = None
                self._changed.notify_all()
        except BaseException as error:  # nothing may escape into the thread that finished the last child
            self.fail(error, active.origin)
        self._pump()

    def _wait_for_text(self, told: Pending[object], origin: Origin) -> None:
        active = Active(origin)
        with self._lock:
            if self._error is not None:
                return
            self._active = active
        told.add_done_callback(partial(self._on_text, active, told))

    def _on_text(self, active: Active, told: Pending[object]) -> None:
        with self._lock:
            if self._active is not active:
                return
        try:
            text = str(told.result(0))
            if text:
                self._append(Segment(text))
            with self._lock:
                self._active = None
                self._changed.notify_all()
        except BaseException as error:  # nothing may escape into the thread that told it
            self.fail(error, active.origin)
        self._pump()

    def _gather(self, snapshots: Sequence[Snapshot]) -> None:
        names = dict.fromkeys(name for snapshot in snapshots for name in snapshot.variables)
        with self._lock:
            for name in names:
                if name not in self._made.variables:
                    self._made.variables[name] = [snapshot.variables.get(name) for snapshot in snapshots]

    def _append_texts(self, snapshots: Sequence[Snapshot]) -> None:
        if any(snapshot.has_turns for snapshot in snapshots):
            raise ProgramError(
                "join('concat') of forks that opened chat turns; gather their variables with join() instead"
            )
        self._append(*(segment for snapshot in snapshots for segment in snapshot.segments))


def _fail_those_behind(step: Step, error: BaseException) -> None:
    """The step will not run: tell those who wait for it."""
    match step:
        case Mark(reached=reached):
            reached.fail(error)
        case Tell(told=told):
            told.fail(error)
        case Fork(children=children):
            for child in children:
                child.fail(error)
