"""What bench_gpu.py looks at: a function for each part, which yields a line for each thing that it measures."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import OutOfResources, PTXASError

import tests.no_msgspec  # noqa: F401  # before the runtime
from niwaki.kernels import check
from niwaki.kernels.ops import Ops
from niwaki.kernels.triton.attention_cases import Cache
from niwaki.kernels.triton.case import REAL
from niwaki.kernels.triton.case import TINY as TINY_SIZE
from niwaki.kernels.triton.ops import TritonOps
from niwaki.kernels.triton.paged_attention import paged_attention
from niwaki.kernels.triton.tune import attention_runs, candidates
from niwaki.runtime import bundled
from niwaki.runtime.api import SamplingParams
from niwaki.runtime.forward.runner import Batch, Row, Runner
from niwaki.runtime.loop.ahead import Drawing, drawing_of
from niwaki.runtime.models.config import ModelConfig
from niwaki.runtime.models.weights import expected_tensors
from niwaki.runtime.sampling.sampler import PlainDraws

PAGE = 16
LOGITS_APART = 1e-4  # in float32, of those of transformers
SHAPES = {
    "0.6B": ModelConfig(
        vocab_size=151_936, num_layers=28, hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8,
        head_dim=128, context_length=40_960, qk_norm="head", tie_embeddings=True, dtype="bfloat16",
    ),
    "1B": ModelConfig(
        vocab_size=128_256, num_layers=16, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8,
        head_dim=64, context_length=131_072, tie_embeddings=True, dtype="bfloat16",
    ),
    "8B": ModelConfig(
        vocab_size=128_256, num_layers=32, hidden_size=4096, intermediate_size=14_336, num_heads=32, num_kv_heads=8,
        head_dim=128, context_length=131_072, dtype="bfloat16",
    ),
}  # fmt: skip
DRY = ModelConfig(
    vocab_size=96, num_layers=1, hidden_size=64, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=16, context_length=256, dtype="bfloat16",
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "int8 weights": {"weights": "int8"},
    "int4 weights": {"weights": "int4"},
    "fp8 weights": {"weights": "fp8"},
    "int8 cache": {"kv_dtype": "int8"},
    "fp8 cache": {"kv_dtype": "fp8"},
    "fp8 weights and cache": {"weights": "fp8", "kv_dtype": "fp8"},
}
Json = dict[str, object]
NO_GRAPHS: Json = {"failed": "its steps could not be recorded; a warning above says why"}


@dataclass(frozen=True, slots=True)
class Work:
    """How much is run: single tokens behind `context` others, a prompt, branches of `own` tokens over `shared` ones."""

    batches: tuple[int, ...]
    context: int
    prompt: int
    branches: int
    shared: int
    own: int
    repeats: int
    kinds: tuple[str, ...] = tuple(KINDS)
    by_launch: bool = True  # decoding without graphs, too
    split_rows: tuple[int, ...] = (1, 8, 64)
    splits: tuple[int, ...] = (256, 512, 1024, 2048, 0)
    cuts: int | None = None  # block sizes of attention, at most
    engine_steps: int = 320
    engine_rounds: int = 6  # the first of which does not count, where there are others


FULL = Work((1, 32, 128, 256), 1024, 4096, 128, 4096, 256, repeats=20)
QUICK = replace(
    FULL, batches=(1, 128, 256), repeats=10, kinds=("int4 weights", "fp8 weights and cache"), by_launch=False,
    split_rows=(1, 16), splits=(256, 512, 1024), engine_steps=160, engine_rounds=3,
)  # fmt: skip
TINY = Work(
    (2,), 20, 20, 3, 32, 5, repeats=1, split_rows=(2,), splits=(128, 0), cuts=2, engine_steps=2, engine_rounds=1
)


def greedy_tokens(device: str, steps: int, ops: Ops | None = None) -> list[list[int]]:
    """What the bundled model writes after a few rows of tokens, all in one batch, in float32."""
    folder = Path(bundled.MODEL_DIR)
    runner = Runner.load(folder, device=device, dtype="float32", num_pages=64, page_size=PAGE, ops=ops)
    prompts = [np.arange(5, 5 + n, dtype=np.int32) * 7 % runner.config.vocab_size for n in (3, 17, 40)]
    pages = [range(8 * i, 8 * i + 8) for i in range(len(prompts))]
    rows = [Row(prompt, 0, own) for prompt, own in zip(prompts, pages, strict=True)]
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(steps):
        best = runner.forward(rows).argmax(-1).tolist()
        rows = []
        for i, token in enumerate(best):
            written[i].append(token)
            rows.append(Row(np.array([token], np.int32), len(prompts[i]) + len(written[i]) - 1, pages[i]))
    return written


def engine_lines(device: str, work: Work) -> Iterator[Json]:
    """The bundled model in the engine, where a step is short: a batch decodes, each step launched before the last one's
    tokens are read, and in turn; the same under a mask. Whether the tokens are the same, and the milliseconds a
    step."""
    from niwaki.runtime.engine import Engine  # needs packages that the rest does without

    batch, length, steps = max(4, work.batches[-1]), 24, work.engine_steps
    generator = np.random.default_rng(0)
    prompts = generator.integers(300, 2000, (batch, length)).tolist()
    plain = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    with Engine(
        device=device, dtype="float32", kv_tokens=batch * (length + steps + PAGE), page_size=PAGE, draft_tokens=0
    ) as engine:
        core = engine.backend._core
        for kind, params in (("", plain), (", under a mask", {**plain, "regex": "[a-z ]*"})):
            seconds: dict[bool, list[float]] = {True: [], False: []}
            written: dict[bool, object] = {}
            for _ in range(work.engine_rounds):
                for ahead, taken in seconds.items():
                    core._runs_ahead = ahead
                    engine.flush_cache()
                    start, before = time.perf_counter(), core.counters.steps
                    answers = engine.generate(input_ids=prompts, sampling_params=params)
                    taken.append((time.perf_counter() - start) / (core.counters.steps - before))
                    assert isinstance(answers, list)
                    written[ahead] = [answer["output_ids"] for answer in answers]
            launched, in_turn = (statistics.median(taken[1:] or taken) * 1e3 for taken in seconds.values())
            line: Json = {"model": "niwaki-tiny", "work": f"engine, {batch} x {length}, {steps} new{kind}"}
            same = "yes" if written[True] == written[False] else "NO"
            yield line | {"ms": launched, "ms in turn": in_turn, "same tokens": same}


def family_lines(name: str, device: torch.device) -> Iterator[Json]:
    """How far the logits of one of tests/families.py are from transformers' on the CPU, in float32."""
    from tests.benchmarks.bench_logits import differences  # needs transformers
    from tests.families import MODELS, make_pair

    with TemporaryDirectory() as folder:
        ways = differences(make_pair(name, Path(folder)), device.type, TritonOps())
    line: Json = {"work": f"logits of {name}", "architecture": MODELS[name][0], "whole": ways[0]}
    yield line | {"in chunks": ways[1], "ragged": ways[2], "right": max(ways) < LOGITS_APART}


def runner_of(
    config: ModelConfig,
    device: torch.device,
    num_pages: int,
    *,
    weights: str = "auto",
    kv_dtype: str = "auto",
    tree_attention: bool = True,
    cuda_graphs: bool = True,
) -> Runner:
    """Random weights, drawn on the device, and its kernels: in a dry run, those of a GPU all the same."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    shapes = expected_tensors(config)
    generator = torch.Generator(device).manual_seed(0)

    def read(name: str) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shapes[name], device=device)
        drawn = torch.empty(shapes[name], dtype=torch.bfloat16, device=device)
        return drawn.normal_(0.0, shapes[name][-1] ** -0.5, generator=generator)

    return Runner(
        config,
        read,
        device=device.type,
        weights=weights,
        kv_dtype=kv_dtype,
        num_pages=num_pages,
        page_size=PAGE,
        tree_attention=tree_attention,
        cuda_graphs=cuda_graphs,
        ops=TritonOps(),
    )


def pages_of(work: Work) -> int:
    return work.batches[-1] * (work.context // PAGE + 2) + work.prompt // PAGE + 1


def decoded(
    config: ModelConfig, device: torch.device, work: Work, *, cuda_graphs: bool = True, **options: Any
) -> tuple[list[float], Json]:
    """Seconds of a step of single tokens, by batch: one launched behind the other, as the engine does. And what is to
    be said besides: a runner that could not record its steps has launched them."""
    runner = runner_of(config, device, pages_of(work), cuda_graphs=cuda_graphs, **options)
    steps = (steady_step(runner, batch, work.context, device)[0] for batch in work.batches)
    seconds = [device_seconds(step, 4 * work.repeats) for step in steps]
    return seconds, NO_GRAPHS if runner.is_on_gpu and cuda_graphs and runner._graphs is None else {}


def steady_step(
    runner: Runner, count: int, context: int, device: torch.device
) -> tuple[Callable[[], object], Drawing, Batch]:
    """A step of a batch that goes on, its tokens read and drawn where the logits are; how it draws; and the batch."""
    batch = replace(Batch.of(separate_rows(count, context)), drawn=torch.full((count,), 5, device=device))
    draws = PlainDraws.of([(SamplingParams(temperature=0.0), 0, 0)] * count, runner.config.vocab_size)
    drawing = drawing_of(draws, runner.config.vocab_size, device)
    return lambda: drawing.draw(runner.forward(batch)), drawing, batch


def decode_lines(name: str, config: ModelConfig, device: torch.device, bandwidth: float, work: Work) -> Iterator[Json]:
    through_graphs, fault = decoded(config, device, work)
    by_launch = [math.nan] * len(work.batches)
    if work.by_launch:
        by_launch, _ = decoded(config, device, work, cuda_graphs=False)
    for batch, seconds, launched in zip(work.batches, through_graphs, by_launch, strict=True):
        share = limit_seconds(config, batch, work.context, bandwidth) / seconds
        line: Json = {"model": name, "work": f"decode, {batch} x {work.context}", "ms": seconds * 1e3}
        line |= {"tokens/s": batch / seconds, "of the limit": share, "GB/s": share * bandwidth / 1e9}
        yield line | ({"ms launch by launch": launched * 1e3} if work.by_launch else {}) | fault


def kind_lines(name: str, config: ModelConfig, kind: str, device: torch.device, work: Work) -> Iterator[Json]:
    """Weights and caches of few bits."""
    taken, fault = decoded(config, device, work, **KINDS[kind])
    for batch, seconds in zip(work.batches, taken, strict=True):
        line: Json = {"model": name, "work": f"decode, {batch} x {work.context}, {kind}", "ms": seconds * 1e3}
        yield line | {"tokens/s": batch / seconds} | fault


def prefill_lines(name: str, config: ModelConfig, device: torch.device, work: Work) -> Iterator[Json]:
    pages = pages_of(work)
    runner = runner_of(config, device, pages)
    prompt = Row(np.arange(work.prompt, dtype=np.int32) % 90, 0, range(pages - work.prompt // PAGE - 1, pages))
    prefill = median_step(runner, [prompt], min(work.repeats, 5))
    yield {"model": name, "work": f"prefill, 1 x {work.prompt}", "ms": prefill * 1e3, "tokens/s": work.prompt / prefill}
    both = median_step(runner, [*separate_rows(work.batches[-1], work.context), prompt], min(work.repeats, 5))
    yield {"model": name, "work": f"both: {work.batches[-1]} x {work.context}, 1 x {work.prompt}", "ms": both * 1e3}


def prefix_lines(name: str, config: ModelConfig, device: torch.device, work: Work) -> Iterator[Json]:
    pages = work.shared // PAGE + work.branches * (work.own // PAGE + 1)
    rows = branches(work.branches, work.shared, work.own)
    tree, flat = (
        median_step(runner_of(config, device, pages, tree_attention=shares), rows, work.repeats)
        for shares in (True, False)
    )
    line: Json = {"model": name, "work": f"decode, {work.branches} x ({work.shared} shared + {work.own})"}
    yield line | {"ms": tree * 1e3, "ms row by row": flat * 1e3, "row by row / tree": flat / tree}


def gap_lines(name: str, config: ModelConfig, device: torch.device, work: Work) -> Iterator[Json]:
    """Steps that are launched one behind the other, tokens drawn and read on the device: how long it waits for the host
    in each, beside what the graph and the draw take by themselves."""
    count = work.batches[-1]
    runner = runner_of(config, device, pages_of(work))
    step, drawing, batch = steady_step(runner, count, work.context, device)
    graph, logits = torch.cuda.CUDAGraph(), runner.forward(batch)
    drawing.draw(logits)
    finish()
    with torch.cuda.graph(graph):
        drawing.draw(logits)
    assert runner._graphs is not None, "there is a GPU"
    (recorded,) = runner._graphs._recorded.values()

    def busy() -> None:
        recorded.graph.replay()
        graph.replay()

    steps, alone = (device_seconds(each, 4 * work.repeats) for each in (step, busy))
    line: Json = {"model": name, "work": f"steps behind one another, {count} x {work.context}", "ms": steps * 1e3}
    yield line | {"ms busy": alone * 1e3, "gap us": (steps - alone) * 1e6}


def device_seconds(run: Callable[[], object], count: int) -> float:
    """Of one of so many runs behind one another, by the device's own clock where there is one."""
    for _ in range(3):
        run()
    finish()
    if not torch.cuda.is_available():
        return _once(run)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / count


def split_lines(device: torch.device, bandwidth: float, work: Work) -> Iterator[Json]:
    """Decode attention alone, its keys cut into parts of several sizes (0: not at all), few rows with long texts and
    more with shorter ones."""
    is_dry = device.type != "cuda"
    size, dtype = (TINY_SIZE, torch.float32) if is_dry else (REAL, torch.bfloat16)
    keys = 8 * size.keys
    for rows in work.split_rows:
        cache = Cache(size, [keys - 1] * rows, [1] * rows, device, dtype)
        plan, out = cache.plan(shares=False), torch.empty_like(cache.q)
        operands = cache.q, cache.k_pool, cache.v_pool, plan.page_table, plan.length, plan.split[0], out
        read = 2 * rows * keys * size.kv_heads * size.head_dim * dtype.itemsize
        for split in work.splits:
            run = partial(paged_attention, *operands, split=split)
            seconds = _once(run) if is_dry else check.median_seconds(run)
            line: Json = {"work": f"attention, {rows} x {keys} keys, parts of {split}", "us": seconds * 1e6}
            yield line | {"GB/s": read / seconds / 1e9, "of copy": read / seconds / bandwidth}


def cut_lines(kind: str, device: torch.device, work: Work) -> Iterator[Json]:
    """Attention alone, cut into blocks of several sizes: which the default should be. Nothing of it is kept."""
    is_dry = device.type != "cuda"
    size, dtype = (TINY_SIZE, torch.float32) if is_dry else (REAL, torch.bfloat16)
    run = attention_runs(kind, size, device, dtype)
    for tuning in islice(candidates(kind), work.cuts):
        name = f"{kind} attention, blocks of {tuning.block_m} x {tuning.block_n}, "
        line: Json = {"work": f"{name}{tuning.num_warps} warps, {tuning.num_stages} stages"}
        try:
            once = partial(run, tuning)
            yield line | {"us": (_once(once) if is_dry else check.median_seconds(once)) * 1e6}
        except (OutOfResources, PTXASError) as error:
            yield line | {"does not fit": check.in_short(error)}


def _once(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ragged_lines(name: str, config: ModelConfig, device: torch.device, work: Work) -> Iterator[Json]:
    """Rows of a few tokens, as drafts make them: through graphs in pieces, and launch by launch."""
    singles = separate_rows(min(8, work.batches[-1]), work.context)
    rows = [Row(np.arange(2 + i % 3, dtype=np.int32), row.start, row.page_ids) for i, row in enumerate(singles)]
    seconds, logits = [], []
    for cuda_graphs in (True, False):
        runner = runner_of(config, device, pages_of(work), cuda_graphs=cuda_graphs)
        seconds.append(median_step(runner, rows, work.repeats))
        logits.append(runner.forward(rows).clone())
        del runner
    line: Json = {"model": name, "work": f"{len(rows)} x {work.context}, 2 to 4 tokens each", "ms": seconds[0] * 1e3}
    apart = float((logits[0] - logits[1]).abs().max())
    yield line | {"ms launch by launch": seconds[1] * 1e3, "largest difference": apart}


def separate_rows(batch: int, context: int) -> list[Row]:
    """A token each behind `context` others, on pages of their own."""
    pages = context // PAGE + 1
    token = np.array([5], np.int32)
    return [Row(token, context, range(i * pages, (i + 1) * pages)) for i in range(batch)]


def branches(count: int, shared: int, own: int) -> list[Row]:
    """A token each behind a trunk in common and a branch of their own."""
    trunk, pages = list(range(shared // PAGE)), own // PAGE + 1
    token = np.array([5], np.int32)
    starts = [len(trunk) + i * pages for i in range(count)]
    return [Row(token, shared + own, [*trunk, *range(start, start + pages)]) for start in starts]


def limit_seconds(config: ModelConfig, batch: int, context: int, bandwidth: float) -> float:
    """Reading the weights that a step multiplies, and the keys and values, once."""
    shapes = expected_tensors(config)
    embedding = 0 if config.tie_embeddings else math.prod(shapes["model.embed_tokens.weight"])
    weights = 2 * (sum(math.prod(shape) for shape in shapes.values()) - embedding)
    return (weights + batch * context * config.kv_bytes_per_token("bfloat16")) / bandwidth


def median_step(runner: Runner, rows: Sequence[Row], repeats: int) -> float:
    """Wall seconds of a step and its result, the host's share included."""
    seconds = []
    warm_ups = min(repeats - 1, 3)
    for turn in range(warm_ups + repeats):
        finish()
        start = time.perf_counter()
        runner.forward(rows)
        finish()
        if turn >= warm_ups:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def finish() -> None:
    """Until the device has done what it was given; in the interpreter it has."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
