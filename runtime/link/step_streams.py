"""Where the pieces of a step go: mostly to those to whom the last step's went."""

from __future__ import annotations

from collections.abc import Mapping

from niwaki.runtime.api import Generation
from niwaki.runtime.api.pending import Streams
from niwaki.runtime.link import wake
from niwaki.runtime.link.frames import Pieces


class StepStreams:
    """Used where the link is read; `forget` is called on any thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """One of them has ended, or all."""
        self._known = (b"", Streams(()))  # one value: whoever reads it sees no half of it

    def hand_out(self, pieces: Pieces, generations: Mapping[int, Generation]) -> None:
        """To those of `generations`, by number; where none has it, nobody waits."""
        ids, streams = self._known
        if pieces.ids != ids:
            streams = Streams(map(generations.get, pieces.numbers()))
            self._known = pieces.ids, streams
        wake.tell_all(streams.push(pieces.deltas))
