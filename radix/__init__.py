"""Who holds which page: the tree, the page allocator, and the cache that owns every invariant of both."""

from niwaki.radix.cache import Cache, CacheStats, Lease, Match, Pin, TokenIds
from niwaki.radix.pages import PageCopy

__all__ = ["Cache", "CacheStats", "Lease", "Match", "PageCopy", "Pin", "TokenIds"]
