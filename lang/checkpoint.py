"""A batch that survives a kill: finished rows stand in a journal, and the same call made again reads them from there.

What a row stores is what `niwaki run` writes: its variables, or what the program returned, as JSON values. Beside them
stands a digest of the row, so that results are never given for other rows than those they were made from.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from niwaki.lang.batch import Journal, JournalError
from niwaki.lang.export import exported
from niwaki.lang.state import State
from niwaki.runtime import api
from niwaki.runtime.api import EngineStopped, NiwakiError, ProgramError

RowT = TypeVar("RowT")
StoredRow: TypeAlias = Mapping[str, object]

DIGEST_KEY: Final = "row_digest"
RESERVED_NAMES: Final = ("index", "error", DIGEST_KEY)  # what the journal's line itself says


def run_with_checkpoint(
    run: Callable[[Iterable[RowT]], Iterator[State | Exception]],
    rows: Iterable[RowT],
    path: Path,
    fingerprint: Mapping[str, str],
    *,
    raises: bool = False,
) -> Iterator[StoredRow | Exception]:
    """Yield one result a row, in order: of those that the journal at `path` holds what stands there, then `run(rest)`.

    A row that failed yields its exception; one out of the journal is of the same class where that is one of niwaki's,
    else a ProgramError that names it. With `raises` the first failure is raised and not written, so that its row runs
    again next time. Memory does not grow with the rows. Each row is on its way to the disk before it is yielded.

    Raises:
        JournalError: the journal is of another program, other options, another model or other rows.
        EngineStopped: the backend is gone; the rows that are left stay undone.
    """
    with Journal(path, fingerprint) as journal:
        journal.begin()
        source = iter(rows)
        yield from _stored(journal, source, raises=raises)
        rest = _Noted(source)
        for outcome in run(rest):
            yield _write(journal, outcome, rest.digests.popleft(), raises=raises)
        journal.finish()


async def run_with_checkpoint_async(
    run: Callable[[Iterable[RowT]], AsyncGenerator[State | Exception, None]],
    rows: Iterable[RowT],
    path: Path,
    fingerprint: Mapping[str, str],
    *,
    raises: bool = False,
) -> AsyncGenerator[StoredRow | Exception, None]:
    """`run_with_checkpoint` for `async for`. Closing it closes what `run` gave."""
    with Journal(path, fingerprint) as journal:
        journal.begin()
        source = iter(rows)
        for result in _stored(journal, source, raises=raises):
            yield result
        rest = _Noted(source)
        outcomes = run(rest)
        try:
            async for outcome in outcomes:
                yield _write(journal, outcome, rest.digests.popleft(), raises=raises)
        finally:
            await outcomes.aclose()
        journal.finish()


def _stored(journal: Journal, rows: Iterator[object], *, raises: bool) -> Iterator[StoredRow | Exception]:
    """What the journal holds of the first rows, which are taken from `rows`."""
    path = journal.path
    for line, row in zip(_lines(path, journal.num_done), rows, strict=False):
        result = _stored_result(line)
        if line.get(DIGEST_KEY) != digest_of(row):
            raise JournalError(
                f"row {line['index']} is not the one that {path} has a result of: give the same rows, "
                "or name another checkpoint"
            )
        if raises and isinstance(result, Exception):
            raise result
        yield result


class _Noted(Iterator[RowT]):
    """The same rows; the digests of those that were taken and are not written yet."""

    def __init__(self, rows: Iterator[RowT]) -> None:
        self._rows = rows
        self.digests: deque[str] = deque()

    def __next__(self) -> RowT:
        row = next(self._rows)
        self.digests.append(digest_of(row))
        return row


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
        told: dict[str, object] = {"type": type(error).__name__, "message": str(error)}
        if notes := [str(note) for note in getattr(error, "__notes__", ())]:
            told["notes"] = notes
        journal.write({"error": told, DIGEST_KEY: digest})
        return error
    return values


def _lines(path: Path, count: int) -> Iterator[dict[str, object]]:
    """The first `count` lines, which the journal has checked."""
    with path.open("rb") as file:
        for _ in range(count):
            line = json.loads(file.readline())
            assert isinstance(line, dict), "the journal has looked at it"
            yield line


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
    """What all rows depend on: the program's own source (where it can be read), the run's options, the model."""
    said = {name: value for name, value in options.items() if name not in ("backend", "timeout")}
    return {
        "program": _function(func),
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
