"""The pages of sessions: to make, list, read, rewind, branch and delete them, and to chat in one by the new turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from niwaki.runtime.api import Branch, Segment
from niwaki.runtime.server.access import key_of, owner_of, service_of
from niwaki.runtime.server.answers import (
    SessionAnswer,
    SessionBranchAnswer,
    SessionDeleted,
    SessionExport,
    SessionsAnswer,
    TurnAnswer,
    UsageAnswer,
)
from niwaki.runtime.server.branches import Branches
from niwaki.runtime.server.errors import ApiError, as_api_error
from niwaki.runtime.server.openai_models import MAX_MESSAGES, ChatMessage, ChatRequest
from niwaki.runtime.server.openai_routes import chat_answer
from niwaki.runtime.server.service import Service
from niwaki.runtime.server.sessions import Asked, Sessions, SessionTurn, stored
from niwaki.runtime.server.store import Json, Session, Store, Turn, new_id
from niwaki.runtime.server.wire import Name, Strict, gives, json_response, read_body, takes

MAX_SESSIONS = 10_000  # of one key
MAX_KEY = 256
MAX_TURNS = 4096  # of an export: each is a row to store, and two to ask for when they go
_GONE_ON = "the session has gone on meanwhile; begin again behind its last turn, or branch it to have two at once"
MAX_BEGUN = 65_536  # messages that one begins with: the length of a body bounds them before

Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Metadata = Annotated[dict[Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class ExportedTurn(Strict):
    """A turn of an export. The fields behind `messages` are those of one that was generated."""

    id: Name | None = None
    created_at: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    messages: Messages
    model: Name | None = None
    usage: UsageAnswer | None = None
    finish_reason: Name | None = None

    def dumped(self) -> list[Json]:
        return [_dumped(message) for message in self.messages]

    def about(self) -> Json:
        return self.model_dump(include={"model", "usage", "finish_reason"}, exclude_none=True)


class SessionBody(Strict):
    """A new session. `messages` is how it begins: a system message, or turns from elsewhere; `turns` are those of an
    export, whose other fields may stay beside them: the new session has an id and times of its own."""

    title: Name | None = None
    metadata: Metadata | None = None
    messages: Annotated[list[ChatMessage], Field(max_length=MAX_BEGUN, fail_fast=True)] | None = None
    turns: Annotated[list[ExportedTurn], Field(max_length=MAX_TURNS, fail_fast=True)] | None = None
    id: Name | None = None
    object: Literal["session"] | None = None
    created_at: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    updated_at: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    turn: Name | None = None

    def opening(self, owner: str) -> list[Turn]:
        """The turns that it begins with. Raises ApiError: `messages` are not those of `turns`."""
        messages = [_dumped(message) for message in self.messages or ()]
        if self.turns is None:
            return [Turn(new_id("turn"), owner, None, 1, tuple(messages), {})] if messages else []
        found: list[Turn] = []
        for number, one in enumerate(self.turns, 1):
            before = found[-1].id if found else None
            turn = Turn(new_id("turn"), owner, before, number, tuple(one.dumped()), one.about())
            found.append(turn if one.created_at is None else replace(turn, created=one.created_at))
        if self.messages is not None and messages != [message for turn in found for message in turn.messages]:
            raise ApiError(400, "messages are not those of turns; give one of them", param="messages")
        return found


class ChangeBody(Strict):
    """What stands here is changed, what does not stays."""

    title: Name | None = None
    metadata: Metadata | None = None

    def over(self, about: Mapping[str, object]) -> Json:
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return {**about, **given} | ({"metadata": self.metadata or {}} if "metadata" in given else {})


class RewindBody(Strict):
    """`turn` becomes the last one; null: before the first."""

    turn: Name | None


class BranchBody(Strict):
    """The last turn that the new session shares with this one; without it, all of them."""

    turn: Name | None = None
    title: Name | None = None


class EnterBody(Strict):
    """Nothing: what there is to say stands in the address."""


class TurnBody(Strict):
    """A turn that a program made: `after` is the one that it went on from; null: it is the first."""

    after: Name | None
    messages: Messages


def sessions_router(sessions: Sessions, branches: Branches) -> APIRouter:
    """The pages of one server's sessions; `branches` holds those that programs go on with."""
    router = APIRouter()
    store = sessions.store

    @router.post("/v1/sessions", openapi_extra=takes(SessionBody), responses=gives(SessionAnswer))
    async def create(request: Request) -> Response:
        """A new session, or one that was exported, once more."""
        service, owner = service_of(request), owner_of(request)
        body = await read_body(request, SessionBody, service.config)
        turns = await service.apart(lambda: body.opening(owner))
        await _check_room(service, store, owner)
        about: Json = {"title": body.title, "metadata": body.metadata or {}}
        session = _new_session(owner, turns[-1].id if turns else None, about)
        await stored(service, lambda: store.add_session(session, turns))
        return json_response(_told(session))

    @router.get("/v1/sessions", responses=gives(SessionsAnswer))
    async def listing(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str | None, Query(max_length=64)] = None,
    ) -> Response:
        """The caller's sessions, the newest first; `after` is the id that the last page ended with."""
        owner = owner_of(request)
        found = await stored(service_of(request), lambda: store.sessions(owner, limit + 1, after))
        page = [_told(session) for session in found[:limit]]
        return json_response({"object": "list", "data": page, "has_more": len(found) > limit})

    @router.get("/v1/sessions/{session_id}", responses=gives(SessionExport))
    async def read(request: Request, session_id: str) -> Response:
        """A session with all its turns: what an export is, and what a new one may be made of."""
        service, owner = service_of(request), owner_of(request)
        session = await sessions.find(service, owner, session_id)
        path = await sessions.path(service, owner, session.head)
        messages = [message for turn in path for message in turn.messages]
        return json_response(_told(session) | {"messages": messages, "turns": [_told_turn(turn) for turn in path]})

    @router.post("/v1/sessions/{session_id}", openapi_extra=takes(ChangeBody), responses=gives(SessionAnswer))
    async def change(request: Request, session_id: str) -> Response:
        """Another title, other metadata."""
        service, owner = service_of(request), owner_of(request)
        body = await read_body(request, ChangeBody, service.config)
        session = await sessions.find(service, owner, session_id)
        changed = await stored(service, lambda: store.describe(session, body.over(session.about)))
        return json_response(_told(changed))

    @router.delete("/v1/sessions/{session_id}", responses=gives(SessionDeleted))
    async def delete(request: Request, session_id: str) -> Response:
        """The session, and the turns that no other one shares."""
        service, owner = service_of(request), owner_of(request)
        with sessions.taken(owner, session_id):
            session = await sessions.find(service, owner, session_id)
            path = await sessions.path(service, owner, session.head)
            await stored(service, lambda: store.drop_session(session))
        for turn in path:
            sessions.conversations.forget(turn.id)
        return json_response({"id": session_id, "object": "session.deleted", "deleted": True})

    @router.post("/v1/sessions/{session_id}/rewind", openapi_extra=takes(RewindBody), responses=gives(SessionAnswer))
    async def rewind(request: Request, session_id: str) -> Response:
        """Take back the turns behind one."""
        service, owner = service_of(request), owner_of(request)
        body = await read_body(request, RewindBody, service.config)
        with sessions.taken(owner, session_id):
            session = await sessions.find(service, owner, session_id)
            path = await sessions.path(service, owner, session.head)
            kept = [] if body.turn is None else await sessions.path_to(service, session, body.turn)
            moved = await stored(service, lambda: store.move(session, body.turn))
        for turn in path[len(kept) :]:
            sessions.conversations.forget(turn.id)
        return json_response(_told(moved))

    @router.post("/v1/sessions/{session_id}/branch", openapi_extra=takes(BranchBody), responses=gives(SessionAnswer))
    async def branch(request: Request, session_id: str) -> Response:
        """A new session that shares the turns up to one, and goes its own way from there."""
        service, owner = service_of(request), owner_of(request)
        body = await read_body(request, BranchBody, service.config)
        await _check_room(service, store, owner)
        session = await sessions.find(service, owner, session_id)
        head = session.head
        if body.turn is not None:
            head = (await sessions.path_to(service, session, body.turn))[-1].id
        twin = _new_session(owner, head, {**session.about, "title": body.title or session.about["title"]})
        await stored(service, lambda: store.add_session(twin))
        return json_response(_told(twin))

    @router.post(
        "/v1/sessions/{session_id}/branches", openapi_extra=takes(EnterBody), responses=gives(SessionBranchAnswer)
    )
    async def enter(request: Request, session_id: str) -> Response:
        """A branch behind the last turn, for a program that goes on from there, and the text that it holds."""
        service, owner, key = service_of(request), owner_of(request), key_of(request)
        await read_body(request, EnterBody, service.config)
        branches.check_room(key)
        service.admit(1)
        session = await sessions.find(service, owner, session_id)
        messages = (await sessions.past(service, owner, session.head)).messages
        if any(message.calls or message.call_id for message in messages):
            raise ApiError(400, "a program cannot go on from calls of tools", param="session", code="unsupported")
        namespace = service.namespace(key, "")

        def stand() -> tuple[Sequence[Segment], Branch]:
            if not messages:  # the program's own text is to begin the branch
                return [], branches.backend.open(namespace=namespace)
            said = service.model.prompts.segments(messages, continues=True)
            return said, sessions.conversations.enter(session.head, said, namespace)

        try:
            said, branch = await service.apart(stand)
        except Exception as error:
            raise as_api_error(error, param="session") from error
        sessions.conversations.start_sweeping()
        told = {
            "id": branches.hold(branch, key),
            "turn": session.head,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "segments": [{"text": segment.text, "control": segment.control} for segment in said],
        }
        return json_response(told)

    @router.post("/v1/sessions/{session_id}/turns", openapi_extra=takes(TurnBody), responses=gives(SessionAnswer))
    async def keep(request: Request, session_id: str) -> Response:
        """Store a turn that a program made behind the one that it went on from."""
        service, owner = service_of(request), owner_of(request)
        body = await read_body(request, TurnBody, service.config)
        with sessions.taken(owner, session_id):
            session = await sessions.find(service, owner, session_id)
            if session.head != body.after:
                raise ApiError(409, _GONE_ON, param=session.head, code="conflict")
            number = (await sessions.past(service, owner, session.head)).num_turns + 1
            turn = Turn(new_id("turn"), owner, session.head, number, tuple(map(_dumped, body.messages)), {})
            moved = await stored(service, lambda: store.append(session, turn))
        return json_response(_told(moved))

    @router.post(
        "/v1/sessions/{session_id}/chat/completions",
        openapi_extra=takes(ChatRequest, streams=True),
        responses=gives(TurnAnswer),
    )
    async def chat(request: Request, session_id: str) -> Response:
        """A chat completion of the session's messages and the new ones. An `Idempotency-Key` stores one turn."""
        service, owner = service_of(request), owner_of(request)
        request_key = _request_key(request)
        body = await read_body(request, ChatRequest, service.config)
        if body.num_outputs > 1:
            raise ApiError(400, "a turn of a session has one answer", param="n", code="invalid_value")
        if body.continue_final_message:
            field = "continue_final_message"
            raise ApiError(400, "a turn of a session begins an answer", param=field, code="invalid_value")
        sessions.take(owner, session_id)
        try:
            session = await sessions.find(service, owner, session_id)
            if request_key is not None:
                earlier = await stored(service, lambda: store.turn_of_request(session_id, request_key))
                if earlier is not None:
                    raise ApiError(409, "this request was answered before", param=earlier, code="already_stored")
            past = await sessions.past(service, owner, session.head)
            asked = Asked(session, past, [_dumped(message) for message in body.messages], request_key)
        except BaseException:
            sessions.give_back(owner, session_id)
            raise
        turn = SessionTurn(service, sessions, asked)
        try:
            return await chat_answer(request, service, body, turn)
        except BaseException:
            turn.close()
            raise

    return router


async def _check_room(service: Service, store: Store, owner: str) -> None:
    if await stored(service, lambda: store.num_sessions(owner)) >= MAX_SESSIONS:
        raise ApiError(409, f"{MAX_SESSIONS} sessions exist already; delete some", code="too_many_sessions")


def _request_key(request: Request) -> str | None:
    given = request.headers.get("idempotency-key")
    if given is not None and not 0 < len(given) <= MAX_KEY:
        raise ApiError(400, f"Idempotency-Key must have 1 to {MAX_KEY} characters", param="idempotency-key")
    return given


def _new_session(owner: str, head: str | None, about: Json) -> Session:
    now = time.time_ns() // 1000
    return Session(new_id("sess"), owner, head, about, now, now)


def _told(session: Session) -> Json:
    return {
        "id": session.id,
        "object": "session",
        "created_at": session.created // 1_000_000,
        "updated_at": session.updated // 1_000_000,
        "turn": session.head,
        **session.about,
    }


def _told_turn(turn: Turn) -> Json:
    return {"id": turn.id, "created_at": turn.created, "messages": list(turn.messages), **turn.about}


def _dumped(message: ChatMessage) -> Json:
    return message.model_dump(exclude_none=True)
