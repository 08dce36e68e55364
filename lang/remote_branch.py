"""A branch on a server, as the program's side knows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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


class Pieces:
    """Whether the server is to tell a generation by pieces: those that nobody reads cost it much, and would hold up
    other callers' prompts. Said with the call, or once somebody wants them. Thread-safe."""

    def __init__(self, listen: Callable[[], None], *, is_wanted: bool) -> None:
        """`listen` asks the server for them, which takes a while."""
        self._listen = listen
        self._lock = threading.Lock()  # all below
        self._is_wanted = is_wanted
        self._is_asked = False
        self._has_begun = False

    def want(self) -> None:
        """Somebody begins to read. Never waits."""
        with self._lock:
            self._is_wanted = True
            is_late = self._has_begun and not self._is_asked
            self._is_asked |= is_late
        if is_late:
            threading.Thread(target=self._listen, name="niwaki-remote", daemon=True).start()

    def ask(self) -> bool:
        """What the call says, which is sent now."""
        with self._lock:
            self._is_asked = self._is_wanted
            return self._is_asked

    def begin(self) -> None:
        """The server has the call: from now on it can be asked for them."""
        with self._lock:
            self._has_begun = True
            is_late = self._is_wanted and not self._is_asked
            self._is_asked |= is_late
        if is_late:
            self._listen()
