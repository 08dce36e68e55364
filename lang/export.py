"""What a finished run says, as JSON values: for output files, one object per row."""

from __future__ import annotations

from collections.abc import Mapping

from niwaki.lang.origin import here
from niwaki.lang.state import State
from niwaki.runtime.api import ProgramError


def exported(state: State, *, reserved: tuple[str, ...] = ()) -> Mapping[str, object]:
    """The fields of what the program returned or, where it returned nothing, all its variables. Waits for them.

    A returned mapping or Pydantic model gives its fields, anything else stands under "value". Enums, dates, models
    and the like become what JSON has for them.

    Raises:
        ProgramError: a name is among the `reserved` ones.
        ValueError: a value that JSON has nothing for.
        The error that the state failed with.
    """
    from pydantic import BaseModel  # heavy, and only output files need it
    from pydantic_core import to_jsonable_python

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
    for name in reserved:
        if name in values:
            raise ProgramError(f"an output row has its own {name!r}: give that variable another name")
    dumped: object = to_jsonable_python(dict(values))
    assert isinstance(dumped, dict)
    return dumped
