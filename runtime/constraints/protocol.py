"""What every engine of constraints looks like from outside: a compiled constraint, and a matcher for each text.

The byte automaton (`matcher.py`) stands behind it; engines for schemas and grammars can too.
"""

from __future__ import annotations

from ctypes import addressof, c_char
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from niwaki.runtime.constraints.walks import Standing, Way

MaskRow = npt.NDArray[np.uint32] | npt.NDArray[np.int32]
ANY_BYTE: Final = bytes(range(256))
MAX_FORCED_BYTES: Final = 512  # told at once; what is behind is told when these are written


class Forced(msgspec.Struct, frozen=True, gc=False):  # many are kept: the collector of cycles need not look at them
    """The bytes that must come next, and which ones may stand behind them, ascending; none where nothing may."""

    text: bytes
    follow: bytes


NOTHING_FORCED: Final = Forced(b"", ANY_BYTE)
ANY_LENGTH: Final = 1 << 30  # tokens that remain: more than any budget


class Followed(Enum):
    """What `Matcher.follow` found."""

    REFUSED = auto()
    FREE = auto()
    BOUND = auto()


# Before Python 3.12 a member takes long to be looked up in its class.
REFUSED: Final = Followed.REFUSED
FREE: Final = Followed.FREE
BOUND: Final = Followed.BOUND


class Matcher(Protocol):
    """Follows one text token by token. Used by one thread at a time; clones are independent.

    A mask row is [ceil(vocabulary.size / 32)] of 32-bit words; bit t % 32 of word t // 32 is 1 where token t may
    follow. Where no other token may follow, the text may end: a row is empty
    only when `is_done` and the vocabulary has no end tokens.
    """

    @property
    def is_done(self) -> bool:
        """Nothing may follow but the end (also once an end token was accepted)."""
        ...

    @property
    def can_end(self) -> bool:
        """The text so far is complete."""
        ...

    @property
    def distance(self) -> int:
        """In how many tokens the text can be complete: 0 where `can_end`. The fewest there are, or for a constraint too
        large to measure, and for a grammar, at times a few more. The end token is not counted."""
        ...

    def fill_mask(self, row: MaskRow) -> None:
        """Overwrite `row` with what may follow. End tokens are allowed exactly where the text may end."""
        ...

    def fill_mask_within(self, row: MaskRow, remaining: int) -> None:
        """Like `fill_mask`, and where it costs little without tokens after which the text cannot be completed within
        `remaining` tokens, the next one included. The others that are too much are known by `admits`: it is asked of
        the one token that was drawn, for asking it of all would cost milliseconds.
        """
        ...

    def admits(self, token_id: int, remaining: int) -> bool:
        """Whether the text can still be completed within `remaining` tokens when this one of the mask of
        `fill_mask_within` is the first of them. Where no completion fits any more every token is admitted, and the
        text will stay incomplete.

        Who writes only tokens that are admitted, counting `remaining` down, ends complete if any text fits in the
        first `remaining`: at the latest the shortest ending is all that is left.
        """
        ...

    def follow(self, token_id: int, remaining: int) -> Followed:
        """`accept` a token of the mask of `fill_mask_within` where the text `admits` it, and look at what is behind it:
        BOUND where something is forced there or nothing may follow, else FREE. REFUSED: it is not accepted.

        Raises:
            ConstraintError: as `accept`.
        """
        ...

    def step(self, token_id: int, remaining: int) -> bool:
        """`follow` any token, where it is known from other texts that it may follow, that what it finds is FREE, and
        what the mask of `fill_mask` behind it is. False: it is not known, and the matcher is as before."""
        ...

    def standing(self) -> Standing | None:
        """Where steps that are known can be taken without the matcher, which is `walked` later; None where none can."""
        ...

    def walked(self, way: Way) -> None:
        """These steps of the table of `standing` were taken from there, each as `step` would have."""
        ...

    def known_mask(self, remaining: int) -> npt.NDArray[np.uint32] | None:
        """The mask of `fill_mask_within` where it is at hand without work; it is shared, so do not write to it."""
        ...

    def accept(self, token_id: int) -> None:
        """Append a token.

        Raises:
            ConstraintError: it is not allowed here; the matcher is as before.
        """
        ...

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow: at each of them the mask has this one bit. Often empty, also where the text is
        determined, since most texts can be cut into tokens in several ways."""
        ...

    def forced_text(self) -> Forced:
        """The bytes that every text goes on with: none where it may end, or go on in two ways. Which tokens write
        them is the tokenizer's business (`boundaries.py`)."""
        ...

    def fits(self, remaining: int) -> bool:
        """Whether the text can surely be completed in `remaining` more tokens: `distance`, without a search where a
        bound tells."""
        ...

    def allow_behind(self, row: npt.NDArray[np.uint32], text: bytes, remaining: int) -> None:
        """Set in `row` tokens that write `text` and more, where that more may come next and can be completed within
        `remaining` tokens, this one included. Not all of them need be found."""
        ...

    def accept_bytes(self, text: bytes) -> None:
        """Append the end of a token that `allow_behind` allowed. It cannot be taken back.

        Raises:
            ConstraintError: it is not allowed here.
        """
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens.

        Raises:
            ConstraintError: fewer were accepted.
        """
        ...

    def clone(self) -> Matcher:
        """A matcher at the same place."""
        ...

    def shortest_ending(self, budget: int) -> tuple[int, ...] | None:
        """Fewest tokens that complete the text, as far as `distance` is exact; None when more than `budget`."""
        ...


def address_of(row: MaskRow) -> int:
    """Where it lies. `row.ctypes.data` says the same, and takes longer than many a mask."""
    return addressof(c_char.from_buffer(row.data))


def follow(matcher: Matcher, token_id: int, remaining: int) -> Followed:
    """`Matcher.follow` by the other methods."""
    if not matcher.admits(token_id, remaining):
        return REFUSED
    matcher.accept(token_id)
    return BOUND if matcher.is_done or matcher.forced_text().text else FREE


class CompiledConstraint(Protocol):
    """A constraint over one vocabulary. Safe to share between threads."""

    @property
    def num_states(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Memory held now; grows with use, within the compiler's limit."""
        ...

    def matcher(self) -> Matcher:
        """A matcher at the start of a text."""
        ...
