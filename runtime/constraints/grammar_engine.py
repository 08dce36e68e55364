"""llguidance behind the Matcher protocol: schemas and grammars over one vocabulary.

Owns the shared matcher of which texts are clones, and how far each is from its shortest end. Knows no schemas."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.distinct import DistinctMatcher
from niwaki.runtime.constraints.grammar_endings import EndingSearch, KnownEnds
from niwaki.runtime.constraints.grammar_forced import forced_run, forced_text
from niwaki.runtime.constraints.grammar_places import Place, Places
from niwaki.runtime.constraints.grammar_source import GrammarSource
from niwaki.runtime.constraints.grammar_vocabulary import Ending, GrammarVocabulary, completes
from niwaki.runtime.constraints.guidance import (
    SEARCH_EFFORT,
    Effort,
    Native,
    build,
    short_reason,
    short_text,
)
from niwaki.runtime.constraints.protocol import FREE, NOTHING_FORCED, Followed, Forced, MaskRow, follow
from niwaki.runtime.constraints.schema.distinct import Layout
from niwaki.runtime.constraints.walks import BEFORE, BEHIND, Standing

FAR: Final = 1_000_000  # the distance where no ending was found
MAX_SHORTEST: Final = 8000  # bytes of a shortest text
PLACE_EFFORT: Final = 150  # of all searches behind one token of a text: about 3 ms
SAVED_EFFORT: Final = 600  # that is left from the tokens before: the way out of many required keys is long
GOES_ON: Final = b"a 0"  # bytes of which one may follow most texts that can end and go on: words, lists, numbers
MAX_BEHIND: Final = 1024  # tokens that a prompt's last bytes begin, of which each is tried


class GrammarConstraint:
    """A grammar over a vocabulary.

    Raises:
        ConstraintError: the engine refuses it for this vocabulary.
    """

    def __init__(self, source: GrammarSource, words: GrammarVocabulary) -> None:
        self.words = words
        self.num_states = source.num_states
        self.places = Places()
        self._native_bytes = 64 * 1024 + 20 * len(source.text)  # llguidance does not tell; measured: 0.1 to 1 MB
        self._lock = threading.Lock()  # a matcher may be touched by one thread at a time
        length, commitments = len(source.shortest), source.commitments
        if length > MAX_SHORTEST:
            raise ConstraintError(f"its shortest text has {length} bytes, at most {MAX_SHORTEST}; ask for less")
        try:
            native = build(source.text, words.tokenizer, is_shallow=source.is_small)
        except ValueError as error:
            raise ConstraintError(f"it cannot be compiled: {error}") from None
        self._start: Native = native
        if source.layout:
            self._start = DistinctMatcher(native, Layout(json.loads(source.layout)), words.pieces)
        first = self._start.deep_copy()
        first.compute_bitmask()
        if first.is_error():  # a limit of the engine that this vocabulary meets, though single bytes did not
            raise ConstraintError(f"it is too complex for this vocabulary: {short_reason(first.get_error())}")
        self.shortest = self._verified(source.shortest) if source.shortest else words.nothing
        self.ends = KnownEnds(words, self.shortest, source)
        self.costs: npt.NDArray[np.int64] = (
            np.maximum(words.plain_costs, commitments.inside) + words.openings * commitments.value
        )
        self.value = commitments.value
        self.highest_cost = int(self.costs.max()) + self.value

    @property
    def num_bytes(self) -> int:
        return self._native_bytes + self.places.num_bytes

    def matcher(self) -> GrammarMatcher:
        with self._lock:
            native = self._start.deep_copy()
        return GrammarMatcher(self, native, [self.shortest.num_tokens], [self.places.start], self.shortest)

    def _verified(self, shortest: bytes) -> Ending:
        """The ending, seen to be accepted: what found it and what enforces it are two programs."""
        ending = self.words.ending(shortest)
        if not completes(self._start, ending, self.words):
            found = short_text(self._start, self.words, Effort(SEARCH_EFFORT))
            if found is None:
                raise ConstraintError("no text that satisfies it was found")
            ending = self.words.ending(found)
        return ending


class GrammarMatcher:
    """See `protocol.Matcher`.

    The nearest end is followed by a bound: each token moves it away by at most its cost, so only when bound and
    budget meet must an ending be looked for, and only tokens that cost more than what is left to spare are doubted.
    All of it happens between two steps of the engine, so what searches cost behind one token is limited; where that
    is spent, what is left is the ending that is known.
    """

    __slots__ = (
        "_admitted", "_bounds", "_constraint", "_effort", "_ended", "_ending",
        "_is_searched", "_is_sure", "_matcher", "_num_written", "_num_untold", "_places",
    )  # fmt: skip

    def __init__(
        self,
        constraint: GrammarConstraint,
        matcher: Native,
        bounds: list[int],
        places: list[Place | None],
        ending: Ending | None,
    ) -> None:
        self._constraint = constraint
        self._matcher = matcher
        self._bounds = bounds  # after each accepted token, at most so many tokens lead to an end; one more than tokens
        self._places = places  # likewise: the place after each
        self._ending = ending
        self._is_sure = ending is not None  # it is one from here; else a guess, from some tokens before
        self._is_searched = self._is_sure  # a shorter one was looked for
        self._num_written = 0  # characters since it was sure
        self._effort = Effort(SAVED_EFFORT)
        self._admitted: tuple[int, Ending] | None = None  # the token, and the ending behind it that was seen
        self._ended = False
        self._num_untold = 0  # of the last tokens, which led through places that are known

    @property
    def _native(self) -> Native:
        """At the end of the text. Most steps of a text that others have written before do without it."""
        if self._num_untold:
            end = len(self._places) - self._ended
            places = self._places[end - self._num_untold : end]
            untold = [place.token_id for place in places if place is not None]
            self._num_untold = 0
            self._effort.add(PLACE_EFFORT * len(untold), SAVED_EFFORT)
            self._matcher.consume_tokens(untold)
        return self._matcher

    @property
    def is_done(self) -> bool:
        place = self._places[-1]
        if place is None:
            return self._ended or self._found_done()
        if place.is_done is None:
            place.is_done = self._found_done()
        return place.is_done

    def _found_done(self) -> bool:
        if not self.can_end:
            return False
        words = self._constraint.words
        for byte in GOES_ON:
            if self._native.validate_tokens([words.ids[byte]]):
                return False
        row = np.zeros(words.vocabulary.num_words, np.uint32)
        self._fill(row)
        return not (row & ~words.vocabulary.eos_words).any()

    @property
    def can_end(self) -> bool:
        place = self._places[-1]
        if place is None:
            return self._ended or bool(self._native.is_accepting())
        if place.can_end is None:
            place.can_end = bool(self._native.is_accepting())
        return place.can_end

    @property
    def distance(self) -> int:
        if self.can_end:
            return 0
        ending = self._found_ending(0)
        return FAR if ending is None else ending.num_tokens

    def fill_mask(self, row: MaskRow) -> None:
        if self._ended:
            row.view(np.uint32)[:] = self._constraint.words.vocabulary.eos_words
        else:
            self._fill(row)

    def fill_mask_within(self, row: MaskRow, remaining: int) -> None:
        self.fill_mask(row)

    def known_mask(self, remaining: int) -> npt.NDArray[np.uint32] | None:
        place = self._places[-1]
        return None if place is None else place.mask

    def admits(self, token_id: int, remaining: int) -> bool:
        words = self._constraint.words
        if self._ended or token_id in words.vocabulary.eos_ids:
            return True
        cost = self._cost(token_id)
        if self._bounds[-1] + cost < remaining:
            return True
        if self.can_end:
            self._bounds[-1] = 0
            cost = self._cost(token_id)
            if cost < remaining:
                return True
            after = self._known_after(token_id)
            can_end = None if after is None else after.can_end
            if can_end is None:
                can_end = self._native.validate_tokens([token_id, words.eos_ids[0]]) == 2
            if can_end:  # and behind the token, too
                self._admitted = (token_id, words.nothing)
                return True
        ending = self._found_ending(remaining)
        if ending is None or ending.num_tokens > remaining:
            return True
        behind = self._ending_behind(token_id, ending, remaining - 1)
        self._admitted = None if behind is None else (token_id, behind)
        return behind is not None

    def step(self, token_id: int, remaining: int) -> bool:
        place = self._places[-1]
        if place is None:
            return False
        after = place.first if place.first_id == token_id else place.after(token_id)
        if after is None or not after.is_free or after.mask is None:
            return False
        is_sure = self._is_sure
        if is_sure and self._ending is not self._constraint.words.nothing:
            return False
        # As `admits` and `accept`, by what is known of the two places.
        before, farthest = self._bounds[-1], after.farthest
        bound = before + after.cost if before else farthest
        if bound < remaining or (place.can_end and farthest < remaining):
            self._num_written = after.num_characters + (0 if is_sure else self._num_written)
            self._is_sure = False
            if bound >= remaining:
                self._bounds[-1], bound = 0, farthest
        elif place.can_end and after.can_end:
            self._bounds[-1] = bound = 0
            self._ending, self._is_sure = self._constraint.words.nothing, True
        else:
            return False
        if after.walk_ends < BEFORE | BEHIND:
            self._constraint.places.note_walkable(place, after)
        self._num_untold += 1
        self._admitted = None
        self._places.append(after)
        self._bounds.append(bound)
        return True

    def standing(self) -> Standing | None:
        place = self._places[-1]
        if place is None or (self._is_sure and self._ending is not self._constraint.words.nothing):
            return None
        return Standing(self._constraint.places.known_steps, place.number, self._bounds[-1])

    def walked(self, way: Sequence[Sequence[int]]) -> None:
        numbered = self._constraint.places.all
        places = [numbered[place] for place, _ in way[1:]]
        bounds = [bound for _, bound in way[1:]]
        since = len(places)  # since when it is not sure how the text ends
        while since and bounds[since - 1]:
            since -= 1
        if since:
            self._ending, self._is_sure = self._constraint.words.nothing, True
        if since < len(places):
            written = sum(place.num_characters for place in places[since:])
            self._num_written = written + (0 if self._is_sure else self._num_written)
            self._is_sure = False
        self._num_untold += len(places)
        self._admitted = None
        self._places += places
        self._bounds += bounds

    def follow(self, token_id: int, remaining: int) -> Followed:
        found = follow(self, token_id, remaining)
        place = self._places[-1]
        if found is FREE and place is not None and not place.is_free:
            constraint = self._constraint
            place.cost, place.is_free = int(constraint.costs[token_id]), True
            place.farthest = place.cost + constraint.value
            place.num_characters = int(constraint.words.num_characters[token_id])
        return found

    def learn(self, mask: npt.NDArray[np.uint32]) -> None:
        """Keep what `fill_mask` says here for every text that comes by."""
        place = self._places[-1]
        if place is not None:
            self._constraint.places.learn(place, mask)

    @property
    def place(self) -> Place | None:
        """The same for all texts of the constraint that came here by the same tokens; None where it is not kept."""
        return self._places[-1]

    @property
    def native(self) -> LLMatcher | None:
        """For filling masks of many matchers in one call; None once the text has ended,
        and where not all of the mask is filled there."""
        native = None if self._ended else self._native
        return native if isinstance(native, LLMatcher) else None

    def failure(self) -> ConstraintError | None:
        """What went wrong in the native engine, if anything did."""
        if not self._native.is_error():
            return None
        return ConstraintError(f"the grammar failed: {short_reason(self._native.get_error())}")

    def accept(self, token_id: int) -> None:
        if token_id in self._constraint.words.vocabulary.eos_ids:
            if not self.can_end:
                raise self._not_allowed(token_id)
            self._ended = True
            self._bounds.append(0)
            self._places.append(None)
            return
        if self._ended or not 0 <= token_id < self._constraint.words.vocabulary.size:
            raise self._not_allowed(token_id)
        if self._known_after(token_id) is not None:
            self._num_untold += 1  # its effort comes when it is told
        elif self._native.try_consume_tokens([token_id]) == 1:
            self._effort.add(PLACE_EFFORT, SAVED_EFFORT)
        elif self._native.is_error():
            raise ConstraintError(f"the grammar failed: {short_reason(self._native.get_error())}")
        else:
            raise self._not_allowed(token_id)
        self._places.append(self._constraint.places.after(self._places[-1], token_id))
        ending, words, cost = self._ending, self._constraint.words, self._cost(token_id)
        text = words.vocabulary.token_bytes[token_id] or b""
        admitted, self._admitted = self._admitted, None
        if admitted is not None and admitted[0] == token_id:
            # Not looked for again: with what is left of the effort it might not be found.
            self._ending, self._is_sure = admitted[1], True
            self._bounds.append(self._ending.num_tokens)
        elif self._is_sure and ending is not None and ending.begins_with(text):
            self._ending = ending.behind(len(text))
            self._bounds.append(self._ending.num_tokens)
        else:  # the ending stays as a guess: inside a string most tokens leave it as it is
            self._num_written = int(words.num_characters[token_id]) + (0 if self._is_sure else self._num_written)
            self._is_sure = False
            self._bounds.append(self._bounds[-1] + cost)

    def _known_after(self, token_id: int) -> Place | None:
        """Where a token leads that another text went on with here."""
        place = self._places[-1]
        return None if place is None else place.after(token_id)

    def _cost(self, token_id: int) -> int:
        """By how much this token may move the end away. What the last opening byte begins is not settled by it: where
        the bound is the length of an ending since then, the next token may still choose another, as a longer key."""
        own = int(self._constraint.costs[token_id])
        is_exact = self._is_sure or self._bounds[-1] == 0
        return own + self._constraint.value if is_exact else own

    def forced(self) -> tuple[int, ...]:
        return () if self._ended else forced_run(self._native, self._constraint.words.vocabulary.num_words)

    def forced_text(self) -> Forced:
        place = self._places[-1]
        if place is None:
            return NOTHING_FORCED if self._ended else forced_text(self._native, self._constraint.words)
        if place.forced is None:
            place.forced = forced_text(self._native, self._constraint.words)
        return place.forced

    def fits(self, remaining: int) -> bool:
        if remaining < 0:
            return False
        if self._bounds[-1] <= remaining or self.can_end:
            return True
        ending = self._found_ending(remaining)
        return ending is not None and ending.num_tokens <= remaining

    def allow_behind(self, row: npt.NDArray[np.uint32], text: bytes, remaining: int) -> None:
        words = self._constraint.words
        subtree = words.vocabulary.subtree(text)
        if subtree is None or self._ended or self._bounds[-1] + self._constraint.highest_cost >= remaining:
            return  # none near the end of the budget, where each would have to be tried
        mask = np.zeros_like(row)
        self.fill_mask(mask)
        follow = set(words.in_row(mask))
        tokens = [
            (token_id, behind)
            for token_id in words.vocabulary.tokens_in(*subtree).tolist()
            if (behind := (words.vocabulary.token_bytes[token_id] or b"")[len(text) :])[0] in follow
        ]
        for token_id, behind in tokens[:MAX_BEHIND]:
            byte_ids = [words.ids[byte] for byte in behind]
            if self._native.validate_tokens(byte_ids) == len(byte_ids):
                row[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def accept_bytes(self, text: bytes) -> None:
        for byte in text:
            self.accept(self._constraint.words.ids[byte])

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self._bounds):
            raise ConstraintError(f"cannot take back {count} tokens of {len(self._bounds) - 1}")
        if count == 0:
            return
        del self._bounds[-count:], self._places[-count:]
        self._is_sure, self._num_written, self._effort, self._admitted = False, 0, Effort(SAVED_EFFORT), None
        texts = count - self._ended
        self._ended = False
        untold = min(texts, self._num_untold)
        self._num_untold -= untold
        if texts > untold and not self._matcher.rollback(texts - untold):
            raise ConstraintError(f"the grammar failed: {short_reason(self._matcher.get_error())}")

    def clone(self) -> GrammarMatcher:
        native = self._native.deep_copy()
        twin = GrammarMatcher(self._constraint, native, self._bounds.copy(), self._places.copy(), self._ending)
        twin._ended, twin._is_sure, twin._is_searched = self._ended, self._is_sure, self._is_searched
        twin._num_written = self._num_written
        return twin

    def shortest_ending(self, budget: int) -> tuple[int, ...] | None:
        if self.can_end:
            return ()
        ending = self._found_ending(0)
        return None if ending is None or ending.num_tokens > budget else tuple(ending.tokens())

    # -- endings

    def _found_ending(self, enough: int) -> Ending | None:
        """A way to the end from here; where the straight one takes more than `enough` tokens, a shorter one is looked
        for. The bound becomes its length."""
        guess = None if self._is_sure else self._ending
        if not self._is_sure:
            text = self._search(guess).known_end(self._native, enough)
            # No way is shorter than the known one as long as all of it is needed.
            self._is_searched = text is not None and (not text or (guess is not None and text == guess.text))
            if text is None:
                text = self._search(guess).straight(self._native)
            self._end_with(text)
        if not self._is_searched and (self._ending is None or self._ending.num_tokens > enough):
            self._is_searched = True
            text = self._search(guess).shortest(self._native)
            known = self._ending
            self._end_with(text)
            if known is not None and (self._ending is None or known.num_tokens <= self._ending.num_tokens):
                self._end_with(known.text)
        return self._ending

    def _end_with(self, text: bytes | None) -> None:
        known = self._ending
        if text is not None and known is not None and known.whole.endswith(text):
            self._ending = known.behind(len(known.whole) - known.start - len(text))
        else:
            self._ending = None if text is None else self._constraint.words.ending(text)
        self._is_sure = True
        self._bounds[-1] = FAR if self._ending is None else self._ending.num_tokens

    def _ending_behind(self, token_id: int, ending: Ending, budget: int) -> Ending | None:
        """How the text is seen to be able to end within `budget` tokens after this one."""
        words = self._constraint.words
        text = words.vocabulary.token_bytes[token_id] or b""
        if ending.begins_with(text) and ending.behind(len(text)).num_tokens <= budget:
            return ending.behind(len(text))
        rests = ending.rests(int(words.num_characters[token_id]))  # what closed before still closes
        for start, num_tokens in zip(rests, ending.counts[rests].tolist(), strict=True):
            if num_tokens <= budget and completes(self._native, ending.from_byte(start), words, [token_id]):
                return ending.from_byte(start)
        if ending.num_tokens > budget and completes(self._native, ending, words, [token_id]):
            return None  # it is no step towards the end: what would be found is this ending again
        place = self._native.deep_copy()
        if not place.consume_token(token_id):
            return None
        searches = self._search(ending)
        for search in (searches.straight, searches.shortest):
            found = search(place)
            if found is not None and (behind := words.ending(found)).num_tokens <= budget:
                return behind
        return None

    def _search(self, ending: Ending | None) -> EndingSearch:
        """`ending`: what is known of this text's, from some characters before."""
        return EndingSearch(self._constraint.ends, ending, self._num_written, len(self._bounds), self._effort)

    def _fill(self, row: MaskRow) -> None:
        self._native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        failure = self.failure()
        if failure is not None:
            raise failure

    def _not_allowed(self, token_id: int) -> ConstraintError:
        return ConstraintError(
            f"token {token_id} is not allowed by the constraint after {len(self._bounds) - 1} tokens"
        )
