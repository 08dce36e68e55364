"""Random operations on the cache against a naive model that writes real "KV" into page slots.

The KV of a token is a value that depends on the whole prefix and the namespace, as it does in a model. A lease that
reads a slot which holds anything else has been given a page that is not its own, a copy that came too late, or a prefix
that was never written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from niwaki.radix import Cache, Lease, Pin, TokenIds, children
from niwaki.radix.eviction import EVICTIONS
from niwaki.radix.tree import Node


def kv_before(namespace: str) -> int:
    return hash(("kv", len(namespace), namespace == "b"))


def kv_of(namespace: str, ids: TokenIds) -> list[int]:
    """One value per token, a function of everything before it."""
    return kv_behind(kv_before(namespace), ids)


def kv_behind(value: int, ids: TokenIds) -> list[int]:
    """As `kv_of`, of tokens that go on from one of that value."""
    values = []
    for token in ids.tolist():
        value = hash((value, token))
        values.append(value)
    return values


@dataclass(eq=False)
class Request:
    namespace: str
    ids: TokenIds
    lease: Lease
    num_written: int
    values: list[int] = field(default_factory=list)


class Simulation:
    """The cache, the slots of its pages, and the requests and pins that live on it."""

    def __init__(
        self, rng: random.Random, num_pages: int, page_size: int, *, enabled: bool = True, eviction: str = "lru"
    ) -> None:
        self.rng = rng
        on_evict = self.is_told_what_leaves if rng.random() < 0.5 else None
        self.cache = Cache(num_pages, page_size, enabled=enabled, eviction=eviction, on_evict=on_evict)
        self.page_size = page_size
        self.slots: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.requests: list[Request] = []
        self.pins: list[Pin] = []
        self.now = 0  # of the clock that pins end by
        self.waiting: dict[int, tuple[TokenIds, str]] = {}  # prompts that are peeked at in every step, by key
        self.past: list[TokenIds] = [np.zeros(0, np.int32)]

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.25 or not self.requests:
            self.wait_or_not()
            self.admit()
        elif choice < 0.65:
            self.forward(self.rng.choice(self.requests))
        elif choice < 0.80:
            self.end(self.rng.choice(self.requests))
        elif choice < 0.97:
            self.pin_or_unpin()
        elif choice < 0.98:
            self.cache.flush()
        else:
            self.match_is_the_longest_path_in_the_tree()
        self.verify()

    def prompt(self) -> TokenIds:
        """Random tokens of a small alphabet, often behind a prefix that was seen before."""
        old = self.rng.choice(self.past)
        head = old[: self.rng.randint(0, len(old))]
        size = self.rng.randint(0, 3 * self.page_size)
        tail = np.array([self.rng.randint(0, 1) for _ in range(size)], np.int32)
        return np.concatenate([head, tail])[: 8 * self.page_size]

    def admit(self) -> None:
        ids, namespace = self.prompt(), self.rng.choice(["", "", "b"])
        if not len(ids):
            return
        room = self.cache.num_free + self.cache.num_evictable
        room_for = self.rng.choice([0, len(ids), len(ids) + 3])
        found = self.cache.peek(ids[:-1], namespace)
        priority = self.rng.randint(-1, 1)
        lease = self.cache.acquire(ids, namespace, max_cached=len(ids) - 1, room_for=room_for, priority=priority)
        num_full = found.num_cached // self.page_size
        takes_room = max(num_full, -(-room_for // self.page_size)) - found.num_locked_pages
        assert (lease is not None) == (takes_room <= room), "acquire fails for want of room only"
        if lease is None:
            return
        assert lease.num_cached in (found.num_cached, num_full * self.page_size)
        assert len(lease.page_ids) * self.page_size >= max(room_for, lease.num_cached)
        for copy in lease.copies:
            self.slots[copy.dst][: copy.num_tokens] = self.slots[copy.src][: copy.num_tokens]
        self.requests.append(Request(namespace, ids, lease, lease.num_cached))

    def wait_or_not(self) -> None:
        key = self.rng.randint(0, 2)
        self.cache.forget(key)
        self.waiting[key] = self.prompt(), self.rng.choice(["", "b"])

    def forward(self, request: Request) -> None:
        """One step of the engine: reserve, read all that is there, write some more, commit."""
        num_more = self.rng.randint(1, 2 * self.page_size)
        if request.num_written == len(request.ids):  # decode
            extra = np.array([self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 3))], np.int32)
            request.ids = np.concatenate([request.ids, extra])
        stop = min(len(request.ids), request.num_written + num_more)
        room = self.cache.num_free + self.cache.num_evictable
        needed = -(-stop // self.page_size) - len(request.lease.page_ids)
        before = list(request.lease.page_ids)
        done = self.cache.reserve(request.lease, stop)
        assert done == (needed <= room), "reserve fails for want of room only"
        if not done:
            assert request.lease.page_ids == before
            return
        assert request.lease.page_ids[: len(before)] == before
        request.values = kv_of(request.namespace, request.ids)
        self.reads_its_own(request, request.num_written)
        for position in range(request.num_written, stop):
            page = request.lease.page_ids[position // self.page_size]
            self.slots[page][position % self.page_size] = request.values[position]
        request.num_written = stop
        if self.rng.random() < 0.8:
            self.cache.commit(request.lease, request.ids, stop, share_tail=self.rng.random() < 0.3)

    def reads_its_own(self, request: Request, num_tokens: int) -> None:
        for position in range(num_tokens):
            page = request.lease.page_ids[position // self.page_size]
            assert self.slots[page][position % self.page_size] == request.values[position], "foreign KV"

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        room = self.cache.num_free + self.cache.num_evictable
        gain = self.cache.num_exclusive(request.lease)
        if self.rng.random() < 0.3:
            self.cache.discard(request.lease)
        else:
            self.cache.release(request.lease, request.ids, request.num_written)
            self.past.append(request.ids[: request.num_written])
            del self.past[:-30]
        assert self.cache.num_free + self.cache.num_evictable == room + gain

    def pin_or_unpin(self) -> None:
        room = self.cache.num_free + self.cache.num_evictable
        if self.pins and self.rng.random() < 0.5:
            self.cache.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))
        elif self.rng.random() < 0.1:
            self.now += 1
            due = [pin for pin in self.pins if pin._until is not None and pin._until <= self.now]
            assert self.cache.expire(self.now) == len(due)
            self.pins = [pin for pin in self.pins if pin not in due]
        else:
            until = self.rng.choice([None, self.now + self.rng.randint(1, 5)])
            self.pins.append(self.cache.pin(self.prompt(), self.rng.choice(["", "b"]), until=until))
        assert self.cache.num_free + self.cache.num_evictable == room, "pins take no room away"

    def match_is_the_longest_path_in_the_tree(self) -> None:
        query = self.prompt().tolist()
        for namespace in ("", "b", "never used"):
            longest = 0
            for node in self.cache._tree.nodes():
                keys: list[bytes] = []
                step = node
                while step.parent is not None:
                    keys.append(step.key)
                    step = step.parent
                if step is self.cache._tree.roots.get(namespace):
                    path = np.frombuffer(b"".join(reversed(keys)), np.int32).tolist()
                    same = [a == b for a, b in zip(path, query, strict=False)]
                    longest = max(longest, same.index(False) if False in same else len(same))
            assert self.cache.match(np.array(query, np.int32), namespace) == longest

    def what_is_remembered_of_prompts_holds(self) -> None:
        for key, (ids, namespace) in self.waiting.items():
            known, found = self.cache.peek(ids, namespace, key), self.cache.peek(ids, namespace)
            is_head_evicted = found.num_cached < known.num_cached < self.page_size
            assert known == found or is_head_evicted, "what begins like a prompt was written, and it was not told"

    def verify(self) -> None:
        self.cache.check()
        self.what_is_remembered_of_prompts_holds()
        for page in self.cache._pool.snapshot():
            self.slots[page] = [None] * self.page_size  # whoever still reads it is found out
        ends: dict[Node | None, int] = {root: kv_before(name) for name, root in self.cache._tree.roots.items()}
        for node in self.cache._tree.nodes():
            values = kv_behind(ends[node.parent], np.frombuffer(node.key, np.int32))
            assert self.slots_of(node.pages)[: len(values)] == values, "shared, and not what was written for it"
            ends[node] = values[-1]

    def slots_of(self, pages: Sequence[int]) -> list[int | None]:
        return [value for page in pages for value in self.slots[page]]

    def is_told_what_leaves(self, namespace: str, ids: TokenIds, first: int, page_ids: list[int]) -> None:
        assert page_ids
        assert len(ids) == (first + len(page_ids)) * self.page_size, "whole pages, to the end of the tokens"
        kept = kv_of(namespace, ids)[first * self.page_size :]
        assert self.slots_of(page_ids) == kept, "what leaves still holds what it held"

    def finish(self) -> None:
        for request in self.requests:
            self.cache.discard(request.lease)
        for pin in self.pins:
            self.cache.unpin(pin)
        for key in self.waiting:
            self.cache.forget(key)
        self.cache.check()
        assert self.cache.flush()
        self.cache.check()
        assert self.cache.num_free == self.cache.num_pages
        assert self.cache.stats().namespaces == 0, "an idle namespace leaves nothing behind"


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_pages", [3, 9, 40])
@pytest.mark.parametrize("seed", range(2))
def test_no_request_ever_reads_a_slot_that_was_not_written_for_its_prefix(
    page_size: int, num_pages: int, seed: int
) -> None:
    simulation = Simulation(random.Random(f"{page_size} {num_pages} {seed}"), num_pages, page_size)
    for _ in range(400):
        simulation.step()
    simulation.finish()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_cache_that_is_off_shares_nothing_and_leaks_nothing(page_size: int) -> None:
    simulation = Simulation(random.Random(page_size), 20, page_size, enabled=False)
    for _ in range(400):
        simulation.step()
    assert simulation.cache.stats().hits == 0
    assert simulation.cache.stats().tree_pages == 0
    simulation.finish()


def test_the_same_holds_when_children_stand_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "MAX_BLOCK", 2)
    monkeypatch.setattr(children, "FEW", 2)
    simulation = Simulation(random.Random(0), 60, 4)
    for _ in range(500):
        simulation.step()
    simulation.finish()


@pytest.mark.parametrize("eviction", [name for name in EVICTIONS if name != "lru"])
def test_the_same_holds_for_every_order_of_eviction(eviction: str) -> None:
    simulation = Simulation(random.Random(eviction), 12, 4, eviction=eviction)
    for _ in range(600):
        simulation.step()
    simulation.finish()
