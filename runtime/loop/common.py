"""What requests have in common within one plan: a prefill under way that another would repeat, cached pages that
several found. The tree knows of neither before the step was run."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from niwaki.radix.children import TOKEN_BYTES
from niwaki.radix.tree import common_pages
from niwaki.runtime.loop.plans import Waiting
from niwaki.runtime.options.limits import TokenIds


class Prefilling:
    """The prefills under way, and those just admitted: known tokens, each with its namespace."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._all: list[tuple[TokenIds, str]] = []
        # By a place in the text: those that reach beyond it, by the token that stands there.
        self._by_token: dict[int, dict[int, list[tuple[TokenIds, str]]]] = {}

    def add(self, ids: TokenIds, namespace: str) -> None:
        self._all.append((ids, namespace))
        for place, known in self._by_token.items():
            if place < len(ids):
                known.setdefault(int(ids[place]), []).append((ids, namespace))

    def helps(self, request: Waiting) -> bool:
        """Whether one of them will soon have computed what `request` would compute again.

        The gain must be a page at least, or else the whole prompt, as for many samples of a short one.
        """
        most = request.most_cached
        start = min(request.num_cached, most)
        stop = min(start + self._page_size, most)
        if not self._all or start == most:
            return False
        least = stop if stop == start + self._page_size else len(request.ids)
        wanted = request.ids[:stop]
        return any(
            namespace == request.namespace and len(ids) >= least and np.array_equal(ids[:stop], wanted)
            for ids, namespace in self._at(start).get(int(wanted[start]), ())
        )

    def _at(self, place: int) -> dict[int, list[tuple[TokenIds, str]]]:
        known = self._by_token.get(place)
        if known is None:
            known = self._by_token[place] = {}
            for ids, namespace in self._all:
                if place < len(ids):
                    known.setdefault(int(ids[place]), []).append((ids, namespace))
        return known


class Heads:
    """What those who are admitted in this very plan found cached: full pages, packed and in order, so that who has most
    in common with another stands beside it. Packed when somebody asks who may share more than is locked already."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._unpacked: list[Waiting] = []
        self._known: dict[str, list[bytes]] = {}  # by namespace

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
            at = bisect_left(known, head)
            beside = known[max(0, at - 1) : at + 1]
            page_bytes = self._page_size * TOKEN_BYTES
            shared = max(shared, *(common_pages(other, head, 0, page_bytes) for other in beside))
        return shared

    def _pack_in(self, request: Waiting) -> None:
        head = self._head_of(request)
        known = self._known.setdefault(request.namespace, [])
        at = bisect_left(known, head)
        if head and known[at : at + 1] != [head]:
            known.insert(at, head)

    def _num_pages(self, request: Waiting) -> int:
        return min(request.num_cached, request.most_cached) // self._page_size

    def _head_of(self, request: Waiting) -> bytes:
        return request.ids[: self._num_pages(request) * self._page_size].tobytes()
