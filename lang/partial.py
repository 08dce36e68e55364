"""A typed value while its text still comes: what can be told of it so far. Knows types and texts, never a state."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import zip_longest
from typing import Annotated, Final, Literal, Union, get_args, get_origin

if typing.TYPE_CHECKING:
    import pydantic

# A value of any type may be None, so "nothing yet" is an object of its own.
NOTHING: Final = object()

_NUMBER_CHARS = "0123456789+-.eE"


def partial_value(dtype: object, text: str) -> object:
    """What `text`, the beginning of a value of `dtype`, says so far; NOTHING where it says nothing yet.

    `dtype` None: the text itself. JSON is parsed as it grows, a text inside it also before its closing quote, a number
    only when something stands behind it. Objects are of their class, not validated, with None in fields to come.
    """
    if dtype is None:
        return text
    if dtype in (int, float, bool) or get_origin(dtype) is Literal or _is_enum(dtype):
        return NOTHING  # 3 may yet become 36: such values come when they are whole
    from pydantic_core import from_json  # heavy: only streams of typed values load it

    try:
        data = from_json(_without_cut_number(text), allow_partial="trailing-strings")
    except ValueError:
        return NOTHING
    return _fill(dtype, data)


def _without_cut_number(text: str) -> str:
    is_in_string = is_escaped = False
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == '"':
            is_in_string = not is_in_string
        elif char == "\\":
            is_escaped = is_in_string
    return text if is_in_string else text.rstrip(_NUMBER_CHARS)


def _fill(dtype: object, data: object) -> object:
    """`data` in the shape of `dtype`, as far as it has come."""
    while get_origin(dtype) is Annotated:
        dtype = get_args(dtype)[0]
    if data is None or dtype in (str, int, float, bool, object):
        return data
    origin, args = get_origin(dtype), get_args(dtype)
    if origin in (Union, types.UnionType):
        return _fill(_likely(args, data), data)
    if origin is Literal:
        return data if data in args else None
    if (root := _root(dtype)) is not None:
        return typing.cast("type[pydantic.RootModel[object]]", dtype).model_construct(_fill(root, data))
    if isinstance(data, list):
        return _fill_list(dtype, origin, args, data)
    if isinstance(data, dict):
        return _fill_object(dtype, origin, args, data)
    if _is_enum(dtype):
        return next((member for member in typing.cast("type[enum.Enum]", dtype) if member.value == data), None)
    return None  # a date, say: it has no value before it is whole


def _fill_list(dtype: object, origin: object, args: tuple[object, ...], data: list[object]) -> object:
    kind = dtype if origin is None else origin
    if isinstance(kind, type) and issubclass(kind, tuple) and args[-1:] != (...,):  # a type for each place, or none
        hints = typing.get_type_hints(kind)
        names: tuple[str, ...] = getattr(kind, "_fields", ())  # of a NamedTuple, which has all of them at once
        inner = args or tuple(hints.get(name, object) for name in names)
        given = [*data, *[None] * (len(names) - len(data))]
        return tuple.__new__(
            kind, [_fill(one, item) for one, item in zip_longest(inner[: len(given)], given, fillvalue=object)]
        )
    items = [_fill(args[0] if args else object, item) for item in data]
    made = frozenset if kind is AbstractSet else kind
    return made(items) if made in (tuple, set, frozenset, deque) else items


def _fill_object(dtype: object, origin: object, args: tuple[object, ...], data: Mapping[str, object]) -> object:
    fields = _fields(dtype)
    if fields is None:  # a dict of anything
        inner = args[1] if len(args) == 2 else object
        return {key: _fill(inner, value) for key, value in data.items()}
    if typing.is_typeddict(dtype):
        return {key: _fill(inner, data[key]) for key, (_, inner) in fields.items() if key in data}
    values = {name: _fill(inner, data.get(key)) for key, (name, inner) in fields.items()}
    construct = getattr(dtype, "model_construct", None)
    if construct is not None:
        return construct(**values)
    made: object = object.__new__(typing.cast("type", dtype))  # no __init__, which may refuse what is missing
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _likely(options: tuple[object, ...], data: object) -> object:
    """The first option of a union that the data so far looks like."""
    return next((option for option in options if _looks_like(option, data)), object)


def _looks_like(option: object, data: object) -> bool:
    while get_origin(option) is Annotated:
        option = get_args(option)[0]
    if (root := _root(option)) is not None:
        return _looks_like(root, data)
    kind = get_origin(option) or option
    if isinstance(data, dict):
        fields = _fields(option)
        if fields is None:
            return isinstance(kind, type) and issubclass(kind, Mapping)
        return all(key in fields and _may_become(value, fields[key][1]) for key, value in data.items())
    if isinstance(data, list):
        return isinstance(kind, type) and issubclass(kind, Collection) and not issubclass(kind, str | bytes | Mapping)
    return type(data) is option


def _may_become(value: object, dtype: object) -> bool:
    """Whether a field may have the value that begins so; of fields that tell the classes of a union apart."""
    while get_origin(dtype) is Annotated:
        dtype = get_args(dtype)[0]
    if get_origin(dtype) is not Literal:
        return True
    return any(one == value or (isinstance(value, str) and str(one).startswith(value)) for one in get_args(dtype))


def _root(dtype: object) -> object | None:
    """The type of what a RootModel has; None of any other."""
    if not getattr(dtype, "__pydantic_root_model__", False):
        return None
    ((_, root),) = (_fields(dtype) or {}).values()
    return root


def _fields(dtype: object) -> dict[str, tuple[str, object]] | None:
    """JSON key -> (attribute, type) of a class with fields."""
    declared = getattr(dtype, "model_fields", None)
    if isinstance(declared, dict):
        return {_key(name, field.validation_alias): (name, field.annotation) for name, field in declared.items()}
    if dataclasses.is_dataclass(dtype) or typing.is_typeddict(dtype):
        hints = typing.get_type_hints(typing.cast("type", dtype), include_extras=True)
        if dataclasses.is_dataclass(dtype):  # of which a ClassVar is no field
            hints = {field.name: hints[field.name] for field in dataclasses.fields(dtype)}
        return {name: (name, _bare(hint)) for name, hint in hints.items()}
    return None


def _key(name: str, alias: object) -> str:
    """Of a Pydantic field in JSON, as its schema has it: of several aliases the first that is a name."""
    choices: Sequence[object] = getattr(alias, "choices", (alias,))
    return next((one for one in choices if isinstance(one, str)), name)


def _bare(hint: object) -> object:
    """The type inside Required[...] and NotRequired[...]."""
    return get_args(hint)[0] if get_origin(hint) in (typing.Required, typing.NotRequired) else hint


def _is_enum(dtype: object) -> bool:
    return isinstance(dtype, type) and issubclass(dtype, enum.Enum)
