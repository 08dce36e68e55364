"""The children of one node: a map from the bytes of their first page, which also knows who stands before and after.

A hit is one look into a dict. Order is needed on a miss alone, to find the child that shares a head with a page: few
children are looked through; many are kept sorted, in blocks, for in one list a root with 100,000 children would move
half a megabyte for each child that comes or goes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

FEW = 12  # children that need no order
MAX_BLOCK = 256  # keys; a block that grows beyond it is halved


class Children(dict[bytes, T]):
    """Change it by `add`, `replace` and `remove` alone: they keep the order too."""

    __slots__ = ("_blocks", "_firsts")

    _blocks: list[list[bytes]]  # sorted keys; empty while the children are few
    _firsts: list[bytes]  # a lower bound of each block's keys, above all keys of the block before

    def __init__(self) -> None:
        super().__init__()
        self._blocks = []
        self._firsts = []

    def around(self, key: bytes) -> tuple[bytes | None, bytes | None]:
        """The last key before `key`, and the first at it or behind it."""
        if not self._blocks:
            return max((k for k in self if k < key), default=None), min((k for k in self if k >= key), default=None)
        block, index = self._position(key)
        keys = self._blocks[block]
        if 0 < index < len(keys):
            return keys[index - 1], keys[index]
        before = keys[index - 1] if index else self._blocks[block - 1][-1] if block else None
        if index < len(keys):
            return before, keys[index]
        return before, self._blocks[block + 1][0] if block + 1 < len(self._blocks) else None

    def after(self, key: bytes) -> bytes | None:
        """The first key at `key` or behind it."""
        return self.around(key)[1]

    def before(self, key: bytes) -> bytes | None:
        """The last key before `key`."""
        return self.around(key)[0]

    def add(self, key: bytes, node: T) -> None:
        """`key` must be new."""
        self[key] = node
        if not self._blocks:
            if len(self) > FEW:
                self._blocks, self._firsts = [sorted(self)], [b""]
            return
        block, index = self._position(key)
        keys = self._blocks[block]
        keys.insert(index, key)
        if len(keys) > MAX_BLOCK:
            half = len(keys) // 2
            self._firsts.insert(block + 1, keys[half])
            self._blocks.insert(block + 1, keys[half:])
            del keys[half:]

    def replace(self, key: bytes, node: T) -> None:
        """Put another node at `key`, which must be there."""
        assert key in self
        self[key] = node

    def remove(self, key: bytes) -> None:
        """`key` must be there."""
        del self[key]
        if not self._blocks:
            return
        block, index = self._position(key)
        keys = self._blocks[block]
        assert keys[index] == key
        del keys[index]
        if not keys:
            del self._blocks[block], self._firsts[block]
            if self._firsts:
                self._firsts[0] = b""

    def _position(self, key: bytes) -> tuple[int, int]:
        """Block and index of `key`, or where it would have to stand."""
        block = bisect_right(self._firsts, key) - 1
        return block, bisect_left(self._blocks[block], key)

    def check(self) -> None:
        """Raises AssertionError where the order is broken."""
        assert len(self._firsts) == len(self._blocks), "a bound for each block"
        if not self._blocks:
            assert len(self) <= FEW, "many children are kept in order"
            return
        assert self._firsts[0] == b"", "the first block has no lower bound"
        assert all(self._blocks), "no empty block"
        keys = [key for block in self._blocks for key in block]
        assert all(a < b for a, b in pairwise(keys)), "child keys sorted, all different"
        assert set(keys) == set(self), "the order knows all keys, and no others"
        for low, block in zip(self._firsts, self._blocks, strict=True):
            assert all(low <= key for key in block), "a block's keys are not below its bound"
        for block, high in zip(self._blocks, self._firsts[1:], strict=False):
            assert all(key < high for key in block), "a block's keys are below the next bound"
