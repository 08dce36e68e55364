"""SGLang's own wire: /generate."""

from __future__ import annotations

import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, cast

from fastapi import APIRouter, Request, Response
from pydantic import Field

from niwaki.runtime.api import (
    MAX_STOPS,
    Constraint,
    Delta,
    Grammar,
    JsonSchema,
    NiwakiError,
    Output,
    Regex,
    RequestError,
    SamplingOptions,
    Spacing,
)
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.results import Result, Triple, result_of, triples
from niwaki.runtime.server.access import key_of, service_of
from niwaki.runtime.server.answers import (
    GenerateAnswers,
)
from niwaki.runtime.server.errors import ApiError, as_api_error
from niwaki.runtime.server.feed import Aborted, Ended, Event, Failed, Feed, Piece
from niwaki.runtime.server.openai_models import MAX_NEW, LogitBias, Stop, bias_of
from niwaki.runtime.server.openai_shapes import LOWEST_LOGPROB
from niwaki.runtime.server.other_servers import GenerateFieldsOfOthers, Unasked
from niwaki.runtime.server.served import Work, works_of
from niwaki.runtime.server.sse import DONE, EventStream, chunk_event, event, unless_gone
from niwaki.runtime.server.wire import (
    MAX_IDS,
    MAX_PROMPTS,
    Json,
    Name,
    Off,
    On,
    Pattern,
    Strict,
    Text,
    TextList,
    TokenId,
    TokenIdList,
    TokenIdLists,
    Unsupported,
    gives,
    is_batch,
    json_response,
    prompts_of,
    read_body,
    takes,
    to_json,
)

router = APIRouter()

OF_EACH_TOKEN = ("output_token_logprobs", "output_top_logprobs")  # of `meta_info`

Value = TypeVar("Value")

_FLAGS = re.compile(r"\(\?([a-z]+)\)")  # for the whole of a pattern


class NativeSampling(Strict):
    """`sampling_params` of /generate, by SGLang's names."""

    max_new_tokens: Annotated[int, Field(ge=0, le=MAX_NEW)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0, le=MAX_NEW)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: LogitBias | None = None
    sampling_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    # The text ends where the first match of one of them ends.
    stop_regex: Pattern | Annotated[list[Pattern], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    regex: Pattern | None = None
    json_schema: Pattern | None = None
    json_spacing: Spacing | None = None  # ours: where blanks stand in its JSON
    ebnf: Pattern | None = None
    # These have one meaning here: special tokens write nothing, no blanks stand between them, stops are cut off.
    skip_special_tokens: On | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: Off | None = None
    custom_params: Unasked = None
    # not yet
    structural_tag: Unsupported = None

    @property
    def compiles(self) -> bool:
        return bool(self.stop_regex) or self.constraint() is not None

    def options(self, return_logprob: bool, top_logprobs_num: int, priority: int | None) -> SamplingOptions:
        return SamplingOptions(
            max_new_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=-1 if self.top_k == 0 else self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=bias_of(self.logit_bias),
            seed=self.sampling_seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            stop_regex=_any_of(self.stop_regex),
            ignore_eos=self.ignore_eos,
            return_logprob=return_logprob or None,
            top_logprobs_num=top_logprobs_num or None,
            priority=priority,
            constraint=self.constraint(),
        )

    def token_ids(self) -> dict[str, list[int]]:
        """The tokens of the vocabulary that are named, by field."""
        return {"logit_bias": list(bias_of(self.logit_bias) or ()), "stop_token_ids": self.stop_token_ids or []}

    def constraint(self) -> Constraint | None:
        """Raises RequestError when there are two."""
        found: list[Constraint] = []
        if self.regex is not None:
            found.append(Regex(self.regex))
        if self.json_schema is not None:
            found.append(JsonSchema(self.json_schema, self.json_spacing or "compact"))
        elif self.json_spacing is not None:
            raise RequestError("json_spacing needs a json_schema")
        if self.ebnf is not None:
            found.append(Grammar(self.ebnf, "ebnf"))
        if len(found) > 1:
            raise RequestError("at most one of regex, json_schema and ebnf")
        return found[0] if found else None


def _any_of(patterns: str | list[str] | None) -> str | None:
    if isinstance(patterns, list):
        return "|".join(map(_grouped, patterns)) if len(patterns) > 1 else next(iter(patterns), None)
    return patterns


def _grouped(pattern: str) -> str:
    """As a part of another one: what stands as (?i) at its start holds for it alone."""
    flags = _FLAGS.match(pattern)
    return f"(?:{pattern})" if flags is None else f"(?{flags[1]}:{pattern[flags.end() :]})"


Beside = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
Start = Annotated[int, Field(ge=-1, le=MAX_IDS)]
NumTops = Annotated[int, Field(ge=0, le=20)]


class GenerateRequest(GenerateFieldsOfOthers):
    """POST /generate. What may be a list beside the prompts has one element for each of them."""

    text: Annotated[Text | TextList, Field(union_mode="left_to_right")] | None = None
    input_ids: Annotated[TokenIdList | TokenIdLists, Field(union_mode="left_to_right")] | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Beside] | None = None
    stream: bool = False
    rid: Name | Annotated[list[Name], Beside] | None = None
    return_logprob: bool | Annotated[list[bool], Beside] | None = None
    logprob_start_len: Start | Annotated[list[Start], Beside] | None = None
    top_logprobs_num: NumTops | Annotated[list[NumTops], Beside] | None = None
    return_text_in_logprobs: bool | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None  # higher goes first

    @property
    def given(self) -> str | list[str] | list[int] | list[list[int]]:
        """Text or ids. Raises ApiError unless it is exactly one of them."""
        if self.text is not None and self.input_ids is None:
            return self.text
        if self.input_ids is not None and self.text is None:
            return self.input_ids
        raise ApiError(400, "give either text or input_ids", param="text")

    def asked(self, count: int) -> Sequence[Asked]:
        """What is asked for each prompt. Raises ApiError when there are too few or too many of something."""
        sampling = _each("sampling_params", self.sampling_params, count)
        returns = _each("return_logprob", self.return_logprob, count)
        starts = _each("logprob_start_len", self.logprob_start_len, count)
        tops = _each("top_logprobs_num", self.top_logprobs_num, count)
        names = _each("rid", self.rid, count)
        return [
            Asked(one or NativeSampling(), bool(returned), start, top or 0, name)
            for one, returned, start, top, name in zip(sampling, returns, starts, tops, names, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for one prompt."""

    sampling: NativeSampling
    return_logprob: bool
    logprob_start_len: int | None
    top_logprobs_num: int
    name: str | None

    @property
    def size(self) -> int:
        """In sequences."""
        return self.sampling.n or 1

    def logits_from(self, ids: TokenIds) -> int | None:
        """The first position whose logits are wanted. Raises RequestError when it is behind the prompt.

        Who wants log-probabilities and generates nothing can only mean the prompt's: so the frontend's
        `unconditional_likelihood_normalized` asks for those of its choices.
        """
        start = self.logprob_start_len
        if start is None and self.sampling.max_new_tokens == 0:
            start = 0
        if not self.return_logprob or start is None or start < 0:
            return None
        if start > len(ids):
            raise RequestError(f"logprob_start_len {start} is behind the end of a prompt of {len(ids)} tokens")
        return max(0, start - 1)


def _each(field: str, given: Value | Sequence[Value] | None, count: int) -> Sequence[Value | None]:
    """A field's value for each prompt. Raises ApiError: it has too few or too many."""
    if not isinstance(given, list):
        return [cast("Value | None", given)] * count
    if len(given) != count:
        raise ApiError(400, f"{len(given)} {field} for {count} prompts", param=field)
    return given


@contextmanager
def _told_of_sampling() -> Iterator[None]:
    """Faults are those of `sampling_params`, told by its names."""
    try:
        yield
    except RequestError as error:
        message = re.sub(r"\bmin_tokens\b", "min_new_tokens", str(error))
        raise ApiError(400, message, param="sampling_params", code="invalid_value") from error


@router.post("/generate", openapi_extra=takes(GenerateRequest, streams=True), responses=gives(GenerateAnswers))
@router.put("/generate", openapi_extra=takes(GenerateRequest, streams=True), responses=gives(GenerateAnswers))
async def generate(request: Request) -> Response:
    """Generate from texts or token ids; a list of prompts, or n above 1, gives a list of results."""
    service = service_of(request)
    body = await read_body(request, GenerateRequest, service.config)
    prompts = prompts_of(body.given)
    for prompt in prompts:
        service.model.check_prompt(prompt, "text" if body.input_ids is None else "input_ids")
    asked = body.asked(len(prompts))
    size = sum(one.size for one in asked)
    in_pieces = bool(body.stream) and service.config.incremental_streaming_output
    writer = _Writer(body, asked, is_batch(body.given) or size > 1, in_pieces)
    namespace = service.namespace(key_of(request), body.cache_salt or body.extra_key)

    def prepare() -> Sequence[Work]:
        for index, (prompt, one) in enumerate(zip(prompts, asked, strict=True)):
            place = f"sampling_params[{index}]" if isinstance(body.sampling_params, list) else "sampling_params"
            for field, named in one.sampling.token_ids().items():
                service.model.ids(named, f"{place}.{field}")
            ids = service.model.encode(prompt) if isinstance(prompt, str) else service.model.ids(prompt, "input_ids")
            with _told_of_sampling():
                params = service.resolve(one.sampling.options(one.return_logprob, one.top_logprobs_num, body.priority))
            writer.works += works_of(ids, params, namespace, one.logits_from(ids))
        return writer.works

    try:
        # One that has a name may be aborted, and is then answered with what there is.
        streams = service.must_stream(bool(body.stream))
        if writer.named and not streams:
            streams = None
        with _told_of_sampling():
            compiles = any(one.sampling.compiles for one in asked)
        feed = await service.begin(size, prepare, compiles=compiles, streams=streams, names=writer.named)
    except Exception as error:
        param = "text" if body.input_ids is None else "input_ids"
        raise as_api_error(error, param=param, constraint="sampling_params") from error
    if body.stream:
        return EventStream(_chunks(feed, writer), partial(service.finish, feed))
    try:
        results = await unless_gone(request.receive, _whole(feed, writer))
    finally:
        service.finish(feed)
    return json_response(results if writer.is_list else results[0])


class _Writer:
    """Writes the results of one /generate request, whole each time or, `in_pieces`, what was not told yet."""

    def __init__(self, body: GenerateRequest, asked: Sequence[Asked], is_list: bool, in_pieces: bool) -> None:
        self.is_list = is_list
        self._in_pieces = in_pieces
        self.works: list[Work] = []
        self.named: list[tuple[str, range]] = []  # what may be aborted by its name, in sequences
        self._with_texts = bool(body.return_text_in_logprobs)
        self._ids_told: list[str] = []
        unnamed = uuid.uuid4().hex
        for one in asked:
            places = range(len(self._ids_told), len(self._ids_told) + one.size)
            self._ids_told += [one.name or unnamed] * one.size
            if one.name is not None:
                self.named.append((one.name, places))
        self._texts: defaultdict[int, str] = defaultdict(str)
        self._ids: defaultdict[int, list[int]] = defaultdict(list)
        self._logprobs: defaultdict[int, list[Triple]] = defaultdict(list)
        self._tops: defaultdict[int, list[list[Triple]]] = defaultdict(list)
        self._num_told: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))  # characters and tokens

    def result(self, index: int, output: Output) -> Result:
        work = self.works[index]
        result = result_of(
            output,
            work.params,
            work.logits_from,
            lowest_logprob=LOWEST_LOGPROB,
            with_texts=self._with_texts,
        )
        result["meta_info"]["id"] = self._ids_told[index]
        return result

    def partial(self, index: int, finish_reason: Json | None = None) -> Result:
        """What has come so far; with a reason, that is all. A prompt's log-probabilities are known at the end, and
        nothing of one that was aborted before it was tokenized."""
        work = self.works[index] if index < len(self.works) else None
        meta: dict[str, Any] = {
            "id": self._ids_told[index],
            "finish_reason": finish_reason,
            "prompt_tokens": 0 if work is None else len(work.ids),
            "completion_tokens": len(self._ids[index]),
        }
        if work is not None and work.params.return_logprob:
            meta["output_token_logprobs"] = self._logprobs[index]
            if work.params.top_logprobs_num:
                meta["output_top_logprobs"] = self._tops[index]
        return {"text": self._texts[index], "output_ids": list(self._ids[index]), "meta_info": meta}

    def take(self, events: Sequence[Event]) -> dict[int, Json]:
        """The latest result of every sequence that the events tell of. Raises what one of them failed with."""
        latest: dict[int, Result] = {}
        for one in events:
            match one:
                case Piece(index, delta):
                    self._add(index, delta)
                    latest[index] = self.partial(index)
                case Ended(index, output):
                    latest[index] = self.result(index, output)
                case Aborted(places):
                    for index in places:
                        latest[index] = self.partial(index, {"type": "abort", "message": "aborted"})
                case Failed(_, error):
                    raise error
        return {index: self._to_tell(index, result) for index, result in latest.items()}

    def _to_tell(self, index: int, result: Result) -> Json:
        text, ids, meta = result["text"], result["output_ids"], result["meta_info"]
        if self._in_pieces:
            char, token = self._num_told[index]
            self._num_told[index] = len(text), len(ids)
            text, ids = text[char:], ids[token:]
            meta |= {name: meta[name][token:] for name in OF_EACH_TOKEN if name in meta}
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _add(self, index: int, delta: Delta) -> None:
        self._texts[index] += delta.text
        self._ids[index] += delta.token_ids
        written = partial(triples, lowest_logprob=LOWEST_LOGPROB, with_texts=self._with_texts)
        self._logprobs[index] += written(delta.logprobs)
        self._tops[index] += map(written, delta.top_logprobs)


async def _whole(feed: Feed, writer: _Writer) -> list[Json]:
    found: dict[int, Json] = {}
    async for events in feed.batches():
        found |= writer.take(events)
    return [found[index] for index in range(feed.size)]


async def _chunks(feed: Feed, writer: _Writer) -> AsyncIterator[bytes]:
    """Each event holds the whole text so far: that is SGLang's wire. What arrived together is told once."""
    try:
        async for events in feed.batches():
            for index, result in writer.take(events).items():
                yield chunk_event({"index": index, **result} if writer.is_list else result)
    except NiwakiError as error:
        yield event(to_json(as_api_error(error).body()))
    yield DONE
