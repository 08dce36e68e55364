"""Who leaves first when pages run short. A policy gives a rank; leaves of the least rank are evicted first.

Whatever the policy, only leaves leave, so a prompt outlives the outputs below it; a pinned leaf stands behind every
unpinned one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

STAMP_BITS = 40
FIELD_BITS = 40  # of a count or a priority that goes before the stamp
MOST = 1 << FIELD_BITS + STAMP_BITS  # ranks stay below this
SPARED = 6  # 2 to 10 find about as much behind pauses of agents; of mixed traffic, less than 4 loses some to plain LRU
HIGHEST_PRIORITY = (1 << FIELD_BITS - 1) - 1


class Used(Protocol):
    """What a policy may know of a node."""

    stamp: int  # logical time of the last use, from 1
    hits: int  # how many lookups went through the node or ended in it
    priority: int  # the highest of the requests that wrote or used it


class Eviction(Protocol):
    """Gives a node's rank, from 1 to MOST - 1, when it may be evicted from now on.

    `reached`: the highest rank that has been evicted, of pinned leaves or of others; it never falls. While the node
    stands, its rank may change, where it is put in line again.
    """

    def __call__(self, node: Used, reached: int) -> int: ...


@runtime_checkable
class Learning(Eviction, Protocol):
    """An eviction that is told of what comes back."""

    def returned(self, away: int) -> None:
        """A lookup found what was used last so long before, in logical time."""


def least_recently_used(node: Used, reached: int) -> int:
    return node.stamp


class Returning:
    """Least recently used first, as long as the pool keeps texts for longer than they stay away.

    Where it does not, whoever comes back in turn finds that he has just been evicted, and so does the next one. So then
    what was never asked for again makes way for what was: some find all of their text, the others nothing. How long
    texts stay away is learned from those that come back; how old that is which is evicted now says how long the pool
    keeps them. The less it is longer, the nearer to the head of the line stands who has never come back.
    (To insert near where the next one leaves: Qureshi et al., Adaptive Insertion Policies for High Performance Caching,
    2007.)
    """

    def __init__(self) -> None:
        self._away = 1.0  # for how long: some nine in ten of those that came back of late were quicker

    def returned(self, away: int) -> None:
        if away > self._away:
            self._away = min(away, self._away * 1.09)
        else:
            self._away = max(away, self._away * 0.99)

    def __call__(self, node: Used, reached: int) -> int:
        kept = node.stamp - reached
        rank = max(1, kept // 32, SPARED * int(kept - self._away))
        return node.stamp if node.hits or rank >= kept else reached + rank


def least_frequently_used(node: Used, reached: int) -> int:
    """Fewest uses first, the least recent among them, where uses count from what eviction has reached: else what was
    asked for often, once, would keep its place for ever, and nothing new would be there when it is asked for again.
    (Least frequently used with dynamic ageing: Arlitt et al., Evaluating Content Management Techniques for Web Proxy
    Caches, 1999.)"""
    count = (reached >> STAMP_BITS) + node.hits + 1
    return (min(count, (1 << FIELD_BITS) - 1) << STAMP_BITS) + node.stamp


def lowest_priority(node: Used, reached: int) -> int:
    """What only low priorities used goes first, the least recent among it."""
    bounded = max(-HIGHEST_PRIORITY, min(HIGHEST_PRIORITY, node.priority))
    return (bounded + HIGHEST_PRIORITY << STAMP_BITS) + node.stamp


EVICTIONS: Mapping[str, Callable[[], Eviction]] = {
    "lru": lambda: least_recently_used,
    "returning": Returning,
    "lfu": lambda: least_frequently_used,
    "priority": lambda: lowest_priority,
}
