"""What a run over a file of records says: what became of each, a bar while it runs, the counts at its end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TextIO

from niwaki.lang.export import SHORTENED
from niwaki.lang.origin import note_of_body
from niwaki.lang.progress import SECONDS_BETWEEN_READS, hit_rate, speed
from niwaki.lang.tables import TABLE_SUFFIXES
from niwaki.runtime.api import EngineStopped

Usage = Callable[[], Mapping[str, float]]  # the engine's counters

PLAIN_PROGRESS_SECONDS = 5.0
NUM_NAMED = 5  # records that a report names
LONGEST_ERROR = 400  # characters of the first error; its row has all of it


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of a record instead of a row."""

    type: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        where = note_of_body(error)  # who runs a program sees a traceback; a record has this line alone
        return cls(type(error).__name__, one_line(error) + (f" ({where})" if where else ""))

    @classmethod
    def unless_whole(cls, result: Mapping[str, object] | Failure | Exception) -> Mapping[str, object] | Failure:
        """Raises EngineStopped: no record can be run any more; it stays undone, so that a restart finds it."""
        if isinstance(result, EngineStopped):
            raise result
        return cls.of(result) if isinstance(result, Exception) else result


@dataclass(slots=True)
class Tally:
    """Counts of this run. `usage` reads the engine's counters, which started at zero with it."""

    num_before: int
    num_records: int
    usage: Usage
    num_rows: int = 0
    num_errors: int = 0
    first_error: str = ""
    num_shortened: int = 0  # records with values that a budget made shorter
    first_shortened: list[int] = field(default_factory=list)
    started_at: float = field(default_factory=time.perf_counter)

    def count(self, number: int, failure: Failure | None, *, is_shortened: bool = False) -> None:
        """Count the record of that number: what it failed with, or whether its row has shortened values."""
        if is_shortened:
            self.num_shortened += 1
            if self.num_shortened <= NUM_NAMED:
                self.first_shortened.append(number)
        if failure is not None:
            self.num_errors += 1
            self.first_error = self.first_error or f"record {number}: {failure.type}: {_shown(failure.message)}"
        self.num_rows += 1

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_at

    def speed(self) -> str:
        return speed(self.usage(), self.seconds)

    def report(self, path: Path) -> str:
        usage = self.usage()
        records, failed = "records", ""
        if self.num_errors:
            failed = f", {self.num_errors} of them with an error (the first is {self.first_error})"
        if self.num_rows == 1:
            records, failed = "record", f", with an error ({self.first_error})" * self.num_errors
        before = f" ({self.num_before} stood there already)" if self.num_before else ""
        return (
            f"{self.num_rows} {records} in {self.seconds:.1f} s ({self.num_rows / self.seconds:.1f} a second){failed}\n"
            f"{self._shortened(path)}"
            f"tokens: {usage['prefilled_tokens']:,.0f} prefilled, {usage['cached_tokens']:,.0f} cached, "
            f"{usage['generated_tokens']:,.0f} generated; cache hit rate {hit_rate(usage):.1%}\n"
            f"written to {path}{before}"
        )

    def _shortened(self, path: Path) -> str:
        """A line on the values that budgets made shorter; empty where there are none."""
        if not self.num_shortened:
            return ""
        records = "record" if self.num_shortened == 1 else "records"
        named = ", ".join(map(str, self.first_shortened))
        more = f" and {self.num_shortened - NUM_NAMED} more" if self.num_shortened > NUM_NAMED else ""
        return (
            f"max_tokens shortened values of {self.num_shortened} {records} ({named}{more}): they are valid, and may "
            f"not be whole; {_how_to_find(path)}\n"
        )


class Progress:
    """A bar on a terminal; elsewhere a plain line every few seconds."""

    def __init__(self, tally: Tally, stream: TextIO) -> None:
        self._tally = tally
        self._stream = stream
        self._shown_at = self._read_at = time.monotonic()
        self._bar = None
        if stream.isatty():
            from tqdm import tqdm  # only a terminal needs it

            self._bar = tqdm(
                initial=tally.num_before, total=tally.num_records, unit="record", dynamic_ncols=True, file=stream
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._tally.speed())
            self._bar.close()

    def show(self) -> None:
        """Call after each record."""
        if self._bar is not None:
            if time.monotonic() - self._read_at >= SECONDS_BETWEEN_READS:  # they take a third of the time of a row
                self._read_at = time.monotonic()
                self._bar.set_postfix_str(self._tally.speed(), refresh=False)
            self._bar.update()
        elif time.monotonic() - self._shown_at > PLAIN_PROGRESS_SECONDS:
            self._shown_at = time.monotonic()
            done = self._tally.num_before + self._tally.num_rows
            print(f"{done}/{self._tally.num_records} records, {self._tally.speed()}", file=self._stream, flush=True)


def _shown(message: str) -> str:
    """Of a long one its beginning, and its end, which names the program's line."""
    if len(message) <= LONGEST_ERROR:
        return message
    return f"{message[: LONGEST_ERROR // 2]} ... {message[-LONGEST_ERROR // 2 :]}"


def _how_to_find(path: Path) -> str:
    """All rows with such values, in an output."""
    if path.suffix.lower() in TABLE_SUFFIXES:
        return f'the column "{SHORTENED}" names them'
    find = f": grep '\"{SHORTENED}\"' {shlex.quote(str(path))}" if path.is_file() else ""
    return f'"{SHORTENED}" in a row names them{find}'


def one_line(error: BaseException) -> str:
    """The message, and the program's line where the error knows it."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return " ".join(f"{error}{notes}".split())
