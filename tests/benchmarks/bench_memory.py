"""What the KV cache wastes and what it costs to keep its books, on W0's lengths. No model runs.

python -m tests.benchmarks.bench_memory

Waste: slots of the pages that requests hold and have not written, as a share of all slots they hold, averaged over the
steps. Books: bytes that the cache's own objects take once the pool is full, as a share of the pool's KV bytes.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc

import numpy as np

from niwaki.radix import Cache, Lease, TokenIds
from tests.benchmarks.shapes import SHAPES

PAGE = 16
REQUESTS = 32
SHORTEST, LONGEST = 64, 256
SEED = 30


def waste(steps: int = 2000) -> float:
    """W0: 32 requests of 64 to 256 prompt tokens and as many new ones, each starting when another ends."""
    random = np.random.default_rng(SEED)
    cache = Cache(REQUESTS * 2 * LONGEST // PAGE, PAGE)
    running = [_start(cache, random) for _ in range(REQUESTS)]
    shares = []
    for _ in range(steps):
        for place, (lease, ids, written) in enumerate(running):
            if written == len(ids):
                cache.release(lease, ids, written)
                running[place] = _start(cache, random)
            else:
                assert cache.reserve(lease, written + 1)
                running[place] = (lease, ids, written + 1)
        held = sum(len(lease.page_ids) for lease, _, _ in running) * PAGE
        shares.append(1 - sum(written for _, _, written in running) / held)
    return float(np.mean(shares))


def _start(cache: Cache, random: np.random.Generator) -> tuple[Lease, TokenIds, int]:
    """A request's lease, all its tokens, and how many of them are written."""
    prompt, new = random.integers(SHORTEST, LONGEST + 1, 2).tolist()
    ids = random.integers(0, 8192, prompt + new).astype(np.int32)
    lease = cache.acquire(ids, max_cached=prompt - 1, room_for=prompt)
    assert lease is not None
    cache.commit(lease, ids, prompt, share_tail=True)
    return lease, ids, prompt


def bookkeeping(num_pages: int = 20_000) -> float:
    """Bytes a page of a pool that finished requests have filled to the last page."""
    random = np.random.default_rng(SEED)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache = Cache(num_pages, PAGE)
    while cache.num_free > 2 * LONGEST // PAGE:
        ids = random.integers(0, 8192, int(random.integers(2 * SHORTEST, 2 * LONGEST + 1))).astype(np.int32)
        lease = cache.acquire(ids, room_for=len(ids))
        assert lease is not None
        cache.release(lease, ids, len(ids))
    del ids, lease
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / num_pages


def main() -> int:
    print(f"waste on W0: {waste():.2%} of the slots held (aim < 4 %)")
    page_bytes = bookkeeping()
    for name, config in SHAPES.items():
        share = page_bytes / (PAGE * config.kv_bytes_per_token())
        print(f"books, {name}: {page_bytes:.0f} bytes a page, {share:.2%} of its KV (aim < 1 %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
