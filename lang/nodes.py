"""What a program is made of: frozen nodes and how they add up. Knows nothing of states or backends."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn, TypeAlias

from niwaki.lang.types import ValueType
from niwaki.runtime.api import Choices, ProgramError, SamplingOptions, Tool
from niwaki.runtime.api.choices import ChoicesMethod, exact

if TYPE_CHECKING:
    from niwaki.lang.tools import Ask

# Of a type with that many values each is scored; with more, one is generated under a mask. Measured on the bundled
# model: 3, 10, 30, 100 and 300 values take 4.0, 8.2, 16, 47 and 166 ms, generating one of them about 6.
MAX_SCORED_VALUES: Final = 32
# What says how a whole value is drawn, and no more. Every other option is about the tokens that it would be written in.
OPTIONS_OF_VALUES: Final = frozenset(("temperature", "top_p", "top_k", "min_p", "seed", "n", "heal", "max_new_tokens"))


class Expression:
    """Anything that `state += ...` takes beside plain text. Expressions and text add up with `+`, in order."""

    __slots__ = ()

    def __add__(self, other: Content) -> Chain:
        return Chain(as_nodes(self) + as_nodes(other))

    def __radd__(self, other: Content) -> Chain:
        return Chain(as_nodes(other) + as_nodes(self))

    if not TYPE_CHECKING:  # to a type checker, as to Python, it is no context manager

        def __enter__(self) -> NoReturn:
            raise ProgramError("a turn is held open by a state: with s.assistant(): ...; or write s += assistant(...)")

        def __exit__(self, *exc: object) -> None: ...

    def __format__(self, spec: str) -> str:
        raise ProgramError(_inside(type(self).__name__, "an f-string"))

    def __str__(self) -> str:
        """As its repr, for who prints it. `"..." % gen("x")` asks for it as well, so text that has it in it is refused
        where it is appended."""
        text = repr(self)
        if text not in _PRINTED:
            _PRINTED.append(text)
        return text


class NoContent:
    """What a program cannot append, though its author may take it for text. `_remedy` says what to write."""

    _remedy: ClassVar[str]


# What the last expressions were as text: nothing in a program that makes none. A print of one and a prompt that quotes
# just that print are not told from the mistake.
_PRINTED: Final[deque[str]] = deque(maxlen=16)


@dataclass(frozen=True, slots=True)
class Text(Expression):
    text: str


@dataclass(frozen=True, slots=True)
class Gen(Expression):
    """Generate text into the variable `name` (None: nobody reads it). `type` constrains it and reads it back."""

    name: str | None
    options: SamplingOptions
    type: ValueType | None = None
    timeout: float | None = None  # seconds from when it is sent
    dtype: object = None  # the Python type that `type` was made from, where it was
    ask: Ask | None = None  # what it may write beside: calls, and reasoning

    def as_select(self) -> Select | None:
        """The same as a choice among whole texts, where its type has a few values (Literal, Enum, bool) and nothing
        that it says is about tokens."""
        if self.ask is not None or self.type is None or not isinstance(self.type.constraint, Choices):
            return None
        choices = self.type.constraint.choices
        said = {name for name in SamplingOptions.__slots__ if getattr(self.options, name) is not None}
        if len(choices) > MAX_SCORED_VALUES or not said <= OPTIONS_OF_VALUES:
            return None
        return Select(self.name, choices, exact, self.timeout, self.options.heal, self)


@dataclass(frozen=True, slots=True)
class Select(Expression):
    """Score every choice and append the best. With `gen` the choices are the values of its type: it says how they are
    drawn, and the variable is the value."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod
    timeout: float | None = None  # seconds from when it is sent
    heal: bool | None = None
    gen: Gen | None = None


@dataclass(frozen=True, slots=True)
class RoleBegin(Expression):
    """Open a chat turn. `generates` is False where the turn is known to hold no generation. `tools` are told to the
    model, from the first turn on."""

    role: str
    generates: bool = True
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleEnd(Expression):
    role: str


def turn_named(role: str) -> str:
    """As errors call it: "an assistant turn"."""
    return f"{'an' if role == 'assistant' else 'a'} {role} turn"


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expression):
    """From here to the end of the scope, text is also the value of the variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expression):
    name: str


@dataclass(frozen=True, slots=True)
class SetVariable(Expression):
    name: str
    value: object


Node: TypeAlias = Text | Gen | Select | RoleBegin | RoleEnd | ScopeBegin | ScopeEnd | SetVariable


@dataclass(frozen=True, slots=True)
class Chain(Expression):
    """Nodes in order: what `+` makes."""

    nodes: tuple[Node, ...]


Content: TypeAlias = "str | Expression | Sequence[Content]"


def as_nodes(content: Content) -> tuple[Node, ...]:
    """The nodes of a text, an expression, or a list of them.

    Raises:
        ProgramError: for anything else.
    """
    match content:
        case str():
            if _PRINTED:
                _check_text(content)
            return (Text(content),) if content else ()
        case Chain(nodes=nodes):
            return nodes
        case (Text() | Gen() | Select() | RoleBegin() | RoleEnd() | ScopeBegin() | ScopeEnd() | SetVariable()) as node:
            return (node,)
        case list() | tuple():
            return tuple(node for part in content for node in as_nodes(part))
        case _:
            raise ProgramError(f"a program is made of text, nodes and lists of them, got {content!r}{_remedy(content)}")


def _check_text(content: str) -> None:
    for text in tuple(_PRINTED):
        if str.__contains__(content, text):  # `in` would be a look of the program at text that only stands for some
            raise ProgramError(_inside(text.partition("(")[0], "a text"))


def _inside(kind: str, where: str) -> str:
    return (
        f"a {kind.lower()} cannot stand inside {where}, where only its repr would be left; "
        "write s += 'text' + gen('x') instead"
    )


def _remedy(content: object) -> str:
    match content:
        case NoContent(_remedy=remedy):
            return f"; {remedy}"
        case None:
            return "; a program that is called with the state, f(s, ...), appends by itself, without +="
        case int() | float():
            return "; write str(...) around it"
        case {"role": _, "content": _}:
            return "; write a turn as system(...), user(...) or assistant(...)"
        case Awaitable():
            return "; await it first"
        case Iterator():
            return "; make a list of it"
        case FunctionType():
            return f"; call it: {content.__name__}(...)"
        case _:
            return ""


def reasoning_name(name: str) -> str:
    """The variable that holds the reasoning before the value of `name`; SGLang's spelling."""
    return f"{name}_reasoning_content"


def variables_of(node: Node) -> tuple[str, ...]:
    """The variables that the node sets when it runs."""
    match node:
        case Gen(name=str(name), ask=ask) if ask is not None and ask.reasoning:
            return name, reasoning_name(name)
        case Gen(name=name) | Select(name=name):
            return () if name is None else (name,)
        case ScopeEnd(name=name) | SetVariable(name=name):
            return (name,)
        case _:
            return ()
