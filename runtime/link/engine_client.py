"""The engine of another process as a `Backend`: tokenizes here, sends token ids, hands out what comes back.

Knows the link, not the process behind it: `engine_process` starts that and gives a new link when it had to be started
again. Branches outlive such a restart, as their token ids stand here: the new engine computes them once more.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from niwaki.radix.outline import OutlineNode
from niwaki.runtime.api import (
    BackendInfo,
    Branch,
    Delta,
    EngineStopped,
    Generation,
    Output,
    Pending,
    RequestError,
    SamplingOptions,
    SamplingParams,
    Score,
    Segment,
)
from niwaki.runtime.api.pending import Streams
from niwaki.runtime.api.script import Script
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.host.branch_tokens import BranchTokens, open_branch, own_branch
from niwaki.runtime.host.templates import Templates
from niwaki.runtime.link import frames, wake
from niwaki.runtime.link.frames import Message, Order, Rare, ScriptReport
from niwaki.runtime.link.lanes import Lanes, RunningScript
from niwaki.runtime.link.link import READER
from niwaki.runtime.link.silence import Silence
from niwaki.runtime.link.step_streams import StepStreams
from niwaki.runtime.options.limits import Limits, TokenIds

# Without a beat for so long the engine hangs or is stopped: beats come twice a second, from a thread of their own.
ALIVE_SECONDS = 4.0
FLUSH_SECONDS = 60.0


class EngineLink(Protocol):
    """The way to an engine; what it answers goes to `EngineClient.receive`."""

    def post(self, order: Order, *, flush: bool = True) -> None:
        """Send it; lost when the link is down. Without `flush` it may go with the next one that has it. Never waits.
        Called on any thread."""
        ...


class ClientBranch(BranchTokens):
    """A place in the engine. `num_there` of its tokens stand in the engine of link number `epoch` already. `program` is
    the same for all that were forked from one another: an engine that has none of their tokens could not tell."""

    __slots__ = ("epoch", "num_there", "number", "program", "running")

    def __init__(
        self,
        number: int,
        ids: TokenIds,
        namespace: str,
        num_settled: int = 0,
        num_there: int = 0,
        epoch: int = 0,
        *,
        program: int,
    ) -> None:
        super().__init__(ids, namespace, num_settled)
        self.number = number
        self.num_there = num_there
        self.epoch = epoch
        self.program = program
        self.running: set[int] = set()


@dataclass(slots=True, eq=False)
class _Asked:
    """What the engine works on for somebody here."""

    pending: Generation | Pending[tuple[Score, ...]] | Pending[bool] | Pending[tuple[OutlineNode, ...]] | _ScriptThere
    branch: ClientBranch | None = None
    accepted: Pending[None] | None = None
    is_late: bool = False  # a generation of which no delta comes before somebody asks
    undo: Callable[[], None] | None = None  # before a failure is told
    ids: TokenIds | None = None  # where the branch stood; elsewhere by now, somebody gave this up and went on


class EngineClient(Templates):
    """The `Backend` protocol, and what the server asks beside it, on a link that comes and goes. Thread-safe, except
    that one branch has one user at a time. Results are handed over where the link is read."""

    def __init__(self, tokenizer: Tokenizer, first_number: int = 1) -> None:
        """Its orders and branches are numbered from `first_number` on."""
        super().__init__(tokenizer)
        self._lock = threading.Lock()  # all below
        self._link: EngineLink | None = None
        self._keeps_branches = True
        self._epoch = 0
        self._info: BackendInfo | None = None
        self._limits = Limits(0, 0, 0)
        self._asked: dict[int, _Asked] = {}
        self._generations: dict[int, Generation] = {}  # of those that are asked for
        self._step = StepStreams()  # of those
        self._numbers = itertools.count(first_number)
        self._usage: Mapping[str, float] = {}
        self._silence = Silence()

    # -- the side of the process ------------------------------------------------------------------------------------

    def connect(self, link: EngineLink, loaded: frames.Loaded, *, keeps_branches: bool = True) -> None:
        """From now on the engine behind this link answers. Without `keeps_branches` it may be another one for each
        order, which then brings all tokens of its branch."""
        with self._lock:
            self._link = link
            self._keeps_branches = keeps_branches
            self._epoch += 1
            defaults = frames.meant(loaded.defaults)
            assert isinstance(defaults, SamplingOptions)
            self._info = BackendInfo(loaded.model, loaded.context_length, defaults, weights=loaded.weights)
            self._limits = Limits(loaded.context_length, loaded.pool_tokens, loaded.vocab_size)
            self._silence.end()

    def disconnect(self, reason: EngineStopped) -> None:
        """The engine is gone: everybody who waits is told so."""
        with self._lock:
            self._link = None
            lost, self._asked, self._generations = tuple(self._asked.values()), {}, {}
            self._step.forget()
        for one in lost:
            _fail(one, reason)

    def receive(self, reports: Sequence[Message]) -> None:
        """What the engine says, in order. Called where the link is read."""
        if len(reports) == 1 and isinstance(reports[0], frames.Pieces) and wake.loop_here() is not None:
            # Most steps: nobody has to be woken there, and the code below took 5 to 20 us more out of cold caches.
            self._step.hand_out(reports[0], self._generations)
            return
        rest: list[Rare] = []
        with wake.together:
            for report in reports:
                if isinstance(report, frames.Pieces):
                    self._step.hand_out(report, self._generations)
                elif isinstance(report, frames.Piece):
                    wake.tell_all(Streams((self._generations.get(report.id),)).push((report.delta,)))
                else:
                    rest.append(report)
            for report in rest:  # behind them: who reads a stream is told before whole answers are written
                self._take_in(report)

    def _take_in(self, report: Rare) -> None:
        match report:
            case frames.Beat(usage):
                self._usage = usage
                self._silence.end()
            case frames.Accepted(id):
                asked = self._asked.get(id)
                if asked is not None and asked.accepted is not None:
                    asked.accepted.succeed(None)
            case frames.Failed(id):
                asked = self._take(id)
                if asked is not None:
                    _fail(asked, frames.error_of(report))
            case frames.Ended() | frames.Weighed() | frames.Flushed() | frames.Seen():
                self._end(report)
            case frames.CallEnded(id) | frames.CallFailed(id) | frames.LaneEnded(id) | frames.ScriptBegun(id):
                asked = self._asked.get(id)
                if asked is not None and isinstance(asked.pending, _ScriptThere):
                    asked.pending.hear(report)
            case frames.ScriptOver(id):
                asked = self._take(id)
                if asked is not None and isinstance(asked.pending, _ScriptThere):
                    asked.pending.hear(report)
            case frames.Loaded():
                raise AssertionError("read by engine_process")

    def _end(self, report: frames.Ended | frames.Weighed | frames.Flushed | frames.Seen) -> None:
        asked = self._take(report.id)
        if asked is None:
            return
        value: object
        match report:
            case frames.Ended(_, outputs, same, behind, tops):
                outputs = self.whole(outputs, tops)
                if asked.branch is not None and asked.ids is not None and asked.branch.ids is asked.ids:
                    ids = np.concatenate([asked.ids[:same], np.frombuffer(behind, dtype=np.int32)])
                    asked.branch.move(ids, len(ids))
                    asked.branch.num_there = len(ids)
                if asked.is_late and isinstance(asked.pending, Generation) and not asked.pending.deltas_from(0):
                    asked.pending.push(_whole(outputs[0]))
                value = outputs
            case frames.Weighed(_, scores, num_open):
                if asked.branch is not None and asked.branch.ids is asked.ids:
                    asked.branch.num_open = num_open
                value = scores
            case frames.Flushed(_, is_done):
                value = is_done
            case frames.Seen(_, nodes):
                value = nodes
        assert not isinstance(asked.pending, _ScriptThere)
        asked.pending.succeed(value)  # type: ignore[arg-type]  # what was asked for is what was answered

    def whole(self, outputs: tuple[Output, ...], tops: Sequence[frames.Tops]) -> tuple[Output, ...]:
        """As they were before `frames.bare`."""
        return frames.whole(outputs, tops, self._tokenizer.token_text)

    def _take(self, request_id: int) -> _Asked | None:
        with self._lock:
            asked = self._asked.pop(request_id, None)
            if self._generations.pop(request_id, None) is not None:
                self._step.forget()
        if asked is not None and asked.branch is not None:
            asked.branch.running.discard(request_id)
        return asked

    # -- what the server asks ---------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the engine was heard within ALIVE_SECONDS."""
        return self._link is not None and self.silent_seconds < ALIVE_SECONDS

    @property
    def silent_seconds(self) -> float:
        """Since the engine was last heard, as far as it could be heard."""
        return self._silence.seconds()

    def start(
        self,
        ids: TokenIds,
        params: SamplingParams,
        namespace: str = "",
        branch: ClientBranch | None = None,
        *,
        logits_from: int | None = None,
        streams: bool | None = True,
        program: int = 0,
    ) -> Generation:
        """Generate from token ids. A constraint is waited for until it is compiled, except where nobody may wait.
        Without `streams` there will be no deltas: each costs both processes something, read or not; None: they come as
        soon as somebody asks for them, or as one at the end. `program`: above 0, the same for all requests without a
        branch that share their places; 0: it stands for itself.

        Raises:
            CapacityError, RequestError, ConstraintError: where it can be told at once. EngineStopped: no engine.
        """
        self._limits.check(ids, params)
        number = next(self._numbers)
        late = streams is None
        streams = bool(streams)
        generation = Generation(
            lambda: self.post(frames.Cancel(number)),
            (lambda reads: self.post(frames.Listen(number, reads))) if late else None,
        )
        accepted: Pending[None] | None = Pending() if params.compiles and not _must_not_wait() else None
        keep, branch_number = self._kept(branch)
        self._ask(
            number,
            _Asked(generation, branch, accepted, is_late=late),
            frames.Start(
                number, branch_number, keep, frames.packed(ids[keep:]), frames.plain(params), namespace, logits_from,
                0 if branch is None else branch.num_settled, streams, program if branch is None else branch.program,
            ),
        )  # fmt: skip
        if accepted is not None:
            accepted.result()  # the engine bounds compiling, and its end is everybody's failure
        return generation

    def flush(self) -> bool:
        done: Pending[bool] = Pending()
        number = next(self._numbers)
        self._ask(number, _Asked(done), frames.Flush(number))
        return done.result(timeout=FLUSH_SECONDS)

    def outline(self, limit: int, namespace: str = "") -> tuple[OutlineNode, ...]:
        """The shape of a namespace's tree, at most `limit` nodes of it."""
        done: Pending[tuple[OutlineNode, ...]] = Pending()
        number = next(self._numbers)
        self._ask(number, _Asked(done), frames.Look(number, limit, namespace))
        return done.result(timeout=FLUSH_SECONDS)

    def usage(self) -> Mapping[str, float]:
        """As of the last beat: up to half a second old."""
        return self._usage

    # -- branches ---------------------------------------------------------------------------------------------------

    def info(self) -> BackendInfo:
        assert self._info is not None, "nobody has the client before the first engine is there"
        return self._info

    def new_program(self) -> int:
        return next(self._numbers)

    def open(self, *, namespace: str = "", program: int | None = None) -> ClientBranch:
        number = next(self._numbers)
        own = number if program is None else program
        return ClientBranch(number, np.empty(0, dtype=np.int32), namespace, program=own)

    def fork(self, branch: Branch) -> ClientBranch:
        own = open_branch(branch, ClientBranch)
        keep, number = self._kept(own)
        twin = ClientBranch(
            next(self._numbers), own.ids, own.namespace, own.num_settled, keep, own.epoch, program=own.program
        )
        twin.num_open = own.num_open
        if keep:
            # Nobody waits for it: by itself it would wake the engine's process, and take this one 40 us.
            self.post(frames.Fork(number, twin.number), flush=False)
        return twin

    def close(self, branch: Branch) -> None:
        own = own_branch(branch, ClientBranch)
        if own.is_closed:
            return
        own.is_closed = True
        for number in tuple(own.running):
            self.post(frames.Cancel(number))
        self.post(frames.Close(own.number))

    def demote(self, branch: Branch) -> None:
        """As `LocalBackend.demote`. One that stands in no engine stays as it is."""
        own = open_branch(branch, ClientBranch)
        if self._kept(own)[0]:
            self.post(frames.Demote(own.number))

    def append(self, branch: Branch, delta: Sequence[Segment]) -> None:
        own = open_branch(branch, ClientBranch)
        own.move(*own.extended(delta, self._tokenizer))

    def generate(
        self, branch: Branch, delta: Sequence[Segment], params: SamplingParams, *, streams: bool | None = True
    ) -> Generation:
        """`streams`: as for `start`."""
        own = open_branch(branch, ClientBranch)
        with own.moved_behind(delta, self._tokenizer):
            return self.start(own.ids, params, own.namespace, own, streams=streams)

    def score(
        self,
        branch: Branch,
        delta: Sequence[Segment],
        continuations: Sequence[str],
        *,
        heal: bool = False,
        unconditional: bool = False,
    ) -> Pending[tuple[Score, ...]]:
        own = open_branch(branch, ClientBranch)
        if not continuations:
            raise RequestError("score needs at least one continuation")
        number = next(self._numbers)
        pending: Pending[tuple[Score, ...]] = Pending(lambda: self.post(frames.Cancel(number)))
        before = own.ids, own.num_settled, own.num_open

        def undo() -> None:
            if own.ids is scored:
                own.move(*before)

        with own.moved_behind(delta, self._tokenizer):
            scored = own.ids
            keep, branch_number = self._kept(own)
            tail = frames.packed(own.ids[keep:])
            order = frames.Weigh(
                number, branch_number, keep, tail, own.namespace, own.num_settled, tuple(continuations), heal,
                unconditional, own.program,
            )  # fmt: skip
            self._ask(number, _Asked(pending, own, undo=undo), order)
        return pending

    def run_script(self, script: Script, namespace: str, tell: Callable[[ScriptReport], None]) -> RunningScript:
        """Start a script; `tell` hears of it as from `Lanes`. Raises EngineStopped: no engine."""
        if not self._keeps_branches:  # each call of it may go to another engine
            lanes = Lanes(self, script, namespace, tell, generate=partial(self.generate, streams=False))
            lanes.start()
            return lanes
        number, epoch = next(self._numbers), self._epoch
        branches = () if script.is_over else tuple(next(self._numbers) for _ in script.branches)
        there = _ScriptThere(self, number, namespace, branches, epoch, tell)
        self._ask(number, _Asked(there), frames.RunScript(number, frames.plain(script), namespace, branches))
        return there

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _kept(self, branch: ClientBranch | None) -> tuple[int, int]:
        """How many of the branch's tokens the engine has, and its number. A new engine has none."""
        if branch is None:
            return 0, 0
        if branch.epoch != self._epoch or not self._keeps_branches:
            branch.epoch, branch.num_there = self._epoch, 0
        return branch.num_there, branch.number

    def _ask(self, number: int, asked: _Asked, order: Order) -> None:
        with self._lock:
            link = self._link
            # What the engine has of a branch was looked up before: another engine has nothing of it.
            if link is None or (asked.branch is not None and asked.branch.epoch != self._epoch):
                raise EngineStopped("the engine is not running")
            self._asked[number] = asked
            if asked.branch is not None:
                asked.ids = asked.branch.ids
            if isinstance(asked.pending, Generation):
                self._generations[number] = asked.pending
        if asked.branch is not None:
            asked.branch.running.add(number)
        try:
            link.post(order)
        except (TypeError, ValueError, OverflowError) as error:  # a lone surrogate in a stop or in a constraint
            self._take(number)
            raise RequestError(f"the request cannot be sent to the engine: {error}") from error
        if asked.branch is not None and asked.branch.is_closed:  # meanwhile, by somebody who knew nothing of this
            self.post(frames.Cancel(number))
            self.post(frames.Close(asked.branch.number))

    def post(self, order: Order, *, flush: bool = True) -> None:
        """To whom it may concern: without an engine there is nothing to cancel and nothing to close."""
        link = self._link
        if link is not None:
            link.post(order, flush=flush)


class _ScriptThere:
    """A script that the engine carries out beside its steps, as it looks from here."""

    def __init__(
        self,
        client: EngineClient,
        number: int,
        namespace: str,
        branches: Sequence[int],
        epoch: int,
        tell: Callable[[ScriptReport], None],
    ) -> None:
        self._client = client
        self._number = number
        self._namespace = namespace
        self._numbers = branches
        self._epoch = epoch
        self._tell = tell
        self._lock = threading.Lock()  # the fields below
        self._left_open: dict[int, ClientBranch] = {}  # by lane, until somebody takes it
        self._is_cancelled = False

    def hear(self, report: ScriptReport) -> None:
        if isinstance(report, frames.LaneEnded):
            ids = np.frombuffer(report.ids, dtype=np.int32)
            branch = ClientBranch(
                self._numbers[report.lane], ids, self._namespace, report.settled, len(ids), self._epoch,
                program=self._number,
            )  # fmt: skip
            branch.num_open = report.num_open
            with self._lock:
                self._left_open[report.lane] = branch
                is_late = self._is_cancelled
            if is_late:
                self.cancel()
        if isinstance(report, frames.CallEnded):
            outputs = self._client.whole(report.outputs, report.tops)
            report = replace(report, outputs=outputs, tops=())
        self._tell(report)

    def fail(self, error: Exception) -> None:
        self._tell(frames.failed(self._number, error))

    def take(self, lane: int) -> ClientBranch:
        with self._lock:
            return self._left_open.pop(lane)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            left, self._left_open = self._left_open, {}
        self._client.post(frames.Cancel(self._number))
        for branch in left.values():
            self._client.close(branch)


def _whole(output: Output) -> Delta:
    return Delta(output.text, output.token_ids, output.logprobs, output.top_logprobs)


def _fail(asked: _Asked, error: Exception) -> None:
    if asked.undo is not None:
        asked.undo()
    if asked.accepted is not None:
        asked.accepted.fail(error)
    asked.pending.fail(error)


def _must_not_wait() -> bool:
    """On an event loop it would stop every other task; there or on a thread of the link's, what is waited for."""
    return threading.current_thread().name == READER or wake.loop_here() is not None
