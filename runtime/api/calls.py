"""Calls in a model's text: the formats that models are trained to write, and the reader that takes an answer apart.

Plain data, no model work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from niwaki.runtime.api import CallFormat, GenerationError, ToolCall

NIWAKI: Final = CallFormat("niwaki", "<|call|>", "<|/call|>", mark="<|call|>")
HERMES: Final = CallFormat("hermes", "<tool_call>\n", "\n</tool_call>", mark="<tool_call>", between="\n")
MISTRAL: Final = CallFormat("mistral", "[TOOL_CALLS]", "", mark="[TOOL_CALLS]", is_list=True)
LLAMA3: Final = CallFormat("llama3", "", "", mark="", arguments_key="parameters")

# What a chat template says where it writes calls in a format, and what it says where it does so in another way.
SIGNATURES: Final = (
    (NIWAKI, ("<|call|>", '"arguments"'), ()),
    (HERMES, ("<tool_call>", "arguments"), ("<function=", "<arg_key>")),
    (MISTRAL, ("[TOOL_CALLS]", "arguments"), ("[ARGS]",)),
    (LLAMA3, ('"parameters": ', "tool_call"), ()),
)
BLANKS: Final = " \t\r\n"  # those of JSON, which may stand before a call that no marker begins
REASONING_MARKERS: Final = (("<think>", "</think>"), ("<|think|>", "<|/think|>"))


def format_of(template: str) -> CallFormat | None:
    """The format in which a chat template writes calls; None where it has none that we know."""
    for form, said, unsaid in SIGNATURES:
        if all(text in template for text in said) and not any(text in template for text in unsaid):
            return form
    return None


def heads_of(form: CallFormat, names: Collection[str]) -> tuple[str, ...]:
    """How an answer begins that is a call of one of these tools."""
    opening = form.begin + ("[" if form.is_list else "")
    return tuple(f'{opening}{{"name":{json.dumps(name)},"{form.arguments_key}":' for name in names)


# ---------------------------------------------------------------------------------------------------------------
# Reading an answer
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The call of that number has this name; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments' JSON."""

    index: int
    text: str


Event: TypeAlias = Reasoning | Content | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer taken apart. `is_whole` is False where it ends inside its reasoning or a call."""

    content: str
    calls: tuple[ToolCall, ...]
    reasoning: str
    is_whole: bool


class AnswerReader:
    """Takes an answer apart while it grows: its reasoning up to `think[1]`, text, and calls of `form`.

    `think[0]` stands before the reasoning; text that does not begin with it has none. `shows_thoughts`: it is told as
    text, and no call is looked for in it. `names`: the answer is a call of one of these tools from its beginning on, or
    has no call (`ToolCalls.answer`). Linear in the text; what may be the beginning of a marker is held back.
    """

    def __init__(
        self,
        form: CallFormat | None,
        think: tuple[str, str] | None = None,
        names: Collection[str] | None = None,
        *,
        shows_thoughts: bool = False,
    ) -> None:
        self._form = form
        self._think = self.think = think
        self._thought = Content if shows_thoughts else Reasoning
        self._heads = () if names is None or form is None else heads_of(form, names)
        self._held = ""
        self._answer: Callable[[], list[Event] | None] = self._either if self._heads else self._text
        self._read = self._answer if think is None else self._think_begin
        self._index = -1  # of the call that was begun last
        self._depth = 0
        self._is_string = self._is_escaped = False

    def push(self, text: str) -> list[Event]:
        """What more text says.

        Raises:
            GenerationError: a call in it is not written in the format; a constraint excludes that.
        """
        self._held += text
        found: list[Event] = []
        while (events := self._read()) is not None:
            found += events
        return found

    def finish(self) -> list[Event]:
        """The answer ended: what was held back is text after all. What is left of an unfinished call's head goes."""
        held, self._held = self._held, ""
        if not held or self._read not in (self._text, self._plain, self._either, self._thinking, self._think_begin):
            return []
        return [self._thought(held) if self._read in (self._thinking, self._think_begin) else Content(held)]

    @property
    def is_whole(self) -> bool:
        return self._read in (self._text, self._plain, self._after_call) or (
            self._read == self._either and not self._held
        )

    @property
    def is_inside_call(self) -> bool:
        """Whether the arguments of the call that was begun last are not whole yet."""
        return self._read == self._arguments

    # Each of these reads what it can from what is held, and says which one goes on. None: more text is needed.

    def _think_begin(self) -> list[Event] | None:
        assert self._think is not None
        begin = self._think[0]
        if len(self._held) < len(begin) and begin.startswith(self._held):
            return None
        if not self._held.startswith(begin):
            self._read = self._answer
            return []
        self._read = self._thinking
        self._held = self._held.removeprefix(begin)
        return self._marked(begin)

    def _thinking(self) -> list[Event] | None:
        assert self._think is not None
        text = self._before(self._think[1])
        found: list[Event] = [self._thought(text)] if text else []
        if self._held.startswith(self._think[1]):
            self._held = self._held[len(self._think[1]) :]
            self._read = self._answer
            return found + self._marked(self._think[1])
        return found or None

    def _marked(self, marker: str) -> list[Event]:
        """A marker of the reasoning, where that is shown."""
        return [Content(marker)] if marker and self._thought is Content else []

    def _text(self) -> list[Event] | None:
        form = self._form
        if form is None:
            self._read = self._plain
            return []
        if not form.mark:
            begun = self._held.lstrip(BLANKS)
            if not begun:
                return None
            self._read = self._head if begun.startswith("{") else self._plain
            return []
        text = self._before(form.mark)
        if self._held.startswith(form.begin):
            self._held = self._held[len(form.begin) :]
            self._read = self._head
        elif not text:
            return None
        return [Content(text)] if text else []

    def _either(self) -> list[Event] | None:
        assert self._form is not None
        if self._held.startswith(self._heads):
            self._held = self._held[len(self._form.begin) :]
            self._read = self._head
        elif any(head.startswith(self._held) for head in self._heads):
            return None
        else:
            self._read = self._plain
        return []

    def _plain(self) -> list[Event] | None:
        text, self._held = self._held, ""
        return [Content(text)] if text else None

    def _head(self) -> list[Event] | None:
        """`{"name":"...","arguments":`, where a list has a bracket or comma before it."""
        assert self._form is not None
        rest = self._held.lstrip()
        if self._form.is_list and rest[:1] in ("[", ","):
            rest = rest[1:]
        found = _after_all(rest, "{", '"name"', ":")
        named = None if found is None else _string_at(found)
        if named is None:
            return None
        name, found = named
        found = _after_all(found, ",", json.dumps(self._form.arguments_key), ":")
        if found is None:
            return None
        self._held = found.lstrip()
        self._index += 1
        self._depth = 0
        self._read = self._arguments
        return [CallBegin(self._index, name)]

    def _arguments(self) -> list[Event] | None:
        """A JSON object, up to its last brace."""
        for place, character in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    text, self._held = self._held[: place + 1], self._held[place + 1 :]
                    self._read = self._tail
                    return [CallArguments(self._index, text)]
        text, self._held = self._held, ""
        return [CallArguments(self._index, text)] if text else None

    def _tail(self) -> list[Event] | None:
        """The brace that closes the call, and the marker behind it."""
        assert self._form is not None
        end = "" if self._form.is_list else self._form.end
        rest = _after_all(self._held, "}")
        if rest is None or (len(rest) < len(end) and end.startswith(rest)):
            return None
        if not rest.startswith(end):
            raise GenerationError(f"a call ends with {rest[:40]!r} instead of {end!r}")
        self._held = rest[len(end) :]
        self._read = self._after_call
        return []

    def _after_call(self) -> list[Event] | None:
        """Another call, or the end."""
        assert self._form is not None
        rest = self._held.lstrip()
        if self._form.is_list:
            if rest[:1] == "]":
                self._held, self._read = rest[1:], self._text
                return []
            if rest[:1] == ",":
                self._read = self._head
                return []
            return None
        between = self._form.between + self._form.begin
        if not self._form.mark or (len(self._held) < len(between) and between.startswith(self._held)):
            return None
        if self._held.startswith(between):
            self._held = self._held[len(between) :]
            self._read = self._head
        else:
            self._read = self._text
        return []

    def _before(self, marker: str) -> str:
        """Take what stands before the marker, or before what may become it."""
        at = self._held.find(marker)
        if at < 0:
            longest = min(len(marker) - 1, len(self._held))
            held = next((n for n in range(longest, 0, -1) if marker.startswith(self._held[-n:])), 0)
            at = len(self._held) - held
        text, self._held = self._held[:at], self._held[at:]
        return text


def read_answer(
    text: str, form: CallFormat | None, think: tuple[str, str] | None = None, names: Collection[str] | None = None
) -> Answer:
    """A whole answer, taken apart. Raises GenerationError as `AnswerReader.push`."""
    reader = AnswerReader(form, think, names)
    events = reader.push(text)
    is_whole = reader.is_whole
    return answer_of([*events, *reader.finish()], is_whole=is_whole)


def answer_of(events: Sequence[Event], *, is_whole: bool = True) -> Answer:
    """All events of an answer, added up."""
    content: list[str] = []
    reasoning: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin(_, name):
                names.append(name)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    calls = tuple(ToolCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True))
    return Answer("".join(content), calls, "".join(reasoning), is_whole)


def _after_all(text: str, *wanted: str) -> str | None:
    """The text behind these pieces, which blanks may part; None where it ends before them.

    Raises:
        GenerationError: something else stands there.
    """
    for piece in wanted:
        text = text.lstrip()
        if not text.startswith(piece):
            if piece.startswith(text):
                return None
            raise GenerationError(f"a call goes on with {text[:40]!r} where {piece!r} belongs")
        text = text[len(piece) :]
    return text


def _string_at(text: str) -> tuple[str, str] | None:
    """A JSON string and what follows it; None where it is not whole."""
    text = text.lstrip()
    if not text:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None
    if not isinstance(value, str):
        raise GenerationError(f"a call's name is a string, not {value!r}")
    return value, text[end:]
