"""How far one text of a grammar is from its end, at most, and the way there, as far as it is known.

Owns that of one text; the place in the grammar is its matcher's (`grammar_engine.py`), which says when it moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from niwaki.runtime.constraints.grammar_endings import EndingSearch, KnownEnds
from niwaki.runtime.constraints.grammar_places import Place
from niwaki.runtime.constraints.grammar_vocabulary import Ending, Shorter, completes
from niwaki.runtime.constraints.guidance import Effort, Native
from niwaki.runtime.constraints.walks import Walked, Way, write_out

FAR: Final = 1_000_000  # the distance where no ending was found
PLACE_EFFORT: Final = 150  # of all searches behind one token of a text: about 3 ms
SAVED_EFFORT: Final = 600  # that is left from the tokens before: the way out of many required keys is long


class WayToEnd:
    """The nearest end is followed by a bound: each token moves it away by at most its cost, so only when bound and
    budget meet must an ending be looked for, and only tokens that cost more than what is left to spare are doubted.
    All of it happens between two steps of the engine, so what searches cost behind one token is limited; where that
    is spent, what is left is the ending that is known.
    """

    __slots__ = (
        "_admitted", "_bounds", "_ending", "_ends", "_is_searched", "_is_sure", "_num_written", "_uncounted",
        "_uncounted_ways", "effort",
    )  # fmt: skip

    def __init__(self, ends: KnownEnds) -> None:
        self._ends = ends
        self._bounds = [ends.shortest.num_tokens]  # after each accepted token: its end is at most so many away
        self._ending: Ending | None = ends.shortest
        self._is_sure = True  # that it is one from here; else a guess, from some tokens before
        self._is_searched = True  # a shorter one was looked for
        self._num_written = 0  # characters since it was sure, but for those of tokens that are not counted yet
        self._uncounted: list[int] = []
        self._uncounted_ways: list[Way] = []  # by which it walked since, up to where its end was sure
        self._admitted: tuple[int, Ending] | None = None  # the token, and the ending behind it that was seen
        self.effort = Effort(SAVED_EFFORT)

    @property
    def bound(self) -> int:
        """An end is at most so many tokens away."""
        return self._bounds[-1]

    @property
    def is_on_known_way(self) -> bool:
        """Whether the text has an ending of its own, which is not empty, and may be written on."""
        return self._is_sure and self._ending is not self._ends.words.nothing

    def told(self, num_tokens: int) -> None:
        """The engine has read so many tokens: what may be spent on them."""
        self.effort.add(PLACE_EFFORT * num_tokens, SAVED_EFFORT)

    def bound_behind(self, token_id: int) -> int:
        return self._bounds[-1] + self._cost(token_id)

    def end_here(self) -> None:
        """The text may end where it is."""
        self._bounds[-1] = 0

    def admit(self, token_id: int, behind: Ending | None) -> None:
        """How the text can end if this token is accepted next; None where that is not known."""
        self._admitted = None if behind is None else (token_id, behind)

    # -- moving on, and back

    def accept(self, token_id: int) -> None:
        ending, words, cost = self._ending, self._ends.words, self._cost(token_id)
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
            self._write((token_id,))
            self._bounds.append(self._bounds[-1] + cost)

    def accept_end(self) -> None:
        """An end token."""
        self._bounds.append(0)

    def step(self, place: Place, after: Place, token_id: int, remaining: int) -> bool:
        """`accept` a token between two places, where what is known of them says that a way to an end fits behind; else
        it stays."""
        is_sure = self._is_sure
        if is_sure and self._ending is not self._ends.words.nothing:
            return False
        before, ends = self._bounds[-1], self._ends
        cost = ends.cost(token_id)
        farthest = cost + ends.value
        bound = before + cost if before else farthest
        if bound < remaining or (place.can_end and farthest < remaining):
            self._write((token_id,))
            if bound >= remaining:
                self._bounds[-1], bound = 0, farthest
        elif place.can_end and after.can_end:
            self._bounds[-1] = bound = 0
            self._ending, self._is_sure = self._ends.words.nothing, True
        else:
            return False
        self._admitted = None
        self._bounds.append(bound)
        return True

    def walked(self, way: Way) -> None:
        if way.num_bounded < way.num_steps:  # since then it is not sure how the text ends
            self._ending, self._is_sure = self._ends.words.nothing, True
        if way.num_bounded:
            self._write(())
            self._uncounted_ways.append(way)
        self._admitted = None
        self._bounds.append(way.bound)

    def write_out(self, walked: Walked) -> None:
        """Of all steps by which the text has walked what was found behind them; before anything but `accept`, `step`
        and `walked`."""
        write_out(self._bounds, walked, lambda way: way.bounds, first=1)

    def rollback(self, count: int) -> None:
        del self._bounds[-count:]
        self._is_sure, self.effort, self._admitted = False, Effort(SAVED_EFFORT), None
        self._num_written, self._uncounted, self._uncounted_ways = 0, [], []

    def clone(self) -> WayToEnd:
        twin = WayToEnd(self._ends)
        twin._bounds, twin._ending = self._bounds.copy(), self._ending
        twin._is_sure, twin._is_searched, twin._num_written = self._is_sure, self._is_searched, self._num_written
        twin._uncounted, twin._uncounted_ways = self._uncounted.copy(), self._uncounted_ways.copy()
        return twin

    def _write(self, token_ids: Sequence[int]) -> None:
        """The ending stays a guess behind these."""
        if self._is_sure:
            self._is_sure, self._num_written, self._uncounted, self._uncounted_ways = False, 0, [], []
        self._uncounted += token_ids  # most texts end without a look at them

    def _cost(self, token_id: int) -> int:
        """By how much this token may move the end away. What the last opening byte begins is not settled by it: where
        the bound is the length of an ending since then, the next token may still choose another, as a longer key."""
        own = self._ends.cost(token_id)
        is_exact = self._is_sure or self._bounds[-1] == 0
        return own + self._ends.value if is_exact else own

    # -- looking for an end

    def found(self, place: Native, enough: int) -> Ending | None:
        """A way to the end from here; where the straight one takes more than `enough` tokens, a shorter one is looked
        for. The bound becomes its length."""
        guess = None if self._is_sure else self._ending
        if not self._is_sure:
            text = self._search(guess).known_end(place, enough)
            # No way is shorter than the known one as long as all of it is needed.
            self._is_searched = text is not None and (not text or (guess is not None and text == guess.text))
            if text is None:
                text = self._search(guess).straight(place)
            self._end_with(text)
        if not self._is_searched and (self._ending is None or self._ending.num_tokens > enough):
            self._is_searched = True
            text = self._search(guess).shortest(place)
            known = self._ending
            self._end_with(text)
            if known is not None and (self._ending is None or known.num_tokens <= self._ending.num_tokens):
                self._end_with(known.text)
        return self._ending

    def found_behind(self, place: Native, token_id: int, ending: Ending, budget: int) -> Ending | None:
        """How the text, of which `ending` is one from here, is seen to be able to end within `budget` tokens after
        this one."""
        words = self._ends.words
        text = words.vocabulary.token_bytes[token_id] or b""
        if ending.begins_with(text) and ending.behind(len(text)).num_tokens <= budget:
            return ending.behind(len(text))
        rests = ending.rests(int(words.num_characters[token_id]))  # what closed before still closes
        shorter = Shorter()
        for start, num_tokens in zip(rests, ending.counts[rests].tolist(), strict=True):
            rest = ending.from_byte(start)
            if num_tokens <= budget and shorter.completes(place, rest, words, [token_id]):
                return rest
        if ending.num_tokens > budget and completes(place, ending, words, [token_id]):
            return None  # it is no step towards the end: what would be found is this ending again
        behind = place.deep_copy()
        if not behind.consume_token(token_id):
            return None
        searches = self._search(ending)
        for search in (searches.straight, searches.shortest):
            found = search(behind)
            if found is not None and (rest := words.ending(found)).num_tokens <= budget:
                return rest
        return None

    def _end_with(self, text: bytes | None) -> None:
        known = self._ending
        if text is not None and known is not None and known.whole.endswith(text):
            self._ending = known.behind(len(known.whole) - known.start - len(text))
        else:
            self._ending = None if text is None else self._ends.words.ending(text)
        self._is_sure = True
        self._bounds[-1] = FAR if self._ending is None else self._ending.num_tokens

    def _search(self, ending: Ending | None) -> EndingSearch:
        """`ending`: what is known of this text's, from some characters before."""
        num_characters = self._ends.words.num_characters
        for way in self._uncounted_ways:
            self._uncounted += way.token_ids[-way.num_bounded :]
        self._num_written += sum(int(num_characters[token_id]) for token_id in self._uncounted)
        self._uncounted, self._uncounted_ways = [], []
        return EndingSearch(self._ends, ending, self._num_written, len(self._bounds), self.effort)
