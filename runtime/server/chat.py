"""Chat messages as prompt text: the model's template around the contents, which it never sees.

The template is rendered with a placeholder for each content and each speaker's name; what stands between the
placeholders is template text and may hold special tokens, contents and names may not. Calls, tools and their names are
seen by the template, which writes their arguments as JSON: a sign inside each special token that they spell keeps it
from becoming one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from niwaki.runtime.api import Message, Segment, Tool, ToolCall
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.server.errors import ApiError

# Of Unicode's private use area, where no template text stands. A tool's placeholder and a name's end with a quote,
# which shows whether the template writes them as JSON.
PLACEHOLDER = re.compile('\ue000([0-9]+)(\\\\?"?)\ue001')
GUARD = "\ue002"
SIGNS = re.compile("[\ue000-\ue002]")
MAX_FORMS = 256
MAX_FORM_MESSAGES = 100

# Template text, and contents by message, as JSON or as they are; behind the last message's index come the names.
Form = tuple[Segment | tuple[int, bool], ...]


class Prompts:
    """Conversations as prompts of one model. Any thread may ask.

    What a template writes around plain contents depends on who speaks alone: that is kept for the conversations that
    were asked for last, so a long one costs a look-up.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._form = lru_cache(MAX_FORMS)(self._form_of)

    def segments(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        continues: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> list[Segment]:
        """As the function below."""
        is_plain = not (tools or variables or any(map(_is_of_tools, messages)))
        if not is_plain or len(messages) > MAX_FORM_MESSAGES or not self._tokenizer.has_lasting_template:
            return segments(self._tokenizer, messages, tools, continues=continues, variables=variables)
        form = self._form(tuple([(message.role, message.name != "") for message in messages]), continues)
        return _filled(form, messages)

    def _form_of(self, speakers: tuple[tuple[str, bool], ...], continues: bool) -> Form:
        messages = [Message(role, "x", name="x" if is_named else "") for role, is_named in speakers]
        return _form(self._tokenizer, messages, (), continues, {})


def segments(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    continues: bool = False,
    variables: Mapping[str, object] | None = None,
) -> list[Segment]:
    """The prompt of a conversation, up to where the assistant's answer begins; with `continues`, up to the end of what
    the last message says, which the answer goes on with. `variables` are told to the template.

    Raises:
        ApiError, UnsupportedByBackend, ProgramError: the model has no template, or it does not write these turns.
    """
    for index, message in enumerate(messages):
        for call in message.calls:
            if not is_whole(call):
                param = f"messages[{index}].tool_calls"
                raise ApiError(400, "the arguments of a call must be a JSON object", param=param)
    _check_variables(variables or {}, tokenizer)
    return _filled(_form(tokenizer, messages, tools, continues, variables or {}), messages)


def is_whole(call: ToolCall) -> bool:
    """Whether a template can write it: its arguments are an object."""
    try:
        return isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        return False


def _is_of_tools(message: Message) -> bool:
    """Whether the template itself sees some of what it says."""
    return bool(message.calls or message.call_id or (message.name and message.role == "tool"))


def _form(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    continues: bool,
    variables: Mapping[str, object],
) -> Form:
    stand_ins = [_stand_in(index, len(messages), message, tokenizer) for index, message in enumerate(messages)]
    rendering = tokenizer.render(stand_ins, add_generation_prompt=not continues, tools=tools, variables=variables)
    pieces = PLACEHOLDER.split(rendering)  # template text, index, and what a quote became, in turn
    indices = [int(index) for index in pieces[1::3]]
    wanted = [index for index, message in enumerate(stand_ins) if message.content]
    if sorted(index for index in indices if index < len(messages)) != wanted:
        missing = next((i for i in wanted if indices.count(i) != 1), 0)
        raise ApiError(
            400,
            f"the model's chat template does not write message {missing} ({messages[missing].role}) as one piece",
            param=f"messages[{missing}]",
        )
    found: list[Segment | tuple[int, bool]] = _template_segments(pieces[0])
    for index, quote, text in zip(indices, pieces[2::3], pieces[3::3], strict=True):
        found.append((index, quote.startswith("\\")))
        if continues and index == len(messages) - 1:
            break
        found += _template_segments(text)
    return tuple(found)


def _filled(form: Form, messages: Sequence[Message]) -> list[Segment]:
    found: list[Segment] = []
    for part in form:
        if isinstance(part, Segment):
            found.append(part)
        else:
            index, is_json = part
            content = messages[index].content if index < len(messages) else messages[index - len(messages)].name
            if content:
                found.append(Segment(json.dumps(content, ensure_ascii=False)[1:-1] if is_json else content))
    return found


def _stand_in(index: int, count: int, message: Message, tokenizer: Tokenizer) -> Message:
    """What the template sees of a message, which is one of `count`."""
    quote = '"' if message.role == "tool" else ""
    content = f"\ue000{index}{quote}\ue001" if message.content or not message.calls else ""
    if not (message.calls or message.name or message.call_id):  # most are: it takes 1 us instead of 7
        return Message(message.role, content)
    name = _guarded(message.name, tokenizer)
    if name and message.role != "tool":
        name = f'\ue000{count + index}"\ue001'
    return Message(
        message.role,
        content,
        tuple(replace(call, arguments=_guarded(call.arguments, tokenizer)) for call in message.calls),
        _guarded(message.call_id, tokenizer),
        name,
    )


def _template_segments(text: str) -> list[Segment | tuple[int, bool]]:
    """Template text; the character behind each guard is content, so that no special token forms around it."""
    first, *rest = text.split(GUARD)
    found = [Segment(first, control=True)]
    for piece in rest:
        found += [Segment(piece[:1]), Segment(piece[1:], control=True)]
    return [segment for segment in found if segment.text]


def _guarded(text: str, tokenizer: Tokenizer) -> str:
    """The text with a sign inside each special token that it spells."""
    for mark in tokenizer.special_ids:
        text = text.replace(mark, mark[:1] + GUARD + mark[1:])
    return text


def _check_variables(variables: Mapping[str, object], tokenizer: Tokenizer) -> None:
    """What they hold becomes template text, in which a special token is one and a placeholder stands for a content."""
    for name, value in variables.items():
        param = f"chat_template_kwargs.{name}"
        if name not in tokenizer.template_variables:
            known = ", ".join(sorted(tokenizer.template_variables)) or "no variables: leave them out"
            message = f"{param}: this model's chat template does not read it; it reads {known}"
            raise ApiError(400, message, param=param, code="unsupported")
        if isinstance(value, str) and (
            SIGNS.search(value) or any(_spells_of(mark, value) for mark in tokenizer.special_ids)
        ):
            message = f"{param} spells a control token of this model, or a part of one"
            raise ApiError(400, message, param=param, code="invalid_value")


def _spells_of(mark: str, text: str) -> bool:
    """Whether the text holds a mark, or a part that what stands beside it, such as another variable, would make whole.
    A word within a mark is none: it takes a template that writes the rest around it on purpose."""
    if mark in text or (text in mark and text != "" and not text.isalnum()):
        return True
    if mark[0] not in text and mark[-1] not in text:
        return False
    return any(text.endswith(mark[:cut]) or text.startswith(mark[cut:]) for cut in range(1, len(mark)))
