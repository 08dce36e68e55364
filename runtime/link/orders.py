"""Orders from the server's side, carried out on an engine; what becomes of them is reported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from msgspec.structs import replace

from niwaki.runtime.api import Delta, Generation, Pending, ProgramError, SamplingParams, Score
from niwaki.runtime.api.script import Generate, Script
from niwaki.runtime.host.local import LocalBackend
from niwaki.runtime.host.local_branch import LocalBranch
from niwaki.runtime.link import frames
from niwaki.runtime.link.frames import Order, Report
from niwaki.runtime.link.lanes import QUICK_CHARS, Lanes
from niwaki.runtime.options.limits import TokenIds

log = logging.getLogger("niwaki.server")

COMPILERS = 2  # constraints that compile at once, each for up to a second


class Outlet(Protocol):
    """Where reports go; on any thread."""

    def post(self, message: Report, *, flush: bool = True) -> None:
        """Send it soon; without `flush`, with the next one that has it."""
        ...

    def flush(self) -> None:
        """Send what was posted."""
        ...


class Running(Protocol):
    def cancel(self) -> None: ...


Work = TypeVar("Work", bound=Running)
Value = TypeVar("Value")


class Orders:
    """Carries out orders on an engine and reports what becomes of them, once for each step. `take` has one user."""

    def __init__(self, engine: LocalBackend, outlet: Outlet) -> None:
        self._engine = engine
        self._outlet = outlet
        self._branches: dict[int, LocalBranch] = {}
        self._lock = threading.Lock()  # the two fields below
        self._running: dict[int, Running | None] = {}  # None: its constraint is being compiled
        self._early: dict[int, bool] = {}  # of these: somebody listens, and whether he reads
        self._compiling = ThreadPoolExecutor(COMPILERS, thread_name_prefix="niwaki-constrain")
        # Long texts wait for each other: 4 MiB take seconds, in which all other orders would wait.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="niwaki-tokenize")
        engine.after_step = outlet.flush

    def close(self) -> None:
        for threads in (self._compiling, self._tokenizing):
            threads.shutdown(wait=False, cancel_futures=True)

    def take(self, order: Order) -> None:
        """A fault is the order's own: whoever waits for it is told."""
        try:
            self._carry_out(order)
        except Exception as error:  # whatever it is, the others go on
            log.exception("an order could not be carried out")
            if not isinstance(order, frames.Load | frames.Fork | frames.Demote | frames.Close):  # which have no id
                self._refuse(order.id, error)

    def _carry_out(self, order: Order) -> None:
        match order:
            case frames.Load():
                raise AssertionError("read by whoever starts the engine")
            case frames.Start():
                self._start(order)
            case frames.Weigh():
                self._weigh(order)
            case frames.Fork(branch, twin):
                if branch in self._branches:
                    self._branches[twin] = self._engine.fork(self._branches[branch])
            case frames.Demote(branch):
                if branch in self._branches:
                    self._engine.demote(self._branches[branch])
            case frames.Close(branch):
                closed = self._branches.pop(branch, None)
                if closed is not None:
                    self._engine.close(closed)
            case frames.Cancel(id):
                with self._lock:
                    running = self._running.pop(id, None)
                    self._early.pop(id, None)
                if running is not None:
                    running.cancel()
            case frames.Listen(id, reads):
                with self._lock:
                    running = self._running.get(id)
                    if running is None and id in self._running:
                        self._early[id] = reads or self._early.get(id, False)
                if isinstance(running, Generation):
                    self._tell_pieces(id, running, reads)
            case frames.Flush(id):
                self._compiling.submit(self._flush, id)
            case frames.Look():
                self._compiling.submit(self._look, order)
            case frames.RunScript():
                self._run_script(order)

    def _start(self, order: frames.Start) -> None:
        branch = self._branch(order) if order.branch else None
        ids = _prompt(branch, order.keep, order.tail)
        with self._lock:
            self._running[order.id] = None
        params = frames.meant(order.params)
        assert isinstance(params, SamplingParams)
        start = partial(self._start_on, order, branch, ids, params)
        if not params.compiles:
            start()
        else:
            self._compiling.submit(start)

    def _start_on(self, order: frames.Start, branch: LocalBranch | None, ids: TokenIds, params: SamplingParams) -> None:
        def work() -> Generation:
            if branch is not None:
                branch.move(ids, order.settled)
            generation = self._engine.start(
                ids, params, order.namespace, branch,
                logits_from=order.logits_from, num_settled=order.settled, program=-order.program or None,
            )  # fmt: skip
            if params.compiles:
                self._outlet.post(frames.Accepted(order.id))
            return generation

        generation = self._begin(order.id, work)
        if generation is None:
            return

        def end() -> None:
            outputs = self._ended(order.id, generation)
            if outputs is not None:
                same, behind = (len(ids), b"") if branch is None else _changed(ids, branch.ids)
                bare, tops = frames.bare(outputs)
                self._outlet.post(frames.Ended(order.id, bare, same, behind, tops), flush=False)
            self._flush_outside_steps()

        if order.streams:
            generation.add_delta_callback(partial(self._tell_piece, order.id))
        generation.add_done_callback(end)
        with self._lock:
            reads = self._early.pop(order.id, None)
        if reads is not None:
            self._tell_pieces(order.id, generation, reads)

    def _tell_pieces(self, id: int, generation: Generation, reads: bool) -> None:
        self._engine.tell_deltas(generation, partial(self._tell_piece, id), reads=reads)

    def _tell_piece(self, id: int, delta: Delta) -> None:
        if delta.top_logprobs:  # msgpack has no type for those that are packed
            delta = replace(delta, top_logprobs=tuple(delta.top_logprobs))
        self._outlet.post(frames.Piece(id, delta), flush=False)

    def _weigh(self, order: frames.Weigh) -> None:
        branch = self._branch(order)
        branch.move(_prompt(branch, order.keep, order.tail), order.settled)
        with self._lock:
            self._running[order.id] = None
        if sum(map(len, order.continuations)) <= QUICK_CHARS:
            self._weigh_on(order, branch)
        else:
            self._tokenizing.submit(self._weigh_on, order, branch)

    def _weigh_on(self, order: frames.Weigh, branch: LocalBranch) -> None:
        score = partial(self._engine.score, heal=order.heal, unconditional=order.unconditional)
        pending = self._begin(order.id, lambda: score(branch, [], order.continuations))
        if pending is None:
            return

        def end() -> None:
            scores: tuple[Score, ...] | None = self._ended(order.id, pending)
            if scores is not None:
                self._outlet.post(frames.Weighed(order.id, scores, branch.num_open), flush=False)
            self._flush_outside_steps()

        pending.add_done_callback(end)

    def _run_script(self, order: frames.RunScript) -> None:
        script = frames.meant(order.script)
        assert isinstance(script, Script)

        def tell(report: frames.ScriptReport) -> None:
            if isinstance(report, frames.LaneEnded):
                branch = lanes.take(report.lane)
                assert isinstance(branch, LocalBranch)
                self._branches[order.branches[report.lane]] = branch
            if isinstance(report, frames.CallEnded):
                outputs, tops = frames.bare(report.outputs)
                report = replace(report, outputs=outputs, tops=tops)
            self._outlet.post(report, flush=False)
            self._flush_outside_steps()

        lanes = Lanes(self._engine, script, order.namespace, tell, id=order.id, apart=self._tokenizing.submit)
        with self._lock:
            self._running[order.id] = lanes
        calls = (op for lane in script.branches for op in lane if isinstance(op, Generate))
        if not lanes.starts_quickly:
            self._tokenizing.submit(lanes.start)
        elif any(call.params.compiles for call in calls):
            self._compiling.submit(lanes.start)
        else:
            lanes.start()

    def _flush(self, request_id: int) -> None:
        try:
            self._outlet.post(frames.Flushed(request_id, self._engine.flush()))
        except Exception as error:  # whatever it is, somebody waits for it
            self._outlet.post(frames.failed(request_id, error))

    def _look(self, order: frames.Look) -> None:
        try:
            self._outlet.post(frames.Seen(order.id, self._engine.outline(order.limit, order.namespace)))
        except Exception as error:  # whatever it is, somebody waits for it
            self._outlet.post(frames.failed(order.id, error))

    def _branch(self, order: frames.Start | frames.Weigh) -> LocalBranch:
        """Its branch; a new, empty one when that was never named before."""
        found = self._branches.get(order.branch)
        if found is None:
            program = -order.program  # the engine's own count from 1 up
            found = self._branches[order.branch] = self._engine.open(namespace=order.namespace, program=program)
        return found

    # -- reports, on any thread -------------------------------------------------------------------------------------

    def _begin(self, request_id: int, work: Callable[[], Work]) -> Work | None:
        """Do it and remember what runs; None where it failed, which is reported, or was cancelled meanwhile."""
        try:
            begun = work()
        except Exception as error:  # whatever it is, somebody waits for it
            self._refuse(request_id, error)
            return None
        with self._lock:
            is_wanted = request_id in self._running
            if is_wanted:
                self._running[request_id] = begun
        if not is_wanted:
            begun.cancel()
        return begun

    def _refuse(self, request_id: int, error: Exception) -> None:
        with self._lock:
            self._running.pop(request_id, None)
            self._early.pop(request_id, None)
        self._outlet.post(frames.failed(request_id, error))

    def _ended(self, request_id: int, pending: Pending[Value]) -> Value | None:
        """The value of what has ended, or None where it failed, which is reported."""
        with self._lock:
            self._running.pop(request_id, None)
        error = pending.error()
        if error is not None:
            self._outlet.post(frames.failed(request_id, error), flush=False)
            return None
        return pending.result()

    def _flush_outside_steps(self) -> None:
        """What ends on the engine's thread goes out with its step; elsewhere nobody else would send it."""
        if threading.current_thread().name != "niwaki-engine":
            self._outlet.flush()


def _changed(before: TokenIds, after: TokenIds) -> tuple[int, bytes]:
    """How many tokens both begin with, and the others of `after`."""
    size = min(len(before), len(after))
    differ = np.flatnonzero(before[:size] != after[:size])
    same = int(differ[0]) if len(differ) else size
    return same, frames.packed(after[same:])


def _prompt(branch: LocalBranch | None, keep: int, tail: bytes) -> TokenIds:
    """Raises ProgramError: the branch has not so many tokens, as it was closed meanwhile."""
    ids: TokenIds = np.frombuffer(tail, dtype=np.int32)
    if branch is not None and len(branch.ids) < keep:
        raise ProgramError("the branch is closed")
    return ids if branch is None or not keep else np.concatenate([branch.ids[:keep], ids])
