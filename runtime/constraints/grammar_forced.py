"""What a grammar's matcher leaves no choice about. The matcher stays where it is."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from niwaki.runtime.constraints.grammar_vocabulary import GrammarVocabulary
from niwaki.runtime.constraints.guidance import Native
from niwaki.runtime.constraints.protocol import MAX_FORCED_BYTES, NOTHING_FORCED, Forced, address_of
from niwaki.runtime.constraints.token_graph import first_bit


def forced_run(matcher: Native, num_words: int) -> tuple[int, ...]:
    """See `protocol.Matcher.forced`."""
    run: list[int] = []
    if not matcher.compute_ff_bytes():
        return ()
    place = matcher.deep_copy()
    row = np.zeros(num_words, np.uint32)
    while not place.is_accepting():
        place.unsafe_compute_mask_ptr(address_of(row), row.nbytes)
        if int(np.bitwise_count(row).sum()) != 1:
            break
        run.append(first_bit(row))
        place.consume_token(run[-1])
    return tuple(run)


class ForcedRun:
    """The masks along a text that must be written: the tokens that write a part of it. Where one may write more than
    the rest of it, its mask is not known here. Texts of one constraint share it, on several threads."""

    __slots__ = ("_known", "_words", "text")

    def __init__(self, text: bytes, words: GrammarVocabulary) -> None:
        self.text = text
        self._words = words
        # The place of the first of some rows, these, and `kernels.written_within` of each: one value, since another
        # text may ask for others meanwhile.
        self._known = (0, NO_ROWS, NO_FLAGS)

    def mask(self, place: int) -> npt.NDArray[np.uint32] | None:
        """Behind so many bytes of the text; do not write to it."""
        first, rows, is_whole = self._known
        if not first <= place < first + len(rows):
            count = min(len(self.text) - place, max(1, ROWS_BYTES // (4 * self._words.vocabulary.num_words)))
            rows, is_whole = self._words.written_within(self.text[place:], count)
            first = place
            self._known = first, rows, is_whole
        return rows[place - first] if is_whole[place - first] else None


class Ahead(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What a text must go on with, and the mask behind that, where it was worked out; without it, it is not known what
    may follow behind."""

    forced: Forced
    mask: npt.NDArray[np.uint32] | None = None
    run: ForcedRun | None = None  # that the text came to, of which the rest is forced

    def behind(self, text: bytes) -> Ahead | None:
        """What is left of it once this was written; None where more than it was."""
        own = self.forced.text
        if not text or not own.startswith(text):
            return None
        rest = own[len(text) :]
        return Ahead(Forced(rest, self.forced.follow) if rest else NOTHING_FORCED, self.mask, self.run)

    @property
    def is_spent(self) -> bool:
        """Whether all of it was written, and it is not known what may follow."""
        return not self.forced.text and self.mask is None

    def mask_here(self) -> npt.NDArray[np.uint32] | None:
        """Before what is forced, where it is known; do not write to it."""
        if self.run is None or not self.forced.text:
            return self.mask
        return self.run.mask(len(self.run.text) - len(self.forced.text))


ROWS_BYTES: Final = 32 * 1024  # that are made together: as long as a text may be, few of its places are asked for
NO_ROWS: Final = np.zeros((0, 0), np.uint32)
NO_FLAGS: Final = np.zeros(0, np.bool_)
NOTHING_AHEAD: Final = Ahead(NOTHING_FORCED)


def look_ahead(matcher: Native, words: GrammarVocabulary) -> Ahead:
    """See `protocol.Matcher.forced_text`."""
    text = matcher.compute_ff_bytes()
    if not text:
        return NOTHING_AHEAD
    if len(text) > MAX_FORCED_BYTES:
        told, follow = text[:MAX_FORCED_BYTES], text[MAX_FORCED_BYTES : MAX_FORCED_BYTES + 1]
        return Ahead(Forced(told, follow), None, ForcedRun(told, words))
    place = matcher.deep_copy()
    place.consume_tokens([words.ids[byte] for byte in text])
    row = np.zeros(words.vocabulary.num_words, np.uint32)
    place.unsafe_compute_mask_ptr(address_of(row), row.nbytes)
    return NOTHING_AHEAD if place.is_error() else Ahead(Forced(text, words.in_row(row)), row, ForcedRun(text, words))
