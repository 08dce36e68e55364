"""Requests that decode one token each, step after step, as arrays: most of a step's cost no longer grows with them.

Owned by `core.EngineCore`, which makes one when a plan has shown that the batch is steady and ends it when somebody
comes or goes. In between, how far the requests have come is known here alone; `settle` tells them. A request is
*watched* when each of its tokens must be looked at as it comes: for a stop string, for whoever reads the stream. The
others are looked at where they may end or where tokens are forced, and their text is made in one go. One under a
constraint is drawn with the others, under its mask (`led.Led`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from niwaki.kernels.float_logits import finite_highest, float_logits, highest
from niwaki.kernels.plan import Spans
from niwaki.kernels.steady import take_highest
from niwaki.kernels.transfer import on_device
from niwaki.radix.cache import Cache
from niwaki.runtime.api import Generation, NiwakiError
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.protocol import Matcher
from niwaki.runtime.forward.runner import Batch, Row
from niwaki.runtime.loop.ahead import Flight, drawing_of
from niwaki.runtime.loop.layouts import with_guesses, with_pieces
from niwaki.runtime.loop.led import Filled, Led
from niwaki.runtime.loop.roster import pages_of
from niwaki.runtime.loop.untold import Taken, Untold
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.drafts import Listener, said_behind
from niwaki.runtime.requests.jobs import GenerateJob
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.sampler import PlainDraws, draw_all, rows_of

SPARE_PAGES = 4  # columns by which the page table grows
# Steps for which a batch under masks must have been steady before it runs ahead. Where something is forced in a text,
# what was launched for it is in vain, so it waits for a step; who is steady for so long is forced seldom.
STEADY_STEPS = 4


class Decoding:
    """`requests` stand in the order of the batch; a *place* is an index into it."""

    def __init__(
        self,
        requests: Sequence[Request],
        end_ids: Collection[int],
        vocab_size: int,
        page_size: int,
        prefills: Sequence[Request] = (),
    ) -> None:
        """Of each request all tokens but the last are computed. `prefills`: of whom pieces are computed beside it."""
        self.requests = list(requests)
        self.prefills = prefills
        self.num_steps = 0
        self._page_size = page_size
        count = len(requests)
        pages = [pages_of(request) for request in requests]
        self._held = np.array([len(own) for own in pages], np.int64)
        self._steps_in_pages = 0  # steps before anyone needs another page
        self._table = np.zeros((count, int(self._held.max()) + SPARE_PAGES), np.int32)
        for place, own in enumerate(pages):
            self._table[place, : len(own)] = own
        self._starts = np.array([request.num_computed for request in requests], np.int64)  # computed so far
        self._token_ids = np.array([request.ids[-1] for request in requests], np.int32)  # the next to compute
        self._last = np.array([_last_of(request) for request in requests], np.int64)  # computed at its end
        self._may_end = np.zeros(vocab_size, np.bool_)  # by token id: it may end somebody's text
        self._may_end[[*end_ids, *(end for request in requests for end in request.params.stop_token_ids)]] = True
        self._untold = Untold(count)
        self._num_read = Generation.num_read  # before anybody is asked whether he is read
        self._is_plain = np.array([request.is_drawn_plainly for request in requests])  # with the others, in one go
        self._is_watched = np.array([request.is_watched for request in requests])
        self._draws = PlainDraws.of(
            [(request.params, request.seed, request.num_generated) for request in requests], vocab_size
        )
        self._listener: Listener | None = None
        self._guessed: Batch | None = None  # the last one with guesses
        self._vocab_size = vocab_size
        self.flight: Flight | None = None  # a step behind those that are counted, where one is under way
        self._look_at_kinds()

    def _look_at_kinds(self) -> None:
        """What follows from who is plain and who is watched, and the batch of the arrays as they are."""
        plain = np.flatnonzero(self._is_plain)
        self._plain = None if len(plain) == len(self.requests) else plain
        self._special: list[int] = np.flatnonzero(~self._is_plain).tolist()
        matchers = [self.requests[place].matcher for place in plain.tolist()]
        self._led = Led(plain, matchers, len(self.requests), self._vocab_size)
        self._find_unread()
        self._count_left()
        self._lay_out()

    def _count_left(self) -> None:
        self._steps_left = int((self._last - self._starts).min())  # before somebody's budget ends

    def _find_unread(self) -> None:
        """Those whom somebody may begin to read, and whether a token alone can make somebody look."""
        self._unread = [
            request
            for request, is_watched in zip(self.requests, self._is_watched.tolist(), strict=True)
            if not is_watched and isinstance(request.job, GenerateJob) and request.index == 0
        ]
        self._is_quiet = not (self._special or self._led.matchers or self._is_watched.any())

    def _lay_out(self) -> None:
        spans = Spans(self._starts, np.ones(len(self.requests), np.int64), self._table, self._held)
        self.batch = Batch(self._token_ids, spans, None, as_computed=True)

    def beside(self, pieces: Sequence[Row]) -> Batch:
        """The batch with pieces of prompts behind it, which want no logits."""
        return with_pieces(self.batch, pieces, self._page_size)

    # -- before the forward pass --------------------------------------------------------------------------------------

    def reserve(self, cache: Cache) -> bool:
        """Pages for the tokens of this step. False where they run short: the scheduler must say who yields."""
        if self._steps_in_pages:
            self._steps_in_pages -= 1
            return True
        starts = self._next_starts()
        for place in ((starts >= self._held * self._page_size) & (starts < self._last)).nonzero()[0].tolist():
            request = self.requests[place]
            assert request.lease is not None, "running requests hold a lease"
            if not cache.reserve(request.lease, int(starts[place]) + 1):
                return False
            self._hold(place, request.lease.page_ids)
        self._steps_in_pages = max(0, int((self._held * self._page_size - starts).min()) - 1)
        return True

    def _next_starts(self) -> npt.NDArray[np.int64]:
        """Where the tokens of the step stand that is launched next."""
        return self._starts if self.flight is None else self._starts + 1

    def _hold(self, place: int, pages: Sequence[int]) -> None:
        """Those behind the ones that were held before are new."""
        held = int(self._held[place])
        if len(pages) > self._table.shape[1]:
            self._table = np.pad(self._table, ((0, 0), (0, len(pages) - self._table.shape[1] + SPARE_PAGES)))
            self._lay_out()
        self._table[place, held : len(pages)] = pages[held:]
        self._held[place] = len(pages)

    def hears_echo(self) -> bool:
        """Whether somebody's text says again what it said before, so that what follows may be guessed."""
        if self._listener is None or not self._listener.has_room:
            self.settle()
            self._listener = Listener([r.ids for r in self.requests], [r.guesser for r in self.requests])
        return self._listener.hears(self._starts, self._token_ids)

    def masked(self) -> list[Matcher]:
        """Those whose masks this step needs."""
        if self._led.is_walking or not (self._led.matchers or self._special):
            return []
        led = [self._led.matchers[row] for row in self._led.ask()]
        return led + [matcher for _, matcher in self._masked_special()]

    def _left(self) -> npt.NDArray[np.int64]:
        """How many tokens the led ones may still write, the one that this step draws included."""
        left: npt.NDArray[np.int64] = (self._last - self._starts)[self._led.at]
        return left

    def _masked_special(self) -> list[tuple[Request, Matcher]]:
        special = [self.requests[place] for place in self._special]
        return [(request, request.matcher) for request in special if request.is_masked and request.matcher is not None]

    def by_request(self, masks: Sequence[Words | NiwakiError]) -> dict[int, Words | NiwakiError]:
        """After `take`: the masks of this step of those that are drawn one by one, of `masked` and what was at hand."""
        found = {self.requests[place].id: mask for place, mask in self._led.masks(self._led.filled(masks))}
        special = [request.id for request, _ in self._masked_special()]
        return found | dict(zip(special, masks[self._led.num_asked :], strict=True))

    # -- after it -----------------------------------------------------------------------------------------------------

    def draw(self, logits: torch.Tensor, masks: Sequence[Words | NiwakiError]) -> npt.NDArray[np.int64] | None:
        """A token for every request that is drawn plainly, anything for the others; None where all must be drawn one by
        one, and below 0 for one that must be. `masks`: of `masked`. Counts the step as computed."""
        tokens = self._drawn(logits, masks)
        self._count_step()
        return tokens

    def _count_step(self) -> None:
        self._starts += 1
        self._steps_left -= 1
        self.num_steps += 1
        self._draws.advance()

    def _drawn(self, logits: torch.Tensor, masks: Sequence[Words | NiwakiError]) -> npt.NDArray[np.int64] | None:
        plain = self._plain
        if plain is not None and not len(plain):
            return np.zeros(len(self.requests), np.int64)
        if (walked := self._led.last_walked(self._draws, logits, self._may_end, self._last, self._starts)) is not None:
            return walked
        if plain is None and not self._led.matchers:
            return self._draws.draw(logits)
        draws = self._draws if plain is None else self._draws.of_rows(plain)
        values = logits if plain is None else rows_of(logits, plain)
        filled = self._led.filled(masks)
        best = draws.best(values)
        if best is None:
            return None
        if draws.all_greedy:  # what is known to follow needs no mask
            self._tell_known(best, filled)
        try:
            drawn = self._led.drawn_under(draws, values, best, filled)
        except Exception:  # whose fault it is shows where each is drawn by itself
            drawn = self._led.drawn_beside(draws, values, best)
        else:
            if not draws.all_greedy:
                self._tell_known(drawn, filled)
        if plain is None:
            return drawn
        tokens = np.zeros(len(self.requests), np.int64)
        tokens[plain] = drawn
        return tokens

    def _tell_known(self, tokens: npt.NDArray[np.int64], filled: Filled) -> None:
        """Tell the matchers that know the tokens drawn, by plain row, from other texts; not where they may end one."""
        led = self._led
        token_ids, last = tokens[led.at_plain], self._last[led.at] - 1
        looks = (self._is_watched[led.at] | self._may_end[token_ids] | (self._starts[led.at] >= last)).tolist()
        led.tell_known(token_ids.tolist(), self._left().tolist(), looks, filled)

    def take(self, tokens: npt.NDArray[np.int64] | None, *, has_logits: bool = True) -> Taken:
        """Keep what `draw` gave, but for the places that are told, whose requests are settled. Where the logits are
        gone, who is to be drawn one by one has not computed this step."""
        self._watch_streamed()
        if tokens is None:
            taken = Taken([], set(), list(range(len(self.requests))))
        else:
            taken = self._looked_over(tokens)
            self._token_ids[:] = tokens
        if not has_logits:
            self._starts[taken.one_by_one] -= 1
        if self._untold.is_full:
            self.settle()
            self._untold.clear()
        for places in filter(None, (taken.looked_at, taken.one_by_one)):
            self._settle(places)
            self._untold.pass_over(places)
        if tokens is not None:
            self._untold.row[:] = tokens
        self._untold.count_row()
        return taken

    def begin_walk(self) -> None:
        """Before the first step: walk, where the masks of all are known in case a step is not."""
        if self._draws.all_greedy and self._plain is None and not self._is_watched.any() and self._led.all_known():
            self._led.begin_walk()

    def take_quietly(self, logits: torch.Tensor) -> bool:
        """`draw` and `take` at once, of a batch in which every token is the likeliest, where none makes anybody look.
        False, and nothing done, elsewhere. `logits`: float32, or bfloat16 as they were computed."""
        self._watch_streamed()
        led = self._led
        is_quiet = (self._is_quiet or led.is_walking) and self._steps_left > 1 and not self._untold.is_full
        if not (is_quiet and self._draws.all_greedy and logits.is_cpu):
            return False
        positions = self._draws.arrays[1]
        values, best = highest(logits)
        if led.is_walking and not led.knows(best, self._last, self._starts):
            return False
        arrays = (self._may_end, self._token_ids, self._untold.row, self._starts, positions)
        if not take_highest(values, best, *arrays):
            return False
        led.go()
        self._untold.count_row()
        self._steps_left -= 1
        self.num_steps += 1
        return True

    def _looked_over(self, tokens: npt.NDArray[np.int64]) -> Taken:
        """Which of these tokens somebody must look at. Matchers are told theirs, but where it may end the request."""
        may_end = self._may_end[tokens]
        if self._is_quiet and self._steps_left > 0 and not may_end.any():
            return Taken([], set(), [])
        must_look = self._is_plain & (self._is_watched | may_end | (self._starts >= self._last))
        led = self._led
        looks = must_look[led.at]
        if led.all_told():  # what they were told ends none, but somebody may have begun to read meanwhile
            if self._draws.all_greedy and self._plain is None and not must_look.any():
                led.begin_walk()
            return Taken(must_look.nonzero()[0].tolist(), set(led.places[looks].tolist()), self._special.copy())
        accepted, refused = led.follow(tokens[led.at].tolist(), (self._left() + 1).tolist(), looks.tolist())
        must_look[accepted] = True
        must_look[refused] = False
        return Taken(must_look.nonzero()[0].tolist(), set(accepted), sorted([*self._special, *refused]))

    def settle(self) -> None:
        """Tell all requests how far they have come, and their matchers."""
        self._led.end_walk()
        self._settle(range(len(self.requests)))

    def _settle(self, places: Collection[int]) -> None:
        for place in places:
            request = self.requests[place]
            if request.lease is None:  # it has ended
                continue
            request.computed_up_to(int(self._starts[place]))
            tokens = self._untold.take(place)
            if len(tokens):
                request.extend(tokens)

    def _watch_streamed(self) -> None:
        """Whoever begins to read a stream is told every token from now on."""
        if self._num_read == Generation.num_read:
            return
        self._num_read = Generation.num_read
        if not any(request.is_watched for request in self._unread):
            return
        self._led.end_walk()
        self._is_watched |= np.array([request.is_watched for request in self.requests])
        self._find_unread()

    def resume(self) -> bool:
        """After a step that was run without it: whether the same requests go on, a token each, from where they are."""
        if any(request.lease is None or request.num_pending != 1 for request in self.requests):
            return False
        for place, request in enumerate(self.requests):
            self._starts[place] = request.num_computed
            self._token_ids[place] = request.ids[-1]
            self._last[place] = _last_of(request)
            # All of them anew: where the end of a prompt was healed, its commit may have put another's equal page in
            # the place of one, which is somebody else's by now.
            self._held[place] = 0
            self._hold(place, pages_of(request))
        self._count_left()
        self._draws.move_to([request.num_generated for request in self.requests])
        self._steps_in_pages = self.num_steps = 0
        self._untold.clear()
        self._listener = None
        self._led.ask_all()
        return True

    # -- a step with guesses ------------------------------------------------------------------------------------------

    @property
    def takes_guesses(self) -> bool:
        """Whether all are drawn from the logits as they are: what is drawn at all places of one is known at once."""
        return self._plain is None and not self.is_led

    def guessing(self, guesses: Sequence[TokenIds]) -> Batch:
        """The batch with a guess behind each token, for which the requests hold pages. All of them are settled."""
        for place, request in enumerate(self.requests):
            pages = pages_of(request)
            if len(pages) > self._held[place]:
                self._hold(place, pages)
        self._guessed = with_guesses(self.batch, guesses, self._guessed)
        return self._guessed

    def drawn_at(self, logits: torch.Tensor, batch: Batch) -> npt.NDArray[np.int64] | None:
        """What is drawn at each token of a batch of `guessing`, were those before it right. None where one cannot be
        drawn so."""
        if self._draws.all_greedy and logits.is_cpu:
            return finite_highest(logits)
        return draw_all(self._draws.ahead(batch.spans.counts), float_logits(logits))

    def take_guessed(self, tokens: npt.NDArray[np.int64], guesses: Sequence[TokenIds]) -> list[int] | None:
        """Go on by what was `drawn_at`, and tell the requests. How many tokens of each guess were right; None, and
        nothing done, where somebody must look at one of the new tokens."""
        self._watch_streamed()
        said, left, ends = said_behind(guesses, tokens), (self._last - self._starts).tolist(), self._may_end.item
        may_end = any(room <= len(new) or any(map(ends, new)) for room, new in zip(left, said, strict=True))
        if may_end or not self._is_quiet:
            return None
        for place, (request, guess, new) in enumerate(zip(self.requests, guesses, said, strict=True)):
            request.take_guessed(new, len(guess))
            self._starts[place] += len(new)
            self._token_ids[place] = new[-1]
            if self._listener is not None and not self._listener.takes(place, request.ids, request.guesser):
                self._listener = None
        # Of so few rows lists are quicker than arrays.
        self._steps_left = min(room - len(new) for room, new in zip(left, said, strict=True))
        pages = zip(self._held.tolist(), self._starts.tolist(), strict=True)
        self._steps_in_pages = max(0, min(held * self._page_size - start for held, start in pages))
        self._draws.move_to([request.num_generated for request in self.requests])
        self._untold.clear()
        return [len(new) - 1 for new in said]

    # -- a step ahead -------------------------------------------------------------------------------------------------

    @property
    def is_led(self) -> bool:
        """Whether some are drawn under masks, which hang on the token before."""
        return bool(self._led.matchers)

    @property
    def may_run_ahead(self) -> bool:
        """Whether all tokens are drawn from the logits, under masks or as they are, and nothing is forced often."""
        return self._plain is None and (not self.is_led or self.num_steps >= STEADY_STEPS)

    def ahead(self) -> tuple[list[Request], Batch]:
        """The step behind the one that is under way: its batch, and who is in it, all but those whose budget ends with
        the token that is not read yet; maybe nobody."""
        self._led.end_walk()
        if self.flight is None:
            return self.requests, replace(self.batch, as_computed=False)
        starts, table, held, requests = self._next_starts(), self._table, self._held, self.requests
        going = starts < self._last
        if not going.all():
            starts, table, held = starts[going], table[going], held[going]
            requests = [self.requests[place] for place in going.nonzero()[0].tolist()]
        spans = Spans(starts, np.ones(len(requests), np.int64), table, held)
        return requests, Batch(np.zeros(len(requests), np.int32), spans, None, self.flight.ids_for(requests))

    def narrow(self, requests: Sequence[Request]) -> None:
        """After the tokens of a step: drop who is not in the step that was launched behind it, or goes on otherwise;
        maybe everybody."""
        launched = {id(request) for request in requests}
        left = [  # none is pending where all were told when their tokens were too many to keep, but for the last
            place
            for place, request in enumerate(self.requests)
            if id(request) in launched and request.lease is not None and request.num_pending <= 1
        ]
        if not left:
            self.requests = []
        elif len(left) < len(self.requests):
            self._drop_but(np.array(left, np.int64))

    def launched(
        self,
        requests: Sequence[Request],
        logits: torch.Tensor,
        before: Flight | None,
        masks: Sequence[Words | NiwakiError] = (),
    ) -> Flight | None:
        """Draw for the step of `ahead`, of which these are the logits, without waiting; of those who are still there,
        under the masks of `masked`. `before`: the step before it. None where nobody is there, or a mask is an error."""
        places = {id(request): place for place, request in enumerate(self.requests)}
        rows = np.array([row for row, request in enumerate(requests) if id(request) in places], np.int64)
        if not len(rows):
            return None
        if len(rows) < len(requests):
            requests = [requests[row] for row in rows.tolist()]
            logits = logits[on_device(rows, logits.device)]
        under = self._led.all_masks(masks)
        if under is None:
            return None
        if before is not None and before.requests == requests:
            return Flight.of(requests, before.drawing, logits, self._led.plain_rows, under)
        draws = self._draws.of_rows(np.array([places[id(request)] for request in requests], np.int64))
        if self.flight is not None:
            draws.advance()
        drawing = drawing_of(draws, self._vocab_size, logits.device)
        return Flight.of(requests, drawing, logits, self._led.plain_rows, under)

    def land(self) -> npt.NDArray[np.int64] | None:
        """The tokens of the step that is under way, which is then counted as computed. None where one could not be
        drawn; the step counts for nothing then."""
        assert self.flight is not None
        flight, self.flight = self.flight, None
        tokens = flight.read(self.requests)
        if (tokens < 0).any():
            return None
        self._count_step()
        return tokens

    # -- who goes on --------------------------------------------------------------------------------------------------

    def keep(self, looked_at: Sequence[int]) -> bool:
        """Drop the requests that have ended, of those that were looked at, and read the new tokens of the others.

        False where the batch is no longer steady: nobody is left, or a request has more than one token to compute.
        """
        ended = []
        for place in looked_at:
            request = self.requests[place]
            if request.lease is None:
                ended.append(place)
            elif request.num_pending != 1:
                return False
            else:
                self._token_ids[place] = request.ids[-1]
                if not self._is_plain[place]:  # a healed token is none of its budget
                    self._last[place] = _last_of(request)
        if len(ended) == len(self.requests):
            self.requests = []
            return False
        if ended:
            self._drop_but(np.delete(np.arange(len(self.requests)), ended))
        return True

    def _drop_but(self, left: npt.NDArray[np.int64]) -> None:
        """The others are settled, or have ended."""
        self._led.end_walk()
        self.requests = [self.requests[place] for place in left.tolist()]
        self._table, self._held, self._starts = self._table[left], self._held[left], self._starts[left]
        self._token_ids, self._last, self._draws = self._token_ids[left], self._last[left], self._draws.of_rows(left)
        self._untold.keep(left)
        self._is_plain, self._is_watched = self._is_plain[left], self._is_watched[left]
        self._listener = None
        self._look_at_kinds()


def _last_of(request: Request) -> int:
    """How many of its tokens are computed when the last one that it may generate is drawn."""
    return request.length - 1 + request.remaining_new
