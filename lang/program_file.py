"""Programs out of files: FILE.py:FUNCTION, and what a record of a file becomes for one."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

from niwaki.lang.program import Program
from niwaki.lang.records import RecordFile
from niwaki.runtime.api import ConfigError

JsonObject = Mapping[str, object]

_GATHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def program_target(text: str) -> tuple[Path, str]:
    """FILE.py:FUNCTION, taken apart. Raises ConfigError for anything else."""
    program_file, _, function = text.rpartition(":")
    if not program_file or not function.isidentifier():
        raise ConfigError(f"{text!r} is not FILE.py:FUNCTION, as in examples/extract.py:extract")
    return Path(program_file), function


def load_program(path: Path, function: str) -> Program:
    """Import the file as `python FILE.py` would and take the program of that name out of it.

    Raises:
        ConfigError: there is no such file or program, or the file does not import.
    """
    if not path.is_file():
        python = path.parent / f"{path.name}.py"
        raise ConfigError(f"no program file {path}" + f"; did you mean {python}:{function}?" * python.is_file())
    if path.suffix != ".py":
        raise ConfigError(f"{path} is no Python file; its name must end in .py")
    name = f"niwaki_program_{path.stem}"
    loader = _FromSource(name, str(path))
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[name] = module  # annotations of its classes are looked up there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} does not import: {type(error).__name__}: {error}{_line_in(path, error)}") from error
    found = getattr(module, function, None)
    if not isinstance(found, Program):
        programs = [key for key, value in vars(module).items() if isinstance(value, Program)]
        what = "is not a program" if found is not None else "is not defined"
        raise ConfigError(f"{function} {what} in {path}; programs there: {', '.join(programs) or 'none'}")
    return found


class _FromSource(SourceFileLoader):
    """Reads no bytecode and leaves none: what a full disk cut short, or what an edit within the same second made old,
    would run instead of the file."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _line_in(path: Path, error: BaseException) -> str:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path.resolve()) or trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" (line {line})"


def _untyped(func: Callable[..., object]) -> inspect.Signature:
    """Its parameters by name: types, spelled out, would be most of a message of one line."""
    signature = inspect.signature(func)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=signature.empty)


def parameters_of(program: Program, records: RecordFile) -> Callable[[str | JsonObject], JsonObject]:
    """How a record becomes the arguments of the program: an object by its keys, a text as the only parameter. Their
    types are those of `RecordTypes`.

    Raises:
        ConfigError: the program does not fit the kind of record.
    """
    parameters = list(inspect.signature(program.func).parameters.values())[1:]  # without the state
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    columns = records.columns()
    shown = f"program {program.name}{_untyped(program.func)}"
    if records.format == "txt" or records.column is not None:
        named = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        takers = required or named[:1]
        if len(takers) != 1 or takers[0] not in named:
            raise ConfigError(f"{shown} must have one parameter for the text of a record; give it .jsonl or .csv")
        text_name = takers[0]
    else:
        text_name = ""
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        known = {parameter.name for parameter in parameters}
        by_name = {parameter.name for parameter in parameters if parameter.kind not in _GATHERS}
        unknown = [] if columns is None or takes_any else [name for name in columns if name not in known]
        if unknown:
            is_parted_otherwise = columns is not None and len(columns) == 1 and set(";\t|") & set(unknown[0])
            raise ConfigError(
                f"{records.path} has a column {unknown[0]!r}, and {shown} has no such parameter; "
                + (
                    "the fields of a .csv stand between commas"
                    if is_parted_otherwise
                    else "rename it, take all columns with **columns, or --column NAME gives it one alone"
                )
            )
        missing = [name for name in required if columns is not None and name not in columns and name in by_name]
        if missing:
            raise ConfigError(
                f"{records.path} has no column {missing[0]!r}, which {shown} needs; it has {', '.join(columns or ())}"
            )

    def arguments(record: str | JsonObject) -> JsonObject:
        return {text_name: record} if isinstance(record, str) else record

    return arguments
