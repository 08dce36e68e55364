"""A step that is launched before the tokens of the one before are read: the host works while the device computes.

What was drawn stays where the logits are and is what the next step reads; a copy of it comes to the host meanwhile. So
who ends is known one step late: its row in that step is superfluous, and what it says is thrown away. It writes one
slot behind what its request has computed, on a page that nobody else can have got before it: whoever gets the page
next is in a later step.

A mask hangs on the token before. So of a batch under masks the step is launched, then the tokens of the one before are
read and the masks filled, while the device computes; only the draw stands behind that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from niwaki.kernels.sample import NO_TOKEN, Longs, Words
from niwaki.kernels.transfer import on_device
from niwaki.runtime.sampling.sampler import NO_ROWS, PlainDraws

if TYPE_CHECKING:
    from niwaki.runtime.requests.request import Request  # needs packages that a GPU's machine may not have


class Drawing(Protocol):
    """Draws for the same rows step after step, without waiting for what it has drawn."""

    def draw(self, logits: torch.Tensor, masked: Longs = NO_ROWS, masks: Sequence[Words] = ()) -> torch.Tensor:
        """A token for each row of logits float32 [rows, vocab], the `masked` ones under their masks, below 0 where none
        can be drawn: int64 [rows], on their device. The next call is for the next position."""
        ...


class HostDrawing:
    """For logits in the host's memory."""

    def __init__(self, draws: PlainDraws) -> None:
        self._draws = draws

    def draw(self, logits: torch.Tensor, masked: Longs = NO_ROWS, masks: Sequence[Words] = ()) -> torch.Tensor:
        best = self._draws.best(logits)
        tokens = None if best is None else self._draws.draw_under(logits, best, masked, masks)
        self._draws.advance()
        return torch.full((len(logits),), NO_TOKEN) if tokens is None else torch.from_numpy(tokens)


def drawing_of(draws: PlainDraws, vocab: int, device: torch.device) -> Drawing:
    """The same draws, on a device; `draws` is its own from now on."""
    if device.type == "cpu":
        return HostDrawing(draws)
    from niwaki.runtime.sampling.device_sampler import DeviceDrawing  # loads Triton, which CPUs do without

    return DeviceDrawing(draws, vocab, device)


@dataclass(frozen=True, slots=True)
class Flight:
    """The last step that was launched. Its tokens may not be there yet."""

    requests: Sequence[Request]  # in the order of its rows
    tokens: torch.Tensor  # int64 [rows], where the logits are
    drawing: Drawing
    _host: torch.Tensor
    _is_there: torch.cuda.Event | None

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        drawing: Drawing,
        logits: torch.Tensor,
        masked: Longs = NO_ROWS,
        masks: Sequence[Words] = (),
    ) -> Flight:
        """Behind a step that was launched for these requests."""
        tokens = drawing.draw(logits, masked, masks)
        if tokens.device.type == "cpu":
            return cls(requests, tokens, drawing, tokens, None)
        host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
        is_there.record()
        return cls(requests, tokens, drawing, host, is_there)

    def ids_for(self, requests: Sequence[Request]) -> torch.Tensor:
        """What some of its requests have to compute next. A row that could not be drawn has any token: its step will be
        thrown away."""
        rows = self._rows(requests)
        tokens = self.tokens.clamp(min=0)
        return tokens if rows is None else tokens[on_device(rows, tokens.device)]

    def read(self, requests: Sequence[Request]) -> Longs:
        """The tokens of some of its requests; waits for them."""
        if self._is_there is not None:
            self._is_there.synchronize()
        rows = self._rows(requests)
        tokens: Longs = self._host.numpy()
        return tokens if rows is None else tokens[rows]

    def _rows(self, requests: Sequence[Request]) -> Longs | None:
        """Where they stand; None where they are all."""
        if requests == self.requests:
            return None
        places = {id(request): row for row, request in enumerate(self.requests)}
        return np.array([places[id(request)] for request in requests], np.int64)
