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
from niwaki.runtime.server.conversations import Past, Stand
from niwaki.runtime.server.errors import ApiError, as_api_error
from niwaki.runtime.server.feed import Ended, Failed, Feed, Piece
from niwaki.runtime.server.openai_models import ChatRequest
from niwaki.runtime.server.openai_routes import prepared_chat
from niwaki.runtime.server.openai_shapes import ChatShape, usage_of
from niwaki.runtime.server.responses_bodies import ResponseRequest
from niwaki.runtime.server.responses_shapes import Writer, blank
from niwaki.runtime.server.service import Service
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """A new response as its client asked for it, and what was said before."""

    owner: str
    body: ResponseRequest
    past: Past


def responses_router(sessions: Sessions) -> APIRouter:
    """The pages of responses: turns that no session stands on, kept and gone on from as sessions do."""
    router = APIRouter()
    store, conversations = sessions.store, sessions.conversations

    async def find(request: Request, response_id: str) -> Turn:
        """Raises ApiError: 404 for an unknown or foreign one."""
        turn = await response_of(service_of(request), owner_of(request), response_id)
        if turn is None:
            raise ApiError(404, "no such response: deleted, not stored, or never there", param="id", code="not_found")
        return turn

    async def response_of(service: Service, owner: str, response_id: str) -> Turn | None:
        turn = await stored(service, lambda: store.turn(owner, response_id))
        return None if turn is None or "response" not in turn.about else turn

    @router.post("/v1/responses", openapi_extra=takes(ResponseRequest, streams=True), responses=gives(ResponseAnswer))
    async def create(request: Request) -> Response:
        """A response, whole or as server-sent events."""
        service, owner = service_of(request), owner_of(request)
        body = await read_body(request, ResponseRequest, service.config)
        before = body.previous_response_id
        if before is not None and await response_of(service, owner, before) is None:
            message, param = "there is no such response to go on from", "previous_response_id"
            raise ApiError(400, message, param=param, code="previous_response_not_found")
        asked = _Asked(owner, body, await sessions.past(service, owner, before))
        answer = await _begun(request, service, sessions, asked)
        if body.stream:
            return EventStream(answer.events(), answer.finish)
        try:
            return json_response(await unless_gone(request.receive, answer.whole()))
        finally:
            answer.finish()

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


async def _begun(request: Request, service: Service, sessions: Sessions, asked: _Asked) -> _Answer:
    """Start generating.

    Raises:
        ApiError: what can be refused is refused here, by the names that its fields have in responses.
    """
    body = asked.body
    try:
        chat = ChatRequest.model_validate(body.chat())
    except ValidationError as error:
        raise as_refusal(error) from None
    streams, constraint = service.must_stream(bool(body.stream)), chat.constraint_param()
    stand = Stand(sessions.conversations, body.previous_response_id)
    try:
        prepare, shape = prepared_chat(request, service, chat, _Going(body.history(asked.past.messages), stand.place))
    except ApiError as refusal:
        refusal.param = _own_name(refusal.param)
        raise

    def start() -> Iterator[Generation]:
        for work in prepare():
            yield stand.start(work.params, streams=streams)

    try:
        feed = await service.begin_generations(1, start, compiles=constraint is not None, streams=streams)
    except Exception as error:
        stand.close()
        raise as_api_error(error, param="input", constraint=_own_name(constraint)) from error
    return _Answer(service, sessions, asked, stand, feed, shape)


class _Answer:
    """One response while it is generated: told whole or as events, and kept as a turn before its client reads its end.
    `finish` it, however it ends."""

    def __init__(
        self, service: Service, sessions: Sessions, asked: _Asked, stand: Stand, feed: Feed, shape: ChatShape
    ) -> None:
        self._service = service
        self._sessions = sessions
        self._asked = asked
        self._stand = stand
        self._feed = feed
        self._shape = shape
        self._writer = Writer(blank(asked.body, service.model_names[0], int(time.time())))

    async def whole(self) -> Json:
        (output,) = await self._feed.outputs()
        _consume(self._writer.more(cast(Json, self._shape.whole(0, output)["message"])))
        _consume(self._end(output))
        await self._keep(output)
        return self._writer.response

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        yield _written(self._writer.begin())
        async for batch in self._feed.batches():
            for one in batch:
                match one:
                    case Piece(index, delta):
                        choice = self._shape.piece(index, delta)
                        if choice is not None:
                            yield _written(self._writer.more(cast(Json, choice["delta"])))
                    case Ended(index, output):
                        yield await self._last_events(index, output)
                    case Failed(_, error):
                        yield _written(self._writer.fail(as_api_error(error)))

    def finish(self) -> None:
        self._service.finish(self._feed)
        self._stand.close()

    async def _last_events(self, index: int, output: Output) -> bytes:
        """Of a response that is whole, and kept: where it cannot be, the stream itself tells, which has begun."""
        last = _written(self._writer.more(cast(Json, self._shape.ending(index, output)["delta"])))
        last += _written(self._end(output))
        try:
            await self._keep(output)
        except Exception as error:
            return _written(self._writer.fail(as_api_error(error)))
        return last

    def _end(self, output: Output) -> Iterable[Json]:
        is_whole = output.finish_reason.type != "length"
        return self._writer.end(usage_of([output], 1, self._shape), is_whole=is_whole)

    async def _keep(self, output: Output) -> None:
        """Store the turn, unless the client wants it forgotten. Called when the writer has ended."""
        asked, response = self._asked, self._writer.response
        if asked.body.store is False:
            return
        answer = as_said(self._shape.whole(0, output)["message"])
        before = asked.body.previous_response_id
        about: Json = {"response": response, "input": asked.body.input_items()}
        turn = Turn(
            id=str(response["id"]),
            owner=asked.owner,
            parent=before,
            number=asked.past.num_turns + 1,
            messages=(*asked.body.input_messages(), answer),
            about=about,
        )
        await stored(self._service, lambda: self._sessions.store.add_turn(turn))
        if before is not None:  # most are never gone on from: the first of a conversation holds no place
            self._stand.leave(turn.id, output, asked.past.and_then(said(turn)))
            self._sessions.conversations.start_sweeping()


def _own_name(param: str | None) -> str | None:
    """A chat's field by its name in responses."""
    return OWN_NAMES.get(param or "", param)


def _consume(events: Iterable[Json]) -> None:
    for _ in events:
        pass


def _written(events: Iterable[Json]) -> bytes:
    return b"".join(f"event: {one['type']}\n".encode() + event(to_json(one)) for one in events)
