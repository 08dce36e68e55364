"""The engine core: one plain object with `step()`. Owns the requests, the cache and the model runner; no threads.

A step reads: plan, make room, run the model, take what it says. Whoever hosts the core (`engine.Engine`) calls every
method from one thread.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from niwaki.radix.cache import Cache
from niwaki.radix.handles import Lease, Pin
from niwaki.radix.outline import OutlineNode
from niwaki.runtime import scheduler
from niwaki.runtime.api import (
    Cancelled,
    CapacityError,
    FinishReason,
    GenerationError,
    NiwakiError,
    TokenLogprob,
)
from niwaki.runtime.cache_file import CacheWriter, SavedPath
from niwaki.runtime.config import EngineConfig
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.masks import MaskFiller
from niwaki.runtime.constraints.protocol import Matcher
from niwaki.runtime.decoding import Decoding, pages_of
from niwaki.runtime.drafts import DRAFT_ROWS, NOTHING
from niwaki.runtime.redraw import sample_within
from niwaki.runtime.request import GenerateJob, Job, Request, ScoreJob, TokenIds
from niwaki.runtime.runner import Batch, Row, Runner
from niwaki.runtime.sampler import Sampled, SampleRow, token_logprobs
from niwaki.runtime.tiers import Tiers
from niwaki.runtime.tokenizer import Tokenizer

log = logging.getLogger("niwaki.engine")

# A waiting request's match is looked up every step for the first so many in line; the rest wait their turn anyway.
MAX_MATCHED_WAITING = 256

HEALED_FROM = 1 << 40  # where the random numbers of a prompt's healed tokens stand, far from those of the answer

FilledMasks = Mapping[int, Words | NiwakiError]  # by request


@dataclass(slots=True)
class Counters:
    """Tokens and requests since the start."""

    steps: int = 0
    prefilled_tokens: int = 0  # prompt tokens that the model computed
    cached_tokens: int = 0  # prompt tokens that the cache gave
    generated_tokens: int = 0
    forced_tokens: int = 0  # of the generated ones: written without asking the model
    drafted_tokens: int = 0  # of the generated ones: guessed, and found right in one step with those before them
    guessed_tokens: int = 0  # all guesses, right or wrong
    recomputed_tokens: int = 0  # computed a second time after a preemption
    preemptions: int = 0
    finished: int = 0
    failed: int = 0


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
    ) -> None:
        """Without `boundaries` no token is forced: every one is drawn under its mask."""
        self._runner = runner
        self._boundaries = boundaries if config.force_tokens else None
        self._tokenizer = tokenizer
        self._config = config
        self._end_ids = frozenset(runner.config.eos_ids)
        self._policy: scheduler.Policy = "fcfs" if config.schedule_policy == "fcfs" else "lpm"
        self._tiers = tiers  # where evicted pages go
        self._cache = Cache(
            num_pages,
            config.page_size,
            enabled=config.enable_prefix_cache,
            eviction=config.eviction_policy,
            on_evict=None if tiers is None else self._keep_evicted,
        )
        self._waiting: list[Request] = []  # in order of arrival
        self._running: dict[int, Request] = {}
        self._decoding: Decoding | None = None  # while the batch is steady
        self._since_aged = scheduler.AGED_STEPS
        self._draft_rows = DRAFT_ROWS if config.draft_tokens else 0
        self._masks = MaskFiller((runner.config.vocab_size + 31) // 32)
        self.counters = Counters()

    # -- what a host may do -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def cache(self) -> Cache:
        """For reading: `stats()` and `check()`."""
        return self._cache

    def submit(self, requests: Sequence[Request]) -> None:
        """Take in the requests of one job."""
        self._settle()
        for request in requests:
            try:
                reason = self._force(request)
            except NiwakiError as error:
                self.abort(request.job, error)
                return
            if reason is None:
                self._waiting.append(request)
            self._tell(request, reason)

    def abort(self, job: Job, error: NiwakiError | None = None) -> None:
        """End every request of the job. What it had computed stays in the tree, as far as it was fully written."""
        self._settle()
        for request in [r for r in self._waiting if r.job is job]:
            self._wait_no_more(request)
        for request in [r for r in self._running.values() if r.job is job]:
            self._leave(request)
        _fail(job, error or Cancelled("the request was cancelled"))

    def close(self) -> None:
        """End the threads that it made."""
        self._masks.close()

    def abort_all(self, error: NiwakiError) -> None:
        for job in {id(r.job): r.job for r in (*self._waiting, *self._running.values())}.values():
            self.abort(job, error)

    def pin(self, ids: TokenIds, namespace: str) -> Pin:
        """Keep the cached path of these tokens while a branch stands on it."""
        return self._cache.pin(ids, namespace)

    def unpin(self, pin: Pin) -> None:
        self._cache.unpin(pin)

    def flush(self) -> bool:
        if self._tiers is not None:
            self._tiers.clear()
        return self._cache.flush()

    def outline(self, limit: int, namespace: str) -> tuple[OutlineNode, ...]:
        """The shape of a namespace's tree, and what lately left it for a tier below the pool."""
        return self._cache.outline(limit, namespace, None if self._tiers is None else self._tiers.holder)

    def tier_counts(self) -> Mapping[str, float]:
        return {} if self._tiers is None else self._tiers.counts()

    def save_cache(self, writer: CacheWriter) -> int:
        """Write every cached sequence, each page once. Returns the number of tokens."""
        written: set[int] = set()
        num_tokens = 0
        for namespace, ids, page_ids in self._cache.paths():
            first = next((index for index, page in enumerate(page_ids) if page not in written), len(page_ids))
            written.update(page_ids)
            writer.add(SavedPath(namespace, ids, first, self._runner.read_pages(page_ids[first:])))
            num_tokens += len(ids) - min(len(ids), first * self._config.page_size)
        return num_tokens

    def load_cache(self, saved: Iterable[SavedPath]) -> int:
        """Take up what the free part of the pool has room for. Returns the number of tokens."""
        page_size, before = self._config.page_size, self._cache.stats().tree_tokens
        for path in saved:
            have = self._cache.match(path.ids, path.namespace) // page_size
            if len(path.ids) > (self._cache.num_free + have) * page_size:
                break
            lease = self._cache.acquire(path.ids, path.namespace, room_for=len(path.ids))
            assert lease is not None, "there is room"
            first = lease.num_cached // page_size
            if first < path.first:  # what it continues was not loaded
                self._cache.discard(lease)
                continue
            self._runner.copy_pages(lease.copies)
            self._runner.write_pages(lease.page_ids[first:], path.pages[first - path.first :])
            self._cache.release(lease, path.ids, len(path.ids))
        return self._cache.stats().tree_tokens - before

    def step(self) -> None:
        """Run one ragged batch and tell whoever waits for its tokens."""
        decoding = self._steady()
        if decoding is not None:
            rows = self._drafted(decoding)
            if rows is not None:
                self._run(rows)
                if len(self._running) == len(rows) or not self._waiting:
                    self._begin_decoding()
                return
            computed = self._compute(decoding.requests, decoding.batch, decoding.masked())
            if computed is not None:
                self._go_on(decoding, *computed)
            return
        plan = self._plan()
        rows = self._carry_out(plan)
        if not rows:
            self._refuse_the_impossible()
            return
        self._run(self._with_drafts(rows))
        if scheduler.is_steady(plan, len(self._running)):
            self._begin_decoding()

    def _run(self, rows: Sequence[tuple[Request, Row]]) -> None:
        masked = [
            (request, request.remaining_new) for request, row in rows if request.is_masked and _is_last(request, row)
        ]
        computed = self._compute([request for request, _ in rows], Batch.of([row for _, row in rows]), masked)
        if computed is not None:
            self._commit(rows)
            self._take_logits(rows, *computed)

    def _compute(
        self, requests: Sequence[Request], batch: Batch, masked: Sequence[tuple[Request, int]]
    ) -> tuple[torch.Tensor, FilledMasks] | None:
        """Run the model, and fill masks meanwhile, for requests that may still write so many tokens. None where it
        failed: the whole batch is lost, the engine is not."""
        self.counters.steps += 1
        masks = self._masks.start([(r.matcher, remaining) for r, remaining in masked if r.matcher is not None])
        start = time.perf_counter()
        try:
            logits = self._runner.forward(batch)
        except Exception as error:
            log.exception("a step failed")
            masks.rows()  # nobody else may touch the matchers before
            self._fail_batch(requests, error)
            return None
        num_tokens = len(batch.token_ids)
        if self._tiers is not None and num_tokens >= 4 * self._config.page_size:
            self._tiers.computed(num_tokens, time.perf_counter() - start)
        filled = masks.rows()  # all at once, before any matcher moves on
        return logits, {request.id: mask for (request, _), mask in zip(masked, filled, strict=True)}

    # -- a steady batch ---------------------------------------------------------------------------------------------

    def _begin_decoding(self) -> None:
        """After a step of which the next plan would be a repetition: keep the batch as arrays, where it decodes."""
        requests = list(self._running.values())
        if requests and all(r.samples and r.num_pending == 1 for r in requests):
            config = self._runner.config
            self._decoding = Decoding(requests, self._end_ids, config.vocab_size, self._config.page_size)

    def _steady(self) -> Decoding | None:
        """The batch of the step before, where it goes on as it is."""
        if self._decoding is not None and not self._decoding.reserve(self._cache):
            self._settle()
        return self._decoding

    def _settle(self) -> None:
        """Somebody comes or goes: from here on requests are looked at one by one."""
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            decoding.settle()
            self._since_aged += decoding.num_steps
            for request in self._waiting:
                request.waited_steps += decoding.num_steps

    def _go_on(self, decoding: Decoding, logits: torch.Tensor, masks: FilledMasks) -> None:
        """Take the tokens of a steady batch, and find out whether it is one still."""
        requests = decoding.requests
        tokens = decoding.draw(logits, masks)
        taken = decoding.take(tokens)
        self.counters.generated_tokens += len(requests) - len(taken.looked_at) - len(taken.one_by_one)
        for place in taken.looked_at:
            if requests[place].lease is not None:  # else it ended with another of its job
                assert tokens is not None
                self._take(requests[place], Sampled(int(tokens[place])), is_accepted=place in taken.accepted)
        drawing = [(requests[place], place) for place in taken.one_by_one if requests[place].lease is not None]
        if drawing:
            self._draw(drawing, logits if len(drawing) == len(logits) else logits[[row for _, row in drawing]], masks)
        if decoding is self._decoding:
            is_steady = decoding.keep([*taken.looked_at, *taken.one_by_one])
            if not is_steady or (self._waiting and len(decoding.requests) < len(requests)):
                self._settle()

    # -- drafts -----------------------------------------------------------------------------------------------------

    def _drafted(self, decoding: Decoding) -> list[tuple[Request, Row]] | None:
        """The rows of a steady batch where somebody has a guess to check; the batch is as arrays no more then."""
        requests = decoding.requests
        if len(requests) > self._draft_rows or not decoding.hears_echo():
            return None
        decoding.settle()
        guesses = [self._guess(request) for request in requests]
        if not any(map(len, guesses)):
            return None
        decoding.num_steps += 1
        self._settle()
        last = [Row(request.ids[-1:], request.num_computed, pages_of(request)) for request in requests]
        return list(zip(requests, map(_with_guess, last, guesses), strict=True))

    def _with_drafts(self, rows: Sequence[tuple[Request, Row]]) -> Sequence[tuple[Request, Row]]:
        """The rows behind which a token is drawn may be longer: by a guess of what follows."""
        if len(rows) > self._draft_rows:
            return rows
        return [
            (request, _with_guess(row, self._guess(request)) if _is_last(request, row) else row)
            for request, row in rows
        ]

    def _guess(self, request: Request) -> TokenIds:
        """What may follow, as far as there are pages for it."""
        if not (request.samples and request.is_drawn_plainly):
            return NOTHING
        guess = request.guess(self._config.draft_tokens)
        assert request.lease is not None, "running requests hold a lease"
        return guess if len(guess) and self._cache.reserve(request.lease, request.length + len(guess)) else NOTHING

    def _check_draft(self, request: Request, guess: TokenIds, logits: torch.Tensor) -> None:
        """Behind the token that was drawn from logits[0]: go on as long as what comes is what was guessed.

        `logits`: [1 + guess, vocab].
        """
        right = 0
        self.counters.guessed_tokens += len(guess)
        while request.lease is not None:
            while right < len(guess) and request.num_pending and request.ids[request.num_computed] == guess[right]:
                request.confirm()
                self.counters.drafted_tokens += 1
                right += 1
            if request.num_pending:
                break
            masks: FilledMasks = {}
            if request.matcher is not None:
                masks = {request.id: self._masks.start([(request.matcher, request.remaining_new)]).rows()[0]}
            self._draw([(request, right)], logits[right : right + 1], masks)
        request.guesser.learn(len(guess), right, request.length)

    # -- the batch --------------------------------------------------------------------------------------------------

    def _carry_out(self, plan: scheduler.Plan) -> list[tuple[Request, Row]]:
        """Preempt, admit, and give every row its pages."""
        for request_id in plan.preempt:
            self._preempt(self._running[request_id])
        self._since_aged = 0 if plan.aged is not None else self._since_aged + 1
        by_id = {request.id: request for request in self._waiting} if plan.admit else {}
        for request_id in plan.admit:
            self._admit(by_id[request_id])
        for request in self._waiting:
            request.waited_steps += 1
        page_size = self._config.page_size
        batch: list[tuple[Request, Row]] = []
        for step in plan.rows:
            if step.id not in self._running:  # its admission failed for want of a page
                continue
            request = self._running[step.id]
            assert request.lease is not None, "running requests hold a lease"
            num_tokens = min(step.num_tokens, request.num_to_compute - request.num_computed)
            end = request.num_computed + num_tokens
            has_pages = end <= len(request.lease.page_ids) * page_size  # most rows do: no call for them
            if num_tokens > 0 and (has_pages or self._cache.reserve(request.lease, end)):
                num_logits = max(0, end - max(request.num_computed, request.logits_from))
                ids = request.ids[request.num_computed : end]
                batch.append((request, Row(ids, request.num_computed, request.lease.page_ids, num_logits)))
        return batch

    def _plan(self) -> scheduler.Plan:
        page_size = self._config.page_size
        room = scheduler.Room(
            free_pages=self._cache.num_free + self._cache.num_evictable,
            page_size=page_size,
            max_batch_tokens=self._config.chunked_prefill_size,
            max_running=self._config.max_running_requests,
            shares_prefixes=self._config.enable_prefix_cache,
            since_aged=self._since_aged,
        )
        # Whom to preempt matters only when pages are short; measuring it for every row of every step would cost time.
        is_short = room.free_pages < 2 * len(self._running)
        running = [self._as_running(request, is_short=is_short) for request in self._running.values()]
        waiting = [self._as_waiting(request) for request in self._waiting[:MAX_MATCHED_WAITING]]
        return scheduler.plan(waiting, running, room, self._policy)

    def _as_running(self, request: Request, *, is_short: bool) -> scheduler.Running:
        assert request.lease is not None, "running requests hold a lease"
        num_tokens = request.num_to_compute
        return scheduler.Running(
            id=request.id,
            num_tokens=num_tokens,
            num_computed=request.num_computed,
            num_pages=len(request.lease.page_ids),
            max_new_tokens=request.remaining_new,
            priority=request.params.priority,
            num_exclusive_pages=self._cache.num_exclusive(request.lease) if is_short else None,
            ids=request.ids[:num_tokens] if request.num_computed + 1 < num_tokens else None,
            namespace=request.namespace,
        )

    def _as_waiting(self, request: Request) -> scheduler.Waiting:
        match = self._cache.peek(request.ids[: self._max_cached(request)], request.namespace, request.id)
        return scheduler.Waiting(
            id=request.id,
            ids=request.ids[: request.num_to_compute],
            max_new_tokens=request.remaining_new,
            priority=request.params.priority,
            num_cached=match.num_cached,
            num_locked_pages=match.num_locked_pages,
            max_cached=self._max_cached(request),
            waited_steps=request.waited_steps,
            namespace=request.namespace,
        )

    def _max_cached(self, request: Request) -> int:
        # Leave at least one token uncached: attention needs a query row to give logits. Where the prompt's own
        # log-probabilities are asked for, all positions from `logits_from` on must run.
        return max(0, min(request.logits_from, request.num_to_compute - 1))

    def _admit(self, request: Request) -> None:
        num_tokens = request.num_to_compute
        lease = self._cache.acquire(
            request.ids,
            request.namespace,
            max_cached=self._max_cached(request),
            room_for=num_tokens,
            priority=request.params.priority,
        )
        if lease is None:
            return
        if lease.copies:
            self._runner.copy_pages(lease.copies)
        self._wait_no_more(request)
        request.lease = lease
        request.num_computed = self._restored(request, lease)
        if request.num_cached is None:
            request.admitted = time.perf_counter()
            request.num_cached = min(request.num_computed, request.num_prompt)  # forced tokens behind it may be cached
            self.counters.cached_tokens += request.num_cached
        self._running[request.id] = request

    def _wait_no_more(self, request: Request) -> None:
        self._waiting.remove(request)
        self._cache.forget(request.id)

    def _restored(self, request: Request, lease: Lease) -> int:
        """Fetch the pages behind the cached ones that a tier still has. Returns how many tokens need no computing."""
        if self._tiers is None:
            return lease.num_cached
        page_size = self._config.page_size
        first = lease.num_cached // page_size
        most = self._max_cached(request) // page_size * page_size
        pages = self._tiers.find(request.namespace, request.ids[:most], first)
        if not pages:
            return lease.num_cached
        stop = first + len(pages)
        self._runner.write_pages(lease.page_ids[first:stop], np.stack(pages))
        return stop * page_size

    def _keep_evicted(self, namespace: str, ids: TokenIds, first: int, page_ids: list[int]) -> None:
        assert self._tiers is not None
        self._tiers.keep(namespace, ids, first, self._runner.read_pages(page_ids))

    def _preempt(self, request: Request) -> None:
        """Give the pages back; the tokens stay known, and what the tree keeps need not be computed again."""
        self._leave(request)
        request.was_preempted = True
        self.counters.preemptions += 1
        bisect.insort(self._waiting, request, key=lambda waiting: waiting.id)  # its old place: ids ascend with arrival

    def _leave(self, request: Request) -> None:
        """Out of the running ones. What it had computed goes into the tree."""
        if request.lease is not None:
            self._cache.release(request.lease, request.ids, request.num_computed)
            request.lease = None
            request.num_computed = 0
        self._running.pop(request.id, None)

    def _refuse_the_impossible(self) -> None:
        """Nothing could run. With requests in the pool one is set back; alone, the first in line can never fit."""
        if self._running:
            self._preempt(next(reversed(self._running.values())))
        elif self._waiting:
            request = self._waiting[0]
            self.abort(
                request.job,
                CapacityError(
                    f"{request.length} tokens do not fit in the KV pool beside what is pinned; raise kv_tokens"
                ),
            )

    def _fail_batch(self, requests: Sequence[Request], cause: Exception) -> None:
        for request in requests:
            self._drop(request)
            self.abort(request.job, GenerationError(f"the engine's step failed: {type(cause).__name__}: {cause}"))

    def _drop(self, request: Request) -> None:
        """Leave without giving the tree anything that was not committed before."""
        if request.lease is not None:
            self._cache.discard(request.lease)
            request.lease = None
        self._running.pop(request.id, None)
        self.counters.failed += 1

    # -- after the forward pass -------------------------------------------------------------------------------------

    def _commit(self, batch: Sequence[tuple[Request, Row]]) -> None:
        for request, row in batch:
            assert request.lease is not None
            num_left = request.num_prompt - request.num_computed
            was_prefilling = num_left > 0
            num_tokens = len(row.token_ids) - _num_guessed(request, row)
            request.num_computed += num_tokens
            if request.was_preempted and was_prefilling:
                self.counters.recomputed_tokens += num_tokens
            if was_prefilling:
                self.counters.prefilled_tokens += min(num_left, num_tokens)
                # Share the prompt at once; generated tokens go into the tree when the request ends.
                is_whole = request.num_computed >= request.num_prompt
                if is_whole and request.prefilled is None:
                    request.prefilled = time.perf_counter()
                self._cache.commit(request.lease, request.ids, request.num_computed, share_tail=is_whole)

    def _take_logits(self, batch: Sequence[tuple[Request, Row]], logits: torch.Tensor, masks: FilledMasks) -> None:
        drawing: list[tuple[Request, int]] = []  # (request, its row in logits)
        reading: list[tuple[Request, int, int, int]] = []  # (request, first row, first position, count)
        drafts: list[tuple[Request, TokenIds, int]] = []  # (request, what was guessed, its first row)
        at = 0
        for request, row in batch:
            if row.num_logits:
                num_guessed = _num_guessed(request, row)
                num_logits = row.num_logits - num_guessed
                first = request.num_computed - num_logits
                last_is_new = request.num_computed == request.length
                count = num_logits - last_is_new
                if count:
                    reading.append((request, at, first, count))
                request.logits_from = request.num_computed - (1 if last_is_new else 0)
                if last_is_new and request.samples:
                    drawing.append((request, at + num_logits - 1))
                if num_guessed:
                    drafts.append((request, row.token_ids[-num_guessed:], at + num_logits - 1))
                at += row.num_logits
        if reading:
            self._read(reading, logits)
            drawing = [(request, row) for request, row in drawing if request.id in self._running]
        if drawing:
            self._draw(drawing, logits if len(drawing) == len(logits) else logits[[row for _, row in drawing]], masks)
        for request, guess, first in drafts:
            self._check_draft(request, guess, logits[first : first + 1 + len(guess)])
        for request, _ in batch:
            if not request.samples and request.num_computed == request.num_to_compute and request.id in self._running:
                self._finish(request, FinishReason("length"))

    def _read(self, reading: Sequence[tuple[Request, int, int, int]], logits: torch.Tensor) -> None:
        """Log-probabilities of tokens that are known: those of the prompt, and forced ones."""
        for request, first_row, first, count in reading:
            targets = request.ids[first + 1 : first + 1 + count]
            read = token_logprobs(logits[first_row : first_row + count], targets, request.params.top_logprobs_num)
            for position, entry in enumerate(read, start=first + 1):
                if position < request.num_prompt:
                    text = self._tokenizer.token_text(entry.token_id)
                    request.prompt_logprobs[position] = TokenLogprob(entry.logprob, entry.token_id, text)
                    if entry.top:
                        request.prompt_top[position] = request.named(entry.top)
                elif request.num_unshown:
                    reason = request.show(replace(entry, allowed=1), self._end_ids)
                    if reason is not None:
                        self._finish(request, reason)
                        break

    def _draw(self, drawing: Sequence[tuple[Request, int]], logits: torch.Tensor, masks: FilledMasks) -> None:
        ready: list[Request] = []
        rows: list[SampleRow] = []
        texts: list[tuple[Matcher, int] | None] = []
        kept: list[int] = []
        for place, (request, _) in enumerate(drawing):
            mask = masks.get(request.id)
            if isinstance(mask, NiwakiError):  # a fault belongs to its request
                self._fail_request(request, mask)
                continue
            rows.append(self._sample_row(request, mask))
            matcher = request.matcher
            texts.append(None if matcher is None or mask is None else (matcher, request.remaining_new))
            ready.append(request)
            kept.append(place)
        if not ready:
            return
        drawn = sample_within(logits if len(kept) == len(drawing) else logits[kept], rows, texts, self._end_ids)
        for request, row, sampled in zip(ready, rows, drawn, strict=True):
            if isinstance(sampled, NiwakiError):
                self._fail_request(request, sampled)
            elif request.wants_logprobs and row.mask is not None:
                self._take(request, replace(sampled, allowed=int(np.bitwise_count(row.mask).sum())))
            else:
                self._take(request, sampled)

    def _sample_row(self, request: Request, mask: Words | None) -> SampleRow:
        params = request.params
        penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
        is_early = request.num_generated < params.min_tokens
        return SampleRow(
            params=params,
            seed=request.seed,
            position=request.num_generated if request.healing is None else HEALED_FROM + request.healing.num_written,
            mask=mask,
            prompt_ids=request.ids[: request.num_prompt] if penalised else None,
            output_ids=request.output_ids if penalised else None,
            forbid=(*self._end_ids, *params.stop_token_ids) if is_early else (),
        )

    def _take(self, request: Request, sampled: Sampled, *, is_accepted: bool = False) -> None:
        try:
            if request.healing is not None:
                settled = request.healing.settled(sampled.token_id, request.matcher, request.remaining_new)
                sampled = sampled if settled == sampled.token_id else Sampled(settled)
            reason = request.take(sampled, self._end_ids, is_accepted=is_accepted) or self._force(request)
        except NiwakiError as error:
            self._fail_request(request, error)
            return
        self.counters.generated_tokens += 1  # a healed one, too
        self._tell(request, reason)

    def _tell(self, request: Request, reason: FinishReason | None) -> None:
        if reason is not None:
            self._finish(request, reason)
        elif isinstance(request.job, GenerateJob) and request.index == 0:
            delta = request.next_delta()
            if delta is not None:
                request.job.generation.push(delta)

    def _force(self, request: Request) -> FinishReason | None:
        """Add the tokens about which the constraint leaves no choice, as the tokenizer would write them: they ride in
        the request's next row. Returns why the request ends, if it does."""
        matcher, boundaries = request.matcher, self._boundaries
        if matcher is None or boundaries is None or request.healing is not None:
            return None
        reason = None
        while reason is None and request.remaining_new:
            forced = matcher.forced_text()
            token_ids = boundaries.tokens_of(request.text_tail(), forced) if forced.text else ()
            if not token_ids or len(token_ids) > request.remaining_new:
                break
            for token_id in token_ids:
                matcher.accept(token_id)
            if not matcher.fits(request.remaining_new - len(token_ids)):  # a shorter way to write it may fit
                matcher.rollback(len(token_ids))
                break
            self.counters.forced_tokens += len(token_ids)
            self.counters.generated_tokens += len(token_ids)
            reason = request.force(token_ids, self._end_ids)
        return reason

    def _fail_request(self, request: Request, error: NiwakiError) -> None:
        self._drop(request)
        self.abort(request.job, error)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._leave(request)
        request.drop_unshown()
        self.counters.finished += 1
        job = request.job
        if isinstance(job, ScoreJob):
            job.scores[request.index] = request.score()
            if len(job.scores) == len(job.starts):
                job.pending.succeed(tuple(job.scores[i] for i in range(len(job.starts))))
            return
        delta = request.next_delta(is_last=True)
        if delta is not None and request.index == 0:
            job.generation.push(delta)
        job.outputs[request.index] = request.output(reason)
        if request.index == 0:
            job.moved(request.kept_ids(reason))
        if len(job.outputs) == job.num_outputs:
            job.generation.succeed(tuple(job.outputs[i] for i in range(job.num_outputs)))


def _is_last(request: Request, row: Row) -> bool:
    """Whether a token is drawn behind the row."""
    return row.start + len(row.token_ids) >= request.length


def _with_guess(row: Row, guess: TokenIds) -> Row:
    if not len(guess):
        return row
    return replace(row, token_ids=np.concatenate([row.token_ids, guess]), num_logits=row.num_logits + len(guess))


def _num_guessed(request: Request, row: Row) -> int:
    """How many of the row's tokens are guesses: nobody has drawn them yet."""
    return max(0, row.start + len(row.token_ids) - request.length)


def _fail(job: Job, error: NiwakiError) -> None:
    (job.generation if isinstance(job, GenerateJob) else job.pending).fail(error)
