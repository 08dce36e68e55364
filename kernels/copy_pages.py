"""Copy on write: the valid head of a shared page becomes the head of a page of one's own, in all layers at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def copy_pages(pool: torch.Tensor, copies: Iterable[tuple[int, int, int]]) -> None:
    """For each (source, target, tokens), in order: the first `tokens` slots of page source go to page target.

    pool [layers, 2 (keys, values), pages, page_size, kv_heads, head_dim].

    Raises:
        ValueError: a page is outside the pool, or `tokens` is not from 0 to page_size.
    """
    num_pages, page_size = pool.shape[2:4]
    for source, target, tokens in copies:
        if not (0 <= source < num_pages and 0 <= target < num_pages and 0 <= tokens <= page_size):
            raise ValueError(
                f"cannot copy {tokens} tokens from page {source} to page {target}: "
                f"the pool has {num_pages} pages of {page_size}"
            )
        pool[:, :, target, :tokens] = pool[:, :, source, :tokens]
