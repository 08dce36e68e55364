"""`RuntimeEndpoint`: the backend of programs that run here while the model runs on a niwaki server.

Branches stand on the server and are named by id; what is sent is only what is new. Text that is appended waits here
until something needs it, so that a gen is one request.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, fields
from typing import Self, TypeAlias
from urllib.parse import urlsplit

from niwaki.runtime.api import (
    BackendInfo,
    Branch,
    Cancelled,
    CapacityError,
    Choices,
    ConfigError,
    Constraint,
    ConstraintError,
    Delta,
    EngineStopped,
    FinishReason,
    Generation,
    GenerationError,
    Grammar,
    JsonSchema,
    Message,
    NiwakiError,
    Output,
    Pending,
    ProgramError,
    Regex,
    RequestError,
    SamplingOptions,
    SamplingParams,
    Score,
    Segment,
    TimedOut,
    TokenLogprob,
    UnsupportedByBackend,
)

Json: TypeAlias = dict[str, object]

# What the server's error codes mean here; every other one is a RequestError below 500, a GenerationError above.
ERRORS: dict[str, type[NiwakiError]] = {
    "context_length_exceeded": CapacityError,
    "invalid_constraint": ConstraintError,
    "invalid_program": ProgramError,
    "unsupported": UnsupportedByBackend,
    "cancelled": Cancelled,
    "overloaded": EngineStopped,
    "timeout": TimedOut,
}


class RemoteBranch:
    """A branch on the server, and the text that the server has not been told yet. Made by `RuntimeEndpoint`."""

    __slots__ = ("_endpoint", "id", "unsent")

    def __init__(self, endpoint: RuntimeEndpoint, branch_id: str) -> None:
        self.id = branch_id
        self.unsent: list[Segment] = []
        self._endpoint = endpoint

    @property
    def token_ids(self) -> Sequence[int]:
        return self._endpoint.token_ids(self)


class RuntimeEndpoint:
    """A niwaki server as a backend: `program.run(..., backend=RuntimeEndpoint("http://127.0.0.1:30000"))`.

    `timeout` bounds every call but generating and scoring, which take as long as they take.

    Raises:
        ConfigError: `url` is no http or https address.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 60.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(f"{url!r} is no server's address, as in http://127.0.0.1:30000")
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._timeout = timeout
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._is_shut_down = False
        self._info: BackendInfo | None = None

    def __repr__(self) -> str:
        return f"RuntimeEndpoint({self._host}:{self._port})"

    # -- the protocol -----------------------------------------------------------------------------------------------

    def info(self) -> BackendInfo:
        if self._info is None:
            told = self._call("GET", "/backend")
            defaults = _object(told["defaults"])
            bias = defaults.pop("logit_bias", None)
            known = {f.name for f in fields(SamplingOptions)} - {"constraint"}
            options = {name: value for name, value in defaults.items() if name in known}
            if isinstance(bias, dict):
                options["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
            self._info = BackendInfo(
                str(told["model"]),
                _int(told["context_length"]),
                SamplingOptions(**options),  # type: ignore[arg-type]  # the server wrote them from the same class
            )
        return self._info

    def open(self, *, namespace: str = "") -> RemoteBranch:
        return RemoteBranch(self, str(self._call("POST", "/branches", {"namespace": namespace})["id"]))

    def fork(self, branch: Branch) -> RemoteBranch:
        own = self._own(branch)
        unsent = _taken(own, ())
        return RemoteBranch(self, str(self._call("POST", f"/branches/{own.id}/fork", {"delta": unsent})["id"]))

    def close(self, branch: Branch) -> None:
        with suppress(RequestError):  # closed before, or expired
            self._call("DELETE", f"/branches/{self._own(branch).id}")

    def append(self, branch: Branch, delta: Sequence[Segment]) -> None:
        self._own(branch).unsent.extend(delta)

    def generate(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams) -> Generation:
        own = self._own(branch)
        call = _Call()
        generation = Generation(call.cancel)
        body = {"delta": _taken(own, delta), "params": _params(params)}
        self._start(self._generate, generation, call, f"/branches/{own.id}/generate", body)
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
        call = _Call()
        pending: Pending[tuple[Score, ...]] = Pending(call.cancel)
        body: Json = {"delta": _taken(own, delta), "continuations": list(continuations)}
        body |= {"heal": heal, "unconditional": unconditional}
        self._start(self._score, pending, call, f"/branches/{own.id}/score", body)
        return pending

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        body = {"messages": [asdict(one) for one in messages], "add_generation_prompt": add_generation_prompt}
        return str(self._call("POST", "/backend/render", body)["text"])

    def usage(self) -> Mapping[str, float]:
        return {name: float(str(value)) for name, value in self._call("GET", "/backend/usage").items()}

    # -- beside it --------------------------------------------------------------------------------------------------

    def token_ids(self, branch: RemoteBranch) -> Sequence[int]:
        """All tokens of a branch, asked of the server."""
        if branch.unsent:
            self._call("POST", f"/branches/{branch.id}/append", {"delta": _taken(branch, ())})
        return [_int(token_id) for token_id in _list(self._call("GET", f"/branches/{branch.id}")["token_ids"])]

    def flush_cache(self) -> bool:
        """Forget every cached prefix; False when the server was busy. Needs the server's admin key where it has one."""
        try:
            self._call("POST", "/flush_cache", {})
        except RequestError:
            return False
        return True

    def get_server_info(self) -> Mapping[str, object]:
        """What the server says about its engine: settings and counters."""
        return self._call("GET", "/server_info")

    def shutdown(self) -> None:
        """Keep no connection open from now on. The server's branches stay until they are closed or expire."""
        with self._lock:
            self._is_shut_down = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # -- calls that answer at once ----------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._exchange(connection, method, path, body)
            except (OSError, http.client.HTTPException):
                connection.close()  # the server had closed it while it was idle; once more on a new one
        connection = self._connect(self._timeout)
        try:
            return self._exchange(connection, method, path, body)
        except TimeoutError:
            connection.close()
            raise TimedOut(f"{self!r} did not answer {method} {path} within {self._timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._unreachable(error) from error

    def _exchange(self, connection: http.client.HTTPConnection, method: str, path: str, body: Json | None) -> Json:
        connection.request(method, path, None if body is None else json.dumps(body), self._headers)
        response = connection.getresponse()
        content = response.read()
        with self._lock:
            is_kept = not self._is_shut_down
            if is_kept:
                self._idle.append(connection)
        if not is_kept:  # a branch may be closed after the shutdown
            connection.close()
        if response.status != 200:
            raise _error(response.status, content)
        is_json = response.headers.get_content_type() == "application/json"
        return _object(json.loads(content)) if is_json else {}

    def _connect(self, timeout: float | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout)

    def _unreachable(self, error: Exception) -> EngineStopped:
        return EngineStopped(f"{self!r} cannot be reached: {type(error).__name__}: {error}")

    # -- calls that take their time, each on a thread of its own ----------------------------------------------------

    def _start(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name="niwaki-remote", daemon=True).start()

    def _generate(self, generation: Generation, call: _Call, path: str, body: Json) -> None:
        try:
            with closing(self._connect(None)) as connection:
                response = call.post(connection, path, body, self._headers)
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    event = _object(json.loads(line[6:]))
                    if "delta" in event:
                        generation.push(_delta(_object(event["delta"])))
                    elif "outputs" in event:
                        generation.succeed(tuple(_output(_object(one)) for one in _list(event["outputs"])))
                    else:
                        generation.fail(_error_of(500, event))
            ended = EngineStopped(f"{self!r} closed the connection before the generation ended")
            generation.fail(self._reason(ended, call))  # nothing, when the result was there
        except Exception as error:  # whoever waits must be told, whatever it was
            generation.fail(self._reason(error, call))

    def _score(self, pending: Pending[tuple[Score, ...]], call: _Call, path: str, body: Json) -> None:
        try:
            with closing(self._connect(None)) as connection:
                told = _object(json.loads(call.post(connection, path, body, self._headers).read()))
            pending.succeed(tuple(_score(_object(one)) for one in _list(told["scores"])))
        except Exception as error:  # whoever waits must be told, whatever it was
            pending.fail(self._reason(error, call))

    def _reason(self, error: Exception, call: _Call) -> NiwakiError:
        if call.is_cancelled:
            return Cancelled("the request was cancelled")
        return error if isinstance(error, NiwakiError) else self._unreachable(error)

    def _own(self, branch: Branch) -> RemoteBranch:
        if not isinstance(branch, RemoteBranch) or branch._endpoint is not self:
            raise ProgramError(f"this branch belongs to another backend: {type(branch).__name__}")
        return branch


class _Call:
    """One long call. Cancelling closes its connection, by which the server knows that nobody waits any more."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def post(
        self, connection: http.client.HTTPConnection, path: str, body: Json, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """Send, and return the answer, of which only the head was read. Raises the error that it is."""
        connection.connect()
        with self._lock:
            if self.is_cancelled:
                raise Cancelled("the request was cancelled")
            self._socket = connection.sock
        connection.request("POST", path, json.dumps(body), {**headers})
        response = connection.getresponse()
        if response.status != 200:
            raise _error(response.status, response.read())
        return response

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._socket is not None:
                with suppress(OSError):  # closed already
                    self._socket.shutdown(socket.SHUT_RDWR)


# ---------------------------------------------------------------------------------------------------------------
# Between our dataclasses and the server's JSON
# ---------------------------------------------------------------------------------------------------------------


def _taken(branch: RemoteBranch, delta: Sequence[Segment]) -> list[Json]:
    """What the server is to append: all that was not sent yet."""
    segments, branch.unsent = [*branch.unsent, *delta], []
    return [{"text": segment.text, "control": segment.control} for segment in segments]


def _params(params: SamplingParams) -> Json:
    if params.logprob_start_len >= 0:
        raise UnsupportedByBackend(
            "a server's branches tell no log-probabilities of prompts; leave out logprob_start_len"
        )
    written: Json = {f.name: getattr(params, f.name) for f in fields(params) if f.name != "logprob_start_len"}
    return written | {"constraint": None if params.constraint is None else _constraint(params.constraint)}


def _constraint(constraint: Constraint) -> Json:
    match constraint:
        case Regex(pattern):
            return {"kind": "regex", "pattern": pattern}
        case Choices(choices):
            return {"kind": "choices", "choices": choices}
        case JsonSchema(text):
            return {"kind": "json_schema", "text": text}
        case Grammar(source, syntax):
            return {"kind": "grammar", "source": source, "syntax": syntax}
        case _:
            raise UnsupportedByBackend(f"a {type(constraint).__name__} constraint cannot be sent to a server yet")


def _error(status: int, content: bytes) -> NiwakiError:
    try:
        return _error_of(status, _object(json.loads(content)))
    except (ValueError, KeyError, TypeError):
        return GenerationError(f"the server answered {status} with something that no niwaki server says")


def _error_of(status: int, body: Json) -> NiwakiError:
    told = _object(body["error"])
    kind = ERRORS.get(str(told["code"]), RequestError if status < 500 else GenerationError)
    return kind(str(told["message"]))


def _delta(told: Json) -> Delta:
    return Delta(str(told["text"]), _ids(told["token_ids"]), _logprobs(told["logprobs"]), _lists(told["top_logprobs"]))


def _output(told: Json) -> Output:
    finish = _object(told["finish_reason"])
    return Output(
        text=str(told["text"]),
        token_ids=_ids(told["token_ids"]),
        finish_reason=FinishReason(finish["type"], finish["matched"]),  # type: ignore[arg-type]  # written from one
        prompt_tokens=_int(told["prompt_tokens"]),
        cached_tokens=_int(told["cached_tokens"]),
        complete=bool(told["complete"]),
        logprobs=_logprobs(told["logprobs"]),
        top_logprobs=_lists(told["top_logprobs"]),
        seconds=float(str(told["seconds"])),
    )


def _score(told: Json) -> Score:
    return Score(
        str(told["text"]), _logprobs(told["logprobs"]), _int(told["prompt_tokens"]), _int(told["cached_tokens"])
    )


def _logprobs(told: object) -> tuple[TokenLogprob, ...]:
    found = []
    for entry in _list(told):
        logprob, token_id, text = _list(entry)
        found.append(
            TokenLogprob(
                None if logprob is None else float(str(logprob)), _int(token_id), None if text is None else str(text)
            )
        )
    return tuple(found)


def _lists(told: object) -> tuple[tuple[TokenLogprob, ...], ...]:
    return tuple(_logprobs(one) for one in _list(told))


def _ids(told: object) -> tuple[int, ...]:
    return tuple(_int(token_id) for token_id in _list(told))


def _int(told: object) -> int:
    if not isinstance(told, int):
        raise TypeError(f"expected a whole number, got {told!r}")
    return told


def _list(told: object) -> list[object]:
    if not isinstance(told, list):
        raise TypeError(f"expected a list, got {told!r}")
    return told


def _object(told: object) -> Json:
    if not isinstance(told, dict):
        raise TypeError(f"expected an object, got {told!r}")
    return told
