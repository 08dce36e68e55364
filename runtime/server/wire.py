"""Bodies from clients: counted while they are read, JSON without NaN, models that refuse what they do not know."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    WithJsonSchema,
)
from pydantic.json_schema import models_json_schema
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from niwaki.runtime.server.access import service_of
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.elsewhere import hint_of_field
from niwaki.runtime.server.errors import ApiError, ClientGone
from niwaki.runtime.server.service import body_bytes

MAX_IDS = 1_000_000  # of one prompt: far above any context, but not above what one body can hold
MAX_PROMPTS = 256
MAX_CHOICES = 4096
MAX_PATTERN = 64 * 2**10
MAX_TOLD = 64  # characters of what a client wrote, in a refusal


class Strict(BaseModel):
    """A body, or a part of one: unknown fields, NaN, numbers in strings and the like are errors."""

    # Short texts are not kept for the next body that has them, as pydantic would 16,384 of them: what clients write is
    # theirs, and a server's memory grew by 20 bytes a request until they were there.
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, hide_input_in_errors=True, cache_strings="keys"
    )


class ErrorFields(Strict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Strict):
    """Every answer other than success, in OpenAI's form."""

    error: ErrorFields


Json = dict[str, object]  # an object as answers have it
Written = msgspec.Raw  # JSON that is written already
Location = tuple[int | str, ...]  # pydantic's, of an error
Body = TypeVar("Body", bound=BaseModel)

# One of a stream of server-sent events: before 3.2 OpenAPI describes these, not the stream.
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}

# Fail fast: a list of a million wrong elements is one error, not a million.
Text = Annotated[str, Field(max_length=4 * 2**20)]
Name = Annotated[str, Field(max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIdList = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)]
TextList = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN)]
# What one answer is chosen among.
ChoiceTexts = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=MAX_CHOICES)
]
TokenIdLists = Annotated[list[TokenIdList], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


Prompt = str | Sequence[int]


def prompts_of(given: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """The prompts of a field that may hold one or many, as text or as token ids."""
    if isinstance(given, str):
        return [given]
    ids: list[int] = []
    found: list[Prompt] = []
    for element in given:
        if isinstance(element, int):
            ids.append(element)
        else:
            found.append(element)
    return [ids] if ids else found


def is_batch(given: str | list[str] | list[int] | list[list[int]]) -> bool:
    return not isinstance(given, str) and not isinstance(given[0], int)


def _refuse(value: JsonValue) -> JsonValue:
    if value is not None and value != []:
        raise PydanticCustomError("unsupported", "this server does not support it yet; leave it out")
    return value


MEDIA = re.compile("image|audio|video|file")


def _refuse_media(kind: object) -> object:
    if isinstance(kind, str) and MEDIA.search(kind):
        raise PydanticCustomError("unsupported", "this server reads text alone: no images, sound, video or files")
    return kind


def _refuse_verbosity(level: object) -> object:
    if level in ("low", "high"):
        why = "this model knows no levels of it: say in a message how long an answer is to be"
        raise PydanticCustomError("unsupported", why)
    return level


def _be_json(value: JsonValue) -> JsonValue:
    """Pydantic takes NaN for JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite_number", "Input should be JSON, whose numbers are finite") from None
    return value


def _refuse_many(choices: object) -> object:
    if isinstance(choices, list) and len(choices) > MAX_CHOICES:
        said = "a server takes at most {most} choices of one select, got {count}"
        raise PydanticCustomError("too_long", said, {"most": MAX_CHOICES, "count": len(choices)})
    return choices


def _expect(wanted: bool, given: bool) -> bool:
    if given is not wanted:
        raise PydanticCustomError("unsupported", "this server does not support it yet; leave it out")
    return given


# Not Literal[False], which takes 0, too.
Off = Annotated[bool, AfterValidator(partial(_expect, False)), WithJsonSchema({"type": "boolean", "const": False})]
On = Annotated[bool, AfterValidator(partial(_expect, True)), WithJsonSchema({"type": "boolean", "const": True})]
# What one call chooses among. Its rows give no token, so that they count as one sequence.
ChoiceList = Annotated[
    list[Text],
    Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
    BeforeValidator(_refuse_many),
]
# Of the type of a part of a message: what else clients send there.
NoMedia = BeforeValidator(_refuse_media)
# OpenAI's default, and what a model does that was not told of the others.
Verbosity = Annotated[Literal["medium"], BeforeValidator(_refuse_verbosity)]
# A field of the field's API that is not here yet. Ignoring it would give answers that nobody asked for.
Unsupported = Annotated[
    JsonValue, AfterValidator(_refuse), WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]})
]


# What says once more what stands beside it: libraries add it to an answer that goes back as a message.
Echoed = Annotated[
    JsonValue, AfterValidator(_be_json), Field(description="taken and not read: what stands beside it says the same")
]
# Of how a service caches: here what prompts share is computed once, whatever they mark.
CacheHint = Annotated[
    JsonValue, AfterValidator(_be_json), Field(description="taken and not read: what prompts share is computed once")
]


async def read_body(request: Request, model: type[Body], config: ServerConfig) -> Body:
    """The request's body as `model`.

    Raises:
        ApiError: 400, 408, 413 or 415. ClientGone: the connection closed before the body was there.
    """
    if "content-type" not in request.headers and _is_empty(request):
        # Not taken for {}: any web page may have a browser send this, and a JSON body only where CORS lets it.
        raise ApiError(400, "there is no body: send JSON, {} where it asks for nothing", code="missing")
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "the body must not be compressed")
    too_long = ApiError(413, f"the body is longer than {config.max_body_bytes} bytes")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > config.max_body_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > config.max_body_bytes:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {config.body_seconds:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    body_bytes.set(len(body))
    given = bytes(body)
    body.clear()
    return await service_of(request).read(lambda: _validated(model, given))


def _validated(model: type[Body], given: bytes) -> Body:
    """Raises ApiError: 400."""
    try:
        return model.model_validate_json(given)
    except ValidationError as error:
        raise as_refusal(error, given) from None


def _is_empty(request: Request) -> bool:
    return request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers


def takes(model: type[BaseModel], *, streams: bool = False) -> dict[str, object]:
    """What /openapi.json says of a route's body, and of an answer that may be events; `schemas` holds the models."""
    body: dict[str, object] = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference(model)}}}
    }
    events = {"responses": {"200": {"content": {"text/event-stream": {"schema": EVENT}}}}}
    return body | (events if streams else {})


def gives(model: type[BaseModel], status: int = 200) -> dict[int | str, dict[str, Any]]:
    """What /openapi.json says of a route's answer."""
    return {status: {"content": {"application/json": {"schema": reference(model)}}}}


def reference(model: type[BaseModel]) -> dict[str, str]:
    """A reference to a model that `schemas` will hold."""
    _bodies[model.__name__] = model
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def schemas() -> dict[str, object]:
    """The JSON schemas of all bodies, for /openapi.json."""
    models = [(model, "validation") for model in _bodies.values()]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # the literal
    return dict(definitions["$defs"])


_bodies: dict[str, type[BaseModel]] = {}


def json_response(content: Mapping[str, object] | Sequence[object], status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")


def to_json(content: Mapping[str, object] | Sequence[object]) -> bytes:
    """As msgspec writes it, ten times as fast as the standard library: an answer of 10,000 log-probabilities would hold
    every stream up. NaN and infinity, which JSON does not have, are null."""
    return msgspec.json.encode(content)


def written(content: Json) -> Written:
    """Part of an answer, as it will stand there."""
    return msgspec.Raw(to_json(content))


def as_refusal(error: ValidationError, given: JsonValue | bytes = None) -> ApiError:
    """The first thing that is wrong with a body, and where. `given` is what was read, or its JSON."""
    first = _likeliest(error.errors(include_url=False, include_input=False))
    inside = first.get("ctx", {}).get("field")  # told by a check of several fields
    is_missing = first["type"] == "missing" and inside is None
    location = _without_tags(first["loc"], given, is_missing=is_missing)
    param = _param(location if inside is None else (*location, inside))
    match first["type"]:
        case "extra_forbidden":
            message = f"unknown field {param!r}{hint_of_field(param)}"
        case "json_invalid":
            message = first["msg"]
        case "union_tag_invalid":
            message = _untagged(param, first["ctx"])
        case _:
            message = f"{param}: {first['msg']}" if param else first["msg"]
    return ApiError(400, message, param=param or None, code=str(first["type"]))


def _untagged(param: str, context: Mapping[str, object]) -> str:
    """What to say where an object is of no known kind; the kind is the client's own text, of any length."""
    said = f"{str(context['tag'])[:MAX_TOLD]!r} is none of {context['expected_tags']}"
    return f"{param}: {said}" if param else said


def _likeliest(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first error; where a value fits none of several types, that of the one which it comes nearest to."""
    first = errors[0]
    same = [error for error in errors if _is_of_another_type(first["loc"], error["loc"])]
    return max([first, *same], key=_nearness)


def _is_of_another_type(one: Location, other: Location) -> bool:
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            return not (_is_field(mine) or _is_field(its))
    return False


def _nearness(error: ErrorDetails) -> tuple[bool, int, int]:
    is_other_type = error["type"].endswith("_type") or error["type"] == "literal_error"
    indices = [part for part in error["loc"] if isinstance(part, int)]
    return not is_other_type, len(error["loc"]), indices[-1] if indices else -1


def _without_tags(location: Location, given: JsonValue | bytes, *, is_missing: bool) -> Location:
    """The location without the tags that pydantic puts behind a field which may be one of several objects."""
    if given is None or sum(_is_field(part) and isinstance(part, str) for part in location) < 2:
        return location
    value: object = from_json(given, cache_strings="keys") if isinstance(given, bytes) else given
    found: list[int | str] = []
    for place, part in enumerate(location):
        if not _is_field(part):
            found.append(part)
        elif isinstance(part, int):
            found.append(part)
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif isinstance(value, dict) and part in value:
            found.append(part)
            value = value[part]
        elif is_missing and place == len(location) - 1:
            found.append(part)
    return tuple(found)


def _param(location: Location) -> str:
    """`messages[0].content`: pydantic's location without the names of types that it puts between the fields."""
    param = ""
    for part in location:
        if isinstance(part, int):
            param += f"[{part}]"
        elif _is_field(part):
            param += f".{part}" if param else part
        elif not param:
            param = part
    return param[:256]


def _is_field(part: int | str) -> bool:
    """Or an index; the others are names of types."""
    if isinstance(part, int):
        return True
    return part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool", "list")
