"""A byte automaton as a constraint: what is kept of it while it is used, and the matcher that follows one text.

An `AutomatonConstraint` owns what all texts of a constraint share (rows of masks, steps, what is forced: each filled on
first use); a matcher owns the states of one text.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints import kernels
from niwaki.runtime.constraints.automaton import DEAD, START, ByteDfa
from niwaki.runtime.constraints.kernels import UNREACHABLE, Words
from niwaki.runtime.constraints.protocol import (
    FREE,
    MAX_FORCED_BYTES,
    NOTHING_FORCED,
    Followed,
    Forced,
    MaskRow,
    follow,
)
from niwaki.runtime.constraints.token_graph import TokenGraph, first_bit
from niwaki.runtime.constraints.vocabulary import Vocabulary
from niwaki.runtime.constraints.walks import Standing, StepTable, Walked, Way, write_out

ENDED: Final = -1  # in a matcher's states: an end token was accepted
MAX_STEPS: Final = 16_384  # from a state by a token, kept of one constraint
STEP_BYTES: Final = 200
MAX_ROWS_WITHIN: Final = 32  # masks near the end of a budget, kept of one constraint: a batch may share them


class AutomatonConstraint:
    """A byte automaton over a vocabulary. Raises ConstraintError as `TokenGraph`."""

    def __init__(self, dfa: ByteDfa, vocabulary: Vocabulary, max_row_bytes: int = 32 * 1024 * 1024) -> None:
        self.graph = graph = TokenGraph(dfa, vocabulary)
        self.dfa = dfa
        self.vocabulary = vocabulary
        self.is_exact, self.distances, self.longest_distance = graph.is_exact, graph.distances, graph.longest_distance
        self._max_row_bytes = max_row_bytes
        self._lock = threading.Lock()  # guards the rows, not the automaton, which never changes
        self.rows: dict[int, Words] = {}  # state -> its mask
        self._rows_within: dict[tuple[int, int], Words] = {}  # (state, tokens that remain) -> its mask
        self._counts: dict[int, int] = {}  # state -> how many tokens may follow, end tokens left out
        self._distinct: dict[bytes, Words] = {}  # equal rows are kept once
        self._forced: dict[int, Forced] = {}  # state -> what must come next
        self._last: dict[int, bool] = {}  # state -> whether nothing may
        self.steps: dict[tuple[int, int], int] = {}  # (state, token) -> the state after it, where that is known
        self.walkable: set[tuple[int, int]] = set()  # those of `known_steps`
        self.free: set[int] = set()  # states where nothing is forced and something may follow, as far as that is known
        self.known_steps = StepTable()  # as many of `steps` as need nobody's look

    @property
    def num_states(self) -> int:
        return self.dfa.num_states

    @property
    def num_bytes(self) -> int:
        return self.graph.num_bytes + self._row_bytes() + STEP_BYTES * len(self.steps) + self.known_steps.num_bytes

    def matcher(self) -> AutomatonMatcher:
        return AutomatonMatcher(self, [START])

    def row(self, state: int) -> Words:
        """The mask after `state`; do not write to it."""
        row = self.rows.get(state)
        if row is not None:
            return row
        row, count = self.graph.row(state, UNREACHABLE - 1)
        with self._lock:
            if self._row_bytes() > self._max_row_bytes:
                self.rows.clear()
                self._counts.clear()
                self._distinct.clear()
            row = self._distinct.setdefault(row.tobytes(), row)
            self.rows[state] = row
            self._counts[state] = count
        return row

    def known_row(self, state: int, remaining: int) -> Words | None:
        """`row_within`, where it was asked for before."""
        if self.longest_distance < remaining:
            return self.rows.get(state)
        return self._rows_within.get((state, remaining))

    def num_followers(self, state: int) -> int:
        """How many tokens may follow, end tokens left out."""
        count = self._counts.get(state)
        if count is None:
            count = int(np.bitwise_count(self.row(state) & ~self.vocabulary.eos_words).sum())
        return count

    def is_last(self, state: int) -> bool:
        """Whether the text may end there, and cannot go on."""
        is_last = self._last.get(state)
        if is_last is None:
            dfa = self.dfa
            has_bytes = dfa.row_starts[state] < dfa.row_starts[state + 1]
            is_last = bool(dfa.accepting[state]) and not (has_bytes and self.num_followers(state))
            self._last[state] = is_last
        return is_last

    def forced_text(self, state: int) -> Forced:
        """See `protocol.Matcher`."""
        forced = self._forced.get(state)
        if forced is None:
            dfa = self.dfa
            text = np.empty(MAX_FORCED_BYTES, np.uint8)
            length, after = kernels.forced_bytes(
                state, dfa.byte_classes, dfa.num_classes, dfa.row_starts, dfa.labels, dfa.targets, dfa.accepting, text
            )
            follow = bytes(byte for byte in range(256) if dfa.run(bytes([byte]), after) != DEAD) if length else b""
            forced = Forced(text[:length].tobytes(), follow) if length else NOTHING_FORCED
            self._forced[state] = forced
        return forced

    def row_within(self, state: int, remaining: int) -> Words:
        """The mask of the tokens after which at most remaining - 1 more complete the text; end tokens as in `row`. Do
        not write to it."""
        if self.longest_distance < remaining:
            return self.row(state)
        known = self._rows_within.get((state, remaining))
        if known is None:
            known = self._row_within(state, remaining)
            with self._lock:
                if len(self._rows_within) >= MAX_ROWS_WITHIN:
                    self._rows_within.clear()
                self._rows_within[state, remaining] = known
        return known

    def _row_within(self, state: int, remaining: int) -> Words:
        row, count = self.graph.row(state, max(remaining, 0) - 1)
        if count or self.dfa.accepting[state]:
            return row
        # Nothing fits by what is measured. Where that is exact nothing does; else look for the way itself.
        path = None if self.is_exact else self.graph.shortest_path(state, remaining)
        if path is None:
            return self.row(state)
        row[path[0] >> 5] |= np.uint32(1 << (path[0] & 31))
        return row

    def step(self, state: int, token_id: int) -> int:
        """The state after the token, DEAD where it may not follow. Not for end tokens."""
        known = self.steps.get((state, token_id))
        if known is not None:
            return known
        after = self.graph.step(state, token_id)
        if len(self.steps) < MAX_STEPS:
            self.steps[state, token_id] = after
        return after

    def note_walkable(self, state: int, token_id: int, after: int) -> None:
        """Others may take this step without a look at them, wherever its end fits, or where any would."""
        self.walkable.add((state, token_id))
        before, behind = int(self.distances[state]), int(self.distances[after])  # or farther than the ends are
        self.known_steps.add(state, token_id, after, behind - before, behind, 0)

    def _row_bytes(self) -> int:
        # The row, and its bytes as a key.
        return 4 * self.vocabulary.num_words * (2 * len(self._distinct) + len(self._rows_within))


class AutomatonMatcher:
    """See `protocol.Matcher`."""

    __slots__ = ("_constraint", "_states", "_walked")

    def __init__(self, constraint: AutomatonConstraint, states: list[int]) -> None:
        self._constraint = constraint
        self._states = states  # one more than accepted tokens
        self._walked: Walked = ()  # what of the states is not written out

    @property
    def is_done(self) -> bool:
        state = self._states[-1]
        return state == ENDED or self._constraint.is_last(state)

    @property
    def can_end(self) -> bool:
        state = self._states[-1]
        return state == ENDED or bool(self._constraint.dfa.accepting[state])

    @property
    def distance(self) -> int:
        state = self._states[-1]
        return 0 if state == ENDED else int(self._constraint.distances[state])

    def fill_mask(self, row: MaskRow) -> None:
        state = self._states[-1]
        constraint = self._constraint
        row.view(np.uint32)[:] = constraint.vocabulary.eos_words if state == ENDED else constraint.row(state)

    def fill_mask_within(self, row: MaskRow, remaining: int) -> None:
        state = self._states[-1]
        if state == ENDED:
            self.fill_mask(row)
        else:
            row.view(np.uint32)[:] = self._constraint.row_within(state, remaining)

    def admits(self, token_id: int, remaining: int) -> bool:
        state, constraint = self._states[-1], self._constraint
        if state == ENDED or constraint.longest_distance < remaining:
            return True
        return bool(constraint.row_within(state, remaining)[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))

    def step(self, token_id: int, remaining: int) -> bool:
        states, constraint = self._states, self._constraint
        after = constraint.steps.get((states[-1], token_id))
        if after not in constraint.free or after not in constraint.rows:
            return False
        if constraint.longest_distance >= remaining and constraint.distances[after] >= remaining:
            return False
        if (states[-1], token_id) not in constraint.walkable:
            constraint.note_walkable(states[-1], token_id, after)
        states.append(after)
        return True

    def standing(self) -> Standing | None:
        state = self._states[-1]
        return None if state == ENDED else Standing(self._constraint.known_steps, state, self.distance)

    def walked(self, way: Way) -> None:
        self._walked += ((len(self._states), way),)
        self._states.append(way.place)

    def _all_states(self) -> list[int]:
        """Behind each token."""
        walked, self._walked = self._walked, ()
        write_out(self._states, walked, lambda way: way.places)
        return self._states

    def follow(self, token_id: int, remaining: int) -> Followed:
        found = follow(self, token_id, remaining)
        if found is FREE:
            self._constraint.free.add(self._states[-1])
        return found

    def known_mask(self, remaining: int) -> Words | None:
        state = self._states[-1]
        if state == ENDED:
            return self._constraint.vocabulary.eos_words
        return self._constraint.known_row(state, remaining)

    def accept(self, token_id: int) -> None:
        state = self._states[-1]
        if token_id in self._constraint.vocabulary.eos_ids:
            after = ENDED if self.can_end else DEAD
        else:
            after = DEAD if state == ENDED else self._constraint.step(state, token_id)
        if after == DEAD:
            place = len(self._all_states()) - 1
            raise ConstraintError(f"token {token_id} is not allowed by the constraint after {place} tokens")
        self._states.append(after)

    def forced(self) -> tuple[int, ...]:
        run: list[int] = []
        state = self._states[-1]
        constraint = self._constraint
        while state != ENDED and not constraint.dfa.accepting[state] and constraint.num_followers(state) == 1:
            run.append(first_bit(constraint.row(state)))
            state = constraint.step(state, run[-1])
        return tuple(run)

    def forced_text(self) -> Forced:
        state = self._states[-1]
        return NOTHING_FORCED if state == ENDED else self._constraint.forced_text(state)

    def fits(self, remaining: int) -> bool:
        return self.distance <= remaining

    def allow_behind(self, row: Words, text: bytes, remaining: int) -> None:
        state = self._states[-1]
        subtree = self._constraint.vocabulary.subtree(text)
        if state != ENDED and subtree is not None:
            self._constraint.graph.fill_subtree(state, subtree, len(text), remaining - 1, row)

    def accept_bytes(self, text: bytes) -> None:
        state = self._states[-1]
        after = DEAD if state == ENDED else self._constraint.dfa.run(text, state)
        if after == DEAD:
            raise ConstraintError(f"the text {text!r} is not allowed by the constraint")
        self._states.append(after)

    def rollback(self, count: int) -> None:
        states = self._all_states()
        if not 0 <= count < len(states):
            raise ConstraintError(f"cannot take back {count} tokens of {len(states) - 1}")
        if count:
            del states[-count:]

    def clone(self) -> AutomatonMatcher:
        return AutomatonMatcher(self._constraint, self._all_states().copy())

    def shortest_ending(self, budget: int) -> tuple[int, ...] | None:
        state = self._states[-1]
        return () if state == ENDED else self._constraint.graph.shortest_path(state, budget)
