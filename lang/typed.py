"""The type of what a program makes, as a type checker may rely on it: told by the author, checked when it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast, get_origin

from niwaki.runtime.api import ProgramError

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


def as_type(value: object, dtype: TypeForm[T], name: str) -> T:
    """The value of the variable `name`, if it is of the type; whatever is inside counts, and nothing is converted.

    Raises:
        ProgramError: it is not, or `dtype` is no type.
    """
    if isinstance(dtype, str):
        raise ProgramError(f"dtype {dtype!r} is a text; give the type itself")
    try:
        is_right = isinstance(value, dtype)  # type: ignore[arg-type]  # what is no class is a TypeError
    except TypeError:
        is_right = _is_valid(value, dtype)
    if not is_right:
        wanted = dtype.__name__ if isinstance(dtype, type) else str(dtype).replace("typing.", "")
        raise ProgramError(f"variable {name!r} is {value!r}, which is no {wanted}")
    return cast("T", value)


def _is_valid(value: object, dtype: object) -> bool:
    """By Pydantic, for lists of a type, Literals, unions and the like. It takes a dict for a model, too."""
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError  # heavy

    # A TypedDict takes no config, and with this one what is no type would be any.
    config = None if get_origin(dtype) is None else ConfigDict(arbitrary_types_allowed=True)
    try:
        adapter: TypeAdapter[object] = TypeAdapter(dtype, config=config)  # type: ignore[arg-type]  # known at run time
    except (PydanticUserError, TypeError) as error:
        raise ProgramError(f"dtype {dtype!r} is no type that a value can be held against") from error
    try:
        return bool(adapter.validate_python(value, strict=True) == value)
    except ValidationError:
        return False
