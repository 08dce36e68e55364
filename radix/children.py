"""The children of one node, sorted by the bytes of their first page. Knows keys and nodes; changes no node.

In blocks: in one list, a root with 100,000 children would move half a megabyte for each child that comes or goes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_BLOCK = 512  # keys; a block that grows beyond it is halved


class Children(Generic[T]):
    """A sorted map from keys to nodes that also answers who stands before and after a key."""

    __slots__ = ("_firsts", "_keys", "_nodes")

    def __init__(self) -> None:
        # Parallel lists of blocks. Only the very last block to remain may be empty.
        self._firsts: list[bytes] = [b""]  # a lower bound of each block's keys, above all keys of the block before
        self._keys: list[list[bytes]] = [[]]
        self._nodes: list[list[T]] = [[]]

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def __bool__(self) -> bool:
        return bool(self._keys[0])

    def __iter__(self) -> Iterator[T]:
        for nodes in self._nodes:
            yield from nodes

    def items(self) -> Iterator[tuple[bytes, T]]:
        for keys, nodes in zip(self._keys, self._nodes, strict=True):
            yield from zip(keys, nodes, strict=True)

    def get(self, key: bytes) -> T | None:
        """The node of exactly `key`."""
        block = bisect_right(self._firsts, key) - 1 if len(self._firsts) > 1 else 0
        keys = self._keys[block]
        index = bisect_left(keys, key)
        if index < len(keys) and keys[index] == key:
            return self._nodes[block][index]
        return None

    def around(self, key: bytes) -> tuple[tuple[bytes, T] | None, tuple[bytes, T] | None]:
        """The last entry before `key`, and the first at it or behind it."""
        block, index = self._position(key)
        keys = self._keys[block]
        if 0 < index < len(keys):
            nodes = self._nodes[block]
            return (keys[index - 1], nodes[index - 1]), (keys[index], nodes[index])
        return self.before(key), self.after(key)

    def after(self, key: bytes) -> tuple[bytes, T] | None:
        """The first entry at `key` or behind it."""
        block, index = self._position(key)
        if index == len(self._keys[block]):
            block, index = block + 1, 0
            if block == len(self._keys):
                return None
        return self._keys[block][index], self._nodes[block][index]

    def before(self, key: bytes) -> tuple[bytes, T] | None:
        """The last entry before `key`."""
        block, index = self._position(key)
        if index == 0:
            if block == 0:
                return None
            block -= 1
            index = len(self._keys[block])
        return self._keys[block][index - 1], self._nodes[block][index - 1]

    def add(self, key: bytes, node: T) -> None:
        """`key` must be new."""
        block, index = self._position(key)
        keys, nodes = self._keys[block], self._nodes[block]
        keys.insert(index, key)
        nodes.insert(index, node)
        if len(keys) > MAX_BLOCK:
            half = len(keys) // 2
            self._firsts.insert(block + 1, keys[half])
            self._keys.insert(block + 1, keys[half:])
            self._nodes.insert(block + 1, nodes[half:])
            del keys[half:], nodes[half:]

    def replace(self, key: bytes, node: T) -> None:
        """Put another node at `key`, which must be there."""
        block, index = self._position(key)
        assert self._keys[block][index] == key
        self._nodes[block][index] = node

    def remove(self, key: bytes) -> None:
        """`key` must be there."""
        block, index = self._position(key)
        keys = self._keys[block]
        assert keys[index] == key
        del keys[index], self._nodes[block][index]
        if not keys and len(self._keys) > 1:
            del self._keys[block], self._nodes[block], self._firsts[block]
            self._firsts[0] = b""

    def _position(self, key: bytes) -> tuple[int, int]:
        """Block and index of `key`, or where it would have to stand."""
        block = bisect_right(self._firsts, key) - 1 if len(self._firsts) > 1 else 0
        return block, bisect_left(self._keys[block], key)

    def check(self) -> None:
        """Raises AssertionError where the order is broken."""
        assert len(self._firsts) == len(self._keys) == len(self._nodes), "parallel lists of blocks"
        assert self._firsts[0] == b"", "the first block has no lower bound"
        assert all(self._keys) or len(self._keys) == 1, "no empty block among others"
        keys = [key for key, _ in self.items()]
        assert all(a < b for a, b in pairwise(keys)), "child keys sorted, all different"
        for low, block in zip(self._firsts, self._keys, strict=True):
            assert all(low <= key for key in block), "a block's keys are not below its bound"
        for block, high in zip(self._keys, self._firsts[1:], strict=False):
            assert all(key < high for key in block), "a block's keys are below the next bound"
