"""What requests have in common within one plan: a prefill under way that another would repeat, cached pages that
several found. The tree knows of neither before the step was run."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from niwaki.radix.children import TOKEN_BYTES
from niwaki.radix.tree import common_pages
from niwaki.runtime.loop.plans import Waiting
from niwaki.runtime.options.limits import TokenIds

Beginning = tuple[str, bytes]  # a namespace, and the tokens that others may compute
Known = tuple[bytes, str, int]  # tokens, their namespace and priority


class Prefilling:
    """The prefills under way, and those just admitted: known tokens, each with its namespace and priority."""

    def __init__(self, page_size: int, waiting: Sequence[Waiting]) -> None:
        self._page_size = page_size
        self._waiting = waiting
        self._admitted: set[int] = set()
        self._alike: Counter[Beginning] | None = None  # who waits for less than a page, counted when somebody asks
        self._all: list[tuple[TokenIds, Known]] = []
        # By a place in the text: those that reach beyond it, by the token that stands there.
        self._by_token: dict[int, dict[int, list[Known]]] = {}

    def add(self, ids: TokenIds, namespace: str, priority: int) -> None:
        one = ids.tobytes(), namespace, priority  # bytes are compared in a tenth of the time of an array
        self._all.append((ids, one))
        for place, known in self._by_token.items():
            if place < len(ids):
                known.setdefault(int(ids[place]), []).append(one)

    def admit(self, request: Waiting) -> None:
        """Add one of those who waited."""
        self.add(request.ids, request.namespace, request.priority)
        self._admitted.add(request.id)
        if self._alike is not None and self._lacks_less_than_a_page(request):
            self._alike[_beginning(request)] -= 1

    def helps(self, request: Waiting) -> bool:
        """Whether one of them will soon have computed what `request` would compute again, and waiting for it pays. None
        of a lower priority: its pieces are small, and others of a higher one hold it up.

        The gain must be a page at least; or else the whole prompt, and a page for all together who wait for it, as for
        many samples of a short one. Of two prompts of up to 16 tokens one that waits made both take 1.02 to 1.22 times
        as long as computing it twice, of eight 1.20 (2 tokens), 1.02 (5) and 0.69 (16), of 64 0.93, 0.76 and 0.42
        (CPU time of niwaki-tiny, 4 new tokens each).
        """
        most = request.most_cached
        start = min(request.num_cached, most)
        stop = min(start + self._page_size, most)
        if not self._all or start == most:
            return False
        alike = self._at(start).get(int(request.ids[start]))
        if alike is None:
            return False
        least = TOKEN_BYTES * (stop if stop == start + self._page_size else len(request.ids))
        wanted = request.ids[:stop].tobytes()
        is_computed = any(
            known.startswith(wanted)
            and namespace == request.namespace
            and priority >= request.priority
            and len(known) >= least
            for known, namespace, priority in alike
        )
        return is_computed and (stop - start) * self._num_alike(request) >= self._page_size

    def _num_alike(self, request: Waiting) -> int:
        """How many would wait for the same, where that is less than a page."""
        if not self._lacks_less_than_a_page(request):
            return 1
        if self._alike is None:
            left = (one for one in self._waiting if one.id not in self._admitted)
            self._alike = Counter(_beginning(one) for one in left if self._lacks_less_than_a_page(one))
        return self._alike[_beginning(request)]

    def _lacks_less_than_a_page(self, request: Waiting) -> bool:
        return request.most_cached - request.num_cached < self._page_size

    def _at(self, place: int) -> dict[int, list[Known]]:
        known = self._by_token.get(place)
        if known is None:
            known = self._by_token[place] = {}
            for ids, one in self._all:
                if place < len(ids):
                    known.setdefault(int(ids[place]), []).append(one)
        return known


def _beginning(request: Waiting) -> Beginning:
    return request.namespace, request.ids[: request.most_cached].tobytes()


class Heads:
    """What those who are admitted in this very plan found cached: full pages, packed and in order, so that who has most
    in common with another stands beside it. Packed when somebody asks who may share more than is locked already."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._unpacked: list[Waiting] = []
        self._known: dict[str, list[bytes]] = {}  # by namespace
        self._last: tuple[str, bytes] | None = None  # of them the one that was packed last: most are as that one

    def add(self, request: Waiting) -> None:
        self._unpacked.append(request)

    def num_shared(self, request: Waiting) -> int:
        """How many of its cached pages are held already, by running requests or by these."""
        shared, most = request.num_locked_pages, self._num_pages(request)
        if shared >= most:
            return most
        for added in self._unpacked:
            self._pack_in(added)
        self._unpacked.clear()
        known = self._known.get(request.namespace)
        if known:
            head = self._head_of(request)
            if (request.namespace, head) == self._last:
                return most
            at = bisect_left(known, head)
            beside = known[max(0, at - 1) : at + 1]
            page_bytes = self._page_size * TOKEN_BYTES
            shared = max(shared, *(common_pages(other, head, 0, page_bytes) for other in beside))
        return shared

    def _pack_in(self, request: Waiting) -> None:
        head = self._head_of(request)
        if not head or (request.namespace, head) == self._last:
            return
        self._last = request.namespace, head
        known = self._known.setdefault(request.namespace, [])
        at = bisect_left(known, head)
        if known[at : at + 1] != [head]:
            known.insert(at, head)

    def _num_pages(self, request: Waiting) -> int:
        return min(request.num_cached, request.most_cached) // self._page_size

    def _head_of(self, request: Waiting) -> bytes:
        return request.ids[: self._num_pages(request) * self._page_size].tobytes()
