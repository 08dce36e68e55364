"""A saved prefix cache: one file with the token paths of the tree and their pages, for a warm start.

The file begins with a line of JSON: version, the model's fingerprint, page size, bytes of a page. Then, path by path,
a line of JSON (namespace, tokens, index of the first page that is not an earlier path's, checksum) and the bytes: token
ids, then pages. The checksum is over them and what the line says. It is written beside and renamed; a damaged one is
read up to the damage.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from niwaki.radix.paths import TokenIds
from niwaki.runtime.api import ConfigError
from niwaki.runtime.api.faults import not_made
from niwaki.runtime.kv.tiers import Bytes

log = logging.getLogger("niwaki.tiers")

FORMAT = "niwaki cache"
VERSION = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """What must be equal for pages to mean the same."""

    fingerprint: bytes
    page_size: int
    page_bytes: int

    def header(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint.hex(),
            "page_size": self.page_size,
            "page_bytes": self.page_bytes,
        }


@dataclass(frozen=True, slots=True)
class SavedPath:
    """Tokens of one cached sequence, and its pages from `first` on: [count, page_bytes]."""

    namespace: str
    ids: TokenIds
    first: int
    pages: Bytes


class CacheWriter:
    """Writes paths to a file that appears under its name at the end of the `with` block; an error leaves no file."""

    def __init__(self, path: Path, layout: Layout) -> None:
        path = Path(os.path.realpath(path))  # of a link, what it leads to
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "is no file, and would be replaced by one", str(path))
        self._path = path
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
        except FileNotFoundError as error:
            raise not_made(path, error) from None
        self._file: BinaryIO = os.fdopen(handle, "wb")
        self._name = name
        self._write_line(layout.header())

    def add(self, saved: SavedPath) -> None:
        data = saved.ids.tobytes() + saved.pages.tobytes()
        self._write_line(
            {
                "namespace": saved.namespace,
                "tokens": len(saved.ids),
                "first": saved.first,
                "pages": len(saved.pages),
                "crc32": _checksum(saved.namespace, len(saved.ids), saved.first, data),
            }
        )
        self._file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, place: object) -> None:
        try:
            self._name_file(error)
            self._file.close()  # writes what is left
            if kind is None:
                os.replace(self._name, self._path)
        except OSError as failed:
            self._name_file(failed)
            raise
        finally:
            Path(self._name).unlink(missing_ok=True)  # missing where it has got its name

    def _name_file(self, error: BaseException | None) -> None:
        """A disk that is full says nothing but that."""
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._path)

    def _write_line(self, fields: dict[str, object]) -> None:
        self._file.write(json.dumps(fields).encode() + b"\n")


def read_cache(path: Path, layout: Layout) -> Iterator[SavedPath]:
    """The paths of a saved cache, up to the end or to the first damage, which is told once as a warning.

    Raises:
        ConfigError: not such a file, or one of another model, dtype, page size or version.
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        _check_header(path, _line(file), layout)
        while True:
            at = file.tell()
            fields = _line(file)
            if fields is None:
                return
            saved = _read_path(file, fields, layout)
            if saved is None:
                log.warning("%s is damaged behind byte %d; what stands before is used", path, at)
                return
            yield saved


def _line(file: BinaryIO) -> dict[str, object] | None:
    """The next line as JSON; {} where it is none, None at the end of the file."""
    line = file.readline(65_536)
    if not line:
        return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _check_header(path: Path, fields: dict[str, object] | None, layout: Layout) -> None:
    if not fields or fields.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a saved cache")
    for name, wanted in layout.header().items():
        if fields.get(name) != wanted:
            if name == "fingerprint":  # a hash, which nobody can read
                raise ConfigError(
                    f"{path} was saved by an engine of another model, dtype, kv_dtype, weights, page_size or "
                    "deterministic; load it into one like that, or save it anew"
                )
            raise ConfigError(f"{path} was saved with another {name}: {fields.get(name)}, and here it is {wanted}")


def _read_path(file: BinaryIO, fields: dict[str, object], layout: Layout) -> SavedPath | None:
    namespace, tokens = fields.get("namespace"), fields.get("tokens")
    first, pages = fields.get("first"), fields.get("pages")
    if not isinstance(namespace, str) or not isinstance(tokens, int):
        return None
    if not isinstance(first, int) or not isinstance(pages, int):
        return None
    if min(tokens, first, pages) < 0 or -(-tokens // layout.page_size) != first + pages:
        return None
    size = tokens * 4 + pages * layout.page_bytes
    if size > os.fstat(file.fileno()).st_size - file.tell():  # nobody need find memory for what is not there
        return None
    data = file.read(size)
    if len(data) != size or _checksum(namespace, tokens, first, data) != fields.get("crc32"):
        return None
    ids = np.frombuffer(data[: tokens * 4], np.int32)
    content = np.frombuffer(data[tokens * 4 :], np.uint8).reshape(pages, layout.page_bytes)
    return SavedPath(namespace, ids, first, content)


def _checksum(namespace: str, tokens: int, first: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(json.dumps([namespace, tokens, first]).encode()))
