"""W17: what the host does in each step, by part, while the model costs nothing. Prints a table, can write JSON.

Run it as `python -m tests.benchmarks.bench_host [--json PATH] [--profile BATCH]`. The core runs decoding requests
against a model that returns the same logits at once. Medians over steps, of processor time: other work on the machine
still slows it by the caches that it takes. Budgets in all: 53, 156 and 522 microseconds at batch 1, 32 and 256.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
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

from niwaki.kernels.plan import Span, make_plan
from niwaki.radix.pages import PageCopy
from niwaki.runtime.api import Generation, SamplingParams
from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.config import EngineConfig
from niwaki.runtime.core import EngineCore
from niwaki.runtime.loader import read_model_folder
from niwaki.runtime.request import GenerateJob, Request
from niwaki.runtime.runner import Row
from niwaki.runtime.tokenizer import Tokenizer

PAGE_SIZE = 16
BUDGETS = {1: 53.0, 32: 156.0, 256: 522.0}
STEPS, WARM_STEPS = 200, 20
PROMPT = 24


class StubRunner:
    """A model that costs nothing: it lays out the batch as the real one does, and returns logits made beforehand."""

    def __init__(self, num_pages: int) -> None:
        self.config = read_model_folder(MODEL_DIR).config
        self.num_pages = num_pages
        self.page_size = PAGE_SIZE
        self.kv_bytes_per_token = 1
        self.seconds = 0.0  # of the last step, spent on laying out the batch
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(4096, self.config.vocab_size, generator=generator)
        self.logits[:, list(self.config.eos_ids)] = -1e9

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        start = time.thread_time()
        spans = [Span(row.start, len(row.token_ids), row.page_ids) for row in rows]
        make_plan(spans, page_size=PAGE_SIZE, num_pages=self.num_pages, device=torch.device("cpu"))
        torch.from_numpy(np.concatenate([row.token_ids for row in rows]))
        self.seconds = time.thread_time() - start
        return self.logits[: sum(row.num_logits for row in rows)]

    def copy_pages(self, copies: Sequence[PageCopy]) -> None: ...


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds a step, median."""

    batch: int
    total: float
    parts: dict[str, float]
    budget: float


def timed(core: EngineCore, name: str, spent: dict[str, float]) -> None:
    """Add the seconds of each call of the method to `spent`."""
    method: Callable[..., Any] = getattr(core, name)

    def call(*args: Any) -> Any:
        start = time.thread_time()
        try:
            return method(*args)
        finally:
            spent[name] = spent.get(name, 0.0) + time.thread_time() - start

    setattr(core, name, call)


def core_with(batch: int) -> tuple[EngineCore, StubRunner]:
    """A core in which `batch` requests decode, each on a prompt of its own."""
    length = PROMPT + STEPS + WARM_STEPS + 64
    num_pages = batch * (length // PAGE_SIZE + 2) + 64
    runner = StubRunner(num_pages)
    tokenizer = Tokenizer(MODEL_DIR)
    config = EngineConfig(max_running_requests=max(256, batch), chunked_prefill_size=8192)
    core = EngineCore(runner, tokenizer, config, num_pages)  # type: ignore[arg-type]  # what the core asks of a runner
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=length - PROMPT, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        job = GenerateJob(Generation(), 1)
        ids = rng.integers(16, 2000, PROMPT, dtype=np.int32)
        core.submit([Request(index, job, 0, ids, params, tokenizer)])
    return core, runner


def measure(batch: int, profile: bool = False) -> HostTime:
    core, runner = core_with(batch)
    spent: dict[str, float] = {}
    if not profile:
        for name in ("_plan", "_make_batch", "_commit", "_take_logits", "_draw", "_take"):
            timed(core, name, spent)
    for _ in range(WARM_STEPS):
        core.step()
    gc.collect()
    gc.freeze()
    profiler = cProfile.Profile()
    totals: list[float] = []
    parts: dict[str, list[float]] = {}
    for _ in range(STEPS):
        spent.clear()
        if profile:
            profiler.enable()
        start = time.thread_time()
        core.step()
        totals.append(time.thread_time() - start)
        if profile:
            profiler.disable()
            continue
        plan, take, draw = spent["_plan"], spent["_take"], spent["_draw"]
        for name, seconds in {
            "schedule": plan,
            "allocate": spent["_make_batch"] - plan,
            "inputs": runner.seconds,
            "commit": spent["_commit"],
            "sample": draw - take,
            "tokens back, text, stops": spent["_take_logits"] - draw + take,
        }.items():
            parts.setdefault(name, []).append(seconds)
    gc.unfreeze()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    medians = {name: statistics.median(values) * 1e6 for name, values in parts.items()}
    return HostTime(batch, statistics.median(totals) * 1e6, medians, BUDGETS[batch])


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
    parser.add_argument("--profile", type=int, metavar="BATCH", help="show where the time goes at this batch size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        measure(options.profile, profile=True)
        return
    measured = [measure(batch) for batch in BUDGETS]
    print(table(measured))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = [
            {"batch": one.batch, "total": one.total, "parts": one.parts, "budget": one.budget} for one in measured
        ]
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
