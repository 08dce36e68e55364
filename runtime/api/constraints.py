"""Constraints, tools and how a model calls them, as plain data. The runtime compiles them (runtime/constraints);
programs only name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

TOOL_NAME: Final = "[a-zA-Z0-9_-]{1,64}"  # a regex, of the whole name: what OpenAI and the models' templates take


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole generated text matches `pattern` (full match, Unicode)."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The generated text is one of `choices`."""

    choices: tuple[str, ...]


Spacing = Literal["compact", "spaced", "free"]


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The generated text is a JSON value that `schema` admits, written compactly: `{"name":"Ada","age":36}`.

    `schema` is the text of a JSON Schema (2020-12; older drafts are read too). Keys come in the schema's order.
    `spacing`: "spaced" as `json.dumps` writes by default, with a blank behind each comma and colon; "free" with or
    without a blank, or a line's end and at most 32 of indentation, behind these and inside brackets.
    """

    schema: str
    spacing: Spacing = "compact"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The generated text is a sentence of a context-free grammar, from its rule `start` (lark) or `root` (ebnf)."""

    source: str
    syntax: Literal["lark", "ebnf"] = "lark"


@dataclass(frozen=True, slots=True)
class StopRegex:
    """The generated text ends with its first match of `pattern`: as soon as an end of it matches, and not before."""

    pattern: str


@dataclass(frozen=True, slots=True)
class AllOf:
    """The generated text satisfies every part: the intersection of their automata, exactly."""

    parts: tuple[Regex | Choices | StopRegex, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. `parameters` is the text of the JSON schema of its arguments, an object."""

    name: str
    parameters: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls: `begin`, a JSON object `{"name":...,arguments_key:...}`, `end`.

    Several calls stand one after the other with `between` in between, or as one list where `is_list`. `mark` is the
    part of `begin` that no other text of an answer holds; where it is empty a call is the whole answer.
    """

    name: str
    begin: str
    end: str
    mark: str
    arguments_key: str = "arguments"
    between: str = ""
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The generated text is free text, calls, or free text and then calls; where `is_required`, calls only.

    `answer` constrains the text that is no call: then it is either that or calls.
    """

    tools: tuple[Tool, ...]
    format: CallFormat
    is_required: bool = False
    is_parallel: bool = True  # False: one call at most
    answer: Regex | Choices | JsonSchema | Grammar | StopRegex | AllOf | None = None


@dataclass(frozen=True, slots=True)
class Reasoned:
    """`begin`, free text of at most `max_tokens` tokens, `end`; then what `constraint` admits (None: anything)."""

    begin: str
    end: str
    max_tokens: int
    constraint: Regex | Choices | JsonSchema | Grammar | StopRegex | AllOf | ToolCalls | None = None


Constraint = Regex | Choices | JsonSchema | Grammar | StopRegex | AllOf | ToolCalls | Reasoned
