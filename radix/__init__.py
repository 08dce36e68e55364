"""Who holds which page: the tree, the page allocator, and the cache that owns every invariant of both."""

from niwaki.radix.cache import Cache
from niwaki.radix.handles import CacheStats, Lease, Match, Pin
from niwaki.radix.pages import PageCopy
from niwaki.radix.paths import TokenIds

__all__ = ["Cache", "CacheStats", "Lease", "Match", "PageCopy", "Pin", "TokenIds"]
