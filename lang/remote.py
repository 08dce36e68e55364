"""`RuntimeEndpoint`: the backend of programs that run here while the model runs on a niwaki server.

Branches stand on the server and are named by id; what is sent is only what is new. Text that is appended waits here
until something needs it, so that a gen is one request. A compiled program is one request as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from typing import Self

from niwaki.lang.remote_branch import Pieces, RemoteBranch
from niwaki.lang.remote_link import LongCall, ServerLink
from niwaki.lang.remote_script import ScriptRun
from niwaki.lang.remote_session import RemoteSession
from niwaki.lang.remote_wire import (
    Json,
    as_int,
    as_list,
    as_number,
    as_object,
    as_told,
    delta_of,
    error_of,
    output_of,
    params_json,
    score_of,
)
from niwaki.runtime.api import (
    BackendInfo,
    Branch,
    EngineStopped,
    Generation,
    Message,
    NiwakiError,
    Pending,
    ProgramError,
    RequestError,
    SamplingOptions,
    SamplingParams,
    Score,
    Segment,
)
from niwaki.runtime.api.script import Script


class RuntimeEndpoint:
    """A niwaki server as a backend: `program.run(..., backend=RuntimeEndpoint("http://127.0.0.1:30000"))`.

    `timeout` bounds every call except generating, scoring and scripts, which take as long as they take.

    Raises:
        ConfigError: `url` is not an http or https address.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 60.0) -> None:
        self._link = ServerLink(url, api_key, timeout)
        self._asked = url, api_key, timeout
        self._info: BackendInfo | None = None

    def __repr__(self) -> str:
        return str(self._link)

    def __reduce__(self) -> tuple[object, ...]:
        """Another process has connections of its own."""
        url, api_key, timeout = self._asked
        return partial(RuntimeEndpoint, api_key=api_key, timeout=timeout), (url,)

    # -- the protocol -----------------------------------------------------------------------------------------------

    def info(self) -> BackendInfo:
        if self._info is None:
            told = self._link.call("GET", "/backend")
            defaults = as_object(told["defaults"])
            bias = defaults.pop("logit_bias", None)
            known = {f.name for f in fields(SamplingOptions)} - {"constraint"}
            options = {name: value for name, value in defaults.items() if name in known}
            if isinstance(bias, dict):
                options["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
            self._info = BackendInfo(
                str(told["model"]),
                as_int(told["context_length"]),
                SamplingOptions(**options),  # type: ignore[arg-type]  # the server wrote them from the same class
                weights=str(told.get("weights", "")),
            )
        return self._info

    def open(self, *, namespace: str = "") -> RemoteBranch:
        return RemoteBranch(self, str(self._link.call("POST", "/branches", {"namespace": namespace})["id"]))

    def fork(self, branch: Branch) -> RemoteBranch:
        own = self._own(branch)
        twin = own.next_fork()
        if twin is None:
            path = f"/branches/{own.id}/fork"
            twin = RemoteBranch(self, str(self._link.call("POST", path, {"delta": own.taken()})["id"]))
        return twin

    def close(self, branch: Branch) -> None:
        name = self._own(branch).closed()
        if name is not None:
            with suppress(RequestError):  # closed before, or expired
                self._link.call("DELETE", f"/branches/{name}")

    def append(self, branch: Branch, delta: Sequence[Segment]) -> None:
        self._own(branch).unsent.extend(delta)

    def generate(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams) -> Generation:
        return self._begin(branch, delta, params, is_read=False)

    def generate_read(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams) -> Generation:
        return self._begin(branch, delta, params, is_read=True)

    def _begin(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams, *, is_read: bool) -> Generation:
        own = self._own(branch)
        told = own.next_generation(delta, params)
        if told is not None:
            return told
        name = own.id
        pieces = Pieces(partial(self._listen, name), is_wanted=is_read)
        call = LongCall(pieces.begin)
        generation = Generation(call.cancel, lambda reads: pieces.want())
        body = {"delta": own.taken(delta), "params": params_json(params)}
        self.start(self._generate, generation, call, f"/branches/{name}/generate", body, pieces)
        return generation

    def score(
        self,
        branch: Branch,
        delta: Sequence[Segment],
        continuations: Sequence[str],
        *,
        heal: bool = False,
        unconditional: bool = False,
    ) -> Pending[tuple[Score, ...]]:
        own = self._own(branch)
        told = own.next_scores(delta, continuations)
        if told is not None:
            return told
        call = LongCall()
        pending: Pending[tuple[Score, ...]] = Pending(call.cancel)
        path = f"/branches/{own.id}/score"
        body: Json = {"delta": own.taken(delta), "continuations": list(continuations)}
        body |= {"heal": heal, "unconditional": unconditional}
        self.start(self._score, pending, call, path, body)
        return pending

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        body = {"messages": [asdict(one) for one in messages], "add_generation_prompt": add_generation_prompt}
        return str(self._link.call("POST", "/backend/render", body)["text"])

    def usage(self) -> Mapping[str, float]:
        return {name: as_number(value) for name, value in self._link.call("GET", "/backend/usage").items()}

    def run_script(self, script: Script) -> RemoteBranch:
        """Run a compiled program in one request.

        Raises:
            UnsupportedByBackend: a call in it cannot be sent to a server.
        """
        return ScriptRun(self, script).begin()

    def session(self, session_id: str | None = None, *, title: str | None = None) -> RemoteSession:
        """A session of the server, or without `session_id` a new one. As the `backend` of a run it continues from the
        session's last turn.

        Whether the server has the id shows when the session is used.
        """
        if session_id is not None and title is not None:
            raise ProgramError(f"session {session_id!r} is there already; title= is for a new one, without an id")
        if session_id is None:
            session_id = str(self.ask("POST", "/v1/sessions", {"title": title})["id"])
        return RemoteSession(self, session_id)

    # -- beside it --------------------------------------------------------------------------------------------------

    def token_ids(self, branch: RemoteBranch) -> Sequence[int]:
        """Ask the server for all tokens of a branch."""
        told = branch.told_token_ids()
        if told is not None:
            return told
        name = branch.id
        if branch.unsent:
            self._link.call("POST", f"/branches/{name}/append", {"delta": branch.taken()})
        return [as_int(token_id) for token_id in as_list(self._link.call("GET", f"/branches/{name}")["token_ids"])]

    def flush_cache(self) -> bool:
        """Forget every cached prefix. False: the server was busy. Needs the server's admin key, if it has one."""
        try:
            self._link.call("POST", "/flush_cache", {})
        except RequestError:
            return False
        return True

    def get_server_info(self) -> Mapping[str, object]:
        """The settings and counters of the server's engine."""
        return self._link.call("GET", "/server_info")

    def shutdown(self) -> None:
        """Close the connections. The server's branches stay until they are closed or expire."""
        self._link.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """Ask for one page of the server, such as `ask("GET", "/server_info")`. An error in the answer is raised."""
        return self._link.call(method, path, body)

    # -- calls that take their time, each on a thread of its own ----------------------------------------------------

    def start(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name="niwaki-remote", daemon=True).start()

    def events(self, call: LongCall, path: str, body: Json) -> Iterator[Json]:
        return self._link.events(call, path, body)

    def _generate(self, generation: Generation, call: LongCall, path: str, body: Json, pieces: Pieces) -> None:
        try:
            for event in self.events(call, path, {**body, "streams": pieces.ask()}):
                if "delta" in event:
                    generation.push(delta_of(as_object(event["delta"])))
                elif "outputs" in event:
                    generation.succeed(tuple(output_of(as_object(one)) for one in as_list(event["outputs"])))
                else:
                    generation.fail(error_of(500, event))
            ended = EngineStopped(f"{self!r} closed the connection before the generation ended")
            generation.fail(ended)  # nothing, when the result was there
        except Exception as error:  # whoever waits must be told, whatever it was
            generation.fail(as_told(error))

    def _listen(self, branch_id: str) -> None:
        with suppress(NiwakiError):  # the generation is over; or it fails, and tells why itself
            self._link.call("POST", f"/branches/{branch_id}/listen", {})

    def _score(self, pending: Pending[tuple[Score, ...]], call: LongCall, path: str, body: Json) -> None:
        try:
            (told,) = self.events(call, path, body)
            pending.succeed(tuple(score_of(as_object(one)) for one in as_list(told["scores"])))
        except Exception as error:  # whoever waits must be told, whatever it was
            pending.fail(as_told(error))

    def _own(self, branch: Branch) -> RemoteBranch:
        if not isinstance(branch, RemoteBranch) or branch.endpoint is not self:
            raise ProgramError(f"this branch belongs to another backend: {type(branch).__name__}")
        return branch
