"""W17: what the host does in each step, by part, while the model costs nothing. Prints a table, can write JSON.

Run it as `python -m tests.benchmarks.bench_host [--streamed] [--ahead] [--beside] [--json PATH] [--profile BATCH]`. The
core runs decoding requests against a model that returns the same logits at once. Medians over runs of 16 steps, in
which each request takes one page, of processor time: other work on the machine still slows it by the caches that it
takes. With `--streamed` somebody reads every token of every request as it comes; with `--ahead` steps are launched
before the last one's tokens are read, as on a GPU; `--beside` takes steps alone, beside pieces of prompts of 3,000
tokens, and beside these with every step planned, in turn.
Budgets in all: 53, 156 and 522 microseconds at batch 1, 32 and 256.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import json
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from niwaki.kernels.plan import make_plan
from niwaki.radix.pages import PageCopy
from niwaki.runtime.api import Generation, SamplingParams
from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.checkpoint.loader import read_model_folder
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.forward.runner import Batch
from niwaki.runtime.loop import core as loop_core
from niwaki.runtime.loop import decoding
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.requests.jobs import GenerateJob
from niwaki.runtime.requests.request import Request

PAGE_SIZE = 16
BUDGETS = {1: 53.0, 32: 156.0, 256: 522.0}
STEPS, WARM_STEPS = 320, 24
PROMPT = 24
PIECE = 128  # tokens of a prompt beside streams, as of a small model
ROUNDS = 5


class StubRunner:
    """A model that costs nothing: it lays out the batch as the real one does, and returns logits made beforehand, other
    ones in each step, so that no text repeats itself and every request looks for a draft in vain."""

    def __init__(self, num_pages: int) -> None:
        self.config = read_model_folder(MODEL_DIR).config
        self.num_pages = num_pages
        self.page_size = PAGE_SIZE
        self.kv_bytes_per_token = 1
        self.seconds = 0.0  # spent on laying out batches
        self.num_steps = 0
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(4096, self.config.vocab_size, generator=generator)
        self.logits[:, list(self.config.eos_ids)] = -1e9

    def forward(self, batch: Batch) -> torch.Tensor:
        start = time.thread_time()
        make_plan(batch.spans, page_size=PAGE_SIZE, num_pages=self.num_pages)
        torch.from_numpy(batch.token_ids)
        self.seconds += time.thread_time() - start
        self.num_steps += 1
        first = self.num_steps * 61 % 3840
        return self.logits[first : first + len(batch.token_ids if batch.wanted is None else batch.wanted)]

    def host_planes(self) -> None: ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None: ...


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds a step, median."""

    batch: int
    total: float
    parts: dict[str, float]
    budget: float


def timed(owner: object, name: str, spent: dict[str, float]) -> None:
    """Add the seconds of each call of the method, or of the module's function, to `spent`."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any) -> Any:
        start = time.thread_time()
        try:
            return method(*args)
        finally:
            spent[name] = spent.get(name, 0.0) + time.thread_time() - start

    setattr(owner, name, call)


def core_with(
    batch: int, *, is_streamed: bool, runs_ahead: bool, piece: int | None = None
) -> tuple[EngineCore, StubRunner]:
    """A core in which `batch` requests decode, each on a prompt of its own. `piece`: of prompts beside streams."""
    length = PROMPT + 2 * STEPS + WARM_STEPS + 64
    num_pages = batch * (length // PAGE_SIZE + 4) + 512
    runner = StubRunner(num_pages)
    tokenizer = Tokenizer(MODEL_DIR)
    config = EngineConfig(
        max_running_requests=max(256, batch), chunked_prefill_size=16384, streaming_prefill_size=piece
    )
    core = EngineCore(runner, tokenizer, config, num_pages, runs_ahead=runs_ahead)  # type: ignore[arg-type]  # what it asks
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=length - PROMPT, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        generation = Generation()
        if is_streamed:
            generation.add_delta_callback(lambda delta: None)
        ids = rng.integers(16, 2000, PROMPT + index % PAGE_SIZE, dtype=np.int32)
        core.submit([Request(index, GenerateJob(generation, 1), 0, ids, params, tokenizer)])
    return core, runner


def measure(batch: int, *, is_streamed: bool = False, runs_ahead: bool = False, profile: bool = False) -> HostTime:
    core, runner = core_with(batch, is_streamed=is_streamed, runs_ahead=runs_ahead)
    for _ in range(WARM_STEPS):
        core.step()
    gc.collect()
    gc.freeze()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    totals = [seconds_of_a_page(core) for _ in range(STEPS // PAGE_SIZE)]
    profiler.disable()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    spent: dict[str, float] = {}  # the parts afterwards: looking at the clock takes time as well
    timed(core, "_steady", spent)
    timed(core, "_go_on", spent)
    timed(core._decoding, "draw", spent)
    timed(core._decoding, "launched", spent)
    timed(core._decoding, "take_quietly", spent)
    names = vars(decoding)
    highest = names["highest"]
    timed(decoding, "highest", spent)  # the draw of steps that are taken quietly
    parts: dict[str, list[float]] = {}
    for _ in range(STEPS // PAGE_SIZE):
        spent.clear()
        runner.seconds = 0.0
        total = seconds_of_a_page(core)
        quiet = spent.get("highest", 0.0)
        draw = spent.get("draw", 0.0) + spent.get("launched", 0.0) + quiet
        go_on = spent.get("_go_on", 0.0) + spent.get("take_quietly", 0.0) - quiet
        known = {"schedule, pages": spent["_steady"], "inputs": runner.seconds, "sample": draw, "tokens back": go_on}
        for name, seconds in {**known, "the step itself": total - sum(known.values())}.items():
            parts.setdefault(name, []).append(seconds)
    gc.unfreeze()
    names["highest"] = highest
    medians = {name: statistics.median(values) / PAGE_SIZE * 1e6 for name, values in parts.items()}
    return HostTime(batch, statistics.median(totals) / PAGE_SIZE * 1e6, medians, BUDGETS.get(batch, 0.0))


def seconds_of_a_page(core: EngineCore) -> float:
    """Of so many steps that each request takes one page."""
    start = time.thread_time()
    for _ in range(PAGE_SIZE):
        core.step()
    return time.thread_time() - start


def beside(batch: int) -> tuple[float, float, float]:
    """Microseconds a step: alone, beside pieces of prompts, and beside them with each step planned."""
    core, _ = core_with(batch, is_streamed=False, runs_ahead=False, piece=PIECE)
    tokenizer, rng = Tokenizer(MODEL_DIR), np.random.default_rng(1)
    last = Generation()
    last.add_delta_callback(lambda delta: None)  # somebody reads: prompts come in small pieces
    numbers = itertools.count(batch)

    def step(*, has_prompt: bool) -> float:
        """Seconds of one; where a prompt begins or ends they count for nothing."""
        if has_prompt and len(core._roster.running) == batch:
            ids = rng.integers(16, 2000, 3000, dtype=np.int32)
            params = SamplingParams(max_new_tokens=1)
            core.submit([Request(next(numbers), GenerateJob(last, 1), 0, ids, params, tokenizer)])
            core.step()
        start = time.thread_time()
        core.step()
        seconds = time.thread_time() - start
        return seconds if len(core._roster.running) == batch + has_prompt else step(has_prompt=has_prompt)

    found: list[list[float]] = [[], [], []]
    kept = loop_core.STEADY_PIECES
    for _ in range(ROUNDS):
        for place, (has_prompt, pieces) in enumerate([(False, kept), (True, kept), (True, 1 << 30)]):
            loop_core.STEADY_PIECES = pieces
            while not has_prompt and len(core._roster.running) > batch:
                core.step()
            found[place] += [step(has_prompt=has_prompt) for _ in range(PAGE_SIZE)]
    loop_core.STEADY_PIECES = kept
    alone, arrays, planned = (statistics.median(column) * 1e6 for column in found)
    return alone, arrays, planned


def table(measured: Sequence[HostTime]) -> str:
    names = list(measured[0].parts)
    lines = [f"{'us a step, median':<28}" + "".join(f"{f'batch {one.batch}':>12}" for one in measured)]
    lines += [f"{name:<28}" + "".join(f"{one.parts[name]:>12.1f}" for one in measured) for name in names]
    lines.append(f"{'in all':<28}" + "".join(f"{one.total:>12.1f}" for one in measured))
    # The budget has no part for drawing tokens on the host: on a GPU that is the device's work.
    lines.append(f"{'without sampling':<28}" + "".join(f"{one.total - one.parts['sample']:>12.1f}" for one in measured))
    lines.append(f"{'budget':<28}" + "".join(f"{one.budget:>12.0f}" for one in measured))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streamed", action="store_true", help="somebody reads every request's text as it comes")
    parser.add_argument("--profile", type=int, metavar="BATCH", help="show where the time goes at this batch size")
    parser.add_argument(
        "--ahead", action="store_true", help="each step is launched before the last one's tokens are read"
    )
    parser.add_argument("--beside", action="store_true", help="alone and beside pieces of prompts, in turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.beside:
        print(f"{'us a step, median':>17}  {'alone':>7}  {'beside':>7}  {'planned':>7}")
        for batch in (12, 32, 128):
            print(f"{batch:>17}" + "".join(f"  {one:>7.1f}" for one in beside(batch)), flush=True)
        return
    if options.profile:
        measure(options.profile, is_streamed=options.streamed, runs_ahead=options.ahead, profile=True)
        return
    measured = [measure(batch, is_streamed=options.streamed, runs_ahead=options.ahead) for batch in BUDGETS]
    print(table(measured))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = [
            {"batch": one.batch, "total": one.total, "parts": one.parts, "budget": one.budget} for one in measured
        ]
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
