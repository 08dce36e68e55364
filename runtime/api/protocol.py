"""What a backend does for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from niwaki.runtime.api.constraints import CallFormat, Tool
from niwaki.runtime.api.pending import Generation, Pending
from niwaki.runtime.api.sampling import SamplingParams
from niwaki.runtime.api.text import BackendInfo, Message, Score, Segment


@runtime_checkable
class Branch(Protocol):
    """A place in the runtime: the token ids so far, their path in the tree locked while the branch is open."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class Backend(Protocol):
    """What runs programs. A branch is used by one caller at a time; different branches may run at once.

    `Delta in`: every method that takes `delta` first appends that text to the branch, tokenized on its own, so
    nothing that was already there is tokenized again.
    """

    def info(self) -> BackendInfo: ...

    def open(self, *, namespace: str = "") -> Branch:
        """A new, empty branch. Branches of different namespaces share no cache."""
        ...

    def fork(self, branch: Branch) -> Branch:
        """A second handle on the same text, in O(1)."""
        ...

    def close(self, branch: Branch) -> None:
        """Unlock the branch's path. Closing twice is allowed. Running work of the branch is cancelled."""
        ...

    def append(self, branch: Branch, delta: Sequence[Segment]) -> None:
        """Add text without generating."""
        ...

    def generate(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams) -> Generation:
        """Add text, then generate. When it is done the branch ends with the first output's text (stop strings and
        end tokens left out). Raises RequestError, ConstraintError or CapacityError at once where it can tell."""
        ...

    def score(
        self,
        branch: Branch,
        delta: Sequence[Segment],
        continuations: Sequence[str],
        *,
        heal: bool = False,
        unconditional: bool = False,
    ) -> Pending[tuple[Score, ...]]:
        """Add text, then score each continuation on it, all in one request. The branch does not move.

        With `heal`, the text's last tokens are cut anew with each continuation where one of them would merge with
        them, and those from the first that differs on are scored as part of it. With `unconditional`, the same tokens
        are scored with no text before them, too: those scores stand behind the others, in the same order."""
        ...

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The model's own chat template over `messages`; template text and contents in one string.

        Raises:
            UnsupportedByBackend: the model has no chat template.
        """
        ...

    def usage(self) -> Mapping[str, float]:
        """Counters since the start: prefilled, cached, generated tokens; pages free, in the tree, held."""
        ...


@runtime_checkable
class AsksForReaders(Protocol):
    """What a backend has beside `Backend` where it must ask for pieces: those that nobody reads are left out."""

    def generate_read(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams) -> Generation:
        """As `Backend.generate`, for one who reads the pieces from the start. Of any other they are asked for when
        somebody begins to read."""
        ...


@runtime_checkable
class OffersTools(Protocol):
    """What a backend has beside `Backend` where its model was trained to call tools."""

    def call_format(self) -> CallFormat:
        """How this model writes calls.

        Raises:
            UnsupportedByBackend: its chat template has no form for them that we know.
        """
        ...

    def reasoning_markers(self) -> tuple[str, str] | None:
        """What stands before and behind this model's reasoning; None where it has no tokens for it."""
        ...

    def render_with_tools(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, add_generation_prompt: bool
    ) -> str:
        """As `Backend.render`, with the tools told to the model. Raises as `call_format`."""
        ...


@runtime_checkable
class SharesPlaces(Protocol):
    """What a backend has beside `Backend` where programs that wait share the places of a step among them."""

    def new_program(self) -> int:
        """A number for branches that take their places together."""
        ...

    def open(self, *, namespace: str = "", program: int | None = None) -> Branch:
        """As `Backend.open`. `program`: by `new_program`; None for one of its own, which its forks share."""
        ...
