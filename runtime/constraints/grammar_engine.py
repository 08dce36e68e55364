"""llguidance behind the Matcher protocol: schemas and grammars over one vocabulary.

Owns the shared matcher of which texts are clones, and the place of each; how far it is from its end is told in
`grammar_way.py`. Knows no schemas."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.distinct import DistinctMatcher
from niwaki.runtime.constraints.grammar_endings import KnownEnds
from niwaki.runtime.constraints.grammar_forced import NOTHING_AHEAD, Ahead, ForcedRun, forced_run, look_ahead
from niwaki.runtime.constraints.grammar_loops import STRING, Loops, open_behind, open_string
from niwaki.runtime.constraints.grammar_places import Place, Places, Step
from niwaki.runtime.constraints.grammar_source import GrammarSource, build_here
from niwaki.runtime.constraints.grammar_vocabulary import Ending, GrammarVocabulary, completes
from niwaki.runtime.constraints.grammar_way import FAR, WayToEnd
from niwaki.runtime.constraints.guidance import SEARCH_EFFORT, Effort, Native, short_reason, short_text
from niwaki.runtime.constraints.protocol import (
    ANY_LENGTH,
    FREE,
    NOTHING_FORCED,
    Followed,
    Forced,
    MaskRow,
    address_of,
    follow,
)
from niwaki.runtime.constraints.schema.distinct import Layout
from niwaki.runtime.constraints.walks import BEFORE, BEHIND, LAST, Standing, Walked, Way, write_out

MAX_SHORTEST: Final = 8000  # bytes of a shortest text
GOES_ON: Final = b"a 0"  # bytes of which one may follow most texts that can end and go on: words, lists, numbers
TILDE: Final = ord("~")  # a character of few texts but those that may hold any
MAX_BEHIND: Final = 1024  # tokens that a prompt's last bytes begin, of which each is tried
Build: TypeAlias = Callable[[GrammarSource, LLTokenizer], LLMatcher]


class GrammarConstraint:
    """A grammar over a vocabulary. `build`: on which thread its matcher is built.

    Raises:
        ConstraintError: the engine refuses it for this vocabulary.
    """

    def __init__(self, source: GrammarSource, words: GrammarVocabulary, build: Build = build_here) -> None:
        self.words = words
        self.num_states = source.num_states
        self.places = Places(source.text if source.is_json and not source.layout else "")
        self._native_bytes = 64 * 1024 + 20 * len(source.text)  # llguidance does not tell; measured: 0.1 to 1 MB
        self._lock = threading.Lock()  # a matcher may be touched by one thread at a time
        if (length := len(source.shortest)) > MAX_SHORTEST:
            raise ConstraintError(f"its shortest text has {length} bytes, at most {MAX_SHORTEST}; ask for less")
        try:
            native = build(source, words.tokenizer)
        except ValueError as error:
            raise ConstraintError(f"it cannot be compiled: {error}") from None
        self._start: Native = native
        if source.layout:
            self._start = DistinctMatcher(native, Layout(json.loads(source.layout)), words.pieces)
        # Not of a copy: what is found out about the start goes to every text, whose first mask takes a third then.
        _, address, size = words.scratch()
        self._start.unsafe_compute_mask_ptr(address, size)
        if self._start.is_error():  # a limit of the engine that this vocabulary meets, though single bytes did not
            raise ConstraintError(f"it is too complex for this vocabulary: {short_reason(self._start.get_error())}")
        shortest = self._verified(source.shortest) if source.shortest else words.nothing
        self.ends = KnownEnds(words, shortest, source)
        self._ahead: Ahead | None = None  # of the start, from the first text on

    @property
    def num_bytes(self) -> int:
        return self._native_bytes + self.places.num_bytes

    def matcher(self) -> GrammarMatcher:
        with self._lock:
            ahead = self._ahead
            if ahead is None:  # here, not where the text begins: the engine's loop asks for it at once
                ahead = self._ahead = look_ahead(self._start, self.words)
                self.places.start.forced = ahead.forced
            native = self._start.deep_copy()
            self.places.expect_text()
        matcher = GrammarMatcher(self, native, [self.places.start], [], WayToEnd(self.ends))
        matcher._ahead = ahead
        return matcher

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
    """See `protocol.Matcher`."""

    __slots__ = ("_ahead", "_constraint", "_ended", "_matcher", "_num_untold", "_places", "_tokens", "_walked", "_way")

    def __init__(
        self,
        constraint: GrammarConstraint,
        matcher: Native,
        places: list[Place | None],
        tokens: list[int],
        way: WayToEnd,
    ) -> None:
        self._constraint = constraint
        self._matcher = matcher
        self._places = places  # after each accepted token, and one before them; None where it is not kept
        self._tokens = tokens  # that were accepted
        self._walked: Walked = ()  # what of the tokens, and of what is behind them, is not written out
        self._way = way
        self._ended = False
        self._num_untold = 0  # of the last tokens, which led through places that are known
        self._ahead: Ahead | None = None  # from here, where something is forced or the mask was worked out before

    @property
    def _native(self) -> Native:
        """At the end of the text. Most steps of a text that others have written before do without it."""
        if self._num_untold:
            self._write_out()
            end = len(self._tokens) - self._ended
            untold = self._tokens[end - self._num_untold : end]
            self._num_untold = 0
            self._way.told(len(untold))
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
        mask = self.known_mask(ANY_LENGTH)
        return not ((self.new_mask() if mask is None else mask) & ~words.vocabulary.eos_words).any()

    @property
    def can_end(self) -> bool:
        place = self._places[-1]
        if place is not None and place.can_end is not None:
            return place.can_end
        is_bound = self._ahead is not None and bool(self._ahead.forced.text)
        found = self._ended or (not is_bound and bool(self._native.is_accepting()))
        if place is not None:
            place.can_end = found
        return found

    @property
    def distance(self) -> int:
        if self.can_end:
            return 0
        ending = self._way.found(self._native, 0)
        return FAR if ending is None else ending.num_tokens

    def fill_mask(self, row: MaskRow) -> None:
        if self._ended:
            row.view(np.uint32)[:] = self._constraint.words.vocabulary.eos_words
            return
        self._native.unsafe_compute_mask_ptr(address_of(row), row.nbytes)
        self._check()

    def fill_mask_within(self, row: MaskRow, remaining: int) -> None:
        self.fill_mask(row)

    def known_mask(self, remaining: int) -> npt.NDArray[np.uint32] | None:
        place, ahead = self._places[-1], self._ahead
        mask = None if place is None else place.mask
        if mask is not None or ahead is None:
            return mask
        mask = ahead.mask_here()
        return mask if mask is None or place is None else self._constraint.places.learn(place, mask)

    def admits(self, token_id: int, remaining: int) -> bool:
        words = self._constraint.words
        if self._ended or token_id in words.vocabulary.eos_ids:
            return True
        way = self._way
        if way.bound_behind(token_id) < remaining:
            return True
        if self.can_end:
            way.end_here()
            if way.bound_behind(token_id) < remaining:
                return True
            place = self._places[-1]
            step = None if place is None else place.step(token_id)  # of another text, that went on with it
            can_end = None if step is None else self._constraint.places.all[step.after].can_end
            if can_end is None:
                can_end = self._native.validate_tokens([token_id, words.eos_ids[0]]) == 2
            if can_end:  # and behind the token, too
                way.admit(token_id, words.nothing)
                if place is not None and step is not None and remaining == 1:
                    self._constraint.places.note_walkable(place, step, self._constraint.ends, LAST)
                return True
        ending = way.found(self._native, remaining)
        if ending is None or ending.num_tokens > remaining:
            return True
        behind = way.found_behind(self._native, token_id, ending, remaining - 1)
        way.admit(token_id, behind)
        return behind is not None

    def step(self, token_id: int, remaining: int) -> bool:
        place = self._places[-1]
        if place is None:
            return False
        step = place.first if place.first_id == token_id else place.step(token_id)
        constraint = self._constraint
        if step is None or constraint.places.is_alone(place, step):
            step = self._allowed(place, token_id)
            if step is None:
                return False
        after = constraint.places.all[step.after]
        if not after.is_free or after.mask is None or not self._way.step(place, after, token_id, remaining):
            return False
        if step.walk_ends != BEFORE | BEHIND:
            constraint.places.note_walkable(place, step, constraint.ends)
        self._num_untold += 1
        self._ahead = None
        self._places.append(after)
        self._tokens.append(token_id)
        return True

    def _allowed(self, place: Place, token_id: int) -> Step | None:
        """A step that is known or in the mask, to a place that is shared."""
        words = self._constraint.words
        is_allowed = place.step(token_id) is not None or place.allows(token_id)
        if place.situation is None or token_id in words.vocabulary.eos_ids or not is_allowed:
            return None
        return self._constraint.places.step(place, token_id, words.vocabulary.bytes_of(token_id) or b"")

    def standing(self) -> Standing | None:
        place = self._places[-1]
        if place is None or self._way.is_on_known_way:
            return None
        return Standing(self._constraint.places.known_steps, place.number, self._way.bound)

    def walked(self, way: Way) -> None:
        self._way.walked(way)
        self._num_untold += way.num_steps
        self._ahead = None
        self._walked += ((len(self._tokens), way),)
        self._places.append(self._constraint.places.all[way.place])
        self._tokens.append(way.token_id)

    def _write_out(self) -> None:
        """All tokens, and what is behind them."""
        if walked := self._walked:
            numbered, self._walked = self._constraint.places.all, ()
            write_out(self._places, walked, lambda way: [numbered[place] for place in way.places], first=1)
            write_out(self._tokens, walked, lambda way: way.token_ids)
            self._way.write_out(walked)

    def follow(self, token_id: int, remaining: int) -> Followed:
        found = follow(self, token_id, remaining)
        place = self._places[-1]
        if found is FREE and place is not None:
            place.is_free = True
        return found

    def new_mask(self) -> npt.NDArray[np.uint32]:
        """That of `fill_mask` where it is not known, kept for every text that comes by; do not write to it."""
        native = self._native if self._num_untold else self._matcher
        found = self._put_together(native)
        if found is not None:
            return found
        row, address, size = self._constraint.words.scratch()
        native.unsafe_compute_mask_ptr(address, size)
        self._check()
        place = self._places[-1]
        found = row if place is None else self._constraint.places.learn(place, row)
        return row.copy() if found is row else found

    def learn(self, mask: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Keep what llguidance's matcher says here: `new_mask`."""
        self._check()
        place = self._places[-1]
        if place is None:
            return mask
        places = self._constraint.places
        loops = places.loops  # another text may begin meanwhile
        if loops is not None and self._tokens:
            self._find_loop(loops, place, mask)
        return places.learn(place, mask)

    def _check(self) -> None:
        failure = self.failure()
        if failure is not None:
            raise failure

    def _put_together(self, native: Native) -> npt.NDArray[np.uint32] | None:
        """The mask where it is told by what all free strings have in common, or by the text that must follow."""
        words, ahead, place = self._constraint.words, self._ahead, self._places[-1]
        if ahead is not None and ahead.forced.text:
            return None
        places = self._constraint.places
        loops = places.loops  # another text may begin meanwhile
        if loops is not None and place is not None and self._tokens:
            self._find_loop(loops, place)
            if place.loop == STRING:
                mask = words.open_strings.mask(native, may_be_key=loops.has_keys)
                self._check()
                return places.learn(place, mask)
        text = native.compute_ff_bytes() if ahead is None or ahead.is_spent else b""
        if not text:
            return None
        self._check()
        self._ahead = Ahead(Forced(text, b""), None, ForcedRun(text, words))
        return self.known_mask(ANY_LENGTH)

    def _find_loop(self, loops: Loops, place: Place, mask: npt.NDArray[np.uint32] | None = None) -> None:
        """Where the first of its tokens comes. Inside a string that is free any character may follow."""
        self._write_out()
        words, tokens = self._constraint.words, self._tokens
        behind = words.stays[tokens[-1]]
        if behind & loops.string_behind:
            tilde = words.ids[TILDE]
            if not (self._native.validate_tokens([tilde]) if mask is None else words.allows_byte(mask, TILDE)):
                return
            opened = open_string(words.text_of(tokens[-3:])) or self._opened()
        elif behind & loops.number_behind and b"." in words.text_of(tokens[-2:]):
            opened = self._opened()
        else:
            return
        place.opened, place.loop = opened, loops.at(opened)

    def _opened(self) -> bytes:
        """See `open_behind`."""
        places = self._places
        num = len(places) - 1
        while (place := places[num]) is None or place.opened is None:  # that of the start is known
            num -= 1
        return open_behind(place.opened, self._constraint.words.text_of(self._tokens[num:]))

    @property
    def place(self) -> Place | None:
        """The same for all texts of the constraint that are known to go on alike; None where it is not kept."""
        return self._places[-1]

    @property
    def is_native(self) -> bool:
        """Whether all of the mask is llguidance's: not once the text has ended, nor with checks beside it."""
        return not self._ended and isinstance(self._matcher, LLMatcher)

    @property
    def native(self) -> LLMatcher | None:
        """For filling masks of many matchers in one call; None where it is not `is_native`."""
        native = None if self._ended else self._native
        return native if isinstance(native, LLMatcher) else None

    def failure(self) -> ConstraintError | None:
        """What went wrong in the native engine, as far as it was told, if anything did."""
        if not self._matcher.is_error():
            return None
        return ConstraintError(f"the grammar failed: {short_reason(self._matcher.get_error())}")

    def accept(self, token_id: int) -> None:
        place, constraint = self._places[-1], self._constraint
        if place is not None and place.loop and constraint.places.loops is not None and self._stays(place, token_id):
            self._num_untold += 1
            self._ahead = None
            self._places.append(place)
            self._tokens.append(token_id)
            self._way.accept(token_id)
            return
        if token_id in self._constraint.words.vocabulary.eos_ids:
            if not self.can_end:
                raise self._not_allowed(token_id)
            self._ended = True
            self._ahead = None
            self._way.accept_end()
            self._places.append(None)
            self._tokens.append(token_id)
            return
        vocabulary = self._constraint.words.vocabulary
        if self._ended or not 0 <= token_id < vocabulary.size:
            raise self._not_allowed(token_id)
        place, text = self._places[-1], vocabulary.bytes_of(token_id) or b""
        ahead = None if self._ahead is None else self._ahead.behind(text)
        is_known = place is not None and (place.step(token_id) is not None or place.allows(token_id))
        if is_known or ahead is not None:
            self._num_untold += 1  # its effort comes when it is told
        elif self._native.try_consume_tokens([token_id]) == 1:
            self._way.told(1)
        elif self._native.is_error():
            raise ConstraintError(f"the grammar failed: {short_reason(self._native.get_error())}")
        else:
            raise self._not_allowed(token_id)
        self._ahead = ahead
        step = None if place is None else constraint.places.step(place, token_id, text)
        self._places.append(None if step is None else constraint.places.all[step.after])
        self._tokens.append(token_id)
        self._way.accept(token_id)

    def _stays(self, place: Place, token_id: int) -> bool:
        """Whether the token may follow there, and leads there again."""
        stays = self._constraint.words.stays
        return 0 <= token_id < len(stays) and bool(stays[token_id] & place.loop) and place.allows(token_id)

    def forced(self) -> tuple[int, ...]:
        return () if self._ended else forced_run(self._native, self._constraint.words.vocabulary.num_words)

    def forced_text(self) -> Forced:
        place = self._places[-1]
        if place is not None and place.forced is not None:
            return place.forced
        if self._ended:
            return NOTHING_FORCED
        ahead = self._ahead
        if ahead is None or ahead.mask is None:
            ahead = look_ahead(self._native, self._constraint.words)
            self._ahead = None if ahead is NOTHING_AHEAD else ahead
        if place is not None:
            place.forced = ahead.forced
        return ahead.forced

    def fits(self, remaining: int) -> bool:
        if remaining < 0:
            return False
        if self._way.bound <= remaining or self.can_end:
            return True
        ending = self._way.found(self._native, remaining)
        return ending is not None and ending.num_tokens <= remaining

    def allow_behind(self, row: npt.NDArray[np.uint32], text: bytes, remaining: int) -> None:
        words = self._constraint.words
        subtree = words.vocabulary.subtree(text)
        if subtree is None or self._ended or self._way.bound + self._constraint.ends.highest_cost >= remaining:
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
        self._write_out()
        if not 0 <= count < len(self._places):
            raise ConstraintError(f"cannot take back {count} tokens of {len(self._places) - 1}")
        if count == 0:
            return
        del self._places[-count:], self._tokens[-count:]
        self._ahead = None
        self._way.rollback(count)
        texts = count - self._ended
        self._ended = False
        untold = min(texts, self._num_untold)
        self._num_untold -= untold
        if texts > untold and not self._matcher.rollback(texts - untold):
            raise ConstraintError(f"the grammar failed: {short_reason(self._matcher.get_error())}")

    def clone(self) -> GrammarMatcher:
        self._constraint.places.expect_text()
        self._write_out()
        native = self._native.deep_copy()
        twin = GrammarMatcher(self._constraint, native, self._places.copy(), self._tokens.copy(), self._way.clone())
        twin._ended, twin._ahead = self._ended, self._ahead
        return twin

    def shortest_ending(self, budget: int) -> tuple[int, ...] | None:
        if self.can_end:
            return ()
        ending = self._way.found(self._native, 0)
        return None if ending is None or ending.num_tokens > budget else tuple(ending.tokens())

    def _not_allowed(self, token_id: int) -> ConstraintError:
        self._write_out()
        num_tokens = len(self._places) - 1
        return ConstraintError(f"token {token_id} is not allowed by the constraint after {num_tokens} tokens")
