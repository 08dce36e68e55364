"""Tool calls and reasoning as pieces of a composed constraint: markers, free text up to them, calls by schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final
from urllib.parse import urljoin

from niwaki.runtime.api import (
    AllOf,
    Choices,
    Constraint,
    ConstraintError,
    Grammar,
    JsonSchema,
    Reasoned,
    Regex,
    StopRegex,
    Tool,
    ToolCalls,
)
from niwaki.runtime.api.calls import heads_of
from niwaki.runtime.api.constraints import TOOL_NAME
from niwaki.runtime.constraints.automaton import from_texts
from niwaki.runtime.constraints.composed import NOTHING, InTurn, Mark, OneOf, Part, Piece, Several
from niwaki.runtime.constraints.free import texts_before, texts_not_beginning_with
from niwaki.runtime.constraints.matcher import AutomatonConstraint
from niwaki.runtime.constraints.protocol import CompiledConstraint
from niwaki.runtime.constraints.schema.document import Json, read_schema
from niwaki.runtime.constraints.schema.references import dialect_of
from niwaki.runtime.constraints.schema.ways import ASKING
from niwaki.runtime.constraints.vocabulary import Vocabulary

MAX_TOOLS: Final = 128
NO_PARAMETERS: Final = '{"type":"object","properties":{},"additionalProperties":false}'

Compile = Callable[[Constraint], CompiledConstraint]
Answer = Regex | Choices | JsonSchema | Grammar | StopRegex | AllOf


def reasoned_piece(reasoned: Reasoned, vocabulary: Vocabulary, compiled: Compile) -> Piece:
    """`begin`, the free span, `end`, and what follows."""
    if not reasoned.end:
        raise ConstraintError("reasoning needs the marker that ends it")
    if reasoned.max_tokens < 0:
        raise ConstraintError(f"the budget of reasoning must be at least 0 tokens, got {reasoned.max_tokens}")
    span = Part(AutomatonConstraint(texts_before(reasoned.end.encode()), vocabulary), reasoned.max_tokens)
    return InTurn(
        (
            _marker(reasoned.begin, vocabulary),
            span,
            _marker(reasoned.end, vocabulary),
            _free("", vocabulary) if reasoned.constraint is None else _piece(reasoned.constraint, vocabulary, compiled),
        )
    )


def calls_piece(calls: ToolCalls, vocabulary: Vocabulary, compiled: Compile) -> Piece:
    """Free text or the answer, calls, or both, as `ToolCalls` says.

    Raises:
        ConstraintError: no tools, a bad name, one name twice, or a schema that cannot be enforced, naming the tool.
    """
    check_tools(calls.tools)
    form = calls.format
    is_repeated = calls.is_parallel and not form.is_list and bool(form.mark)
    one = compiled_calls(calls, compiled)
    call = InTurn((_marker(form.begin, vocabulary), Part(one), _marker(form.end, vocabulary)))
    made = Several(call, _marker(form.between, vocabulary)) if is_repeated else call
    if calls.is_required:
        return made
    if calls.answer is not None:
        return OneOf((Part(_answer(calls, calls.answer, compiled)), made))
    if not form.mark:
        return OneOf((Part(AutomatonConstraint(texts_not_beginning_with(ord("{")), vocabulary)), made))
    return InTurn((_free(form.mark, vocabulary), OneOf((NOTHING, made))))


def compiled_calls(calls: ToolCalls, compiled: Compile) -> CompiledConstraint:
    schema = schema_of_calls(calls)
    try:
        return compiled(JsonSchema(schema))
    except ConstraintError as error:
        for tool in calls.tools:  # whose fault is it?
            try:
                compiled(JsonSchema(tool.parameters or NO_PARAMETERS))
            except ConstraintError as reason:
                raise ConstraintError(f"the parameters of tool {tool.name!r}: {reason}") from None
        raise ConstraintError(f"the tools together: {error}") from None


def _answer(calls: ToolCalls, answer: Answer, compiled: Compile) -> CompiledConstraint:
    """The texts of `answer` that cannot be taken for a call. Raises ConstraintError: they cannot be told apart."""
    found = compiled(answer)
    names = [tool.name for tool in calls.tools]
    heads = heads_of(calls.format, names)
    alike = [name for name, head in zip(names, heads, strict=True) if _may_begin_with(found, head.encode())]
    if not alike:
        return found
    if isinstance(answer, JsonSchema | Grammar):
        raise ConstraintError(f"the answer may begin as a call of tool {alike[0]!r} does; ask for another form of it")
    begins = "|".join(map(re.escape, heads)).replace("\\\n", "\\n")
    parts = answer.parts if isinstance(answer, AllOf) else (answer,)
    return compiled(AllOf((*parts, Regex(f"(?s)(?!{begins}).*"))))


def _may_begin_with(constraint: CompiledConstraint, text: bytes) -> bool:
    try:
        constraint.matcher().accept_bytes(text)
    except ConstraintError:
        return False
    return True


def check_tools(tools: tuple[Tool, ...]) -> None:
    """Raises ConstraintError: none, too many, a bad name, or one name twice."""
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise ConstraintError(f"1 to {MAX_TOOLS} tools can be offered, got {len(tools)}")
    seen: set[str] = set()
    for tool in tools:
        if not re.fullmatch(TOOL_NAME, tool.name):
            raise ConstraintError(f"a tool's name has 1 to 64 letters, digits, _ and -, got {tool.name!r}")
        if tool.name in seen:
            raise ConstraintError(f"two tools are named {tool.name!r}")
        seen.add(tool.name)


def schema_of_calls(calls: ToolCalls) -> str:
    """The schema of one call, or of the list of calls where the format writes one.

    Raises:
        ConstraintError: a tool's parameters are no schema of an object.
    """
    key = calls.format.arguments_key
    definitions: dict[str, Json] = {}
    kinds: list[dict[str, Json]] = []
    for index, tool in enumerate(calls.tools):
        name = f"tool{index}"
        definitions[name] = _document(tool, f"https://{name}.invalid/")
        called: dict[str, Json] = {"name": {"const": tool.name}, key: {"$ref": f"#/$defs/{name}"}}
        kinds.append({"type": "object", "properties": called, "required": ["name", key], "additionalProperties": False})
    one: dict[str, Json] = {"anyOf": [*kinds]} if len(kinds) > 1 else kinds[0]
    if calls.format.is_list:
        one = {"type": "array", "items": one, "minItems": 1, **({} if calls.is_parallel else {"maxItems": 1})}
    return json.dumps({**one, "$defs": definitions}, ensure_ascii=False)


def _parameters(tool: Tool) -> dict[str, Json]:
    try:
        schema = read_schema(tool.parameters or NO_PARAMETERS)
    except ConstraintError as error:
        raise ConstraintError(f"the parameters of tool {tool.name!r}: {error}") from None
    if not isinstance(schema, dict):
        raise ConstraintError(f"the parameters of tool {tool.name!r} must be the schema of an object, got {schema!r}")
    schema.setdefault("type", "object")
    if schema["type"] != "object":
        raise ConstraintError(
            f"the parameters of tool {tool.name!r} must be of type 'object', got {schema['type']!r}: they are named"
        )
    return schema


def _document(tool: Tool, address: str) -> Json:
    """The parameters of a tool among others: a document of their own, where what its names and its `$schema` mean does
    not hang on the others."""
    schema = _parameters(tool)
    if "$ref" in schema and dialect_of(schema).is_old:  # where a reference hides what stands beside it, also an $id
        rest = {key: value for key, value in schema.items() if key not in ASKING}
        schema = {"type": "object", "allOf": [{"$ref": schema["$ref"]}], **rest}
    own = schema.get("$id")
    return {**schema, "$id": urljoin(address, own) if isinstance(own, str) else address}


def _piece(constraint: Constraint, vocabulary: Vocabulary, compiled: Compile) -> Piece:
    if isinstance(constraint, ToolCalls):
        return calls_piece(constraint, vocabulary, compiled)
    return Part(compiled(constraint))


def _marker(text: str, vocabulary: Vocabulary) -> Piece:
    """The text, with a special token wherever the vocabulary has one of that text."""
    items: list[Piece] = []
    specials = "|".join(re.escape(mark) for mark in sorted(vocabulary.marks, key=len, reverse=True) if mark in text)
    for piece in re.split(f"({specials})", text) if specials else [text]:
        if piece in vocabulary.marks:
            items.append(Mark(vocabulary.marks[piece]))
        elif piece:
            items.append(Part(AutomatonConstraint(from_texts([piece.encode()]), vocabulary)))
    return items[0] if len(items) == 1 else InTurn(tuple(items))


def _free(marker: str, vocabulary: Vocabulary) -> Piece:
    return Part(AutomatonConstraint(texts_before(marker.encode()), vocabulary))


def marks_of(constraint: Constraint | None) -> tuple[str, ...]:
    """The markers that a constraint may let a model write: they are part of the text."""
    match constraint:
        case Reasoned(begin, end, constraint=inner):
            return (begin, end, *marks_of(inner))
        case ToolCalls(format=form):
            return (form.begin, form.end, form.between)
        case _:
            return ()
