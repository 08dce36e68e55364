"""When text ends: stop strings found across token boundaries, and how much text is safe to stream before that."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Watches one generation's growing text for its stop strings.

    The text that `push` returns is safe to show: it can no longer become part of a stop string. Cost per token is
    in the length of the stop strings, not of the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""  # text not shown yet: it may be the head of a stop string
        self._num_shown = 0
        self.matched: str | None = None

    @property
    def length(self) -> int:
        """Characters of the final text so far: what was shown and what is held back."""
        return self._num_shown + len(self._held)

    def push(self, text: str) -> str:
        """Add text; returns what may be shown now. After a match (`matched`), the text before it, and no more."""
        if not self._stops:
            self._num_shown += len(text)
            return text
        self._held += text
        first: tuple[int, str] | None = None
        for stop in self._stops:
            at = self._held.find(stop)
            if at >= 0 and (first is None or at < first[0]):
                first = (at, stop)
        if first is not None:
            at, self.matched = first
            shown, self._held = self._held[:at], ""
        else:
            keep = self._num_held_back()
            cut = len(self._held) - keep
            shown, self._held = self._held[:cut], self._held[cut:]
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
