"""The command line: `niwaki run FILE.py:FUNCTION` sends every record of a file through a program, `niwaki serve`
answers over HTTP, `niwaki tree` looks at the radix tree of such a server.

Exit codes: 0 the run is done (records may have failed, see --strict), 1 it failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Self, TextIO

from niwaki import __version__
from niwaki.lang.batch import DEFAULT_CONCURRENCY, Journal, run_rows
from niwaki.lang.export import exported
from niwaki.lang.picture import picture_of
from niwaki.lang.program import Program
from niwaki.lang.program_file import load_program, parameters_of, program_target
from niwaki.lang.progress import hit_rate, speed
from niwaki.lang.records import Record, RecordError, RecordFile
from niwaki.lang.tables import TABLE_SUFFIXES, check_installed, write_table
from niwaki.lang.tree import Tree
from niwaki.runtime import tree_command
from niwaki.runtime.api import ConfigError, EngineStopped, NiwakiError
from niwaki.runtime.server.logs import configure
from niwaki.runtime.server.options import add_options, config_of

JsonObject = Mapping[str, object]

PLAIN_PROGRESS_SECONDS = 5.0
SERVER_PACKAGES = ("fastapi", "msgspec", "prometheus_client", "sqlalchemy", "starlette", "uvicorn")
NUM_TRACED = 10  # records that --trace draws
RESERVED_NAMES = ("index", "error")  # what the output line itself says


def main(argv: Sequence[str] | None = None) -> int:
    """The console command. Returns the exit code; argparse exits by itself on wrong usage."""
    parser = _parser()
    arguments = parser.parse_args(_with_joined_separator(sys.argv[1:] if argv is None else argv))
    if arguments.command == "serve":
        return serve(arguments)
    if arguments.command == "constraint":
        return show_constraint(arguments)
    if arguments.command == "tree":
        return show_tree(arguments)
    try:
        options = RunOptions.of(arguments)
    except ConfigError as error:
        parser.exit(2, f"niwaki: {error}\n")
    try:
        return run(options)
    except KeyboardInterrupt:
        return _fail("interrupted before the first record", 130)
    except (NiwakiError, OSError) as error:
        return _fail(_one_line(error))


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
    strict: bool
    trace: Path | None
    ray: int | None
    ray_address: str | None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> RunOptions:
        """Raises ConfigError for a target that is no FILE.py:FUNCTION."""
        program_file, function = program_target(arguments.program)
        given = {name: value for name, value in vars(arguments).items() if name not in ("program", "command")}
        return cls(program_file=program_file, function=function, **given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="niwaki", description="Programs for language models.")
    parser.add_argument("--version", action="version", version=f"niwaki {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run_parser = commands.add_parser(
        "run",
        help="run a program on every record of a file",
        description="Run a program on every record of a file. A run that was stopped goes on where it was when the "
        "same command is given again.",
    )
    add = run_parser.add_argument
    add("program", metavar="FILE.py:FUNCTION", help="a function made with @niwaki.function")
    add("--input", required=True, type=Path, metavar="PATH", help=".jsonl, .csv, .parquet or .txt")
    add("--output", required=True, type=Path, metavar="PATH", help="a row per record, in order: .jsonl, .csv, .parquet")
    add("--model", type=Path, metavar="DIR", help="a Hugging Face model folder (default: the bundled model)")
    add("--limit", type=_positive, metavar="N", help="only the first N records")
    add(
        "--concurrency",
        type=_positive,
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help="records in flight (%(default)s)",
    )
    add("--record-separator", metavar="STR", help="in a .txt file, records end at lines that equal STR")
    add("--column", metavar="NAME", help="give the program this field of each record as its text (not for .txt)")
    add("--restart", action="store_true", help="throw away what the output holds and begin again")
    add("--strict", action="store_true", help="exit with 1 when any record failed")
    add("--ray", type=_positive, metavar="N", help="run N engines on Ray (niwaki[ray]) and give each its share")
    add("--ray-address", metavar="ADDRESS", help="of a Ray cluster; without it one is started on this machine")
    add(
        "--trace",
        type=Path,
        metavar="PATH.html",
        help=f"draw how the first {NUM_TRACED} records of this run went",
    )
    add_serve_options(
        commands.add_parser(
            "serve",
            help="answer over HTTP: OpenAI's API and SGLang's /generate",
            description="Answer over HTTP until SIGTERM or Ctrl-C: OpenAI's API, SGLang's /generate, your programs.",
        )
    )
    _add_constraint(commands)
    tree_command.add_options(
        commands.add_parser(
            "tree",
            help="look at the radix tree of a running server",
            description="Draw the radix tree of a running server in the terminal, live until Ctrl-C.",
        )
    )
    return parser


def _add_constraint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    constraint_parser = commands.add_parser("constraint", help="look at a JSON schema or a regex")
    show_parser = constraint_parser.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "show",
        help="print what it allows, or why and where it is refused",
        description="Print what a JSON schema or a regex in a file allows: its normal form, examples, its size; or "
        "every keyword that is refused.",
    )
    show_parser.add_argument("file", type=Path, metavar="FILE", help="a schema, or one line with a regex")
    show_parser.add_argument("--svg", type=Path, metavar="PATH", help="draw the automaton, where it is small")


def show_constraint(arguments: argparse.Namespace) -> int:
    """Print what a constraint means. Returns 0 where it is enforced, 1 where it is refused."""
    from niwaki.runtime.constraints.regex_automaton import drawn  # loads the engines
    from niwaki.runtime.constraints.show import show

    try:
        shown = show(arguments.file)
        print("\n".join(shown.lines))
        if arguments.svg is not None:
            if shown.automaton is None:
                return _fail("there is no small automaton to draw: that of a schema with objects is a grammar")
            arguments.svg.write_text(drawn(shown.automaton), "utf-8")
    except (NiwakiError, OSError) as error:
        return _fail(_one_line(error))
    return 0 if shown.is_enforced else 1


def show_tree(arguments: argparse.Namespace) -> int:
    """Draw a server's tree. Returns 0, or 1 where there is none."""
    try:
        tree_command.run(arguments)
    except (NiwakiError, OSError) as error:
        return _fail(_one_line(error))
    return 0


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """What `niwaki serve` takes: what is served, then how."""
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="a Hugging Face model folder; without it the bundled model")
    add(
        "--program",
        action="append",
        default=[],
        metavar="FILE.py:FUNCTION",
        help="serve a function made with @niwaki.function at /programs/FUNCTION; may be given again",
    )
    add("--kv-tokens", type=_positive, metavar="N", help="tokens that the KV cache holds; else by free memory")
    add("--deterministic", action="store_true", help="the same bits whatever else runs, for some speed")
    add_options(parser)


def serve(arguments: argparse.Namespace) -> int:
    """Answer until told to stop. Returns the exit code: 0 when every request was answered or told."""
    try:
        from niwaki.lang.endpoint import Endpoint  # loads pydantic
        from niwaki.runtime.server.listen import bind

        config = config_of(arguments)
        configure(arguments.log_level, arguments.log_format)
        options: dict[str, object] = {"deterministic": arguments.deterministic}
        if arguments.kv_tokens is not None:
            options["kv_tokens"] = arguments.kv_tokens
        programs = [Endpoint(load_program(*program_target(target))) for target in arguments.program]
        with bind(config) as listener:
            from niwaki.runtime.server.serve import serve as serve_until_stopped  # loads torch: after the port is ours

            serve_until_stopped(config, listener, arguments.model, options, programs)
    except ModuleNotFoundError as error:
        if error.name not in SERVER_PACKAGES:
            raise
        return _fail(f"the server needs {error.name}; install niwaki[server]")
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (NiwakiError, OSError) as error:
        return _fail(_one_line(error))
    return 0


def _with_joined_separator(argv: Sequence[str]) -> list[str]:
    """argparse takes the --- of `--record-separator ---` for an option; with = between them it does not."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--record-separator":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def _fail(message: str, code: int = 1) -> int:
    print("niwaki:", " ".join(message.split()), file=sys.stderr)
    return code


# ---------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------


def run(options: RunOptions) -> int:
    """Run the program over the records and report. Everything that can be refused is refused before work begins."""
    records = RecordFile.open(options.input, separator=options.record_separator, column=options.column)
    if options.output.exists() and any(options.output.samefile(path) for path in (options.input, options.program_file)):
        raise ConfigError(f"the output {options.output} is the input or the program; name another file")
    if options.trace is not None and options.ray is not None:
        raise ConfigError("--trace draws what runs in this process: leave --ray out")
    if options.trace is not None:
        _check_trace(options.trace, (options.input, options.program_file, options.output))
    check_installed(options.output)
    program = load_program(options.program_file, options.function)
    to_parameters = parameters_of(program, records)
    num_records = records.count()
    last = num_records if options.limit is None else min(options.limit, num_records)
    with Journal(_journal_path(options.output), _fingerprint(options, records), restart=options.restart) as journal:
        if journal.num_done >= last:
            journal.begin()
            if last == num_records:
                journal.finish()
            _make_table(options.output, journal, last)
            print(f"nothing to do: {options.output} has all {last} records (--restart begins again)")
            return 0
        trees: dict[int, Tree] = {}
        rows = islice(records, journal.num_done, last)
        with (
            _in_process(options, program, to_parameters, rows, trees)
            if options.ray is None
            else _on_ray(options, options.ray, to_parameters, rows)
        ) as (results, usage):
            journal.begin()
            tally = Tally(num_before=journal.num_done, num_records=last, usage=usage)
            try:
                _write_rows(journal, tally, results)
                if options.trace is not None:
                    picture_of([trees[number] for number in sorted(trees)]).save(options.trace)
                if last == num_records:
                    journal.finish()
            except KeyboardInterrupt:
                return _fail(f"interrupted; {_how_to_continue(journal)}", 130)
            except OSError as error:
                return _fail(f"{error.strerror or error}: {journal.path}; {_how_to_continue(journal)}")
            except NiwakiError as error:
                return _fail(f"{_one_line(error)}; {_how_to_continue(journal)}")
            _make_table(options.output, journal, last)
            report = tally.report(options.output)
    print(report, file=sys.stdout if journal.is_resumable else sys.stderr)
    return 1 if tally.num_errors and (options.strict or tally.num_errors == tally.num_rows) else 0


Usage = Callable[[], Mapping[str, float]]


@contextmanager
def _in_process(
    options: RunOptions,
    program: Program,
    to_parameters: Callable[[str | JsonObject], JsonObject],
    rows: Iterator[Record],
    trees: dict[int, Tree],
) -> Iterator[tuple[Iterator[JsonObject | Failure], Usage]]:
    """The rows' results in order, by an engine here, and its counters. Fills `trees` where some are to be drawn."""
    from niwaki.runtime.engine import Engine  # loads torch: only once it is clear that there is work

    program = program.for_rows()
    with Engine(options.model) as engine:

        def run_one(numbered: tuple[int, Record]) -> JsonObject:
            number, record = numbered
            if isinstance(record, RecordError):
                raise record
            state = program.run(**to_parameters(record), options={"backend": engine})
            try:
                return exported(state, reserved=RESERVED_NAMES)
            finally:
                if options.trace is not None and number < NUM_TRACED:
                    trees[number] = state.tree()

        found = run_rows(run_one, enumerate(rows), num_threads=options.concurrency)
        yield map(Failure.unless_whole, found), engine.stats


@contextmanager
def _on_ray(
    options: RunOptions,
    count: int,
    to_parameters: Callable[[str | JsonObject], JsonObject],
    rows: Iterator[Record],
) -> Iterator[tuple[Iterator[JsonObject | Failure], Usage]]:
    """As `_in_process`, by `count` engines on Ray."""
    from niwaki.__main__ import RowWorker  # by this name Ray finds it, also where this module is run as a script
    from niwaki.runtime.replicas.rows import map_lines

    used: Counter[str] = Counter()

    def results() -> Iterator[JsonObject | Failure]:
        lines = (_sent(record, to_parameters) for record in rows)
        for line in map_lines(lines, RowWorker, RowWorker.arguments(options), count, options.ray_address):
            told = json.loads(line)
            used.update(told.get("used", {}))
            yield told["row"] if "row" in told else Failure(**told["error"])

    yield results(), lambda: used


def _sent(record: Record, to_parameters: Callable[[str | JsonObject], JsonObject]) -> str:
    """A record as a line for a worker."""
    if isinstance(record, RecordError):
        return json.dumps({"error": asdict(Failure.of(record))})
    return json.dumps({"arguments": to_parameters(record)})


class RowWorker:
    """An engine on some machine of a Ray cluster, which runs a program on rows."""

    def __init__(self, program_file: str, function: str, model: str | None, concurrency: int) -> None:
        from niwaki.runtime.engine import Engine  # loads torch

        self._program = load_program(Path(program_file), function).for_rows()
        self._engine = Engine(model)
        self._concurrency = concurrency

    @staticmethod
    def arguments(options: RunOptions) -> dict[str, object]:
        return {
            "program_file": str(options.program_file.resolve()),
            "function": options.function,
            "model": None if options.model is None else str(options.model.resolve()),
            "concurrency": options.concurrency,
        }

    def run(self, lines: list[str]) -> list[str]:
        """For each line of `_sent` one with its `row` or its `error`; the last one tells what all of them `used`."""
        before = Counter(self._engine.stats())
        told: list[dict[str, object]] = []
        for result in map(Failure.unless_whole, run_rows(self._run_one, lines, num_threads=self._concurrency)):
            told.append({"error": asdict(result)} if isinstance(result, Failure) else {"row": result})
        used = Counter(self._engine.stats())
        used.subtract(before)
        told[-1]["used"] = used
        return [json.dumps(one) for one in told]

    def _run_one(self, line: str) -> JsonObject | Failure:
        sent = json.loads(line)
        if "error" in sent:
            return Failure(**sent["error"])
        state = self._program.run(**sent["arguments"], options={"backend": self._engine})
        return exported(state, reserved=RESERVED_NAMES)


def _write_rows(journal: Journal, tally: Tally, results: Iterator[JsonObject | Failure]) -> None:
    with Progress(tally, sys.stderr) as progress:
        for result in results:
            failure = result if isinstance(result, Failure) else _write_row(journal, result)
            if failure is not None:
                journal.write({"error": asdict(failure)})
            tally.count(failure)
            progress.show()


def _check_trace(trace: Path, taken: Sequence[Path]) -> None:
    """Raises ConfigError where the picture could not be written at the end, or would be written over a file in use."""
    if trace.suffix != ".html" or trace.is_dir() or not trace.parent.is_dir():
        raise ConfigError(f"--trace writes a page: name a .html file in a folder that exists, got {trace}")
    if any(trace.resolve() == path.resolve() for path in taken):
        raise ConfigError(f"--trace {trace} would overwrite another file of this run; name another one")


def _journal_path(output: Path) -> Path:
    """Where the rows go as they come: into the output itself, or beside a table, which is made of them at the end."""
    is_table = output.suffix.lower() in TABLE_SUFFIXES
    return output.with_name(output.name + ".rows.jsonl") if is_table else output


def _make_table(output: Path, journal: Journal, count: int) -> None:
    if output != journal.path:
        write_table(journal.path, output, count)


def _write_row(journal: Journal, row: JsonObject) -> Failure | None:
    """Write it, or return why it is no JSON (a float that is not finite, a lone surrogate)."""
    try:
        journal.write(row)
    except ValueError as error:
        return Failure.of(error)
    return None


def _how_to_continue(journal: Journal) -> str:
    if not journal.is_resumable:
        return f"{journal.num_done} rows were written"
    return f"{journal.num_done} rows stand in {journal.path}; give the same command again to continue"


def _fingerprint(options: RunOptions, records: RecordFile) -> Mapping[str, str]:
    """What the output depends on. The modules that the program imports are not looked at."""
    source = options.program_file.read_bytes()
    return {
        "input": records.digest(),
        "program": hashlib.sha256(source).hexdigest() + ":" + options.function,
        "model": "niwaki-tiny" if options.model is None else str(options.model.resolve()),
        "reading of the input": repr((options.record_separator, options.column)),
    }


def _one_line(error: BaseException) -> str:
    """The message, and the program's line where the error knows it."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return " ".join(f"{error}{notes}".split())


# ---------------------------------------------------------------------------------------------------------------
# What it says while it runs, and at the end
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of a record instead of a row."""

    type: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        return cls(type(error).__name__, _one_line(error))

    @classmethod
    def unless_whole(cls, result: JsonObject | Failure | Exception) -> JsonObject | Failure:
        """Raises EngineStopped: no record can be run any more; it stays undone, so that a restart finds it."""
        if isinstance(result, EngineStopped):
            raise result
        return cls.of(result) if isinstance(result, Exception) else result


@dataclass(slots=True)
class Tally:
    """Counts of this run. `usage` reads the engine's counters, which started at zero with it."""

    num_before: int
    num_records: int
    usage: Callable[[], Mapping[str, float]]
    num_rows: int = 0
    num_errors: int = 0
    first_error: str = ""
    started_at: float = field(default_factory=time.perf_counter)

    def count(self, failure: Failure | None) -> None:
        if failure is not None:
            self.num_errors += 1
            self.first_error = (
                self.first_error or f"record {self.num_before + self.num_rows}: {failure.type}: {failure.message}"
            )
        self.num_rows += 1

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_at

    def speed(self) -> str:
        return speed(self.usage(), self.seconds)

    def report(self, path: Path) -> str:
        usage = self.usage()
        failed = (
            f", {self.num_errors} of them with an error (the first is {self.first_error})" if self.num_errors else ""
        )
        before = f" ({self.num_before} stood there already)" if self.num_before else ""
        return (
            f"{self.num_rows} records in {self.seconds:.1f} s ({self.num_rows / self.seconds:.1f} a second){failed}\n"
            f"tokens: {usage['prefilled_tokens']:,.0f} prefilled, {usage['cached_tokens']:,.0f} cached, "
            f"{usage['generated_tokens']:,.0f} generated; cache hit rate {hit_rate(usage):.1%}\n"
            f"written to {path}{before}"
        )


class Progress:
    """A bar on a terminal; elsewhere a plain line every few seconds."""

    def __init__(self, tally: Tally, stream: TextIO) -> None:
        self._tally = tally
        self._stream = stream
        self._shown_at = time.monotonic()
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
            self._bar.close()

    def show(self) -> None:
        """Call after each record."""
        if self._bar is not None:
            self._bar.set_postfix_str(self._tally.speed(), refresh=False)
            self._bar.update()
        elif time.monotonic() - self._shown_at > PLAIN_PROGRESS_SECONDS:
            self._shown_at = time.monotonic()
            done = self._tally.num_before + self._tally.num_rows
            print(f"{done}/{self._tally.num_records} records, {self._tally.speed()}", file=self._stream, flush=True)


if __name__ == "__main__":
    sys.exit(main())
