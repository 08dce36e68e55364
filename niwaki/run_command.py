"""`niwaki run`: every record of a file through a program, by an engine here or by several on Ray.

Owns the order of things: what can be refused is refused before work begins, and each row is written when it is done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from pydantic_core import PydanticSerializationError, to_json

from niwaki.lang.batch import Journal, run_rows
from niwaki.lang.definitions import definitions_of
from niwaki.lang.export import SHORTENED, exported
from niwaki.lang.picture import picture_of
from niwaki.lang.program import Program
from niwaki.lang.program_file import JsonObject, load_program, parameters_of, program_target
from niwaki.lang.record_types import RecordTypes
from niwaki.lang.records import Record, RecordError, RecordFile
from niwaki.lang.report import Failure, Progress, Tally, Usage, one_line
from niwaki.lang.retry import Wording, forget_retry, num_failed, opened_journal
from niwaki.lang.tables import TABLE_SUFFIXES, SentRows, check_output, write_table
from niwaki.lang.tree import Tree
from niwaki.runtime.api import ConfigError, EngineStopped, NiwakiError
from niwaki.runtime.checkpoint.weights_digest import weights_fingerprint

NUM_TRACED = 10  # records that --trace draws
RESERVED_NAMES = ("index", "error")  # what the output line itself says
WORDING = Wording("--retry-failed", "give no --limit, or one of at least {count}")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `niwaki run` was asked to do."""

    program_file: Path
    function: str
    input: Path
    output: Path
    model: Path | None
    limit: int | None
    concurrency: int
    record_separator: str | None
    column: str | None
    restart: bool
    retry_failed: bool
    strict: bool
    trace: Path | None
    ray: int | None
    ray_address: str | None
    deterministic: bool

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> RunOptions:
        """Raises ConfigError for a target that is no FILE.py:FUNCTION."""
        program_file, function = program_target(arguments.program)
        given = {name: value for name, value in vars(arguments).items() if name not in ("program", "command")}
        return cls(program_file=program_file, function=function, **given)


def run(options: RunOptions) -> int:
    """Run the program over the records and report. Everything that can be refused is refused before work begins."""
    records = RecordFile.open(options.input, separator=options.record_separator, column=options.column)
    _check_nothing_is_overwritten(options)
    if options.restart and options.retry_failed:
        raise ConfigError("--restart runs all records again, --retry-failed those that failed: give one of them")
    if options.trace is not None and options.ray is not None:
        raise ConfigError("--trace draws what runs in this process: leave --ray out")
    if options.trace is not None:
        _check_trace(options.trace, (options.input, options.program_file, options.output))
    check_output(options.output)
    program = load_program(options.program_file, options.function)
    to_parameters = parameters_of(program, records)
    num_records = records.count()
    last = num_records if options.limit is None else min(options.limit, num_records)
    with _journal(options, program, records, last) as journal:
        num_undone = sum(1 for _ in journal.undone(range(last)))
        if not num_undone:
            _begin(options, journal)
            _settle(options, journal, last)
            if last == num_records:
                journal.finish()
            print(_nothing_to_do(options, journal, last))
            return 0
        trees: dict[int, Tree] = {}
        rows = journal.undone(islice(records, last))
        with (
            _in_process(options, program, to_parameters, records, rows, trees, journal)
            if options.ray is None
            else _on_ray(options, options.ray, to_parameters, records, rows)
        ) as (results, usage):
            _begin(options, journal)
            tally = Tally(num_before=last - num_undone, num_records=last, usage=usage)
            try:
                _write_rows(journal, tally, results)
                _settle(options, journal, last)
                if options.trace is not None:
                    picture_of([trees[number] for number in sorted(trees)]).save(options.trace)
                if last == num_records:
                    journal.finish()
            except KeyboardInterrupt:
                return fail(f"interrupted; {_how_to_continue(journal)}", 130)
            except OSError as error:
                where = error.filename or journal.path
                return fail(f"{error.strerror or error}: {where}; {_how_to_continue(journal)}")
            except NiwakiError as error:
                return fail(f"{one_line(error)}; {_how_to_continue(journal)}")
            report = tally.report(options.output)
    print(report, file=sys.stdout if journal.is_resumable else sys.stderr)
    return 1 if tally.num_errors and (options.strict or tally.num_errors == tally.num_rows) else 0


def _journal(options: RunOptions, program: Program, records: RecordFile, last: int) -> AbstractContextManager[Journal]:
    """Where the rows stand and go."""
    return opened_journal(
        _journal_path(options.output),
        _fingerprint(options, program, records),
        WORDING,
        num_rows=last,
        restart=options.restart,
        retry_failed=options.retry_failed,
    )


def _begin(options: RunOptions, journal: Journal) -> None:
    if options.restart:
        forget_retry(journal)
    journal.begin()


def _nothing_to_do(options: RunOptions, journal: Journal, last: int) -> str:
    if not last:
        return f"nothing to do: {options.input} holds no record"
    failed = num_failed(journal.path, last) if journal.is_resumable else 0
    some = f", {failed} of them with an error (--retry-failed runs those again)" if failed else ""
    return f"nothing to do: {options.output} has all {last} records{some} (--restart begins again)"


@contextmanager
def _in_process(
    options: RunOptions,
    program: Program,
    to_parameters: Callable[[str | JsonObject], JsonObject],
    records: RecordFile,
    rows: Iterator[Record],
    trees: dict[int, Tree],
    journal: Journal,
) -> Iterator[tuple[Iterator[JsonObject | Failure], Usage]]:
    """The rows' results in order, by an engine here, and its counters. Fills `trees` where some are to be drawn."""
    from niwaki import Engine  # loads torch: only once it is clear that there is work

    program = program.for_rows()
    types = RecordTypes(program, texts=records.has_texts)
    with Engine(options.model, deterministic=options.deterministic) as engine:

        def run_one(numbered: tuple[int, Record]) -> JsonObject:
            number, record = numbered
            if isinstance(record, RecordError):
                raise record
            state = program.run(**types.typed(to_parameters(record)), options={"backend": engine})
            try:
                return exported(state, reserved=RESERVED_NAMES)
            finally:
                if options.trace is not None and number < NUM_TRACED:
                    trees[number] = state.tree()

        def keep(number: int, result: JsonObject | Exception) -> None:
            if not isinstance(result, EngineStopped):
                with suppress(ValueError):  # no JSON: told when its turn comes
                    whole = Failure.unless_whole(result)
                    journal.keep(number, {"error": asdict(whole)} if isinstance(whole, Failure) else whole)

        found = run_rows(run_one, enumerate(rows), num_threads=options.concurrency, keep=keep)
        yield map(Failure.unless_whole, found), engine.stats


@contextmanager
def _on_ray(
    options: RunOptions,
    count: int,
    to_parameters: Callable[[str | JsonObject], JsonObject],
    records: RecordFile,
    rows: Iterator[Record],
) -> Iterator[tuple[Iterator[JsonObject | Failure], Usage]]:
    """As `_in_process`, by `count` engines on Ray."""
    from niwaki.runtime.replicas.rows import map_lines

    used: Counter[str] = Counter()

    def results() -> Iterator[JsonObject | Failure]:
        table = SentRows.of(records.path) if records.format == "parquet" and records.column is None else None
        lines = (_sent(record, to_parameters, table) for record in rows)
        arguments = RowWorker.arguments(options, records, table)
        for line in map_lines(lines, RowWorker, arguments, count, options.ray_address):
            told = json.loads(line)
            used.update(told.get("used", {}))
            yield told["row"] if "row" in told else Failure(**told["error"])

    yield results(), lambda: used


def _sent(
    record: Record, to_parameters: Callable[[str | JsonObject], JsonObject], table: SentRows | None = None
) -> str:
    """A record as a line for a worker, which gives its values their types. `table`: what it is a row of, where its
    values have types already."""
    try:
        if isinstance(record, RecordError):
            raise record
        arguments = to_parameters(record)
        if table is not None:
            return json.dumps({"row": table.sent(arguments)})
        return to_json({"arguments": arguments}, inf_nan_mode="constants").decode()
    except (RecordError, PydanticSerializationError, ValueError) as error:
        return json.dumps({"error": asdict(Failure.of(error))})


class RowWorker:
    """An engine on some machine of a Ray cluster, which runs a program on rows."""

    def __init__(
        self,
        program_file: str,
        function: str,
        model: str | None,
        concurrency: int,
        texts: bool,
        deterministic: bool,
        table: str | None = None,
    ) -> None:
        from niwaki.runtime.engine import Engine  # loads torch

        self._program = load_program(Path(program_file), function).for_rows()
        self._types = RecordTypes(self._program, texts=texts)
        self._table = None if table is None else SentRows(table)
        self._engine = Engine(model, deterministic=deterministic)
        self._concurrency = concurrency
        self._places = threading.Semaphore(concurrency)  # for the rows of all batches that run at once
        self._lock = threading.Lock()
        self._used = Counter[str]()  # as told

    @staticmethod
    def arguments(options: RunOptions, records: RecordFile, table: SentRows | None) -> dict[str, object]:
        return {
            "program_file": str(options.program_file.resolve()),
            "function": options.function,
            "model": None if options.model is None else str(options.model.resolve()),
            "concurrency": options.concurrency,
            "texts": records.has_texts,
            "table": None if table is None else table.schema,
            "deterministic": options.deterministic,
        }

    def run(self, lines: list[str]) -> list[str]:
        """For each line of `_sent` one with its `row` or its `error`; the last one tells what was `used` since the last
        time. Several threads may call it."""
        told: list[dict[str, object]] = []
        for result in map(Failure.unless_whole, run_rows(self._run_one, lines, num_threads=self._concurrency)):
            told.append({"error": asdict(result)} if isinstance(result, Failure) else {"row": result})
        told[-1]["used"] = self._used_since()
        return [json.dumps(one) for one in told]

    def _run_one(self, line: str) -> JsonObject | Failure:
        sent = json.loads(line)
        if "error" in sent:
            return Failure(**sent["error"])
        given = sent["arguments"] if self._table is None else self._table.received(sent["row"])
        with self._places:
            state = self._program.run(**self._types.typed(given), options={"backend": self._engine})
            return exported(state, reserved=RESERVED_NAMES)

    def _used_since(self) -> Mapping[str, float]:
        with self._lock:
            now = Counter(self._engine.stats())
            used = Counter(now)
            used.subtract(self._used)
            self._used = now
            return used


def _write_rows(journal: Journal, tally: Tally, results: Iterator[JsonObject | Failure]) -> None:
    with Progress(tally, sys.stderr) as progress:
        for result in results:
            failure = result if isinstance(result, Failure) else _write_row(journal, result)
            if failure is not None:
                journal.write({"error": asdict(failure)})
            is_shortened = not isinstance(result, Failure) and failure is None and SHORTENED in result
            tally.count(journal.num_done - 1, failure, is_shortened=is_shortened)
            progress.show()


def _check_nothing_is_overwritten(options: RunOptions) -> None:
    """Raises ConfigError: what is written would take the place of what is read, or of a table that no run has made."""
    rows = _journal_path(options.output)
    for path in (options.output, rows):
        if path.exists() and any(path.samefile(read) for read in (options.input, options.program_file)):
            beside = "" if path == options.output else f", whose rows stand in {path},"
            raise ConfigError(f"the output {options.output}{beside} is the input or the program; name another file")
    if not _is_table(options.output) or options.restart or rows.exists():
        return
    # The journal looks at the lines of a file that it goes on with; of a table it is the rows beside it that tell.
    if options.output.is_file() and options.output.stat().st_size > 0:
        raise ConfigError(
            f"{options.output} stands there already, and {rows.name}, which says that a run has made it, does not: "
            "--restart writes over it, or name another file"
        )


def _check_trace(trace: Path, taken: Sequence[Path]) -> None:
    """Raises ConfigError where the picture could not be written at the end, or would be written over a file in use."""
    if trace.suffix != ".html" or trace.is_dir() or not trace.parent.is_dir():
        raise ConfigError(f"--trace writes a page: name a .html file in a folder that exists, got {trace}")
    if any(trace.resolve() == path.resolve() for path in taken):
        raise ConfigError(f"--trace {trace} would overwrite another file of this run; name another one")


def _journal_path(output: Path) -> Path:
    """Where the rows go as they come: into the output itself, or beside a table, which is made of them at the end."""
    return output.with_name(output.name + ".rows.jsonl") if _is_table(output) else output


def _is_table(output: Path) -> bool:
    return output.suffix.lower() in TABLE_SUFFIXES


def _settle(options: RunOptions, journal: Journal, count: int) -> None:
    """All `count` rows are written. A table is made before failed rows give way to those that ran again: after a kill
    the same command finds all of them run, and makes it."""
    journal.complete()
    if _is_table(options.output):
        write_table(journal.path, options.output, count)
    journal.settle()


def _write_row(journal: Journal, row: JsonObject) -> Failure | None:
    """Write it, or return why it is no JSON (a float that is not finite, a lone surrogate)."""
    try:
        journal.write(row)
    except ValueError as error:
        return Failure.of(error)
    return None


def _how_to_continue(journal: Journal) -> str:
    rows, was, stand = ("row", "was", "stands") if journal.num_done == 1 else ("rows", "were", "stand")
    if not journal.is_resumable:
        return f"{journal.num_done} {rows} {was} written"
    return f"{journal.num_done} {rows} {stand} in {journal.path}; give the same command again to continue"


def _fingerprint(options: RunOptions, program: Program, records: RecordFile) -> Mapping[str, str]:
    """What the output depends on. Of the modules that the program imports it is what the program names of them."""
    source = options.program_file.read_bytes()
    return {
        "input": records.digest(),
        "program": hashlib.sha256(source).hexdigest() + ":" + options.function,
        **definitions_of(program.func),
        "model": weights_fingerprint(options.model).hex(),
        "reading of the input": repr((options.record_separator, options.column)),
        **({"mode of the engine": "deterministic"} if options.deterministic else {}),
    }


def fail(message: str, code: int = 1) -> int:
    print("niwaki:", " ".join(message.split()), file=sys.stderr)
    return code
