"""The backend in this process: branches for programs, and requests for the engine's thread.

Callers tokenize, check and compile on their own thread, and post what they made. Results are handed over on the
engine's thread, so that what a program appends next rides in the very next step.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

import numpy as np

from niwaki.radix.outline import OutlineNode
from niwaki.runtime.api import (
    BackendInfo,
    Branch,
    Delta,
    EngineStopped,
    Generation,
    Pending,
    RequestError,
    SamplingParams,
    Score,
    Segment,
)
from niwaki.runtime.api.faults import told
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.constraints import ConstraintCompiler, Matcher
from niwaki.runtime.constraints.automaton import ByteDfa
from niwaki.runtime.constraints.boundaries import TAIL_TOKENS, Boundaries, Unsettled
from niwaki.runtime.constraints.healing import Healing
from niwaki.runtime.host.branch_tokens import open_branch, own_branch
from niwaki.runtime.host.compilations import Compilations
from niwaki.runtime.host.engine_thread import EngineThread
from niwaki.runtime.host.forked import check_not_forked, is_forked
from niwaki.runtime.host.local_branch import LocalBranch, SharedPin, first_loose
from niwaki.runtime.host.templates import Templates
from niwaki.runtime.kv.cache_file import CacheWriter, Layout, read_cache
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.options.limits import Limits, TokenIds
from niwaki.runtime.requests.jobs import GenerateJob, Job, ScoreJob
from niwaki.runtime.requests.request import Request
from niwaki.runtime.requests.scoring import SharedBeginnings

log = logging.getLogger("niwaki.engine")


class LocalBackend(Templates, EngineThread):
    """The `Backend` protocol on an `EngineCore`. Thread-safe, except that one branch has one user at a time."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        compiler: ConstraintCompiler,
        info: BackendInfo,
        *,
        pool_tokens: int,
        seed: int | None = None,
        boundaries: Boundaries | None = None,
    ) -> None:
        """Without `boundaries` no prompt is healed."""
        Templates.__init__(self, tokenizer)
        self._boundaries = boundaries
        self._compilations = Compilations(compiler)
        compiler.steps_beside(core.pause.wait)
        if boundaries is not None:
            boundaries.steps_beside(core.pause.wait)
        self._info = info
        self._limits = Limits(info.context_length, pool_tokens, compiler.vocabulary.size)
        self._random = random.Random(seed)
        self._next_id = 0
        self._programs = count(1)
        self._lock = threading.Lock()  # request ids, random seeds, holders of pins
        EngineThread.__init__(self, core)  # last: its thread runs from here on

    # -- branches ---------------------------------------------------------------------------------------------------

    def info(self) -> BackendInfo:
        return self._info

    def new_program(self) -> int:
        """A number for requests that share their places with each other, before they share them with others'."""
        return next(self._programs)

    def open(self, *, namespace: str = "", program: int | None = None) -> LocalBranch:
        """`program`: below 0, where others count them; None for one of its own."""
        program = self.new_program() if program is None else program
        return LocalBranch(np.empty(0, dtype=np.int32), namespace, None, program=program)

    def fork(self, branch: Branch) -> LocalBranch:
        """A second handle on the same tokens: no token is copied, the tree is not touched."""
        own = open_branch(branch, LocalBranch)
        with self._lock:
            if own.pin is not None:
                own.pin.holders += 1
            twin = LocalBranch(own.ids, own.namespace, own.pin, own.num_settled, program=own.program)
        twin.num_open = own.num_open
        return twin

    def close(self, branch: Branch) -> None:
        own = own_branch(branch, LocalBranch)
        if own.is_closed:
            return
        own.is_closed = True
        for job in tuple(own.jobs):
            self.cancel(job)
        self._move_pin(own, None)

    def demote(self, branch: Branch) -> None:
        """Have its KV copied to the tiers below the pool, a little between any two steps: nobody will go on from here
        for a while. Where there are none, nothing happens."""
        own = open_branch(branch, LocalBranch)
        self._demote(own.ids, own.namespace, 0)

    def _demote(self, ids: TokenIds, namespace: str, first: int) -> None:
        def copy() -> None:
            try:
                more = self._core.pages.demote(ids, namespace, first)
            except Exception:  # a wish: whoever goes on from there computes it again
                log.exception("a branch could not be demoted")
                return
            if more is not None:
                with suppress(EngineStopped):
                    self._demote(ids, namespace, more)

        self._inbox.post(copy)

    def append(self, branch: Branch, delta: Sequence[Segment]) -> None:
        own = open_branch(branch, LocalBranch)
        own.move(*own.extended(delta, self._tokenizer))

    def generate(
        self, branch: Branch, delta: Sequence[Segment], params: SamplingParams, *, streams: bool | None = True
    ) -> Generation:
        """`streams`: as for `start`."""
        own = open_branch(branch, LocalBranch)
        with own.moved_behind(delta, self._tokenizer):
            return self.start(own.ids, params, own.namespace, own, num_settled=own.num_settled, streams=streams)

    def score(
        self,
        branch: Branch,
        delta: Sequence[Segment],
        continuations: Sequence[str],
        *,
        heal: bool = False,
        unconditional: bool = False,
    ) -> Pending[tuple[Score, ...]]:
        check_not_forked()
        own = open_branch(branch, LocalBranch)
        with own.moved_behind(delta, self._tokenizer):
            return self._start_scoring(own, continuations, heal=heal, unconditional=unconditional)

    def _start_scoring(
        self, own: LocalBranch, continuations: Sequence[str], *, heal: bool, unconditional: bool
    ) -> Pending[tuple[Score, ...]]:
        if not continuations:
            raise RequestError("score needs at least one continuation")
        before, tails = own.ids, [self._tokenizer.encode([Segment(text)]) for text in continuations]
        if not all(tails):
            raise RequestError(f"continuation {tails.index([])} is empty: there is nothing to score")
        if heal and self._boundaries is not None:
            first = first_loose(before, own.num_settled)
            joined = self._boundaries.joined(before[first:].tolist(), continuations)
            if joined is not None:
                own.num_open, before, tails = joined.num_open, before[: -joined.num_taken], joined.tails
        heads = [before]
        if unconditional:
            heads.append(np.array(self._tokenizer.bos_ids, dtype=np.int32))
        shared = SharedBeginnings.of(tails)
        pending: Pending[tuple[Score, ...]] = Pending(lambda: self.cancel(job))
        job = ScoreJob(pending, [len(head) + count for head in heads for count in shared.counts], shared)
        job.program = own.program
        params = SamplingParams(max_new_tokens=0)
        (seed,) = self._seeds(params)
        requests = []
        for group, head in enumerate(heads):
            for place in shared.by_need:
                index = group * len(tails) + place
                tail = np.array(tails[place], dtype=np.int32)
                self._limits.check_room(len(head) + len(tail), 0)
                first = max(0, job.starts[index] - 1)
                made = self._request(job, index, head, params, own.namespace, tail=tail, seed=seed, logits_from=first)
                requests.append(made)
        self._track(own, job)
        self._inbox.post(lambda: None if pending.is_done else self._submit(job, requests))
        return pending

    def usage(self) -> Mapping[str, float]:
        """Counters since the start, and the pool and the queues as they stand."""
        cache = self._core.pages.cache.stats()
        return {
            **asdict(self._core.counters),
            "pages_free": cache.free_pages,
            "pages_tree": cache.tree_pages,
            "pages_held": cache.held_pages,
            "evicted_pages": cache.evicted_pages,
            "requests_running": self._core.num_running,
            "requests_waiting": self._core.num_waiting,
            **self._compilations.counts(),
            **{f"tier_{name}": value for name, value in self._core.pages.tier_counts().items()},
        }

    def forget_counts(self) -> None:
        """Count from here on, between two steps."""
        self._between_steps(self._core.counters.clear)
        self._compilations.forget_counts()

    # -- requests ---------------------------------------------------------------------------------------------------

    def start(
        self,
        ids: TokenIds,
        params: SamplingParams,
        namespace: str = "",
        branch: LocalBranch | None = None,
        *,
        logits_from: int | None = None,
        num_settled: int = 0,
        streams: bool | None = True,
        program: int | None = None,
    ) -> Generation:
        """Generate from token ids. `logits_from`: the first position whose next-token log-probability is wanted; then
        the prompt stays as it is. Else, with `params.heal`, tokens behind the first `num_settled` may be taken back.
        `streams` changes nothing here: pieces that nobody reads cost nothing where there is no other process.
        `program`: whose places it takes without a branch, by `new_program` or below 0; None: it stands for itself.

        Raises:
            CapacityError: the tokens can never fit. RequestError: a token id, stop or bias is outside the vocabulary.
            ConstraintError: the constraint cannot be enforced (when it is compiled on the caller's thread).
            EngineStopped: the engine was shut down, or this process is a fork of the one that it runs in.
        """
        check_not_forked()
        self._limits.check(ids, params)
        if logits_from is None:
            logits_from = _first_logits(ids, params)
        generation = Generation(lambda: self.cancel(job))
        job = GenerateJob(generation, params.n, program=program if branch is None else branch.program)
        seeds = self._seeds(params)
        unsettled = None if logits_from is not None else self._unsettled(ids, params, num_settled)
        if branch is not None:
            job.moved = lambda kept: self._move(branch, ids, kept)
            self._track(branch, job)  # from here on: compiling may take a second, and the branch be closed meanwhile

        def compile_and_submit() -> None:
            matchers = self._compilations.matchers(params.constraint, params.n)
            if self._boundaries is not None and unsettled is None:
                for matcher in filter(None, matchers):  # the engine's thread asks for the same, and finds it known
                    self._boundaries.tokens_of(ids[-TAIL_TOKENS:].tolist(), matcher.forced_text())
            ends = self._compilations.stop_ends(params)
            requests = [
                self._request(
                    job,
                    index,
                    ids,
                    params,
                    namespace,
                    seed=seeds[index],
                    matcher=matchers[index],
                    stop_ends=ends,
                    logits_from=logits_from,
                    unsettled=unsettled,
                )
                for index in range(params.n)
            ]
            # Cancelled while its constraint was being compiled: nobody waits for it any more.
            self._inbox.post(lambda: None if generation.is_done else self._submit(job, requests))

        # On the engine's own thread compiling would stall every other request.
        try:
            self._compilations.start(compile_and_submit, params, generation, stalls=self._is_here)
        except BaseException as error:
            generation.fail(error)  # which nobody has: it is none of the branch's any more
            raise
        return generation

    def tell_deltas(self, generation: Generation, tell: Callable[[Delta], None], *, reads: bool) -> None:
        """Have `tell` called with each delta of what runs, from the first one on: from between two steps on, so that
        none of them comes behind the end. `reads`: as for `Generation.watch`. One that deltas are told of is only said
        to be read."""

        def begin() -> None:
            if generation.is_streamed:
                generation.begin_reading(reads=reads)
            elif not generation.is_done:
                generation.add_delta_callback(tell, reads=reads)

        with suppress(EngineStopped):
            self._inbox.post(begin)

    def cancel(self, job: Job) -> None:
        """End a job's requests; its result becomes `Cancelled` unless it was there before. In an engine that is being
        shut down it ends with EngineStopped by itself."""
        with suppress(EngineStopped):
            self._inbox.post(lambda: self._core.abort(job))

    def flush(self, *, tiers: bool = True) -> bool:
        """Drop everything from the cache, and from the `tiers` below it, that nothing runs on; False when something
        still runs."""
        return self._between_steps(lambda: self._core.pages.flush(tiers=tiers))

    def save_cache(self, path: Path, layout: Layout) -> int:
        """Write the prefix cache to a file, between two steps. Returns the number of tokens."""

        def save() -> int:
            with CacheWriter(path, layout) as writer:
                return self._core.pages.save(writer)

        return self._between_steps(save)

    def load_cache(self, path: Path, layout: Layout) -> int:
        """Take up a saved prefix cache, as far as the free pool has room. Returns the number of tokens."""
        return self._between_steps(lambda: self._core.pages.load(read_cache(path, layout)))

    def outline(self, limit: int, namespace: str = "") -> tuple[OutlineNode, ...]:
        """The shape of a namespace's tree between two steps, at most `limit` nodes of it.

        Raises:
            RequestError: `limit` is below 1.
        """
        if limit < 1:
            raise RequestError(f"limit must be at least 1, got {limit}")
        return self._between_steps(lambda: self._core.pages.outline(limit, namespace))

    def summary(self, limit: int) -> list[bytes]:
        """Marks of the prefixes in the tree (`niwaki.radix.summary`), at most `limit`, between two steps."""
        return self._between_steps(lambda: self._core.pages.cache.summary(limit))

    def check(self) -> None:
        """Prove the cache's invariants (on the engine thread). Raises AssertionError with the reason."""
        self._between_steps(self._core.pages.cache.check)

    def shutdown(self) -> None:
        """Fail what still runs with EngineStopped, and end the engine thread. Calling it twice is allowed."""
        if is_forked():  # what is to be ended is the parent's
            return
        self._end_thread()
        self._compilations.close()

    # -- helpers of the caller's side -------------------------------------------------------------------------------

    def _unsettled(self, ids: TokenIds, params: SamplingParams, num_settled: int) -> Unsettled | None:
        """The end of the prompt that what follows may change."""
        if self._boundaries is None or not params.heal or params.max_new_tokens == 0:
            return None
        return self._boundaries.unsettled(ids[first_loose(ids, num_settled) :].tolist(), 0)

    def _seeds(self, params: SamplingParams) -> list[int]:
        with self._lock:
            first = params.seed if params.seed is not None else self._random.getrandbits(62)
        return [(first + index) % 2**63 for index in range(params.n)]

    def _request(
        self,
        job: Job,
        index: int,
        ids: TokenIds,
        params: SamplingParams,
        namespace: str,
        *,
        tail: TokenIds | None = None,
        seed: int = 0,
        matcher: Matcher | None = None,
        stop_ends: ByteDfa | None = None,
        logits_from: int | None = None,
        unsettled: Unsettled | None = None,
    ) -> Request:
        with self._lock:
            self._next_id += 1
            number = self._next_id
        healing: Healing | None = None
        if unsettled is not None:
            ids, healing = ids[: -unsettled.num_tokens], Healing(unsettled, self._compilations.vocabulary)
        return Request(
            number, job, index, ids, params, self._tokenizer, tail=tail, namespace=namespace, seed=seed,
            matcher=matcher, stop_ends=stop_ends, logits_from=logits_from, healing=healing,
        )  # fmt: skip

    def _track(self, branch: LocalBranch, job: Job) -> None:
        branch.jobs.append(job)
        result: Pending[tuple[Score, ...]] | Generation = job.pending if isinstance(job, ScoreJob) else job.generation
        result.add_done_callback(lambda: branch.jobs.remove(job))
        if branch.is_closed:  # meanwhile, by somebody who knew nothing of the job
            self.cancel(job)

    # -- on the engine thread ---------------------------------------------------------------------------------------

    def _submit(self, job: Job, requests: Sequence[Request]) -> None:
        try:
            self._core.submit(requests)
        except Exception as error:  # nobody else knows yet who waits for them
            (job.generation if isinstance(job, GenerateJob) else job.pending).fail(told(error))
            raise

    def _move(self, branch: LocalBranch, before: TokenIds, kept: TokenIds) -> None:
        """On the engine thread: a generation ended, its branch now stands behind the text. One that stands elsewhere
        than `before` by now has been gone on with, by somebody who gave the generation up."""
        if branch.ids is not before:
            return
        branch.move(kept, len(kept))
        if not branch.is_closed:
            self._move_pin(branch, SharedPin(self._core.pages.pin(kept, branch.namespace)))
        if branch.is_closed:  # perhaps only now, on another thread, which then found no pin to give back
            self._move_pin(branch, None)

    def _move_pin(self, branch: LocalBranch, pin: SharedPin | None) -> None:
        with self._lock:
            old, branch.pin = branch.pin, pin
            if old is None:
                return
            old.holders -= 1
            is_free = old.holders == 0
        if is_free:
            with suppress(EngineStopped):  # its pages went with the engine
                self._inbox.post(lambda: self._core.pages.unpin(old.pin))


def _first_logits(ids: TokenIds, params: SamplingParams) -> int | None:
    """The first position whose logits `params` ask for; None: those of the last token alone. Raises RequestError."""
    if not params.return_logprob or params.logprob_start_len < 0:
        return None
    if params.logprob_start_len > len(ids):
        raise RequestError(
            f"logprob_start_len {params.logprob_start_len} is behind the end of a prompt of {len(ids)} tokens"
        )
    return max(0, params.logprob_start_len - 1)
