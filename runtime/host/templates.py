"""How the model writes conversations, tools and reasoning: what a backend answers from its tokenizer alone."""

from __future__ import annotations

from collections.abc import Sequence

from niwaki.runtime.api import CallFormat, Message, Tool
from niwaki.runtime.checkpoint.tokenizer import Tokenizer


class Templates:
    """`render` of the `Backend` protocol, and `OffersTools`, for backends that hold a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return self._tokenizer.render(messages, add_generation_prompt=add_generation_prompt)

    def call_format(self) -> CallFormat:
        return self._tokenizer.call_format

    def reasoning_markers(self) -> tuple[str, str] | None:
        return self._tokenizer.reasoning_markers

    def render_with_tools(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, add_generation_prompt: bool
    ) -> str:
        self._tokenizer.check_tools(tools)
        return self._tokenizer.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
