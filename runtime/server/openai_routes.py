"""OpenAI's API: /v1/models, /v1/chat/completions, /v1/completions, and why there is no /v1/embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from fastapi import APIRouter, Request, Response

from niwaki.runtime.api import CapacityError, Delta, Generation, Message, Output, SamplingParams, Segment
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.server.access import key_of, service_of
from niwaki.runtime.server.answers import ChatAnswer, CompletionAnswer, ModelCard, ModelsAnswer
from niwaki.runtime.server.errors import ApiError, as_api_error
from niwaki.runtime.server.feed import Ended, Failed, Feed, Piece
from niwaki.runtime.server.openai_models import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    SamplingFields,
    StreamOptions,
)
from niwaki.runtime.server.openai_shapes import (
    ChatShape,
    CompletionShape,
    Head,
    Shape,
    usage,
    usage_of,
)
from niwaki.runtime.server.served import Work, works_of
from niwaki.runtime.server.service import Service
from niwaki.runtime.server.sse import DONE, EventStream, Frame, Way, chunk_event, event, unless_gone
from niwaki.runtime.server.wire import (
    ErrorAnswer,
    Json,
    Written,
    gives,
    json_response,
    read_body,
    takes,
    to_json,
    written,
)

COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat answer may fill the context

router = APIRouter()


class Ground(Protocol):
    """What a chat goes on from: turns before it, and where they stand in the engine."""

    @property
    def history(self) -> Sequence[Message]:
        """The messages before those of the request."""
        ...

    def place(self, segments: Sequence[Segment], namespace: str) -> TokenIds:
        """Stand behind a prompt, on a thread; its token ids."""
        ...


class Keeper(Ground, Protocol):
    """Who keeps a chat's answer, such as a session: it has the turns before, and is told before the client is."""

    def start(self, params: SamplingParams, *, streams: bool | None) -> Generation:
        """Generate from there, on a thread; `streams`: as `Service.must_stream` gives it."""
        ...

    async def keep(self, choice: Json, output: Output, used: Json) -> Json:
        """The one answer is there, whole: keep it. What this gives is told beside the answer.

        Raises:
            ApiError: it cannot be kept, so it was not given.
        """
        ...

    def close(self) -> None:
        """Answered, failed or abandoned. Calling it twice is allowed."""
        ...


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest, streams=True), responses=gives(ChatAnswer))
async def chat_completions(request: Request) -> Response:
    """A chat completion, whole or as server-sent events."""
    service = service_of(request)
    body = await read_body(request, ChatRequest, service.config)
    return await chat_answer(request, service, body)


async def chat_answer(request: Request, service: Service, body: ChatRequest, keeper: Keeper | None = None) -> Response:
    """The answer to a chat, kept by `keeper`, whom the answer closes; the caller does, when this raises."""
    prepare, shape = prepared_chat(request, service, body, keeper)
    return await _answer(request, service, body, "chatcmpl", shape, 1, prepare, "messages", keeper)


def prepared_chat(
    request: Request, service: Service, body: ChatRequest, ground: Ground | None = None
) -> tuple[Callable[[], list[Work]], ChatShape]:
    """A checked chat: what tokenizes it, on a thread, and what writes its answers once that was called.

    Raises:
        ApiError: fields that do not go together, or another model than the one served.
    """
    _check(service, body)
    said = [message.message() for message in body.messages]
    service.model.check_chars(sum(len(message.content) for message in said), "messages")
    tops, max_new = body.num_logprobs(), body.max_new_tokens()
    namespace = service.namespace(key_of(request), body.cache_salt)
    plan, variables = body.plan(service.model.tokenizer), body.variables(service.model.tokenizer)

    def prepare() -> list[Work]:
        nonlocal plan
        history = () if ground is None else ground.history
        messages = [*history, *said]
        continues = bool(body.continue_final_message)
        segments = service.model.prompts.segments(messages, plan.told, continues=continues, variables=variables)
        plan = plan.behind(segments[-1].text)
        ids = service.model.encode(segments) if ground is None else ground.place(segments, namespace)
        room = service.model.room(ids, "messages")
        options = body.options(max_new or room, tops)
        plan = replace(plan, is_either=options.constraint is not None)
        options = replace(options, constraint=plan.constraint(options.constraint))
        return works_of(ids, service.resolve(options), namespace)

    return prepare, ChatShape(service.model.tokenizer, tops, lambda: plan.reader(), lambda: plan.think)


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest, streams=True), responses=gives(CompletionAnswer))
async def completions(request: Request) -> Response:
    """A completion of one prompt or of several, as text or as token ids."""
    service = service_of(request)
    body = await read_body(request, CompletionRequest, service.config)
    _check(service, body)
    namespace = service.namespace(key_of(request), body.cache_salt)
    prompts = body.prompts()
    for prompt in prompts:
        service.model.check_prompt(prompt, "prompt")
    echoes: list[str] | None = [] if body.echo else None
    max_new = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens

    def prepare() -> list[Work]:
        works: list[Work] = []
        params = service.resolve(body.options(max_new, body.logprobs))
        for prompt in prompts:
            ids = _prompt_ids(service, prompt)
            if echoes is not None:
                text = prompt if isinstance(prompt, str) else service.model.tokenizer.decode(prompt)
                echoes.extend([text] * params.n)
            works += works_of(ids, params, namespace, 0 if body.echo and body.logprobs is not None else None)
        return works

    shape = CompletionShape(service.model.tokenizer, body.logprobs, echoes)
    return await _answer(request, service, body, "cmpl", shape, len(prompts), prepare, "prompt")


@router.get("/v1/models", responses=gives(ModelsAnswer))
async def models(request: Request) -> Response:
    """The one model that is served."""
    service = service_of(request)
    return json_response({"object": "list", "data": [_card(service, name) for name in service.model_names]})


@router.get("/v1/models/{name:path}", responses=gives(ModelCard))
async def model(request: Request, name: str) -> Response:
    service = service_of(request)
    if not name:
        raise ApiError(404, "no such page", code="not_found")
    service.check_model(name)
    return json_response(_card(service, name if name in service.model_names else service.model_names[0]))


@router.post(
    "/v1/embeddings", status_code=400, openapi_extra=takes(EmbeddingRequest), responses=gives(ErrorAnswer, 400)
)
async def embeddings(request: Request) -> Response:
    """Refused, in so many words: the families of models that are served here generate text."""
    service = service_of(request)
    await read_body(request, EmbeddingRequest, service.config)
    message = f"{service.model_names[0]!r} generates text and was not trained to embed it"
    raise ApiError(400, f"{message}; ask a server of an embedding model", param="model", code="unsupported")


def _check(service: Service, body: SamplingFields) -> None:
    """Raises ApiError: fields that do not go together, another model, or tokens that it has not."""
    body.check()
    service.check_model(body.model)
    for field, ids in body.token_ids().items():
        service.model.ids(ids, field)


def _prompt_ids(service: Service, prompt: str | Sequence[int]) -> TokenIds:
    ids = service.model.encode(prompt) if isinstance(prompt, str) else service.model.ids(prompt, "prompt")
    if len(ids) > service.model.longest:
        raise CapacityError(f"the prompt has {len(ids)} tokens; at most {service.model.longest} fit")
    return ids


async def _answer(
    request: Request,
    service: Service,
    body: SamplingFields,
    prefix: str,
    shape: Shape,
    num_prompts: int,
    prepare: Callable[[], Sequence[Work]],
    param: str,
    keeper: Keeper | None = None,
) -> Response:
    """Start, then stream or wait. Everything that can be refused is refused before the first byte."""
    head = Head(prefix, service.model_names[0])
    constraint = body.constraint_param()
    n = body.num_outputs
    streams = service.must_stream(bool(body.stream))
    lengths: list[int] = []  # of the prompts, for the usage while it runs

    def start() -> Sequence[Work]:
        works = prepare()
        lengths.extend(len(work.ids) for work in works[::n])
        return works

    def start_kept(keeper: Keeper) -> Iterator[Generation]:
        for work in start():
            yield keeper.start(work.params, streams=streams)

    try:
        if keeper is None:
            feed = await service.begin(num_prompts * n, start, compiles=constraint is not None, streams=streams)
        else:
            generations = partial(start_kept, keeper)
            feed = await service.begin_generations(n, generations, compiles=constraint is not None, streams=streams)
    except Exception as error:
        raise as_api_error(error, param=param, constraint=constraint) from error

    def finish() -> None:
        service.finish(feed)
        if keeper is not None:
            keeper.close()

    if body.stream:
        options = body.stream_options or StreamOptions()
        way = Way()
        chunks = _Chunks(feed, shape, head, n, lengths, options, keeper, way)
        return EventStream(chunks.events(), finish, way=way)

    async def whole() -> Json:
        outputs = await feed.outputs()
        first: Json = {}
        choices: list[Written] = []
        for index, output in enumerate(outputs):
            # With log-probabilities each takes half a millisecond. Streams are to have a turn between any two of them,
            # whichever answers they are of.
            async with service.writing:
                choice = shape.whole(index, output)
                first = first or choice
                choices.append(written(choice))
                if len(outputs) > 1:
                    await asyncio.sleep(0)
        used = usage_of(outputs, n, shape)
        kept = {} if keeper is None else await keeper.keep(first, outputs[0], used)
        return head.around(shape.object_name, choices, usage=used, **kept)

    try:
        return json_response(await unless_gone(request.receive, whole()))
    finally:
        finish()


class _Chunks:
    """A streamed answer while it is written: what was told of each choice, and what its usage is so far."""

    def __init__(
        self,
        feed: Feed,
        shape: Shape,
        head: Head,
        n: int,
        lengths: Sequence[int],
        options: StreamOptions,
        keeper: Keeper | None,
        way: Way,
    ) -> None:
        """`n`: choices of a prompt. `lengths`: of the prompts, known when it is read. Pieces may go by `way`."""
        self._feed = feed
        self._shape = shape
        self._head = head
        self._n = n
        self._lengths = lengths
        self._options = options
        self._keeper = keeper
        self._way = way
        self._counts = [0] * feed.size  # tokens of each choice
        self._ended: dict[int, Output] = {}
        self._num_reasoned = 0  # tokens
        self._frames: dict[int, Frame | None] = {}  # of each choice; None: its pieces differ in more than a text

    async def events(self) -> AsyncIterator[bytes]:
        """Those that arrived together go out in one write."""
        self._feed.lead(self._write)
        openings = [self._shape.opening(index) for index in range(self._feed.size)]
        if any(openings):
            yield b"".join(self._chunk(opening) for opening in openings if opening is not None)
        async for events in self._feed.batches():
            written: list[bytes] = []
            for one in events:
                match one:
                    case Piece():
                        written.append(self._told(one))
                    case Ended(index, output):
                        try:
                            kept = await self._take_end(index, output)
                        except ApiError as refusal:
                            yield b"".join([*written, event(to_json(refusal.body())), DONE])
                            return
                        written.append(self._chunk(self._shape.ending(index, output), **kept))
                    case Failed(_, error):
                        yield b"".join([*written, event(to_json(as_api_error(error).body())), DONE])
                        return
            yield b"".join(written)
        if self._options.include_usage:
            yield event(to_json(self._head.around(self._shape.chunk_name, [], usage=self._usage())))
        yield DONE

    def _write(self, pieces: Sequence[Piece]) -> bool:
        """By the way, where that is free."""
        way = self._way
        is_free = way.is_free()
        if is_free:
            way.write(b"".join(map(self._told, pieces)))
        return is_free

    def _told(self, one: Piece) -> bytes:
        index, delta = one.index, one.delta
        self._counts[index] += len(delta.token_ids)
        if index not in self._frames:
            in_frame = not self._options.continuous_usage_stats and self._shape.says_text_alone(index)
            self._frames[index] = Frame(lambda text: self._piece(index, Delta(text))) if in_frame else None
        frame = self._frames[index]
        if frame is None:
            return self._piece(index, delta)
        return frame.around(delta.text) if delta.text else b""

    def _piece(self, index: int, delta: Delta) -> bytes:
        choice = self._shape.piece(index, delta)
        return b"" if choice is None else self._chunk(choice)

    def _chunk(self, choice: Json, **kept: object) -> bytes:
        more: Json = dict(kept)
        if self._options.continuous_usage_stats:
            more["usage"] = self._usage()
        elif self._options.include_usage:
            more["usage"] = None
        return chunk_event(self._head.around(self._shape.chunk_name, [choice], **more))

    async def _take_end(self, index: int, output: Output) -> Json:
        """Of a choice that is whole. What its keeper tells beside, who has kept it before its client reads of the end.

        Raises:
            ApiError: it cannot be kept.
        """
        self._counts[index], self._ended[index] = output.completion_tokens, output
        self._num_reasoned += self._shape.reasoning_tokens(output)
        if self._keeper is None:
            return {}
        return await self._keeper.keep(self._shape.whole(index, output), output, self._usage())

    def _usage(self) -> Json:
        """So far."""
        num_prompt, num_generated = sum(self._lengths), sum(self._counts)
        if len(self._ended) < self._feed.size:  # what the cache gave is told at the end of each
            return usage(num_prompt, num_generated, None, None)
        num_cached = sum(self._ended[i].cached_tokens for i in range(0, self._feed.size, self._n))
        return usage(num_prompt, num_generated, num_cached, self._num_reasoned)


def _card(service: Service, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "niwaki",
        "max_model_len": service.model.longest,
    }
