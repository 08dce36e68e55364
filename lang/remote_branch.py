"""A branch on a server, as the program's side knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from niwaki.lang.remote_wire import Json, segments_json
from niwaki.runtime.api import Generation, Pending, SamplingParams, Score, Segment

if TYPE_CHECKING:
    from niwaki.lang.remote import RuntimeEndpoint


class RemoteBranch:
    """A branch on the server, and the text that the server has not been told yet. Made by `RuntimeEndpoint`.

    The `next_` methods answer for a branch whose calls a script makes; those of any other have nothing to say.
    """

    __slots__ = ("_id", "endpoint", "unsent")

    def __init__(self, endpoint: RuntimeEndpoint, branch_id: str) -> None:
        self.endpoint = endpoint
        self.unsent: list[Segment] = []
        self._id = branch_id

    @property
    def id(self) -> str:
        """Its name on the server."""
        return self._id

    @property
    def token_ids(self) -> Sequence[int]:
        return self.endpoint.token_ids(self)

    def taken(self, delta: Sequence[Segment] = ()) -> list[Json]:
        """What the server is to append: all that was not sent yet."""
        segments, self.unsent = [*self.unsent, *delta], []
        return segments_json(segments)

    def next_generation(self, delta: Sequence[Segment], params: SamplingParams) -> Generation | None:
        return None

    def next_scores(self, delta: Sequence[Segment], continuations: Sequence[str]) -> Pending[tuple[Score, ...]] | None:
        return None

    def next_fork(self) -> RemoteBranch | None:
        return None

    def told_token_ids(self) -> Sequence[int] | None:
        """All of its tokens, where they are known here."""
        return None

    def closed(self) -> str | None:
        """Nobody will use it any more. The name of what the server is to close; None: nothing."""
        return self._id
