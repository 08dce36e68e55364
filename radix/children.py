"""The children of one node: a map from the bytes of their first page, which also knows who stands before and after.

A hit is one look into a dict. Order is needed on a miss, to find the child that shares a head with a page, and for
partial pages: so only among children that start with the same token. Few children are looked through; many are kept
sorted, apart for each first token, in blocks: in one list 100,000 children that all begin with the token of a text's
beginning would move half a megabyte for each one that comes or goes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

TOKEN_BYTES = 4  # token ids are int32
FEW = 12  # children that need no order
MAX_BLOCK = 256  # keys; a block that grows beyond it is halved


class Children(dict[bytes, T]):
    """Change it by `add`, `replace` and `remove` alone: they keep the order too."""

    __slots__ = ("_groups", "_page_bytes", "num_partial")

    def __init__(self, page_bytes: int) -> None:
        super().__init__()
        self._page_bytes = page_bytes
        self._groups: dict[bytes, SortedKeys] = {}  # by first token; empty while the children are few
        self.num_partial = 0  # keys shorter than a page

    def around(self, key: bytes) -> tuple[bytes | None, bytes | None]:
        """Of the keys with the same first token: the last before `key`, and the first at it or behind it."""
        token = key[:TOKEN_BYTES]
        if self._groups:
            group = self._groups.get(token)
            return (None, None) if group is None else group.around(key)
        keys = [other for other in self if other.startswith(token)]
        return max((k for k in keys if k < key), default=None), min((k for k in keys if k >= key), default=None)

    def add(self, key: bytes, node: T) -> None:
        """`key` must be new."""
        self[key] = node
        self.num_partial += len(key) < self._page_bytes
        if self._groups:
            self._sort_in(key)
        elif len(self) > FEW:
            for known in self:
                self._sort_in(known)

    def replace(self, key: bytes, node: T) -> None:
        """Put another node at `key`, which must be there."""
        assert key in self
        self[key] = node

    def remove(self, key: bytes) -> None:
        """`key` must be there."""
        del self[key]
        self.num_partial -= len(key) < self._page_bytes
        if self._groups:
            token = key[:TOKEN_BYTES]
            if self._groups[token].remove(key):
                del self._groups[token]

    def _sort_in(self, key: bytes) -> None:
        token = key[:TOKEN_BYTES]
        group = self._groups.get(token)
        if group is None:
            self._groups[token] = SortedKeys(key)
        else:
            group.add(key)

    def check(self) -> None:
        """Raises AssertionError where the order is broken."""
        assert self.num_partial == sum(len(key) < self._page_bytes for key in self), "partial pages are counted"
        if not self._groups:
            assert len(self) <= FEW, "many children are kept in order"
            return
        assert sorted(key for group in self._groups.values() for key in group.all()) == sorted(self), (
            "the order knows all keys, and no others"
        )
        for token, group in self._groups.items():
            assert all(key[:TOKEN_BYTES] == token for key in group.all()), "keys stand with their first token"
            group.check()


class SortedKeys:
    """Keys in order, at least one, in blocks."""

    __slots__ = ("_blocks", "_firsts")

    def __init__(self, key: bytes) -> None:
        self._blocks = [[key]]
        self._firsts = [b""]  # a lower bound of each block's keys, above all keys of the block before

    def all(self) -> list[bytes]:
        return [key for block in self._blocks for key in block]

    def around(self, key: bytes) -> tuple[bytes | None, bytes | None]:
        """The last key before `key`, and the first at it or behind it."""
        block, index = self._position(key)
        keys = self._blocks[block]
        before = keys[index - 1] if index else self._blocks[block - 1][-1] if block else None
        if index < len(keys):
            return before, keys[index]
        return before, self._blocks[block + 1][0] if block + 1 < len(self._blocks) else None

    def add(self, key: bytes) -> None:
        block, index = self._position(key)
        keys = self._blocks[block]
        keys.insert(index, key)
        if len(keys) > MAX_BLOCK:
            half = len(keys) // 2
            self._firsts.insert(block + 1, keys[half])
            self._blocks.insert(block + 1, keys[half:])
            del keys[half:]

    def remove(self, key: bytes) -> bool:
        """Whether no key is left."""
        block, index = self._position(key)
        keys = self._blocks[block]
        assert keys[index] == key
        del keys[index]
        if not keys:
            del self._blocks[block], self._firsts[block]
            if self._firsts:
                self._firsts[0] = b""
        return not self._blocks

    def _position(self, key: bytes) -> tuple[int, int]:
        """Block and index of `key`, or where it would have to stand."""
        block = bisect_right(self._firsts, key) - 1 if len(self._firsts) > 1 else 0
        return block, bisect_left(self._blocks[block], key)

    def check(self) -> None:
        assert len(self._firsts) == len(self._blocks), "a bound for each block"
        assert self._firsts[0] == b"", "the first block has no lower bound"
        assert all(self._blocks), "no empty block"
        assert all(a < b for a, b in pairwise(self.all())), "child keys sorted, all different"
        for low, block in zip(self._firsts, self._blocks, strict=True):
            assert all(low <= key for key in block), "a block's keys are not below its bound"
        for block, high in zip(self._blocks, self._firsts[1:], strict=False):
            assert all(key < high for key in block), "a block's keys are below the next bound"
