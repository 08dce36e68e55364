"""Tokens that leave room for an ending: a token that would be too much for what remains of a text is drawn again.

A mask tells what may follow; whether the text can then still end within its budget is asked of the one token that was
drawn (`Matcher.admits`). One that is refused leaves the mask and the row is drawn once more: the tokens that are left
keep their shares, at the price of one draw each, where looking at every token beforehand took milliseconds a mask. An
automaton knows all that are too much, and they leave with the first one. So it is known, too, whether the budget had a
say: `Sampled.is_shorter`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import torch
from msgspec.structs import replace

from niwaki.runtime.api import NiwakiError
from niwaki.runtime.api.faults import told
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.protocol import MaskRow, Matcher
from niwaki.runtime.sampling.sampler import Sampled, SampleRow, rows_of, sample

MAX_REDRAWS: Final = 24  # then only the shortest ending is left: what the model wants is not to be had
REDRAWN_FROM: Final = 1 << 48  # where the random numbers of the first one stand, far from those of all other tokens


def sample_within(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    texts: Sequence[tuple[Matcher, int] | None],
    end_ids: Collection[int],
) -> list[Sampled | NiwakiError]:
    """`sample`, where each row under a mask knows its text's matcher and how many tokens of it remain. A matcher that
    fails gives its error in the row's place."""
    drawn: list[Sampled | NiwakiError] = [*sample(logits, rows)]
    pending = [(place, row, text) for place, (row, text) in enumerate(zip(rows, texts, strict=True)) if text]
    for attempt in range(1, MAX_REDRAWS + 1):
        refused: list[tuple[int, SampleRow, tuple[Matcher, int]]] = []
        for place, row, text in pending:
            found = drawn[place]
            try:
                if isinstance(found, Sampled) and not text[0].admits(found.token_id, text[1]):
                    is_last = attempt == MAX_REDRAWS
                    mask = _ending(row.mask, text, end_ids) if is_last else _without(row.mask, found.token_id)
                    if attempt == 1:
                        mask = _within(mask, text)
                    position = rows[place].position + attempt * REDRAWN_FROM
                    refused.append((place, replace(row.under(mask), position=position), text))
            except Exception as error:
                drawn[place] = told(error)
        if not refused:
            break
        again = sample(rows_of(logits, [place for place, _, _ in refused]), [row for _, row, _ in refused])
        for (place, _, _), found in zip(refused, again, strict=True):
            drawn[place] = replace(found, is_shorter=True) if isinstance(found, Sampled) else found
        pending = refused
    return drawn


def _within(mask: Words, text: tuple[Matcher, int]) -> Words:
    """Of the mask what fits, where that is known of all at once."""
    matcher, remaining = text
    row = np.zeros_like(mask)
    matcher.fill_mask_within(row, remaining)
    return row & mask


def _without(mask: MaskRow | None, token_id: int) -> Words:
    assert mask is not None, "only under a mask is a token refused"
    words = mask.view(np.uint32).copy()
    words[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    return words


def _ending(mask: MaskRow | None, text: tuple[Matcher, int], end_ids: Collection[int]) -> Words:
    """Of the mask what the shortest ending begins with: a token, or the end tokens where the text may end already."""
    assert mask is not None, "only under a mask is a token refused"
    matcher, remaining = text
    ending = matcher.shortest_ending(remaining)
    row = np.zeros_like(mask.view(np.uint32))
    for token_id in ending[:1] if ending else end_ids:
        row[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return row & mask.view(np.uint32)
