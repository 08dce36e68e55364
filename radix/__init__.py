"""Who holds which page: the tree, the page allocator, and the cache that owns every invariant of both."""
