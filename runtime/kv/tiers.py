"""Where pages go that the pool has no room for: a store in host memory, a store on disk behind it.

A page is known by its key (`page_keys.py`), so that one which another process left on disk is as good as our own.
Whatever goes wrong with a store costs recomputing and nothing else: it is counted, and told once.

`PageStore` is the whole protocol: a networked store is another class with these methods.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from niwaki.kernels.checksum import checksum
from niwaki.runtime.kv.page_keys import KEY_BYTES, PageKeys
from niwaki.runtime.options.limits import TokenIds

Bytes = npt.NDArray[np.uint8]
P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("niwaki.tiers")

MAGIC = b"niwakiKV"
VERSION = 2
HEADER = struct.Struct("<8sHxx16sIQ")  # magic, version, key, bytes of the page, their checksum
FIRST_READ = 1 << 16  # bytes; twice as many from the first longer file on
LOOKED_AT = 16  # files of a folder for each page that is written
UNFINISHED = ("niwaki-", ".new")  # how the name of a file begins and ends that is being written
MOST_SLOWER = 8  # times what a page took on average, that one page counts for
ABANDONED_SECONDS = 3600.0  # after which whoever wrote it is gone


class PageStore(Protocol):
    """Keeps pages by key, up to a size of its own. Called by one thread, in the middle of an eviction, too: what goes
    wrong is counted and costs pages. What is raised all the same, `Tiers` counts as a page that is not there.
    """

    name: str

    def get(self, key: bytes) -> Bytes | None:
        """Read it before the next `get`, which may use the same memory."""
        ...

    def put(self, key: bytes, page: Bytes) -> list[tuple[bytes, Bytes]]:
        """Keep a page; returns what had to leave for it. `page` may be a view into memory that will be used again."""
        ...

    def holds(self, key: bytes) -> bool:
        """Whether `get` would find it now; reads and counts nothing."""
        ...

    def touch(self, key: bytes) -> bool:
        """`holds`, and a page that is there counts as used just now: it need not be `put`."""
        ...

    def clear(self) -> None: ...

    def counts(self) -> Mapping[str, float]: ...


class MemoryStore:
    """Pages in host memory, the least recently used leave first."""

    name = "memory"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pages: OrderedDict[bytes, Bytes] = OrderedDict()
        self._bytes = self._hits = 0

    def get(self, key: bytes) -> Bytes | None:
        page = self._pages.get(key)
        if page is not None:
            self._pages.move_to_end(key)
            self._hits += 1
        return page

    def put(self, key: bytes, page: Bytes) -> list[tuple[bytes, Bytes]]:
        if self.touch(key):
            return []
        self._pages[key] = page.copy()
        self._bytes += page.nbytes
        left: list[tuple[bytes, Bytes]] = []
        while self._bytes > self._max_bytes:
            gone, content = self._pages.popitem(last=False)
            self._bytes -= content.nbytes
            left.append((gone, content))
        return left

    def holds(self, key: bytes) -> bool:
        return key in self._pages

    def touch(self, key: bytes) -> bool:
        is_there = key in self._pages
        if is_there:
            self._pages.move_to_end(key)
        return is_there

    def clear(self) -> None:
        self._pages.clear()
        self._bytes = 0

    def counts(self) -> Mapping[str, float]:
        return {"pages": len(self._pages), "bytes": self._bytes, "hits": self._hits}


class DiskStore:
    """A file a page in one folder, each with its key and a checksum, the least recently used deleted first.

    Files are written beside and renamed, so that a process that dies leaves no torn one; one that is torn all the same,
    or another version's, is deleted and counts as missing. After a failed write (a full disk) nothing more is written.

    Several engines may share a folder, and find each other's pages. All files count, whoever wrote them: with each page
    that is written a few names of the folder are looked at, again and again from its beginning. So where several write
    at once the folder may hold more than it should, by what the others wrote since it was last gone through.
    """

    name = "disk"

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Takes up what the folder holds, the oldest first in line to leave.

        Raises:
            OSError: the folder cannot be made or read.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._bytes = self._hits = self._faults = 0
        self._is_full = False
        self._read_into = bytearray(FIRST_READ)
        self._names = self._seen()
        found = [(status, name) for name in os.listdir(folder) if (status := self._status(name)) is not None]
        for status, name in sorted(found, key=lambda one: one[0].st_mtime):
            self._count(name, status)
        self._delete_abandoned()

    def get(self, key: bytes) -> Bytes | None:
        try:
            content = self._read(key)
        except FileNotFoundError:  # nobody wrote it, or another engine has deleted it
            self._uncount(key)
            return None
        except OSError as error:
            if key in self._sizes:
                self._fault(f"cannot read a cached page: {error}")
                self._forget(key)
            return None
        if key not in self._sizes:
            self._sizes[key] = len(content)
            self._bytes += len(content)
        page = _page_of(key, content)
        if page is None:
            self._fault(f"{key.hex()}.page is damaged or of another version; it is deleted")
            self._forget(key)
            return None
        self._sizes.move_to_end(key)
        self._hits += 1
        return page

    def _read(self, key: bytes) -> memoryview:
        """A file's content, in memory that the next one is read into: new memory for each took as long as reading."""
        file = os.open(self._name(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            num_read = os.readv(file, [self._read_into])
            while num_read == len(self._read_into):  # there may be more
                self._read_into = self._read_into + bytes(num_read)  # not in place: somebody may look at the last page
                num_read += os.readv(file, [memoryview(self._read_into)[num_read:]])
        finally:
            os.close(file)
        return memoryview(self._read_into)[:num_read]

    def put(self, key: bytes, page: Bytes) -> list[tuple[bytes, Bytes]]:
        """What leaves for it is deleted: nothing stands behind a disk."""
        if self._is_full:
            return []
        if self.touch(key):
            return []
        if key in self._sizes:
            self._uncount(key)  # another engine has deleted it
        self._look_at_others()
        content = HEADER.pack(MAGIC, VERSION, key, page.nbytes, checksum(page)) + page.tobytes()
        while self._sizes and self._bytes + len(content) > self._max_bytes:
            self._forget(next(iter(self._sizes)))
        if len(content) > self._max_bytes:
            return []
        try:
            prefix, suffix = UNFINISHED
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=prefix, suffix=suffix, delete=False) as file:
                try:
                    file.write(content)
                    file.close()
                    os.replace(file.name, self._name(key))
                except OSError:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            self._is_full = True
            self._fault(f"cannot write to {self._folder}: {error}; no more pages go there")
            return []
        if key not in self._sizes:
            self._sizes[key] = len(content)
            self._bytes += len(content)
        return []

    def holds(self, key: bytes) -> bool:
        return os.path.exists(self._name(key))  # quicker than a path's own

    def touch(self, key: bytes) -> bool:
        is_there = key in self._sizes and self.holds(key)
        if is_there:
            self._sizes.move_to_end(key)
        return is_there

    def clear(self) -> None:
        """Whoever wrote it: what another engine left would be found again."""
        with contextlib.suppress(OSError):
            for key in filter(None, map(_key_of, os.listdir(self._folder))):
                self._sizes.setdefault(key, 0)
        for key in list(self._sizes):
            self._forget(key)

    def counts(self) -> Mapping[str, float]:
        return {"pages": len(self._sizes), "bytes": self._bytes, "hits": self._hits, "faults": self._faults}

    def _look_at_others(self) -> None:
        """Count some of the pages that other engines have written since."""
        for name in islice(self._names, LOOKED_AT):
            if name is None:  # that was all
                break
            status = None if _key_of(name) in self._sizes else self._status(name)
            if status is not None:
                self._count(name, status)

    def _seen(self) -> Iterator[str | None]:
        """The names in the folder, None at their end, and from the beginning."""
        while True:
            with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
                for entry in entries:
                    yield entry.name
            yield None

    def _count(self, name: str, status: os.stat_result) -> None:
        """As the one used last. Another's file counts nothing."""
        key = _key_of(name)
        if key is not None:
            self._sizes[key] = status.st_size
            self._bytes += status.st_size

    def _name(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}.page"

    def _status(self, name: str) -> os.stat_result | None:
        """Of a page's file; None where it is none, or another process that shares the folder has just deleted it."""
        if name.endswith(".page"):
            with contextlib.suppress(FileNotFoundError):
                return os.stat(self._folder / name)
        return None

    def _delete_abandoned(self) -> None:
        """What processes left that died as they wrote: it takes room that nobody counts."""
        prefix, suffix = UNFINISHED
        for path in self._folder.glob(f"{prefix}*{suffix}"):
            with contextlib.suppress(OSError):  # somebody else did, or may not
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    def _uncount(self, key: bytes) -> None:
        self._bytes -= self._sizes.pop(key, 0)

    def _forget(self, key: bytes) -> None:
        self._uncount(key)
        try:
            Path(self._name(key)).unlink(missing_ok=True)
        except OSError as error:
            self._is_full = True  # what cannot be deleted takes room that nobody counts
            self._fault(f"cannot delete a cached page: {error}; no more pages go there")

    def _fault(self, what: str) -> None:
        if not self._faults:
            log.warning("%s (told once; the count goes on)", what)
        self._faults += 1


def _key_of(name: str) -> bytes | None:
    """Whose page a file is; None where it is not ours."""
    try:
        key = bytes.fromhex(name.removesuffix(".page"))
    except ValueError:
        return None
    return key if name == f"{key.hex()}.page" and len(key) == KEY_BYTES else None


def _page_of(key: bytes, content: memoryview) -> Bytes | None:
    """The page of a file, None where it is not whole or not of this key and version."""
    if len(content) < HEADER.size:
        return None
    magic, version, its_key, size, its_checksum = HEADER.unpack_from(content)
    page: Bytes = np.frombuffer(content, np.uint8)[HEADER.size :]
    if (magic, version, its_key, size) != (MAGIC, VERSION, key, len(page)) or checksum(page) != its_checksum:
        return None
    return page


class Tiers:
    """The stores in order, quickest first: evicted pages enter the first one, what falls out of it enters the next.

    Reads are worth it while they take less time for a token than the model does: both are measured as they happen, and
    a store that is slower is left alone but for a try now and then.
    """

    RETRY = 64  # a slow store is tried again at every such lookup

    def __init__(self, stores: Sequence[PageStore], fingerprint: bytes, page_size: int) -> None:
        self._stores = tuple(stores)
        self._keys = PageKeys(fingerprint, page_size)
        self._page_size = page_size
        self._seconds_per_token: float | None = None  # of the model, in prefill
        self._seconds_per_page: dict[str, float] = {}  # of each store
        self._lookups = self._faults = self._restored_tokens = 0

    def keep(
        self, namespace: str, ids: TokenIds, first: int, count: int, read: Callable[[Sequence[int]], Bytes]
    ) -> None:
        """Pages `first`, `first + 1`, ... of the sequence `ids`, `count` of them, leave the pool. `read` gives those at
        some places among them: [places, bytes of a page]. What came from the first store goes back as it stayed there,
        and is not read: that would be a fifth of what it takes to fetch a text again."""
        keys = self._keys.of(namespace, ids)[first : first + count]
        touch = self._stores[0].touch
        new = [place for place, key in enumerate(keys) if not self._guarded(False, touch, key)]
        if not new:
            return
        for place, page in zip(new, read(new), strict=True):
            moving = [(keys[place], page)]
            for store in self._stores:
                moving = [left for one in moving for left in self._put(store, *one)]

    def find(self, namespace: str, ids: TokenIds, first: int) -> Iterator[Bytes]:
        """The pages from `first` on that some store has, without a gap; none where reading them does not pay. Each is
        to be read before the next one is asked for."""
        self._lookups += 1
        for key in self._keys.of(namespace, ids)[first:]:
            page = self._get(key)
            if page is None:
                return
            yield page

    def restored(self, num_tokens: int) -> None:
        """So many of the tokens whose pages were found need no computing."""
        self._restored_tokens += num_tokens

    def first_missing(self, namespace: str, ids: TokenIds, first: int) -> int:
        """The first of the full pages of the sequence, from `first` on, that no store has; behind the last one if none
        is missing."""
        keys = self._keys.of(namespace, ids)
        while first < len(keys) and self._holder(keys[first]) is not None:
            first += 1
        return first

    def holder(self, namespace: str, ids: TokenIds, page: int) -> str | None:
        """The name of the first store that has this page of the sequence, to be looked at."""
        return self._holder(self._keys.of(namespace, ids[: (page + 1) * self._page_size])[-1])

    def computed(self, num_tokens: int, seconds: float) -> None:
        """The model took so long for a step of so many prompt tokens."""
        rate = seconds / num_tokens
        old = self._seconds_per_token
        self._seconds_per_token = rate if old is None else 0.9 * old + 0.1 * rate

    def clear(self) -> None:
        for store in self._stores:
            self._guarded(None, store.clear)

    def fault(self, error: Exception) -> None:
        """Pages could not be kept or fetched, and are computed again: told once, with where it happened."""
        if not self._faults:
            log.warning("a store of pages failed: %s (told once; the count goes on)", error, exc_info=error)
        self._faults += 1

    def counts(self) -> Mapping[str, float]:
        nothing: Mapping[str, float] = {}
        told = {
            f"{store.name}_{name}": value
            for store in self._stores
            for name, value in self._guarded(nothing, store.counts).items()
        }
        return {"restored_tokens": self._restored_tokens, "faults": self._faults, **told}

    def _get(self, key: bytes) -> Bytes | None:
        for store in self._stores:
            if not self._pays(store.name):
                continue
            start, num_faults = time.perf_counter(), self._faults
            page = self._guarded(None, store.get, key)
            if page is not None or self._faults > num_faults:  # a fault that takes long is worth as little
                spent = time.perf_counter() - start
                old = self._seconds_per_page.get(store.name, spent)
                # One page that another process's work held up says little: several in a row are to.
                self._seconds_per_page[store.name] = 0.9 * old + 0.1 * min(spent, MOST_SLOWER * old)
            if page is not None:
                return page
        return None

    def _put(self, store: PageStore, key: bytes, page: Bytes) -> list[tuple[bytes, Bytes]]:
        return self._guarded([], store.put, key, page)

    def _holder(self, key: bytes) -> str | None:
        return next((store.name for store in self._stores if self._guarded(False, store.holds, key)), None)

    def _guarded(self, otherwise: T, ask: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        try:
            return ask(*args, **options)
        except Exception as error:
            self.fault(error)
            return otherwise

    def _pays(self, name: str) -> bool:
        page, token = self._seconds_per_page.get(name), self._seconds_per_token
        if page is None or token is None or page < token * self._page_size:
            return True
        return self._lookups % self.RETRY == 0
