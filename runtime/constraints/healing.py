"""A prompt's end, written again: tokens that the boundary of prompt and answer had cut off are taken back and drawn as
whatever tokens begin with their text. `Boundaries.unsettled` says which; one `Healing` follows one request.
"""

from __future__ import annotations

import numpy as np

from niwaki.runtime.constraints.boundaries import Unsettled
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.protocol import Matcher
from niwaki.runtime.constraints.vocabulary import Vocabulary


class Healing:
    """The text of the tokens that were taken back, and how much of it is written again.

    Allowed are the tokenizer's own ways to write it: the prompt's tokens, and where a token may reach over its end,
    the tokens before that and all that reach over it, into what the constraint admits there.
    """

    def __init__(self, unsettled: Unsettled, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._rest = unsettled.text
        self._paths = unsettled.paths
        self._written: tuple[int, ...] = ()

    @property
    def is_done(self) -> bool:
        return not self._rest

    @property
    def num_written(self) -> int:
        """Tokens so far that lie within the text."""
        return len(self._written)

    def mask(self, matcher: Matcher | None, remaining: int) -> Words:
        """Which tokens may come next; `remaining` may still be generated behind the text."""
        row = np.zeros(self._vocabulary.num_words, np.uint32)
        done = len(self._written)
        for place, path in enumerate(self._paths):
            if path[:done] != self._written:
                continue
            if len(path) > done:
                row[path[done] >> 5] |= np.uint32(1 << (path[done] & 31))
            elif place and remaining:  # the first path is the text itself: no token reaches over its end
                self._allow_reaching_over(row, matcher, remaining)
        return row

    def accept(self, token_id: int) -> bytes:
        """Note a drawn token. Returns what it writes behind the text; nothing while it stays within."""
        piece = self._vocabulary.bytes_of(token_id) or b""
        over = piece[len(self._rest) :]
        if not over:
            self._written += (token_id,)
        self._rest = self._rest[len(piece) :]
        return over

    def _allow_reaching_over(self, row: Words, matcher: Matcher | None, remaining: int) -> None:
        if matcher is not None:
            matcher.allow_behind(row, self._rest, remaining)
            return
        subtree = self._vocabulary.subtree(self._rest)
        if subtree is not None:
            tokens = self._vocabulary.tokens_in(*subtree)
            np.bitwise_or.at(row, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))
