"""Prompts of which less than a page is cached, remembered until something is written that begins like them.

Whoever waits is looked up in every step. What a lookup found at the top of the tree can only grow when a new child of
the root shares one token more with the prompt: so these prompts stand here by the tokens that it would have to share.
"""

from __future__ import annotations

from niwaki.radix.children import TOKEN_BYTES
from niwaki.radix.handles import Match

Head = tuple[str, bytes]  # a namespace, and the first tokens of a prompt: one more than are cached


class Beginnings:
    """Matches of less than a page, by the caller's keys."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Match, Head]] = {}
        self._by_head: dict[Head, set[int]] = {}

    def get(self, key: int) -> Match | None:
        known = self._known.get(key)
        return None if known is None else known[0]

    def remember(self, key: int, match: Match, head: Head) -> None:
        """`key` must be new."""
        self._known[key] = match, head
        self._by_head.setdefault(head, set()).add(key)

    def forget(self, key: int) -> None:
        """Whether it is known or not."""
        known = self._known.pop(key, None)
        if known is not None:
            keys = self._by_head[known[1]]
            keys.remove(key)
            if not keys:
                del self._by_head[known[1]]

    def written(self, namespace: str, first_page: bytes) -> None:
        """Forget those that begin like a new child of the root."""
        if not self._by_head:
            return
        for stop in range(TOKEN_BYTES, len(first_page) + 1, TOKEN_BYTES):
            for key in self._by_head.pop((namespace, first_page[:stop]), ()):
                del self._known[key]
