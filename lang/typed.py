"""The type of what a program makes, as a type checker may rely on it: told by the author, checked when it is read."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Reversible
from types import UnionType
from typing import TYPE_CHECKING, TypeVar, Union, cast, get_args, get_origin

from niwaki.runtime.api import ProgramError

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")

MAX_SHOWN_CHARS = 200
_COLLECTIONS = (Iterable, Collection, Container, Reversible)


def as_type(value: object, dtype: TypeForm[T], name: str) -> T:
    """The value of the variable `name`, if it is of the type; whatever is inside counts, and nothing is converted.

    Raises:
        ProgramError: it is not, or `dtype` is no type.
    """
    if isinstance(dtype, str):
        raise ProgramError(f"dtype {dtype!r} is a text; give the type itself")
    if not _is_of(value, dtype):
        wanted = dtype.__name__ if isinstance(dtype, type) else str(dtype).replace("typing.", "")
        raise ProgramError(f"variable {name!r} is {_shown(value)}, which is no {wanted}")
    return cast("T", value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... (a {type(value).__name__})"


def _is_of(value: object, dtype: object) -> bool:
    try:
        return isinstance(value, dtype)  # type: ignore[arg-type]  # what is no class is a TypeError
    except TypeError:
        origin, args = get_origin(dtype), get_args(dtype)
    if origin in (Union, UnionType):
        return any(_is_of(value, one) for one in args)
    if origin in _COLLECTIONS:  # Pydantic leaves their items for later, or never looks at them
        return isinstance(value, Collection) and all(_is_of(item, args[0]) for item in value)
    return _is_valid(value, dtype)


def _is_valid(value: object, dtype: object) -> bool:
    """By Pydantic, for lists of a type, Literals, unions and the like. It takes a dict for a model, too."""
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError  # heavy

    # Without a config what is no type is an error, with this one it is any; models and TypedDicts take none.
    config = None if get_origin(dtype) is None else ConfigDict(arbitrary_types_allowed=True)
    try:
        try:
            adapter: TypeAdapter[object] = TypeAdapter(dtype, config=config)  # type: ignore[arg-type]  # known at run time
        except PydanticUserError as error:
            if error.code != "type-adapter-config-unused":  # an annotated model
                raise
            adapter = TypeAdapter(dtype)  # type: ignore[arg-type]  # as above
    except (PydanticUserError, TypeError) as error:
        raise ProgramError(f"dtype {dtype!r} is no type that a value can be held against") from error
    try:
        valid = adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return bool(valid == value) and isinstance(valid, bool) is isinstance(value, bool)  # True is equal to 1
