"""The tokens of one branch: how a program's text extends them, and which of the last ones may still be cut anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from niwaki.runtime.api import Backend, Branch, CapacityError, ProgramError, Segment
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.options.limits import TokenIds

Own = TypeVar("Own", bound="BranchTokens")


class BranchTokens:
    """`ids`, the first `num_settled` of which a model or a template wrote: those are never taken back. The last
    `num_open` are tokenized again with the text that comes next, as choices were scored that would merge with them."""

    __slots__ = ("ids", "is_closed", "namespace", "num_open", "num_settled")

    def __init__(self, ids: TokenIds, namespace: str, num_settled: int = 0) -> None:
        self.namespace = namespace
        self.is_closed = False
        self.move(ids, num_settled)

    @property
    def token_ids(self) -> Sequence[int]:
        return list(self.ids.tolist())

    def move(self, ids: TokenIds, num_settled: int, num_open: int = 0) -> None:
        self.ids, self.num_settled, self.num_open = ids, num_settled, num_open

    @contextmanager
    def moved_behind(self, delta: Sequence[Segment], tokenizer: Tokenizer) -> Iterator[None]:
        """Stands behind the delta from here on; where it stood, if what is done inside fails."""
        before = self.ids, self.num_settled, self.num_open
        self.move(*self.extended(delta, tokenizer))
        try:
            yield
        except BaseException:
            self.move(*before)
            raise

    def extended(self, delta: Sequence[Segment], tokenizer: Tokenizer) -> tuple[TokenIds, int]:
        """`ids` and `num_settled` with the delta behind them. The branch itself stays until it is moved there."""
        is_empty = len(self.ids) == 0
        if not delta and not is_empty:
            return self.ids, self.num_settled
        kept = self.ids
        if self.num_open and not delta[0].control:
            kept, opened = self.ids[: -self.num_open], self.ids[-self.num_open :].tolist()
            delta = [Segment(tokenizer.decode(opened)), *delta]
        new = np.array(tokenizer.encode(delta, at_start=is_empty), dtype=np.int32)
        ids = np.concatenate([kept, new])
        text = ""
        for segment in reversed(delta):
            if segment.control:
                return ids, len(ids) - len(tokenizer.plain_ids(text))
            text = segment.text + text
        return ids, self.num_settled


def append_within(backend: Backend, branch: Branch, delta: Sequence[Segment]) -> None:
    """Append for somebody who may ask for any number of branches: each has all of its tokens, however it was made.

    Raises CapacityError: they are more than the context holds, and nothing could go on from there. The branch stands
    where it stood.
    """
    own = own_branch(branch, BranchTokens)
    before = own.ids, own.num_settled, own.num_open
    backend.append(branch, delta)
    most = backend.info().context_length
    if len(own.ids) > most:
        count = len(own.ids)
        own.move(*before)
        raise CapacityError(f"the text has {count} tokens; at most {most} fit into the context")


def own_branch(branch: Branch, kind: type[Own]) -> Own:
    """As one of the backend's own. Raises ProgramError: it is another backend's."""
    if not isinstance(branch, kind):
        raise ProgramError(f"this branch belongs to another backend: {type(branch).__name__}")
    return branch


def open_branch(branch: Branch, kind: type[Own]) -> Own:
    """As `own_branch`. Raises ProgramError: it is closed, too."""
    own = own_branch(branch, kind)
    if own.is_closed:
        raise ProgramError("the branch is closed")
    return own
