"""Sampling options from a dict: our names and SGLang's, constraints among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import get_args

from niwaki.runtime.api import (
    AllOf,
    Choices,
    Constraint,
    Grammar,
    JsonSchema,
    Regex,
    RequestError,
    SamplingOptions,
    Spacing,
)
from niwaki.runtime.api.names import PARAMETERS, hint

# Spellings of SGLang's wire, beside our own names.
WIRE_NAMES = {"min_new_tokens": "min_tokens", "max_tokens": "max_new_tokens", "sampling_seed": "seed"}
CONSTRAINT_NAMES = ("regex", "choices", "json_schema", "ebnf", "grammar")
KNOWN_NAMES = (*SamplingOptions.__dataclass_fields__, *CONSTRAINT_NAMES, "json_spacing")


def knows_option(name: str) -> bool:
    """Whether `options_from_dict` takes it."""
    return WIRE_NAMES.get(name, name) in KNOWN_NAMES


def options_from_dict(given: Mapping[str, object]) -> SamplingOptions:
    """Sampling options from a dict of our names or SGLang's, constraints among them.

    `regex` is one or a list of those that the text must match at once, `json_schema` a schema's text or a dict
    (`json_spacing` says where blanks stand in its JSON), `grammar` one in Lark's syntax, `ebnf` one in GBNF's.

    Raises:
        RequestError: an unknown name, or two constraints at once.
    """
    said: dict[str, object] = {}
    for name, value in given.items():
        name = WIRE_NAMES.get(name, name)
        if name not in KNOWN_NAMES:
            meant = hint(name, PARAMETERS, KNOWN_NAMES) or f"; known: {', '.join(KNOWN_NAMES)}"
            raise RequestError(f"unknown sampling parameter {name!r}{meant}")
        if value is not None:
            said[name] = value
    constraints: list[Constraint] = []
    if (pattern := said.pop("regex", None)) is not None:
        constraints.append(_regex(pattern))
    if (choices := said.pop("choices", None)) is not None:
        if not isinstance(choices, list | tuple):
            raise RequestError(f"choices must be a list of strings, got {choices!r}")
        constraints.append(Choices(tuple(str(choice) for choice in choices)))
    spacing = said.pop("json_spacing", "compact")
    if spacing not in get_args(Spacing) or (spacing != "compact" and "json_schema" not in said):
        kinds = ", ".join(get_args(Spacing))
        raise RequestError(f"json_spacing must be one of {kinds}, beside a json_schema, got {spacing!r}")
    if (schema := said.pop("json_schema", None)) is not None:
        text = schema if isinstance(schema, str) else _schema_text(schema)
        constraints.append(JsonSchema(text, spacing))  # type: ignore[arg-type]  # checked above
    for name, syntax in (("ebnf", "ebnf"), ("grammar", "lark")):
        if (source := said.pop(name, None)) is not None:
            constraints.append(Grammar(str(source), syntax))  # type: ignore[arg-type]  # both are of the Literal
    if len(constraints) + ("constraint" in said) > 1:
        raise RequestError(f"at most one constraint: {', '.join(CONSTRAINT_NAMES)} or constraint")
    if constraints:
        said["constraint"] = constraints[0]
    return SamplingOptions(**said)  # type: ignore[arg-type]  # `resolve` checks the values


def spelling_of(given: Mapping[str, object]) -> object:
    """Equal for dicts that say the same in the same types: 1 and True are no equals here. None for those that cannot
    be compared so."""
    said = tuple((name, type(value), value) for name, value in given.items())
    try:
        hash(said)
    except TypeError:
        return None
    return said


def _regex(given: object) -> Regex | AllOf:
    """A regex, or of a list the texts that match every one of it."""
    patterns = given if isinstance(given, list | tuple) else [given]
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise RequestError(f"regex must be a string or a list of strings, got {given!r}")
    parts = tuple(Regex(str(pattern)) for pattern in patterns)
    return parts[0] if len(parts) == 1 else AllOf(parts)


def _schema_text(schema: object) -> str:
    if isinstance(schema, type):
        name = schema.__name__
        raise RequestError(
            f"json_schema must be a JSON schema as text or as a dict, got the class {name}; write "
            f"{name}.model_json_schema(), or a program with gen(dtype={name})"
        )
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"json_schema must be a JSON schema as text or as a dict: {error}") from None
