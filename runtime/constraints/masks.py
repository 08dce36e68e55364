"""The masks of one step, filled while the model computes it. Owns the thread that fills them; knows no request.

Masks that are known already cost a look-up. The others are filled on a thread beside the forward pass, or at once where
nothing goes on meanwhile; those of grammars once for each place, and many in one native call, on several processors and
without the interpreter's lock, since calls row by row would take the lock and give it back each time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeAlias

import numpy as np
from llguidance import LLExecutor, LLMatcher

from niwaki.runtime.api import NiwakiError
from niwaki.runtime.api.faults import told
from niwaki.runtime.constraints.grammar_engine import GrammarMatcher
from niwaki.runtime.constraints.grammar_places import Place
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.protocol import ANY_LENGTH, Matcher, address_of

MAX_THREADS: Final = 8
FEW: Final = 2  # masks of grammars that are filled one by one: to hand them to native threads takes longer

Wanted: TypeAlias = Sequence[Matcher]
Job: TypeAlias = "Callable[[], None] | None"


class Masks:
    """One step's masks, in the order of their matchers; read once the step is computed."""

    def __init__(self, rows: list[Words | NiwakiError]) -> None:
        self._rows = rows
        self._fault: BaseException | None = None
        self._filling = threading.Lock()  # a Future takes twice as long to be handed over and waited for

    def fill_beside(self, fill: Callable[[list[Words | NiwakiError]], None], thread: SimpleQueue[Job]) -> None:
        """Have the rows filled on that thread."""

        def run() -> None:
            try:
                fill(self._rows)
            except BaseException as error:
                self._fault = error
            self._filling.release()

        self._filling.acquire()
        thread.put(run)

    def are_there(self, seconds: float | None = 0.0) -> bool:
        """Whether they are all filled, in so many seconds at the latest; None: wait."""
        if not self._filling.acquire(timeout=-1 if seconds is None else seconds):
            return False
        self._filling.release()
        return True

    def rows(self) -> list[Words | NiwakiError]:
        """Wait for all. A row may be shared: do not write to it. Where a matcher failed, its error."""
        with self._filling:
            if self._fault is not None:
                raise self._fault
            return self._rows


class MaskFiller:
    """Fills masks of `num_words` words."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._thread: threading.Thread | None = None  # made when first needed: most engines see no grammar
        self._native: LLExecutor | None = None
        self._last: Masks | None = None  # that the thread was given

    def start(self, wanted: Wanted) -> Masks:
        """Begin to fill masks, whatever is left of budgets. Leave the matchers alone until the rows have been read."""
        rows, slow = _looked_up(wanted)
        masks = Masks(rows)
        if slow:
            if self._thread is None:
                self._thread = threading.Thread(target=_work, args=(self._jobs,), name="niwaki-masks", daemon=True)
                self._thread.start()
                weakref.finalize(self, self._jobs.put, None)
            masks.fill_beside(partial(self._fill, slow), self._jobs)
            self._last = masks
        return masks

    def rows(self, wanted: Wanted) -> list[Words | NiwakiError]:
        """`start` and wait, where nothing is done meanwhile."""
        if len(wanted) == 1:  # what else is done here takes as long as the mask
            return [self._row(wanted[0])]
        rows, slow = _looked_up(wanted)
        if slow:
            if self._last is not None:
                self._last.are_there(None)  # masks are filled on one thread at a time
            self._fill(slow, rows)
        return rows

    def _row(self, matcher: Matcher) -> Words | NiwakiError:
        try:
            known = matcher.known_mask(ANY_LENGTH)
            if known is not None:
                return known
            if self._last is not None:
                self._last.are_there(None)
            if isinstance(matcher, GrammarMatcher) and matcher.is_native:
                return matcher.new_mask()
            row = np.zeros(self._num_words, np.uint32)
            matcher.fill_mask(row)
            return row
        except Exception as error:
            return told(error)

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _fill(self, slow: Sequence[tuple[int, Matcher]], rows: list[Words | NiwakiError]) -> None:
        if len(slow) == 1:  # what follows takes as long as the mask
            index, matcher = slow[0]
            if isinstance(matcher, GrammarMatcher) and matcher.is_native:
                rows[index] = _new_mask(matcher)
                return
        alike: dict[Place | GrammarMatcher, list[tuple[int, GrammarMatcher]]] = {}  # they share a mask
        for index, matcher in slow:
            try:
                if isinstance(matcher, GrammarMatcher) and matcher.is_native:
                    if failure := matcher.failure():
                        raise failure
                    alike.setdefault(matcher.place or matcher, []).append((index, matcher))
                else:
                    row = np.zeros(self._num_words, np.uint32)
                    matcher.fill_mask(row)
                    rows[index] = row
            except Exception as error:
                rows[index] = told(error)
        firsts = [texts[0][1] for texts in alike.values()]
        masks = self._together(firsts) if len(firsts) > FEW else map(_new_mask, firsts)
        for mask, texts in zip(masks, alike.values(), strict=True):
            for index, matcher in texts:
                is_anothers = isinstance(mask, NiwakiError) and matcher is not texts[0][1]
                rows[index] = _new_mask(matcher) if is_anothers else mask

    def _together(self, matchers: Sequence[GrammarMatcher]) -> list[Words | NiwakiError]:
        if self._native is None:
            # One processor is the forward pass's: native threads that wait for it hold up the whole call.
            self._native = LLExecutor(max(1, min((os.cpu_count() or 1) - 1, MAX_THREADS)))
        filled = np.zeros((len(matchers), self._num_words), np.uint32)
        numbered: list[tuple[LLMatcher, int]] = []
        for place, matcher in enumerate(matchers):
            native = matcher.native
            assert native is not None, "others are filled by themselves"
            numbered.append((native, place))
        self._native.unsafe_compute_mask_ptr(numbered, address_of(filled), 4 * self._num_words, len(matchers))
        return [_learned(matcher, mask) for matcher, mask in zip(matchers, filled, strict=True)]


def _work(jobs: SimpleQueue[Job]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds matchers


def _looked_up(wanted: Wanted) -> tuple[list[Words | NiwakiError], list[tuple[int, Matcher]]]:
    """The masks, and which are missing."""
    rows: list[Words | NiwakiError] = []
    slow: list[tuple[int, Matcher]] = []
    for index, matcher in enumerate(wanted):
        try:
            known = matcher.known_mask(ANY_LENGTH)
        except Exception as error:
            rows.append(told(error))
            continue
        if known is None:
            slow.append((index, matcher))
        rows.append(_NOT_YET if known is None else known)
    return rows, slow


def _new_mask(matcher: GrammarMatcher) -> Words | NiwakiError:
    try:
        return matcher.new_mask()
    except Exception as error:
        return told(error)


def _learned(matcher: GrammarMatcher, mask: Words) -> Words | NiwakiError:
    try:
        return matcher.learn(mask)
    except Exception as error:
        return told(error)


_NOT_YET: Final = np.empty(0, np.uint32)
