"""The failed rows of an output, run again: a journal beside it, which takes its place when all rows are in it.

Until then the output stands as it was. Knows rows by their lines alone, neither programs nor records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress, islice, repeat
from pathlib import Path
from typing import TypeVar

from niwaki.lang.batch import Journal, JournalError, lines_of
from niwaki.runtime.api import ConfigError

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class Wording:
    """How a caller is told to run failed rows again, and to give all rows: `{count}` is how many there are at least."""

    option: str
    all_rows: str


@contextmanager
def opened_journal(
    path: Path,
    fingerprint: Mapping[str, str],
    wording: Wording,
    *,
    num_rows: int | None,
    restart: bool = False,
    retry_failed: bool = False,
) -> Iterator[Journal]:
    """The journal at `path` or, with `retry_failed` where rows in it failed, a `Retry` of it.

    `num_rows`: how many rows there are to go through, where that is known. With `restart` what was run again is thrown
    away, too: after `forget_retry`.

    Raises:
        JournalError: failed rows of it were being run again, and only that may go on; or as `Journal` and `Retry` say.
        ConfigError: fewer rows than stand there would leave failed ones out; or as `Retry` says.
    """
    with Journal(path, fingerprint, restart=restart, runs_failed=retry_failed) as journal:
        if not retry_failed:
            if not restart:
                _check_no_retry(journal, wording)
            yield journal
        elif num_rows is not None and num_rows < journal.num_done:
            raise ConfigError(
                f"{path} has {journal.num_done} rows, and {wording.option} goes through all of them: "
                + wording.all_rows.format(count=journal.num_done)
            )
        elif journal.is_resumable and not _has_failed(journal):
            yield journal
        else:
            with Retry(journal, fingerprint) as retry:
                yield retry


def _has_failed(journal: Journal) -> bool:
    return _retry_path(journal.path).exists() or num_failed(journal.path, journal.num_done) > 0


class Retry(Journal):
    """A journal of all rows in which those that failed in `before` are new, and the others are copied from there.

    It stands in PATH.retry, and goes on there after a kill as `before` does in PATH: what was run again once, and what
    came of it, stays. Rows that `before` has not are written behind them. With `settle` it becomes the file at PATH,
    in one step of the file system; until then no byte of a row in PATH changes.

    Raises:
        JournalError: PATH.retry is not of the rows in PATH, or as `Journal` says.
        ConfigError: the output is no file that a run goes on from.
    """

    def __init__(self, before: Journal, fingerprint: Mapping[str, str]) -> None:
        if not before.is_resumable:
            raise ConfigError(f"{before.path} is no file, from which failed rows could be run again; name one")
        self._before = before
        super().__init__(_retry_path(before.path), fingerprint)
        try:
            self._check_rows()
        except BaseException:
            self.close()
            raise
        self._kept = enumerate(islice(lines_of(before.path), before.num_done))  # of `before`; those to copy are taken
        self._next: tuple[int, bytes] | None = next(islice(self._kept, self.num_done, None), None)

    def begin(self) -> None:
        """As of every journal, of both files: PATH has its sidecar before this one takes its place."""
        self._before.begin()
        super().begin()

    def write(self, row: Mapping[str, object]) -> None:
        """Append the next row that was run, behind those before it that stay."""
        self._copy()
        super().write(row)

    def keep(self, number: int, row: Mapping[str, object]) -> None:
        """Nothing: the rows of a retry that wait run again."""

    def undone(self, rows: Iterable[RowT]) -> Iterator[RowT]:
        """Those of all rows that failed or were not run, from where this journal stands."""
        return compress(super().undone(rows), chain(map(is_failed, self._left()), repeat(True)))

    def standing(self) -> Iterator[bytes | None]:
        return chain(super().standing(), (None if is_failed(line) else line for line in self._left()))

    def complete(self) -> None:
        """Raises ConfigError: there were fewer rows than in PATH, so that a failed one was not run again."""
        self._copy()
        if self.num_done < self._before.num_done:
            raise ConfigError(
                f"{self._before.path} has {self._before.num_done} rows, and only {self.num_done} were given: "
                "give all of them, so that each failed one runs again"
            )

    def settle(self) -> None:
        """Take the place of the file at PATH."""
        assert self.num_done >= self._before.num_done, "a row that failed was not run again"
        self._replace(self._before)
        self._before.forget_ahead()

    def _left(self) -> Iterator[bytes]:
        """The lines of `before` from the row on that is written next."""
        return islice(lines_of(self._before.path), self.num_done, self._before.num_done)

    def _copy(self) -> None:
        """Append the rows of `before` up to its next failed one, which is for `write`."""
        while self._next is not None:
            number, line = self._next
            if number == self.num_done:
                if is_failed(line):
                    return
                self._append(line)
            self._next = next(self._kept, None)

    def _check_rows(self) -> None:
        """Whatever is not an error in the output must stand here as well: nothing of it may go."""
        with self.path.open("rb") as here, self._before.path.open("rb") as there:
            for _ in range(min(self.num_done, self._before.num_done)):
                mine, theirs = here.readline(), there.readline()
                if mine != theirs and not is_failed(theirs):
                    raise JournalError(
                        f"{self.path} is no retry of the rows that stand in {self._before.path} now: delete it"
                    )


def _check_no_retry(journal: Journal, wording: Wording) -> None:
    path = _retry_path(journal.path)
    if journal.is_resumable and path.exists():
        raise JournalError(
            f"failed rows of {journal.path} were being run again when that was stopped: give {wording.option} to go on "
            f"with it, or delete {path} to keep what stands in {journal.path}"
        )


def forget_retry(journal: Journal) -> None:
    """Of an output that begins again, what was run again goes, too."""
    if journal.is_resumable:
        path = _retry_path(journal.path)
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.meta").unlink(missing_ok=True)


def _retry_path(path: Path) -> Path:
    """Beside the file itself, also where `path` is a link to it: only there can one take the other's place."""
    real = path.resolve() if path.is_symlink() else path
    return real.with_name(f"{real.name}.retry")


def num_failed(path: Path, count: int) -> int:
    """How many of the first `count` rows failed."""
    return sum(map(is_failed, islice(lines_of(path), count)))


def is_failed(line: bytes) -> bool:
    # No variable can be named so, see `exported`; within a value it may stand, so the bytes alone do not tell.
    return b'"error"' in line and "error" in json.loads(line)
