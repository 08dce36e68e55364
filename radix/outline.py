"""The shape of a tree for people to look at: its most recently used part, and what lately left it, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from niwaki.radix.children import TOKEN_BYTES
from niwaki.radix.evicted import Evicted
from niwaki.radix.tree import Node, Tree

SHOWN_TOKENS = 24  # of a node's tokens


@dataclass(frozen=True, slots=True)
class OutlineNode:
    """One node. `parent` is the place of its parent in the outline; -1: the root, which is not told."""

    parent: int
    token_ids: tuple[int, ...]  # the first of them
    num_tokens: int
    num_pages: int
    num_children: int  # told or not
    num_locks: int  # requests that end in it, and children that are locked; 0: it may be evicted once it is a leaf
    is_pinned: bool
    hits: int  # lookups that went through it or ended in it
    age: int  # of all lookups and commits, how many came after its last use
    tier: str = "pool"  # where its pages are


def outline(
    tree: Tree, root: Node, limit: int, now: int, evicted: Iterable[tuple[Evicted, str]] = ()
) -> tuple[OutlineNode, ...]:
    """The `limit` nodes below `root` that were used last, parents before children, the one used last first.

    `now` is the logical time of the latest use of any. Behind the nodes of the tree stand `evicted` pages that are not
    back in it, each with the name of the tier that has them.
    """
    found, places = _last_used(root, limit, now)
    ends: dict[bytes, int] = {}  # the places of evicted pages by their key: others may have stood behind them
    for one, tier in sorted(evicted, key=lambda pair: len(pair[0].key)):
        start = one.num_before * tree.page_bytes
        node, _, num_before, _, _ = tree.find(root, one.key)
        parent = ends.get(one.key[:start], places.get(node) if num_before == one.num_before else None)
        if parent is None or one.key in ends or len(found) >= limit:
            continue  # it is back, or what it continues is not told, or it left twice
        ends[one.key] = len(found)
        if parent >= 0:
            found[parent] = replace(found[parent], num_children=found[parent].num_children + 1)
        found.append(
            OutlineNode(
                parent=parent,
                token_ids=_shown(one.key[start:]),
                num_tokens=(len(one.key) - start) // TOKEN_BYTES,
                num_pages=len(one.key) // tree.page_bytes - one.num_before,
                num_children=0,
                num_locks=0,
                is_pinned=False,
                hits=one.hits,
                age=now - one.stamp,
                tier=tier,
            )
        )
    return tuple(found)


def _last_used(root: Node, limit: int, now: int) -> tuple[list[OutlineNode], dict[Node, int]]:
    """Nodes of the tree, and the place of each; that of the root is -1."""
    found: list[OutlineNode] = []
    places: dict[Node, int] = {root: -1}
    line: list[tuple[int, int, Node]] = []  # nodes whose parents are told, behind -stamp and a number for each
    numbers = count()

    def queue_children(of: Node) -> None:
        for child in (of.children or {}).values():
            heappush(line, (-child.stamp, next(numbers), child))

    queue_children(root)
    while line and len(found) < limit:
        node = heappop(line)[2]
        queue_children(node)
        assert node.parent is not None
        places[node] = len(found)
        found.append(
            OutlineNode(
                parent=places[node.parent],
                token_ids=_shown(node.key),
                num_tokens=len(node.key) // TOKEN_BYTES,
                num_pages=len(node.pages),
                num_children=len(node.children or ()),
                num_locks=node.protected,
                is_pinned=node.pins > 0,
                hits=node.hits,
                age=now - node.stamp,
            )
        )
    return found, places


def _shown(key: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(key[: SHOWN_TOKENS * TOKEN_BYTES], dtype=np.int32).tolist())
