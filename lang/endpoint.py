"""A program as something that is called with JSON: its typed parameters as one model, its values as JSON."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, create_model

from niwaki.lang.backends import Host
from niwaki.lang.export import as_json_value, exported
from niwaki.lang.program import Program
from niwaki.lang.state import State
from niwaki.lang.trace import Placeholder, Trace
from niwaki.runtime.api import ConfigError, NiwakiError


@dataclass(frozen=True, slots=True)
class Grown:
    """What a variable is so far, as JSON has it; `is_done`: it is whole."""

    name: str
    value: object
    is_done: bool


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
        traced = _traced(program)
        self._own_fault = traced if isinstance(traced, NiwakiError) else None
        self.answer = _answer_of(program, traced.variables if isinstance(traced, Trace) else None)

    async def call(self, body: BaseModel, backend: Host) -> Mapping[str, object]:
        """Run the program to its end. Cancelling the call cancels the run.

        Raises:
            What the program raises, and ValueError for a value that JSON has nothing for.
        """
        state = await self._program.arun(**self._given(body), options={"backend": backend})
        return await asyncio.to_thread(exported, state)

    async def stream(self, body: BaseModel, backend: Host) -> AsyncIterator[Grown | Mapping[str, object]]:
        """Run the program, and tell its variables as they grow; what `call` gives comes last.

        Raises:
            What `call` raises, after what came before it. Ending the iteration early cancels the run.
        """
        state = self._program.stream(**self._given(body), options={"backend": backend})
        try:
            told: dict[str, Grown] = {}
            async for _ in state.text_async_iter():
                for grown in _grown(state):
                    if told.get(grown.name) != grown:
                        told[grown.name] = grown
                        yield grown
            await state.wait()
            for grown in _grown(state):  # those that the program set behind its last text
                if told.get(grown.name) != grown:
                    yield grown
            yield await asyncio.to_thread(exported, state)
        finally:
            state.cancel()  # does nothing to what has ended

    def parameter_in(self, error: NiwakiError, body: BaseModel) -> str | None:
        """The parameter whose value, or a part of it, the error's message quotes, if it quotes one."""
        message = str(error)
        for name, value in self._given(body).items():
            if any(quoted in message for quoted in _quotes(value)):
                return name
        return None

    def always_fails_with(self, error: NiwakiError) -> bool:
        """Whether the program fails in the same words before it is given anything."""
        own = self._own_fault
        return own is not None and type(own) is type(error) and str(own) == str(error)

    def _given(self, body: BaseModel) -> dict[str, object]:
        return {name: getattr(body, field) for field, name in self._fields.items()}


def _grown(state: State) -> Iterator[Grown]:
    finished, growing = state._executor.values_so_far()
    for name, value in finished.items():
        yield Grown(name, _json_of(value), is_done=True)
    for name, value in growing.items():
        if name not in finished:
            yield Grown(name, _json_of(value), is_done=False)


def _json_of(value: object) -> object:
    """Raises ValueError for what JSON has nothing for. A value that still grows need not be valid."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", warnings=False)
    return as_json_value(value)


def _quotes(value: object) -> Iterator[str]:
    """How messages show a value: a text in quotes, and a number behind what it was to be."""
    match value:
        case str():
            if value:
                yield repr(value)
        case bool() | None:
            return
        case int() | float():
            yield f"got {value!r}"
        case Mapping():
            for key, inner in value.items():
                yield from _quotes(key)
                yield from _quotes(inner)
        case list() | tuple() | set() | frozenset():
            for inner in value:
                yield from _quotes(inner)
        case BaseModel():
            yield from _quotes(value.model_dump())


def _traced(program: Program) -> Trace | Exception | None:
    """What the body does whatever it is given: all of it, or the error that it raises. None for one that is async."""
    if program.is_async:
        return None
    names = list(inspect.signature(program.func).parameters)[1:]
    try:
        return program.trace(**{name: Placeholder(name) for name in names})
    except Exception as error:  # what the body may raise over placeholders is the author's
        return error


def _answer_of(program: Program, variables: Mapping[str, object] | None) -> type[BaseModel] | None:
    """The model of what the program answers, where its annotation says it: itself, or an object with a "value". Else
    of `variables`, which it sets with all arguments."""
    returned = typing.get_type_hints(program.func, include_extras=True).get("return", type(None))
    if isinstance(returned, type) and issubclass(returned, BaseModel):
        return returned
    if returned is type(None):
        return _answer_with(program, variables) if variables else None
    if returned in (object, typing.Any) or issubclass(typing.get_origin(returned) or returned, Mapping):
        return None  # keys that no annotation tells
    return _answer_with(program, {"value": returned})


def _answer_with(program: Program, types: Mapping[str, object]) -> type[BaseModel] | None:
    """A model with values of these types, by names that need not be Python's."""
    fields = {f"v{index}": (kind, Field(alias=name)) for index, (name, kind) in enumerate(types.items())}
    try:
        answer: type[BaseModel] = create_model(f"{program.name}_answer", **fields)  # type: ignore[call-overload]  # as below
        answer.model_json_schema()
    except PydanticUserError:  # a type that pydantic knows nothing of: the answer is told by its values alone
        return None
    return answer


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
    config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, cache_strings="keys"
    )
    try:
        # mypy knows create_model's fields only where they are written out.
        body: type[BaseModel] = create_model(f"{program.name}_parameters", __config__=config, **fields)  # type: ignore[call-overload]
        body.model_json_schema()
    except Exception as error:  # pydantic has many: a type that it knows nothing of, one without a schema
        raise ConfigError(f"{program!r} cannot be served: {' '.join(str(error).split())[:300]}") from None
    return names, body
