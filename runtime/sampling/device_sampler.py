"""Sampling where the logits are: the rules of runtime/sampling/sampler.py, carried out by the kernels of a GPU.

What a batch of rows asks for goes up in a few arrays; token ids come back, and log-probabilities where they are wanted.
The logits stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from niwaki.kernels.sample import Doubles, Longs, Words
from niwaki.kernels.transfer import on_device
from niwaki.kernels.triton.penalties import Changes, change_logits
from niwaki.kernels.triton.sample import NO_TOKEN, NOT_FINITE, Draws, sample_rows
from niwaki.runtime.api import GenerationError
from niwaki.runtime.api.likeliest import Packed
from niwaki.runtime.sampling.sampler import (
    NO_ROWS,
    Ids,
    PlainDraws,
    Sampled,
    SampleRow,
    changes_of,
    checked_mask,
    not_finite,
    together,
)

Int32s = npt.NDArray[np.int32]


def sample_on_device(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled | GenerationError]:
    """`sample` of sampler.py for logits on a device: the same tokens for the same seeds, unless a sum in another order
    rounds across the edge between two tokens. The logits are not changed."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or len(logits) != len(rows):
        raise ValueError(f"logits must be float32 [{len(rows)}, vocab], got {logits.dtype} {tuple(logits.shape)}")
    if not rows:
        return []
    vocab = logits.shape[1]
    errors: dict[int, GenerationError] = {}
    draws = _draws(rows, vocab, logits.device, errors)
    changes = _changes(rows, vocab, logits.device, errors)
    drawn_from = logits
    if changes is not None:
        drawn_from = logits.clone()
        change_logits(drawn_from, changes)
    tokens = sample_rows(drawn_from, draws)
    logprobs = _logprobs(logits, tokens, rows)
    results: list[Sampled | GenerationError] = []
    for index, token in enumerate(tokens.tolist()):
        if index in errors:
            results.append(errors[index])
        elif token == NO_TOKEN:
            results.append(GenerationError("no token is allowed here: the mask and the forbidden tokens leave none"))
        elif token == NOT_FINITE:
            results.append(GenerationError("the logits of this row are not finite: the model's output is not usable"))
        else:
            results.append(Sampled(token, *logprobs.get(index, ())))
    return results


class DeviceDrawing:
    """`ahead.Drawing` on a device: what the rows ask for lies there, and their positions move on there."""

    def __init__(self, draws: PlainDraws, vocab: int, device: torch.device) -> None:
        options, integers = draws.arrays
        scale = np.divide(1.0, options[:, 0], out=np.zeros(len(options)), where=options[:, 0] > 0.0)
        floats = on_device(np.stack((scale, options[:, 1], options[:, 2])), device)
        numbers = on_device(np.ascontiguousarray(integers.T), device)
        self._draws = Draws(
            scale=floats[0].float(),
            top_p=floats[1],
            min_p=floats[2],
            top_k=numbers[0],
            seed=numbers[1],
            position=numbers[2],
            mask_of=torch.full((len(options),), -1, dtype=torch.int32, device=device),
            masks=torch.zeros((1, (vocab + 31) // 32), dtype=torch.int32, device=device),
        )

    def draw(self, logits: torch.Tensor, masked: Longs = NO_ROWS, masks: Sequence[Words] = ()) -> torch.Tensor:
        draws = self._draws
        if len(masked):
            words, places = together(masks, logits.shape[1])
            mask_of = np.full(len(logits), -1, np.int32)
            mask_of[masked] = places
            lying = [on_device(array, logits.device) for array in (mask_of, words.view(np.int32))]
            draws = replace(draws, mask_of=lying[0], masks=lying[1])
        tokens = sample_rows(logits, draws)
        self._draws.position.add_(1)
        return tokens


def _draws(rows: Sequence[SampleRow], vocab: int, device: torch.device, errors: dict[int, GenerationError]) -> Draws:
    floats = np.empty((3, len(rows)), np.float64)  # 1 / temperature, top_p, min_p
    integers = np.empty((3, len(rows)), np.int64)  # top_k, seed, position
    mask_of = np.full(len(rows), -1, np.int32)
    masks: list[npt.NDArray[np.uint32]] = []
    for index, row in enumerate(rows):
        params = row.params
        scale = 0.0 if params.is_greedy else 1.0 / params.temperature
        floats[:, index] = scale, params.top_p, params.min_p
        integers[:, index] = params.top_k if params.top_k > 0 else vocab, row.seed, row.position
        if row.mask is not None:
            try:
                masks.append(checked_mask(row.mask, vocab))
                mask_of[index] = len(masks) - 1
            except GenerationError as error:
                errors[index] = error
    stacked = np.stack(masks) if masks else np.zeros((1, (vocab + 31) // 32), np.uint32)
    # Not waiting: the draw shall stand behind the step that is still computed, not come when that is over.
    options, numbers = on_device(floats, device), on_device(integers, device)
    return Draws(
        scale=options[0].float(),
        top_p=options[1],
        min_p=options[2],
        top_k=numbers[0],
        seed=numbers[1],
        position=numbers[2],
        mask_of=on_device(mask_of, device),
        masks=on_device(stacked.view(np.int32), device),
    )


def _changes(
    rows: Sequence[SampleRow], vocab: int, device: torch.device, errors: dict[int, GenerationError]
) -> Changes | None:
    """What rows add to their logits; None where no row does."""
    penalties = np.tile(np.array([1.0, 0.0, 0.0], np.float32), (len(rows), 1))
    bounds = np.zeros(len(rows) + 1, np.int32)
    columns: list[tuple[Int32s, Int32s, Int32s, npt.NDArray[np.float32]]] = []
    for index, row in enumerate(rows):
        bounds[index + 1] = bounds[index]
        try:
            found = changes_of(row, vocab)
        except GenerationError as error:
            errors[index] = error
            continue
        if found is not None:
            params = row.params
            penalties[index] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            bounds[index + 1] += len(found[0])
            columns.append(found)
    if not columns:
        return None
    token, count, is_seen, bias = (on_device(np.concatenate(column), device) for column in zip(*columns, strict=True))
    return Changes(on_device(bounds, device), token, count, is_seen, bias, on_device(penalties, device))


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SampleRow]) -> dict[int, tuple[float, Packed]]:
    """For the rows that ask: the log-probability of the token, and the likeliest tokens with theirs."""
    asking = [i for i, row in enumerate(rows) if row.params.return_logprob or row.params.top_logprobs_num]
    if not asking:
        return {}
    counts = [rows[i].params.top_logprobs_num for i in asking]
    index = on_device(np.array(asking, np.int64), logits.device)
    _, own, ids, values = _told(logits[index], tokens[index].clamp(min=0), max(counts))
    return {
        index: (own[place], _packed(ids[place, :count], values[place, :count]))
        for place, (index, count) in enumerate(zip(asking, counts, strict=True))
    }


def token_logprobs_on_device(logits: torch.Tensor, target_ids: Ids, top_n: int) -> list[Sampled | GenerationError]:
    """`token_logprobs` of sampler.py for logits on a device: of a vocabulary a few numbers come to the host."""
    targets = np.asarray(target_ids, np.int64)
    highest, own, ids, values = _told(logits, on_device(targets, logits.device), top_n)
    return [
        Sampled(token, own[place], _packed(ids[place], values[place])) if math.isfinite(top) else not_finite(top)
        for place, (token, top) in enumerate(zip(targets.tolist(), highest.tolist(), strict=True))
    ]


def drawn_on_device(draws: PlainDraws, logits: torch.Tensor) -> Longs | None:
    """`draws.draw` for logits on a device: a token for each row. None where one cannot be drawn so."""
    vocab = logits.shape[1]
    tokens: Longs = DeviceDrawing(draws, vocab, logits.device).draw(logits).cpu().numpy()
    return None if (tokens < 0).any() else tokens


def _told(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[Doubles, list[float], Longs, Doubles]:
    """Of each row the highest logit, the log-probability of its token, and the `most` likeliest tokens with theirs."""
    most = min(most, logits.shape[1])
    total = logits.logsumexp(-1, keepdim=True)
    values, ids = logits.topk(most, -1)
    columns = logits.amax(-1, keepdim=True), logits.gather(1, tokens[:, None]) - total, values - total, ids
    told: Doubles = torch.cat([column.double() for column in columns], 1).cpu().numpy()  # one copy is waited for
    return told[:, 0], told[:, 1].tolist(), told[:, 2 + most :].astype(np.int64), told[:, 2 : 2 + most]


def _packed(ids: Longs, values: Doubles) -> Packed:
    return Packed(ids.astype(np.int32).tobytes(), values.tobytes())
