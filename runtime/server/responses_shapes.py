"""OpenAI's responses as output items and events. Nothing of HTTP."""

from __future__ import annotations

from collections.abc import Iterator

from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.responses_bodies import ResponseRequest
from niwaki.runtime.server.store import Json, new_id

ERROR_CODES = ("rate_limit_exceeded",)  # that a response may have, of ours; else it is `server_error`


def blank(body: ResponseRequest, model: str, created: int) -> Json:
    """A response before anything was answered."""
    text = body.text and body.text.format
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if text is None else text.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": _told_choice(body),
        "tools": [
            {"parameters": None, "strict": True} | tool.model_dump(exclude_none=True) for tool in body.tools or ()
        ],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _told_choice(body: ResponseRequest) -> object:
    if body.tool_choice is None or isinstance(body.tool_choice, str):
        return body.tool_choice or "auto"
    return body.tool_choice.model_dump()


def usage_told(used: Json) -> Json:
    """A chat's usage by the names of responses. What the cache did not give is in it from now on."""
    cached, details = used["prompt_tokens_details"], used["completion_tokens_details"]
    assert isinstance(cached, dict)
    written = int(str(used["prompt_tokens"])) - cached["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {**cached, "cache_write_tokens": written},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": details,
        "total_tokens": used["total_tokens"],
    }


class Writer:
    """One response on its way: reads what a chat's deltas say, gives the events, and holds what is written so far."""

    def __init__(self, response: Json) -> None:
        self.response = response
        self._items: list[Json] = []
        self._text = ""  # of the item that is being written: its text or its arguments
        self._num_events = 0

    def begin(self) -> Iterator[Json]:
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def more(self, delta: Json) -> Iterator[Json]:
        """The events of a chat's delta, or of a whole message."""
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            text = delta.get(name)
            if isinstance(text, str) and text:
                yield from self._enter(kind)
                yield from self._say(text)
        calls = delta.get("tool_calls", [])
        assert isinstance(calls, list)
        for call in calls:
            if "id" in call:
                yield from self._close()
                yield from self._open("function_call", call_id=call["id"], name=call["function"]["name"], arguments="")
            if call["function"]["arguments"]:
                yield from self._say(call["function"]["arguments"])

    def end(self, used: Json, *, is_whole: bool) -> Iterator[Json]:
        """The last events; `response` is what the client gets, from now on."""
        yield from self._close("completed" if is_whole else "incomplete")
        details = None if is_whole else {"reason": "max_output_tokens"}
        status = "completed" if is_whole else "incomplete"
        self.response = self.response | {
            "status": status, "incomplete_details": details, "output": self._items, "usage": usage_told(used)
        }  # fmt: skip
        yield self._event(f"response.{status}", response=self.response)

    def fail(self, error: ApiError) -> Iterator[Json]:
        """The last events; what was said stays said."""
        yield from self._close("incomplete")
        code = error.code if error.code in ERROR_CODES else "server_error"
        said = {"code": code, "message": error.message}
        self.response = self.response | {"status": "failed", "error": said, "output": self._items}
        yield self._event("response.failed", response=self.response)

    # -- items ------------------------------------------------------------------------------------------------------

    def _enter(self, kind: str) -> Iterator[Json]:
        """Go on with an item of this kind: the one that is open, or a new one."""
        if self._items and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress":
            return
        yield from self._close()
        more: Json = {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        yield from self._open(kind, **more)
        yield self._event("response.content_part.added", **self._place(), content_index=0, part=self._part(kind, ""))

    def _open(self, kind: str, **more: object) -> Iterator[Json]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self._items.append({"id": new_id(prefix), "type": kind, "status": "in_progress", **more})
        self._text = ""
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _say(self, text: str) -> Iterator[Json]:
        self._text += text
        kind = self._items[-1]["type"]
        match kind:
            case "function_call":
                yield self._event("response.function_call_arguments.delta", **self._place(), delta=text)
            case "message":
                yield self._event(
                    "response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=[]
                )
            case _:
                yield self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def _close(self, status: str = "completed") -> Iterator[Json]:
        """End the open item, if there is one."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item, text = self._items[-1], self._text
        place = self._place()
        if item["type"] == "function_call":
            item = item | {"arguments": text}
            yield self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            kind = str(item["type"])
            part = self._part(kind, text)
            item = item | {"content": [part]}
            said: Json = {"text": text} | ({"logprobs": []} if kind == "message" else {})
            name = "output_text" if kind == "message" else "reasoning_text"
            yield self._event(f"response.{name}.done", **place, content_index=0, **said)
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        self._items[-1] = item | {"status": status}
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _part(self, kind: str, text: str) -> Json:
        if kind == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def _event(self, kind: str, **said: object) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **said}
