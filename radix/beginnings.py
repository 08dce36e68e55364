"""Prompts of which less than a page is cached, remembered until something is written that begins like them.

Whoever waits is looked up in every step. What a lookup found at the top of the tree can only grow when a new child of
the root shares one token more with the prompt: so these prompts stand here by the tokens that it would have to share.
"""

from __future__ import annotations

from niwaki.radix.handles import Match

Head = tuple[str, bytes]  # a namespace, and the first tokens of a prompt: one more than are cached
MAX_LEFT = 64  # entries of keys that were forgotten, beside as many as there are others


class Beginnings:
    """Matches of less than a page, by the caller's keys."""

    def __init__(self) -> None:
        self.known: dict[int, Match] = {}
        self._heads: dict[int, Head] = {}  # by key; those of forgotten keys stay until there are too many
        self._keys: dict[Head, set[int]] = {}
        self._lengths: set[int] = set()  # of the heads, in bytes: mostly one

    def remember(self, key: int, match: Match, head: Head) -> None:
        """`key` must be new."""
        if key in self._heads:
            self._drop(key)
        self.known[key] = match
        self._heads[key] = head
        self._keys.setdefault(head, set()).add(key)
        self._lengths.add(len(head[1]))
        if len(self._heads) > 2 * len(self.known) + MAX_LEFT:
            for left in [key for key in self._heads if key not in self.known]:
                self._drop(left)
            self._lengths = {len(tokens) for _, tokens in self._keys}

    def forget(self, key: int) -> None:
        """Whether it is known or not. Done for every request on its way to a step, so it touches little."""
        self.known.pop(key, None)

    def written(self, namespace: str, first_page: bytes) -> None:
        """Forget those that begin like a new child of the root."""
        for length in self._lengths:
            for key in self._keys.pop((namespace, first_page[:length]), ()):
                del self._heads[key]
                self.forget(key)

    def _drop(self, key: int) -> None:
        head = self._heads.pop(key)
        keys = self._keys[head]
        keys.remove(key)
        if not keys:
            del self._keys[head]
