"""A session of a server, as a run goes on with it. Made by `RuntimeEndpoint.session`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from niwaki.lang.remote_branch import RemoteBranch
from niwaki.lang.remote_wire import Json, as_list, as_object
from niwaki.lang.sessions import Standing
from niwaki.runtime.api import Message, Segment

if TYPE_CHECKING:
    from niwaki.lang.remote import RuntimeEndpoint


class RemoteSession:
    """A conversation on a server, made by `RuntimeEndpoint.session`.

    `program.run(..., backend=session)` begins after the session's turns and stores what it adds as one more turn. Any
    client of the server sees the same turns. Only one run at a time can add one: if the session has gone on meanwhile,
    the run fails with RequestError and stores nothing.
    """

    def __init__(self, endpoint: RuntimeEndpoint, session_id: str) -> None:
        self.endpoint = endpoint
        self.id = session_id

    def __repr__(self) -> str:
        return f"<session {self.id} of {self.endpoint!r}>"

    def messages(self) -> list[dict[str, str]]:
        """What was said so far, as mappings with "role" and "content"; calls of tools are left out."""
        messages = map(as_object, as_list(self.export()["messages"]))
        return [{"role": str(one["role"]), "content": _text_of(one)} for one in messages]

    def export(self) -> Json:
        """The session with all its turns, in the form that `POST /v1/sessions` takes."""
        return self.endpoint.ask("GET", f"/v1/sessions/{self.id}")

    def turns(self) -> list[str]:
        """The ids of its turns, the first one first, for `rewind` and `branch`."""
        return [str(as_object(turn)["id"]) for turn in as_list(self.export()["turns"])]

    def rewind(self, turn: str | None) -> None:
        """Take back all turns after `turn`; None: all turns.

        Raises:
            RequestError: the session has no such turn, or is in use.
        """
        self.endpoint.ask("POST", f"/v1/sessions/{self.id}/rewind", {"turn": turn})

    def branch(self, turn: str | None = None, *, title: str | None = None) -> RemoteSession:
        """A new session that shares the turns up to `turn` (None: all), and goes its own way from there."""
        told = self.endpoint.ask("POST", f"/v1/sessions/{self.id}/branch", {"turn": turn, "title": title})
        return RemoteSession(self.endpoint, str(told["id"]))

    def delete(self) -> None:
        """Delete the session, and the turns that no other session shares."""
        self.endpoint.ask("DELETE", f"/v1/sessions/{self.id}")

    def enter(self) -> Standing:
        told = self.endpoint.ask("POST", f"/v1/sessions/{self.id}/branches", {})
        segments = map(as_object, as_list(told["segments"]))
        messages = map(as_object, as_list(told["messages"]))
        turn = told["turn"]
        return Standing(
            RemoteBranch(self.endpoint, str(told["id"])),
            tuple(Segment(str(one["text"]), bool(one["control"])) for one in segments),
            tuple(Message(str(one["role"]), str(one["content"])) for one in messages),
            None if turn is None else str(turn),
        )

    def store(self, after: str | None, messages: Sequence[Message]) -> None:
        said = [{"role": message.role, "content": message.content} for message in messages]
        self.endpoint.ask("POST", f"/v1/sessions/{self.id}/turns", {"after": after, "messages": said})


def _text_of(message: Json) -> str:
    """A client may have said it in parts."""
    content = message.get("content") or message.get("refusal") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", part.get("refusal", ""))) for part in map(as_object, as_list(content)))
