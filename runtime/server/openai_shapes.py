"""OpenAI's answers: what a chat and a completion look like, whole and in chunks. Plain dicts, nothing of HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from niwaki.runtime.api import Delta, Output, TokenLogprob
from niwaki.runtime.api.calls import AnswerReader
from niwaki.runtime.api.likeliest import Likeliest
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.server.tools import Talk
from niwaki.runtime.server.wire import Json, Written

LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


class Shape(Protocol):
    """How one kind of answer is written. An `index` counts the choices of one request."""

    @property
    def object_name(self) -> str: ...

    @property
    def chunk_name(self) -> str: ...

    def opening(self, index: int) -> Json | None:
        """The choice of the first chunk, before any text; None for no such chunk."""
        ...

    def piece(self, index: int, delta: Delta) -> Json | None:
        """The choice of a chunk with more text; None when it would say nothing."""
        ...

    def says_text_alone(self, index: int) -> bool:
        """Whether the pieces of a choice differ in their text and in nothing else; asked once its pieces come."""
        ...

    def ending(self, index: int, output: Output) -> Json:
        """The choice of the last chunk, with the finish reason."""
        ...

    def whole(self, index: int, output: Output) -> Json:
        """The choice of an answer that is not streamed."""
        ...

    def reasoning_tokens(self, output: Output) -> int:
        """How many of its tokens are reasoning, the markers included."""
        ...


class Head:
    """What all chunks of one answer begin with."""

    def __init__(self, prefix: str, model: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._model = model
        self._created = int(time.time())

    def around(self, object_name: str, choices: Sequence[Json] | Sequence[Written], **more: object) -> Json:
        head: Json = {"id": self.id, "object": object_name, "created": self._created, "model": self._model}
        return head | {"choices": choices} | more


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None, reasoning_tokens: int | None = 0
) -> Json:
    """Details are null while they are not known (None)."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
        "completion_tokens_details": None if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens},
    }


def usage_of(outputs: Sequence[Output], n: int, shape: Shape) -> Json:
    """Of a whole request: each prompt counts once, however many answers it got; so does what the cache gave of it."""
    firsts = outputs[::n]
    return usage(
        sum(output.prompt_tokens for output in firsts),
        sum(output.completion_tokens for output in outputs),
        sum(output.cached_tokens for output in firsts),
        sum(map(shape.reasoning_tokens, outputs)),
    )


class ChatShape:
    """chat.completion and chat.completion.chunk. `tops` None: no log-probabilities. `reader` makes what takes an answer
    apart, or nothing where answers are plain text; it is called when the first text is there. `think` gives the
    markers of reasoning that `reader` leaves in the content."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        tops: int | None,
        reader: Callable[[], AnswerReader | None] = lambda: None,
        think: Callable[[], tuple[str, str] | None] = lambda: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tops = tops
        self._said = _said_by(tokenizer)
        self._reader = reader
        self._think = think
        self._talks: dict[int, Talk | None] = {}

    def opening(self, index: int) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, delta: Delta) -> Json | None:
        logprobs = self._logprobs(delta.logprobs, delta.top_logprobs)
        talk = self._talk(index)
        told: Json = {"content": delta.text} if talk is None else talk.more(delta.text)
        if logprobs is None and not any(told.values()):
            return None
        return self._chunk(index, told, logprobs, None)

    def says_text_alone(self, index: int) -> bool:
        return self._tops is None and self._talk(index) is None

    def ending(self, index: int, output: Output) -> Json:
        talk = self._talk(index)
        return self._chunk(index, {} if talk is None else talk.rest(), None, output)

    def whole(self, index: int, output: Output) -> Json:
        reader = self._reader()
        talk = None if reader is None else Talk(reader)
        message: Json = {"role": "assistant", "content": output.text, "refusal": None}
        return {
            "index": index,
            "message": message if talk is None else talk.message(output.text),
            "logprobs": self._logprobs(output.logprobs, output.top_logprobs),
            **_finish(output, talk),
        }

    def reasoning_tokens(self, output: Output) -> int:
        reader = self._reader()
        think = self._think() if reader is None or reader.think is None else reader.think
        if think is None or not output.text.startswith(think[0]):
            return 0
        detokenizer = self._tokenizer.detokenizer(think)
        text = ""
        for count, token_id in enumerate(output.token_ids, 1):
            text += detokenizer.push(token_id)
            if think[1] in text:
                return count
        return len(output.token_ids)

    def _talk(self, index: int) -> Talk | None:
        if index not in self._talks:
            reader = self._reader()
            self._talks[index] = None if reader is None else Talk(reader)
        return self._talks[index]

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, output: Output | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, **_finish(output, self._talks.get(index))}

    def _logprobs(self, chosen: Sequence[TokenLogprob], tops: Sequence[Sequence[TokenLogprob]]) -> Json | None:
        if self._tops is None:
            return None
        said, most = self._said, self._tops
        content = [
            {
                **said[entry.token_id],
                "logprob": finite(entry.logprob),
                "top_logprobs": [
                    {**said[token_id], "logprob": logprob}
                    for token_id, logprob in zip(token_ids[:most], all_finite(logprobs), strict=False)
                ],
            }
            for entry, (token_ids, logprobs) in zip(chosen, rows_of(tops), strict=True)
        ]
        return {"content": content, "refusal": None}


class _Said(dict[int, Json]):
    """What is said of a token wherever it is named. Each is made once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> Json:
        piece = self._tokenizer.bytes_of(token_id)
        text = self._tokenizer.token_text(token_id)
        said: Json = {"token": text, "logprob": None, "bytes": None if piece is None else list(piece)}
        self[token_id] = said
        return said


class CompletionShape:
    """text_completion. `echoes` holds each choice's prompt text where the prompt is to be repeated."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer, tops: int | None, echoes: Sequence[str] | None) -> None:
        self._tokenizer = tokenizer
        self._tops = tops
        self._names = _names_of(tokenizer)
        self._echoes = echoes
        self._offsets: dict[int, _Offsets] = {}  # of what is streamed

    def opening(self, index: int) -> Json | None:
        echo = "" if self._echoes is None else self._echoes[index]
        self._offsets[index] = _Offsets(self._tokenizer, len(echo))
        return {"index": index, "text": echo, "logprobs": None, **_finish(None)} if echo else None

    def piece(self, index: int, delta: Delta) -> Json | None:
        logprobs = self._logprobs(delta.logprobs, delta.top_logprobs, self._offsets[index])
        if not delta.text and logprobs is None:
            return None
        return {"index": index, "text": delta.text, "logprobs": logprobs, **_finish(None)}

    def says_text_alone(self, index: int) -> bool:
        return self._tops is None

    def ending(self, index: int, output: Output) -> Json:
        return {"index": index, "text": "", "logprobs": None, **_finish(output)}

    def whole(self, index: int, output: Output) -> Json:
        offsets = _Offsets(self._tokenizer, 0)
        if self._echoes is None:
            logprobs = self._logprobs(output.logprobs, output.top_logprobs, offsets)
            return {"index": index, "text": output.text, "logprobs": logprobs, **_finish(output)}
        logprobs = self._logprobs(
            (*output.prompt_logprobs, *output.logprobs), (*output.prompt_top_logprobs, *output.top_logprobs), offsets
        )
        text = self._echoes[index] + output.text
        return {"index": index, "text": text, "logprobs": logprobs, **_finish(output)}

    def reasoning_tokens(self, output: Output) -> int:
        return 0

    def _logprobs(
        self, chosen: Sequence[TokenLogprob], tops: Sequence[Sequence[TokenLogprob]], offsets: _Offsets
    ) -> Json | None:
        if self._tops is None:
            return None
        return {
            "tokens": [self._names[entry.token_id] for entry in chosen],
            "token_logprobs": [finite(entry.logprob) for entry in chosen],
            "top_logprobs": [
                None if entry.logprob is None else self._named(entry, *top)
                for entry, top in zip(chosen, rows_of(tops), strict=True)
            ],
            "text_offset": [offsets.take(entry.token_id) for entry in chosen],
        }

    def _named(self, chosen: TokenLogprob, token_ids: Sequence[int], logprobs: Sequence[float | None]) -> Json:
        """The chosen token always stands there, in place of nothing: OpenAI tells up to one more than asked."""
        named: Json = dict(zip(map(self._names.__getitem__, token_ids), all_finite(logprobs), strict=True))
        named[self._names[chosen.token_id]] = finite(chosen.logprob)
        return named


class _Names(dict[int, str]):
    """A token as text; as its bytes where they are no text alone, so that two tokens have two names. 20 of them may be
    told of each token, so each is made once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self._tokenizer.token_text(token_id)
        piece = self._tokenizer.bytes_of(token_id) if "\ufffd" in text else None
        name = text if piece is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
        self[token_id] = name
        return name


class _Offsets:
    """Where in a text each token begins, counted in characters. One that ends inside of a character writes nothing."""

    def __init__(self, tokenizer: Tokenizer, at: int) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._at = at

    def take(self, token_id: int) -> int:
        begin = self._at
        self._at += len(self._detokenizer.push(token_id))
        return begin


@lru_cache(maxsize=4)  # of a server's one tokenizer
def _names_of(tokenizer: Tokenizer) -> _Names:
    return _Names(tokenizer)


@lru_cache(maxsize=4)
def _said_by(tokenizer: Tokenizer) -> _Said:
    return _Said(tokenizer)


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


def all_finite(logprobs: Sequence[float | None]) -> Sequence[float | None]:
    """Of tokens, best first."""
    is_finite = not logprobs or (logprobs[-1] is not None and logprobs[-1] >= LOWEST_LOGPROB)
    return logprobs if is_finite else [finite(one) for one in logprobs]


def rows_of(tops: Sequence[Sequence[TokenLogprob]]) -> Iterable[tuple[Sequence[int], Sequence[float | None]]]:
    """Of each token the likeliest, and their log-probabilities."""
    if isinstance(tops, Likeliest):
        return tops.rows()
    return (([one.token_id for one in top], [one.logprob for one in top]) for top in tops)


def _finish(output: Output | None, talk: Talk | None = None) -> Json:
    if output is None:
        return {"finish_reason": None}
    reason = output.finish_reason
    if talk is not None and talk.has_whole_calls and reason.type == "stop":
        return {"finish_reason": "tool_calls", "matched_stop": reason.matched}
    return {"finish_reason": reason.type, "matched_stop": reason.matched if reason.type == "stop" else None}
