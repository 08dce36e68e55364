"""What a step's logits say, brought to its requests one by one: tokens are drawn, forced and told, guesses checked,
log-probabilities read, texts ended.

Owned by `core.EngineCore`. A fault belongs to the job of the request that it befell, which leaves at once and is told
by the core.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from niwaki.runtime.api import FinishReason, GenerationError, NiwakiError
from niwaki.runtime.api.faults import told
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.constraints.kernels import Words
from niwaki.runtime.constraints.masks import MaskFiller, Masks
from niwaki.runtime.constraints.matcher import AutomatonMatcher
from niwaki.runtime.constraints.protocol import Matcher
from niwaki.runtime.forward.runner import Row
from niwaki.runtime.loop.counters import Counters
from niwaki.runtime.loop.forced import force, take_with_forced
from niwaki.runtime.loop.late import Drawn, Late
from niwaki.runtime.loop.pause import Pause
from niwaki.runtime.loop.roster import Roster
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.jobs import GenerateJob, Job, ScoreJob
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.redraw import sample_within
from niwaki.runtime.sampling.sampler import PlainDraws, Sampled, SampleRow, draw_all, rows_of, token_logprobs

# Beside texts without constraints the others are looked after for so long in a step, or for this share of what the step
# has taken so far, where that is more; who is left sits out the next step.
PATIENCE: Final = 0.0005  # seconds
SHARE: Final = 0.25

FilledMasks = Mapping[int, Words | NiwakiError]  # by request


class Delivery:
    """Knows one request at a time; which of them stand in the next step is decided elsewhere."""

    def __init__(
        self,
        roster: Roster,
        masks: MaskFiller,
        counters: Counters,
        boundaries: Boundaries | None,
        end_ids: frozenset[int],
        vocab_size: int,
        pause: Pause,
    ) -> None:
        """Without `boundaries` no token is forced: every one is drawn under its mask."""
        self._roster = roster
        self._masks = masks
        self._counters = counters
        self._boundaries = boundaries
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        # Jobs of which a request has failed, to be ended by the core: a callback would be a cycle, and who drops an
        # engine wants its memory back at once.
        self.failed: list[tuple[Job, NiwakiError]] = []
        self._late = Late(boundaries, pause)

    def close(self) -> None:
        self._late.close()

    def begin(self, request: Request) -> bool:
        """Add what a constraint forces at once. False where that ends it."""
        reason = self._force(request)
        self._tell(request, reason)
        return reason is None

    def fail(self, request: Request, error: NiwakiError) -> None:
        """It leaves with the others of its job; nothing that they have computed since the last commit is trusted."""
        self._roster.drop(request)
        for other in [running for running in self._roster.running.values() if running.job is request.job]:
            self._roster.drop(other)
        self._counters.failed += 1
        self.failed.append((request.job, error))

    def take_logits(
        self,
        batch: Sequence[tuple[Request, Row]],
        logits: torch.Tensor,
        masked: Sequence[Request],
        masks: Masks,
        began: float,
    ) -> None:
        """Behind a step: `logits` are those that the rows of `batch` wanted, one below the other; `masks` those of
        `masked`, in order. `began`: when the step did."""
        drawing: list[tuple[Request, int]] = []  # (request, its row in logits)
        reading: list[tuple[Request, int, int, int]] = []  # (request, first row, first position, count)
        drafts: list[tuple[Request, TokenIds, int]] = []  # (request, what was guessed, its first row)
        at = 0
        for request, row in batch:
            if row.num_logits:
                num_guessed = request.num_guessed(row.end)
                num_logits = row.num_logits - num_guessed
                first = request.num_computed - num_logits
                last_is_new = request.num_computed == request.length
                count = num_logits - last_is_new
                if count:
                    reading.append((request, at, first, count))
                request.logits_from = request.num_computed - (1 if last_is_new else 0)
                if num_guessed:
                    drafts.append((request, row.token_ids[-num_guessed:], at + num_logits - 1))
                elif last_is_new and request.samples:
                    drawing.append((request, at + num_logits - 1))
                at += row.num_logits
        if reading:
            self._read(reading, logits)
            drawing = [(request, row) for request, row in drawing if request.id in self._roster.running]
        free = [(request, row) for request, row in drawing if request.matcher is None]
        led = [(request, row) for request, row in drawing if request.matcher is not None]
        if free:
            self.draw([request for request, _ in free], rows_of(logits, [row for _, row in free]), {})
        if drafts:
            masks_of = _by_request(masked, masks)
            for request, guess, first in drafts:
                self.check_draft(request, guess, logits[first : first + 1 + len(guess)], masks_of)
        if led:
            self._late.add([request for request, _ in led], rows_of(logits, [row for _, row in led]), masked, masks)
        now = time.perf_counter()
        self.take_late(now + max(PATIENCE, SHARE * (now - began)) if free else None)
        for request, _ in batch:
            if request.is_computed and not request.samples and request.id in self._roster.running:
                try:
                    self._finish(request, FinishReason("length"))
                except Exception as error:
                    self.fail(request, told(error))

    def take_late(self, until: float | None = None) -> bool:
        """Draw and take what steps have computed for texts under constraints, the oldest first, as many as the time
        allows, and one at least of those that can be; without a time all. Whether there were any."""
        has_taken = False
        self._late.begin_step()
        while not has_taken or until is None or time.perf_counter() < until:
            for rows in self._late.ready():
                masks = _by_request(rows.masked, rows.masks)
                is_next = until is None and not self._late.has_drawn  # nobody's turn comes before
                for request, sampled in self._drawn(rows.requests, rows.logits, masks):
                    if is_next:
                        self.take(request, sampled)
                        has_taken = True
                        continue
                    beside = until is not None and self._is_told_beside(request, sampled)
                    self._late.add_drawn(request, sampled, is_told_beside=beside)
            drawn = self._late.next_drawn()
            if drawn is not None:
                has_taken = True
                self._take_drawn(drawn)
            elif until is not None or not self._late.wait():
                break
        return has_taken

    def take_drawn(self) -> bool:
        """Take all that was drawn. Whether there was any."""
        has_taken = False
        while self._late.has_drawn:
            self._late.wait_for_oldest()
            if (drawn := self._late.next_drawn()) is not None:
                self._take_drawn(drawn)
                has_taken = True
        return has_taken

    def _is_told_beside(self, request: Request, sampled: Sampled) -> bool:
        """Whether it may take long to tell its matcher, and what is forced then. An end is the request's own matter."""
        is_end = sampled.token_id in self._end_ids or sampled.token_id in request.params.stop_token_ids
        return not (is_end or request.healing is not None or isinstance(request.matcher, AutomatonMatcher))

    def _take_drawn(self, drawn: Drawn) -> None:
        if not drawn.is_told:
            self.take(drawn.request, drawn.sampled)
        elif drawn.error is not None:
            self.fail(drawn.request, drawn.error)
        else:
            request = drawn.request
            try:
                reason = take_with_forced(request, drawn.sampled, drawn.forced, self._end_ids, self._counters)
                self._counters.generated_tokens += 1
                self._tell(request, reason)
            except Exception as error:
                self.fail(request, told(error))

    def draw(self, requests: Sequence[Request], logits: torch.Tensor, masks: FilledMasks) -> None:
        """One token for each request, from the row of `logits` in its place, whatever its parameters are."""
        for request, sampled in self._drawn(requests, logits, masks):
            self.take(request, sampled)

    def _drawn(
        self, requests: Sequence[Request], logits: torch.Tensor, masks: FilledMasks
    ) -> list[tuple[Request, Sampled]]:
        ready: list[Request] = []
        rows: list[SampleRow] = []
        texts: list[tuple[Matcher, int] | None] = []
        kept: list[int] = []
        for place, request in enumerate(requests):
            mask = masks.get(request.id)
            if isinstance(mask, NiwakiError):  # a fault belongs to its request
                self.fail(request, mask)
                continue
            try:
                rows.append(request.sample_row(mask, self._end_ids))
            except Exception as error:
                self.fail(request, told(error))
                continue
            matcher = request.matcher
            texts.append(None if matcher is None or mask is None else (matcher, request.remaining_new))
            ready.append(request)
            kept.append(place)
        if not ready:
            return []
        try:
            found = sample_within(rows_of(logits, kept), rows, texts, self._end_ids)
        except Exception as error:
            if len(ready) == 1:
                self.fail(ready[0], told(error))
                return []
            # Whose fault it is shows where each is drawn by itself.
            alone = zip(ready, kept, strict=True)
            return [one for request, row in alone for one in self._drawn([request], logits[row : row + 1], masks)]
        drawn: list[tuple[Request, Sampled]] = []
        for request, row, sampled in zip(ready, rows, found, strict=True):
            if isinstance(sampled, NiwakiError):
                self.fail(request, sampled)
            elif request.wants_logprobs and row.mask is not None:
                drawn.append((request, replace(sampled, allowed=int(np.bitwise_count(row.mask).sum()))))
            else:
                drawn.append((request, sampled))
        return drawn

    def take(self, request: Request, sampled: Sampled, *, is_accepted: bool = False) -> None:
        if request.lease is None:  # another of its job has failed
            return
        try:
            if request.healing is not None:
                settled = request.healing.settled(sampled.token_id, request.matcher, request.remaining_new)
                sampled = sampled if settled == sampled.token_id else Sampled(settled, is_shorter=sampled.is_shorter)
            reason = request.take(sampled, self._end_ids, is_accepted=is_accepted) or self._force(request)
            self._counters.generated_tokens += 1  # a healed one, too
            self._tell(request, reason)
        except Exception as error:
            self.fail(request, told(error))

    def check_draft(
        self,
        request: Request,
        guess: TokenIds,
        logits: torch.Tensor,
        masks: FilledMasks,
        tokens: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Go on as long as the token that comes is the one that was guessed.

        `logits`: [1 + guess, vocab]; `masks`: what a constraint allows at the first of them; `tokens`: what is drawn at
        each of them, where that is known.
        """
        try:
            self._go_on_as_guessed(request, guess, logits, masks, tokens)
        except Exception as error:
            self.fail(request, told(error))

    def _go_on_as_guessed(
        self,
        request: Request,
        guess: TokenIds,
        logits: torch.Tensor,
        masks: FilledMasks,
        tokens: npt.NDArray[np.int64] | None,
    ) -> None:
        if tokens is None and request.matcher is None:  # else what is allowed depends on what comes
            drawn = PlainDraws.of([(request.params, request.seed, request.num_generated)], self._vocab_size)
            tokens = draw_all(drawn.ahead(np.array([len(logits)])), logits)
        right = 0
        self._counters.guessed_tokens += len(guess)
        while request.lease is not None:
            while right < len(guess) and request.num_pending and request.ids[request.num_computed] == guess[right]:
                request.confirm()
                self._counters.drafted_tokens += 1
                right += 1
            if request.num_pending:
                break
            if tokens is not None:
                self.take(request, Sampled(int(tokens[right])))
                continue
            if right and request.matcher is not None:
                masks = {request.id: self._masks.rows([request.matcher])[0]}
            self.draw([request], logits[right : right + 1], masks)
        request.guesser.learn(len(guess), right, request.length)

    def _read(self, reading: Sequence[tuple[Request, int, int, int]], logits: torch.Tensor) -> None:
        """Log-probabilities of tokens that are known: those of the prompt, and forced ones."""
        for top_n in {request.params.top_logprobs_num for request, *_ in reading}:
            alike = [one for one in reading if one[0].params.top_logprobs_num == top_n]
            try:
                targets = [request.ids[first + 1 : first + 1 + count] for request, _, first, count in alike]
                rows = [row for _, first_row, _, count in alike for row in range(first_row, first_row + count)]
                read = token_logprobs(rows_of(logits, rows), np.concatenate(targets), top_n)
            except Exception as error:
                if len(alike) == 1:
                    self.fail(alike[0][0], told(error))
                    continue
                for one in alike:  # whose fault it is shows where each is read by itself
                    if one[0].lease is not None:  # else another of its job has failed
                        self._read([one], logits)
                continue
            at = 0
            for request, _, first, count in alike:
                if request.lease is not None:  # as above
                    try:
                        self._note(request, first, read[at : at + count])
                    except Exception as error:
                        self.fail(request, told(error))
                at += count

    def _note(self, request: Request, first: int, read: Sequence[Sampled | GenerationError]) -> None:
        """`read`: behind the tokens from `first` on."""
        for position, entry in enumerate(read, start=first + 1):
            if isinstance(entry, GenerationError):
                raise entry
            if position < request.num_prompt:
                request.note_prompt(position, entry)
            elif request.num_unshown:
                reason = request.show(replace(entry, allowed=1), self._end_ids)
                if reason is not None:
                    self._finish(request, reason)
                    break

    def _force(self, request: Request) -> FinishReason | None:
        return force(request, self._boundaries, self._end_ids, self._counters)

    def _tell(self, request: Request, reason: FinishReason | None) -> None:
        if reason is not None:
            self._finish(request, reason)
        elif isinstance(request.job, GenerateJob) and request.index == 0:
            delta = request.next_delta()
            if delta is not None:
                request.job.generation.push(delta)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._roster.leave(request)
        request.drop_unshown()
        self._counters.finished += 1
        job = request.job
        if isinstance(job, ScoreJob):
            job.add(request.index, request.score())
            return
        request.end_text()
        delta = request.next_delta(is_last=True) if request.index == 0 else None
        if delta is not None:
            job.generation.push(delta)
        job.outputs[request.index] = request.output(reason)
        if request.index == 0:
            job.kept = request.kept_ids(reason)
        if len(job.outputs) == job.num_outputs:
            assert job.kept is not None, "the first of its texts has ended, too"
            job.moved(job.kept)
            job.generation.succeed(tuple(job.outputs[i] for i in range(job.num_outputs)))


def _by_request(masked: Sequence[Request], masks: Masks) -> FilledMasks:
    return dict(zip((request.id for request in masked), masks.rows(), strict=True))
