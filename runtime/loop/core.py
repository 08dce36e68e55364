"""The engine core: one plain object with `step()`. Owns the roster, the KV pages and the model runner; no threads.

A step reads: plan, make room, run the model, take what it says. `host.engine_thread` calls it, from one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from niwaki.kernels.float_logits import float_logits
from niwaki.kernels.sample import Longs
from niwaki.runtime.api import Cancelled, CapacityError, GenerationError, NiwakiError
from niwaki.runtime.api.faults import told
from niwaki.runtime.api.readiness import readiness
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.masks import MaskFiller, Masks
from niwaki.runtime.constraints.protocol import Matcher
from niwaki.runtime.forward.runner import Batch, Row, Runner
from niwaki.runtime.forward.step_times import DeviceTimes, HostTimes, StepTimes
from niwaki.runtime.kv.kv_pages import KVPages
from niwaki.runtime.kv.memory import most_logits
from niwaki.runtime.kv.tiers import Tiers
from niwaki.runtime.loop import scheduler
from niwaki.runtime.loop.counters import Counters
from niwaki.runtime.loop.decoding import Decoding
from niwaki.runtime.loop.delivery import Delivery
from niwaki.runtime.loop.pause import Pause
from niwaki.runtime.loop.roster import Roster, pages_of
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.drafts import DRAFT_ROWS
from niwaki.runtime.requests.jobs import GenerateJob, Job
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.sampler import Sampled, rows_of

log = logging.getLogger("niwaki.engine")

# Steps without a guess after which one or two requests run ahead. Whoever repeats himself does so soon again, and a
# guess that is made behind a step that is under way comes one token late. Beside a made-up device that takes 0.5 ms a
# step, a text of which half is said again took 1.12 times as long as in turn without this pause, and 0.99 times with
# it; one that says nothing again 0.81 times.
SILENT_STEPS = 16

# Of a prompt so many pieces must be left, none of which wants logits, for those who decode to become arrays beside it.
STEADY_PIECES = 3

Computed = tuple[torch.Tensor, Sequence[Words | NiwakiError]]  # the logits, and the masks that were filled meanwhile


class EngineCore:
    """Runs requests to their end, one ragged batch a step."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        config: EngineConfig,
        num_pages: int,
        tiers: Tiers | None = None,
        boundaries: Boundaries | None = None,
        *,
        runs_ahead: bool = False,
        keys_per_token: float | None = None,
        draft_rows: int = DRAFT_ROWS,
    ) -> None:
        """Without `boundaries` no token is forced: every one is drawn under its mask. With `runs_ahead` a steady batch
        of requests that are drawn plainly has its next step launched before the tokens of the last one are read.
        `keys_per_token`: as `memory.keys_per_token` gives it. `draft_rows`: requests in a step above which nobody
        guesses."""
        self._runner = runner
        self._config = config
        self._end_ids = frozenset(runner.config.eos_ids)
        self.counters = Counters()
        self.pause = Pause()
        self.pages = KVPages(runner, config, num_pages, tiers)
        self._times: StepTimes = DeviceTimes() if tiers is not None and runner.is_on_gpu else HostTimes()
        self._cache = self.pages.cache
        vocab_size = runner.config.vocab_size
        self._roster = Roster(self.pages, config, self.counters, most_logits(vocab_size), keys_per_token)
        self._decoding: Decoding | None = None  # while the batch is steady
        self._draft_rows = draft_rows if config.draft_tokens else 0
        self._runs_ahead = runs_ahead
        self._masks = MaskFiller((vocab_size + 31) // 32)
        forcing = boundaries if config.force_tokens else None
        self._delivery = Delivery(
            self._roster, self._masks, self.counters, forcing, self._end_ids, vocab_size, self.pause
        )

    # -- what a host may do -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._roster.waiting or self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take in the requests of one job. A steady batch goes on where none of them finds a place in it."""
        if self._decoding is None or not self._roster.is_full_for(request.params.priority for request in requests):
            self._land_and_settle()
        for request in requests:
            try:
                if self._delivery.begin(request):
                    self._roster.wait(request)
            except Exception as error:
                self.abort(request.job, told(error))
                return

    def abort(self, job: Job, error: NiwakiError | None = None) -> None:
        """End every request of the job. What it had computed stays in the tree, as far as it was fully written."""
        try:
            self._land_and_settle()
            for request in [r for r in self._roster.waiting if r.job is job]:
                self._roster.wait_no_more(request)
            for request in [r for r in self._roster.running.values() if r.job is job]:
                self._roster.leave(request)
        finally:  # whatever it is, somebody waits
            end = job.generation if isinstance(job, GenerateJob) else job.pending
            end.fail(error or Cancelled("the request was cancelled"))

    def close(self) -> None:
        """End the threads that it made."""
        self._masks.close()
        self._delivery.close()

    def abort_all(self, error: NiwakiError) -> None:
        """End every request: with its own error where it has failed already, else with this one. Raises nothing."""
        failed, self._delivery.failed = self._delivery.failed, []
        known = {id(r.job): r.job for r in (*self._roster.waiting, *self._roster.running.values())}
        for job, cause in [*failed, *((job, error) for job in known.values())]:
            try:
                self.abort(job, cause)
            except Exception:
                log.exception("a request could not be ended as it should")

    def step(self) -> None:
        """Run one ragged batch and tell whoever waits for its tokens."""
        decoding = self._steady()
        if decoding is None:
            self._step_as_planned()
        elif self._may_run_ahead(decoding):
            self._run_ahead(decoding)
        elif decoding.prefills:
            self._step_beside(decoding)
        elif (guesses := self._guesses(decoding)) is not None:
            self._step_guessing(decoding, guesses)
        else:
            computed = self._compute(decoding.requests, decoding.batch, decoding.masked())
            if computed is not None:
                self._take(decoding, *computed)

    def _step_as_planned(self) -> None:
        plan = self._roster.plan()
        if plan.preempt and self._delivery.take_drawn():  # their matchers must not be told of what is drawn again
            plan = self._roster.plan()
        rows = self._roster.carry_out(plan)
        if not rows:
            if not (self._delivery.take_late() or plan.is_alone):  # then others go on in the next step
                self._refuse_the_impossible()
            self._end_failed()
            return
        self._run(self._with_drafts(rows))
        num_running, num_waiting = len(self._roster.running), len(self._roster.waiting)
        most = self._config.step_tokens
        if scheduler.is_steady(plan, num_running, num_waiting=num_waiting, max_batch_tokens=most):
            self._begin_decoding(num_prompt_tokens=plan.num_tokens - len(plan.rows))

    def _run(self, rows: Sequence[tuple[Request, Row]]) -> None:
        masked = [request for request, row in rows if request.is_masked and row.end >= request.length]
        wanted = [request.matcher for request in masked if request.matcher is not None]
        began = time.perf_counter()
        computed = self._compute([request for request, _ in rows], Batch.of([row for _, row in rows]), wanted)
        if computed is not None:
            self._commit(rows)
            logits, masks = computed
            self._delivery.take_logits(rows, logits, masked, masks, began)
            self._end_failed()

    def _compute(
        self, requests: Sequence[Request], batch: Batch, wanted: Sequence[Matcher]
    ) -> tuple[torch.Tensor, Masks] | None:
        """Run the model, and meanwhile fill the masks of the matchers `wanted`: the logits that the batch asks for, as
        `Runner.forward` gives them, and the masks in the order of the matchers. None where the model failed: all
        `requests` have failed with it, and the engine goes on."""
        self.counters.steps += 1
        masks = self._masks.start(wanted)
        try:
            with self.pause:
                self._times.begin()
                logits = self._runner.forward(batch)
                ended = self._times.end(len(batch.token_ids))
        except Exception as error:
            log.exception("a step failed")
            masks.rows()  # nobody else may touch the matchers before
            self._fail_batch(requests, error)
            return None
        self.pages.note_computed(ended)
        return logits, masks

    def _commit(self, batch: Sequence[tuple[Request, Row]]) -> None:
        for request, row in batch:
            assert request.lease is not None
            first, num_prompt = request.num_computed, request.num_prompt
            request.num_computed += len(row.token_ids) - request.num_guessed(row.end)
            if first < request.num_lost:
                self.counters.recomputed_tokens += min(request.num_computed, request.num_lost) - first
            if first < num_prompt:
                new = min(request.num_computed, num_prompt) - max(first, request.num_lost)
                self.counters.prefilled_tokens += max(0, new)
                # Share the prompt at once; generated tokens go into the tree when the request ends.
                is_whole = request.num_computed >= num_prompt
                if is_whole and request.prefilled is None:
                    request.prefilled = readiness.clock()
                self._cache.commit(request.lease, request.ids, request.num_computed, share_tail=is_whole)

    # -- a steady batch ---------------------------------------------------------------------------------------------

    def _begin_decoding(self, last: Decoding | None = None, *, num_prompt_tokens: int = 0) -> None:
        """After a step of which the next plan would be a repetition: keep those who decode as arrays, those of `last`
        where they still fit. Not a request that has one token of its prompt left: it also has one token to compute, but
        `_commit` must share and count that. `num_prompt_tokens`: what the step computed beyond one token a row."""
        running = list(self._roster.running.values())
        if last is not None and last.requests == running and last.resume():
            self._decoding = last
            return
        requests = [r for r in running if r.samples and r.num_pending == 1 and r.prefilled is not None]
        prefills = [r for r in running if r.prefilled is None] if len(requests) < len(running) else []
        if not requests or len(requests) + len(prefills) < len(running):
            return
        least = max(self._config.page_size, num_prompt_tokens * STEADY_PIECES)
        lasts = all(r.logits_from - r.num_computed > least for r in prefills) and len(requests) > self._draft_rows
        if not prefills or (lasts and not (self._runs_ahead or self._roster.waiting)):
            config = self._runner.config
            self._decoding = Decoding(requests, self._end_ids, config.vocab_size, self._config.page_size, prefills)
            if not self._runs_ahead:  # whoever does reads tokens behind the next step
                self._decoding.begin_walk()

    def _step_beside(self, decoding: Decoding) -> None:
        """A steady batch beside pieces of prompts, as far as these want no logits: only they are planned."""
        rows = self._roster.pieces(decoding.prefills, len(decoding.requests))
        may_guess = len(decoding.requests) <= self._draft_rows
        if may_guess or not rows or any(row.num_logits for _, row in rows):
            self._settle()
            self._step_as_planned()
            return
        requests = [*decoding.requests, *(request for request, _ in rows)]
        computed = self._compute(requests, decoding.beside([row for _, row in rows]), decoding.masked())
        if computed is not None:
            self._commit(rows)
            self._take(decoding, *computed)

    def _take(self, decoding: Decoding, logits: torch.Tensor, masks: Masks) -> None:
        """What a step says to a steady batch."""
        if decoding.take_quietly(logits):
            self.counters.generated_tokens += len(decoding.requests)
            return
        values, filled = float_logits(logits), masks.rows()  # before any matcher moves on
        if not self._go_on(decoding, decoding.draw(values, filled), (values, filled)):
            self._settle()

    def _steady(self) -> Decoding | None:
        """The batch of the step before, where it goes on as it is."""
        if self._decoding is not None and not self._may_run_ahead(self._decoding) and not self._land():
            self._settle()
        if self._decoding is not None and not self._decoding.reserve(self._cache):
            self._land_and_settle()
        return self._decoding

    def _settle(self) -> None:
        """Somebody comes or goes: from here on requests are looked at one by one. A step that is under way is lost; it
        would be computed again."""
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            decoding.settle()
            self._roster.note_steps(decoding.num_steps)

    def _go_on(self, decoding: Decoding, tokens: Longs | None, computed: Computed | None) -> bool:
        """Take the tokens of a steady batch. False where it is one no more. `computed`: of their step, for those that
        must be drawn one by one; None where it is gone, and they are computed again."""
        requests = decoding.requests
        taken = decoding.take(tokens, has_logits=computed is not None)
        self.counters.generated_tokens += len(requests) - len(taken.looked_at) - len(taken.one_by_one)
        for place in taken.looked_at:
            if requests[place].lease is not None:  # else it ended with another of its job
                assert tokens is not None
                self._delivery.take(requests[place], Sampled(int(tokens[place])), is_accepted=place in taken.accepted)
        drawing = [(requests[place], place) for place in taken.one_by_one if requests[place].lease is not None]
        if drawing and computed is None:  # to be computed again
            self._settle()
        elif computed is not None and drawing:
            logits, masks = computed
            rows = rows_of(logits, [row for _, row in drawing])
            self._delivery.draw([request for request, _ in drawing], rows, decoding.by_request(masks))
        self._end_failed()
        is_steady = decoding is self._decoding and decoding.keep([*taken.looked_at, *taken.one_by_one])
        return is_steady and not (self._roster.waiting and len(decoding.requests) < len(requests))

    # -- a step ahead -----------------------------------------------------------------------------------------------

    def _may_run_ahead(self, decoding: Decoding) -> bool:
        """Guesses are made from tokens that are read: so those who may guess run ahead once they have had nothing to
        guess from for some time, and until they have."""
        if not self._runs_ahead or not decoding.may_run_ahead:
            return False
        is_silent = decoding.num_steps >= SILENT_STEPS
        return len(decoding.requests) > self._draft_rows or (is_silent and not decoding.hears_echo())

    def _run_ahead(self, decoding: Decoding) -> None:
        """Launch a step, then take the tokens of the one before. Under masks the step's own are drawn behind that."""
        requests, batch = decoding.ahead()
        before, is_late = decoding.flight, decoding.is_led
        computed = self._compute(requests, batch, ()) if requests else None
        launched = None if computed is None or is_late else decoding.launched(requests, computed[0], before)
        goes_on = self._land()
        if decoding is not self._decoding:
            return
        if computed is not None and is_late:
            decoding.narrow(requests)
        if computed is not None and is_late and decoding.requests:
            masks = self._masks.rows(decoding.masked())
            try:
                launched = decoding.launched(requests, computed[0], before, masks)
            except Exception:  # whose fault it is shows where they are computed again and drawn one by one
                log.exception("the texts under constraints of a step cannot be drawn together")
        decoding.flight = launched
        if not goes_on or (is_late and launched is None):
            self._land_and_settle()

    def _land(self) -> bool:
        """Take the tokens of the step that is under way, if there is one. False where the batch is steady no more."""
        decoding = self._decoding
        if decoding is None or decoding.flight is None or not decoding.requests:
            return True
        try:
            tokens = decoding.land()
        except Exception as error:  # what a device could not do shows where it is waited for
            log.exception("a step failed")
            self._fail_batch(decoding.requests, error)
            return False
        if tokens is None:  # computed again and drawn one by one, it is one request's fault alone
            self._settle()
            return False
        return self._go_on(decoding, tokens, None)

    def _land_and_settle(self) -> None:
        self._land()
        self._settle()

    # -- drafts -----------------------------------------------------------------------------------------------------

    def _guesses(self, decoding: Decoding) -> list[TokenIds] | None:
        """Of a steady batch what may follow each text, where somebody has a guess to check."""
        requests = decoding.requests
        if len(requests) > self._draft_rows or not decoding.hears_echo():
            return None
        decoding.settle()
        guesses = [self._roster.guess(request, len(requests)) for request in requests]
        return guesses if any(map(len, guesses)) else None

    def _step_guessing(self, decoding: Decoding, guesses: Sequence[TokenIds]) -> None:
        """A step of a steady batch with these guesses. It stays one where nobody need look at a token."""
        requests = decoding.requests
        if decoding.takes_guesses:
            batch = decoding.guessing(guesses)
            computed = self._compute(requests, batch, ())
            if computed is None or self._took_guessed(decoding, guesses, computed[0], batch):
                return
        else:
            self._settle_after_step(decoding)
            last = [Row(request.ids[-1:], request.num_computed, pages_of(request)) for request in requests]
            self._run(list(zip(requests, map(Row.with_guess, last, guesses), strict=True)))
        if len(self._roster.running) == len(requests) or not self._roster.waiting:
            self._begin_decoding(decoding)

    def _took_guessed(
        self, decoding: Decoding, guesses: Sequence[TokenIds], logits: torch.Tensor, batch: Batch
    ) -> bool:
        """Take what a step says to a batch with guesses. False where its requests were told one by one: it is settled
        then."""
        tokens = decoding.drawn_at(logits, batch)
        right = None if tokens is None else decoding.take_guessed(tokens, guesses)
        if right is not None:
            self.counters.guessed_tokens += sum(map(len, guesses))
            self.counters.drafted_tokens += sum(right)
            self.counters.generated_tokens += sum(right) + len(right)
            self._roster.note_steps(decoding.num_steps + 1)
            decoding.num_steps = 0  # since somebody guessed
            return True
        self._settle_after_step(decoding)
        values = float_logits(logits) if tokens is None else logits
        at = 0
        for request, guess in zip(decoding.requests, guesses, strict=True):
            rows = slice(at, at + 1 + len(guess))
            request.computed_up_to(request.length)
            self._delivery.check_draft(request, guess, values[rows], {}, None if tokens is None else tokens[rows])
            at = rows.stop
        self._end_failed()
        return False

    def _settle_after_step(self, decoding: Decoding) -> None:
        """Settle a batch that does not take the tokens of the current step itself; the step is counted all the same."""
        decoding.num_steps += 1
        self._settle()

    def _with_drafts(self, rows: Sequence[tuple[Request, Row]]) -> Sequence[tuple[Request, Row]]:
        """The rows behind which a token is drawn may be longer: by a guess of what follows."""
        if len(rows) > self._draft_rows:
            return rows
        return [
            (request, row.with_guess(self._roster.guess(request, len(rows))) if row.end >= request.length else row)
            for request, row in rows
        ]

    # -- what cannot go on ------------------------------------------------------------------------------------------

    def _refuse_the_impossible(self) -> None:
        """Nothing could run. Where requests hold pages, the last of them is preempted; where none does, the first in
        line can never fit, and is refused."""
        if self._roster.running:
            self._roster.preempt(next(reversed(self._roster.running.values())))
        elif self._roster.waiting:
            request = self._roster.waiting[0]
            self.abort(
                request.job,
                CapacityError(
                    f"{request.length} tokens do not fit in the KV pool beside what is pinned; raise kv_tokens"
                ),
            )

    def _fail_batch(self, requests: Sequence[Request], cause: Exception) -> None:
        if self._decoding is not None:
            self._decoding.flight = None
        for request in requests:
            self._delivery.fail(request, GenerationError(f"the engine's step failed: {type(cause).__name__}: {cause}"))
        self._end_failed()

    def _end_failed(self) -> None:
        """End the jobs of the requests that have failed."""
        while self._delivery.failed:
            self.abort(*self._delivery.failed.pop(0))
