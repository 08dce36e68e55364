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
