"""OpenAI's `reasoning_effort`: what it means to the model that is served. Nothing of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from niwaki.runtime.api import UnsupportedByBackend
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.server.errors import ApiError

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NO_EFFORT = ("none", "minimal")
# Of a span of reasoning, at most; what is above them is bounded by the answer's own bound alone.
TOKENS: Mapping[Effort, int] = {"none": 0, "minimal": 0, "low": 1024, "medium": 4096}
SWITCHES = ("enable_thinking", "thinking")  # of templates, by family


@dataclass(frozen=True, slots=True)
class Reasons:
    """How much an answer reasons: variables for the template, and a budget where no variable says it."""

    variables: Mapping[str, object] = field(default_factory=dict)
    tokens: int | None = None
    is_apart: bool = False  # told apart from the content


def reasons_of(effort: Effort | None, tokenizer: Tokenizer) -> Reasons:
    """What an effort means: the template's own `reasoning_effort`; else its switch, and a budget; else a budget alone,
    with a model whose template knows markers of reasoning.

    Raises:
        ApiError: 400: the model does not reason, and should.
    """
    if effort is None:
        return Reasons()
    try:
        read = tokenizer.template_variables
        can_reason = tokenizer.reasons
    except UnsupportedByBackend:  # no template: the request is refused for that
        return Reasons()
    is_apart = tokenizer.reasoning_markers is not None
    if "reasoning_effort" in read:
        return Reasons({"reasoning_effort": effort}, is_apart=is_apart and can_reason)
    switch = next((name for name in SWITCHES if name in read), None)
    if switch is not None:
        is_on = effort not in NO_EFFORT
        # Switched off, its template writes no reasoning or an empty span of it.
        tokens = TOKENS.get(effort) if is_on and is_apart else None
        return Reasons({switch: is_on}, tokens, is_apart=is_on and is_apart)
    if can_reason:
        return Reasons(tokens=TOKENS.get(effort), is_apart=True)
    if effort in NO_EFFORT:
        return Reasons()
    message = "this model does not reason: leave the effort out, or say none"
    raise ApiError(400, message, param="reasoning_effort", code="unsupported")
