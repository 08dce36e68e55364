"""Chat turns in the model's own template, one piece at a time.

A template renders whole conversations; a program writes turns as it goes. So the template is rendered with
placeholders in place of the contents, and what stands between two placeholders is the text of one boundary. The
template never sees a content, and a content can never forge a boundary.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from niwaki.lang.templates import TemplateFunction
from niwaki.runtime.api import Backend, Message, OffersTools, Tool, UnsupportedByBackend

# A conversation's rendering grows with its turns; this many are kept for each backend.
MAX_CACHED_RENDERINGS = 256


Render: TypeAlias = Callable[[Sequence[Message], bool, tuple[Tool, ...]], str]  # with or without generation prompt


class ChatTemplate:
    """The boundaries between turns, as one template writes them. Thread-safe."""

    def __init__(self, render: Render) -> None:
        self._render_all = render
        self._renderings: dict[tuple[tuple[str, ...], bool, tuple[Tool, ...]], str] = {}

    def opening(
        self, before: tuple[str, ...], role: str, tail: str, *, generates: bool, tools: tuple[Tool, ...] = ()
    ) -> str:
        """The text between the last turn's content and the new one's, without `tail`, which is written already.

        `before` holds the roles of the turns so far, `tools` what the model was told of from the first one on. An
        assistant turn that generates starts with the generation prompt, which some templates write otherwise than the
        start of a finished turn.

        Raises:
            UnsupportedByBackend: there is no template, or it does not write turns one after the other.
        """
        if role == "assistant" and generates:
            start = self._after(self._render(before, True, tools), before)
        else:
            start = self._after(self._render((*before, role), False, tools), before)
            start = start[: self._find(start, len(before), role)]
        if not start.startswith(tail):
            raise UnsupportedByBackend(
                f"the chat template rewrites what stands before a {role} turn ({tail!r} becomes {start!r}), "
                "so turns cannot be appended one by one"
            )
        return start[len(tail) :]

    def closing(self, before: tuple[str, ...], role: str, tools: tuple[Tool, ...] = ()) -> str:
        """The text after the content of a turn that is the last so far."""
        return self._after(self._render((*before, role), False, tools), (*before, role))

    def _after(self, rendering: str, roles: tuple[str, ...]) -> str:
        """What follows the content of the last of `roles`."""
        if not roles:
            return rendering
        last = len(roles) - 1
        return rendering[self._find(rendering, last, roles[last]) + len(_placeholder(last)) :]

    def _find(self, rendering: str, index: int, role: str) -> int:
        if rendering.count(_placeholder(index)) != 1:
            raise UnsupportedByBackend(
                f"the model's chat template does not write turn {index + 1} ({role}) as one piece of text; "
                "use other roles, or plain text"
            )
        return rendering.index(_placeholder(index))

    def _render(self, roles: tuple[str, ...], add_generation_prompt: bool, tools: tuple[Tool, ...]) -> str:
        key = (roles, add_generation_prompt, tools)
        rendering = self._renderings.get(key)
        if rendering is None:
            messages = [Message(role, _placeholder(index)) for index, role in enumerate(roles)]
            rendering = self._render_all(messages, add_generation_prompt, tools)
            if len(self._renderings) >= MAX_CACHED_RENDERINGS:
                self._renderings.clear()
            self._renderings[key] = rendering
        return rendering


def template_of(backend: Backend) -> ChatTemplate:
    """The one ChatTemplate of a backend, kept while the backend lives."""
    with _lock:
        template = _templates.get(backend)
        if template is None:
            template = _templates[backend] = ChatTemplate(partial(_render_by, weakref.ref(backend)))
        return template


def template_by(function: TemplateFunction) -> ChatTemplate:
    """A template of the author's."""

    def render(messages: Sequence[Message], add_generation_prompt: bool, tools: tuple[Tool, ...]) -> str:
        if tools:
            raise UnsupportedByBackend("a chat_template of the run's own tells the model of no tools; leave it out")
        return function([{"role": one.role, "content": one.content} for one in messages], add_generation_prompt)

    return ChatTemplate(render)


def _render_by(
    reference: weakref.ref[Backend], messages: Sequence[Message], add_generation_prompt: bool, tools: tuple[Tool, ...]
) -> str:
    backend = reference()
    assert backend is not None, "the caller runs on this backend, so it is alive"
    if not tools:
        return backend.render(messages, add_generation_prompt=add_generation_prompt)
    if isinstance(backend, OffersTools):
        return backend.render_with_tools(messages, tools, add_generation_prompt=add_generation_prompt)
    raise UnsupportedByBackend(f"{type(backend).__name__} can tell a model of no tools; use an Engine")


_lock = threading.Lock()
_templates: weakref.WeakKeyDictionary[Backend, ChatTemplate] = weakref.WeakKeyDictionary()


def _placeholder(index: int) -> str:
    """Of Unicode's private use area, where no template text stands."""
    return f"\ue000{index}\ue001"
