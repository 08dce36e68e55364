"""A program as something that is called with JSON: its typed parameters as one model, its values as JSON."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, create_model

from niwaki.lang.backends import Host
from niwaki.lang.export import exported
from niwaki.lang.program import Program
from niwaki.runtime.api import ConfigError


class Endpoint:
    """One program, ready to be served. `body` is the model of its parameters: unknown ones and wrong types are errors.

    Raises:
        ConfigError: a parameter has no type that JSON could be checked against, or can only be given by position.
    """

    def __init__(self, program: Program) -> None:
        self.name = program.name
        self.about = inspect.getdoc(program.func) or ""
        self._program = program
        self._fields, self.body = _body_of(program)

    async def call(self, body: BaseModel, backend: Host) -> Mapping[str, object]:
        """Run the program to its end. Cancelling the call cancels the run.

        Raises:
            What the program raises, and ValueError for a value that JSON has nothing for.
        """
        given = {name: getattr(body, field) for field, name in self._fields.items()}
        state = await self._program.arun(**given, options={"backend": backend})
        return await asyncio.to_thread(exported, state)


def _body_of(program: Program) -> tuple[dict[str, str], type[BaseModel]]:
    """(field -> parameter, the model). Fields have names of their own: a parameter may be called `schema` or `_x`."""
    parameters = list(inspect.signature(program.func).parameters.values())[1:]  # without the state
    try:
        types = typing.get_type_hints(program.func, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{program!r} cannot be served: {error}") from None
    names: dict[str, str] = {}
    fields: dict[str, tuple[object, object]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{program!r} cannot be served: its parameter {parameter} has no name of its own")
        if parameter.name not in types:
            raise ConfigError(
                f"{program!r} cannot be served: give its parameter {parameter.name} a type, as in {parameter.name}: str"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        names[f"p{index}"] = parameter.name
        fields[f"p{index}"] = (types[parameter.name], Field(default, alias=parameter.name))
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)
    try:
        # mypy knows create_model's fields only where they are written out.
        body: type[BaseModel] = create_model(f"{program.name}_parameters", __config__=config, **fields)  # type: ignore[call-overload]
        body.model_json_schema()
    except Exception as error:  # pydantic has many: a type that it knows nothing of, one without a schema
        raise ConfigError(f"{program!r} cannot be served: {' '.join(str(error).split())[:300]}") from None
    return names, body
