"""What a script answers: finds the answer to a prompt, writes it as a model would, and holds it to the constraint.

Knows no branches and no tokens; `scripted.py` makes a backend of it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import TypeAlias

from niwaki.lang.json_text import as_json
from niwaki.lang.own_regex import is_excluded
from niwaki.runtime.api import (
    AllOf,
    Choices,
    ConstraintError,
    GenerationError,
    JsonSchema,
    ProgramError,
    Regex,
    SamplingParams,
    ToolCalls,
)
from niwaki.runtime.api.calls import NIWAKI, read_answer

# An answer may be any value: a text, an exception, a function from the prompt to one, or what has JSON.
Script: TypeAlias = Mapping[str | re.Pattern[str], object] | Sequence[object] | Callable[[str], object]


class Answers:
    """The script, and how far its lists are used up."""

    def __init__(self, script: Script) -> None:
        self._script: Mapping[str | re.Pattern[str], object] | Callable[[str], object]
        if callable(script) or isinstance(script, Mapping):
            keys = () if callable(script) else tuple(script)
            bad = next((key for key in keys if not isinstance(key, str | re.Pattern)), None)
            if bad is not None:
                raise ProgramError(f"a script's key is the end of a prompt, or a compiled regex in it, got {bad!r}")
            self._script = script
        elif isinstance(script, Sequence) and not isinstance(script, str | bytes):
            self._script = {"": script}  # every prompt ends with nothing
        else:
            raise ProgramError(f"a script is a mapping, a list of answers or a function, got {script!r}")
        self._num_used: dict[str | re.Pattern[str], int] = {}
        self.begin()

    def begin(self) -> None:
        """Also in a fork: who held the lock is not there."""
        self._lock = threading.Lock()  # the counts

    def answer(self, prompt: str, tools: Collection[str] = ()) -> str:
        """The text that answers the prompt, where tools of these names are offered. Raises an answer that is an
        exception."""
        answer = self._script if callable(self._script) else self._find(self._script, prompt)
        if not isinstance(answer, BaseException) and callable(answer):
            answer = answer(prompt)
        if isinstance(answer, BaseException):
            raise answer
        return _text_of(answer, tools)

    def _find(self, script: Mapping[str | re.Pattern[str], object], prompt: str) -> object:
        for key, answer in script.items():
            is_match = prompt.endswith(key) if isinstance(key, str) else key.search(prompt) is not None
            if not is_match:
                continue
            if isinstance(answer, str) or not isinstance(answer, Sequence):
                return answer
            with self._lock:
                used = self._num_used.get(key, 0)
                self._num_used[key] = used + 1
            if used >= len(answer):
                to_what = f" to {key!r}" if key else ""
                raise GenerationError(
                    f"the script's {len(answer)} answers{to_what} are used up; prompt: ...{prompt[-80:]!r}"
                )
            return answer[used]
        keys = ", ".join(repr(key if isinstance(key, str) else key.pattern) for key in script)
        raise GenerationError(f"the script has no answer to a prompt that ends with {prompt[-80:]!r}; it knows: {keys}")


def offered(params: SamplingParams) -> list[str]:
    """The names of the tools that the answer may call."""
    return [tool.name for tool in params.constraint.tools] if isinstance(params.constraint, ToolCalls) else []


def _text_of(answer: object, tools: Collection[str]) -> str:
    """What a model would write for the value."""
    value = answer.value if isinstance(answer, Enum) else answer
    if isinstance(value, str):
        return value
    several = value if isinstance(value, list) and value else [value]
    if all(isinstance(one, dict) and one.keys() == {"name", "arguments"} and one["name"] in tools for one in several):
        return "".join(f"{NIWAKI.begin}{_json_of(one)}{NIWAKI.end}" for one in several)
    return _json_of(value)


def _json_of(value: object) -> str:
    try:
        return as_json(value)
    except (TypeError, ValueError) as error:
        raise GenerationError(f"a scripted answer must be a text, or have JSON, got {value!r}: {error}") from error


def check_constraint(text: str, params: SamplingParams) -> None:
    """Raises ConstraintError: the call's constraint excludes the answer."""
    match params.constraint:
        case Regex(pattern=pattern) if is_excluded(text, pattern):
            is_spaced = text[:1] in ("{", "[") and any(blank in text for blank in (": ", ", ", "\n"))
            hint = "; JSON is written without blanks: give the value itself, or its compact text" if is_spaced else ""
            shown = pattern if len(pattern) <= 300 else f"{pattern[:300]}..."  # a model of many fields has a long one
            raise ConstraintError(f"the scripted answer {text!r} does not match the regex {shown!r}{hint}")
        case AllOf(parts=parts):
            for part in parts:
                check_constraint(text, replace(params, constraint=part))
        case Choices(choices=choices) if text not in choices:
            raise ConstraintError(f"the scripted answer {text!r} is none of the choices {list(choices)!r}")
        case ToolCalls(tools=tools, is_required=is_required):
            calls = read_answer(text, NIWAKI).calls
            called = [call.name for call in calls]
            unknown = set(called) - {tool.name for tool in tools}
            if unknown or (is_required and not called):
                offered = [tool.name for tool in tools]
                raise ConstraintError(f"the scripted answer {text!r} makes no call of the tools {offered}")
            schemas = {tool.name: json.loads(tool.parameters or "{}") for tool in tools}
            for call in calls:
                with suppress(json.JSONDecodeError):  # a call that breaks off is judged by who reads it
                    _check_keys(call.name, json.loads(call.arguments), schemas[call.name])
        case JsonSchema():  # only that it is JSON: a type's own parser, or the program, judges the rest
            try:
                json.loads(text)
            except ValueError:
                raise ConstraintError(f"the scripted answer {text!r} is not JSON") from None
        case _:
            pass


def _check_keys(name: str, arguments: object, schema: Mapping[str, object]) -> None:
    """Raises ConstraintError where arguments are missing, or are no parameters. What they hold is not looked at."""
    given = arguments.keys() if isinstance(arguments, dict) else set()
    known, needed = schema.get("properties", {}), schema.get("required", [])
    missing = [key for key in needed if key not in given] if isinstance(needed, list) else []
    other = [key for key in given if key not in known] if isinstance(known, dict) else []
    if missing or (other and schema.get("additionalProperties") is False):
        what = f"lacks {missing[0]!r}" if missing else f"has {other[0]!r}, which is no parameter"
        raise ConstraintError(f"the scripted call of {name!r} {what}")
