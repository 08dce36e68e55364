"""Copy on write: the valid head of a shared page becomes the head of a page of one's own, in all layers at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch


def copy_pages(pool: torch.Tensor, copies: Iterable[tuple[int, int, int]]) -> None:
    """For each (source, target, tokens), in order: the first `tokens` slots of page source go to page target.

    pool [layers, 2 (keys, values; 1: keys that are their own values), pages, page_size, kv_heads, head_dim].

    Raises:
        ValueError: a page is outside the pool, or `tokens` is not from 0 to page_size.
    """
    num_pages, page_size = pool.shape[2:4]
    planes = planes_of(pool) if pool.device.type == "cpu" else None
    for source, target, tokens in copies:
        if not (0 <= source < num_pages and 0 <= target < num_pages and 0 <= tokens <= page_size):
            raise ValueError(
                f"cannot copy {tokens} tokens from page {source} to page {target}: "
                f"the pool has {num_pages} pages of {page_size}"
            )
        if planes is None:
            pool[:, :, target, :tokens] = pool[:, :, source, :tokens]
        else:
            head = planes.shape[2] // page_size * tokens
            planes[:, target, :head] = planes[:, source, :head]


def read_pages(pool: torch.Tensor, page_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    """The content of whole pages, all layers of it, as bytes: [len(page_ids), bytes of a page].

    pool as in `copy_pages`.
    """
    if pool.device.type == "cpu":
        return np.ascontiguousarray(planes_of(pool)[:, page_ids].swapaxes(0, 1)).reshape(len(page_ids), -1)
    index = torch.tensor(page_ids, dtype=torch.int64, device=pool.device)
    pages = pool.index_select(2, index).movedim(2, 0).contiguous()
    return pages.view(torch.uint8).reshape(len(page_ids), -1).cpu().numpy()


def write_pages(pool: torch.Tensor, page_ids: Sequence[int], contents: Iterable[npt.NDArray[np.uint8]]) -> None:
    """The inverse of `read_pages`, from the bytes of each page wherever they are.

    Raises:
        ValueError: there are more or fewer pages than ids, or one is not of the pool's size. Others may be written.
    """
    if pool.device.type == "cpu":
        planes = planes_of(pool)
        shape = len(planes), planes.shape[2]
        for page, content in zip(page_ids, contents, strict=True):  # each is copied once: to stack them copies twice
            planes[:, page] = content.reshape(shape)
        return
    # A copy: what is read from a file cannot be written to, and torch warns of that.
    stacked = torch.from_numpy(np.stack(list(contents)))
    pages = stacked.view(pool.dtype).reshape(len(page_ids), *pool.shape[:2], *pool.shape[3:]).movedim(0, 2)
    index = torch.tensor(page_ids, dtype=torch.int64, device=pool.device)
    pool.index_copy_(2, index, pages.to(pool.device))


def planes_of(pool: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The pool's own memory as bytes [layers x 2, pages, bytes]. NumPy moves pages 2 to 3.5 times as fast as torch,
    which also divides them among threads and then waits for a core that others keep busy."""
    layers, two, pages = pool.shape[:3]
    planes: npt.NDArray[np.uint8] = pool.view(torch.uint8).view(layers * two, pages, -1).numpy()
    return planes
