"""Kernels on the disk, where several processes compile at once.

Numba numbers the files of a function's code, one for each types of arguments, by what its index holds. Two processes
that compile it at once for different types both see an index without either, and take the same number: the index of the
one then leads to the other's code, at every later start. So the files are named by the types themselves. What else two
processes may do to each other is that one's line in the index is lost, and that is compiled again.
"""

from __future__ import annotations

import hashlib

from numba.core.caching import IndexDataCacheFile

Key = tuple[object, ...]  # types of arguments, processor, code: as Numba has them


class CodeByTypes(IndexDataCacheFile):
    def save(self, key: Key, data: object) -> None:
        name = f"{self._index_name}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"
        self._save_data(name, data)  # type: ignore[no-untyped-call]  # first: the index names nothing that is not there
        self._save_index({**self._load_index(), key: name})  # type: ignore[no-untyped-call]


def keep_by_types(dispatcher: object) -> None:
    """Let a function that Numba keeps on the disk be kept so."""
    cache = dispatcher._cache  # type: ignore[attr-defined]  # of Numba
    stamp = cache._impl.locator.get_source_stamp()
    cache._cache_file = CodeByTypes(cache._cache_path, cache._impl.filename_base, stamp)  # type: ignore[no-untyped-call]
