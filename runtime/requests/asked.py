"""What a call of `Engine.generate` asks for: prompts as token ids, options as params. Raises RequestError only."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from niwaki.runtime.api import RequestError, SamplingOptions, SamplingParams, Segment
from niwaki.runtime.api.names import GENERATE, hint
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.options.from_dict import knows_option, options_from_dict, spelling_of
from niwaki.runtime.options.limits import TokenIds


def prompts_of(
    prompt: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    tokenizer: Tokenizer,
    vocab_size: int,
) -> tuple[list[TokenIds], bool]:
    """The prompts, and whether they were given as a list."""
    if (prompt is None) == (input_ids is None):
        raise RequestError("give either a prompt or input_ids")
    if prompt is not None:
        is_list = isinstance(prompt, Sequence) and all(isinstance(text, str) for text in prompt)
        if not is_list:
            raise RequestError("a prompt must be a string or a list of strings; token ids are given as input_ids=")
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        encoded = [tokenizer.encode([Segment(text)], at_start=True) for text in texts]
        return [np.array(ids, dtype=np.int32) for ids in encoded], not isinstance(prompt, str)
    assert input_ids is not None
    try:
        is_batch = len(input_ids) > 0 and not isinstance(input_ids[0], int | np.integer)
        rows = [_as_array(ids) for ids in (input_ids if is_batch else [input_ids])]
    except (TypeError, ValueError, OverflowError, LookupError):
        raise RequestError("input_ids must be a list of whole numbers, or a list of such lists") from None
    return [_token_ids(row, vocab_size) for row in rows], is_batch


def check_options(unknown: Mapping[str, object]) -> None:
    """Raises RequestError: arguments that `generate` does not have. Some are sampling_params."""
    if not unknown:
        return
    name = next(iter(unknown))
    if knows_option(name):
        said = {name: value for name, value in unknown.items() if knows_option(name)}
        raise RequestError(f"{name} is one of the sampling_params, which are a dict: generate(prompt, {said!r})")
    known = "a prompt or input_ids, sampling_params, return_logprob, logprob_start_len, top_logprobs_num and stream"
    raise RequestError(f"generate has no argument {name!r}{hint(name, GENERATE, ()) or f'; it takes {known}'}")


def _as_array(given: object) -> npt.NDArray[np.generic]:
    """Quickly for a list of whole numbers: `np.array` looks at each one twice, for the type of all first."""
    if type(given) is list and given and type(given[0]) is int:  # else they may all be bools, which are refused
        with suppress(struct.error, TypeError):
            return np.frombuffer(struct.pack(f"{len(given)}i", *given), np.int32)
    return np.array(given)


def _token_ids(given: npt.NDArray[np.generic], vocab_size: int) -> TokenIds:
    if given.ndim == 1 and (given.dtype.kind in "iu" or not len(given)):
        ids = given if given.dtype == np.int32 else given.astype(np.int64, copy=False)
        without_sign = np.uint32 if ids.dtype == np.int32 else np.uint64
        if not len(ids) or ids.view(without_sign).max() < vocab_size:  # there below 0 is above all
            return ids.astype(np.int32)
    raise RequestError(f"input_ids must be whole numbers from 0 to {vocab_size - 1}")


def params_of(
    given: Mapping[str, object] | Sequence[Mapping[str, object]] | None,
    count: int,
    asked: SamplingOptions,
    defaults: SamplingOptions,
) -> list[SamplingParams]:
    """Of each of `count` prompts: what is `asked` of all of them, over what is given, over the model's defaults."""
    if given is None or isinstance(given, Mapping):
        given = [given or {}] * count
    if not isinstance(given, Sequence) or not all(isinstance(one, Mapping) for one in given):
        raise RequestError(
            f"sampling_params must be a mapping or a list of them, got {given!r}; write {{'max_new_tokens': 16}}"
        )
    if len(given) != count:
        raise RequestError(f"{len(given)} sampling_params for {count} prompts; give one, or one a prompt")
    known: dict[object, SamplingParams] = {}  # many prompts mostly ask for few kinds of answers
    found = []
    for one in given:
        key = spelling_of(one)
        params = known.get(key)
        if params is None:
            params = asked.over(options_from_dict(one)).over(defaults).resolve()
            if key is not None:
                known[key] = params
        found.append(params)
    return found


def first_position(return_logprob: bool, logprob_start_len: int, prompts: Sequence[TokenIds]) -> int | None:
    """The first whose next-token log-probability is wanted; None where none is."""
    if isinstance(logprob_start_len, bool) or not isinstance(logprob_start_len, int):
        raise RequestError(f"logprob_start_len must be a whole number, got {logprob_start_len!r}")
    shortest = min((len(ids) for ids in prompts), default=0)
    if logprob_start_len > shortest:
        raise RequestError(f"logprob_start_len {logprob_start_len} is behind the end of a prompt of {shortest} tokens")
    return max(0, logprob_start_len - 1) if return_logprob and logprob_start_len >= 0 else None
