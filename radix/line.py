"""The line of leaves that may be evicted, the least rank first. Knows ranks; who gives them is `eviction`'s business.

Ranks mostly come in rising order: those stand in a queue. The others (parents that become leaves, pinned leaves, and
what a policy ranks otherwise than by last use) stand in buckets, each of some ranks that follow each other. A bucket is
sorted when its turn comes: entries nearly stand in order, so that each is looked at once. In one heap of them all each
step on the way to its root would look at memory that no cache holds.

Entries are not taken out when a leaf leaves or is ranked anew: they are stale where it stands at another rank. All that
are stale go when there are twice as many entries as were valid the last time.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

BUCKET_BITS = 3  # of a rank are left out in the number of its bucket
MIN_ROOM = 64  # entries


class Queued(Protocol):
    queued_rank: int  # of its valid entry, 0 if it has none


T = TypeVar("T", bound=Queued)


class Line(Generic[T]):
    """`queue` and `ranks` are the queue, `numbers` those of the buckets: to be looked at alone, for each leaf."""

    def __init__(self, most: int) -> None:
        """Ranks from `most` on are never queued: they would have all others stand behind them."""
        self.queue: deque[T] = deque()
        self.ranks: deque[int] = deque()  # beside it: a tuple each would be one more thing to look at, and cold
        self.numbers: list[int] = []  # a heap; the rank of whoever stands in a bucket is at least its number, shifted
        self.num_apart = 0  # entries that were put into buckets since the start
        self._most = most
        self._last = 0  # rank in the queue
        self._buckets: dict[int, list[tuple[int, int, T]]] = {}  # (rank, serial number, leaf): leaves have no order
        self._open = -1  # the number of the bucket that is sorted, and taken up to `_at`
        self._at = 0
        self._num_in_buckets = 0
        self._room = MIN_ROOM

    def __len__(self) -> int:
        """Entries, stale ones too."""
        return len(self.queue) + self._num_in_buckets

    def add(self, rank: int, leaf: T) -> None:
        """Put a leaf in line; an older entry of it is stale from now on."""
        if len(self.queue) + self._num_in_buckets >= self._room:
            self._tidy()
        leaf.queued_rank = rank
        if self._last <= rank < self._most:
            self._last = rank
            self.queue.append(leaf)
            self.ranks.append(rank)
        else:
            self._add_apart(rank, leaf)

    def put_back(self, rank: int, leaf: T) -> None:
        """The one that was taken last, at the rank that it had."""
        if rank <= self._last and (not self.ranks or rank <= self.ranks[0]):
            leaf.queued_rank = rank
            self.queue.appendleft(leaf)
            self.ranks.appendleft(rank)
        else:
            self._add_apart(rank, leaf)

    def _add_apart(self, rank: int, leaf: T) -> None:
        leaf.queued_rank = rank
        self.num_apart += 1
        self._num_in_buckets += 1
        number = rank >> BUCKET_BITS
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets[number] = [(rank, self.num_apart, leaf)]
            heappush(self.numbers, number)
        elif number == self._open:
            insort(bucket, (rank, self.num_apart, leaf), self._at)
        else:
            bucket.append((rank, self.num_apart, leaf))

    def take(self) -> tuple[int, T]:
        """The first entry, which may be stale. There must be one."""
        if not self.numbers:
            return self.ranks.popleft(), self.queue.popleft()
        number = self.numbers[0]
        bucket = self._buckets[number]
        if number != self._open:
            self._close()
            bucket.sort()
            self._open = number
        rank, _, leaf = bucket[self._at]
        if self.queue and self.ranks[0] < rank:
            return self.ranks.popleft(), self.queue.popleft()
        self._at += 1
        self._num_in_buckets -= 1
        if self._at == len(bucket):
            del self._buckets[number]
            heappop(self.numbers)
            self._open, self._at = -1, 0
        return rank, leaf

    def _close(self) -> None:
        """Leave the bucket that is open: one of less rank has come."""
        if self._at:
            del self._buckets[self._open][: self._at]
        self._open, self._at = -1, 0

    def _tidy(self) -> None:
        """Drop what is stale."""
        valid = [(rank, leaf) for rank, leaf in zip(self.ranks, self.queue, strict=True) if rank == leaf.queued_rank]
        self.queue.clear()  # in place: somebody may be looking at it
        self.ranks.clear()
        self.queue.extend(leaf for _, leaf in valid)
        self.ranks.extend(rank for rank, _ in valid)
        self._close()
        for number, bucket in list(self._buckets.items()):
            bucket[:] = [entry for entry in bucket if entry[0] == entry[2].queued_rank]
            if not bucket:
                del self._buckets[number]
        self.numbers[:] = sorted(self._buckets)
        self._num_in_buckets = sum(map(len, self._buckets.values()))
        self._room = max(MIN_ROOM, 2 * len(self))

    def valid(self) -> Iterator[T]:
        """Those that stand in line, for `Tree.check`."""
        for rank, leaf in zip(self.ranks, self.queue, strict=True):
            if rank == leaf.queued_rank:
                yield leaf
        for number, bucket in self._buckets.items():
            left = bucket[self._at :] if number == self._open else bucket
            yield from (leaf for rank, _, leaf in left if rank == leaf.queued_rank)

    def check(self) -> None:
        """Raises AssertionError where the order is broken."""
        assert all(a <= b for a, b in pairwise(self.ranks)), "the queue is in order"
        assert sorted(self.numbers) == sorted(self._buckets), "each bucket is known once"
        assert all(self._buckets.values()), "no empty bucket"
        assert self._num_in_buckets + self._at == sum(map(len, self._buckets.values())), "entries are counted"
        for number, bucket in self._buckets.items():
            assert all(rank >> BUCKET_BITS == number for rank, _, _ in bucket), "entries stand in their bucket"
        opened = self._buckets.get(self._open, [])[self._at :]
        assert all(a[:2] < b[:2] for a, b in pairwise(opened)), "the bucket that is open is in order"
