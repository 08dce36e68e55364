"""The tokens of one branch: how a program's text extends them, and which of the last ones may still be cut anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from niwaki.runtime.api import Segment
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.options.limits import TokenIds


class BranchTokens:
    """`ids`, the first `num_settled` of which a model or a template wrote: those are never taken back. The last
    `num_open` are tokenized again with the text that comes next, as choices were scored that would merge with them."""

    __slots__ = ("ids", "num_open", "num_settled")

    def __init__(self, ids: TokenIds, num_settled: int = 0) -> None:
        self.move(ids, num_settled)

    @property
    def token_ids(self) -> Sequence[int]:
        return list(self.ids.tolist())

    def move(self, ids: TokenIds, num_settled: int, num_open: int = 0) -> None:
        self.ids, self.num_settled, self.num_open = ids, num_settled, num_open

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
