"""What a training or test sample is: spans of text, some of them answers, rendered as the chat template does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Gap = Literal["", "text", "turns"]


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a sample. `answer`: trained and tested on. `gap`: filler of that kind may stand before it.

    `note`: what the middle of the network should have in mind here (its first token; in training only).
    """

    text: str
    answer: bool = False
    gap: Gap = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: every prompt in it is the text before an answer span."""

    task: str
    spans: tuple[Span, ...]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Message:
    """A chat turn; `answer` marks an assistant turn that counts. `cut`: where in content filler may be put."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    answer: bool = False
    cut: int = -1
    gap: Gap = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the model sees it; `parameters` maps an argument's name to its JSON type."""

    name: str
    description: str
    parameters: Mapping[str, str]

    def line(self) -> str:
        arguments = ", ".join(f"{name}: {kind}" for name, kind in self.parameters.items())
        return f"- {self.name}({arguments}): {self.description}"

    def schema(self) -> dict[str, object]:
        """The same tool in the OpenAI form that the chat template takes."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def dumps(value: object) -> str:
    """JSON as the model writes and reads it everywhere: compact, not escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tool_call(name: str, arguments: Mapping[str, Json]) -> str:
    return f"<|call|>{dumps({'name': name, 'arguments': dict(arguments)})}<|/call|>"


def chat(task: str, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Sample:
    """The chat template in Python: tests hold the two equal."""
    spans = [Span("<|bos|>")]
    if tools:
        listed = "\n".join(tool.line() for tool in tools)
        if messages and messages[0].role == "system":
            first = replace(messages[0], content=f"{messages[0].content}\nTools:\n{listed}")
            messages = [first, *messages[1:]]
        else:
            messages = [Message("system", f"Tools:\n{listed}"), *messages]
    for message in messages:
        head = f"<|{message.role}|>"
        if message.answer:
            spans += [Span(head, gap=message.gap), Span(f"{message.content}<|end|>", answer=True)]
        elif message.cut >= 0:
            spans.append(Span(head + message.content[: message.cut], gap=message.gap))
            spans.append(Span(f"{message.content[message.cut :]}<|end|>", gap="text"))
        else:
            spans.append(Span(f"{head}{message.content}<|end|>", gap=message.gap))
    return Sample(task, tuple(spans))


def raw(task: str, *spans: Span | str) -> Sample:
    """Plain text after the first token that the tokenizer puts there."""
    return Sample(task, (Span("<|bos|>"), *(Span(span) if isinstance(span, str) else span for span in spans)))
