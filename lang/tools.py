"""Tools of programs: Python functions and schemas as what a model may call, and the calls it made, ready to run."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from niwaki.lang.json_text import as_json
from niwaki.lang.nodes import Chain, Gen, RoleBegin, RoleEnd, Text
from niwaki.runtime.api import (
    Backend,
    Constraint,
    ConstraintError,
    Grammar,
    JsonSchema,
    OffersTools,
    ProgramError,
    Reasoned,
    Regex,
    Tool,
    ToolCall,
    ToolCalls,
    UnsupportedByBackend,
)
from niwaki.runtime.api.calls import Answer, read_answer
from niwaki.runtime.api.constraints import TOOL_NAME

if TYPE_CHECKING:  # heavy: only programs with tools load it
    from pydantic import TypeAdapter

# A Python function or a mapping. Types do not say so: to mypy a list of two functions that differ is one of `function`,
# which is no Callable.
ToolLike: TypeAlias = object


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool, and the Python function behind it, where there is one."""

    tool: Tool
    function: Callable[..., object] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model made. `content` is the text that it wrote before it."""

    name: str
    arguments: Mapping[str, object]
    content: str = ""
    function: Callable[..., object] | None = field(default=None, repr=False, compare=False)

    def run(self) -> object:
        """Call the Python function with the arguments, as the types that it declares; an async one gives its coroutine.

        Raises:
            ProgramError: the tool was given as a schema, so there is nothing to run.
            What the function raises.
        """
        if self.function is None:
            raise ProgramError(f"tool {self.name!r} was given as a schema; give the Python function to run its calls")
        return _adapter(self.function).validate_python(_arguments(dict(self.arguments)))

    def turn(self, result: object) -> Chain:
        """The chat turn that tells the model the result: text as it is, anything else as compact JSON, models,
        dataclasses, dates and the like as Pydantic writes them.

        Raises:
            ProgramError: the result was not awaited, or has no JSON.
        """
        if inspect.isawaitable(result):
            raise ProgramError(
                f"the result of tool {self.name!r} is still to come; write await call.run(), or "
                "asyncio.run(call.run()) in a program that is no async def"
            )
        try:
            text = result if isinstance(result, str) else as_json(result)
        except (TypeError, ValueError) as error:
            raise ProgramError(
                f"the result of tool {self.name!r} has no JSON: {error}; give turn() its text, or plain data"
            ) from error
        return Chain((RoleBegin("tool", generates=False), Text(text), RoleEnd("tool")))


@dataclass(frozen=True, slots=True)
class Ask:
    """What a gen may write beside its text: calls, and reasoning before them. `reasoning` is a budget in tokens; True:
    half of the gen's own."""

    offered: tuple[Offered, ...] = ()
    choice: str = "auto"  # or "required", or the name of a tool
    is_parallel: bool = False
    reasoning: bool | int | None = None
    separates: bool = True

    def constraint(self, backend: Backend, answer: Constraint | None, max_new_tokens: int, before: str) -> Constraint:
        """One constraint for all of it. `before` is the end of the prompt, which may have begun the reasoning.

        Raises:
            UnsupportedByBackend: the model or the backend has no form for it.
        """
        assert not isinstance(answer, ToolCalls | Reasoned), "a gen has one Ask"
        made: Regex | JsonSchema | Grammar | ToolCalls | None = answer  # type: ignore[assignment]  # no choices
        if self.offered:
            callable_tools = [one.tool for one in self.offered if self.choice in ("auto", "required", one.tool.name)]
            tools = tuple(replace(tool, description="") for tool in callable_tools)
            form = offering(backend).call_format()
            made = ToolCalls(tools, form, self.choice != "auto", self.is_parallel, answer)
        if not self.reasoning:
            assert made is not None, "an Ask asks for something"
            return made
        begin, end = _markers(backend)
        budget = max_new_tokens // 2 if self.reasoning is True else self.reasoning
        return Reasoned("" if before.rstrip().endswith(begin) else begin, end, budget, made)

    def read(self, text: str, backend: Backend, *, is_either: bool) -> Answer:
        """The text of an answer, taken apart. `is_either`: it is calls, or a text in a form of its own."""
        form = offering(backend).call_format() if self.offered else None
        names = [one.tool.name for one in self.offered] if is_either else None
        if not self.reasoning:
            return read_answer(text, form, names=names)
        begin, end = _markers(backend)
        return read_answer(text, form, (begin if text.startswith(begin) else "", end), names)

    def marks(self, backend: Backend) -> tuple[str, ...]:
        """Texts that are the model's own markers where its answer holds them."""
        form = offering(backend).call_format() if self.offered else None
        return (*((form.begin, form.end) if form else ()), *(_markers(backend) if self.reasoning else ()))

    def calls(self, answer: Answer) -> Call | list[Call]:
        """The call; where several are allowed, a list of them."""
        functions = {one.tool.name: one.function for one in self.offered}
        made = [Call(call.name, _loaded(call), answer.content, functions.get(call.name)) for call in answer.calls]
        return made if self.is_parallel else made[0]


def ask_of(
    tools: Sequence[ToolLike] | None,
    tool_choice: str | Callable[..., object] | None,
    parallel_tool_calls: bool | None,
    reasoning: bool | int | None,
    separate_reasoning: bool,
) -> Ask | None:
    """What the options of a gen ask for; None for nothing.

    Raises:
        ProgramError: options that exclude each other. ConstraintError: a tool that cannot be offered, naming it.
    """
    if reasoning is not None and not isinstance(reasoning, bool) and (not isinstance(reasoning, int) or reasoning < 1):
        raise ProgramError(f"reasoning must be True, False or a number of tokens of at least 1, got {reasoning!r}")
    if tools is None and (tool_choice is not None or parallel_tool_calls is not None):
        raise ProgramError("tool_choice and parallel_tool_calls need tools")
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise ProgramError(f"parallel_tool_calls must be True or False, got {parallel_tool_calls!r}")
    choice = tool_choice if isinstance(tool_choice, str) else getattr(tool_choice, "__name__", "auto")
    offered = () if tools is None else offers_of(tools)
    names = [one.tool.name for one in offered]
    if offered and choice not in ("auto", "required", "none", *names):
        raise ProgramError(f"tool_choice must be 'auto', 'required', 'none' or one of {names}, got {choice!r}")
    if choice == "none":
        offered = ()
    if not offered and not reasoning:
        return None
    is_named = choice in names
    return Ask(offered, choice, bool(parallel_tool_calls) and not is_named, reasoning, separate_reasoning)


def with_reasoning(node: Gen) -> Gen:
    """The gen, reasoning before it answers."""
    ask = node.ask or Ask()
    return node if ask.reasoning else replace(node, ask=replace(ask, reasoning=True))


def offers_of(tools: Sequence[ToolLike]) -> tuple[Offered, ...]:
    """The tools of a list of functions and schemas.

    Raises:
        ConstraintError: one cannot be offered, naming it.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence) or not tools:
        raise ProgramError(f"tools must be a list of functions and schemas with at least one, got {tools!r}")
    offered = tuple(_of_schema(tool) if isinstance(tool, Mapping) else _of_function(tool) for tool in tools)
    names = [one.tool.name for one in offered]
    bad = next((name for name in names if not re.fullmatch(TOOL_NAME, name)), None)
    if bad is not None:
        raise ConstraintError(f"a tool's name has 1 to 64 letters (a to z), digits, _ and -, got {bad!r}; rename it")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConstraintError(f"two tools are named {twice!r}; rename one")
    return offered


def offering(backend: Backend) -> OffersTools:
    """Raises UnsupportedByBackend: it has no way to offer tools or to mark reasoning."""
    if isinstance(backend, OffersTools):
        return backend
    raise UnsupportedByBackend(f"{type(backend).__name__} can offer no tools and mark no reasoning; use an Engine")


def _markers(backend: Backend) -> tuple[str, str]:
    found = offering(backend).reasoning_markers()
    if found is None:
        raise UnsupportedByBackend("this model's vocabulary has no markers of reasoning; leave reasoning out")
    return found


def _of_schema(given: Mapping[str, object]) -> Offered:
    """From {"name", "description", "parameters"}, or OpenAI's {"type": "function", "function": {...}}."""
    inner = given.get("function", given)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(name, str):
        raise ConstraintError(f"a tool is a function or a dict with name, description and parameters, got {given!r}")
    parameters = inner.get("parameters")
    try:
        text = "" if parameters is None else json.dumps(parameters, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"the parameters of tool {name!r} must hold JSON values only: {error}") from error
    return Offered(Tool(name, text, str(inner.get("description", ""))))


def _of_function(function: object) -> Offered:
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise ConstraintError(f"a tool is a named Python function or a dict with its schema, got {function!r}")
    if hasattr(function, "model_fields"):
        raise ConstraintError(f"tool {name!r} is a model, which nothing calls; give a function with a parameter of it")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation is inspect.Parameter.empty:
            raise ConstraintError(f"tool {name!r}: parameter {parameter.name!r} has no type; annotate it")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConstraintError(f"tool {name!r}: parameter {parameter.name!r} cannot be given by name")
    from pydantic.errors import PydanticUserError

    try:
        schema = _adapter(function).json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        raise ConstraintError(f"tool {name!r}: a parameter's type has no JSON schema: {error}") from error
    description = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").strip()
    return Offered(Tool(name, json.dumps(_told(schema), ensure_ascii=False), description), function)


_VALUES: Final = ("default", "const", "enum", "examples")  # of a schema: no schemas themselves


def _told(schema: object, *, is_named: bool = False) -> object:
    """Without the titles that Pydantic makes of names: the model is told the names. Objects have their fields alone, as
    those of a `dtype` do. `is_named`: these are schemas by the names of fields or types."""
    if isinstance(schema, list):
        return [_told(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if is_named:
        return {name: _told(value) for name, value in schema.items()}
    told = {
        key: value if key in _VALUES else _told(value, is_named=key in ("properties", "$defs"))
        for key, value in schema.items()
        if key != "title"
    }
    if told.get("type") == "object" and "properties" in told:
        told.setdefault("additionalProperties", False)
    return told


def _loaded(call: ToolCall) -> Mapping[str, object]:
    found: Mapping[str, object] = json.loads(call.arguments)
    return found


def _adapter(function: Callable[..., object]) -> TypeAdapter[object]:
    from pydantic import TypeAdapter

    return TypeAdapter(function)  # type: ignore[arg-type]  # functions are taken, too


def _arguments(values: dict[str, object]) -> object:
    from pydantic_core import ArgsKwargs

    return ArgsKwargs((), values)
