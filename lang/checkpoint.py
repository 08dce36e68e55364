"""A batch that survives a kill: finished rows stand in a journal, and the same call made again reads them from there.

What a row stores is what `niwaki run` writes: its variables, or what the program returned, as JSON values. Beside them
stands a digest of the row, so that results are never given for other rows than those they were made from.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

from niwaki.lang.batch import Journal, JournalError
from niwaki.lang.behind import Keep
from niwaki.lang.definitions import definitions_of
from niwaki.lang.export import exported
from niwaki.lang.retry import Wording, opened_journal
from niwaki.lang.state import State
from niwaki.runtime import api
from niwaki.runtime.api import ConfigError, EngineStopped, NiwakiError, ProgramError
from niwaki.runtime.api.faults import path_of

RowT = TypeVar("RowT")
StoredRow: TypeAlias = Mapping[str, object]

DIGEST_KEY: Final = "row_digest"
RESERVED_NAMES: Final = ("index", "error", DIGEST_KEY)  # what the journal's line itself says
WORDING: Final = Wording("retry_failed=True", "give at least {count} rows")


def check_checkpoint(path: str | Path | None, *, retry_failed: bool) -> None:
    """Raises ConfigError: this is no path, or rows are to run again of a file that nobody names."""
    if path is not None:
        path_of("checkpoint", path)
    if retry_failed and path is None:
        raise ConfigError("retry_failed runs the failed rows of a checkpoint again: name its file with checkpoint=...")


def run_with_checkpoint(
    run: Callable[[Iterable[RowT], Keep[State]], Iterator[State | Exception]],
    rows: Iterable[RowT],
    path: Path,
    fingerprint: Mapping[str, str],
    *,
    retry_failed: bool = False,
    raises: bool = False,
) -> Iterator[StoredRow | Exception]:
    """Yield one result a row, in order: of those that the journal at `path` holds what stands there, of the rest what
    `run(rest, keep)` gives. It may call `keep` as `run_rows` does.

    A row that failed yields its exception; one out of the journal is of the same class where that is one of niwaki's,
    else a ProgramError that names it. With `retry_failed` those rows are in the rest, too, see `Retry`. With `raises`
    the first failure is raised and not written, so that its row runs again next time. Memory does not grow with the
    rows. Each row is on its way to the disk before it is yielded.

    Raises:
        JournalError: the journal is of another program, other options, another model or other rows; or failed rows of
            it were being run again, and only that may go on.
        ConfigError: with `retry_failed`, `rows` are fewer than stand there.
        EngineStopped: the backend is gone; the rows that are left stay undone.
    """
    with _opened(path, fingerprint, rows, retry_failed=retry_failed) as journal:
        results = _Results(journal, rows, raises=raises)
        try:
            yield from results.before_any_runs()
            for outcome in run(results.to_run, results.keep):
                yield from results.before_next()
                yield results.of(outcome)
            yield from results.before_next()
            results.finish()
        except GeneratorExit:
            if results.are_all:  # whoever counts the rows asks for no more
                results.finish()
            raise


async def run_with_checkpoint_async(
    run: Callable[[Iterable[RowT], Keep[State]], AsyncGenerator[State | Exception, None]],
    rows: Iterable[RowT],
    path: Path,
    fingerprint: Mapping[str, str],
    *,
    retry_failed: bool = False,
    raises: bool = False,
) -> AsyncGenerator[StoredRow | Exception, None]:
    """`run_with_checkpoint` for `async for`. Closing it closes what `run` gave."""
    with _opened(path, fingerprint, rows, retry_failed=retry_failed) as journal:
        results = _Results(journal, rows, raises=raises)
        try:
            for result in results.before_any_runs():
                yield result
            outcomes = run(results.to_run, results.keep)
            try:
                async for outcome in outcomes:
                    for result in results.before_next():
                        yield result
                    yield results.of(outcome)
            finally:
                await outcomes.aclose()
            for result in results.before_next():
                yield result
            results.finish()
        except GeneratorExit:
            if results.are_all:
                results.finish()
            raise


@contextmanager
def _opened(
    path: Path, fingerprint: Mapping[str, str], rows: Iterable[object], *, retry_failed: bool
) -> Iterator[Journal]:
    with opened_journal(path, fingerprint, WORDING, num_rows=_count(rows), retry_failed=retry_failed) as journal:
        journal.begin()
        yield journal


class _Results(Generic[RowT]):
    """Brings what stands in a journal and what is run into the order of the rows.

    `to_run` gives the rows that are to be run. Whoever reads it is ahead of the results; it looks at each row that it
    passes, since a line stands for the row that it was made from and for no other. Results that stand read their lines
    once more, so that memory does not grow with the rows between two that are run.
    """

    def __init__(self, journal: Journal, rows: Iterable[RowT], *, raises: bool) -> None:
        self.to_run = self._to_run()
        self._journal = journal
        self._rows = iter(rows)
        self._num_rows = _count(rows)
        self._raises = raises
        self._ahead = chain(journal.standing(), repeat(None))
        self._line = next(self._ahead)  # of the next row in `_rows`
        self._lines = chain(journal.standing(), repeat(None))  # from the next result on
        self._num_read = 0
        self._num_told = 0
        self._digests: deque[str] = deque()  # of the rows that were given out and are not written yet
        self._num_run = 0  # of those that were given out and are written

    def before_any_runs(self) -> Iterator[StoredRow | Exception]:
        """The results of the rows before the first that is to be run; each row is read when its result is asked for."""
        while self._line is not None:
            try:
                row = next(self._rows)
            except StopIteration:
                return
            self._look_at(row)
            yield from self.before_next()

    def before_next(self) -> Iterator[StoredRow | Exception]:
        """The results that stand between the last one and that of the next row that was run."""
        while self._num_told < self._num_read and (line := next(self._lines)) is not None:
            self._num_told += 1
            result = _stored_result(_parsed(line))
            if self._raises and isinstance(result, Exception):
                raise result
            yield result

    def of(self, outcome: State | Exception) -> StoredRow | Exception:
        """The result of the next row that was run, which is written here."""
        result = _write(self._journal, outcome, self._digests.popleft(), raises=self._raises)
        self._num_told += 1
        self._num_run += 1
        return result

    def keep(self, number: int, outcome: State | Exception) -> None:
        """The row of that number among those to run has its result, and waits for an earlier one."""
        if isinstance(outcome, EngineStopped) or (self._raises and isinstance(outcome, Exception)):
            return
        with suppress(Exception):  # what cannot be written is told when its turn comes
            values = _told(outcome) if isinstance(outcome, Exception) else exported(outcome, reserved=RESERVED_NAMES)
            self._journal.keep(number, {**values, DIGEST_KEY: self._digests[number - self._num_run]})

    @property
    def are_all(self) -> bool:
        return self._num_told == self._num_rows

    def finish(self) -> None:
        """Every row has its result."""
        self._journal.complete()
        self._journal.settle()
        self._journal.finish()

    def _to_run(self) -> Iterator[RowT]:
        for row in self._rows:
            if self._look_at(row):
                yield row

    def _look_at(self, row: RowT) -> bool:
        """Whether the row is to be run. Raises JournalError: it is not the one that its line was made from."""
        line, self._line = self._line, next(self._ahead)
        digest = digest_of(row)
        if line is None:
            self._digests.append(digest)
        elif (stands := _parsed(line)).get(DIGEST_KEY) != digest:
            raise JournalError(
                f"row {stands['index']} is not the one that {self._journal.path} has a result of: give the same rows, "
                "or name another checkpoint"
            )
        self._num_read += 1
        return line is None


def _count(rows: Iterable[object]) -> int | None:
    """How many they are; None where that turns out only as they are read."""
    return len(rows) if isinstance(rows, Sized) else None


def _write(journal: Journal, outcome: State | Exception, digest: str, *, raises: bool) -> StoredRow | Exception:
    if isinstance(outcome, EngineStopped):
        raise outcome
    try:
        if isinstance(outcome, Exception):
            raise outcome
        values = exported(outcome, reserved=RESERVED_NAMES)
        journal.write({**values, DIGEST_KEY: digest})
    except OSError:
        raise  # the disk, not the row
    except Exception as error:
        if raises:
            raise
        journal.write({**_told(error), DIGEST_KEY: digest})
        return error
    return values


def _told(error: Exception) -> dict[str, object]:
    told: dict[str, object] = {"type": type(error).__name__, "message": str(error)}
    if notes := [str(note) for note in getattr(error, "__notes__", ())]:
        told["notes"] = notes
    return {"error": told}


def _parsed(line: bytes) -> Mapping[str, object]:
    row = json.loads(line)
    assert isinstance(row, dict), "the journal has looked at it"
    return row


def _stored_result(line: Mapping[str, object]) -> StoredRow | Exception:
    error = line.get("error")
    if isinstance(error, dict):
        name, message = str(error.get("type")), str(error.get("message"))
        known = getattr(api, name, None)
        if isinstance(known, type) and issubclass(known, NiwakiError):
            stored = known(message)
        else:
            stored = ProgramError(f"{name}: {message}")
        notes = error.get("notes")
        for note in notes if isinstance(notes, list) else ():
            stored.add_note(str(note))
        return stored
    return {name: value for name, value in line.items() if name not in RESERVED_NAMES}


# ---------------------------------------------------------------------------------------------------------------
# What results depend on
# ---------------------------------------------------------------------------------------------------------------


def digest_of(row: object) -> str:
    """A digest of the row's content. Functions count by name and source, sets by what is in them, other objects that
    JSON has nothing for by their repr, or by their type alone."""
    try:
        text = json.dumps(row, sort_keys=True, default=_described)
    except (TypeError, ValueError):  # keys of several types, or of none that JSON has; a number of 5,000 digits; a ring
        text = json.dumps(_written_out(row, ()), default=_described)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _written_out(value: object, around: tuple[int, ...]) -> object:
    """The same as lists of what JSON knows. `around`: the ids of what it stands in."""
    if id(value) in around:
        return "..."
    inside = (*around, id(value))
    match value:
        case dict():
            return sorted([digest_of(key), digest_of(_written_out(one, inside))] for key, one in value.items())
        case list() | tuple():
            return [_written_out(one, inside) for one in value]
        case int() if not isinstance(value, bool):
            return hex(value)
    return value


def _described(value: object) -> object:
    if inspect.isroutine(value):
        return _function(value)
    if isinstance(value, set | frozenset):  # the order of its repr is another one in the next process
        return sorted(map(digest_of, value))
    shown = repr(value)
    # An address is another one in the next process.
    return type(value).__qualname__ if " at 0x" in shown else shown


def fingerprint_of(func: Callable[..., object], options: Mapping[str, object], model: str) -> Mapping[str, str]:
    """What all rows depend on: the program's own source (where it can be read) and what that names, the run's options,
    the model."""
    said = {name: value for name, value in options.items() if name not in ("backend", "timeout")}
    return {
        "program": _function(func),
        **definitions_of(func),
        "options": digest_of(said),
        "model": model,
    }


def _function(func: Callable[..., object]) -> str:
    """Its name, and a digest of its source, where that can be read."""
    try:
        source = inspect.getsource(func)
    except (OSError, TypeError):
        source = ""
    return f"{getattr(func, '__qualname__', func)}:{hashlib.sha256(source.encode()).hexdigest()}"
