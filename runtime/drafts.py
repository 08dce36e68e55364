"""Drafts: what a text says again is guessed from where it said it before, and checked in one step (prompt lookup,
Saxena 2023).

The guess rides behind a request's last token, in the same row. At each of its places a token is drawn just as it would
be without it, since what is drawn there depends on the seed and the position alone; the places behind the first token
that was guessed wrong are thrown away. So a draft changes when tokens come, not which.
"""

from __future__ import annotations

import numpy as np

from niwaki.kernels.echo import last_echo
from niwaki.runtime.limits import TokenIds

DRAFT_ROWS = 2  # requests in a step above which nobody guesses: the wrong guesses of more cost the host too much
ECHO_TOKENS = 3  # of the end of a text that must have stood before
FIRST_GUESS = 4  # tokens
LONGEST_PAUSE = 64  # tokens

NOTHING: TokenIds = np.empty(0, np.int32)


class Guesser:
    """Guesses for one request: more after those that were right, none for a while after those that were wrong."""

    __slots__ = ("_quiet_until", "_size", "_wrong")

    def __init__(self) -> None:
        self._size = FIRST_GUESS  # of the next guess
        self._wrong = 0  # guesses in a row of which nothing was right
        self._quiet_until = 0  # so many tokens

    def hears(self, ids: TokenIds, newest: TokenIds) -> bool:
        """Whether there is a guess of what follows `ids` and `newest`."""
        is_quiet = len(ids) + len(newest) < self._quiet_until
        return not is_quiet and last_echo(ids, newest, ECHO_TOKENS) > 0

    def guess(self, ids: TokenIds, most: int) -> TokenIds:
        """Up to `most` tokens that may follow `ids`; often none."""
        at = 0 if len(ids) < self._quiet_until else last_echo(ids, NOTHING, ECHO_TOKENS)
        size = min(most, self._size)
        return np.resize(ids[at : at + size], size) if at else NOTHING  # at the end of the text it goes round

    def learn(self, guessed: int, right: int, length: int) -> None:
        """So many tokens of the last guess were right. `length`: of the text by now."""
        if right:
            self._size = 2 * self._size if right == guessed else max(FIRST_GUESS, right)
            self._wrong = 0
        else:
            self._size = FIRST_GUESS
            self._wrong += 1
            self._quiet_until = length + min(4**self._wrong, LONGEST_PAUSE)
