"""Sessions: conversations that the server remembers, and one turn of them while it is answered. Nothing of HTTP.

A turn is stored when its answer is whole and the client is still there, before the client reads the end of it. What
stands in the engine meanwhile belongs to `conversations`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from niwaki.runtime.api import Generation, Message, Output, SamplingParams, Segment
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.server.chat import is_whole
from niwaki.runtime.server.conversations import Conversations, Past, Stand
from niwaki.runtime.server.errors import ApiError, as_api_error, log, unavailable
from niwaki.runtime.server.openai_models import ChatMessage
from niwaki.runtime.server.service import Service
from niwaki.runtime.server.store import Conflict, Json, Session, Store, StoreFailed, Turn, new_id
from niwaki.runtime.server.wire import MAX_TOLD

Result = TypeVar("Result")


class Sessions:
    """The sessions of one server: the store, and which of them somebody is talking in. Used on the event loop."""

    def __init__(self, store: Store, conversations: Conversations) -> None:
        self.store = store
        self.conversations = conversations
        self._busy: set[tuple[str, str]] = set()  # owner and session: who asks for a foreign one disturbs nobody

    async def find(self, service: Service, owner: str, session_id: str) -> Session:
        """Raises ApiError: 404 for an unknown or foreign one."""
        session = await stored(service, lambda: self.store.session(owner, session_id))
        if session is None:
            message = f"no such session: {session_id[:MAX_TOLD]!r} was deleted, never there, or made with another key"
            raise ApiError(404, f"{message}; GET /v1/sessions lists yours", param="session", code="not_found")
        return session

    async def path(self, service: Service, owner: str, last: str | None) -> list[Turn]:
        """The turns up to one of this owner's, itself the last."""
        return [] if last is None else await stored(service, lambda: self.store.path(owner, last))

    async def past(self, service: Service, owner: str, last: str | None) -> Past:
        """What was said up to a turn of this owner's."""
        known = None if last is None else self.conversations.past(last)
        if known is not None:
            return known
        return Past() if last is None else await stored(service, lambda: past_of(self.store.path(owner, last)))

    async def path_to(self, service: Service, session: Session, turn_id: str) -> list[Turn]:
        """The turns up to one of a session. Raises ApiError: 404."""
        path = await self.path(service, session.owner, session.head)
        for place, turn in enumerate(path):
            if turn.id == turn_id:
                return path[: place + 1]
        message = f"this session has no such turn: {turn_id[:MAX_TOLD]!r}"
        raise ApiError(404, f"{message}; GET /v1/sessions/{session.id} has its own", param="turn", code="not_found")

    def take(self, owner: str, session_id: str) -> None:
        """Nobody else may move the session until it is given back. Raises ApiError: 409."""
        if (owner, session_id) in self._busy:
            raise ApiError(409, "another request is moving this session; wait for it", param="session", code="conflict")
        self._busy.add((owner, session_id))
        self.conversations.start_sweeping()

    def give_back(self, owner: str, session_id: str) -> None:
        self._busy.discard((owner, session_id))

    @contextmanager
    def taken(self, owner: str, session_id: str) -> Iterator[None]:
        """`take` for the length of a block."""
        self.take(owner, session_id)
        try:
            yield
        finally:
            self.give_back(owner, session_id)

    def close(self) -> None:
        self.conversations.close()
        self.store.close()


async def stored(service: Service, work: Callable[[], Result]) -> Result:
    """Work of the store, on a thread.

    Raises:
        ApiError: 409 when somebody else was first; 503 when the database fails, and the log says why.
    """
    try:
        return await service.store(work)
    except StoreFailed as failure:
        log.error("the session store failed: %s", failure)
        raise unavailable("the session store failed; try again", "store_failed") from failure
    except Conflict as conflict:
        raise ApiError(409, str(conflict), param=conflict.turn, code="conflict") from None


@dataclass(frozen=True, slots=True)
class Asked:
    """A new turn as its client sent it."""

    session: Session
    past: Past
    messages: Sequence[Json]
    request_key: str | None


class SessionTurn:
    """One turn of a session while it is answered: the `Keeper` of its chat. It ends the session's being taken."""

    def __init__(self, service: Service, sessions: Sessions, asked: Asked) -> None:
        self.history = asked.past.messages
        self._service = service
        self._sessions = sessions
        self._asked = asked
        self._stand = Stand(sessions.conversations, asked.session.head)
        self._is_closed = False
        self._is_undoing = False

    def place(self, segments: Sequence[Segment], namespace: str) -> TokenIds:
        return self._stand.place(segments, namespace)

    def start(self, params: SamplingParams, *, streams: bool | None) -> Generation:
        return self._stand.start(params, streams=streams)

    async def keep(self, choice: Json, output: Output, used: Json) -> Json:
        asked = self._asked
        turn = Turn(
            id=new_id("turn"),
            owner=asked.session.owner,
            parent=asked.session.head,
            number=asked.past.num_turns + 1,
            messages=(*asked.messages, as_said(choice["message"])),
            about={"model": self._service.model_names[0], "usage": used, "finish_reason": choice["finish_reason"]},
            request_key=asked.request_key,
        )
        storing = asyncio.ensure_future(stored(self._service, lambda: self._sessions.store.append(asked.session, turn)))
        try:
            await asyncio.shield(storing)
        except asyncio.CancelledError:  # the client went just now: it never learnt that the turn was whole
            self._is_undoing = True
            storing.add_done_callback(lambda done: asyncio.ensure_future(self._undo(done)))
            raise
        except Exception as error:
            raise as_api_error(error) from error
        self._stand.leave(turn.id, output, asked.past.and_then(said(turn)))
        return {"session": asked.session.id, "turn": turn.id}

    def close(self) -> None:
        is_first, self._is_closed = not self._is_closed, True
        self._stand.close()
        if is_first and not self._is_undoing:
            self._sessions.give_back(self._asked.session.owner, self._asked.session.id)

    async def _undo(self, storing: asyncio.Future[Session]) -> None:
        try:
            if storing.exception() is None:
                moved = storing.result()
                await stored(self._service, lambda: self._sessions.store.move(moved, self._asked.session.head))
        finally:
            self._sessions.give_back(self._asked.session.owner, self._asked.session.id)


def past_of(path: Sequence[Turn]) -> Past:
    """What turns said, each of which stands on the one before it."""
    return Past(tuple(message for turn in path for message in said(turn)), len(path))


def said(turn: Turn) -> tuple[Message, ...]:
    """What a turn added, as the model is told it: a call that the budget or a stop cut off was never made, and no
    template could write it."""
    messages = [ChatMessage.model_validate(message).message() for message in turn.messages]
    return tuple(_without_cut_calls(message) if message.calls else message for message in messages)


def _without_cut_calls(message: Message) -> Message:
    return replace(message, calls=tuple(call for call in message.calls if is_whole(call)))


def as_said(message: object) -> Json:
    """An answer as a client would send it back."""
    assert isinstance(message, dict)
    return {name: value for name, value in message.items() if value is not None}
