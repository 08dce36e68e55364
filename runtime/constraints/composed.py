"""Constraints one after the other, one of several, or again and again: joined where one token ends and the next begins.

A part is a compiled constraint of any engine, a special token, or free text with a budget of its own. Several parts
may be followed at once (free text, and the marker that would end it). Knows no schemas and no tool formats.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

import numpy as np

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.part_matchers import BudgetMatcher, MarkMatcher
from niwaki.runtime.constraints.protocol import (
    ANY_BYTE,
    NOTHING_FORCED,
    CompiledConstraint,
    Followed,
    Forced,
    MaskRow,
    Matcher,
    follow,
)
from niwaki.runtime.constraints.token_graph import first_bit
from niwaki.runtime.constraints.vocabulary import Vocabulary
from niwaki.runtime.constraints.walks import Way

NO_END: Final = 1 << 30  # more tokens than any budget

# ---------------------------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A text of the constraint; of at most `max_tokens` tokens, where it is a number (then all its texts' beginnings
    must be texts of it, too)."""

    constraint: CompiledConstraint
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """One special token."""

    token_id: int


@dataclass(frozen=True, slots=True)
class InTurn:
    items: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    items: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Several:
    """`item` once or more, `between` in between."""

    item: Piece
    between: Piece


Piece: TypeAlias = "Part | Mark | InTurn | OneOf | Several"
NOTHING: Final = InTurn(())


@dataclass(slots=True)
class _Place:
    """One Part or Mark of the whole, and where to go from it."""

    piece: Part | Mark
    start: int  # fewest tokens of a text of the piece
    start_path: tuple[int, ...]
    follow: set[int]
    is_last: bool = False
    rest: int = NO_END  # fewest tokens that complete the whole once the piece is complete
    rest_path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Ends:
    is_nullable: bool
    first: frozenset[int]
    last: frozenset[int]


class ComposedConstraint:
    """`piece` over a vocabulary, as a compiled constraint.

    The places are Glushkov's positions of the piece, read as a regex over its parts.

    Raises:
        ConstraintError: no text completes it.
    """

    def __init__(self, piece: Piece, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.places: list[_Place] = []
        ends = self._ends(piece)
        self.is_nullable = ends.is_nullable
        self.first = tuple(sorted(ends.first))
        for place in ends.last:
            self.places[place].is_last = True
        self._measure()
        if not self.is_nullable and all(self.places[p].rest >= NO_END for p in self.first):
            raise ConstraintError("no sequence of tokens completes it")
        self._parts = [place.piece.constraint for place in self.places if isinstance(place.piece, Part)]

    @property
    def num_states(self) -> int:
        return sum(part.num_states for part in self._parts) + len(self.places)

    @property
    def num_bytes(self) -> int:
        return 2000 * len(self.places) + sum(part.num_bytes for part in self._parts)

    def matcher(self) -> ComposedMatcher:
        return ComposedMatcher(self)

    def at_start(self, place: int) -> Matcher:
        """A matcher of the place's own piece."""
        piece = self.places[place].piece
        if isinstance(piece, Mark):
            return MarkMatcher(piece.token_id)
        matcher = piece.constraint.matcher()
        return matcher if piece.max_tokens is None else BudgetMatcher(matcher, piece.max_tokens)

    def _ends(self, piece: Piece) -> _Ends:
        match piece:
            case Mark(token_id):
                return self._added(_Place(piece, 1, (token_id,), set()), is_nullable=False)
            case Part(constraint):
                path = constraint.matcher().shortest_ending(NO_END)
                if path is None:
                    raise ConstraintError("no ending of a part of it was found")
                return self._added(_Place(piece, len(path), path, set()), is_nullable=not path)
            case InTurn(items):
                whole = _Ends(True, frozenset(), frozenset())
                for item in items:
                    whole = self._joined(whole, self._ends(item))
                return whole
            case OneOf(items):
                found = [self._ends(item) for item in items]
                return _Ends(
                    any(ends.is_nullable for ends in found),
                    frozenset().union(*(ends.first for ends in found)),
                    frozenset().union(*(ends.last for ends in found)),
                )
            case Several(item, between):
                once, gap = self._ends(item), self._ends(between)
                again = self._joined(self._joined(once, gap), once)
                return _Ends(once.is_nullable, once.first, again.last)
            case _:
                assert_never(piece)

    def _added(self, place: _Place, *, is_nullable: bool) -> _Ends:
        here = frozenset((len(self.places),))
        self.places.append(place)
        return _Ends(is_nullable, here, here)

    def _joined(self, before: _Ends, after: _Ends) -> _Ends:
        for place in before.last:
            self.places[place].follow |= after.first
        return _Ends(
            before.is_nullable and after.is_nullable,
            before.first | after.first if before.is_nullable else before.first,
            before.last | after.last if after.is_nullable else after.last,
        )

    def _measure(self) -> None:
        """The fewest tokens from the end of each place to the end of the whole (Dijkstra, backwards)."""
        before: dict[int, list[int]] = {}
        for number, place in enumerate(self.places):
            for after in place.follow:
                before.setdefault(after, []).append(number)
        queue = [(0, number) for number, place in enumerate(self.places) if place.is_last]
        for _, number in queue:
            self.places[number].rest = 0
        heapq.heapify(queue)
        while queue:
            rest, number = heapq.heappop(queue)
            place = self.places[number]
            if rest > place.rest:
                continue
            for other in before.get(number, ()):
                earlier = self.places[other]
                if rest + place.start < earlier.rest:
                    earlier.rest = rest + place.start
                    earlier.rest_path = (*place.start_path, *place.rest_path)
                    heapq.heappush(queue, (earlier.rest, other))


# ---------------------------------------------------------------------------------------------------------------
# Following a text
# ---------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Thread:
    """A place that the text may stand in. A fresh one has taken no token of its piece, and its matcher never does."""

    place: int
    matcher: Matcher
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class _Step:
    """What `rollback` needs: the threads before a token, and those of them that took it."""

    before: tuple[_Thread, ...]
    moved: tuple[_Thread, ...]
    was_ended: bool


class ComposedMatcher:
    """See `protocol.Matcher`."""

    __slots__ = ("_constraint", "_ended", "_fresh", "_steps", "_threads")

    def __init__(self, constraint: ComposedConstraint) -> None:
        self._constraint = constraint
        self._fresh: dict[int, _Thread] = {}
        self._steps: list[_Step] = []
        self._ended = False
        self._threads = tuple(self._at_start(place) for place in constraint.first)

    @property
    def is_done(self) -> bool:
        if self._ended:
            return True
        return self.can_end and all(not thread.is_fresh and thread.matcher.is_done for thread in self._threads)

    @property
    def can_end(self) -> bool:
        if self._ended:
            return True
        if not self._steps:
            return self._constraint.is_nullable
        places = self._constraint.places
        return any(
            not thread.is_fresh and places[thread.place].is_last and thread.matcher.can_end for thread in self._threads
        )

    @property
    def distance(self) -> int:
        return 0 if self.can_end else min(self._distance(thread) for thread in self._threads)

    def fill_mask(self, row: MaskRow) -> None:
        self._fill([(thread, None) for thread in self._threads], row)

    def fill_mask_within(self, row: MaskRow, remaining: int) -> None:
        if self._ended:
            self.fill_mask(row)
            return
        # Alone, a thread needs not be measured: where nothing fits, its own row is the unbounded one.
        threads = self._threads
        if len(threads) > 1:
            threads = tuple(thread for thread in threads if self._fits(thread, remaining))
        places = self._constraint.places
        self._fill([(thread, remaining - places[thread.place].rest) for thread in threads], row)
        if not row.view(np.uint32).any():
            self.fill_mask(row)

    def admits(self, token_id: int, remaining: int) -> bool:
        if token_id in self._constraint.vocabulary.eos_ids or not self.fits(remaining):
            return True
        if len(self._threads) == 1 and not self._threads[0].is_fresh:
            # It knows what it has found of its ending, also when the token comes.
            thread = self._threads[0]
            return thread.matcher.admits(token_id, remaining - self._constraint.places[thread.place].rest)
        self.accept(token_id)
        fits = self.fits(remaining - 1)
        self.rollback(1)
        return fits

    def step(self, token_id: int, remaining: int) -> bool:
        return False

    def follow(self, token_id: int, remaining: int) -> Followed:
        return follow(self, token_id, remaining)

    def standing(self) -> None:
        """No step is known."""

    def walked(self, way: Way) -> None:
        raise AssertionError("no step is known")

    def known_mask(self, remaining: int) -> None:
        """Never at hand."""

    def accept(self, token_id: int) -> None:
        if token_id in self._constraint.vocabulary.eos_ids:
            if not self.can_end:
                raise self._not_allowed(token_id)
            self._steps.append(_Step(self._threads, (), self._ended))
            self._ended, self._threads = True, ()
            return
        moved: list[_Thread] = []
        kept: list[_Thread] = []
        for thread in self._threads:
            follower = _Thread(thread.place, thread.matcher.clone(), False) if thread.is_fresh else thread
            try:
                follower.matcher.accept(token_id)
            except ConstraintError:
                continue
            kept.append(follower)
            if follower is thread:
                moved.append(thread)
        if not kept:
            raise self._not_allowed(token_id)
        self._steps.append(_Step(self._threads, tuple(moved), self._ended))
        next_places: set[int] = set()
        for thread in kept:
            if thread.matcher.can_end:
                next_places |= self._constraint.places[thread.place].follow
        self._threads = (*kept, *(self._at_start(place) for place in sorted(next_places)))

    def forced(self) -> tuple[int, ...]:
        if self._ended or self.can_end:
            return ()
        run: list[int] = []
        place = self.clone()
        row = np.zeros(self._constraint.vocabulary.num_words, np.uint32)
        while not place.can_end:
            piece = place._threads[0].matcher.forced() if len(place._threads) == 1 else ()
            if not piece:
                place.fill_mask(row)
                if int(np.bitwise_count(row).sum()) != 1:
                    break
                piece = (first_bit(row),)
            for token_id in piece:
                place.accept(token_id)
                run.append(token_id)
        return tuple(run)

    def forced_text(self) -> Forced:
        if self._ended or self.can_end or len(self._threads) != 1:
            return NOTHING_FORCED
        # What stands behind it may be of the next part: anything.
        return Forced(self._threads[0].matcher.forced_text().text, ANY_BYTE)

    def fits(self, remaining: int) -> bool:
        return remaining >= 0 and (self.can_end or any(self._fits(thread, remaining) for thread in self._threads))

    def allow_behind(self, row: Words, text: bytes, remaining: int) -> None:
        """None: a prompt's end stays as it is before composed constraints."""

    def accept_bytes(self, text: bytes) -> None:
        raise ConstraintError(f"the text {text!r} is not allowed by the constraint")

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._steps):
            raise ConstraintError(f"cannot take back {count} tokens of {len(self._steps)}")
        for _ in range(count):
            step = self._steps.pop()
            for thread in step.moved:
                thread.matcher.rollback(1)
            self._threads, self._ended = step.before, step.was_ended

    def clone(self) -> ComposedMatcher:
        twin = ComposedMatcher(self._constraint)
        copies: dict[_Thread, _Thread] = {}

        def copied(thread: _Thread) -> _Thread:
            if thread.is_fresh:
                return twin._at_start(thread.place)
            if thread not in copies:
                copies[thread] = _Thread(thread.place, thread.matcher.clone(), False)
            return copies[thread]

        twin._threads = tuple(map(copied, self._threads))
        twin._steps = [
            _Step(tuple(map(copied, step.before)), tuple(map(copied, step.moved)), step.was_ended)
            for step in self._steps
        ]
        twin._ended = self._ended
        return twin

    def shortest_ending(self, budget: int) -> tuple[int, ...] | None:
        if self.can_end:
            return ()
        nearest = min(self._threads, key=self._distance)
        rest = self._constraint.places[nearest.place]
        path = nearest.matcher.shortest_ending(max(0, budget - rest.rest))
        return None if path is None or len(path) + rest.rest > budget else (*path, *rest.rest_path)

    # -- helpers

    def _at_start(self, place: int) -> _Thread:
        thread = self._fresh.get(place)
        if thread is None:
            thread = self._fresh[place] = _Thread(place, self._constraint.at_start(place), True)
        return thread

    def _distance(self, thread: _Thread) -> int:
        return thread.matcher.distance + self._constraint.places[thread.place].rest

    def _fits(self, thread: _Thread, remaining: int) -> bool:
        return thread.matcher.fits(remaining - self._constraint.places[thread.place].rest)

    def _fill(self, threads: Sequence[tuple[_Thread, int | None]], row: MaskRow) -> None:
        """The union of the threads' masks, each within its own budget where it has one."""
        words = row.view(np.uint32)
        words[:] = 0
        one = np.zeros_like(words)
        for thread, budget in threads:
            if budget is None:
                thread.matcher.fill_mask(one)
            else:
                thread.matcher.fill_mask_within(one, budget)
            words |= one
        eos_words = self._constraint.vocabulary.eos_words
        if self.can_end:
            words |= eos_words
        else:
            words &= ~eos_words

    def _not_allowed(self, token_id: int) -> ConstraintError:
        return ConstraintError(f"token {token_id} is not allowed by the constraint after {len(self._steps)} tokens")
