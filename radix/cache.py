"""The cache: who holds which page. Knows token ids and page ids; never sees a tensor.

Every page is free, in the tree, or held by one lease, and only this class moves pages between the three. `check()`
proves it. Not thread-safe: its owner is the engine loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from niwaki.radix.beginnings import Beginnings
from niwaki.radix.children import TOKEN_BYTES
from niwaki.radix.evicted import LastEvicted, OnEvict, TierOf
from niwaki.radix.eviction import EVICTIONS
from niwaki.radix.handles import CacheStats, Lease, Match, Pin, demand_open, demand_written, packed_behind
from niwaki.radix.outline import OutlineNode, outline
from niwaki.radix.pages import PageCopy, PagePool
from niwaki.radix.paths import INT32, TokenIds, pack, path_key, path_pages
from niwaki.radix.pins import Pins
from niwaki.radix.summary import summary_of
from niwaki.radix.tree import Node, Tree, common_pages


class Cache:
    """Shares the pages of equal prefixes among requests.

    Life of a request: `acquire` locks the longest cached prefix, `reserve` grows the lease, `commit` shares what has
    been computed, `release` (or `discard`) ends it. Token ids are int32 arrays of one dimension, always the whole
    sequence from its first token on.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        enabled: bool = True,
        eviction: str = "lru",
        on_evict: OnEvict | None = None,
    ) -> None:
        """A cache over pages 0 to `num_pages - 1`. With `enabled` off nothing is ever shared.

        `eviction` names the policy, one of `EVICTIONS`. `on_evict` is told the full pages that are about to leave for
        want of room, while they still hold what they hold.

        Raises:
            ValueError: `num_pages` or `page_size` is below 1, or there is no such policy.
        """
        if eviction not in EVICTIONS:
            raise ValueError(f"eviction must be one of {', '.join(EVICTIONS)}, got {eviction!r}")
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enabled = enabled
        self._pool = PagePool(num_pages)
        self._tree = Tree(page_size, EVICTIONS[eviction]())
        self._evicted = None if on_evict is None else LastEvicted(self._tree.page_bytes, on_evict)
        if self._evicted is not None:
            self._tree.on_drop = self._evicted.tell
        self._beginnings = Beginnings()
        self.remembered: Mapping[int, Match] = self._beginnings.known  # what `peek` tells without a look, by key
        self._tree.on_begin = self._beginnings.written
        self._leases: dict[Lease, None] = {}
        self._pins = Pins()
        self._clock = self._lookups = self._hits = self._evicted_pages = 0

    # -- looking ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Pages that nobody uses."""
        return self._pool.num_free

    @property
    def num_evictable(self) -> int:
        """Pages in the tree that eviction could free now; `num_free + num_evictable` is the room for new leases."""
        return self._tree.num_evictable

    def stats(self) -> CacheStats:
        return CacheStats(
            num_pages=self.num_pages,
            free_pages=self.num_free,
            tree_pages=self._tree.num_pages,
            held_pages=self.num_pages - self.num_free - self._tree.num_pages,
            evictable_pages=self.num_evictable,
            tree_tokens=self._tree.num_key_bytes // TOKEN_BYTES,
            tree_nodes=self._tree.num_nodes,
            namespaces=len(self._tree.roots),
            leases=len(self._leases),
            pins=len(self._pins),
            lookups=self._lookups,
            hits=self._hits,
            evicted_pages=self._evicted_pages,
        )

    def outline(self, limit: int, namespace: str = "", tier_of: TierOf | None = None) -> tuple[OutlineNode, ...]:
        """The shape of a namespace's tree, at most `limit` nodes of it. With `tier_of` also what lately left the pool
        for a tier that still has it."""
        root = self._tree.roots.get(namespace)
        if root is None:
            return ()
        evicted = [] if self._evicted is None or tier_of is None else self._evicted.in_tiers(namespace, tier_of)
        return outline(self._tree, root, limit, self._clock, evicted)

    def page_ids(self, ids: TokenIds, namespace: str = "") -> list[int]:
        """The ids of the full pages that are cached of the start of `ids`. Locks, touches and counts nothing: the pages
        must be read before the cache is called again."""
        root = self._tree.roots.get(namespace)
        found = None if root is None else self._tree.find(root, pack(ids), names_source=False)
        return [] if found is None else path_pages(found[0])[: found[2]]

    def summary(self, limit: int) -> list[bytes]:
        """Marks of the prefixes in the tree, at most `limit`, those used last first."""
        return summary_of(self._tree.roots.values(), limit)

    def match(self, ids: TokenIds, namespace: str = "") -> int:
        """How many tokens at the start of `ids` are cached. Locks, touches and counts nothing."""
        query = pack(ids)
        root = self._tree.roots.get(namespace)
        if root is None:
            return 0
        _, _, num_pages, _, num_tail = self._tree.find(root, query, names_source=False)
        return num_pages * self.page_size + num_tail

    def peek(self, ids: TokenIds, namespace: str = "", key: int | None = None) -> Match:
        """`match`, and how much of it is locked already.

        With a `key`, a prompt of which less than a page is cached is remembered by it until `forget(key)`, and looked
        up again when something is written that begins like it; meanwhile that head of a page may be evicted.
        """
        if key is not None and key in self.remembered:
            return self.remembered[key]
        query = pack(ids)
        match = self._peek(query, namespace)
        if key is not None and match.num_cached < min(self.page_size, len(ids)):
            self._beginnings.remember(key, match, (namespace, query[: (match.num_cached + 1) * TOKEN_BYTES]))
        return match

    def forget(self, key: int) -> None:
        """Whoever peeked with `key` does not wait any more."""
        self._beginnings.forget(key)

    def _peek(self, query: bytes, namespace: str) -> Match:
        root = self._tree.roots.get(namespace)
        if root is None:
            return Match(0, 0)
        node, in_node, num_pages, _, num_tail = self._tree.find(root, query, names_source=False)
        locked = num_pages
        while node.parent is not None and not node.protected:
            locked -= in_node
            node = node.parent
            in_node = len(node.pages)
        return Match(num_pages * self.page_size + num_tail, locked)

    def num_exclusive(self, lease: Lease) -> int:
        """How many pages would become free or evictable if `lease` ended now: those that nobody else locks."""
        demand_open(lease)
        count = len(lease.page_ids) - lease._num_shared
        node, own_locks = lease._node, 1 if lease._tail is None else 2
        while node.parent is not None and node.protected == own_locks:
            count += len(node.pages)
            node, own_locks = node.parent, 1
        return count

    # -- the life of a lease ----------------------------------------------------------------------------------------

    def acquire(
        self,
        ids: TokenIds,
        namespace: str = "",
        *,
        max_cached: int | None = None,
        room_for: int = 0,
        priority: int = 0,
    ) -> Lease | None:
        """Lock the longest cached prefix of `ids[:max_cached]`, with pages for `room_for` tokens in all.

        Where the prefix ends inside a page, its head is reused by copy on write: the lease gets a fresh page and one
        `PageCopy`, to be carried out before the cache is called again, for nothing keeps the source. Where that copy
        would not leave enough room, it is given up: `num_cached` then ends on a page boundary. None if there is no room
        for `room_for` tokens even so (never when it is 0). `priority` marks what the request uses and writes, for the
        eviction policy of that name.

        Raises:
            ValueError: `room_for` is below 0.
        """
        query = pack(ids if max_cached is None else ids[: max(0, max_cached)])
        if room_for < 0:
            raise ValueError(f"room_for must be at least 0, got {room_for}")
        tree = self._tree
        root = tree.root(namespace)
        if self.enabled:
            self._clock += 1
            node, in_node, num_shared, source, num_tail = tree.find(root, query, self._clock, priority)
            if in_node < len(node.pages):
                node = tree.split(node, in_node)  # so that the lock covers what is used and no more
            tree.use(node, self._clock, priority)
        else:
            node, source, num_shared, num_tail = root, None, 0, 0
        tree.lock(node)
        if source is not None:
            tree.lock(source)  # its page must not be one of those that make room for the copy
        num_own = max(0, -(-room_for // self.page_size) - num_shared)
        own = self._take(max(num_own, 1 if source is not None else 0))
        if own is None and source is not None:
            self._unlock(source)
            source, num_tail = None, 0
            own = self._take(num_own)
        if own is None:
            self._unlock(node)
            return None
        copies: tuple[PageCopy, ...] = ()
        if source is not None:
            copies = (PageCopy(source.pages[0], own[0], num_tail),)
            self._unlock(source)
        num_cached = num_shared * self.page_size + num_tail
        lease = Lease(path_pages(node) + own, num_cached, copies, node, num_shared, priority)
        self._leases[lease] = None
        self._lookups += 1
        self._hits += num_cached > 0
        return lease

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Grow the lease so that it has pages for `num_tokens` tokens, evicting as needed.

        False, with nothing changed, when there are not enough pages that nobody locks.
        """
        demand_open(lease)
        missing = -(-num_tokens // self.page_size) - len(lease.page_ids)
        if missing <= 0:
            return True
        more = self._take(missing)
        if more is None:
            return False
        lease.page_ids += more
        return True

    def commit(self, lease: Lease, ids: TokenIds, num_written: int, *, share_tail: bool = False) -> None:
        """The KV of `ids[:num_written]` is fully written: its full pages go into the tree, shared from now on.

        Where the tree already has an equal page, the lease switches to it and its own goes free. With `share_tail` the
        written head of the last, unfinished page is offered too (worth it at the end of a prefill, when others may be
        waiting for the same prompt): others copy it, this lease goes on writing behind it.

        Raises:
            ValueError: the lease is closed, `ids` or the lease's pages are too few for `num_written`, or `num_written`
                falls short of what is shared already.
        """
        demand_written(lease, ids, num_written, self.page_size)
        if not self.enabled:
            return
        self._clock += 1
        num_full, num_tail = divmod(num_written, self.page_size)
        offers_tail = share_tail and num_tail > 0
        if offers_tail or num_full > lease._num_shared:
            written = packed_behind(lease, ids, num_written, self.page_size)
            if num_full > lease._num_shared:
                self._share_full_pages(lease, written, num_full)
            if offers_tail:
                self._offer_tail(lease, written[-num_tail * TOKEN_BYTES :])
        lease._node.stamp = self._clock

    def release(self, lease: Lease, ids: TokenIds, num_written: int) -> None:
        """The request is over, or preempted: what it wrote goes into the tree, the partial last page included.

        Raises:
            ValueError: as `commit`.
        """
        self.commit(lease, ids, num_written, share_tail=True)
        self._close(lease)

    def discard(self, lease: Lease) -> None:
        """Abort: nothing is trusted beyond what was committed.

        Raises:
            ValueError: the lease is closed.
        """
        demand_open(lease)
        self._close(lease)

    # -- pins -------------------------------------------------------------------------------------------------------

    def pin(self, ids: TokenIds, namespace: str = "", *, until: float | None = None) -> Pin:
        """Keep the cached part of `ids` as long as anything else can be evicted instead.

        Soft: it takes no room away. Under pressure a pinned prefix shrinks from its end, and the pin with it. With
        `until`, a time of the caller's clock, the pin ends by itself at the first `expire` from then on.
        """
        tree = self._tree
        node, in_node, _, source, _ = tree.find(tree.root(namespace), pack(ids))
        if in_node < len(node.pages):
            node = tree.split(node, in_node)
        if source is not None:
            node = self._first_page_node(source)
        return self._pins.add(node, until)

    def expire(self, now: float) -> int:
        """End the pins whose time has come; returns how many. What they kept is evicted like anything else."""
        due = self._pins.due(now)
        for pin in due:
            self.unpin(pin)
        return len(due)

    def unpin(self, pin: Pin) -> None:
        """Give up a pin. Twice is an error (ValueError)."""
        node = self._pins.close(pin)
        self._tree.unpin(node)
        self._tree.drop_if_idle(node)

    def flush(self) -> bool:
        """Drop everything that is not locked, also what is pinned. True if the tree is empty now.

        It is forgotten, not evicted: `on_evict` is not told.
        """
        told, self._tree.on_drop = self._tree.on_drop, None
        self._pool.give(self._tree.evict(self.num_evictable))
        self._tree.on_drop = told
        if self._evicted is not None:
            self._evicted.forget()
        return self._tree.num_pages == 0

    def paths(self) -> Iterator[tuple[str, TokenIds, list[int]]]:
        """Every cached sequence that is not the beginning of a longer one: its namespace, its tokens and its pages."""
        for node in self._tree.nodes():
            if not node.children:
                namespace, key = path_key(node)
                yield namespace, np.frombuffer(key, INT32), path_pages(node)

    # -- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove that every page is in one place, and that the tree and the locks are what leases and pins say.

        Raises:
            AssertionError: with the reason.
        """
        locks: Counter[Node] = Counter()
        held: list[int] = []
        for lease in self._leases:
            assert lease._is_open, "only open leases are known"
            locks[lease._node] += 1
            shared = path_pages(lease._node)
            assert len(shared) == lease._num_shared, f"{len(shared)} shared pages, lease says {lease._num_shared}"
            if lease._tail is not None:
                locks[lease._tail] += 1
                assert lease._tail.parent is lease._node, "a tail stands below the pages before it"
                shared = shared + lease._tail.pages
            assert lease.page_ids[: len(shared)] == shared, "the page table starts with the shared pages"
            held += lease.page_ids[len(shared) :]
        self._tree.check(locks, self._pins.counts())
        in_tree = [page for node in self._tree.nodes() for page in node.pages]
        everywhere = [*self._pool.snapshot(), *in_tree, *held]
        assert len(everywhere) == self.num_pages, (
            f"free {self.num_free} + tree {len(in_tree)} + held {len(held)} != {self.num_pages} pages"
        )
        assert set(everywhere) == set(range(self.num_pages)), "no page is in two places"

    # -- sharing what was written -----------------------------------------------------------------------------------

    def _share_full_pages(self, lease: Lease, written: bytes, num_full: int) -> None:
        """Move the lock of `lease` down to page `num_full`: through equal pages of the tree, then through its own."""
        tree, page_bytes = self._tree, self._tree.page_bytes
        query = written[: (num_full - lease._num_shared) * page_bytes]
        node, index, pos = lease._node, lease._num_shared, 0
        duplicates: list[int] = []
        while index < num_full:
            head = query[pos : pos + page_bytes]
            child = None if node.children is None else node.children.get(head)
            if child is None:
                own_locks = int(node is lease._node)
                node = self._grow(node, head, query[pos:], lease.page_ids[index:num_full], own_locks, lease._priority)
                break
            num_same = common_pages(child.key, query, pos, page_bytes)
            duplicates += lease.page_ids[index : index + num_same]
            lease.page_ids[index : index + num_same] = child.pages[:num_same]
            node = child if num_same == len(child.pages) else tree.split(child, num_same)
            index += num_same
            pos += num_same * page_bytes
        if lease._tail is not None:
            self._withdraw(lease._tail)
            lease._tail = None
        if node is not lease._node:
            tree.move_lock(lease._node, node)
            lease._node = node
        lease._num_shared = num_full
        if duplicates:
            self._pool.give(duplicates)

    def _grow(self, node: Node, head: bytes, key: bytes, pages: list[int], own_locks: int, priority: int) -> Node:
        """Put `pages` below `node`, in place of the partial leaves that they make superfluous. Returns the last node.
        `head`: the first page of `key`.

        A leaf that nobody else locks or pins is extended instead, so that a sequence that grows stays one node.
        """
        tree, siblings = self._tree, node.children
        if siblings is not None and siblings.num_partial:
            absorbed = tree.absorbed_by(node, head)
            if any(leaf.pins for leaf in absorbed):
                # The heir of the pins is one page long, so that they keep no more than they did.
                heir = tree.attach(node, head, head, pages[:1], self._clock, priority)
                for leaf in absorbed:
                    self._pool.give(tree.detach(leaf, heir))
                if len(pages) == 1:
                    return heir
                rest = key[len(head) :]
                return tree.attach(heir, rest[: len(head)], rest, pages[1:], self._clock, priority)
            for leaf in absorbed:
                self._pool.give(tree.detach(leaf, heir=node))
        if node.parent is None or node.children or node.pins or node.protected != own_locks:
            return tree.attach(node, head, key, pages, self._clock, priority)
        tree.extend(node, key, pages)
        node.priority = max(node.priority, priority)
        return node

    def _offer_tail(self, lease: Lease, tail: bytes) -> None:
        """Put the unfinished page of `lease` into the tree as a leaf that it keeps locked, and goes on writing."""
        tree, index, offered = self._tree, lease._num_shared, lease._tail
        if offered is not None and offered.key == tail:
            return
        lease._tail = None
        known = tree.child_from(lease._node, tail)
        if known is not None:
            known.stamp = self._clock
            tree.enqueue(known)
        else:
            absorbed = tree.absorbed_by(lease._node, tail)
            page = lease.page_ids[index : index + 1]
            leaf = lease._tail = tree.attach(lease._node, tail, tail, page, self._clock, lease._priority)
            tree.lock(leaf)
            for old in absorbed:
                self._pool.give(tree.detach(old, heir=leaf))
        if offered is not None:
            self._withdraw(offered)

    def _withdraw(self, offered: Node) -> None:
        """Take an offered tail out of the tree. Its page is not dropped: by now it is accounted for elsewhere."""
        tree = self._tree
        tree.unlock(offered)
        assert offered.parent is not None
        tree.detach(offered, self._heir_of_subsumed(offered) or offered.parent)

    # -- small steps ------------------------------------------------------------------------------------------------

    def _take(self, num_pages: int) -> list[int] | None:
        """Pages from the pool, after evicting as many as it lacks; None, and nothing evicted, if there are too few."""
        missing = num_pages - self._pool.num_free
        if missing > 0:
            if missing > self.num_evictable:
                return None
            self._evict(missing)
        return self._pool.take(num_pages)

    def _evict(self, num_pages: int) -> None:
        self._pool.give(self._tree.evict(num_pages))
        self._evicted_pages += num_pages

    def _close(self, lease: Lease) -> None:
        lease._is_open = False
        del self._leases[lease]
        if lease._tail is not None:
            self._unlock(lease._tail)
        self._unlock(lease._node)
        self._pool.give(lease.page_ids[lease._num_shared + (lease._tail is not None) :])

    def _unlock(self, node: Node) -> None:
        tree = self._tree
        tree.unlock(node)
        if node.protected:
            return
        if node.parent is None:
            tree.drop_if_idle(node)
        elif len(node.key) < tree.page_bytes:
            heir = self._heir_of_subsumed(node)
            if heir is not None:
                self._pool.give(tree.detach(node, heir))

    def _heir_of_subsumed(self, leaf: Node) -> Node | None:
        """Who inherits the pins of a leaf that a sibling subsumes: of that sibling, the first page alone."""
        sibling = self._tree.subsumer(leaf)
        return self._first_page_node(sibling) if sibling is not None and leaf.pins else sibling

    def _first_page_node(self, node: Node) -> Node:
        return node if len(node.pages) == 1 else self._tree.split(node, 1)
