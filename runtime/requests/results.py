"""A finished generation as SGLang's engine and its /generate write it: a plain dict of text, ids and meta_info."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypedDict

from niwaki.runtime.api import Output, SamplingParams, TokenLogprob

Triple = tuple[float | None, int, str | None]  # log-probability, token id, its text


class Result(TypedDict):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]  # the keys that were asked for, as SGLang has them


def result_of(
    output: Output,
    params: SamplingParams,
    logits_from: int | None,
    *,
    lowest_logprob: float = -math.inf,
    with_texts: bool = True,
) -> Result:
    """`{"text", "output_ids", "meta_info"}`. `logits_from` None: the prompt's log-probabilities were not asked for.

    JSON has no infinity: who writes it gives the `lowest_logprob` to write in its place.
    """
    written = partial(triples, lowest_logprob=lowest_logprob, with_texts=with_texts)
    reason = output.finish_reason
    finish: dict[str, object] = {"type": reason.type}
    if reason.type == "length":
        finish["length"] = output.completion_tokens
    elif reason.matched is not None:
        finish["matched"] = reason.matched
    meta: dict[str, object] = {
        "finish_reason": finish,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        "complete": output.complete,
        "e2e_latency": output.seconds,
    }
    if params.return_logprob:
        meta["output_token_logprobs"] = written(output.logprobs)
        if params.top_logprobs_num:
            meta["output_top_logprobs"] = [written(top) for top in output.top_logprobs]
        if logits_from is not None:
            meta["input_token_logprobs"] = written(output.prompt_logprobs)
            if params.top_logprobs_num:
                meta["input_top_logprobs"] = [written(top) or None for top in output.prompt_top_logprobs]
    return {"text": output.text, "output_ids": list(output.token_ids), "meta_info": meta}


def triples(logprobs: Sequence[TokenLogprob], *, lowest_logprob: float, with_texts: bool) -> list[Triple]:
    return [
        (
            None if one.logprob is None else max(one.logprob, lowest_logprob),
            one.token_id,
            one.text if with_texts else None,
        )
        for one in logprobs
    ]
