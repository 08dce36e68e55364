"""What a program's results depend on beside its own source: the types, functions, schemas and constants that it names.

Told by digests, so that a file of results is not gone on with once one of them has changed. What only a run has (a
clock, an environment, what a program counts or collects in a variable outside) is never part of one: the same code
started again must find its file.
"""

from __future__ import annotations

import ast
import dis
import enum
import hashlib
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Final, TypeAlias, cast

from niwaki.lang.effects import is_plain
from niwaki.lang.running import Running

_GLOBALS: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_CELLS: Final = ("LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTES: Final = ("LOAD_ATTR", "LOAD_METHOD")
_STORES: Final = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")
_FIXED: Final = (str, bytes, int, float, bool, type(None))
_SAYS_SCHEMA: Final = frozenset({"$schema", "$ref", "$defs", "type", "properties", "enum", "anyOf", "oneOf", "allOf"})
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_NOTHING: Final = object()

_Found: TypeAlias = dict[str, str]


def definitions_of(func: Callable[..., object]) -> Mapping[str, str]:
    """For each name that the body has from outside, and for those that what it names names in turn, "definition of
    NAME" and a digest. Packages that are installed are not looked into."""
    found: _Found = {}
    if isinstance(func, FunctionType):
        _look_into(func, found, {func})
    return {f"definition of {name}": digest for name, digest in sorted(found.items())}


def _look_into(func: FunctionType, found: _Found, seen: set[object]) -> None:
    module = sys.modules.get(func.__module__)
    for name, value in _named_in(func):
        _note(name, value, None if name in func.__code__.co_freevars else module, found, seen)


def _note(name: str, value: object, module: ModuleType | None, found: _Found, seen: set[object]) -> None:
    """Find what `value` is made of, as `name` stands for it in `module`."""
    if isinstance(value, Running):
        value = value.func
    match value:
        case FunctionType():
            if value not in seen and not _is_installed(value.__module__):
                seen.add(value)
                _put(found, name, _source(value))
                _look_into(value, found, seen)
        case type():
            if value not in seen and (text := _of_type(value)):
                seen.add(value)
                _put(found, name, text)
        case enum.Enum():
            _put(found, name, repr(value))
        case re.Pattern(pattern=pattern, flags=flags):
            _put(found, name, repr((pattern, flags)))
        case dict() if _is_schema(value):
            _put(found, name, json.dumps(value, sort_keys=True, default=repr))
        case _ if typing.get_origin(value) is not None:
            _put(found, name, _of_type(value))
            for part in typing.get_args(value):
                validator = getattr(part, "func", None)  # of Pydantic, in an Annotated
                if isinstance(validator, FunctionType):
                    _note(validator.__name__, validator, sys.modules.get(validator.__module__), found, seen)
        case _ if is_plain(value):
            _note_constant(name, value, module, found, seen)


def _note_constant(name: str, value: object, module: ModuleType | None, found: _Found, seen: set[object]) -> None:
    """By how the module sets it: what a list holds by now, or a date of today, says nothing of the program."""
    assigned = [] if module is None else _assignments(module, name)
    if assigned:
        _put(found, name, "".join(map(ast.dump, assigned)))
        for node in (inner for one in assigned for inner in ast.walk(one)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and (module, node.id) not in seen:
                seen.add((module, node.id))
                _note(node.id, vars(module).get(node.id, _NOTHING), module, found, seen)
    elif type(value) in _FIXED or (type(value) in (tuple, frozenset) and is_plain(value)):
        _put(found, name, repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value))


def _put(found: _Found, name: str, text: str) -> None:
    """Two things of one name, in two modules, are one entry. Addresses are others in the next process."""
    text = _ADDRESS.sub("", text)
    found[name] = hashlib.sha256((found.get(name, "") + text).encode("utf-8", "surrogatepass")).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------
# What a function names
# ---------------------------------------------------------------------------------------------------------------


def _named_in(func: FunctionType) -> Iterator[tuple[str, object]]:
    """Each name from outside and its value, in the order of the code; of modules the attributes that are read. Names
    that the code sets itself are left out."""
    cells = dict(zip(func.__code__.co_freevars, func.__closure__ or (), strict=True))
    codes = list(_codes(func.__code__))
    stored = {one.argval for code in codes for one in dis.get_instructions(code) if one.opname in _STORES}
    told = set[str]()
    for code in codes:
        name, value = "", _NOTHING
        for one in dis.get_instructions(code):
            if one.opname in _ATTRIBUTES and isinstance(value, ModuleType):
                name, value = f"{name}.{one.argval}", getattr(value, one.argval, _NOTHING)
            elif one.opname in _GLOBALS and one.argval not in stored:
                name, value = one.argval, func.__globals__.get(one.argval, _NOTHING)  # or Python's own
            elif one.opname in _CELLS and one.argval not in stored and one.argval in cells:
                name, value = one.argval, _held(cells[one.argval])
            else:
                name, value = "", _NOTHING
            if value is not _NOTHING and not isinstance(value, ModuleType) and name not in told:
                told.add(name)
                yield name, value


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _held(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return _NOTHING


# ---------------------------------------------------------------------------------------------------------------
# What stands behind a name
# ---------------------------------------------------------------------------------------------------------------


def _source(made: FunctionType | type) -> str:
    """Empty where it cannot be read, as of what was typed at a prompt."""
    try:
        return inspect.getsource(made)
    except (OSError, TypeError):
        return ""


def _of_type(kind: object) -> str:
    """Its source, and the JSON schema of its values; empty for Python's own and for one that is no type of values."""
    from pydantic import TypeAdapter  # heavy, and only rows in files need it

    if isinstance(kind, type) and kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return ""
    source = _source(kind) if isinstance(kind, type) and not _is_installed(kind.__module__) else ""
    schema = repr(kind) if typing.get_origin(kind) is not None else ""
    with suppress(Exception):  # whatever a class of somebody says to being no type of values
        schema = json.dumps(
            _without_defaults(TypeAdapter(cast("type[object]", kind)).json_schema()), sort_keys=True, default=repr
        )
    return source + schema


def _without_defaults(schema: object) -> object:
    """The source says them; as values they may be the time at which a class was made."""
    match schema:
        case dict():
            return {key: _without_defaults(value) for key, value in schema.items() if key != "default"}
        case list():
            return [_without_defaults(value) for value in schema]
    return schema


def _is_schema(value: Mapping[object, object]) -> bool:
    return not _SAYS_SCHEMA.isdisjoint(key for key in value if isinstance(key, str)) and is_plain(value)


def _is_installed(name: str) -> bool:
    """Whether a module is of Python, of niwaki, or a package that was installed."""
    if name.partition(".")[0] in {*sys.stdlib_module_names, "niwaki"} and name != "__main__":
        return True
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


def _assignments(module: ModuleType, name: str) -> Sequence[ast.stmt]:
    """The statements of the module itself that set the name; none where its source cannot be read."""
    try:
        return _assignments_in(inspect.getsource(module)).get(name, ())
    except (OSError, TypeError, SyntaxError):
        return ()


@lru_cache(maxsize=16)  # a program names many constants of few modules
def _assignments_in(source: str) -> Mapping[str, Sequence[ast.stmt]]:
    """For each name that a module sets, the statements that do."""
    found: dict[str, list[ast.stmt]] = {}
    for one in _statements(ast.parse(source).body):
        for name in _targets(one):
            found.setdefault(name, []).append(one)
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for one in body:
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield one
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(one, part, []))


def _targets(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.Assign(targets=targets):
            places: list[ast.expr] = targets
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            places = [target]
        case _:
            return set()
    return {node.id for place in places for node in ast.walk(place) if isinstance(node, ast.Name)}
