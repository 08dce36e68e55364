"""Where a state stands in the runtime: its branch, the text as segments, and how much of it the branch holds.

All text stays here, so that a branch can be let go and opened again later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

from niwaki.lang.backends import Lease
from niwaki.runtime.api import Segment


class Place:
    """Owned by the state's executor. Whoever pumps it writes; only `lease` is looked at by others, under the lock."""

    __slots__ = ("_num_inherited", "_num_sent", "lease", "segments")

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.segments: list[Segment] = []
        self._num_sent = 0
        self._num_inherited = 0

    def hold(self, lease: Lease) -> None:
        """Stand on a new branch, which holds nothing yet."""
        self.lease, self._num_sent = lease, 0

    def let_go(self) -> Lease | None:
        """Leave the branch, which closes when the lease is dropped. Text added later is sent from the start."""
        lease, self.lease = self.lease, None
        self._num_sent = 0
        return lease

    def inherit(self, parent: Place, lease: Lease) -> None:
        """Stand where the parent stands, on a fork of its branch."""
        self.lease = lease
        self.segments = list(parent.segments)
        self._num_sent = self._num_inherited = len(self.segments)

    def add(self, segments: Iterable[Segment]) -> None:
        self.segments += segments

    def add_generated(self, text: str, marks: tuple[str, ...] = ()) -> None:
        """Text that the branch holds by itself. `marks` are the model's own markers, wherever they stand in it."""
        pieces = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
        self.segments += [Segment(piece, control=place % 2 == 1) for place, piece in enumerate(pieces) if piece]
        self.all_sent()

    def all_sent(self) -> None:
        self._num_sent = len(self.segments)

    def unsent(self) -> tuple[Segment, ...]:
        """One text, however many pieces it was written in: where the pieces met must not show in the tokens."""
        return joined(self.segments[self._num_sent :])

    def own_segments(self) -> tuple[Segment, ...]:
        """Those that the parent did not have."""
        return tuple(self.segments[self._num_inherited :])


def joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """One segment for each stretch of one kind."""
    return tuple(
        Segment("".join(segment.text for segment in run), control)
        for control, run in groupby(segments, key=lambda segment: segment.control)
    )
