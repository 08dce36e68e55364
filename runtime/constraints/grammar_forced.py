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


class Ahead(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What a text must go on with, and the mask behind that, where it was worked out."""

    forced: Forced
    mask: npt.NDArray[np.uint32] | None = None

    def behind(self, text: bytes) -> Ahead | None:
        """What is left of it once this was written; None where more than it was, or it is not known what follows."""
        own = self.forced.text
        if self.mask is None or not text or not own.startswith(text):
            return None
        rest = own[len(text) :]
        return Ahead(Forced(rest, self.forced.follow) if rest else NOTHING_FORCED, self.mask)


NOTHING_AHEAD: Final = Ahead(NOTHING_FORCED)


def look_ahead(matcher: Native, words: GrammarVocabulary) -> Ahead:
    """See `protocol.Matcher.forced_text`."""
    text = matcher.compute_ff_bytes()
    if not text:
        return NOTHING_AHEAD
    if len(text) > MAX_FORCED_BYTES:
        return Ahead(Forced(text[:MAX_FORCED_BYTES], text[MAX_FORCED_BYTES : MAX_FORCED_BYTES + 1]))
    place = matcher.deep_copy()
    place.consume_tokens([words.ids[byte] for byte in text])
    row = np.zeros(words.vocabulary.num_words, np.uint32)
    place.unsafe_compute_mask_ptr(address_of(row), row.nbytes)
    return NOTHING_AHEAD if place.is_error() else Ahead(Forced(text, words.in_row(row)), row)
