"""The pages of keys and values wherever they are: in the pool, in the tiers below it, in a file.

Owned by `loop.core`, whose requests lease pages of `cache`; the rest of what a host may do with them is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from niwaki.radix.cache import Cache
from niwaki.radix.handles import Lease, Pin
from niwaki.radix.outline import OutlineNode
from niwaki.runtime.forward.runner import Runner
from niwaki.runtime.forward.step_times import Ended
from niwaki.runtime.kv.cache_file import CacheWriter, SavedPath
from niwaki.runtime.kv.pool_memory import PoolMemory
from niwaki.runtime.kv.tiers import Bytes, Tiers
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.options.limits import TokenIds

DEMOTED_PAGES = 16  # between two steps: those who run wait for them
LEAST_TIMED_PAGES = 4  # of the tokens of a step: how long fewer take says little of what computing a page costs


class KVPages:
    """Which pages hold what, and their way in and out of the pool. Called by one thread, between steps."""

    def __init__(self, runner: Runner, config: EngineConfig, num_pages: int, tiers: Tiers | None) -> None:
        self._runner = runner
        self._page_size = config.page_size
        self._tiers = tiers  # where evicted pages go
        self._memory = None if (planes := runner.host_planes()) is None else PoolMemory(planes)
        self.cache = Cache(
            num_pages,
            config.page_size,
            enabled=config.enable_prefix_cache,
            eviction=config.eviction_policy,
            on_evict=None if tiers is None else self._keep_evicted,
        )
        self._look_ahead()

    def pin(self, ids: TokenIds, namespace: str) -> Pin:
        """Keep the cached path of these tokens while a branch stands on it."""
        return self.cache.pin(ids, namespace)

    def unpin(self, pin: Pin) -> None:
        self.cache.unpin(pin)

    def flush(self, *, tiers: bool = True) -> bool:
        """Forget what no request holds, here and in the tiers. True if the tree is empty now."""
        if self._tiers is not None and tiers:
            self._tiers.clear()
        return self.cache.flush()

    def outline(self, limit: int, namespace: str) -> tuple[OutlineNode, ...]:
        """The shape of a namespace's tree, and what lately left it for a tier below the pool."""
        return self.cache.outline(limit, namespace, None if self._tiers is None else self._tiers.holder)

    # -- tiers --------------------------------------------------------------------------------------------------------

    def demote(self, ids: TokenIds, namespace: str, first: int) -> int | None:
        """Copy the next of the cached pages of `ids`, from page `first` on, to the tiers, so that they are there when
        the pool's are gone. Returns where to go on; None when that was all, or there are no tiers."""
        if self._tiers is None:
            return None
        page_ids = self.cache.page_ids(ids, namespace)
        first = self._tiers.first_missing(namespace, ids[: len(page_ids) * self._page_size], first)
        stop = min(first + DEMOTED_PAGES, len(page_ids))
        if first == stop:
            return None
        self._keep(namespace, ids, first, page_ids[first:stop])
        return stop if stop < len(page_ids) else None

    def tier_counts(self) -> Mapping[str, float]:
        return {} if self._tiers is None else self._tiers.counts()

    def note_computed(self, ended: Ended) -> None:
        """After a step: so long took those that have ended. Fetching a page must be quicker than computing it."""
        self._look_ahead()
        if self._tiers is None:
            return
        for num_tokens, seconds in ended:
            if num_tokens >= LEAST_TIMED_PAGES * self._page_size:
                self._tiers.computed(num_tokens, seconds)

    def _look_ahead(self) -> None:
        if self._memory is not None:
            self._memory.find(self.cache.num_pages - self.cache.num_free)

    def acquire(
        self, ids: TokenIds, namespace: str, *, most: int, room_for: int, priority: int
    ) -> tuple[Lease, int] | None:
        """Pages for `room_for` tokens, and how many of the first `most` of `ids` are in them already, cached or fetched
        from a tier that still had them. None where pages run short."""
        lease = self.cache.acquire(ids, namespace, max_cached=most, room_for=room_for, priority=priority)
        if lease is None:
            return None
        try:
            if lease.copies:
                self._runner.copy_pages(lease.copies)
            return lease, min(most, max(lease.num_cached, self._restored(ids, most, namespace, lease)))
        except BaseException:
            self.cache.discard(lease)  # nobody else knows of it
            raise

    def _restored(self, ids: TokenIds, most: int, namespace: str, lease: Lease) -> int:
        """Fetch the pages of the first `most` of `ids` behind the cached ones that a tier still has. Returns the end of
        the last of them, 0 where there was none. One that goes on behind `most` is fetched, too: to compute its head
        took a fifth of the time in which 2,048 tokens were fetched."""
        first, stop = lease.num_cached // self._page_size, min(-(-most // self._page_size), len(ids) // self._page_size)
        if self._tiers is None or first >= stop:
            return 0
        try:
            pages = self._tiers.find(namespace, ids[: stop * self._page_size], first)
            num_pages = self._runner.write_pages(lease.page_ids[first:stop], pages)
        except Exception as error:  # what was copied into the first of them says the same, whole or half written over
            self._tiers.fault(error)
            return 0
        if not num_pages:
            return 0
        end = (first + num_pages) * self._page_size
        self._tiers.restored(min(end, most) - lease.num_cached)
        return end

    def _keep_evicted(self, namespace: str, ids: TokenIds, first: int, page_ids: list[int]) -> None:
        assert self._tiers is not None
        try:
            self._keep(namespace, ids, first, page_ids)
        except Exception as error:  # the eviction goes on: half done, it would lose the pages that it has
            self._tiers.fault(error)

    def _keep(self, namespace: str, ids: TokenIds, first: int, page_ids: Sequence[int]) -> None:
        assert self._tiers is not None

        def read(places: Sequence[int]) -> Bytes:
            return self._runner.read_pages([page_ids[place] for place in places])

        self._tiers.keep(namespace, ids, first, len(page_ids), read)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, writer: CacheWriter) -> int:
        """Write every cached sequence, each page once. Returns the number of tokens."""
        written: set[int] = set()
        num_tokens = 0
        for namespace, ids, page_ids in self.cache.paths():
            first = next((index for index, page in enumerate(page_ids) if page not in written), len(page_ids))
            written.update(page_ids)
            writer.add(SavedPath(namespace, ids, first, self._runner.read_pages(page_ids[first:])))
            num_tokens += len(ids) - min(len(ids), first * self._page_size)
        return num_tokens

    def load(self, saved: Iterable[SavedPath]) -> int:
        """Take up what the free part of the pool has room for. Returns the number of tokens."""
        before = self.cache.stats().tree_tokens
        for path in saved:
            have = self.cache.match(path.ids, path.namespace) // self._page_size
            if len(path.ids) <= have * self._page_size:
                continue  # it is all there
            if len(path.ids) > (self.cache.num_free + have) * self._page_size:
                break
            lease = self.cache.acquire(path.ids, path.namespace, room_for=len(path.ids))
            assert lease is not None, "there is room"
            first = lease.num_cached // self._page_size
            if first < path.first:  # what it continues was not loaded
                self.cache.discard(lease)
                continue
            try:
                self._runner.copy_pages(lease.copies)
                num_written = self._runner.write_pages(lease.page_ids[first:], path.pages[first - path.first :])
                assert first + num_written == len(lease.page_ids), "a path has all pages from its first one on"
            except BaseException:
                self.cache.discard(lease)  # nobody else knows of it
                raise
            self.cache.release(lease, path.ids, len(path.ids))
        return self.cache.stats().tree_tokens - before
