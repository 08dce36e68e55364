"""Copy the valid heads of pages to other pages, in all layers and for keys and values at once: copy on write.

One program a copy, and a layer's keys or values. Copies that read what an earlier one wrote wait for it in a launch of
their own. The reference is `copy_pages` of kernels/copy_pages.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from niwaki.kernels.transfer import on_device
from niwaki.kernels.triton.launch import POOLS, block_of, check, launch, warps_for

Copy = tuple[int, int, int]  # source page, target page, tokens

MAX_STEP = 4096  # elements at a time


def copy_pages(pool: torch.Tensor, copies: Sequence[Copy]) -> None:
    """For each (source, target, tokens), in order: the first `tokens` slots of page source go to page target.

    pool [layers, 2 (1: keys are their own values), pages, page_size, kv_heads, head_dim], contiguous.

    Raises:
        ValueError: a page is outside the pool, or `tokens` is not from 0 to page_size.
    """
    check("copy_pages", "pool", pool, (None,) * 6, POOLS, pool.device, contiguous=True)
    layers, halves, num_pages, page_size, kv_heads, head_dim = pool.shape
    for source, target, tokens in copies:
        if not (0 <= source < num_pages and 0 <= target < num_pages and 0 <= tokens <= page_size):
            raise ValueError(
                f"copy_pages: cannot copy {tokens} tokens from page {source} to page {target}: "
                f"the pool has {num_pages} pages of {page_size}"
            )
    slot = kv_heads * head_dim
    block = min(block_of(page_size * slot), MAX_STEP)
    for independent in _independent(copies):
        moved = on_device(np.array(independent, np.int32), pool.device)  # behind a step that still computes
        launch(
            _copy_pages,
            (len(independent), halves * layers),
            pool, moved, num_pages, page_size * slot, slot,
            BLOCK=block,
            num_warps=warps_for(block),
        )  # fmt: skip


def _independent(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Runs of copies none of which touches what an earlier one of its run writes, or writes what one reads."""
    run: list[Copy] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        source, target, _ = copy
        if source in written or target in written or target in read:
            yield run
            run, read, written = [], set(), set()
        run.append(copy)
        read.add(source)
        written.add(target)
    if run:
        yield run


@triton.jit
def _copy_pages(pool_ptr, copy_ptr, num_pages, page_stride, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    copy = tl.program_id(0)
    source = tl.load(copy_ptr + 3 * copy).to(tl.int64)
    target = tl.load(copy_ptr + 3 * copy + 1).to(tl.int64)
    count = tl.load(copy_ptr + 3 * copy + 2) * SLOT
    half_ptr = pool_ptr + tl.program_id(1).to(tl.int64) * num_pages * page_stride
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(half_ptr + source * page_stride + at, mask=at < count)
        tl.store(half_ptr + target * page_stride + at, values, mask=at < count)
