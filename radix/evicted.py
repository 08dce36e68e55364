"""What leaves the pool for want of room: who is told, and the last of it, remembered to be looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from niwaki.radix.children import TOKEN_BYTES
from niwaki.radix.paths import INT32, TokenIds, path_key
from niwaki.radix.tree import Node

# Namespace, the tokens from the first one to the end of the pages, the index of the first page, the page ids.
OnEvict = Callable[[str, TokenIds, int, list[int]], None]
# Namespace, tokens, the index of a page: the name of the tier that has it.
TierOf = Callable[[str, TokenIds, int], str | None]

MAX_REMEMBERED = 64  # evictions


@dataclass(frozen=True, slots=True)
class Evicted:
    """Pages that left the pool from the end of a path. `key`: all tokens up to their end, packed."""

    namespace: str
    key: bytes
    num_before: int  # pages of the path before them
    hits: int
    stamp: int


class LastEvicted:
    """Tells `on_evict` of the full pages that are about to leave, and remembers the last of them."""

    def __init__(self, page_bytes: int, on_evict: OnEvict) -> None:
        self._page_bytes = page_bytes
        self._on_evict = on_evict
        self._last: deque[Evicted] = deque(maxlen=MAX_REMEMBERED)

    def tell(self, leaf: Node, first: int) -> None:
        """The pages of `leaf` from `first` on are about to leave."""
        num_full = len(leaf.key) // self._page_bytes
        if first < num_full:
            namespace, key = path_key(leaf)
            num_pages = len(key) // self._page_bytes
            ids = np.frombuffer(key, INT32)[: num_pages * self._page_bytes // TOKEN_BYTES]
            start = num_pages - num_full + first
            self._on_evict(namespace, ids, start, leaf.pages[first:num_full])
            self._last.append(Evicted(namespace, ids.tobytes(), start, leaf.hits, leaf.stamp))

    def in_tiers(self, namespace: str, tier_of: TierOf) -> list[tuple[Evicted, str]]:
        """Those of a namespace that a tier still has, each with its name."""
        found = []
        for one in self._last:
            if one.namespace == namespace:
                tier = tier_of(namespace, np.frombuffer(one.key, INT32), one.num_before)
                if tier is not None:
                    found.append((one, tier))
        return found

    def forget(self) -> None:
        self._last.clear()
