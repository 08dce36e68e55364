"""What the values of a record become where the program's annotations say their types: of texts the numbers and bools
that they write, of JSON values themselves, checked. Knows nothing of files."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from typing import cast

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from niwaki.lang.arguments import RUN_NAMES
from niwaki.lang.program import Program
from niwaki.lang.records import RecordError

JsonObject = Mapping[str, object]

_GATHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SCALARS = {int, float, bool}
_OPTIONS = RUN_NAMES | {"max_tokens", "options"}  # of a run
_LONGEST_SHOWN = 60  # characters of a value in a message


class RecordTypes:
    """Of one program's parameters, for records whose values are `texts`, or have types of their own (JSON, Parquet).

    A parameter without an annotation, or with one that Pydantic knows nothing of, takes whatever comes.
    """

    def __init__(self, program: Program, *, texts: bool) -> None:
        self._readers = _readers(program, texts)
        self._parameters = frozenset(inspect.signature(program.func).parameters)

    def typed(self, given: JsonObject) -> JsonObject:
        """The same names with the values as their types have them.

        Raises:
            RecordError: a value is of another type, or a name is one of the run's options and no parameter.
        """
        option = next((name for name in given if name in _OPTIONS and name not in self._parameters), None)
        if option is not None:  # a column of somebody's table, which is not to set how the model draws
            raise RecordError(f"{option!r} is an option of a run, and no parameter of the program; leave it out")
        return {
            name: self._readers[name].value(value) if name in self._readers else value for name, value in given.items()
        }


def _readers(program: Program, texts: bool) -> Mapping[str, _TextReader | _JsonReader]:
    try:
        kinds = typing.get_type_hints(program.func, include_extras=True)
    except NameError:  # known to type checkers alone
        return {}
    named = [one for one in inspect.signature(program.func).parameters.values() if one.kind not in _GATHERS]
    readers: dict[str, _TextReader | _JsonReader] = {}
    for parameter in named[1:]:  # without the state
        kind = kinds.get(parameter.name)
        if kind is None:
            continue
        if not texts:
            try:
                readers[parameter.name] = _JsonReader(parameter, kind)
            except PydanticUserError:
                continue
        elif _is_scalar(kind):
            readers[parameter.name] = _TextReader(parameter, kind)
    return readers


def _is_scalar(kind: object) -> bool:
    """A number or a bool, or one of them, or None beside."""
    members = _members(kind)
    return bool(members & _SCALARS) and members <= {*_SCALARS, type(None)}


def _members(kind: object) -> set[object]:
    """Of a union its types, of another type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return set(typing.get_args(kind))
    return {kind}


class _TextReader:
    """Reads texts as values of one type."""

    def __init__(self, parameter: inspect.Parameter, kind: object) -> None:
        self._name = parameter.name
        self._adapter = TypeAdapter(cast("type[object]", kind))
        self._may_be_none = type(None) in _members(kind)

    def value(self, text: object) -> object:
        """An empty text is None where that may be. Raises RecordError: the text is of no such value."""
        if not text and self._may_be_none:
            return None
        try:
            return self._adapter.validate_strings(text)
        except ValidationError as error:
            raise _refusal(self._name, error) from None


class _JsonReader:
    """Reads JSON values as those of one type, strictly, as a served program does: no text is a number. What JSON has
    no form for (a date, a tuple, a model) is read from the form that Pydantic writes of it."""

    def __init__(self, parameter: inspect.Parameter, kind: object) -> None:
        self._name = parameter.name
        self._adapter = TypeAdapter(cast("type[object]", kind))
        self._is_whole = int in (members := _members(kind)) and float not in members
        self._default = parameter.default  # need not be of the type: `text: str = None`

    def value(self, given: object) -> object:
        """Raises RecordError: it is of another type."""
        if given is None and self._default is None:
            return None
        if self._is_whole and isinstance(given, float) and given.is_integer():
            given = int(given)  # a column of Parquet with gaps has 3.0, and so has JSON from some languages
        try:
            written = to_json(given, inf_nan_mode="constants")
        except (PydanticSerializationError, ValueError):  # of Parquet: bytes that are no text
            written = None
        try:
            if written is None:
                return self._adapter.validate_python(given, strict=True)
            return self._adapter.validate_json(written, strict=True)
        except ValidationError as error:
            raise _refusal(self._name, error) from None


def _refusal(name: str, error: ValidationError) -> RecordError:
    """What is wrong first, at its place: 'people.0.age' is 'old': ..."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, (name, *first["loc"])))
    if first["type"] == "missing":
        return RecordError(f"{place!r} is missing")
    shown = repr(first["input"])
    if len(shown) > _LONGEST_SHOWN:
        shown = shown[: _LONGEST_SHOWN - 3] + "..."
    return RecordError(f"{place!r} is {shown}: {first['msg']}")
