"""Texts under constraints that sit a step out: what was computed for them is not drawn yet, or not taken.

Nothing of theirs is pending meanwhile, so that the scheduler gives them no row. What a drawn token means to its
matcher, and what it forces, is found out on a thread beside the forward passes. Owned by `delivery.Delivery`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Final

import torch

from niwaki.radix.handles import Lease
from niwaki.runtime.api import NiwakiError
from niwaki.runtime.api.faults import told
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.constraints.masks import Masks
from niwaki.runtime.loop.forced import forced_tokens
from niwaki.runtime.loop.pause import Pause
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.sampler import Sampled, rows_of

# Steps that a drawn token sits out before it is waited for: the thread finds time in most forward passes, and where it
# was waited for in the next step that took 0.24 ms of each, and up to 13 where the thread had no processor. Behind
# eight each step waits for it a little, behind 64 to the end: to the end behind eight one in 1,780 took 6.5 ms longer.
MANY_SAT_OUT: Final = 8
WAITS_SECONDS: Final = 0.0005
MAX_SAT_OUT: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Undrawn:
    """Rows of one step, and the logits of each. `masks`: of the step, in the order of `masked`."""

    requests: Sequence[Request]
    leases: Sequence[Lease | None]
    logits: torch.Tensor  # [rows, vocab]
    masked: Sequence[Request]
    masks: Masks

    def still_here(self) -> Undrawn | None:
        """Without those that were set back or have ended meanwhile: another lease, or none. None where that is all."""
        here = [place for place, request in enumerate(self.requests) if request.lease is self.leases[place]]
        if len(here) == len(self.requests):
            return self
        requests, leases = [self.requests[place] for place in here], [self.leases[place] for place in here]
        return replace(self, requests=requests, leases=leases, logits=rows_of(self.logits, here)) if here else None


class Drawn:
    """A token that was drawn and not taken. While its matcher is told of it nobody else touches that."""

    __slots__ = ("_telling", "error", "forced", "is_told", "lease", "num_sat_out", "request", "sampled")

    def __init__(self, request: Request, sampled: Sampled) -> None:
        self.request, self.lease, self.sampled = request, request.lease, sampled
        self.num_sat_out = 0  # steps
        self.is_told = False  # the matcher has accepted it, and what it forces
        self.forced: Sequence[int] = ()
        self.error: NiwakiError | None = None
        self._telling = threading.Lock()

    def begin(self) -> None:
        """`tell` will be called."""
        self.is_told = True
        self._telling.acquire()

    def tell(self, boundaries: Boundaries | None) -> None:
        request, token_id, matcher = self.request, self.sampled.token_id, self.request.matcher
        try:
            if matcher is not None and request.lease is self.lease:
                matcher.accept(token_id)
                if boundaries is not None:
                    tail = [*request.text_tail(), token_id]
                    self.forced = forced_tokens(matcher, tail, request.remaining_new - 1, boundaries)
        except Exception as error:
            self.error = told(error)
        finally:
            self._telling.release()

    def is_ready(self, *, waits: bool = False, seconds: float = -1) -> bool:
        """Whether it can be taken. `seconds`: for which it waits at most; below 0 to the end."""
        if not self._telling.acquire(waits, seconds if waits else -1):
            return False
        self._telling.release()
        return True


class Late:
    """The oldest go first."""

    def __init__(self, boundaries: Boundaries | None, pause: Pause) -> None:
        self._undrawn: list[Undrawn] = []
        self._drawn: deque[Drawn] = deque()
        self._boundaries, self._pause = boundaries, pause
        self._telling: SimpleQueue[Drawn | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # made when first needed: most engines see no grammar

    def add(self, requests: Sequence[Request], logits: torch.Tensor, masked: Sequence[Request], masks: Masks) -> None:
        """Rows of this step, the logits of which nobody else writes to."""
        self._undrawn.append(Undrawn(requests, [request.lease for request in requests], logits, masked, masks))

    def ready(self) -> Iterator[Undrawn]:
        """Those whose masks are there; they are to be drawn."""
        for rows in [rows for rows in self._undrawn if rows.masks.are_there(0.0)]:
            self._undrawn.remove(rows)
            if (here := rows.still_here()) is not None:
                yield here

    def wait(self) -> bool:
        """Until there is more to be drawn or taken. False where there is nothing."""
        self.wait_for_oldest()
        if not self._drawn and self._undrawn:
            with self._pause:
                self._undrawn[0].masks.are_there(None)
        return bool(self._drawn or self._undrawn)

    def add_drawn(self, request: Request, sampled: Sampled, *, is_told_beside: bool) -> None:
        """`is_told_beside`: its matcher is told of it by the thread, in the pauses of the engine's own; else by whoever
        takes it."""
        drawn = Drawn(request, sampled)
        self._drawn.append(drawn)
        if is_told_beside:
            if self._thread is None:
                arguments = (self._telling, self._boundaries, self._pause)
                self._thread = threading.Thread(target=_tell, args=arguments, name="niwaki-told", daemon=True)
                self._thread.start()
                weakref.finalize(self, self._telling.put, None)
            drawn.begin()
            self._pause.hold_back(partial(self._telling.put, drawn))

    def next_drawn(self) -> Drawn | None:
        """The oldest that can be taken."""
        for drawn in list(self._drawn):
            if drawn.is_ready():
                self._drawn.remove(drawn)
                if drawn.request.lease is drawn.lease:
                    return drawn
        return None

    @property
    def has_drawn(self) -> bool:
        return bool(self._drawn)

    def wait_for_oldest(self, num_sat_out: int = 0, seconds: float = -1) -> None:
        """Of those that were drawn, if there are any, and it has sat out so many steps. `seconds`: as of
        `Drawn.is_ready`."""
        if self._drawn and self._drawn[0].num_sat_out >= num_sat_out and not self._drawn[0].is_ready():
            with self._pause:
                self._drawn[0].is_ready(waits=True, seconds=seconds)

    def begin_step(self) -> None:
        """One that computes others: who has sat out many is waited for a little, who has sat out more to the end."""
        self.wait_for_oldest(MANY_SAT_OUT, WAITS_SECONDS)
        self.wait_for_oldest(MAX_SAT_OUT)
        for drawn in self._drawn:
            drawn.num_sat_out += 1

    def close(self) -> None:
        if self._thread is not None:
            self._telling.put(None)
            self._thread.join()


def _tell(jobs: SimpleQueue[Drawn | None], boundaries: Boundaries | None, pause: Pause) -> None:
    while (drawn := jobs.get()) is not None:
        pause.wait()
        drawn.tell(boundaries)
        del drawn  # it holds a request
