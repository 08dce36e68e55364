"""Chat templates that a run may use instead of the model's own: known ones by name, others as functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from niwaki.runtime.api import ProgramError

# (turns so far as {"role", "content"}, add_generation_prompt) -> the text of all of them
TemplateFunction: TypeAlias = Callable[[Sequence[Mapping[str, str]], bool], str]

# What stands before and behind a turn's content. Published by the models' makers: ChatML by Qwen and others.
_MARKS: Mapping[str, tuple[str, str]] = {
    "chatml": ("<|im_start|>{role}\n", "<|im_end|>\n"),
    "llama-3": ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    "plain": ("{role}: ", "\n"),
}


def template_function(said: object) -> TemplateFunction | None:
    """What a run's `chat_template` means.

    Raises:
        ProgramError: it is neither the name of a template nor a function.
    """
    if said is None:
        return None
    if isinstance(said, str) and said in _MARKS:
        return partial(_render, *_MARKS[said])
    if callable(said):
        _check_parameters(said)
        return said
    file = ""
    if isinstance(said, str) and "{%" in said:
        file = "; a Jinja template stands in the model folder's tokenizer_config.json"
    raise ProgramError(f"chat_template is one of {', '.join(_MARKS)}, or a function; got {said!r}{file}")


def _check_parameters(function: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some that are written in C tell none
        return
    try:
        signature.bind([], False)
    except TypeError:
        raise ProgramError(
            "a chat_template's function is called with the turns and with whether an answer begins behind them, as in "
            f"def template(turns, begins_answer): ...; it is {getattr(function, '__name__', 'one')}{signature}"
        ) from None


def _render(before: str, behind: str, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
    turns = "".join(before.format(role=turn["role"]) + turn["content"] + behind for turn in messages)
    return turns + (before.format(role="assistant") if add_generation_prompt else "")
