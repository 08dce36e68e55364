"""Where conversations stand in the engine: branches behind their last turns, whose KV stays in the tree for a while.

Only a means to be quick: a place that is gone is made again out of the turns' text. Each method may run on any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from niwaki.runtime.api import (
    Backend,
    Branch,
    Cancelled,
    EngineStopped,
    Generation,
    Message,
    Output,
    ProgramError,
    SamplingParams,
    Segment,
)
from niwaki.runtime.host.branch_tokens import BranchTokens, append_within
from niwaki.runtime.options.limits import TokenIds

MAX_PLACES = 1024


class Engine(Backend, Protocol):
    """Where conversations stand."""

    def generate(
        self, branch: Branch, delta: Sequence[Segment], params: SamplingParams, *, streams: bool | None = True
    ) -> Generation:
        """As `Backend.generate`; `streams`: as `Service.must_stream` gives it."""
        ...

    def demote(self, branch: Branch) -> None:
        """Copy its KV to the tiers below the pool, where there are any: nobody will go on from here for a while."""
        ...


@dataclass(frozen=True, slots=True)
class Past:
    """What was said up to the end of a turn. Turns never change, so it stays right as long as somebody has the turn."""

    messages: tuple[Message, ...] = ()
    num_turns: int = 0

    def and_then(self, messages: Sequence[Message]) -> Past:
        """With one turn more."""
        return Past((*self.messages, *messages), self.num_turns + 1)


@dataclass(frozen=True, slots=True)
class Place:
    """An open branch, the prompt and answer that it stands behind, the cache that it is in, and who said what."""

    branch: Branch
    segments: tuple[Segment, ...]
    namespace: str
    past: Past
    used_at: float


class Conversations:
    """Who stands where, by the id of the last turn. A place that was not used for `idle_seconds` is given up; its KV
    goes to the tiers, from where it comes back when somebody does.

    The time is kept here, not by the tree's own pins with an end (`Cache.pin`): each use prolongs it, messages and
    token ids go with it, and KV is copied to the tiers before its pin ends, of which a pin that ends by itself tells
    nobody.
    """

    def __init__(self, backend: Engine, idle_seconds: float) -> None:
        self.backend = backend
        self.idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._places: OrderedDict[str, Place] = OrderedDict()  # the one used longest ago first
        self._sweeping: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, turn: str | None, segments: Sequence[Segment], namespace: str) -> Branch:
        """A new branch behind `segments`, from the place behind `turn` where they go on from it. Close it after use."""
        place = None if turn is None else self._used(turn)
        if place is not None and place.namespace == namespace:
            num_known = len(place.segments)
            if tuple(segments[:num_known]) == place.segments:
                try:
                    branch = self.backend.fork(place.branch)
                except (EngineStopped, ProgramError):  # closed meanwhile, or its engine is another by now
                    pass
                else:
                    return self._behind(branch, segments[num_known:])
        return self._behind(self.backend.open(namespace=namespace), segments)

    def _behind(self, branch: Branch, segments: Sequence[Segment]) -> Branch:
        try:
            append_within(self.backend, branch, segments)
        except BaseException:
            self._close(branch)  # nobody else knows of it
            raise
        return branch

    def past(self, turn: str) -> Past | None:
        """What was said up to a turn, where somebody stands behind it: then the store need not be asked."""
        with self._lock:
            place = self._places.get(turn)
        return None if place is None else place.past

    def leave(self, turn: str, branch: Branch, segments: Sequence[Segment], namespace: str, past: Past) -> None:
        """Keep a branch open behind a turn, for the one that goes on from there."""
        with self._lock:
            self._places[turn] = Place(branch, tuple(segments), namespace, past, time.monotonic())
            surplus = [self._places.popitem(last=False)[1] for _ in range(len(self._places) - MAX_PLACES)]
        for place in surplus:
            self._rest(place)

    def forget(self, turn: str) -> None:
        """Give up the place behind a turn, if there is one."""
        with self._lock:
            place = self._places.pop(turn, None)
        if place is not None:
            self._close(place.branch)

    def start_sweeping(self) -> None:
        """On the event loop: give up idle places from now on. Calling it twice is allowed."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for turn in tuple(self._places):
            self.forget(turn)

    def _used(self, turn: str) -> Place | None:
        with self._lock:
            place = self._places.get(turn)
            if place is not None:
                self._places.move_to_end(turn)
                self._places[turn] = place = replace(place, used_at=time.monotonic())
        return place

    def _rest(self, place: Place) -> None:
        with contextlib.suppress(EngineStopped, ProgramError):  # it holds nothing any more, or was closed meanwhile
            self.backend.demote(place.branch)
        self._close(place.branch)

    def _close(self, branch: Branch) -> None:
        try:
            self.backend.close(branch)
        except EngineStopped:
            return  # it holds nothing any more

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(max(self.idle_seconds / 4, 0.05))
            oldest = time.monotonic() - self.idle_seconds
            with self._lock:
                idle = [turn for turn, place in self._places.items() if place.used_at < oldest]
                places = [self._places.pop(turn) for turn in idle]
            for place in places:
                self._rest(place)


class Stand:
    """Where one turn is generated: behind its prompt, on a branch from the place behind the turn before."""

    def __init__(self, conversations: Conversations, before: str | None) -> None:
        self._conversations = conversations
        self._before = before
        self._segments: tuple[Segment, ...] = ()
        self._namespace = ""
        self._lock = threading.Lock()  # the two below: a client may go while its prompt is being tokenized
        self._branch: Branch | None = None
        self._is_closed = False

    def place(self, segments: Sequence[Segment], namespace: str) -> TokenIds:
        """Stand behind a prompt; its token ids. Raises Cancelled: it was closed meanwhile."""
        self._segments, self._namespace = tuple(segments), namespace
        branch = self._conversations.enter(self._before, segments, namespace)
        with self._lock:
            if not self._is_closed:
                self._branch = branch
        if self._branch is None:
            self._conversations.backend.close(branch)
            raise Cancelled("the client is gone")
        assert isinstance(branch, BranchTokens), "an engine's"
        return branch.ids

    def start(self, params: SamplingParams, *, streams: bool | None) -> Generation:
        """Generate from there; `streams`: as `Service.must_stream` gives it. Raises Cancelled: closed meanwhile."""
        branch = self._branch
        if branch is None:
            raise Cancelled("the client is gone")
        return self._conversations.backend.generate(branch, [], params, streams=streams)

    def leave(self, turn: str, output: Output, past: Past) -> None:
        """The turn was stored: the branch that generated its answer is where the next one goes on."""
        with self._lock:
            branch, self._branch = self._branch, None
        if branch is not None:
            answer = (Segment(output.text),) if output.text else ()
            self._conversations.leave(turn, branch, (*self._segments, *answer), self._namespace, past)

    def close(self) -> None:
        """Answered, failed or abandoned. Calling it twice is allowed."""
        with self._lock:
            self._is_closed = True
            branch, self._branch = self._branch, None
        if branch is not None:
            self._conversations.backend.close(branch)
