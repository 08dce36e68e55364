"""The children of one node: a map from the bytes of their first page, which also knows who stands before and after.

A hit is one look into a dict. Order is needed on a miss, to find the child that shares a head with a page, and for
partial pages: so only among children that start with the same token. A few of those stand as they came, since to sort
one in is to look at keys that lie apart in memory; many are kept sorted, in blocks: in one list 100,000 children that
all begin with the token of a text's beginning would move half a megabyte for each one that comes or goes. For the same
reason it is marked which two tokens keys begin with: where no key begins so, none is looked at.

To look at memory that no cache holds takes as long as several calls. So groups stand in a list at their token's id,
where that is small: one look, where a dict by token takes three.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from itertools import pairwise
from struct import Struct
from typing import Protocol, TypeAlias, TypeVar

Group: TypeAlias = "list[bytes] | SortedKeys"  # keys that start with the same token: few as they came, many in order


class Child(Protocol):
    group: Group | None  # where its key stands; None while its siblings are few, in no groups


T = TypeVar("T", bound=Child)

TOKEN_BYTES = 4  # token ids are int32
first_token = Struct("=I").unpack_from  # as a tuple of one
FEW = 12  # children, or children with the same first token, that need no order
MAX_BLOCK = 256  # keys; a block that grows beyond it is halved
PAIR_BYTES = 2 * TOKEN_BYTES
MIN_SLOTS, MAX_SLOTS = 4, 32  # a pair of tokens: with fewer, others often stand in the same slot


class Children(dict[bytes, T]):
    """Change it by `add`, `replace` and `remove` alone: they keep the order too."""

    __slots__ = ("_listed", "_others", "_page_bytes", "num_partial", "pairs")

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        # From more than a few on, the keys by first token. Most groups are small, and stand as they came.
        self._listed: list[Group | None] = []  # by token
        self._others: dict[int, Group] = {}  # of tokens behind the list's end
        self.pairs: Pairs | None = None  # of the keys in groups; None while the children are few
        self.num_partial = 0  # keys shorter than a page

    def around(self, key: bytes) -> tuple[bytes | None, bytes | None]:
        """Of the keys with the same first token: the last before `key`, and the first at it or behind it."""
        group = self._group(key)
        if isinstance(group, SortedKeys):
            return group.around(key)
        keys = sorted(group)
        index = bisect_left(keys, key)
        return keys[index - 1] if index else None, keys[index] if index < len(keys) else None

    def nearest(self, head: bytes) -> tuple[T | None, int]:
        """The child that shares the longest head with `head`, a page or less, and how many tokens of it."""
        group = self._group(head)
        keys = [key for key in group.around(head) if key is not None] if isinstance(group, SortedKeys) else group
        if not keys:
            return None, 0
        second = head[TOKEN_BYTES:PAIR_BYTES]
        for key in keys:
            if key.startswith(second, TOKEN_BYTES):
                best = max(keys, key=lambda key: common_tokens(key, head))
                return self[best], common_tokens(best, head)
        return self[keys[-1]], 1

    def alike(self, head: bytes) -> bytes | None:
        """The key of a child that starts with the first token of `head`. Only where there are `pairs`."""
        token: int = first_token(head)[0]
        group = self._listed[token] if token < len(self._listed) else self._others.get(token)
        if group is None:
            return None
        return group[-1] if isinstance(group, list) else group.last()

    def begins(self, head: bytes) -> bool:
        """Whether a child starts with the first token of `head`. Only where there are `pairs`."""
        token: int = first_token(head)[0]
        return (self._listed[token] if token < len(self._listed) else self._others.get(token)) is not None

    def _group(self, head: bytes) -> Group:
        """The keys that start with the first token of `head`."""
        if self.pairs is None:
            token = head[:TOKEN_BYTES]
            return [key for key in self if key.startswith(token)]
        number: int = first_token(head)[0]
        return (self._listed[number] if number < len(self._listed) else self._others.get(number)) or []

    def add(self, key: bytes, node: T) -> None:
        """`key` must be new."""
        self[key] = node
        node.group = None
        if len(key) < self._page_bytes:
            self.num_partial += 1
        pairs = self.pairs
        if pairs is not None:
            token: int = first_token(key)[0]
            group = self._listed[token] if token < len(self._listed) else self._others.get(token)
            if isinstance(group, list) and len(group) < FEW:  # `_sort_in`, without a call, and what mostly happens
                node.group = group
                group.append(key)
            else:
                self._sort_in(key, node)
            if pairs.room > 0:
                pairs.marks[hash(key[:PAIR_BYTES]) & pairs.mask] = 1  # `Pairs.add`, without a call
                pairs.room -= 1
            else:
                self._mark()
        elif len(self) > FEW:
            for known, child in self.items():
                self._sort_in(known, child)
            self._mark()

    def replace(self, key: bytes, node: T) -> None:
        """Put another node at `key`, which must be there."""
        node.group = self[key].group
        self[key] = node

    def remove(self, key: bytes) -> None:
        """`key` must be there."""
        group = self.pop(key).group
        if len(key) < self._page_bytes:
            self.num_partial -= 1
        if isinstance(group, list) and len(group) > 1:
            group.remove(key)
        elif group is not None:
            self._leave(key, group)

    def _sort_in(self, key: bytes, node: T) -> None:
        token: int = first_token(key)[0]
        group = self._listed[token] if token < len(self._listed) else self._others.get(token)
        if isinstance(group, list):
            node.group = group
            group.append(key)
            if len(group) > FEW:
                self._regroup(token, SortedKeys(sorted(group)), group)
        elif group is None:
            node.group = group = [key]
            self._put(token, group)
        else:
            node.group = group
            group.add(key)

    def _leave(self, key: bytes, group: Group) -> None:
        """Take a key out of a group that may be another one then, or none."""
        token: int = first_token(key)[0]
        if isinstance(group, list):
            self._put(token, None)
            return
        group.remove(key)
        if len(group) <= FEW // 2:
            keys = group.all()
            self._regroup(token, keys, keys)

    def _regroup(self, token: int, group: Group, keys: list[bytes]) -> None:
        self._put(token, group)
        for key in keys:
            self[key].group = group

    def _put(self, token: int, group: Group | None) -> None:
        if token < len(self._listed):
            self._listed[token] = group
        elif group is not None:
            self._others[token] = group
        else:
            del self._others[token]

    def _mark(self) -> None:
        """Mark all keys anew, and list their groups: of at most as many tokens as keys may come until the next time."""
        groups = list(self._groups())
        self.pairs = Pairs(self)
        largest = max((token for token, _ in groups), default=0)
        self._listed, self._others = [None] * min(largest + 1, self.pairs.room), {}
        for token, group in groups:
            self._put(token, group)

    def _groups(self) -> Iterator[tuple[int, Group]]:
        for token, group in enumerate(self._listed):
            if group is not None:
                yield token, group
        yield from self._others.items()

    def check(self) -> None:
        """Raises AssertionError where the order is broken."""
        assert self.num_partial == sum(len(key) < self._page_bytes for key in self), "partial pages are counted"
        if self.pairs is None:
            assert len(self) <= FEW, "many children are kept in order"
            assert all(child.group is None for child in self.values()), "few stand in no groups"
            return
        assert all(token >= len(self._listed) for token in self._others), "small tokens stand in the list"
        groups = {token: group.all() if isinstance(group, SortedKeys) else group for token, group in self._groups()}
        assert sorted(key for group in groups.values() for key in group) == sorted(self), (
            "the order knows all keys, and no others"
        )
        for token, keys in groups.items():
            assert keys, "no empty group"
            assert all(first_token(key) == (token,) for key in keys), "keys stand with their first token"
        for token, group in self._groups():
            if isinstance(group, SortedKeys):
                group.check()
            assert all(self[key].group is group for key in groups[token]), "a child knows its group"
        assert all(self.pairs.may_have(key) for key in self), "pairs are known"


def common_tokens(a: bytes, b: bytes) -> int:
    """How many tokens at the start of `a` and `b` are equal; meant for a page or less."""
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size * 8 - difference.bit_length()) // (8 * TOKEN_BYTES)


class Pairs:
    """Which two tokens keys begin with, by hash: that none does is sure. Those of keys that went are not forgotten."""

    __slots__ = ("marks", "mask", "room")

    def __init__(self, keys: Collection[bytes]) -> None:
        num_slots = 1 << (MAX_SLOTS * len(keys)).bit_length() - 1
        self.mask = num_slots - 1
        self.marks = bytearray(num_slots)
        self.room = num_slots // MIN_SLOTS  # how many may be added; after that a new one should be made
        for key in keys:
            self.add(key)

    def may_have(self, head: bytes) -> bool:
        return self.marks[hash(head[:PAIR_BYTES]) & self.mask] > 0

    def add(self, key: bytes) -> None:
        self.marks[hash(key[:PAIR_BYTES]) & self.mask] = 1
        self.room -= 1


class SortedKeys:
    """Many keys in order, in blocks."""

    __slots__ = ("_blocks", "_firsts", "_num_keys")

    def __init__(self, keys: list[bytes]) -> None:
        self._blocks = [keys]
        self._firsts = [b""]  # a lower bound of each block's keys, above all keys of the block before
        self._num_keys = len(keys)

    def __len__(self) -> int:
        return self._num_keys

    def all(self) -> list[bytes]:
        return [key for block in self._blocks for key in block]

    def last(self) -> bytes:
        return self._blocks[-1][-1]

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
        self._num_keys += 1
        if len(keys) > MAX_BLOCK:
            half = len(keys) // 2
            self._firsts.insert(block + 1, keys[half])
            self._blocks.insert(block + 1, keys[half:])
            del keys[half:]

    def remove(self, key: bytes) -> None:
        block, index = self._position(key)
        keys = self._blocks[block]
        assert keys[index] == key
        del keys[index]
        self._num_keys -= 1
        if not keys:
            del self._blocks[block], self._firsts[block]
            self._firsts[0] = b""

    def _position(self, key: bytes) -> tuple[int, int]:
        """Block and index of `key`, or where it would have to stand."""
        block = bisect_right(self._firsts, key) - 1 if len(self._firsts) > 1 else 0
        return block, bisect_left(self._blocks[block], key)

    def check(self) -> None:
        assert len(self._firsts) == len(self._blocks), "a bound for each block"
        assert self._firsts[0] == b"", "the first block has no lower bound"
        assert all(self._blocks), "no empty block"
        assert self._num_keys == sum(map(len, self._blocks)), "keys are counted"
        assert all(a < b for a, b in pairwise(self.all())), "keys sorted, all different"
        for low, block in zip(self._firsts, self._blocks, strict=True):
            assert all(low <= key for key in block), "a block's keys are not below its bound"
        for block, high in zip(self._blocks, self._firsts[1:], strict=False):
            assert all(key < high for key in block), "a block's keys are below the next bound"
