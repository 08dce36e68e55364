"""What SGLang's frontend asks beside /generate, plus /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from niwaki.runtime.api import Segment
from niwaki.runtime.server.access import administrative, service_of
from niwaki.runtime.server.answers import (
    AbortAnswer,
    DetokenizeAnswer,
    ModelInfoAnswer,
    ServerInfoAnswer,
    TokenizeAnswer,
)
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.wire import (
    Name,
    Strict,
    Text,
    TextList,
    TokenIdList,
    TokenIdLists,
    gives,
    is_batch,
    json_response,
    prompts_of,
    read_body,
    takes,
)

router = APIRouter()
admin_router = APIRouter(dependencies=[Depends(administrative)])


class TokenizeRequest(Strict):
    """POST /tokenize"""

    model: Name | None = None
    prompt: Annotated[Text | TextList, Field(union_mode="left_to_right")]
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    model: Name | None = None
    tokens: Annotated[TokenIdList | TokenIdLists, Field(union_mode="left_to_right")]
    skip_special_tokens: bool | None = None  # None: true


class AbortRequest(Strict):
    """POST /abort_request"""

    rid: Name = ""
    abort_all: bool = False


@router.post("/abort_request", openapi_extra=takes(AbortRequest), responses=gives(AbortAnswer))
async def abort_request(request: Request) -> Response:
    """End the caller's own /generate requests with this `rid`, or all that have one, also while they are tokenized or
    their constraints are compiled: each answers with the text so far and the finish reason `abort`. Nothing of that
    name is no error: it may just have ended."""
    service = service_of(request)
    body = await read_body(request, AbortRequest, service.config)
    if not body.rid and not body.abort_all:
        raise ApiError(400, "give rid or abort_all", param="rid")
    service.abort(None if body.abort_all else body.rid)
    return json_response({"success": True})


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=gives(TokenizeAnswer))
@router.post("/v1/tokenize", openapi_extra=takes(TokenizeRequest), responses=gives(TokenizeAnswer))
async def tokenize(request: Request) -> Response:
    """The token ids of texts. Text that spells a special token is text."""
    service = service_of(request)
    body = await read_body(request, TokenizeRequest, service.config)
    service.check_model(body.model)
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    encode = service.model.tokenizer.encode

    def work() -> list[list[int]]:
        return [encode([Segment(text)], at_start=body.add_special_tokens) for text in texts]

    found = await service.apart(work)
    is_one = isinstance(body.prompt, str)
    counts = [len(ids) for ids in found]
    return json_response(
        {
            "tokens": found[0] if is_one else found,
            "count": counts[0] if is_one else counts,
            "max_model_len": service.model.longest,
        }
    )


@router.post("/detokenize", openapi_extra=takes(DetokenizeRequest), responses=gives(DetokenizeAnswer))
@router.post("/v1/detokenize", openapi_extra=takes(DetokenizeRequest), responses=gives(DetokenizeAnswer))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens left out unless `skip_special_tokens` is false."""
    service = service_of(request)
    body = await read_body(request, DetokenizeRequest, service.config)
    service.check_model(body.model)
    rows = [service.model.ids(row, "tokens") for row in prompts_of(body.tokens) if not isinstance(row, str)]
    decode = service.model.tokenizer.decode if body.skip_special_tokens is not False else service.model.decode_all
    texts = [decode(row.tolist()) for row in rows]
    return json_response({"text": texts if is_batch(body.tokens) else texts[0]})


@router.get("/model_info", responses=gives(ModelInfoAnswer))
@router.get("/get_model_info", responses=gives(ModelInfoAnswer))
async def model_info(request: Request) -> Response:
    """What SGLang's frontend asks first. The path is the model's name: where it lies is no client's business."""
    service = service_of(request)
    model, name = service.model, service.model_names[0]
    return json_response(
        {
            "model_path": name,
            "tokenizer_path": name,
            "is_generation": True,
            "context_length": model.info.context_length,
            "vocab_size": model.vocab_size,
        }
    )


@router.get("/server_info", responses=gives(ServerInfoAnswer))
@router.get("/get_server_info", responses=gives(ServerInfoAnswer))
async def server_info(request: Request) -> Response:
    """The engine's settings and its counters."""
    service = service_of(request)
    return json_response({**service.model.settings, "usage": dict(service.engine.usage())})


@admin_router.get("/flush_cache", response_class=PlainTextResponse)
@admin_router.post("/flush_cache", response_class=PlainTextResponse)
async def flush_cache(request: Request) -> Response:
    """Forget every cached prefix; 400 while something runs."""
    service = service_of(request)
    if not await service.apart(service.engine.flush):
        raise ApiError(400, "the cache was not flushed: requests are running", code="busy")
    return PlainTextResponse("Cache flushed.\n")
