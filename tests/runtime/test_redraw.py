"""A token that would be too much for what remains of a text is drawn again: the others keep their shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from niwaki.runtime.api import ConstraintError, SamplingParams
from niwaki.runtime.constraints.protocol import Matcher
from niwaki.runtime.sampling.redraw import MAX_REDRAWS, sample_within
from niwaki.runtime.sampling.sampler import Sampled, SampleRow

SIZE = 64
END = SIZE - 1


@dataclass
class Text:
    """A text near its end: what fits there, and what completes it."""

    admitted: frozenset[int]
    ending: tuple[int, ...] = ()
    num_asked: int = 0

    def admits(self, token_id: int, remaining: int) -> bool:
        self.num_asked += 1
        if remaining == 0:
            raise ConstraintError("it failed")
        return token_id in self.admitted or token_id == END

    def fill_mask_within(self, row: npt.NDArray[np.uint32], remaining: int) -> None:
        row[:] = 0xFFFFFFFF  # as a grammar: it does not know

    def shortest_ending(self, budget: int) -> tuple[int, ...]:
        return self.ending


def drawn(
    logits: torch.Tensor, texts: list[tuple[Text, int] | None], position: int = 0, heat: float = 1.0
) -> list[int]:
    params = SamplingParams(temperature=heat)
    mask = np.full(SIZE // 32, 0xFFFFFFFF, np.uint32)
    rows = [SampleRow(params, 7, position, None if text is None else mask) for text in texts]
    found = sample_within(logits, rows, cast("list[tuple[Matcher, int] | None]", texts), [END])
    assert mask.tolist() == [0xFFFFFFFF] * 2, "a mask may be shared"
    return [one.token_id if isinstance(one, Sampled) else -1 for one in found]


def test_what_is_admitted_is_drawn_in_its_shares() -> None:
    logits = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(1))
    admitted = frozenset(range(0, END, 2))
    counts = np.zeros(SIZE)
    for position in range(4000):
        (token,) = drawn(logits, [(Text(admitted), 5)], position)
        counts[token] += 1
    wanted = torch.softmax(logits[0], 0).numpy().copy()
    wanted[[token for token in range(END) if token not in admitted]] = 0
    wanted /= wanted.sum()
    assert not counts[wanted == 0].any()
    assert np.abs(counts / 4000 - wanted).max() < 0.02  # four standard deviations


def test_rows_without_a_budget_and_tokens_that_fit_are_drawn_once() -> None:
    logits = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(2))
    fits, tight = Text(frozenset(range(SIZE))), Text(frozenset({3}))
    one, other, third = drawn(logits, [None, (fits, 5), (tight, 5)])
    assert [one, other] == drawn(logits[:2], [None, None])
    assert (third in {3, END}, fits.num_asked) == (True, 1)


def test_a_model_that_wants_nothing_that_fits_gets_the_shortest_ending() -> None:
    logits = torch.arange(SIZE, 0, -1, dtype=torch.float32).reshape(1, SIZE)
    ending = Text(frozenset({50}), ending=(50, 3))
    assert drawn(logits, [(ending, 5)], heat=0.0) == [50]
    assert ending.num_asked <= MAX_REDRAWS
    assert drawn(logits, [(Text(frozenset()), 5)], heat=0.0) == [END]


def test_a_matcher_that_fails_fails_its_own_row() -> None:
    logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(3))
    good = Text(frozenset(range(SIZE)))
    assert drawn(logits, [(Text(frozenset()), 0), (good, 5)]) == [-1, *drawn(logits[1:], [(good, 5)])]


def test_who_was_drawn_again_is_told_and_an_automatons_mask_is_exact_then() -> None:
    logits = torch.arange(SIZE, 0, -1, dtype=torch.float32).reshape(1, SIZE)
    tight = Text(frozenset({50}))

    def fits(row: npt.NDArray[np.uint32], remaining: int) -> None:
        row[:] = 0
        row[50 >> 5] = 1 << (50 & 31)

    tight.fill_mask_within = fits  # type: ignore[method-assign]  # as an automaton: it knows all that fit
    mask = np.full(SIZE // 32, 0xFFFFFFFF, np.uint32)
    rows = [SampleRow(SamplingParams(temperature=0.0), 7, 0, mask)] * 2
    texts = cast("list[tuple[Matcher, int] | None]", [(tight, 5), (Text(frozenset(range(SIZE))), 5)])
    found = sample_within(logits.repeat(2, 1), rows, texts, [END])
    assert found == [Sampled(50, is_shorter=True), Sampled(0)]
    assert tight.num_asked == 2
