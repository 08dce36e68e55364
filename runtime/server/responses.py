"""OpenAI's /v1/responses: a chat whose answer is kept under an id, so that the next one needs only what is new."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from niwaki.runtime.api import Generation, Message, Output, Segment
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.server.access import owner_of, service_of
from niwaki.runtime.server.answers import InputItems, ResponseAnswer, ResponseDeleted
from niwaki.runtime.server.conversations import Stand
from niwaki.runtime.server.errors import ApiError, as_api_error
from niwaki.runtime.server.feed import Ended, Failed, Feed, Piece
from niwaki.runtime.server.openai_models import ChatRequest
from niwaki.runtime.server.openai_routes import prepared_chat
from niwaki.runtime.server.openai_shapes import ChatShape, usage_of
from niwaki.runtime.server.responses_bodies import ResponseRequest
from niwaki.runtime.server.responses_shapes import Writer, blank
from niwaki.runtime.server.sessions import Sessions, as_said, said, stored
from niwaki.runtime.server.sse import EventStream, event, unless_gone
from niwaki.runtime.server.store import Json, Turn
from niwaki.runtime.server.wire import as_refusal, gives, json_response, read_body, takes, to_json

OWN_NAMES = {"response_format": "text.format", "reasoning_effort": "reasoning.effort"}


@dataclass(frozen=True, slots=True)
class _Going:
    """What a response goes on from: the `Ground` of its chat."""

    history: Sequence[Message]
    place: Callable[[Sequence[Segment], str], TokenIds]


def responses_router(sessions: Sessions) -> APIRouter:
    """The pages of responses: turns that no session stands on, kept and gone on from as sessions do."""
    router = APIRouter()
    store, conversations = sessions.store, sessions.conversations

    async def find(request: Request, response_id: str) -> Turn:
        """Raises ApiError: 404 for an unknown or foreign one."""
        owner = owner_of(request)
        turn = await stored(service_of(request), lambda: store.turn(owner, response_id))
        if turn is None or "response" not in turn.about:
            raise ApiError(404, "no such response: deleted, not stored, or never there", param="id", code="not_found")
        return turn

    @router.post("/v1/responses", openapi_extra=takes(ResponseRequest, streams=True), responses=gives(ResponseAnswer))
    async def create(request: Request) -> Response:
        """A response, whole or as server-sent events."""
        service, owner = service_of(request), owner_of(request)
        body = await read_body(request, ResponseRequest, service.config)
        before = body.previous_response_id
        if before is not None:
            last = await stored(service, lambda: store.turn(owner, before))
            if last is None or "response" not in last.about:
                message = "there is no such response to go on from"
                param = "previous_response_id"
                raise ApiError(400, message, param=param, code="previous_response_not_found")
        past = await sessions.past(service, owner, before)
        try:
            chat = ChatRequest.model_validate(body.chat())
        except ValidationError as error:
            raise as_refusal(error) from None
        streams = service.must_stream(bool(body.stream))
        stand = Stand(conversations, before)
        try:
            prepare, shape = prepared_chat(request, service, chat, _Going(body.history(past.messages), stand.place))
        except ApiError as refusal:
            refusal.param = _own_name(refusal.param)
            raise

        def start() -> Iterator[Generation]:
            for work in prepare():
                yield stand.start(work.params, streams=streams)

        compiles = chat.constraint_param() is not None
        try:
            feed = await service.begin_generations(1, start, compiles=compiles, streams=streams)
        except Exception as error:
            stand.close()
            raise as_api_error(error, param="input", constraint=_own_name(chat.constraint_param())) from error
        writer = Writer(blank(body, service.model_names[0], int(time.time())))

        async def keep(output: Output) -> None:
            """Called when the writer has ended."""
            if body.store is False:
                return
            answer = as_said(shape.whole(0, output)["message"])
            about: Json = {"response": writer.response, "input": body.input_items()}
            turn = Turn(
                id=str(writer.response["id"]),
                owner=owner,
                parent=before,
                number=past.num_turns + 1,
                messages=(*body.input_messages(), answer),
                about=about,
            )
            await stored(service, lambda: store.add_turn(turn))
            if before is not None:  # most are never gone on from: the first of a conversation holds no place
                stand.leave(turn.id, output, past.and_then(said(turn)))
                conversations.start_sweeping()

        def finish() -> None:
            service.finish(feed)
            stand.close()

        async def whole() -> Json:
            (output,) = await feed.outputs()
            _consume(writer.more(cast(Json, shape.whole(0, output)["message"])))
            _consume(writer.end(usage_of([output], 1, shape), is_whole=output.finish_reason.type != "length"))
            await keep(output)
            return writer.response

        async def events() -> AsyncIterator[bytes]:
            yield _written(writer.begin())
            async for written, output in _progress(feed, shape, writer):
                try:
                    if output is not None:
                        await keep(output)
                except Exception as error:  # it has begun already: the stream itself tells
                    written = _written(writer.fail(as_api_error(error)))
                yield written

        if body.stream:
            return EventStream(events(), finish)
        try:
            return json_response(await unless_gone(request.receive, whole()))
        finally:
            finish()

    @router.get("/v1/responses/{response_id}", responses=gives(ResponseAnswer))
    async def read(request: Request, response_id: str) -> Response:
        """A stored response."""
        turn = await find(request, response_id)
        return json_response(cast(Json, turn.about["response"]))

    @router.get("/v1/responses/{response_id}/input_items", responses=gives(InputItems))
    async def input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(max_length=256)] = None,
    ) -> Response:
        """What it answered: the new items, not those of responses before it; the last first, unless `order` is asc.
        `after` is the id that the last page ended with."""
        items = cast(list[Json], (await find(request, response_id)).about["input"])
        if order == "desc":
            items = items[::-1]
        if after is not None:
            begin = next((place for place, item in enumerate(items, 1) if item["id"] == after), len(items))
            items = items[begin:]
        page = items[:limit]
        ids = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return json_response({"object": "list", "data": page, "has_more": len(items) > limit, **ids})

    @router.delete("/v1/responses/{response_id}", responses=gives(ResponseDeleted))
    async def delete(request: Request, response_id: str) -> Response:
        """Forget it. Responses that go on from it keep what they need of it."""
        turn = await find(request, response_id)
        await stored(service_of(request), lambda: store.drop_turn(turn))
        conversations.forget(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return router


async def _progress(feed: Feed, shape: ChatShape, writer: Writer) -> AsyncIterator[tuple[bytes, Output | None]]:
    """The events of an answer as it comes; with the last of them its output, where it did not fail."""
    async for batch in feed.batches():
        for one in batch:
            match one:
                case Piece(index, delta):
                    choice = shape.piece(index, delta)
                    if choice is not None:
                        yield _written(writer.more(cast(Json, choice["delta"]))), None
                case Ended(index, output):
                    last = _written(writer.more(cast(Json, shape.ending(index, output)["delta"])))
                    is_whole = output.finish_reason.type != "length"
                    yield last + _written(writer.end(usage_of([output], 1, shape), is_whole=is_whole)), output
                case Failed(_, error):
                    yield _written(writer.fail(as_api_error(error))), None


def _own_name(param: str | None) -> str | None:
    """A chat's field by its name in responses."""
    return OWN_NAMES.get(param or "", param)


def _consume(events: Iterable[Json]) -> None:
    for _ in events:
        pass


def _written(events: Iterable[Json]) -> bytes:
    return b"".join(f"event: {one['type']}\n".encode() + event(to_json(one)) for one in events)
