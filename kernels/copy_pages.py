"""Copy on write: the valid head of a shared page becomes the head of a page of one's own, in all layers at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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


def write_pages(pool: torch.Tensor, page_ids: Sequence[int], contents: Iterable[npt.NDArray[np.uint8]]) -> int:
    """The inverse of `read_pages`, from the bytes of each page wherever they are: each is read before the next one is
    asked for. Returns how many pages came, which may be fewer than there are ids.

    Raises:
        ValueError: there are more pages than ids, or one is not of the pool's size. Others may be written.
    """
    places, num_pages = iter(page_ids), 0
    if pool.device.type == "cpu":
        planes = planes_of(pool)
        shape = len(planes), planes.shape[2]
        for content in contents:  # each is copied once: to stack them copies twice
            planes[:, _next(places)] = content.reshape(shape)
            num_pages += 1
        return num_pages
    stacked = np.empty((len(page_ids), pool[:, :, 0].numel() * pool.element_size()), np.uint8)
    for content in contents:
        _next(places)
        stacked[num_pages] = content
        num_pages += 1
    if not num_pages:
        return 0
    pages = torch.from_numpy(stacked[:num_pages]).view(pool.dtype)
    pages = pages.reshape(num_pages, *pool.shape[:2], *pool.shape[3:]).movedim(0, 2)
    index = torch.tensor(page_ids[:num_pages], dtype=torch.int64, device=pool.device)
    pool.index_copy_(2, index, pages.to(pool.device))
    return num_pages


def _next(places: Iterator[int]) -> int:
    for place in places:
        return place
    raise ValueError("there are more pages than ids")


def planes_of(pool: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The pool's own memory as bytes [layers x 2, pages, bytes]. NumPy moves pages 2 to 3.5 times as fast as torch,
    which also divides them among threads and then waits for a core that others keep busy."""
    layers, two, pages = pool.shape[:3]
    planes: npt.NDArray[np.uint8] = pool.view(torch.uint8).view(layers * two, pages, -1).numpy()
    return planes
