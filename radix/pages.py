"""The free pages of a pool. Knows page ids only: what a page holds, and for whom, is the cache's business."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the KV of the first `num_tokens` slots of page `src` to the same slots of page `dst`, in every layer."""

    src: int
    dst: int
    num_tokens: int


class PagePool:
    """A stack of free page ids: the page that was freed last is handed out first, while it is still warm in caches."""

    __slots__ = ("_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_pages: int) -> list[int]:
        """Hand out `num_pages` pages; the caller has made sure that there are as many."""
        if num_pages == 0:
            return []
        assert num_pages <= len(self._free), f"{num_pages} pages wanted, {len(self._free)} free"
        taken = self._free[-num_pages:]
        del self._free[-num_pages:]
        taken.reverse()
        return taken

    def give(self, page_ids: list[int]) -> None:
        """Take pages back."""
        self._free.extend(page_ids)

    def snapshot(self) -> tuple[int, ...]:
        """The free page ids, for `Cache.check`."""
        return tuple(self._free)
