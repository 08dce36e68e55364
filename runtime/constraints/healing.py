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

    Its own tokens are written again, unless the model, asked freely, writes one that begins with all that is left and
    reaches over the end, into what the constraint admits there. (Drawn among these tokens alone, text that was cut at a
    boundary went on otherwise too often: 26 of 48 cuts as from the uncut prompt, against 30 without healing.)
    """

    def __init__(self, unsettled: Unsettled, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._rest = unsettled.text
        self._own = unsettled.paths[0]
        self._crossings = {len(path) for path in unsettled.paths[1:] if path == self._own[: len(path)]}
        self.num_written = 0  # tokens so far that lie within the text

    @property
    def is_done(self) -> bool:
        return not self._rest

    def mask(self, matcher: Matcher | None, remaining: int) -> Words:
        """Which tokens may come next; `remaining` may still be generated behind the text."""
        row = np.zeros(self._vocabulary.num_words, np.uint32)
        own = self._own[self.num_written]
        row[own >> 5] |= np.uint32(1 << (own & 31))
        if remaining and self.num_written in self._crossings:
            self._allow_reaching_over(row, matcher, remaining)
        return row

    def settled(self, token_id: int, matcher: Matcher | None, remaining: int) -> int:
        """The token to write where the model, asked freely, drew `token_id`: that, or the prompt's own."""
        row = self.mask(matcher, remaining)
        return (
            token_id if row[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1) else self._own[self.num_written]
        )

    def accept(self, token_id: int) -> bytes:
        """Note a drawn token. Returns what it writes behind the text; nothing while it stays within."""
        piece = self._vocabulary.bytes_of(token_id) or b""
        over = piece[len(self._rest) :]
        if not over:
            self.num_written += 1
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
