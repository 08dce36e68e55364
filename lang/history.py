"""What happened on one state, in order: noted while it runs, made into a tree when somebody asks (see lang/tree.py).

Owned by the state's executor. It holds texts, results and the histories of forks, never a branch or an executor, so
that a fork that nobody holds any more still gives its place in the runtime back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from niwaki.lang.meta import Outcome
from niwaki.lang.nodes import Gen, Select
from niwaki.lang.origin import Origin
from niwaki.runtime.api import Branch, SamplingParams, Segment
from niwaki.runtime.api.readiness import readiness


@dataclass(frozen=True, slots=True)
class Wrote:
    """Text that the program, a template or a join put there."""

    segment: Segment
    role: str | None


@dataclass(slots=True)
class Called:
    """A generation or a select. The branch held `position` tokens before the text that it sends, `end` with that text.

    `outcome` and `ended` come when it is done; a call that failed has neither.
    """

    node: Gen | Select
    params: SamplingParams | None
    origin: Origin
    role: str | None
    position: int | None
    started: float
    end: int | None = None
    ended: float | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """Text handed over without a call: the branch held `position` tokens before and `end` tokens after it."""

    position: int | None
    end: int | None


@dataclass(frozen=True, slots=True)
class ForkedInto:
    """Other states begin here: forks, or the one of a program that was called, which starts without this text."""

    histories: tuple[History, ...]
    origin: Origin
    at: float
    program: str | None = None


@dataclass(frozen=True, slots=True)
class JoinedFrom:
    """`names`: the variables that were gathered; none where the texts were appended."""

    names: tuple[str, ...]
    origin: Origin
    asked: float
    at: float


@dataclass(frozen=True, slots=True)
class Assigned:
    name: str
    value: object


@dataclass(frozen=True, slots=True)
class Failed:
    error: BaseException
    at: float


Event: TypeAlias = Wrote | Called | Sent | ForkedInto | JoinedFrom | Assigned | Failed


@dataclass(eq=False, slots=True)
class History:
    """Events of one state, oldest first. Written by whoever pumps the executor, one at a time; read by snapshot.

    Times are of `readiness.clock`, in seconds: a picture of a first run shows the run, and not the model being loaded.
    """

    program: str
    created: float = field(default_factory=readiness.clock)
    started: float | None = None  # a fork starts when its parent gets there
    joined: float | None = None
    last: float | None = None
    role: str | None = None
    events: list[Event] = field(default_factory=list)

    def start(self, role: str | None = None) -> None:
        self.started = self.last = readiness.clock()
        self.role = role

    def wrote(self, segments: Sequence[Segment]) -> None:
        self.events += [Wrote(segment, self.role) for segment in segments if segment.text]

    def calls(self, node: Gen | Select, params: SamplingParams | None, branch: Branch, origin: Origin) -> Called:
        """A call begins; `answered` ends it."""
        call = Called(node, params, origin, self.role, num_tokens(branch), readiness.clock())
        self.events.append(call)
        return call

    def answered(self, call: Called, outcome: Outcome) -> None:
        call.outcome = outcome
        call.ended = self.last = readiness.clock()

    def sent(self, position: int | None, branch: Branch) -> None:
        self.events.append(Sent(position, num_tokens(branch)))

    def forked(self, histories: Sequence[History], origin: Origin) -> None:
        self.last = readiness.clock()
        self.events.append(ForkedInto(tuple(histories), origin, self.last))

    def called(self, history: History, origin: Origin) -> None:
        """A program of its own, called by this one's body."""
        self.events.append(ForkedInto((history,), origin, readiness.clock(), history.program))

    def has_joined(self, forks: Sequence[History], names: Sequence[str], origin: Origin, asked: float) -> None:
        self.last = readiness.clock()
        self.events.append(JoinedFrom(tuple(names), origin, asked, self.last))
        for history in forks:
            history.joined = self.last

    def outside_of_turns(self, start: int) -> str | None:
        """What the first event from `start` on is that made text outside of chat turns; None: there is none."""
        for event in self.events[start:]:
            match event:
                case Wrote(segment=segment, role=None) if not segment.control and segment.text.strip():
                    return repr(segment.text[:40])
                case Called(node=node, role=None):
                    return f"{type(node).__name__.lower()} {node.name!r}"
        return None

    def assigned(self, name: str, value: object) -> None:
        self.events.append(Assigned(name, value))

    def failed(self, error: BaseException) -> None:
        self.last = readiness.clock()
        self.events.append(Failed(error, self.last))


def num_tokens(branch: Branch) -> int | None:
    """How many tokens the branch holds, where it can tell without work."""
    count = getattr(branch, "num_tokens", None)
    return count if isinstance(count, int) else None
