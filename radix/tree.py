"""The radix tree: which page holds the KV of which tokens after which prefix. Knows packed token ids and page ids.

Nodes are page-aligned: a node holds whole pages, but for partial leaves, which are one unfinished page. The children
of a node are mapped, and ordered, by the bytes of their first page, so that a search finds the exact child, or the two
neighbours, one of which shares the longest head with the page looked for. Tokens are compared as bytes, 4 to a token in
memory order: a common head of bytes, rounded down to whole tokens, is the common head of tokens.

The tree moves no pages: what it drops it returns, and `cache.Cache` gives it back to the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from niwaki.radix.children import PAIR_BYTES, TOKEN_BYTES, Children, Group, common_tokens
from niwaki.radix.eviction import MOST, Eviction, Learning, least_recently_used
from niwaki.radix.line import BUCKET_BITS, Line

NO_PAGES: list[int] = []  # of nodes that have left, which nothing is added to


class Node:
    """A run of pages. `len(key)` is that of its tokens in bytes; a root has neither key, pages nor parent."""

    __slots__ = (
        "children",
        "group",
        "head",
        "hits",
        "key",
        "moved_to",
        "pages",
        "parent",
        "pins",
        "priority",
        "protected",
        "queued_rank",
        "stamp",
    )

    def __init__(self, key: bytes, head: bytes, pages: list[int], parent: Node | None, stamp: int) -> None:
        self.key = key
        self.head = head  # its first page: the same object as in the parent's map, where equal ones would be compared
        self.pages = pages
        self.parent = parent
        # Logical time of the last use. A parent's may be older than its children's: it cannot leave before them.
        self.stamp = stamp
        self.hits = 0  # lookups that went through it or ended in it
        self.priority = 0  # the highest of the requests that wrote or used it
        self.children: Children[Node] | None = None  # by first page; None rather than empty
        self.group: Group | None = None  # of `head`, in the parent's children
        self.protected = 0  # own hard locks + protected children; 0: may be evicted once it is a leaf
        self.pins = 0  # soft: evicted only when nothing else is left
        self.queued_rank = 0  # of its valid entry in the eviction line, 0 if it has none
        self.moved_to: Node | None = None  # set when the node left the tree: who inherited its pins


class Root(Node):
    """The top of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(b"", b"", [], None, 0)
        self.namespace = namespace


# How far a query of tokens is in the tree: node, num_node_pages, num_pages, source, num_tail_tokens.
#
# `node` is the deepest node of which `num_node_pages` >= 1 full pages matched (or the root); `num_pages` full pages
# matched in all; then `num_tail_tokens` more tokens match the head of a page of `source`: of page `num_node_pages`
# where that is `node` itself, of the first one where it is a child of it. A plain tuple: to make an object of a class
# costs as much as the rest of a short search.
Found = tuple[Node, int, int, Node | None, int]


class Tree:
    """The nodes of all namespaces, their locks and pins, and the order in which leaves are evicted."""

    def __init__(self, page_size: int, eviction: Eviction = least_recently_used) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.eviction = eviction
        self.roots: dict[str, Root] = {}
        self.num_pages = 0
        self.num_protected_pages = 0  # pages of nodes with protected > 0
        self.num_nodes = 0  # roots not counted
        self.num_key_bytes = 0
        self._line: Line[Node] = Line(MOST)  # who may be evicted
        self._reached = 0  # the highest rank that was evicted; what a pin adds to a leaf's rank is not counted
        # Called before `evict` drops the last pages of a leaf: the leaf, and how many pages it keeps.
        self.on_drop: Callable[[Node, int], None] | None = None
        # Called when a lookup ends in a node: how long ago, in logical time, that node was used before.
        self.on_return = eviction.returned if isinstance(eviction, Learning) else None
        # Called for each new child of a root: the namespace and the child's first page.
        self.on_begin: Callable[[str, bytes], None] | None = None

    # -- looking up -------------------------------------------------------------------------------------------------

    def find(self, root: Node, query: bytes, stamp: int = 0, priority: int = 0, *, names_source: bool = True) -> Found:
        """The longest prefix of `query` in the tree.

        With a `stamp`, what stands above the node that it ends in counts as used then, by a request of that `priority`;
        that node is the caller's to `use`. `names_source` off: the source may be left out, which saves looking for it.
        """
        page_bytes = self.page_bytes
        node, pos = root, 0
        while True:
            head = query[pos : pos + page_bytes]
            children = node.children
            if children is None or not head:
                return node, len(node.pages), pos // page_bytes, None, 0
            pairs = children.pairs
            if pairs is not None and not pairs.marks[hash(head[:PAIR_BYTES]) & pairs.mask]:
                # No child begins with these two tokens, as is usual where nothing is cached: at most one token
                # matches, and the page need not be looked up.
                if not names_source:
                    return node, len(node.pages), pos // page_bytes, None, 1 if children.begins(head) else 0
                key = children.alike(head)
                if key is None:
                    return node, len(node.pages), pos // page_bytes, None, 0
                return node, len(node.pages), pos // page_bytes, children[key], 1
            child = children.get(head)
            if child is None or len(head) < page_bytes:
                source, num_tail = children.nearest(head)
                return node, len(node.pages), pos // page_bytes, source, num_tail
            if stamp:
                node.stamp = stamp
                node.hits += 1
                if node.priority < priority:
                    node.priority = priority
            key = child.key
            if query.startswith(key, pos):
                node = child
                pos += len(key)
                continue
            # The query ends or parts inside `child`, after its first page at the earliest.
            num_same = common_pages(key, query, pos, page_bytes)
            at = num_same * page_bytes
            num_tail = common_tokens(key[at : at + page_bytes], query[pos + at : pos + at + page_bytes])
            return child, num_same, pos // page_bytes + num_same, child if num_tail else None, num_tail

    def use(self, node: Node, stamp: int, priority: int) -> None:
        """A lookup of a request of that `priority` ended in `node`."""
        if self.on_return is not None and node.parent is not None:
            self.on_return(stamp - node.stamp)
        node.stamp = stamp
        node.hits += 1
        if node.priority < priority:
            node.priority = priority

    def child_from(self, node: Node, head: bytes) -> Node | None:
        """A child of `node` that starts with `head`, a page or less."""
        if node.children is None:
            return None
        key = node.children.around(head)[1]
        return node.children[key] if key is not None and key.startswith(head) else None

    # -- changing the shape -----------------------------------------------------------------------------------------

    def root(self, namespace: str) -> Root:
        """The root of a namespace, made on first use; `drop_if_idle` takes it away."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        return root

    def drop_if_idle(self, node: Node) -> None:
        """Forget a root that holds nothing: tenants come and go, and must leave nothing behind."""
        if isinstance(node, Root) and not node.children and not node.protected and not node.pins:
            self.roots.pop(node.namespace, None)

    def split(self, node: Node, num_pages: int) -> Node:
        """Make the first `num_pages` pages of `node` a node of their own, and return it.

        The lower part stays the same object, so that locks and pins on it hold on without being told.
        """
        parent = node.parent
        assert parent is not None
        assert 0 < num_pages < len(node.pages)
        at = num_pages * self.page_bytes
        upper = Node(node.key[:at], node.head, node.pages[:num_pages], parent, node.stamp)
        upper.hits, upper.priority = node.hits, node.priority
        upper.protected = 1 if node.protected else 0
        assert parent.children is not None
        parent.children.replace(node.head, upper)
        node.head = node.key[at : at + self.page_bytes]
        upper.children = Children(self.page_bytes)
        upper.children.add(node.head, node)
        node.key = node.key[at:]
        node.pages = node.pages[num_pages:]
        node.parent = upper
        self.num_nodes += 1
        return upper

    def attach(self, parent: Node, head: bytes, key: bytes, pages: list[int], stamp: int, priority: int) -> Node:
        """Add a leaf, to be locked or given a child next. No child of `parent` may start with `head`, the first page of
        `key`."""
        node = Node(key, head, pages, parent, stamp)
        node.priority = priority
        if parent.children is None:
            parent.children = Children(self.page_bytes)
        parent.children.add(head, node)
        if self.on_begin is not None and isinstance(parent, Root):
            self.on_begin(parent.namespace, head)
        self.num_nodes += 1
        self.num_pages += len(pages)
        self.num_key_bytes += len(key)
        return node

    def extend(self, leaf: Node, key: bytes, pages: list[int]) -> None:
        """Add pages at the end of a leaf of full pages."""
        assert leaf.parent is not None
        assert not leaf.children
        leaf.key += key
        leaf.pages.extend(pages)
        self.num_pages += len(pages)
        self.num_key_bytes += len(key)
        if leaf.protected:
            self.num_protected_pages += len(pages)

    def detach(self, leaf: Node, heir: Node) -> list[int]:
        """Take an unprotected leaf out of the tree; `heir` inherits its pins. Returns its pages."""
        parent, key, pages = leaf.parent, leaf.key, leaf.pages
        assert parent is not None
        assert leaf.children is None
        assert not leaf.protected
        siblings = parent.children
        assert siblings is not None
        siblings.remove(leaf.head)
        if not siblings:
            parent.children = None
        leaf.parent, leaf.moved_to, leaf.queued_rank = None, heir, 0
        leaf.key, leaf.head, leaf.pages = b"", b"", NO_PAGES
        heir.pins += leaf.pins
        self.num_nodes -= 1
        self.num_pages -= len(pages)
        self.num_key_bytes -= len(key)
        return pages

    def absorbed_by(self, node: Node, head: bytes) -> list[Node]:
        """Unlocked partial leaves below `node` that hold nothing but a shorter head of page `head`.

        Sorted order puts every key between such a leaf and `head` under that leaf's own head too, so walking back from
        `head` until one is no head of it finds all of them that are not already under a longer sibling.
        """
        found: list[Node] = []
        children = node.children
        if children is None or not children.num_partial:
            return found
        key = children.around(head)[0]
        while key is not None and head.startswith(key):
            leaf = children[key]
            if not leaf.protected:
                found.append(leaf)
            key = children.around(key)[0]
        return found

    def subsumer(self, leaf: Node) -> Node | None:
        """The sibling that holds all that `leaf`, one partial page, holds: if there is one, it comes next in order."""
        if leaf.parent is None or len(leaf.key) >= self.page_bytes:
            return None
        siblings = leaf.parent.children
        assert siblings is not None
        if len(siblings) == 1:
            return None
        key = siblings.around(leaf.key + b"\0")[1]  # the least key that is greater
        return siblings[key] if key is not None and key.startswith(leaf.key) else None

    # -- locks and pins ---------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Protect `node` and, since only leaves are evicted, everything above it.

        Walks up only as far as the path was not protected yet, to keep the count of protected pages exact: a second
        lock on a hot prefix is O(1).
        """
        step: Node | None = node
        while step is not None:
            step.protected += 1
            if step.protected > 1:
                return
            self.num_protected_pages += len(step.pages)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. What nothing protects any more may be evicted once it is a leaf."""
        step: Node | None = node
        while step is not None:
            assert step.protected > 0, "unlocked more often than locked"
            step.protected -= 1
            if step.protected:
                return
            self.num_protected_pages -= len(step.pages)
            self.enqueue(step)
            step = step.parent

    def move_lock(self, upper: Node, lower: Node) -> None:
        """Move a lock from `upper` down to `lower`, which stands below it."""
        step = lower
        while step is not upper:
            step.protected += 1
            if step.protected > 1:
                upper.protected -= 1
                assert upper.protected, "a node above a protected one is protected"
                return
            self.num_protected_pages += len(step.pages)
            assert step.parent is not None
            step = step.parent
        # From now on a protected child protects `upper`, where the lock did: the count is the same.

    def unpin(self, node: Node) -> None:
        """Undo one pin, which `pins.Pins` counted on the node itself."""
        assert node.pins > 0, "unpinned more often than pinned"
        node.pins -= 1
        if not node.pins:
            self.enqueue(node)

    # -- eviction ---------------------------------------------------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now, pinned ones included."""
        return self.num_pages - self.num_protected_pages

    def enqueue(self, node: Node) -> None:
        """Put a node that may be evicted in line, unless it is there at its rank. An older entry of it is stale."""
        if node.protected or node.children is not None or node.parent is None:
            return
        rank = self.eviction(node, self._reached)
        if node.pins:  # behind every unpinned one
            rank += MOST
        if rank == node.queued_rank:
            return
        self._line.add(rank, node)

    def evict(self, num_pages: int) -> list[int]:
        """Drop `num_pages` pages, at most `num_evictable`: leaves in the policy's order, each from its end."""
        line, on_drop = self._line, self.on_drop
        queue, ranks, numbers = line.queue, line.ranks, line.numbers
        dropped: list[int] = []
        num_nodes = num_key_bytes = 0
        wanted = num_pages
        while wanted > 0:
            if queue and (not numbers or ranks[0] >> BUCKET_BITS < numbers[0]):  # `take`, without a call
                rank, leaf = ranks.popleft(), queue.popleft()
            else:
                rank, leaf = line.take()
            if rank != leaf.queued_rank:
                continue
            leaf.queued_rank = 0
            if leaf.protected or leaf.children is not None:
                continue  # queued again when that ends
            if leaf.pins and rank < MOST:  # pinned since it was queued
                self.enqueue(leaf)
                continue
            if rank > self._reached:
                self._reached = rank if rank < MOST else max(self._reached, rank - MOST)
            pages = leaf.pages
            num_left = len(pages) - wanted
            if on_drop is not None:
                on_drop(leaf, max(0, num_left))
            if num_left > 0:
                dropped += self._trim(leaf, wanted)
                # At the rank that it had: to lose pages is not to be used. At a new one, a long text that loses a page
                # at a time would outlive texts that are asked for.
                line.put_back(rank, leaf)
                break
            wanted = -num_left
            parent = leaf.parent
            assert parent is not None
            siblings = parent.children
            assert siblings is not None
            # `detach`, without a call, and what a leaf that leaves by itself does not need of it.
            siblings.remove(leaf.head)
            dropped += pages
            num_nodes += 1
            num_key_bytes += len(leaf.key)
            leaf.parent = None
            leaf.key = leaf.head = b""
            leaf.pages = NO_PAGES
            if leaf.pins:
                leaf.moved_to = parent
                parent.pins += leaf.pins
            if not siblings:
                parent.children = None
                self.enqueue(parent)
                self.drop_if_idle(parent)
        self.num_nodes -= num_nodes
        self.num_pages -= num_pages
        self.num_key_bytes -= num_key_bytes
        return dropped

    def _trim(self, leaf: Node, num_pages: int) -> list[int]:
        """Take the last pages off a leaf that keeps others."""
        keep = len(leaf.pages) - num_pages
        pages = leaf.pages[keep:]
        del leaf.pages[keep:]
        self.num_key_bytes -= len(leaf.key) - keep * self.page_bytes
        leaf.key = leaf.key[: keep * self.page_bytes]
        return pages

    # -- invariants -------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack: list[Node] = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            if node.children is not None:
                stack.extend(node.children.values())

    def check(self, locks: dict[Node, int], pins: dict[Node, int]) -> None:
        """Prove the shape and the counts, given every lock and every pin that is held.

        Raises:
            AssertionError: with the reason.
        """
        self._line.check()
        queued = set(self._line.valid())
        num_nodes = num_pages = num_protected_pages = num_key_bytes = 0
        everything = [*self.roots.values(), *self.nodes()]
        for node in everything:
            children = [] if node.children is None else list(node.children.values())
            if node.children is not None:
                assert children, "None rather than empty"
                node.children.check()
                for key, child in node.children.items():
                    assert child.parent is node, "a child knows its parent"
                    assert key == child.key[: self.page_bytes], "a child key is the first page of the child"
                    assert key is child.head, "and known to it"
            expected = locks.get(node, 0) + sum(child.protected > 0 for child in children)
            assert node.protected == expected, f"protected is {node.protected}, the locks say {expected}"
            assert node.pins == pins.get(node, 0), f"pins is {node.pins}, the handles say {pins.get(node, 0)}"
            assert node.moved_to is None, "a node in the tree has not moved"
            if isinstance(node, Root):
                assert node.children or node.protected or node.pins, f"namespace {node.namespace!r} is not idle"
                continue
            num_nodes += 1
            num_pages += len(node.pages)
            num_key_bytes += len(node.key)
            num_protected_pages += len(node.pages) if node.protected else 0
            assert node.key, "a node holds tokens"
            assert len(node.key) % TOKEN_BYTES == 0, "a node holds whole tokens"
            assert len(node.pages) == -(-len(node.key) // self.page_bytes), "a page per page of tokens"
            if len(node.key) % self.page_bytes:
                assert not node.children, "partial pages only at leaves"
                assert len(node.pages) == 1, "a partial page is a leaf of its own"
                assert node.protected or self.subsumer(node) is None, "a partial leaf that a sibling subsumes is gone"
            if not node.children and not node.protected:
                assert node in queued, "an evictable leaf is queued"
        known = set(everything)
        assert all(node in known for node in (*locks, *pins)), "locked and pinned nodes are in the tree"
        assert num_nodes == self.num_nodes, f"{num_nodes} nodes, counted {self.num_nodes}"
        assert num_pages == self.num_pages, f"{num_pages} pages, counted {self.num_pages}"
        assert num_key_bytes == self.num_key_bytes, f"{num_key_bytes} key bytes, counted {self.num_key_bytes}"
        assert num_protected_pages == self.num_protected_pages, (
            f"{num_protected_pages} protected pages, counted {self.num_protected_pages}"
        )


def common_pages(key: bytes, query: bytes, pos: int, page_bytes: int) -> int:
    """How many full pages at the start of `key` equal those of `query` from `pos` on."""
    low, high = 0, min(len(key), len(query) - pos) // page_bytes
    while low < high:  # binary search: a handful of memcmp calls instead of one comparison a page
        middle = (low + high + 1) // 2
        start, stop = low * page_bytes, middle * page_bytes
        if key[start:stop] == query[pos + start : pos + stop]:
            low = middle
        else:
            high = middle - 1
    return low
