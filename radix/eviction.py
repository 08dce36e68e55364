"""Who leaves first when pages run short. A policy gives a rank; leaves of the least rank are evicted first.

Whatever the policy, only leaves leave, so a prompt outlives the outputs below it; a pinned leaf stands behind every
unpinned one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

MOST = 1 << 60  # ranks stay below this
FIELD_BITS = 20  # of a count or a priority that goes before the stamp
STAMP_BITS = 60 - FIELD_BITS
HIGHEST_PRIORITY = (1 << FIELD_BITS - 1) - 1


class Used(Protocol):
    """What a policy may know of a node."""

    stamp: int  # logical time of the last use, from 1
    hits: int  # how many lookups went through the node or ended in it
    priority: int  # the highest of the requests that wrote or used it


class Eviction(Protocol):
    """Gives a node's rank, from 1 to MOST - 1. While the node stands, its rank may grow, never fall."""

    def __call__(self, node: Used) -> int: ...


def least_recently_used(node: Used) -> int:
    return node.stamp


def least_frequently_used(node: Used) -> int:
    """Fewest hits first, the least recent among them. Counts end at a million, where recency decides alone."""
    return (min(node.hits, (1 << FIELD_BITS) - 1) << STAMP_BITS) + node.stamp


def lowest_priority(node: Used) -> int:
    """What only low priorities used goes first, the least recent among it."""
    bounded = max(-HIGHEST_PRIORITY, min(HIGHEST_PRIORITY, node.priority))
    return (bounded + HIGHEST_PRIORITY << STAMP_BITS) + node.stamp


EVICTIONS: Mapping[str, Eviction] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "priority": lowest_priority,
}
