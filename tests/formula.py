"""An engine core on a made-up model: logits that depend on the last token and its position alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from niwaki.radix.pages import PageCopy
from niwaki.runtime.api import Generation, Output, SamplingParams
from niwaki.runtime.checkpoint.loader import read_model_folder
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.forward.runner import Batch
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.requests.jobs import GenerateJob
from niwaki.runtime.requests.request import Request

PAGE_SIZE = 4


class Formula:
    """Logits that depend on the last token and its position alone."""

    def __init__(self, folder: Path) -> None:
        self.config = read_model_folder(folder).config
        self.broken_at: int | None = None  # the position at which it fails

    def forward(self, batch: Batch) -> torch.Tensor:
        spans = batch.spans
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(spans.starts, spans.counts, strict=True)])
        assert all(spans.held * PAGE_SIZE >= spans.starts + spans.counts)
        if self.broken_at in positions:
            raise RuntimeError("broken")
        ids = batch.ids_on(torch.device("cpu")).numpy()
        if batch.wanted is not None:
            ids, positions = ids[batch.wanted], positions[batch.wanted]
        phase = np.outer(ids + 1.0, np.arange(self.config.vocab_size) + 1.0) * 0.37 + positions[:, None]
        return torch.from_numpy((3.0 * np.cos(phase)).astype(np.float32))

    def host_planes(self) -> None: ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None: ...


class Host:
    """A core on the formula, and requests on it."""

    def __init__(
        self,
        folder: Path,
        num_pages: int = 400,
        *,
        runs_ahead: bool = False,
        keys_per_token: float | None = None,
        chunk: int | None = None,
        streaming: int | None = None,
    ) -> None:
        """`chunk`, `streaming`: tokens of a step, and of prompts in one that has to be short."""
        self.runner = Formula(folder)
        self._tokenizer = Tokenizer(folder)
        config = EngineConfig(
            page_size=PAGE_SIZE, max_running_requests=8, chunked_prefill_size=chunk, streaming_prefill_size=streaming
        )
        model = self.runner.config
        vocabulary = Vocabulary(self._tokenizer.token_bytes, frozenset(model.eos_ids), model.vocab_size)
        self.compiler = ConstraintCompiler(vocabulary, seconds=20)
        boundaries = Boundaries(vocabulary, self._tokenizer.plain_ids)
        self.core = EngineCore(
            self.runner,  # type: ignore[arg-type]  # it has what a core asks of a runner
            self._tokenizer,
            config,
            num_pages,
            boundaries=boundaries,
            runs_ahead=runs_ahead,
            keys_per_token=keys_per_token,
        )
        self.generations: list[Generation] = []
        self.jobs: list[GenerateJob] = []
        self.steady_steps = 0

    def submit(self, params: SamplingParams, length: int, program: int | None = None) -> Generation:
        index = len(self.generations)
        ids = np.random.default_rng(index).integers(5, 60, length, dtype=np.int32)
        generation = Generation()
        job = GenerateJob(generation, 1, program=program)
        matcher = None if params.constraint is None else self.compiler.compile(params.constraint).matcher()
        self.core.submit([Request(index, job, 0, ids, params, self._tokenizer, seed=index, matcher=matcher)])
        self.generations.append(generation)
        self.jobs.append(job)
        return generation

    def step(self) -> None:
        self.steady_steps += self.core._decoding is not None
        self.core.step()
        if self.core._decoding is None:
            self.core.pages.cache.check()

    def run_until_steady(self, least: int = 0) -> None:
        """`least` steps, and on until everybody decodes: a text under a constraint sits out the steps in which a thread
        without a processor has not told its matcher what was drawn."""
        for _ in range(least):
            self.step()
        while self.core._decoding is None:
            assert self.core.has_work
            self.step()

    def run(self) -> list[Output]:
        while self.core.has_work:
            self.step()
        self.core.pages.cache.check()
        return [replace(g.result()[0], seconds=0.0, queued_seconds=0.0, first_seconds=0.0) for g in self.generations]


def mixed(host: Host, kinds: Sequence[SamplingParams]) -> list[Output]:
    """More requests than may run at once, some of which come later."""
    for index, params in enumerate(kinds):
        host.submit(params, 3 + 5 * index)
    for _ in range(30):
        host.step()
    for index, params in enumerate(kinds):
        host.submit(params, 4 + index)
    return host.run()
