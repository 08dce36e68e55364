"""The command line: `niwaki run FILE.py:FUNCTION` sends every record of a file through a program, `niwaki serve`
answers over HTTP, `niwaki tree` looks at the radix tree of such a server.

Exit codes: 0 the run is done (records may have failed, see --strict), 1 it failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from niwaki import __version__
    from niwaki.lang.batch import DEFAULT_CONCURRENCY
    from niwaki.lang.program_file import load_program, program_target
    from niwaki.lang.report import one_line
    from niwaki.run_command import NUM_TRACED, RunOptions, fail, run
    from niwaki.runtime.api import ConfigError, NiwakiError
    from niwaki.runtime.checkpoint.stored import check_folder
    from niwaki.runtime.options.config import KV_DTYPES, WEIGHTS, EngineConfig
    from niwaki.runtime.options.system import check_system
    from niwaki.runtime.pictures import tree_command
    from niwaki.runtime.server.logs import configured
    from niwaki.runtime.server.options import add_options, config_of
except KeyboardInterrupt:  # all that takes a while on a machine that is busy
    print("niwaki: interrupted", file=sys.stderr)
    raise SystemExit(130) from None

ENGINE = EngineConfig()
ENGINE_OPTIONS = (
    "weights", "kv_dtype", "kv_tokens", "max_running_requests", "chunked_prefill_size", "streaming_prefill_size",
    "host_cache_bytes", "disk_cache_dir", "disk_cache_bytes", "deterministic",
)  # fmt: skip
SERVER_PACKAGES = ("fastapi", "msgspec", "prometheus_client", "sqlalchemy", "starlette", "uvicorn")


def main(argv: Sequence[str] | None = None) -> int:
    """The console command. Returns the exit code; argparse exits by itself on wrong usage."""
    if argv is None:  # the process is ours
        atexit.register(_let_go)
    arguments = parsed(sys.argv[1:] if argv is None else argv)
    commands = {"run": run_file, "serve": serve, "constraint": show_constraint, "tree": show_tree}
    try:
        code = commands[arguments.command](arguments)
        sys.stdout.flush()  # a reader who has left is told of here, in one line, not while the interpreter ends
        return code
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in its buffer
        return fail(one_line(error))
    except OSError as error:
        # Without the number, which says nothing to who named the file.
        return fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else one_line(error))
    except NiwakiError as error:
        return fail(one_line(error))


def _let_go() -> None:
    """Collect once: the interpreter would go through all of torch several times, 0.45 of the 0.8 s of its end."""
    gc.collect()
    gc.freeze()


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """What the words ask for. Exits with 2 where they are no command of ours."""
    return _parser().parse_args(_with_joined_separator(argv))


class _Parser(argparse.ArgumentParser):
    """Of a command: tells wrong options itself; argparse leaves that to the one above, which has none like them."""

    def parse_known_args(  # type: ignore[override]  # one of its overloads, the one that is called
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Without the dashes, which all of them have: --lora is not like --program.
            names = {option.lstrip("-"): option for option in self._option_string_actions}
            close = difflib.get_close_matches(unknown[0].partition("=")[0].lstrip("-"), names, 1)
            meant = "".join(f"; did you mean {names[one]}?" for one in close)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="niwaki", description="Programs for language models.")
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
    add(
        "--output",
        required=True,
        type=_output,
        metavar="PATH",
        help="a row per record, in order: .jsonl, .csv, .parquet, or - for standard output",
    )
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
    add("--retry-failed", action="store_true", help="run the records again that failed; the other rows stay")
    add("--deterministic", action="store_true", help="give the same bits whatever else runs; slower")
    add("--strict", action="store_true", help="exit with 1 when any record failed")
    add("--ray", type=_positive, metavar="N", help="run N engines on Ray (niwaki[ray]) and give each its share")
    add("--ray-address", metavar="ADDRESS", help="a Ray cluster; without it one is started on this machine")
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


def _add_constraint(commands: argparse._SubParsersAction[_Parser]) -> None:
    constraint_parser = commands.add_parser("constraint", help="look at a JSON schema, a grammar or a regex")
    show_parser = constraint_parser.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "show",
        help="print what it allows, or why and where it is refused",
        description="Print what a JSON schema or a regex in a file allows: its normal form, examples, its size; or "
        "every keyword that is refused. Of a grammar: whether it is enforced, or why and where not.",
    )
    show_parser.add_argument("file", type=Path, metavar="FILE", help="a schema, a grammar, or one line with a regex")
    show_parser.add_argument("--svg", type=Path, metavar="PATH", help="draw the automaton if it is small")


def run_file(arguments: argparse.Namespace) -> int:
    """Send the records of a file through a program. Returns the exit code."""
    try:
        options = RunOptions.of(arguments)
    except ConfigError as error:
        return fail(str(error), 2)
    try:
        return run(options)
    except KeyboardInterrupt:
        return fail("interrupted; give the same command again to continue", 130)


def show_constraint(arguments: argparse.Namespace) -> int:
    """Print what a constraint means. Returns 0 where it is enforced, 1 where it is refused."""
    from niwaki.runtime.constraints.regex_automaton import drawn  # loads the engines
    from niwaki.runtime.constraints.show import show

    shown = show(arguments.file)
    print("\n".join(shown.lines))
    if arguments.svg is not None:
        if shown.automaton is None and not shown.is_enforced:
            return fail("what is refused has no automaton to draw")
        if shown.automaton is None:
            return fail("there is no small automaton to draw; a schema of more than strings is a grammar")
        arguments.svg.write_text(drawn(shown.automaton), "utf-8")
    return 0 if shown.is_enforced else 1


def show_tree(arguments: argparse.Namespace) -> int:
    """Draw a server's tree. Returns 0."""
    tree_command.run(arguments)
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
    add("--weights", choices=WEIGHTS, default="auto", help="how many bits a weight of a product takes")
    add("--kv-dtype", choices=KV_DTYPES, default="auto", help="type of the KV cache; auto: the computation's")
    add("--kv-tokens", type=_positive, metavar="N", help="tokens that the KV cache holds; default: by free memory")
    add(
        "--max-running-requests",
        type=_positive,
        default=ENGINE.max_running_requests,
        metavar="N",
        help="sequences in a step at most; others wait (%(default)s)",
    )
    add("--chunked-prefill-size", type=_positive, metavar="N", help="tokens in a step; default: by model and device")
    add(
        "--streaming-prefill-size",
        type=_positive,
        metavar="N",
        help="tokens of prompts in a step while a stream is read; default: by model and device",
    )
    add("--host-cache-bytes", type=_positive, metavar="N", help="memory for KV that leaves the cache; default: none")
    add("--disk-cache-dir", metavar="DIR", help="folder for KV that leaves that memory; kept for the next start")
    add("--disk-cache-bytes", type=_positive, metavar="N", help="size of the files in that folder; default: 4 GiB")
    add("--deterministic", action="store_true", help="give the same bits whatever else runs; slower")
    add_options(parser)


def serve(arguments: argparse.Namespace) -> int:
    """Answer until told to stop. Returns the exit code: 0 when every request was answered or told."""
    check_system()
    try:
        from niwaki.lang.endpoint import Endpoint  # loads pydantic
        from niwaki.runtime.server.hosted import hosted
        from niwaki.runtime.server.listen import bound

        config = config_of(arguments)
        if arguments.model is not None:
            check_folder(arguments.model)  # the engine does so, too, but loads torch first
        options = {name: getattr(arguments, name) for name in ENGINE_OPTIONS}
        with configured(arguments.log_level, arguments.log_format):
            programs = [Endpoint(load_program(*program_target(target))) for target in arguments.program]
            with bound(config) as (config, listeners), hosted(config, arguments.model, options) as engine:
                from niwaki.runtime.server.serve import serve as serve_until_stopped  # while the engine loaded

                serve_until_stopped(config, listeners, engine, programs)
    except ModuleNotFoundError as error:
        if error.name not in SERVER_PACKAGES:
            raise
        return fail(f"the server needs {error.name}; install niwaki[server]")
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


def _output(text: str) -> Path:
    return Path("/dev/stdout" if text == "-" else text)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
