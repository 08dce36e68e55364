"""Rows of an output that were done before their turn and wait for a slow one: beside it, so that a kill costs none.

A file of its own, PATH.ahead, with the lines that the output will have. Knows neither programs nor what a line says
but its index.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path


class Ahead:
    """Owns PATH.ahead. What stood there when it was read is offered; what is added is for the next run that reads it.

    It only saves work: where it cannot be written nothing fails, and rows run again. There is no file before there is
    something to add. A line is as it will be in PATH; half a line, which a kill leaves, is passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}.ahead")
        self._fd: int | None = None
        self._is_off = False  # it could not be written
        self._places: dict[int, tuple[int, int]] = {}  # of each row that is offered: where its line begins, its length

    def read(self, first: int, *, leaves_failed: bool) -> None:
        """Offer the rows from index `first` on; with `leaves_failed` but those that failed."""
        with suppress(OSError):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            begin = 0
            with open(self._fd, "rb", closefd=False) as file:
                for line in file:
                    index = _index_of(line, leaves_failed=leaves_failed)
                    if index is not None and index >= first:
                        self._places[index] = begin, len(line)
                    begin += len(line)

    @property
    def indices(self) -> frozenset[int]:
        """Of the rows that are offered."""
        return frozenset(self._places)

    def index_of(self, number: int, first: int) -> int:
        """That of the row of this number among those from `first` on that are not offered."""
        index = first + number
        for taken in sorted(self._places):
            if taken > index:
                break
            index += 1
        return index

    def line(self, index: int) -> bytes | None:
        """That of a row that is offered."""
        if index not in self._places:
            return None
        assert self._fd is not None, "it was read from there"
        begin, size = self._places[index]
        return os.pread(self._fd, size, begin)

    def add(self, line: bytes) -> None:
        if self._is_off:
            return
        try:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            # Behind a line of its own: what stands there may end in half of one.
            text = b"\n" + line if os.lseek(self._fd, 0, os.SEEK_END) else line
            self._is_off = os.write(self._fd, text) != len(text)
        except OSError:  # a full disk: the output itself will say so
            self._is_off = True

    def forget(self) -> None:
        """Nothing waits any more. What is offered can still be read."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _index_of(line: bytes, *, leaves_failed: bool) -> int | None:
    with suppress(ValueError):
        row = json.loads(line)
        if line.endswith(b"\n") and isinstance(row, dict) and not (leaves_failed and "error" in row):
            index = row.get("index")
            return index if isinstance(index, int) else None
    return None
