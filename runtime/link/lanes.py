"""A script on an engine: its branches move on wherever results arrive, so what follows a call rides in the next step.

Runs beside the engine where that is one process, else where the engine's results come in. Tells reports of `frames`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeAlias

from niwaki.runtime.api import (
    Backend,
    Branch,
    Cancelled,
    CapacityError,
    EngineStopped,
    Generation,
    Pending,
    SamplingParams,
    Score,
    Segment,
)
from niwaki.runtime.api.choices import METHODS, decided
from niwaki.runtime.api.script import Choose, Generate, Lane, Part, Say, Script, Split
from niwaki.runtime.host.branch_tokens import BranchTokens, append_within
from niwaki.runtime.link import frames
from niwaki.runtime.link.frames import ScriptReport

# Text and choices of more characters than this are not tokenized on the thread that brought a result, which may be the
# engine's: a character takes 0.6 us.
QUICK_CHARS = 4096
# What a script may say again of its calls' texts: a few bytes ask for all of one, and to tokenize a text of 4 MiB
# takes 450 MiB. Before one call of a lane, and in all.
MOST_QUOTED = 4 * 2**20  # characters
MOST_QUOTED_IN_ALL = 4 * MOST_QUOTED

Result: TypeAlias = Generation | Pending[tuple[Score, ...]]


class RunningScript(Protocol):
    """A script that was started."""

    def take(self, lane: int) -> Branch:
        """The branch of a lane that is at its end, which is the caller's from now on."""
        ...

    def cancel(self) -> None:
        """Stop what still runs, and close what nobody took. Calling it twice is allowed."""
        ...


class _Moving:
    """One branch, and what is left to do on it."""

    def __init__(self, number: int, ops: Lane) -> None:
        self.number = number
        self.ops = deque(ops)
        self.branch: Branch | None = None
        self.is_taken = False
        self.has_failed = False
        self.delta: list[Segment] = []
        self.num_quoted = 0  # characters of it

    def taken_delta(self) -> list[Segment]:
        """The text that the branch does not hold yet."""
        delta, self.delta, self.num_quoted = self.delta, [], 0
        return delta


class Lanes:
    """Carries out a script. `tell` hears what comes of it, on any thread: the end of a lane before that of its last
    call, and ScriptOver last."""

    def __init__(
        self,
        backend: Backend,
        script: Script,
        namespace: str,
        tell: Callable[[ScriptReport], None],
        *,
        id: int = 0,
        apart: Callable[[Callable[[], None]], object] | None = None,
        generate: Callable[[Branch, Sequence[Segment], SamplingParams], Generation] | None = None,
    ) -> None:
        """Reports carry `id`. `apart` runs what takes long on another thread; without it nothing does. `generate`
        stands for the backend's own."""
        self._backend = backend
        self._generate = generate or backend.generate
        self._namespace = namespace
        self._tell = tell
        self._id = id
        self._apart = apart
        self._is_over = script.is_over
        self._lanes = [_Moving(number, ops) for number, ops in enumerate(script.branches)]
        self._lock = threading.Lock()  # the fields below
        self._texts: dict[int, str] = {}
        self._num_quoted = 0  # characters of them that were said again
        self._waiting: dict[int, list[_Moving]] = {}  # for the text of a call
        self._num_busy = 1  # calls that run, and threads that move lanes; the start is one
        self._is_cancelled = False

    @property
    def starts_quickly(self) -> bool:
        """Whether its first calls have little text before them."""
        return self._num_next_chars(self._lanes[0]) <= QUICK_CHARS

    def start(self) -> None:
        try:
            self._stand(self._lanes[0], self._backend.open(namespace=self._namespace))
            self._move(self._lanes[0])
            self._tell(frames.ScriptBegun(self._id))  # behind the lanes that are at their end already
        except Exception as error:  # whatever it is, somebody waits
            self._tell(frames.failed(self._id, error))
        self._leave()

    def take(self, lane: int) -> Branch:
        self._lanes[lane].is_taken = True
        branch = self._lanes[lane].branch
        assert branch is not None, "it is at its end"
        return branch

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
        for lane in self._lanes:
            self._close(lane)

    # -- moving -----------------------------------------------------------------------------------------------------

    def _move(self, *lanes: _Moving) -> None:
        """Move the lanes, and those that they start, as far as they come."""
        ready = deque(lanes)
        while ready:
            lane = ready.popleft()
            try:
                self._advance(lane, ready)
            except Exception as error:  # whatever it is, somebody waits for what the lane will not do
                lane.has_failed = True
                for call in [op.call for op in lane.ops if isinstance(op, Generate | Choose)][:1]:
                    self._tell(frames.call_failed(self._id, call, error))

    def _advance(self, lane: _Moving, started: deque[_Moving]) -> None:
        """Up to the lane's next call, or a text that is not there yet. The lanes that start from it are `started`, also
        where it fails behind that."""
        branch = lane.branch
        assert branch is not None, "a lane moves once it is started"
        while lane.ops:
            op = lane.ops[0]
            match op:
                case Say(parts, control):
                    text = self._text(parts, lane)
                    if text is None:
                        return
                    if text:
                        lane.delta.append(Segment(text, control))
                case Split(number):
                    self._append(lane, branch)
                    self._stand(self._lanes[number], self._backend.fork(branch))
                    started.append(self._lanes[number])
                case Generate() | Choose():
                    pending = self._call(lane, branch, op)
                    lane.ops.popleft()
                    pending.add_done_callback(partial(self._on_done, lane, op, pending))
                    return
            lane.ops.popleft()
        self._append(lane, branch)
        if not self._is_over:
            self._tell(_lane_ended(self._id, lane.number, branch))

    def _call(self, lane: _Moving, branch: Branch, op: Generate | Choose) -> Result:
        with self._lock:
            self._num_busy += 1
        try:
            if isinstance(op, Generate):
                return self._generate(branch, lane.taken_delta(), op.params)
            alone = METHODS[op.method].needs_unconditional
            return self._backend.score(branch, lane.taken_delta(), op.choices, heal=op.heal, unconditional=alone)
        except BaseException:
            self._leave()
            raise

    def _on_done(self, lane: _Moving, op: Generate | Choose, pending: Result) -> None:
        try:
            report = _answer(self._id, op, pending)
        except Exception as error:  # nothing may escape into the backend's thread
            self._tell(frames.call_failed(self._id, op.call, error))
            self._leave()
            return
        with self._lock:
            self._texts[op.call] = report.text
            lanes = [lane, *self._waiting.pop(op.call, [])]

        def go_on() -> None:
            # First what follows, so that it rides in the next step; who asked is told meanwhile.
            self._move(*lanes)
            self._tell(report)
            self._leave()

        if self._apart is None or self._num_next_chars(*lanes) <= QUICK_CHARS:
            go_on()
        else:
            self._apart(go_on)

    def _num_next_chars(self, *lanes: _Moving) -> int:
        """Up to the next call of each lane and of those that they start, the choices of these calls included."""
        found, left = 0, list(lanes)
        while left:
            for op in left.pop().ops:
                if isinstance(op, Say):
                    found += sum(
                        len(self._texts.get(part, "")) if isinstance(part, int) else len(part) for part in op.parts
                    )
                elif isinstance(op, Split):
                    left.append(self._lanes[op.branch])
                else:
                    found += sum(map(len, op.choices)) if isinstance(op, Choose) else 0
                    break
        return found

    def _text(self, parts: Sequence[Part], lane: _Moving) -> str | None:
        """None: a call's text is missing, and the lane is moved on when it is there. Raises CapacityError."""
        with self._lock:
            for part in parts:
                if isinstance(part, int) and part not in self._texts:
                    self._waiting.setdefault(part, []).append(lane)
                    return None
            more = sum(len(self._texts[part]) for part in parts if isinstance(part, int))
            if lane.num_quoted + more > MOST_QUOTED or self._num_quoted + more > MOST_QUOTED_IN_ALL:
                raise CapacityError(f"the texts of calls are said again in more than {MOST_QUOTED} characters")
            lane.num_quoted += more
            self._num_quoted += more
            return "".join(self._texts[part] if isinstance(part, int) else part for part in parts)

    def _append(self, lane: _Moving, branch: Branch) -> None:
        if lane.delta:
            append_within(self._backend, branch, lane.taken_delta())

    def _stand(self, lane: _Moving, branch: Branch) -> None:
        lane.branch = branch
        with self._lock:
            is_cancelled = self._is_cancelled
        if is_cancelled:  # meanwhile: nobody else would close it
            self._close(lane)
            raise Cancelled("the script was cancelled")

    def _close(self, lane: _Moving) -> None:
        if lane.branch is not None and not lane.is_taken:
            with suppress(EngineStopped):  # it holds nothing any more
                self._backend.close(lane.branch)

    def _leave(self) -> None:
        """A call has ended, or the start has. The last one tells that nothing more will come."""
        with self._lock:
            self._num_busy -= 1
            is_last = self._num_busy == 0
        if is_last:
            first = self._lanes[0]
            is_whole = self._is_over and not (first.ops or first.has_failed) and first.branch is not None
            self._tell(
                frames.ScriptOver(self._id, tuple(first.branch.token_ids) if is_whole and first.branch else None)
            )


def _answer(id: int, op: Generate | Choose, pending: Result) -> frames.CallEnded:
    """Raises what the call failed with."""
    if isinstance(op, Generate):
        assert isinstance(pending, Generation)
        outputs = pending.result(0)
        return frames.CallEnded(id, op.call, outputs[0].text, outputs, ())
    assert not isinstance(pending, Generation)
    scores = pending.result(0)
    count = len(op.choices)
    decision = decided(METHODS[op.method], scores[:count], scores[count:], op.params)
    return frames.CallEnded(id, op.call, op.choices[decision.index], (), scores)


def _lane_ended(id: int, lane: int, branch: Branch) -> frames.LaneEnded:
    assert isinstance(branch, BranchTokens), "an engine's"
    return frames.LaneEnded(id, lane, frames.packed(branch.ids), branch.num_settled, branch.num_open)
