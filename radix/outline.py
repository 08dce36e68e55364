"""The shape of a tree for people to look at: its most recently used part, as plain data."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from niwaki.radix.children import TOKEN_BYTES
from niwaki.radix.tree import Node

SHOWN_TOKENS = 24  # of a node's tokens


@dataclass(frozen=True, slots=True)
class OutlineNode:
    """One node. `parent` is the place of its parent in the outline; -1: the root, which is not told."""

    parent: int
    token_ids: tuple[int, ...]  # the first of them
    num_tokens: int
    num_pages: int
    num_children: int  # in the tree, told or not
    num_locks: int  # requests that end in it, and children that are locked; 0: it may be evicted once it is a leaf
    is_pinned: bool
    hits: int  # lookups that went through it or ended in it
    age: int  # of all lookups and commits, how many came after its last use
    tier: str = "pool"  # where its pages are


def outline(root: Node, limit: int, now: int) -> tuple[OutlineNode, ...]:
    """At most `limit` nodes below `root`, parents before children, among siblings the one used last first.

    `now` is the logical time of the latest use of any.
    """
    found: list[OutlineNode] = []
    line = deque((-1, child) for child in _children(root))
    while line and len(found) < limit:
        parent, node = line.popleft()
        line.extend((len(found), child) for child in _children(node))
        shown = np.frombuffer(node.key[: SHOWN_TOKENS * TOKEN_BYTES], dtype=np.int32)
        found.append(
            OutlineNode(
                parent=parent,
                token_ids=tuple(shown.tolist()),
                num_tokens=len(node.key) // TOKEN_BYTES,
                num_pages=len(node.pages),
                num_children=len(node.children or ()),
                num_locks=node.protected,
                is_pinned=node.pins > 0,
                hits=node.hits,
                age=now - node.stamp,
            )
        )
    return tuple(found)


def _children(node: Node) -> list[Node]:
    return sorted((node.children or {}).values(), key=lambda child: -child.stamp)
