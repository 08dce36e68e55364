"""From logits to tokens, row by row: each row's result depends on its own logits and parameters, never on its mates.

One argmax serves a batch of greedy rows; every other row is drawn by one compiled kernel call for the whole batch.
Random numbers are a function of (seed, position), so there is no generator whose state could leak between rows.

The order of the steps: repetition penalty, frequency and presence penalties, logit_bias, forbidden tokens, mask,
temperature, top-k, top-p (of what top-k left), min-p. Log-probabilities are those of the model itself: temperature 1,
before penalties and mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from niwaki.kernels.sample import (
    NO_ROW,
    NO_TOKEN,
    NOT_FINITE,
    Doubles,
    Floats,
    Ints,
    Longs,
    Words,
    draw_rows,
    likeliest,
    penalise,
)
from niwaki.kernels.transfer import on_device
from niwaki.runtime.api import GenerationError, SamplingParams
from niwaki.runtime.api.likeliest import NOTHING, Packed
from niwaki.runtime.constraints.protocol import MaskRow

Ids = Sequence[int] | npt.NDArray[np.integer]
NO_ROWS: Final = np.empty(0, np.int64)
WORD: Final = np.dtype(np.uint32)
NO_WORDS: Final = np.empty((0, 0), np.uint32)
NOTHING_ADJUSTED: Final = np.empty((0, 0), np.float32)


class SampleRow(msgspec.Struct, frozen=True, gc=False):  # as the plan's rows: one for each token
    """How one row of logits is sampled."""

    params: SamplingParams
    seed: int  # 0 <= seed < 2**63
    position: int  # index of the token among those generated: the random number is a function of (seed, position)
    mask: MaskRow | None = None  # [ceil(vocab / 32)]; bit t % 32 of word t // 32
    prompt_ids: Ids | None = None  # for the repetition penalty; needed only where it is on
    output_ids: Ids | None = None  # for all penalties; needed only where one is on
    forbid: Ids = ()  # such as end tokens while min_tokens is not reached

    def under(self, mask: MaskRow) -> SampleRow:
        """With this mask. Where it leaves nothing but forbidden tokens they are allowed: its text can only end."""
        if not len(self.forbid):
            return replace(self, mask=mask)
        words = mask.view(np.uint32)
        in_range = {int(token) for token in self.forbid if 0 <= token < 32 * len(words)}
        left_of_them = sum(int(words[token >> 5]) >> (token & 31) & 1 for token in in_range)
        is_all = left_of_them == int(np.bitwise_count(words).sum())
        return replace(self, mask=mask, forbid=() if is_all else self.forbid)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """A token; where asked for, its log-probability, the likeliest tokens with theirs, best first, and how many tokens
    a mask allowed. `is_shorter`: another was drawn first, behind which the text could not have ended within its
    budget."""

    token_id: int
    logprob: float | None = None
    top: Packed = NOTHING
    allowed: int | None = None
    is_shorter: bool = False


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled | GenerationError]:
    """One token for each row of logits [rows, vocab] float32. The logits are not changed.

    A row that cannot be sampled (NaN or infinite logits, no token left) gives a GenerationError in its place; the
    other rows are as they would be without it.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or len(logits) != len(rows):
        raise ValueError(f"logits must be float32 [{len(rows)}, vocab], got {logits.dtype} {tuple(logits.shape)}")
    if not rows:
        return []
    if logits.device.type == "cuda" and find_spec("triton") is not None:
        from niwaki.runtime.sampling.device_sampler import sample_on_device  # loads Triton, which CPUs do without

        return sample_on_device(logits, rows)
    values = _on_host(logits)
    best = np.argmax(values, axis=1)  # the first NaN, where there is one
    highest = values[np.arange(len(rows)), best]
    is_finite, tokens_at = np.isfinite(highest).tolist(), best.tolist()
    results: list[Sampled | GenerationError] = []
    drawn: list[int] = []
    for index, row in enumerate(rows):
        if not is_finite[index]:
            results.append(not_finite(float(highest[index])))
            continue
        if not (row.params.is_greedy and _takes_best(row, tokens_at[index], values.shape[1])):
            drawn.append(index)
        results.append(Sampled(tokens_at[index]))
    if drawn:
        tokens = _draw(values, best, drawn, rows)
        for index, token in zip(drawn, tokens, strict=True):
            results[index] = Sampled(token) if isinstance(token, int) else token
    told: list[int] = []
    chosen: list[int] = []
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        if (row.params.return_logprob or row.params.top_logprobs_num) and isinstance(result, Sampled):
            told.append(index)
            chosen.append(result.token_id)
    if told:
        counts = [rows[index].params.top_logprobs_num for index in told]
        for index, found in zip(told, _with_logprobs(values, highest, told, chosen, counts), strict=True):
            results[index] = found
    return results


def token_logprobs(logits: torch.Tensor, target_ids: Ids, top_n: int = 0) -> list[Sampled | GenerationError]:
    """The log-probability of target_ids[i] under logits[i] [tokens, vocab], and the top_n likeliest tokens there. A row
    that is not finite gives a GenerationError in its place."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or len(logits) != len(target_ids):
        raise ValueError(f"logits must be float32 [{len(target_ids)}, vocab], got {logits.dtype} {tuple(logits.shape)}")
    if logits.device.type == "cuda" and find_spec("triton") is not None:
        from niwaki.runtime.sampling.device_sampler import token_logprobs_on_device  # as above

        return token_logprobs_on_device(logits, target_ids, top_n)
    values = _on_host(logits)
    highest = values[np.arange(len(values)), values.argmax(axis=1)]  # the first NaN, where there is one
    is_finite = np.isfinite(highest)
    rows = np.flatnonzero(is_finite)
    read = iter(_with_logprobs(values, highest, rows, np.asarray(target_ids)[rows], [top_n] * len(rows)))
    return [
        next(read) if is_fine else not_finite(value)
        for is_fine, value in zip(is_finite.tolist(), highest.tolist(), strict=True)
    ]


class PlainDraws:
    """Rows whose logits are sampled as they are (`is_plain`), step after step: what they ask for, as arrays."""

    def __init__(self, options: Doubles, integers: Longs) -> None:
        self._options = options
        self._integers = integers
        self.all_greedy = not options[:, 0].any()
        self._places = np.arange(len(options))

    @classmethod
    def of(cls, rows: Sequence[tuple[SamplingParams, int, int]], vocab: int) -> PlainDraws:
        """Of each row its parameters, seed and first position."""
        numbers = [_numbers(*row, vocab) for row in rows]
        return cls(
            np.array([options for options, _ in numbers], np.float64).reshape(-1, 3),
            np.array([integers for _, integers in numbers], np.int64).reshape(-1, 3),
        )

    def ahead(self, counts: Longs) -> PlainDraws:
        """Of each row so many tokens, the next one and those behind it, a row each."""
        firsts = np.cumsum(counts) - counts
        made = self.of_rows(np.repeat(self._places, counts))
        made._integers[:, 2] += np.arange(len(made._places)) - np.repeat(firsts, counts)
        return made

    def of_rows(self, rows: Longs) -> PlainDraws:
        return PlainDraws(self._options[rows], self._integers[rows])

    def advance(self) -> None:
        """To the next position."""
        self._integers[:, 2] += 1

    def move_to(self, positions: Sequence[int]) -> None:
        self._integers[:, 2] = positions

    @property
    def arrays(self) -> tuple[Doubles, Longs]:
        """[rows, 3]: temperature (0: greedy), top_p and min_p; and top_k, seed and the next position."""
        return self._options, self._integers

    def draw(self, logits: torch.Tensor) -> Longs | None:
        """What `sample` draws from these logits, a token for each row. None where it takes `sample` to do it."""
        best = self.best(logits)
        return None if best is None else self.draw_under(logits, best, NO_ROWS, ())

    def best(self, logits: torch.Tensor) -> Longs | None:
        """Where each row is highest. None where the logits are on a device, or one of these is not finite."""
        if not logits.is_cpu:
            return None
        values = logits.numpy()
        best: Longs = values.argmax(axis=1)  # at the first NaN, where there is one
        return best if np.isfinite(values[self._places, best]).all() else None

    def draw_under(self, logits: torch.Tensor, best: Longs, masked: Longs, masks: Sequence[MaskRow]) -> Longs:
        """`draw`, where `best` is known, the `masked` rows under their masks; a number below 0 where none is left."""
        if self.all_greedy and not masks:
            return best
        values = _on_host(logits)
        words, places = together(masks, values.shape[1])
        sources = np.full((len(best), 3), NO_ROW, np.int64)
        sources[:, 0] = np.arange(len(best))
        sources[masked, 2] = places
        return draw_rows(values, NOTHING_ADJUSTED, words, best, sources, self._options, self._integers)


def draw_all(draws: PlainDraws, logits: torch.Tensor) -> Longs | None:
    """`draws.draw`, wherever the logits are."""
    if logits.device.type == "cpu":
        return draws.draw(logits)
    from niwaki.runtime.sampling.device_sampler import drawn_on_device  # loads Triton, which CPUs do without

    return drawn_on_device(draws, logits)


def together(masks: Sequence[MaskRow], vocab: int) -> tuple[Words, list[int]]:
    """The masks of a draw over `vocab` tokens, [masks, ceil(vocab / 32)], and where each of these stands there: rows of
    one state share theirs, which is taken once. Raises GenerationError where one is for another number of tokens."""
    distinct = {id(mask): mask for mask in masks}
    if not distinct:
        return NO_WORDS, []
    rows = list(distinct.values())
    if {*map(len, rows)} != {(vocab + 31) // 32} or any(row.dtype is not WORD for row in rows):
        rows = [checked_mask(row, vocab) for row in rows]
    words = np.concatenate(rows).view(WORD).reshape(len(rows), -1)
    places = dict(zip(distinct, range(len(rows)), strict=True))
    return words, [places[key] for key in map(id, masks)] if len(rows) > 1 else [0] * len(masks)


def _on_host(logits: torch.Tensor) -> Floats:
    return cast(Floats, logits.detach().cpu().contiguous().numpy())


def rows_of(logits: torch.Tensor, rows: Sequence[int] | Longs) -> torch.Tensor:
    """These rows, ascending, each once; a view where they lie in a row. On the CPU not by torch, which divides them
    among threads and waits for a core that others keep busy: 8 ms instead of 6 us."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1]
    if logits.device.type == "cpu":
        return torch.from_numpy(_on_host(logits)[rows])
    return logits[on_device(np.asarray(rows, np.int64), logits.device)]


def not_finite(highest: float) -> GenerationError:
    if highest == -np.inf:
        return GenerationError("every logit of this row is -inf: there is no token to sample")
    return GenerationError(f"the logits of this row hold {highest}: the model's output is not usable")


def _takes_best(row: SampleRow, best: int, vocab: int) -> bool:
    """Whether the likeliest token of all is the likeliest of those that may be drawn, as far as is seen at once."""
    if len(row.forbid) or not is_plain(row.params):
        return False
    mask = row.mask
    fits = mask is None or (mask.shape == ((vocab + 31) // 32,) and mask.dtype.itemsize == 4)  # else it is an error
    return fits and (mask is None or allows(mask, best))


def allows(mask: MaskRow, token_id: int) -> bool:
    """Whether the token is in the mask."""
    return bool(int(mask[token_id >> 5]) >> (token_id & 31) & 1)


def is_plain(params: SamplingParams) -> bool:
    """Whether these parameters change no logit."""
    return not params.logit_bias and not _is_penalised(params)


def _numbers(
    params: SamplingParams, seed: int, position: int, vocab: int
) -> tuple[tuple[float, float, float], tuple[int, int, int]]:
    """A row of `draw_rows`' options and integers."""
    temperature = 0.0 if params.is_greedy else params.temperature
    top_k = params.top_k if params.top_k > 0 else vocab
    return (temperature, params.top_p, params.min_p), (top_k, seed, position)


def _is_penalised(params: SamplingParams) -> bool:
    return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0 or params.repetition_penalty != 1.0


def _draw(
    values: Floats, best: Longs, indexes: Sequence[int], rows: Sequence[SampleRow]
) -> list[int | GenerationError]:
    """Tokens for the rows that one argmax does not settle."""
    vocab = values.shape[1]
    errors: dict[int, GenerationError] = {}
    adjusted: list[Floats] = []
    masked: list[tuple[int, MaskRow]] = []
    sources = np.full((len(indexes), 3), NO_ROW, np.int64)  # row of logits, of adjusted logits, of masks
    options = np.empty((len(indexes), 3), np.float64)  # temperature, top_p, min_p
    integers = np.empty((len(indexes), 3), np.int64)  # top_k, seed, position
    for place, index in enumerate(indexes):
        row = rows[index]
        params = row.params
        sources[place, 0] = index
        options[place], integers[place] = _numbers(params, row.seed, row.position, vocab)
        try:
            if row.mask is not None:
                checked_mask(row.mask, vocab)
                masked.append((place, row.mask))
            if len(row.forbid) or params.logit_bias or _is_penalised(params):
                changed = _adjusted(values[index], row)
                sources[place, 1] = len(adjusted)
                adjusted.append(changed)
        except GenerationError as error:  # its row is drawn without what failed, and the token thrown away
            errors[place] = error
    words, places = together([mask for _, mask in masked], vocab)
    sources[[place for place, _ in masked], 2] = places
    tokens = draw_rows(
        values,
        np.stack(adjusted) if adjusted else NOTHING_ADJUSTED,
        words,
        best,
        sources,
        options,
        integers,
    )
    drawn: list[int | GenerationError] = []
    for place, token in enumerate(tokens.tolist()):
        if place in errors:
            drawn.append(errors[place])
        elif token == NO_TOKEN:
            drawn.append(GenerationError("no token is allowed here: the mask and the forbidden tokens leave none"))
        elif token == NOT_FINITE:
            drawn.append(GenerationError("the logits of this row are not finite after penalties and bias"))
        else:
            drawn.append(token)
    return drawn


def checked_mask(mask: MaskRow, vocab: int) -> Words:
    """The words of a mask for `vocab` tokens. Raises GenerationError where it is for another number."""
    if mask.shape != ((vocab + 31) // 32,) or mask.dtype.itemsize != 4:
        raise GenerationError(f"a mask of {mask.dtype} {mask.shape} does not fit a vocabulary of {vocab}")
    return mask.view(np.uint32)


def _adjusted(logits: Floats, row: SampleRow) -> Floats:
    """A copy with penalties, bias and forbidden tokens applied."""
    params, vocab = row.params, len(logits)
    changed = logits.copy()
    if _is_penalised(params):
        penalise(
            changed,
            _ids(row.prompt_ids, vocab),
            _ids(row.output_ids, vocab),
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab:
            raise GenerationError(f"logit_bias names token {token}; the vocabulary has {vocab}")
        changed[token] += np.float32(bias)
    changed[_ids(row.forbid, vocab)] = -np.inf
    return changed


def changes_of(row: SampleRow, vocab: int) -> tuple[Ints, Ints, Ints, Floats] | None:
    """What `_adjusted` changes, as a list for a device; None where it changes nothing.

    The tokens, each once, all within the vocabulary; how often each stands in the output; 1 where it was seen, in the
    prompt or the output; what is added, -inf for a forbidden one.
    """
    params = row.params
    if _is_penalised(params):
        prompt, output = _ids(row.prompt_ids, vocab), _ids(row.output_ids, vocab)
    else:
        prompt = output = _ids(None, vocab)
    for token, _ in params.logit_bias:
        if not 0 <= token < vocab:
            raise GenerationError(f"logit_bias names token {token}; the vocabulary has {vocab}")
    biased = np.array([token for token, _ in params.logit_bias], np.int64)
    forbidden = _ids(row.forbid, vocab)
    tokens = np.unique(np.concatenate((prompt, output, biased, forbidden)))
    if not len(tokens):
        return None
    count = np.zeros(len(tokens), np.int32)
    np.add.at(count, np.searchsorted(tokens, output), 1)
    is_seen = np.isin(tokens, np.concatenate((prompt, output))).astype(np.int32)
    bias = np.zeros(len(tokens), np.float32)
    np.add.at(bias, np.searchsorted(tokens, biased), np.array([b for _, b in params.logit_bias], np.float32))
    bias[np.searchsorted(tokens, forbidden)] = -np.inf
    return tokens.astype(np.int32), count, is_seen, bias


def _ids(ids: Ids | None, vocab: int) -> Longs:
    """As an array. Ids outside the vocabulary have no logit, so they are left out."""
    array = np.asarray(() if ids is None else ids, np.int64)
    return array[(array >= 0) & (array < vocab)]


def _with_logprobs(values: Floats, highest: Floats, rows: Ids, tokens: Ids, counts: Sequence[int]) -> list[Sampled]:
    """The tokens that were drawn from these rows, of which the `highest` values of all are finite, with their
    log-probabilities, and of each so many best ones, equal ones by id."""
    most = min(max(counts, default=0), values.shape[1])
    at = np.asarray(rows, np.int64)
    ids, logprobs, own = likeliest(values, at, highest[at], np.asarray(tokens, np.int64), most)
    return [
        Sampled(int(token), logprob, Packed(ids[place, :count].tobytes(), logprobs[place, :count].tobytes()))
        for place, (token, logprob, count) in enumerate(zip(tokens, own.tolist(), counts, strict=True))
    ]
