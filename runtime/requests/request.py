"""One sequence in the engine: its tokens, how far it has come, and the job that it answers.

Owned by the engine's loop, whose thread alone changes a request once it was submitted. Tokens live in one growing
int32 buffer so that the cache, the scheduler and the model runner read slices of it without copying.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from niwaki.radix.handles import Lease
from niwaki.runtime.api import (
    ConstraintError,
    Delta,
    FinishReason,
    Output,
    Reasoned,
    SamplingParams,
    Score,
    Segment,
    TokenLogprob,
)
from niwaki.runtime.api.likeliest import Packed, together
from niwaki.runtime.api.readiness import readiness
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.constraints import Matcher, marks_of
from niwaki.runtime.constraints.automaton import ByteDfa
from niwaki.runtime.constraints.boundaries import TAIL_TOKENS
from niwaki.runtime.constraints.healing import Healing
from niwaki.runtime.constraints.protocol import MaskRow
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.drafts import NOTHING, Guesser
from niwaki.runtime.requests.jobs import GenerateJob, Job, ScoreJob
from niwaki.runtime.requests.stops import StopText
from niwaki.runtime.sampling.sampler import Sampled, SampleRow, is_plain

MAX_ROOM = 256  # tokens
HEALED_FROM = 1 << 40  # where the random numbers of a prompt's healed tokens stand, far from those of the answer


class Request:
    """One sequence. `ids` are all its known tokens; `num_computed` of them have their KV written.

    `logits_from` is the first position whose logits are still needed: the last prompt token's for a generation, an
    earlier one when the log-probabilities of the prompt are asked for.
    """

    __slots__ = (
        "id", "job", "index", "params", "namespace", "seed", "num_prompt", "num_computed", "num_cached", "logits_from",
        "lease", "matcher", "stops", "detokenizer", "waited_steps", "first_step", "waited_seconds", "waits_since",
        "arrived", "admitted", "prefilled", "num_lost", "logprobs", "top_logprobs", "allowed", "prompt_logprobs",
        "prompt_top", "forced", "drafted", "guesser", "healing", "_at_start", "_num_healed", "_num_shown", "_shared",
        "_buffer", "_length", "_tokenizer", "_text", "_text_ends", "_unsent_text", "_unsent_ids", "_unsent_logprobs",
        "_unsent_top", "is_shorter",
    )  # fmt: skip

    def __init__(
        self,
        request_id: int,
        job: Job,
        index: int,
        ids: TokenIds,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        tail: TokenIds | None = None,
        namespace: str = "",
        seed: int = 0,
        logits_from: int | None = None,
        matcher: Matcher | None = None,
        stop_ends: ByteDfa | None = None,
        healing: Healing | None = None,
    ) -> None:
        """`ids`: the prompt, without the tokens that `healing` has taken back. `tail`: where the prompt is a text that
        others have, too, and a continuation of it, the latter: until it runs, the request has no copy of the former."""
        self.id = request_id
        self.job = job
        self.index = index
        self.params = params
        self.namespace = namespace
        self.seed = seed
        self.num_prompt = len(ids) if tail is None else len(ids) + len(tail)
        self.num_computed = 0
        self.num_cached: int | None = None  # of the prompt: tokens that it never computed; None before it is admitted
        self.logits_from = self.num_prompt - 1 if logits_from is None else logits_from
        self.lease: Lease | None = None
        self.matcher = matcher
        self.healing = healing  # until the text that was taken back is written again
        after = params.constraint.end if isinstance(params.constraint, Reasoned) else ""
        self.stops = StopText(params.stop, params.stop_regex, stop_ends, after)
        self.detokenizer = tokenizer.detokenizer(marks_of(params.constraint))
        self.waited_steps = 0  # before it last left the line
        self.first_step = 0  # in which it waits, counted by whoever has the line: had it waited all at once
        # The next three are of a clock that stands still while kernels are compiled: it is not the request's doing.
        self.arrived = readiness.clock()
        self.admitted: float | None = None  # when its first step began
        self.prefilled: float | None = None  # when the step was computed that gives its first token
        self.waited_seconds = 0.0  # but for what it waits now
        self.waits_since: float | None = time.perf_counter()  # None while it has rows
        self.is_shorter = False  # than the model wanted: see `Sampled.is_shorter`
        self.num_lost = 0  # first tokens that were computed before it was preempted
        self.logprobs: list[TokenLogprob] = []
        self.top_logprobs: list[Packed] = []
        self.allowed: list[int | None] = []
        self.prompt_logprobs: dict[int, TokenLogprob] = {}
        self.prompt_top: dict[int, tuple[TokenLogprob, ...]] = {}
        self.forced: list[int] = []  # which generated tokens, by index, were not drawn
        self.drafted: list[int] = []  # which of the others were computed with those before them: they had been guessed
        self.guesser = Guesser()
        self._at_start: Matcher | None = None  # before the first token, where that was healed and may hold a stop
        self._num_healed = 0  # bytes of the first generated token that are the prompt's
        self._num_shown = 0  # of the generated tokens: the text of those behind waits for their log-probabilities
        self._shared: Sequence[TokenIds] | None = (ids,) if tail is None else (ids, tail)  # until it has its own array
        self._buffer = NOTHING
        self._length = self.num_prompt
        if tail is None:
            self.hold_ids()
        # Nothing stands before the first token, so where its log-probability is asked for there is none.
        if job.starts[index] == 0 if isinstance(job, ScoreJob) else logits_from == 0:
            first = int(self.ids[0])
            self.prompt_logprobs[0] = TokenLogprob(None, first, tokenizer.token_text(first))
        self._tokenizer = tokenizer
        self._text: list[str] = []
        # Of a request with stop strings: text length after each generated token; -1 inside a character.
        self._text_ends: list[int] = []
        self._unsent_text: list[str] = []
        self._unsent_ids: list[int] = []
        self._unsent_logprobs: list[TokenLogprob] = []
        self._unsent_top: list[Packed] = []

    # -- tokens ---------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> TokenIds:
        return self._buffer[: self._length] if self._shared is None else np.concatenate(self._shared)

    def hold_ids(self) -> None:
        """Have its tokens in an array of its own, with room for the answer, a long one's beginning."""
        if self._shared is not None:
            self._buffer = np.empty(self._length + min(self.params.max_new_tokens, MAX_ROOM), dtype=np.int32)
            np.concatenate(self._shared, out=self._buffer[: self._length])
            self._shared = None

    @property
    def length(self) -> int:
        return self._length

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is not written."""
        return self._length - self.num_computed

    @property
    def num_generated(self) -> int:
        return self._length - self.num_prompt

    @property
    def output_ids(self) -> TokenIds:
        return self._buffer[self.num_prompt : self._length]

    @property
    def samples(self) -> bool:
        """Whether tokens are to be drawn after the prompt; scoring requests and max_new_tokens=0 draw none."""
        return isinstance(self.job, GenerateJob) and self.params.max_new_tokens > 0

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV this request wants now. Scoring needs no logits after its last token, so leaves it out.

        At least one: a request that wants nothing would never have a turn.
        """
        return max(1, self._length - 1) if isinstance(self.job, ScoreJob) else self._length

    @property
    def is_computed(self) -> bool:
        return self.num_computed == self.num_to_compute

    @property
    def remaining_new(self) -> int:
        return self.params.max_new_tokens - self.num_generated if self.samples else 0

    @property
    def is_drawn_plainly(self) -> bool:
        """Whether its tokens are drawn from the logits as they are, but for a constraint's mask, and nothing but tokens
        is asked for."""
        return (
            self.healing is None
            and not self.wants_logprobs
            and self.num_generated >= self.params.min_tokens
            and is_plain(self.params)
        )

    @property
    def is_masked(self) -> bool:
        """Whether the next token that it draws must be one that its constraint allows."""
        return self.matcher is not None and self.healing is None

    @property
    def is_watched(self) -> bool:
        """Whether each token must be looked at as it comes, whatever token it is."""
        is_read = isinstance(self.job, GenerateJob) and self.index == 0 and self.job.generation.is_streamed
        return is_read or self.stops.watches or not self.is_drawn_plainly

    def text_tail(self) -> list[int]:
        """The last tokens, as many as what follows may be cut by."""
        tail: list[int] = self._buffer[max(0, self._length - TAIL_TOKENS) : self._length].tolist()
        return tail

    def append(self, token_id: int) -> None:
        self._reserve(self._length + 1)
        self._buffer[self._length] = token_id
        self._length += 1

    def _reserve(self, length: int) -> None:
        if length > len(self._buffer):
            grown = np.empty(max(64, 2 * length), dtype=np.int32)
            grown[: self._length] = self.ids
            self._buffer = grown

    def guess(self, most: int, echo: int) -> TokenIds:
        """At most so many tokens that may come next, of those that it may still write but for the last; none where the
        last `echo` tokens did not stand before."""
        return self.guesser.guess(self.ids, min(most, self.remaining_new - 1), echo, self.num_prompt)

    def confirm(self) -> None:
        """The first pending token was guessed right: its KV is written."""
        index = self.num_computed - self.num_prompt
        if index not in self.forced:
            self.drafted.append(index)
        self.computed_up_to(self.num_computed + 1)

    def take_guessed(self, token_ids: Sequence[int], num_guessed: int) -> None:
        """Add what a step with a guess behind the last token has drawn, as `extend` does: all of these but the last one
        had been guessed."""
        first, right = self.num_generated, len(token_ids) - 1
        self.computed_up_to(self._length + right)
        self.extend(np.array(token_ids, np.int32))
        self.drafted += range(first, first + right)
        self.guesser.learn(num_guessed, right, self._length)

    def num_guessed(self, end: int) -> int:
        """How many tokens of a row that ends there are guesses: nobody has drawn them yet."""
        return max(0, end - self.length)

    def computed_up_to(self, num_tokens: int) -> None:
        """The KV of so many tokens is written, and the logits before the last of them are read."""
        self.num_computed = num_tokens
        self.logits_from = max(self.logits_from, num_tokens - 1)

    def sample_row(self, mask: MaskRow | None, end_ids: frozenset[int]) -> SampleRow:
        """How its next token is drawn."""
        params = self.params
        penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
        is_early = self.num_generated < params.min_tokens
        row = SampleRow(
            params=params,
            seed=self.seed,
            position=self.num_generated if self.healing is None else HEALED_FROM + self.healing.num_written,
            mask=mask,
            prompt_ids=self.ids[: self.num_prompt] if penalised else None,
            output_ids=self.output_ids if penalised else None,
            forbid=(*end_ids, *params.stop_token_ids) if is_early else (),
        )
        return row.under(mask) if is_early and mask is not None else row

    # -- taking tokens ------------------------------------------------------------------------------------------------

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.params.return_logprob or self.params.top_logprobs_num)

    @property
    def num_unshown(self) -> int:
        """Forced tokens at the end whose log-probabilities are still to be computed: their text is not out yet."""
        return self.num_generated - self._num_shown

    def take(self, sampled: Sampled, end_ids: frozenset[int], *, is_accepted: bool = False) -> FinishReason | None:
        """Add a sampled token and its text; returns why the request ends, if it does. `is_accepted`: the matcher knows
        the token already."""
        self.append(sampled.token_id)
        # All before are read: set back now, it would else be told this token's log-probability as that of the next.
        self.logits_from = self._length - 1
        if self.healing is not None:
            return self._heal(self.healing, sampled, end_ids)
        if self.matcher is not None and not is_accepted and not self._ends(sampled.token_id, end_ids):
            self.matcher.accept(sampled.token_id)
        return self.show(sampled, end_ids)

    def extend(self, token_ids: TokenIds) -> None:
        """Add sampled tokens and their text: of a request that is not watched, none of them may end it, and its matcher
        knows them already."""
        length = self._length + len(token_ids)
        self._reserve(length)
        self._buffer[self._length : length] = token_ids
        self._length = length
        self._num_shown += len(token_ids)
        ids = token_ids.tolist()
        self._unsent_ids += ids
        self._add_text(self.stops.push(self.detokenizer.push_all(ids)))

    def _heal(self, healing: Healing, sampled: Sampled, end_ids: frozenset[int]) -> FinishReason | None:
        """A token within the prompt's own text is the prompt's; one that reaches over it is the first of the answer."""
        over = healing.accept(sampled.token_id)
        if healing.is_done:
            self.healing = None
        if not over:
            self.num_prompt += 1
            return None
        self._num_healed = len(self._tokenizer.bytes_of(sampled.token_id) or b"") - len(over)
        if self.matcher is not None:
            self._at_start = self.matcher.clone() if self.stops.watches else None
            self.matcher.accept_bytes(over)
        return self.show(sampled, end_ids, self.detokenizer.push_bytes(over))

    def force(self, token_ids: Sequence[int], end_ids: frozenset[int]) -> FinishReason | None:
        """Add tokens that the matcher has accepted already; returns why the request ends, if it does.

        Where log-probabilities are wanted, `show` adds their text when the model has told them.
        """
        for token_id in token_ids:
            self.forced.append(self.num_generated)
            self.append(token_id)
        if self.wants_logprobs:
            return None
        if self.logits_from >= self.num_prompt - 1:  # else the prompt's log-probabilities are still to be read
            self.logits_from = self._length - 1
        reason = None
        while self.num_unshown and reason is None:
            reason = self.show(Sampled(int(self.output_ids[self._num_shown])), end_ids)
        return reason

    def show(self, sampled: Sampled, end_ids: frozenset[int], text: str | None = None) -> FinishReason | None:
        """Add the text of the first token that is not shown yet; returns why the request ends, if it does.

        A stop string goes before an end token, that before a finished constraint, that before the budget; none ends in
        the text of the first `min_tokens`. Where the budget kept the model from a token that it had drawn, it is the
        reason, whatever the text then ended with.
        """
        self._num_shown += 1
        logprob = self._note_logprob(sampled)
        ends = self._ends(sampled.token_id, end_ids)
        if text is None:
            text = self.detokenizer.push(sampled.token_id)
        text = "" if ends else self.stops.push(text, is_early=self._num_shown <= self.params.min_tokens)
        if self.stops.watches:
            is_boundary = self.detokenizer.is_between_characters and self.stops.matched is None
            self._text_ends.append(self.stops.length if is_boundary else -1)
        self._add_text(text)
        self._unsent_ids.append(sampled.token_id)
        if logprob is not None:
            self._unsent_logprobs.append(logprob)
            self._unsent_top.append(self.top_logprobs[-1])
        if self.stops.matched is not None:
            return FinishReason("stop", self.stops.matched)
        self.is_shorter |= sampled.is_shorter
        if ends:
            return FinishReason("length" if self.is_shorter else "stop", sampled.token_id)
        if self.num_unshown:
            return None
        if self.matcher is not None and self.matcher.is_done:
            return FinishReason("length" if self.is_shorter else "stop")
        if self.num_generated >= self.params.max_new_tokens:
            return FinishReason("length")
        return None

    def note_prompt(self, position: int, entry: Sampled) -> None:
        """The log-probability of a token of the prompt."""
        text = self._tokenizer.token_text(entry.token_id)
        self.prompt_logprobs[position] = TokenLogprob(entry.logprob, entry.token_id, text)
        if entry.top.ids:
            self.prompt_top[position] = entry.top.named(self._tokenizer.token_text)

    def drop_unshown(self) -> None:
        """The request ended inside a forced run: what is behind its end was never said."""
        if self.num_unshown:
            if self.matcher is not None:
                self.matcher.rollback(self.num_unshown)
            self._length -= self.num_unshown
            self.forced = [index for index in self.forced if index < self.num_generated]

    def _spans(self, indices: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Where generated tokens stand in the text; those side by side are one span. None where markers are shown."""
        if not indices:
            return ()
        told = set(indices)
        spans: list[tuple[int, int]] = []
        pieces = [self._tokenizer.bytes_of(token_id) or b"" for token_id in self.output_ids.tolist()]
        pieces[0] = pieces[0][self._num_healed :]
        start = 0
        for index, piece in enumerate(pieces):
            end = start + sum(byte & 0xC0 != 0x80 for byte in piece)  # characters that begin there
            if index in told:
                spans.append((spans.pop()[0] if spans and spans[-1][1] == start else start, end))
            start = end
        return tuple(spans) if b"".join(pieces).startswith("".join(self._text).encode()) else ()

    def _ends(self, token_id: int, end_ids: frozenset[int]) -> bool:
        return (token_id in end_ids and not self.params.ignore_eos) or token_id in self.params.stop_token_ids

    def _note_logprob(self, sampled: Sampled) -> TokenLogprob | None:
        if not self.wants_logprobs:
            return None
        named = TokenLogprob(sampled.logprob, sampled.token_id, self._tokenizer.token_text(sampled.token_id))
        self.logprobs.append(named)
        if self.matcher is not None:
            self.allowed.append(sampled.allowed)
        self.top_logprobs.append(sampled.top)
        return named

    # -- telling whoever waits --------------------------------------------------------------------------------------

    def end_text(self) -> None:
        """No more tokens come: what was held back for them is text, too."""
        if self.stops.matched is None:
            is_early = self._num_shown <= self.params.min_tokens
            self._add_text(self.stops.push(self.detokenizer.finish(), is_early=is_early) + self.stops.finish())

    def next_delta(self, *, is_last: bool = False) -> Delta | None:
        """The text that has become safe to show since the last delta; None while there is none.

        Tokens travel with the text that they complete, so a delta's ids and log-probabilities always line up.
        """
        if not (any(self._unsent_text) or (is_last and self._unsent_ids)):
            return None
        tops = together(self._unsent_top, self._tokenizer.token_text)
        delta = Delta("".join(self._unsent_text), tuple(self._unsent_ids), tuple(self._unsent_logprobs), tops)
        self._unsent_text, self._unsent_ids, self._unsent_logprobs, self._unsent_top = [], [], [], []
        return delta

    def output(self, reason: FinishReason) -> Output:
        """The finished generation; call after the last delta."""
        positions = sorted(self.prompt_logprobs)
        return Output(
            text="".join(self._text),
            token_ids=tuple(self.output_ids.tolist()),
            finish_reason=reason,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached or 0,
            complete=self._is_complete(),
            forced=tuple(self.forced),
            forced_spans=self._spans(self.forced),
            drafted=tuple(self.drafted),
            drafted_spans=self._spans(self.drafted),
            allowed=tuple(self.allowed),
            logprobs=tuple(self.logprobs),
            top_logprobs=together(self.top_logprobs, self._tokenizer.token_text),
            prompt_logprobs=tuple([self.prompt_logprobs[i] for i in positions]),
            prompt_top_logprobs=tuple([self.prompt_top.get(i, ()) for i in positions]),
            seconds=readiness.clock() - self.arrived,
            queued_seconds=0.0 if self.admitted is None else self.admitted - self.arrived,
            first_seconds=0.0 if self.prefilled is None else self.prefilled - self.arrived,
        )

    def score(self) -> Score:
        """The log-probabilities of a finished scoring request's continuation."""
        logprobs = tuple(self.prompt_logprobs[i] for i in sorted(self.prompt_logprobs))
        text = "".join(entry.text or "" for entry in logprobs)
        return Score(text, logprobs, prompt_tokens=self.num_prompt, cached_tokens=self.num_cached or 0, seed=self.seed)

    def kept_ids(self, reason: FinishReason) -> TokenIds:
        """The tokens of the prompt and of the final text: end tokens and stop strings are cut off.

        Where a stop string begins inside a token, the text left of it is tokenized again: a few characters at most.
        """
        if isinstance(reason.matched, int):
            return self.ids[:-1].copy()
        if self.stops.matched is None:
            return self.ids.copy()
        kept, tail = self._before_stop()
        return np.concatenate([self.ids[: self.num_prompt + kept], np.array(tail, dtype=np.int32)])

    def _before_stop(self) -> tuple[int, list[int]]:
        """How many generated tokens lie wholly before what stopped the text, and tokens of what is left behind them."""
        cut = self.stops.length
        kept = next((n for n in range(len(self._text_ends), 0, -1) if 0 <= self._text_ends[n - 1] <= cut), 0)
        rest = "".join(self._text)[self._text_ends[kept - 1] if kept else 0 : cut]
        return kept, self._tokenizer.encode([Segment(rest)]) if rest else []

    def _is_complete(self) -> bool:
        """Whether the final text satisfies the constraint: of a text that was stopped, what stands before that."""
        if self.matcher is None or self.stops.matched is None:
            return self.matcher is None or self.matcher.can_end
        kept, tail = self._before_stop()
        matcher = self._at_start if kept == 0 and self._at_start is not None else self.matcher
        try:
            if matcher is self.matcher:
                matcher.rollback(self.num_generated - kept)
            for token_id in tail:
                matcher.accept(token_id)
        except ConstraintError:  # cut inside a marker
            return False
        return matcher.can_end

    def _add_text(self, text: str) -> None:
        self._text.append(text)
        self._unsent_text.append(text)
