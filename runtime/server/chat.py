"""Chat messages as prompt text: the model's template around the contents, which it never sees.

The template is rendered with a placeholder for each content; what stands between the placeholders is template text and
may hold special tokens, the contents may not. Calls and tools are seen by the template, which writes their names and
arguments as JSON: a sign inside each special token that they spell keeps it from becoming one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from niwaki.runtime.api import Message, Segment, Tool, ToolCall
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.tokenizer import Tokenizer

# Of Unicode's private use area, where no template text stands. A tool's placeholder ends with a quote, which shows
# whether the template writes contents of tools as JSON.
PLACEHOLDER = re.compile('\ue000([0-9]+)(\\\\?"?)\ue001')
GUARD = "\ue002"


def segments(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = (), *, continues: bool = False
) -> list[Segment]:
    """The prompt of a conversation, up to where the assistant's answer begins; with `continues`, up to the end of what
    the last message says, which the answer goes on with.

    Raises:
        ApiError, UnsupportedByBackend, ProgramError: the model has no template, or it does not write these turns.
    """
    for index, message in enumerate(messages):
        for call in message.calls:
            _check_arguments(call, index)
    stand_ins = [_stand_in(index, message, tokenizer) for index, message in enumerate(messages)]
    rendering = tokenizer.render(stand_ins, add_generation_prompt=not continues, tools=tools)
    pieces = PLACEHOLDER.split(rendering)  # template text, index, and what a quote became, in turn
    indices = [int(index) for index in pieces[1::3]]
    wanted = [index for index, message in enumerate(stand_ins) if message.content]
    if sorted(indices) != wanted:
        missing = next((i for i in wanted if indices.count(i) != 1), 0)
        raise ApiError(
            400,
            f"the model's chat template does not write message {missing} ({messages[missing].role}) as one piece",
            param=f"messages[{missing}]",
        )
    found = _template_segments(pieces[0])
    for index, quote, text in zip(indices, pieces[2::3], pieces[3::3], strict=True):
        content = messages[index].content
        is_json = quote.startswith("\\")
        found.append(Segment(json.dumps(content, ensure_ascii=False)[1:-1] if is_json else content))
        if continues and index == len(messages) - 1:
            break
        found += _template_segments(text)
    return [segment for segment in found if segment.text]


def _stand_in(index: int, message: Message, tokenizer: Tokenizer) -> Message:
    """What the template sees of a message."""
    quote = '"' if message.role == "tool" else ""
    content = f"\ue000{index}{quote}\ue001" if message.content or not message.calls else ""
    if not (message.calls or message.name or message.call_id):  # most are: it takes 1 us instead of 7
        return Message(message.role, content)
    return Message(
        message.role,
        content,
        tuple(replace(call, arguments=_guarded(call.arguments, tokenizer)) for call in message.calls),
        _guarded(message.call_id, tokenizer),
        _guarded(message.name, tokenizer),
    )


def _template_segments(text: str) -> list[Segment]:
    """Template text; the character behind each guard is content, so that no special token forms around it."""
    first, *rest = text.split(GUARD)
    found = [Segment(first, control=True)]
    for piece in rest:
        found += [Segment(piece[:1]), Segment(piece[1:], control=True)]
    return found


def _guarded(text: str, tokenizer: Tokenizer) -> str:
    """The text with a sign inside each special token that it spells."""
    for mark in tokenizer.special_ids:
        text = text.replace(mark, mark[:1] + GUARD + mark[1:])
    return text


def _check_arguments(call: ToolCall, index: int) -> None:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, "the arguments of a call must be a JSON object", param=f"messages[{index}].tool_calls")
