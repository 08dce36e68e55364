"""When text ends: stop strings found across token boundaries, and how much text is safe to stream before that."""

from __future__ import annotations

from collections.abc import Sequence

from niwaki.runtime.constraints.automaton import DEAD, START, ByteDfa


class StopText:
    """Watches one generation's growing text for its stop strings.

    The text that `push` returns is safe to show: it can no longer become part of a stop string. Cost per token is
    in the length of the stop strings, not of the text.
    """

    def __init__(
        self, stops: Sequence[str], pattern: str | None = None, ends: ByteDfa | None = None, after: str = ""
    ) -> None:
        """`ends` takes the texts that end with their first match of `pattern`; the match is part of the text. Nothing
        stops before `after` was written."""
        self._after = after
        self._before = ""  # of the text so far, what `after` may have begun in
        self._stops = tuple(stops)
        self._pattern = pattern
        self._ends = ends
        self._state = START
        self.watches = bool(stops) or ends is not None  # else no text is ever its end
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""  # text not shown yet: it may be the head of a stop string
        self._num_early = 0  # characters at its beginning in which no stop ends
        self._num_shown = 0
        self.matched: str | None = None

    @property
    def length(self) -> int:
        """Characters of the final text so far: what was shown and what is held back."""
        return self._num_shown + len(self._held)

    def push(self, text: str, *, is_early: bool = False) -> str:
        """Add text; returns what may be shown now. After a match (`matched`), the text before it, and no more.

        A stop string goes before a match of the pattern. What ends in a text that `is_early` is passed over; what
        begins there may end later. Behind a match of the pattern that is passed over it is matched anew.
        """
        if self._after:
            return self._push_before(text, is_early)
        if is_early:
            return self._push_early(text)
        length = None if self._ends is None else self._length_to_match(self._ends, text)
        shown = self._push(text[:length])
        if length is not None and self.matched is None:
            self.matched = self._pattern
            shown += self.finish()
        return shown

    def _push_early(self, text: str) -> str:
        rest = text
        while self._ends is not None and (length := self._length_to_match(self._ends, rest)) is not None:
            self._state, rest = START, rest[length:]
        self._num_early = len(self._held) + len(text)
        return self._push(text)

    def _push_before(self, text: str, is_early: bool) -> str:
        """Text that may hold the end of what nothing stops in."""
        known = len(self._before)
        self._before += text
        at = self._before.find(self._after)
        if at < 0:
            self._before = self._before[max(0, len(self._before) - len(self._after) + 1) :]
            self._num_shown += len(text)
            return text
        cut = at + len(self._after) - known
        self._after = ""
        self._num_shown += cut
        return text[:cut] + self.push(text[cut:], is_early=is_early)

    def _length_to_match(self, ends: ByteDfa, text: str) -> int | None:
        """How much of the text reaches up to the end of a match; None for all of it, and no match yet."""
        before, self._state = self._state, ends.run(text.encode(), self._state)
        if self._state != DEAD and not ends.accepting[self._state]:
            return None
        for length in range(1, len(text) + 1):
            before = ends.run(text[length - 1].encode(), before)
            if ends.accepting[before]:
                return length
        self._ends = None  # no text that begins like this has a match
        return None

    def _push(self, text: str) -> str:
        if not self._stops:
            self._num_shown += len(text)
            return text
        self._held += text
        first: tuple[int, str] | None = None
        for stop in self._stops:
            at = self._held.find(stop, max(0, self._num_early - len(stop) + 1))
            if at >= 0 and (first is None or at < first[0]):
                first = (at, stop)
        if first is not None:
            at, self.matched = first
            shown, self._held = self._held[:at], ""
        else:
            keep = self._num_held_back()
            cut = len(self._held) - keep
            shown, self._held = self._held[:cut], self._held[cut:]
            self._num_early = max(0, self._num_early - cut)
        self._num_shown += len(shown)
        return shown

    def finish(self) -> str:
        """The generation ended otherwise: what was held back is text after all."""
        shown, self._held = self._held, ""
        self._num_shown += len(shown)
        return shown

    def _num_held_back(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
