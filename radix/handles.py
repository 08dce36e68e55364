"""What the cache hands out: leases and pins, which it alone changes, and what it tells; and what callers may not do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from numpy import ndarray

from niwaki.radix.children import TOKEN_BYTES
from niwaki.radix.pages import PageCopy
from niwaki.radix.paths import INT32, TokenIds, demand_token_ids
from niwaki.radix.tree import Node


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one running request. Owned by the cache: read the first three fields, change nothing.

    `page_ids[i]` holds tokens `i * page_size` and following. `commit` may replace a page by an equal one of the tree,
    so read `page_ids` anew for each step. `num_cached` tokens need no computing once `copies` have been carried out:
    before the cache is called again, for nothing keeps the pages that they read.
    """

    page_ids: list[int]
    num_cached: int
    copies: tuple[PageCopy, ...]
    _node: Node = field(repr=False)  # locked; the path down to it holds the first `_num_shared` pages
    _num_shared: int = field(repr=False)
    _priority: int = field(repr=False)
    _tail: Node | None = field(default=None, repr=False)  # locked; offers the page after the shared ones, being written
    _is_open: bool = field(default=True, repr=False)


@dataclass(slots=True, eq=False)
class Pin:
    """A wish to keep a prefix, by `Cache.pin`. Opaque."""

    _node: Node = field(repr=False)
    _until: float | None = field(repr=False)
    _is_open: bool = field(default=True, repr=False)


class Match(NamedTuple):  # one for each who waits, in every plan: a frozen dataclass takes three times as long
    """What the cache holds of a prompt, for planning: nothing is locked, so it may be gone a moment later."""

    num_cached: int  # tokens
    num_locked_pages: int  # full pages among them that running requests hold already: acquiring these takes no room


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Where the pages are now, and counters since the start."""

    num_pages: int
    free_pages: int
    tree_pages: int
    held_pages: int  # by leases, not (yet) shared
    evictable_pages: int  # those of `tree_pages` that eviction could free now
    tree_tokens: int
    tree_nodes: int
    namespaces: int
    leases: int
    pins: int
    lookups: int
    hits: int  # lookups that found at least one token
    evicted_pages: int


def home(pin: Pin) -> Node:
    """The node that a pin keeps now: eviction and absorption hand pins on."""
    node = pin._node
    while node.moved_to is not None:
        node = node.moved_to
    pin._node = node
    return node


def demand_open(handle: Lease | Pin) -> None:
    if not handle._is_open:
        what = "lease" if isinstance(handle, Lease) else "pin"
        raise ValueError(f"the {what} is closed: it was released, discarded or unpinned before")


def demand_written(lease: Lease, ids: TokenIds, num_written: int, page_size: int) -> None:
    if not lease._is_open:  # asked here: where nothing is warm, a call of its own costs as much as all the rest
        demand_open(lease)
    if not isinstance(ids, ndarray) or ids.dtype != INT32 or ids.ndim != 1:
        demand_token_ids(ids)
    least, pages = lease._num_shared * page_size, len(lease.page_ids)
    if not least <= num_written <= pages * page_size or num_written > len(ids):
        raise ValueError(
            f"num_written must be from {least} (shared already) to {min(len(ids), pages * page_size)} "
            f"(there are {len(ids)} ids and {pages} pages), got {num_written}"
        )


def packed_behind(lease: Lease, ids: TokenIds, num_written: int, page_size: int) -> bytes:
    """`ids` from the end of what the lease shares to `num_written`, packed.

    Refuses ids that cannot be those of the lease, by its last shared page: a cheap guard for a costly mistake.
    """
    stop = lease._num_shared * page_size
    if not stop:
        return ids[:num_written].tobytes()
    packed = ids[stop - page_size : num_written].tobytes()
    page_bytes = page_size * TOKEN_BYTES
    if not lease._node.key.endswith(packed[:page_bytes]):
        raise ValueError(f"ids[{stop - page_size}:{stop}] are not the tokens that this lease shares there")
    return packed[page_bytes:]
