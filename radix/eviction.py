"""Who leaves first when pages run short. A policy gives a rank; leaves of the least rank are evicted first.

Whatever the policy, only leaves leave, so a prompt outlives the outputs below it; a pinned leaf stands behind every
unpinned one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

STAMP_BITS = 40
FIELD_BITS = 40  # of a count or a priority that goes before the stamp
MOST = 1 << FIELD_BITS + STAMP_BITS  # ranks stay below this
HIGHEST_PRIORITY = (1 << FIELD_BITS - 1) - 1


class Used(Protocol):
    """What a policy may know of a node."""

    stamp: int  # logical time of the last use, from 1
    hits: int  # how many lookups went through the node or ended in it
    priority: int  # the highest of the requests that wrote or used it


class Eviction(Protocol):
    """Gives a node's rank, from 1 to MOST - 1, when it may be evicted from now on.

    `reached`: the highest rank that has been evicted, of pinned leaves or of others; it never falls. While the node
    stands, its rank may grow, never fall.
    """

    def __call__(self, node: Used, reached: int) -> int: ...


def least_recently_used(node: Used, reached: int) -> int:
    return node.stamp


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


EVICTIONS: Mapping[str, Eviction] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "priority": lowest_priority,
}
