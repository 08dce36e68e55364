"""A branch of the engine in this process: token ids, and a share of a pin on their path in the tree."""

from __future__ import annotations

from niwaki.radix.handles import Pin
from niwaki.runtime.host.branch_tokens import BranchTokens
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.jobs import Job

MAX_HEALED = 32  # tokens of a prompt's end that are looked at


class LocalBranch(BranchTokens):
    """A place in this engine: token ids, and a share of a pin on their path in the tree. Made by `LocalBackend`."""

    __slots__ = ("jobs", "pin", "program")

    def __init__(
        self, ids: TokenIds, namespace: str, pin: SharedPin | None, num_settled: int = 0, *, program: int
    ) -> None:
        """`program`: the same for all that were forked from one another."""
        super().__init__(ids, namespace, num_settled)
        self.pin = pin
        self.jobs: list[Job] = []
        self.program = program

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class SharedPin:
    """One pin of the tree, held by every branch that forked while standing on it; the backend's lock guards it."""

    __slots__ = ("holders", "pin")

    def __init__(self, pin: Pin) -> None:
        self.pin = pin
        self.holders = 1


def first_loose(ids: TokenIds, num_settled: int) -> int:
    """The first token that may be taken back. One must stay: the model needs one to begin."""
    return max(1, num_settled, len(ids) - MAX_HEALED)
