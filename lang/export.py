"""What a finished run says, as JSON values: for output files, one object per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from niwaki.lang.origin import here
from niwaki.lang.state import State
from niwaki.lang.tools import Call
from niwaki.runtime.api import ProgramError

SHORTENED: Final = "shortened"  # in rows that have such values: a list of names, see `State.shortened`


def exported(state: State, *, reserved: tuple[str, ...] = ()) -> Mapping[str, object]:
    """The fields of what the program returned or, where it returned nothing, all its variables. Waits for them.

    A returned mapping or Pydantic model gives its fields, anything else stands under "value". Enums, dates, models
    and the like become what JSON has for them, the call of a tool its name, its arguments and what was said before it,
    an error its type and message.
    Where budgets made values shorter, "shortened" names them, before all else.

    Raises:
        ProgramError: a name is "shortened", or among the `reserved` ones.
        ValueError: a value that JSON has nothing for, with its name.
        The error that the state failed with.
    """
    from pydantic import BaseModel  # heavy, and only output files need it

    state.sync()
    match state.ret_value:
        case None:
            values = state._executor.mark(here()).result().variables
        case BaseModel() as model:
            values = model.model_dump()
        case Mapping() as mapping:
            values = mapping
        case other:
            values = {"value": other}
    for name in (*reserved, SHORTENED):
        if name in values:
            raise ProgramError(f"an output row has its own {name!r}: give that variable another name")
    dumped: dict[str, object] = {SHORTENED: list(state.shortened)} if state.shortened else {}
    for name, value in values.items():
        dumped |= _named(name, value)
    return dumped


def as_json_value(value: object) -> object:
    """What JSON has for it. Raises ValueError: nothing."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(_plain(value))


def _named(name: object, value: object) -> dict[str, object]:
    try:
        dumped = as_json_value({name: value})
    except ValueError as error:
        raise ValueError(f"{name!r} has no JSON: {error}") from None
    assert isinstance(dumped, dict)
    return dumped


def _plain(value: object) -> object:
    """Calls of tools know the Python function that they call, for which JSON has nothing. An error, which a join may
    have returned, becomes what the error of a row is."""
    match value:
        case Exception():
            return {"error": {"type": type(value).__name__, "message": str(value)}}
        case Call(name, arguments, content):
            return {"name": name, "arguments": arguments} | ({"content": content} if content else {})
        case list() | tuple():
            return [_plain(one) for one in value]
        case dict():
            return {key: _plain(one) for key, one in value.items()}
    return value
