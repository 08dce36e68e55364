"""Drafts: what a text says again is guessed from where it said it before, and checked in one step (prompt lookup,
Saxena 2023).

The guess rides behind a request's last token, in the same row. At each of its places a token is drawn just as it would
be without it, since what is drawn there depends on the seed and the position alone; the places behind the first token
that was guessed wrong are thrown away. So a draft changes when tokens come, not which.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from niwaki.kernels.echo import hear, last_echo
from niwaki.runtime.options.limits import TokenIds

# Requests in a step above which nobody guesses: the wrong guesses of more cost too much. Of a small model one alone: a
# step with guesses is planned, which costs the host more than a step of a steady batch (`memory.is_small`).
DRAFT_ROWS = 2
FIRST_GUESS = 4  # tokens
# What a text took from its prompt it mostly goes on taking from there. What it wrote itself it says again by chance,
# too, and a wrong guess costs one or two steps: so there more tokens must have stood before, until a guess was right,
# and a guess of which so few are right counts as wrong.
OWN_ECHO = 5  # tokens
OWN_RIGHT = 2  # tokens
LONGEST_PAUSE = 64  # tokens
NEVER = 1 << 62

ROOM = 256  # tokens by which the texts of a batch may grow before they are laid out anew

Longs = npt.NDArray[np.int64]
NOTHING: TokenIds = np.empty(0, np.int32)


def echo_tokens(num_rows: int) -> int:
    """Of the end of a text, how many must have stood before. Where a wrong guess holds up others, one more."""
    return 3 if num_rows == 1 else 4


def said_behind(guesses: Sequence[TokenIds], drawn: Longs) -> list[list[int]]:
    """The tokens that follow each text: those of its guess that were drawn, and the one behind them. `drawn`: for each
    text what comes at its last token and, were those before it right, at each of its guess."""
    tokens: list[int] = drawn.tolist()  # of so few a list is quicker than an array
    found, at = [], 0
    for guess in guesses:
        right = 0
        for guessed in guess.tolist():
            if tokens[at + right] != guessed:
                break
            right += 1
        found.append(tokens[at : at + right + 1])
        at += 1 + len(guess)
    return found


class Guesser:
    """Guesses for one request: more after those that were right, none for a while after those that were wrong."""

    __slots__ = ("_is_own", "_size", "_was_right", "_wrong", "quiet_until")

    def __init__(self) -> None:
        self.quiet_until = 0  # so many tokens
        self._size = FIRST_GUESS  # of the next guess
        self._wrong = 0  # guesses in a row that were
        self._was_right = False  # one was
        self._is_own = False  # the last one is of what the text wrote itself

    def guess(self, ids: TokenIds, most: int, echo: int, num_prompt: int = NEVER) -> TokenIds:
        """Up to `most` tokens that may follow `ids`, where its last `echo` stood before; often none. `num_prompt`: of
        its first tokens, those that it did not write itself."""
        at = 0 if len(ids) < self.quiet_until else last_echo(ids, echo)
        if at > num_prompt and not self._was_right:
            at = last_echo(ids, max(echo, OWN_ECHO))
        self._is_own = at > num_prompt
        if not at:
            return NOTHING
        size = min(most, self._size)
        said = ids[at : at + size]
        return said if len(said) == size else np.resize(said, size)  # at the end of the text it goes round

    def be_quiet(self) -> None:
        """For good."""
        self.quiet_until = NEVER

    def learn(self, guessed: int, right: int, length: int) -> None:
        """So many tokens of the last guess were right. `length`: of the text by now."""
        if right and (right == guessed or right >= OWN_RIGHT or not self._is_own):
            self._size = _larger(self._size) if right == guessed else max(FIRST_GUESS, right)
            self._wrong, self._was_right = 0, True
        else:
            self._size = FIRST_GUESS
            self._wrong += 1
            self.quiet_until = length + min(4**self._wrong, LONGEST_PAUSE)


def _larger(size: int) -> int:
    """With the token before it such a guess fills whole blocks of 8, 16, 32, in which kernels take them: the layers of
    the bundled model take 536 us for 8 and 644 for 9, 913 for 16 and 1,017 for 17 (one thread of an EPYC, Zen 4, beside
    other work, 28 November 2026, medians of 60), and its tasks as many steps as with 4, 8 and 16."""
    return (1 << (size + 1).bit_length()) - 1


class Listener:
    """The texts of a batch that goes on token by token, side by side: one call hears whether one of them repeats
    itself."""

    def __init__(self, texts: Sequence[TokenIds], guessers: Sequence[Guesser]) -> None:
        self._texts = np.zeros((len(texts), max(map(len, texts)) + ROOM), np.int32)
        for row, ids in enumerate(texts):
            self._texts[row, : len(ids)] = ids
        self._quiet = np.array([guesser.quiet_until for guesser in guessers], np.int64)
        self._size = echo_tokens(len(texts))
        self._room = ROOM  # a number: the array's maximum takes as long as listening

    @property
    def has_room(self) -> bool:
        """Whether each text may be a token longer than the last time."""
        return self._room > 0

    def takes(self, row: int, ids: TokenIds, guesser: Guesser) -> bool:
        """Whether there is room for a text that has become longer by more than a token, up to `ids`."""
        if len(ids) > self._texts.shape[1]:
            return False
        self._texts[row, : len(ids)] = ids
        self._quiet[row] = guesser.quiet_until
        self._room = min(self._room, self._texts.shape[1] - len(ids))
        return True

    def hears(self, lasts: Longs, newest: TokenIds) -> bool:
        """Whether there is a guess of what follows somebody's text. `newest` [rows]: the token that stands at lasts
        [rows]; those before it are known."""
        self._room -= 1
        return bool(hear(self._texts, lasts, newest, self._quiet, self._size))
