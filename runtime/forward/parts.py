"""A large step in parts: each thread takes its share of the batch's tokens through all layers.

A product that is divided among threads passes activations from core to core, and between two products one core works
while the others wait. Tokens need each other in attention only, so the threads meet once a layer: behind the store of
the keys, which the tokens of another part may read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch

from niwaki.kernels.jit import one_of_several
from niwaki.kernels.plan import AttentionPlan, Spans
from niwaki.runtime.models.decoder import Decoder

Todo = SimpleQueue[Callable[[], None] | None]  # None ends its thread
Outcome = torch.Tensor | BaseException


@dataclass(frozen=True, slots=True)
class Share:
    """A thread's tokens, as `Decoder.forward` takes them."""

    token_ids: torch.Tensor
    plan: AttentionPlan
    wanted: npt.NDArray[np.int64] | None


def divided(spans: Spans, parts: int, keys_per_token: float) -> list[tuple[slice, Spans]]:
    """Shares of about equal work, in order: which tokens of the batch, and their rows, of which the first and the last
    may be parts of a row. At most `parts`; fewer where a token is more work than a share.

    A token's work is that of reading `keys_per_token` keys, and those before it.
    """
    ends = np.cumsum(spans.counts)
    firsts = ends - spans.counts
    positions = np.arange(ends[-1]) + np.repeat(spans.starts - firsts, spans.counts)
    work = np.cumsum(positions + keys_per_token)
    inner = np.searchsorted(work, work[-1] * np.arange(1, parts) / parts) + 1
    found = []
    for first, end in pairwise(sorted({0, *inner.tolist(), len(work)})):
        rows = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(firsts, end, "left")))
        done = np.maximum(first - firsts[rows], 0)  # of a row that another share begins
        counts = np.minimum(ends[rows], end) - firsts[rows] - done
        found.append((slice(first, end), Spans(spans.starts[rows] + done, counts, spans.table[rows], spans.held[rows])))
    return found


class SideBySide:
    """Runs the shares of a step, the first on the caller's thread and each of the others on one of its own."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._meeting = threading.Barrier(1)
        self._parts = [model.new_part(self._meet)]
        self._todo: list[Todo] = []  # of each thread
        self._done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()

    def forward(self, shares: Sequence[Share]) -> torch.Tensor:
        """The logits of all shares, in order. What one of them fails with is raised."""
        while len(self._parts) < len(shares):
            self._parts.append(self._model.new_part(self._meet))
            self._todo.append(_thread_that_ends_with(self))
        self._meeting = threading.Barrier(len(shares))
        for index, share in enumerate(shares[1:]):
            self._todo[index].put(partial(self._run_for_another, index + 1, share))
        outcomes = {0: self._run(0, shares[0])} | dict(self._done.get() for _ in shares[1:])
        failures = [one for one in outcomes.values() if isinstance(one, BaseException)]
        if failures:  # those who waited for one that failed are told so, and say nothing new
            raise next((one for one in failures if not isinstance(one, threading.BrokenBarrierError)), failures[0])
        return torch.cat([one for _, one in sorted(outcomes.items()) if isinstance(one, torch.Tensor)])

    def _run_for_another(self, index: int, share: Share) -> None:
        self._done.put((index, self._run(index, share)))

    def _run(self, index: int, share: Share) -> Outcome:
        try:
            with one_of_several():
                return self._model.forward(share.token_ids, share.plan, share.wanted, self._parts[index])
        except BaseException as error:
            self._meeting.abort()
            return error

    def _meet(self) -> None:
        self._meeting.wait()


def _thread_that_ends_with(owner: object) -> Todo:
    """Not one of an executor, which at the end of the program refuses work that a step may still have for it."""
    todo: Todo = SimpleQueue()
    threading.Thread(target=_work, args=(todo,), name="niwaki-part", daemon=True).start()
    weakref.finalize(owner, todo.put, None)
    return todo


def _work(todo: Todo) -> None:
    for work in iter(todo.get, None):
        work()
        del work  # its owner may go
