"""Those of a steady batch that are drawn under masks: what their matchers were asked in a step, and told.

Owned by `decoding.Decoding`. A *place* is an index into the batch, a *row* one into those here. Where a token is known
to follow, from other texts, the matcher is told without a mask; the masks of the others are filled beside the model.
Where that holds for all of a step they *walk* from then on: their steps are looked up in one call, and the matchers are
told of many at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from niwaki.kernels.sample import NO_TOKEN
from niwaki.kernels.segments import Int64s
from niwaki.runtime.api import NiwakiError
from niwaki.runtime.api.faults import told
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.protocol import ANY_LENGTH, FREE, REFUSED, Followed, Matcher
from niwaki.runtime.constraints.walks import Standing, Walk
from niwaki.runtime.sampling.sampler import NO_ROWS, PlainDraws, allows

EVERYWHERE = slice(None)
MIN_TEXTS = 4  # of a constraint on average, for a walk to be quicker than its texts one by one
Filled = Mapping[int, Words | NiwakiError]  # the masks of this step that were asked for, by row


class Led:
    """`left`, everywhere: how many tokens each may still write, the one that is drawn included."""

    def __init__(self, plain: Int64s, matchers: Sequence[Matcher | None], num_places: int, vocab_size: int) -> None:
        """Of the places `plain`, those that have a matcher."""
        rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
        self.places = plain[rows]
        self.plain_rows = np.array(rows, np.int64)  # where they stand in `plain`
        is_all = len(rows) == num_places  # a view, then, instead of a copy
        self.at = EVERYWHERE if is_all else self.places
        self.at_plain = EVERYWHERE if is_all else self.plain_rows
        self.matchers = [matcher for matcher in matchers if matcher is not None]
        self._steps = [matcher.step for matcher in self.matchers]
        self._num_words = (vocab_size + 31) // 32
        self._walks: list[tuple[Walk, Sequence[int]]] = []  # while all of them walk, each with its rows
        self.ask_all()

    def ask_all(self) -> None:
        """Nothing is known of the matchers' next masks."""
        self._unsure = list(range(len(self.matchers)))  # those whose mask may not be at hand
        self._asked = self._unsure  # those whose masks this step has asked for
        self._is_told = [False] * len(self.matchers)  # those whose matchers know the token of this step
        self._failed: dict[int, NiwakiError] = {}  # those whose matchers have, in this step

    # -- masks --------------------------------------------------------------------------------------------------------

    def ask(self) -> list[int]:
        """A step begins: the rows whose masks it needs to be filled."""
        self._asked, self._is_told, self._failed = self._unsure, [False] * len(self.matchers), {}
        return self._asked

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    def filled(self, masks: Sequence[Words | NiwakiError]) -> Filled:
        """`masks`: those of `ask`, in order, and maybe more."""
        return dict(zip(self._asked, masks, strict=False))

    def going(self) -> list[int]:
        """The rows whose matchers have not been told this step's token."""
        return [row for row, is_told in enumerate(self._is_told) if not is_told]

    def mask(self, row: int, filled: Filled) -> Words | NiwakiError:
        """Of the token that this step draws: as it was filled, or known."""
        if (mask := self._failed.get(row) or filled.get(row)) is not None:
            return mask
        try:
            if (known := self.matchers[row].known_mask(ANY_LENGTH)) is not None:
                return known
            made = np.zeros(self._num_words, np.uint32)  # forgotten meanwhile, to save memory
            self.matchers[row].fill_mask(made)
        except Exception as error:
            return told(error)
        return made

    def masks(self, filled: Filled) -> Iterator[tuple[int, Words | NiwakiError]]:
        """Those of the rows of `going`, each with its place."""
        for row in self.going():
            yield int(self.places[row]), self.mask(row, filled)

    def all_masks(self, masks: Sequence[Words | NiwakiError]) -> list[Words] | None:
        """One for each row; None where one is an error."""
        filled = self.filled(masks)
        found = [self.mask(row, filled) for row in range(len(self.matchers))]
        words = [mask for mask in found if not isinstance(mask, NiwakiError)]
        return words if len(words) == len(found) else None

    def all_known(self) -> bool:
        """Whether there are some, and the masks of all are at hand."""
        return bool(self.matchers) and all(one.known_mask(ANY_LENGTH) is not None for one in self.matchers)

    def drawn_under(self, draws: PlainDraws, logits: torch.Tensor, best: Int64s, filled: Filled) -> Int64s:
        """A token for each row of the batch that is drawn plainly, those of matchers that are told none yet under their
        masks. `best`: of `logits`."""
        going = self.going()
        if not going:
            return draws.draw_under(logits, best, NO_ROWS, ())
        found = [(self.plain_rows[row], self.mask(row, filled)) for row in going]
        under = [(row, mask) for row, mask in found if not isinstance(mask, NiwakiError)]
        if draws.all_greedy:  # what is likeliest of all is so under a mask that allows it
            likeliest = best.tolist()
            under = [(row, mask) for row, mask in under if not allows(mask, likeliest[row])]
        drawn = draws.draw_under(logits, best, np.array([row for row, _ in under], np.int64), [m for _, m in under])
        drawn[[row for row, mask in found if isinstance(mask, NiwakiError)]] = NO_TOKEN
        return drawn

    def drawn_beside(self, draws: PlainDraws, logits: torch.Tensor, best: Int64s) -> Int64s:
        """`drawn_under`, with no token for those that it would draw under their masks."""
        drawn = draws.draw_under(logits, best, NO_ROWS, ()).copy()
        drawn[self.plain_rows[self.going()]] = NO_TOKEN
        return drawn

    # -- walking ------------------------------------------------------------------------------------------------------

    @property
    def is_walking(self) -> bool:
        return bool(self._walks)

    def begin_walk(self) -> None:
        """Where the masks of all are known: from here on `knows` and `go`, until `end_walk`, as far as all can."""
        standings = [matcher.standing() for matcher in self.matchers]
        together: dict[int, tuple[list[Standing], list[int]]] = {}
        for row, standing in enumerate(standings):
            if standing is None:
                return
            of_one, rows = together.setdefault(id(standing.table), ([], []))
            of_one.append(standing)
            rows.append(row)
        if len(together) == 1 or MIN_TEXTS * len(together) <= len(standings):
            self._walks = [(Walk(of_one, self.places[rows]), rows) for of_one, rows in together.values()]

    def knows(self, token_ids: Int64s, last: Int64s, starts: Int64s) -> bool:
        """Whether all know this step's tokens, of the whole batch; see `Walk.knows`."""
        is_known = True
        for walk, _ in self._walks:
            is_known = is_known and walk.knows(token_ids, last, starts)
        return is_known

    def go(self) -> None:
        """Take the step that all know."""
        for walk, _ in self._walks:
            walk.go()

    def last_walked(
        self, draws: PlainDraws, logits: torch.Tensor, may_end: npt.NDArray[np.bool_], last: Int64s, starts: Int64s
    ) -> Int64s | None:
        """End the walk. Where this step is one of it that somebody must look at, since a budget ends, it is its last:
        the tokens, of which the matchers have been told. None where it is not. `may_end`: by token."""
        best = draws.best(logits) if self._walks else None
        if best is None or may_end[best].any() or not self.knows(best, last, starts):
            self.end_walk()
            return None
        self.go()
        self.end_walk(is_told=True)
        return best

    def end_walk(self, *, is_told: bool = False) -> None:
        """Tell the matchers how far they have come. `is_told`: they know the token of this step; else none does."""
        if not self._walks:
            return
        walks, self._walks = self._walks, []
        self._is_told = [is_told] * len(self.matchers)
        if not walks[0][0].num_steps:
            return
        for walk, rows in walks:
            for row, way in zip(rows, walk.ways(), strict=True):
                self.matchers[row].walked(way)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def tell_known(self, token_ids: Sequence[int], left: Sequence[int], looks: Sequence[bool], filled: Filled) -> None:
        """Tell the matchers that know their token from other texts, but where somebody looks at it."""
        steps = zip(self._steps, token_ids, left, looks, strict=True)
        for row, (step, token_id, may_write, looks_at) in enumerate(steps):
            if isinstance(filled.get(row), NiwakiError):
                looks_at = True
            try:
                self._is_told[row] = not looks_at and step(token_id, may_write)
            except Exception as error:
                self._failed[row] = told(error)

    def all_told(self) -> bool:
        """Whether all matchers know this step's token; then their next masks are known, too."""
        self._unsure = []
        return all(self._is_told)

    def follow(
        self, token_ids: Sequence[int], left: Sequence[int], looks: Sequence[bool]
    ) -> tuple[list[int], list[int]]:
        """Tell the other matchers theirs, but where `looks` says that somebody will. The places whose token must be
        looked at, which is accepted, and those where it is refused."""
        accepted: list[int] = []
        refused: list[int] = []
        for row, is_told in enumerate(self._is_told):
            if is_told:
                if looks[row]:  # somebody has begun to read meanwhile
                    accepted.append(int(self.places[row]))
                continue
            self._unsure.append(row)
            found = self._followed(row, token_ids[row], left[row], looks[row])
            if found is not FREE:
                (refused if found is REFUSED else accepted).append(int(self.places[row]))
        return accepted, refused

    def _followed(self, row: int, token_id: int, left: int, looks_at: bool) -> Followed:
        if token_id < 0 or row in self._failed:
            return REFUSED
        matcher = self.matchers[row]
        try:
            if looks_at:  # whoever takes it tells the matcher
                return FREE if matcher.admits(token_id, left) else REFUSED
            return matcher.follow(token_id, left)
        except Exception as error:
            self._failed[row] = told(error)
            return REFUSED
