"""What a client is told when something goes wrong: OpenAI's error form, a fitting status, and nothing of our inside."""

from __future__ import annotations

import json
import logging
import traceback
import uuid

from niwaki.runtime.api import (
    Cancelled,
    CapacityError,
    ConfigError,
    ConstraintError,
    EngineStopped,
    GenerationError,
    NiwakiError,
    ProgramError,
    RequestError,
    TimedOut,
    UnsupportedByBackend,
)
from niwaki.runtime.api.errors import StopRegexError

log = logging.getLogger("niwaki.server")

RETRY_SECONDS = 1  # what a refused client is asked to wait: queues here drain in seconds or not at all


class ApiError(NiwakiError):
    """An answer other than success. `message` goes to the client as it is, so it holds nothing of other requests."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, object]:
        """OpenAI's form."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    def content(self) -> bytes:
        return json.dumps(self.body(), ensure_ascii=True).encode()


class ServerEnds(EngineStopped):
    """The server is told to end, and a request did not within the time that it had left."""


class ClientGone(NiwakiError):
    """The client closed the connection: there is nobody to answer."""


def overloaded(message: str) -> ApiError:
    return unavailable(message, "overloaded")


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, retry_after=RETRY_SECONDS)


def as_api_error(error: BaseException, *, param: str | None = None, constraint: str | None = None) -> ApiError:
    """The answer to an exception. What is no client's doing is logged under an id, and only the id is told.

    `param` names the field with the prompt, `constraint` the one with the constraint.
    """
    match error:
        case ApiError():
            return error
        case CapacityError():
            return ApiError(400, str(error), param=param, code="context_length_exceeded")
        case StopRegexError() if constraint != "sampling_params":  # else a field beside that of the constraint
            parent = "params." if constraint == "params.constraint" else ""
            return ApiError(400, str(error), param=f"{parent}stop_regex", code="invalid_constraint")
        case ConstraintError():
            return ApiError(400, str(error), param=constraint, code="invalid_constraint")
        case UnsupportedByBackend():
            return ApiError(400, str(error), param=param, code="unsupported")
        case ProgramError():
            return ApiError(400, str(error), param=param, code="invalid_program")
        case RequestError() | ConfigError():
            return ApiError(400, str(error), param=param, code="invalid_value")
        case Cancelled():
            return ApiError(503, "the request was cancelled", type="server_error", code="cancelled")
        case ServerEnds():
            return overloaded(f"{error}; try again")
        case EngineStopped():
            return overloaded("the engine stopped before the request ended; try again")
        case TimedOut():
            return ApiError(504, "the request took too long", type="server_error", code="timeout")
    is_generation = isinstance(error, GenerationError)
    return failed_inside(error, "the generation failed" if is_generation else "something went wrong on the server")


def failed_inside(error: BaseException, what: str, *, in_program: bool = False) -> ApiError:
    """500, with an id under which the log says where; in a user's program at DEBUG only. What an exception says may
    hold a prompt: only DEBUG shows it."""
    error_id = uuid.uuid4().hex
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames and not in_program else ""
    log.error("error %s: %s%s", error_id, type(error).__name__, where)
    log.debug("error %s", error_id, exc_info=error)
    return ApiError(500, f"{what}; error id {error_id}", type="server_error", code="internal_error")
