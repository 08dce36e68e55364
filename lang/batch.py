"""Many rows through one program: bounded concurrency, results in order, and a journal that survives a kill.

`run_rows` owns the threads of one batch; `Journal` owns one output file, its lock and its sidecar. Neither knows
what a program is or what a backend does.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, compress, count, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Literal, Self, TypeVar

from niwaki.lang.ahead import Ahead
from niwaki.lang.batch_places import as_one_batch
from niwaki.lang.behind import Behind, Keep
from niwaki.runtime.api import ConfigError, NiwakiError, ProgramError
from niwaki.runtime.api.faults import file_fault, file_faults, not_made

if sys.platform != "win32":
    import fcntl

RowT = TypeVar("RowT")
ResultT = TypeVar("ResultT")

DEFAULT_CONCURRENCY = 32

# Rows that are read and have not ended, in multiples of the concurrency: more than run at once, so that a caller who is
# busy with a result keeps no thread waiting for its next row. It bounds the memory that rows take.
READ_AHEAD: Final = 4
# How far the row being read may run ahead of the oldest unfinished one, likewise: results that wait for an earlier one.
# It bounds their memory; `keep` sees to it that a kill does not cost them. One row in a hundred that takes 30 times as
# long as others (a model that goes round in circles until its budget ends it) leaves 3 % of 32 threads idle; at 4 it
# would be 72 %.
WINDOW: Final = 32

FSYNC_SECONDS = 1.0

STDOUT = Path("/dev/stdout")


def run_rows(
    run_one: Callable[[RowT], ResultT],
    rows: Iterable[RowT],
    *,
    num_threads: int = DEFAULT_CONCURRENCY,
    on_error: Literal["return", "raise"] = "return",
    keep: Keep[ResultT] | None = None,
) -> Iterator[ResultT | Exception]:
    """Call `run_one` for every row on `num_threads` threads and yield its results in the order of the rows.

    A row that raises yields its exception and the others go on; with on_error="raise" the first such exception, in
    row order, is raised instead. `rows` is read lazily: at most `READ_AHEAD * num_threads` of them are unfinished, and
    none is `WINDOW * num_threads` behind the oldest of these, so memory does not grow with the number of rows. When
    `rows` itself raises, what was read before is finished and yielded first. Closing the iterator drops the rows that
    have not started and does not wait for those that have. To an engine all rows are one program.

    `keep` is called once for each result that has waited for an earlier one while nothing was yielded for a second.

    Raises:
        ConfigError: num_threads is below 1, or on_error is unknown: raised at once, not at the first result. Or the
            system allows fewer threads.
    """
    check_batch("num_threads", num_threads, on_error)
    results = _run_ordered(as_one_batch(run_one), rows, num_threads, Behind(keep))
    return _raise_errors(results) if on_error == "raise" else results


def check_batch(name: str, count: object, on_error: object) -> None:
    """Raises ConfigError: the option `name` is no count of rows at once, or on_error is unknown."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {count!r}")
    if on_error not in ("return", "raise"):
        raise ConfigError(f"on_error must be 'return' or 'raise', got {on_error!r}")


def _run_ordered(
    run_one: Callable[[RowT], ResultT], rows: Iterable[RowT], num_threads: int, behind: Behind[ResultT]
) -> Iterator[ResultT | Exception]:
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="niwaki-row")
    window: deque[Future[ResultT | Exception]] = deque()
    ended: SimpleQueue[int] = SimpleQueue()  # the numbers of the rows that have ended since this was last looked at
    num_read = 0
    num_open = 0  # rows that were handed to the threads and, as far as was looked, have not ended
    source = iter(rows)
    source_error: Exception | None = None
    is_exhausted = False
    try:
        while True:
            # Deliver what is ready before reading on, so that a journal never lags behind the work.
            while window and window[0].done():
                behind.gives_next()
                yield window.popleft().result()
            while not ended.empty():
                behind.has_ended(ended.get())
                num_open -= 1
            if not is_exhausted and num_open < READ_AHEAD * num_threads and len(window) < WINDOW * num_threads:
                try:
                    row = next(source)
                except StopIteration:
                    is_exhausted = True
                except Exception as error:  # kept until the rows before it are out
                    source_error, is_exhausted = error, True
                else:
                    window.append(_submitted(pool, run_one, row, partial(ended.put, num_read)))
                    num_open += 1
                    num_read += 1
            elif window:
                try:
                    behind.has_ended(ended.get(timeout=behind.patience()))
                    num_open -= 1
                except Empty:
                    behind.keep(lambda place: window[place].result())
            else:
                break
        if source_error is not None:
            raise source_error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _submitted(
    pool: ThreadPoolExecutor, run_one: Callable[[RowT], ResultT], row: RowT, end: Callable[[], None]
) -> Future[ResultT | Exception]:
    try:
        future = pool.submit(_attempt, run_one, row)
    except RuntimeError as error:
        if "new thread" not in str(error):  # the interpreter ends: fewer rows would not help
            raise
        # A user or a container has a limit of threads.
        raise ConfigError(f"{error}: the system allows no more of them; run fewer rows at once") from error
    future.add_done_callback(lambda _: end())  # when it is done: whoever is told finds it so
    return future


def _attempt(run_one: Callable[[RowT], ResultT], row: RowT) -> ResultT | Exception:
    try:
        return run_one(row)
    except Exception as error:  # the row's own outcome
        return error
    except SystemExit as stop:  # a program that calls sys.exit() fails its own row, not the batch
        return ProgramError(f"the program raised SystemExit({stop.code!r})")


def _raise_errors(results: Iterator[ResultT | Exception]) -> Iterator[ResultT | Exception]:
    for result in results:
        if isinstance(result, Exception):
            raise result
        yield result


# ---------------------------------------------------------------------------------------------------------------
# The journal
# ---------------------------------------------------------------------------------------------------------------


REMEDY: Final = "delete it (niwaki run --restart does), or name another file"


class JournalError(NiwakiError):
    """An output file cannot be continued: it belongs to another run, is in use, or is damaged."""


class Journal:
    """An output file of JSON lines, one per row and in row order, from which a killed run continues.

    Because lines stand in row order, the number of whole lines is all the state there is: `num_done` rows are
    finished, and the next one to write has that index. Each line is handed to the operating system at once (a kill
    loses nothing that was written). They are synced to the disk with the first line that comes a second after the last
    sync, at `finish` and at `close`: that much a power cut may lose. A half-written last line is cut off when the file
    is opened again. What a power cut leaves is never rows of one run beside the sidecar of another: what goes is gone
    on the disk before the sidecar changes, and that stands there before the next row.

    `fingerprint` names what the rows depend on (the input, the program, the options) by hashes. It is kept in
    PATH.meta, and a run with another fingerprint is refused. /dev/stdout, whatever stands behind it, and a path that
    is no regular file are only written: no lock, no sidecar, nothing to continue.

    Rows that are done before their turn and wait long for it stand in PATH.ahead, see `keep`. With `runs_failed` those
    of them that failed run again.

    Opening changes nothing on disk but creating an empty file, which goes again unless `begin` prepares it for writing.

    Raises:
        JournalError: the rows in the file were made by another run, another process writes it, or it is damaged; or the
            system is Windows.
        OSError: the file cannot be opened.
    """

    @file_faults()
    def __init__(
        self, path: Path, fingerprint: Mapping[str, str], *, restart: bool = False, runs_failed: bool = False
    ) -> None:
        if sys.platform == "win32":
            raise JournalError(f"{path}: niwaki writes no output files on Windows, where it cannot lock them; use WSL")
        self.path = path
        self.meta_path = path.parent / f"{path.name}.meta"
        self.num_done = 0
        self._num_found = 0  # that stood there when it was opened
        self._fingerprint = dict(fingerprint)
        self._is_unused = False  # it was made here, it is ours, and nobody has begun
        self._fd, is_made_here = _opened(path)
        self._ahead = Ahead(path)
        self._end = 0  # bytes of whole lines
        self._is_unsynced = False
        self._synced_at = time.monotonic()
        self.is_resumable = path != STDOUT and stat.S_ISREG(os.fstat(self._fd).st_mode)
        try:
            if self.is_resumable:
                self._lock()
                self._is_unused = is_made_here
                if not (restart or is_made_here):
                    self._recover(leaves_failed=runs_failed)
        except BaseException:
            self.close()
            raise

    @file_faults()
    def begin(self) -> None:
        """Cut off what is not kept (a half line; with restart everything) and write the sidecar."""
        self._is_unused = False
        if self.is_resumable:
            if not (self.num_done or self._ahead.indices) and self._ahead.path.exists():  # of another run
                self._ahead.forget()
                _sync_folder(self.path.parent)
            if os.fstat(self._fd).st_size != self._end:  # a file that is whole keeps its time of change
                os.ftruncate(self._fd, self._end)
                self._sync()
            os.lseek(self._fd, self._end, os.SEEK_SET)
            self._write_meta(finished=False)

    def write(self, row: Mapping[str, object]) -> None:
        """Append the next row: JSON values only, under the index `num_done`.

        Raises:
            OSError: it could not be written whole; the file still ends with the row before it.
            ValueError: the row is not JSON (a float that is not finite, a lone surrogate).
        """
        self._append_ahead()
        self._append(_line_of(self.num_done, row))

    def keep(self, number: int, row: Mapping[str, object]) -> None:
        """The row of that number among the `undone` is done, and waits for an earlier one: after a kill it is not run
        again. Raises ValueError: the row is not JSON."""
        if self.is_resumable:
            self._ahead.add(_line_of(self._ahead.index_of(number, self._num_found), row))

    def undone(self, rows: Iterable[RowT]) -> Iterator[RowT]:
        """Those of all rows that are to be run: those that are neither written nor ahead."""
        ahead = self._ahead.indices
        rest = islice(rows, self.num_done, None)
        return compress(rest, (index not in ahead for index in count(self.num_done))) if ahead else rest

    def standing(self) -> Iterator[bytes | None]:
        """Of the first rows, in order, the lines that stay: None for one that is to be run, as all behind them are."""
        ahead = range(self.num_done, max(self._ahead.indices, default=-1) + 1)
        return chain(islice(lines_of(self.path), self.num_done), map(self._ahead.line, ahead))

    def complete(self) -> None:
        """All rows that were to be run are written: have those that stay behind them, too."""
        self._append_ahead()

    def settle(self) -> None:
        """All rows that were asked for are written, and it is complete; of the input there may be more."""
        if self.is_resumable and self._ahead.path.exists() and self.num_done > max(self._ahead.indices, default=-1):
            self._sync()
            self._ahead.forget()

    def forget_ahead(self) -> None:
        """Another journal has all rows."""
        self._ahead.forget()

    def _append_ahead(self) -> None:
        """Those whose turn it is."""
        while (line := self._ahead.line(self.num_done)) is not None:
            self._append(line)

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._is_unsynced = self.is_resumable
            if self.is_resumable and time.monotonic() - self._synced_at > FSYNC_SECONDS:
                self._sync()
        except OSError as error:
            self._cut_off_half_line()
            error.filename = str(self.path)  # else nobody is told which file it was
            raise file_fault(error) from None
        self._end += len(line)
        self.num_done += 1

    @file_faults()
    def finish(self) -> None:
        """Every row of the input is written: sync, and say so in the sidecar."""
        if self.is_resumable:
            self._sync()
            self._write_meta(finished=True)

    @file_faults()
    def close(self) -> None:
        """Sync what is written and give the file free. Closing twice is allowed."""
        if self._fd < 0:
            return
        self._ahead.close()
        try:
            if self._is_unused:  # what had to be there to be locked
                self.path.unlink(missing_ok=True)
            elif self._is_unsynced:
                self._sync()
        finally:
            fd, self._fd = self._fd, -1
            os.close(fd)  # gives up the lock as well

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(
                f"{self.path} is being written by another run; wait for it or name another output"
            ) from None
        if not _is_at(self._fd, self.path):  # another run, which had made it, began nothing and took it away
            raise JournalError(f"{self.path} was taken away by another run just now; begin again")

    def _recover(self, *, leaves_failed: bool) -> None:
        """Count the whole lines and check that they are rows of this very run."""
        with open(self._fd, "rb", closefd=False) as file:
            for line in file:
                is_whole = line.endswith(b"\n")
                # Half a line is of a run that was killed, and such a run has left its sidecar.
                is_row = _index_of(line) == self.num_done if is_whole else self.num_done or self.meta_path.exists()
                if not is_row:
                    raise JournalError(
                        f"line {self.num_done + 1} of {self.path} is not row {self.num_done} of a run: {REMEDY}"
                    )
                if not is_whole:
                    break
                self.num_done += 1
                self._end += len(line)
        self._num_found = self.num_done
        self._ahead.read(self.num_done, leaves_failed=leaves_failed)
        if self.num_done or self._ahead.indices:
            self._check_fingerprint()

    def _check_fingerprint(self) -> None:
        try:
            meta = json.loads(self.meta_path.read_text("utf-8"))
            before = dict(meta["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError):
            raise JournalError(
                f"{self.path} holds {self._rows()}, but {self.meta_path.name}, which says from which run, "
                f"is missing or unreadable: {REMEDY}"
            ) from None
        mine = self._fingerprint
        both = [name for name in before if name in mine]
        # Where another program stands, what it no longer names, or newly does, says no more.
        changed = [name for name in both if before[name] != mine[name]] or sorted(before.keys() ^ mine.keys())
        if changed:
            raise JournalError(
                f"{self.path} holds {self._rows()} of another run (other {' and '.join(changed)}): {REMEDY}"
            )

    def _rows(self) -> str:
        count = self.num_done + len(self._ahead.indices)
        return f"{count} row{'s' * (count != 1)}"

    def _write_meta(self, *, finished: bool) -> None:
        text = json.dumps({"fingerprint": self._fingerprint, "finished": finished}, indent=2) + "\n"
        partial = self.meta_path.with_name(self.meta_path.name + ".partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.meta_path)
        except OSError as error:
            error.filename = error.filename or str(self.meta_path)
            with suppress(OSError):
                partial.unlink()
            raise
        _sync_folder(self.meta_path.parent)

    def _replace(self, other: Journal) -> None:
        """Take the name of `other`, whose sidecar says the same and whose rows, as far as they are to stay, are here.
        A kill leaves one or the other under that name."""
        self._sync()
        target = other.path.resolve()  # of a link, what it leads to
        os.fchmod(self._fd, stat.S_IMODE(target.stat().st_mode))
        self.path.replace(target)
        _sync_folder(target.parent)
        self.meta_path.unlink(missing_ok=True)
        self.path, self.meta_path = other.path, other.meta_path

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._is_unsynced = False
        self._synced_at = time.monotonic()

    def _cut_off_half_line(self) -> None:
        if self.is_resumable:
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, self._end, os.SEEK_SET)


def _line_of(index: int, row: Mapping[str, object]) -> bytes:
    try:
        return json.dumps({"index": index, **row}, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
    except ValueError as error:
        raise ValueError(_what_is_no_json(row, error)) from error


def lines_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _what_is_no_json(row: Mapping[str, object], error: ValueError) -> str:
    """Which of its values has no place in a line of JSON."""
    for name, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
        except ValueError:
            return f"{name!r} is no JSON that others read: {value!r:.200}"
    return str(error)


def _opened(path: Path) -> tuple[int, bool]:
    """Its descriptor, and whether the file was not there before."""
    if path == STDOUT:  # as it is: opened anew, a file behind it would be written from its beginning
        return os.dup(sys.stdout.fileno()), False
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_EXCL, 0o666), True
    except FileExistsError:
        if path.exists() and not path.is_file():
            # Who can read of a pipe is its reader: nobody else would be told that the other one is gone.
            flags = os.O_WRONLY | os.O_CLOEXEC
        return os.open(path, flags, 0o666), False
    except FileNotFoundError as error:
        raise not_made(path, error) from None


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file still has its name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _sync_folder(path: Path) -> None:
    """Let the names in it outlive a power cut, where the file system can and the folder may be read."""
    with suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _index_of(line: bytes) -> object:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row.get("index") if isinstance(row, dict) else None
