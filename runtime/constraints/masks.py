"""The masks of one step, filled while the model computes it. Owns the thread that fills them; knows no request.

Masks that are known already cost a look-up. The others are filled on a thread beside the forward pass: those of
grammars in one native call, on several processors and without the interpreter's lock, since calls row by row would take
the lock and give it back each time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher

from niwaki.runtime.api import NiwakiError
from niwaki.runtime.api.faults import told
from niwaki.runtime.constraints.grammar_engine import GrammarMatcher
from niwaki.runtime.constraints.grammar_places import Place
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.protocol import Matcher

MAX_THREADS: Final = 8
FEW: Final = 2  # masks that are filled here: to hand them to another thread takes longer than one of them


class Masks:
    """One step's masks, in the order of their matchers; read once the step is computed."""

    def __init__(self, rows: list[Words | NiwakiError], filling: Future[None] | None) -> None:
        self._rows = rows
        self._filling = filling

    def rows(self) -> list[Words | NiwakiError]:
        """Wait for all. A row may be shared: do not write to it. Where a matcher failed, its error."""
        if self._filling is not None:
            self._filling.result()
        return self._rows


class MaskFiller:
    """Fills masks of `num_words` words."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._thread: ThreadPoolExecutor | None = None  # made when first needed: most engines see no grammar
        self._native: LLExecutor | None = None

    def start(self, wanted: Sequence[tuple[Matcher, int]]) -> Masks:
        """Begin to fill the masks of matchers, each with the tokens that remain. Leave the matchers alone until the
        rows have been read."""
        known = [_known(matcher, remaining) for matcher, remaining in wanted]
        slow = [(index, *wanted[index]) for index, row in enumerate(known) if row is None]
        rows: list[Words | NiwakiError] = [_NOT_YET if row is None else row for row in known]
        if not slow:
            return Masks(rows, None)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="niwaki-masks")
        return Masks(rows, self._thread.submit(self._fill, rows, slow))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _fill(self, rows: list[Words | NiwakiError], slow: Sequence[tuple[int, Matcher, int]]) -> None:
        alike: dict[Place | GrammarMatcher, list[tuple[int, GrammarMatcher, LLMatcher]]] = {}  # they share a mask
        for index, matcher, remaining in slow:
            native = matcher.native if isinstance(matcher, GrammarMatcher) else None
            try:
                if isinstance(matcher, GrammarMatcher) and native is not None:
                    if failure := matcher.failure():
                        raise failure
                    alike.setdefault(matcher.place or matcher, []).append((index, matcher, native))
                else:
                    row = np.zeros(self._num_words, np.uint32)
                    matcher.fill_mask_within(row, remaining)
                    rows[index] = row
            except Exception as error:
                rows[index] = told(error)
        if not alike:
            return
        filled = np.zeros((len(alike), self._num_words), np.uint32)
        self._compute([found[0][2] for found in alike.values()], filled)
        for mask, found in zip(filled, alike.values(), strict=True):
            fault = _learned(found[0][1], mask)
            for index, _, _ in found:
                rows[index] = fault or mask

    def _compute(self, matchers: Sequence[LLMatcher], filled: Words) -> None:
        if len(matchers) <= FEW:
            for matcher, row in zip(matchers, filled, strict=True):
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            return
        if self._native is None:
            # One processor is the forward pass's: native threads that wait for it hold up the whole call.
            self._native = LLExecutor(max(1, min((os.cpu_count() or 1) - 1, MAX_THREADS)))
        numbered = [(matcher, place) for place, matcher in enumerate(matchers)]
        self._native.unsafe_compute_mask_ptr(numbered, filled.ctypes.data, 4 * self._num_words, len(matchers))


def _known(matcher: Matcher, remaining: int) -> Words | NiwakiError | None:
    try:
        return matcher.known_mask(remaining)
    except Exception as error:
        return told(error)


def _learned(matcher: GrammarMatcher, mask: Words) -> NiwakiError | None:
    """Why the mask is none, if it is."""
    try:
        if failure := matcher.failure():
            return failure
        matcher.learn(mask)
    except Exception as error:
        return told(error)
    return None


_NOT_YET: Final = np.empty(0, np.uint32)
