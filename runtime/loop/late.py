"""Texts under constraints that sit a step out: what was computed for them is not drawn yet, or not taken.

Nothing of theirs is pending meanwhile, so that the scheduler gives them no row. Owned by `delivery.Delivery`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from niwaki.radix.handles import Lease
from niwaki.runtime.constraints.masks import Masks
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.sampler import Sampled, rows_of


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


class Late:
    """The oldest go first."""

    def __init__(self) -> None:
        self._undrawn: list[Undrawn] = []
        self._drawn: deque[tuple[Request, Lease | None, Sampled]] = deque()

    def add(self, requests: Sequence[Request], logits: torch.Tensor, masked: Sequence[Request], masks: Masks) -> None:
        """Rows of this step, the logits of which nobody else writes to."""
        self._undrawn.append(Undrawn(requests, [request.lease for request in requests], logits, masked, masks))

    def ready(self) -> Iterator[Undrawn]:
        """Those whose masks are there; they are to be drawn."""
        for rows in [rows for rows in self._undrawn if rows.masks.are_there(0.0)]:
            self._undrawn.remove(rows)
            if (here := rows.still_here()) is not None:
                yield here

    def wait(self, until: float | None) -> bool:
        """Until more are `ready`. False where that takes longer, or there are none."""
        if not self._undrawn:
            return False
        return self._undrawn[0].masks.are_there(None if until is None else max(0.0, until - time.perf_counter()))

    def add_drawn(self, drawn: Sequence[tuple[Request, Sampled]]) -> None:
        self._drawn += [(request, request.lease, sampled) for request, sampled in drawn]

    def next_drawn(self) -> tuple[Request, Sampled] | None:
        while self._drawn:
            request, lease, sampled = self._drawn.popleft()
            if request.lease is lease:
                return request, sampled
        return None
