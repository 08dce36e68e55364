"""Everything that one looks at on an NVIDIA GPU, in one run: `python -m tests.benchmarks.bench_gpu --json PATH`.

1. The kernels: right, and how fast (`niwaki.kernels.check`). 2. The bundled model: the CPU's greedy tokens, and in the
engine the tokens and the time of steps that are launched ahead against those of steps in turn. 3. Decoding
at the shapes of 0.6B, 1B and 8B models with random weights: a step through its CUDA graph and launch by launch, against
what the device's bandwidth allows (W0, W17). 4. The same with weights and caches of few bits. 5. Prefill, a step of
both kinds, and one of a few tokens a row, through graphs in pieces and launch by launch. 6. A shared prefix: tree
attention against row by row (W14).

Runs from a bare checkout with PYTHONPATH=. and needs torch, Triton, Numba, safetensors, tokenizers and psutil.
`--dry-run` needs no GPU: the same code over a tiny shape in Triton's interpreter, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from niwaki.kernels import check
from niwaki.kernels.ops import Ops
from niwaki.kernels.triton.ops import TritonOps
from niwaki.runtime import bundled
from niwaki.runtime.engine import Engine
from niwaki.runtime.models.config import ModelConfig
from niwaki.runtime.models.weights import expected_tensors
from niwaki.runtime.runner import Row, Runner

PAGE = 16
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
KINDS: dict[str, dict[str, str]] = {
    "int8 weights": {"weights": "int8"},
    "int4 weights": {"weights": "int4"},
    "fp8 weights": {"weights": "fp8"},
    "int8 cache": {"kv_dtype": "int8"},
    "fp8 cache": {"kv_dtype": "fp8"},
    "fp8 weights and cache": {"weights": "fp8", "kv_dtype": "fp8"},
}
Json = dict[str, object]


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


FULL = Work((1, 32, 128, 256), 1024, 4096, 128, 4096, 256, repeats=20)
TINY = Work((2,), 20, 20, 3, 32, 5, repeats=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--models", default="0.6B,1B,8B", help="which shapes, by comma; none: kernels only")
    parser.add_argument("--tune", action="store_true", help="measure block sizes first")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape in the interpreter, without a GPU")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not chosen.dry_run:
        print("bench_gpu needs an NVIDIA GPU; torch sees none. --dry-run does without one.")
        return 1
    kernels, is_right = check.check_all("", tunes=chosen.tune)
    print(check.table(kernels), flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = 2 if chosen.dry_run else 32
    same = greedy_tokens(device.type, steps, TritonOps()) == greedy_tokens("cpu", steps)
    print(f"\nThe bundled model in float32 writes the CPU's greedy tokens: {'yes' if same else 'NO'}\n", flush=True)
    is_same_ahead, line = engine_line(device.type, TINY if chosen.dry_run else FULL)
    print(check.table([line]), flush=True)
    named = {name: SHAPES[name] for name in chosen.models.split(",") if name}
    shapes = {"tiny": DRY} if chosen.dry_run else named
    bandwidth = check.measured_ceilings(device).bytes_per_second if device.type == "cuda" else math.nan
    models: list[Json] = [line]
    for name, config in shapes.items():
        for line in model_lines(name, config, device, bandwidth, TINY if chosen.dry_run else FULL):
            models.append(line)
            print(check.table([line]), flush=True)
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": check.machine(), "kernels": kernels, "same tokens as the CPU": same, "models": models}
        chosen.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    return 0 if is_right and same and is_same_ahead else 1


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


def engine_line(device: str, work: Work) -> tuple[bool, Json]:
    """The bundled model in the engine, where a step is short: a batch decodes, each step launched before the last one's
    tokens are read, and in turn. Whether the tokens are the same, and the milliseconds a step."""
    batch, length, steps = max(4, work.batches[-1]), 24, 16 * work.repeats
    generator = np.random.default_rng(0)
    prompts = generator.integers(300, 2000, (batch, length)).tolist()
    params = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    written: dict[bool, object] = {}
    with Engine(
        device=device, dtype="float32", kv_tokens=batch * (length + steps + PAGE), page_size=PAGE, draft_tokens=0
    ) as engine:
        for _ in range(1 + min(work.repeats, 5)):
            for ahead, taken in seconds.items():
                engine.backend._core._runs_ahead = ahead
                engine.flush_cache()
                start = time.perf_counter()
                answers = engine.generate(input_ids=prompts, sampling_params=params)
                taken.append(time.perf_counter() - start)
                assert isinstance(answers, list)
                written[ahead] = [answer["output_ids"] for answer in answers]
    launched, in_turn = (statistics.median(taken[1:]) / steps * 1e3 for taken in seconds.values())
    same = written[True] == written[False]
    line: Json = {"model": "niwaki-tiny", "work": f"engine, {batch} x {length}, {steps} new", "ms": launched}
    return same, line | {"ms in turn": in_turn, "same tokens": "yes" if same else "NO"}


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


def model_lines(name: str, config: ModelConfig, device: torch.device, bandwidth: float, work: Work) -> Iterator[Json]:
    """Decoding at several batches, in every kind, prefill, a step of both, and a shared prefix."""
    pages = work.batches[-1] * (work.context // PAGE + 2) + work.prompt // PAGE + 1

    def decoded(**options: Any) -> list[float]:
        runner = runner_of(config, device, pages, **options)
        return [median_step(runner, separate_rows(batch, work.context), work.repeats) for batch in work.batches]

    through_graphs, by_launch = decoded(), decoded(cuda_graphs=False)
    for batch, seconds, launched in zip(work.batches, through_graphs, by_launch, strict=True):
        share = limit_seconds(config, batch, work.context, bandwidth) / seconds
        line: Json = {"model": name, "work": f"decode, {batch} x {work.context}", "ms": seconds * 1e3}
        yield line | {"tokens/s": batch / seconds, "of the limit": share, "ms launch by launch": launched * 1e3}
    for kind, options in KINDS.items():
        for batch, plain, seconds in zip(work.batches, through_graphs, decoded(**options), strict=True):
            line = {"model": name, "work": f"decode, {batch} x {work.context}, {kind}", "ms": seconds * 1e3}
            yield line | {"x bfloat16": plain / seconds}
    runner = runner_of(config, device, pages)
    prompt = Row(np.arange(work.prompt, dtype=np.int32) % 90, 0, range(pages - work.prompt // PAGE - 1, pages))
    prefill = median_step(runner, [prompt], min(work.repeats, 5))
    yield {"model": name, "work": f"prefill, 1 x {work.prompt}", "ms": prefill * 1e3, "tokens/s": work.prompt / prefill}
    both = median_step(runner, [*separate_rows(work.batches[-1], work.context), prompt], min(work.repeats, 5))
    yield {"model": name, "work": f"both: {work.batches[-1]} x {work.context}, 1 x {work.prompt}", "ms": both * 1e3}
    del runner
    yield {"model": name, **ragged_line(config, device, pages, work)}
    pages = work.shared // PAGE + work.branches * (work.own // PAGE + 1)
    rows = branches(work.branches, work.shared, work.own)
    tree, flat = (
        median_step(runner_of(config, device, pages, tree_attention=shares), rows, work.repeats)
        for shares in (True, False)
    )
    line = {"model": name, "work": f"decode, {work.branches} x ({work.shared} shared + {work.own})", "ms": tree * 1e3}
    yield line | {"ms row by row": flat * 1e3, "row by row / tree": flat / tree}


def ragged_line(config: ModelConfig, device: torch.device, pages: int, work: Work) -> Json:
    """Rows of a few tokens, as drafts make them: through graphs in pieces, and launch by launch."""
    singles = separate_rows(min(8, work.batches[-1]), work.context)
    rows = [Row(np.arange(2 + i % 3, dtype=np.int32), row.start, row.page_ids) for i, row in enumerate(singles)]
    seconds, logits = [], []
    for cuda_graphs in (True, False):
        runner = runner_of(config, device, pages, cuda_graphs=cuda_graphs)
        seconds.append(median_step(runner, rows, work.repeats))
        logits.append(runner.forward(rows).clone())
        del runner
    line: Json = {"work": f"{len(rows)} x {work.context}, 2 to 4 tokens each", "ms": seconds[0] * 1e3}
    apart = float((logits[0] - logits[1]).abs().max())
    return line | {"ms launch by launch": seconds[1] * 1e3, "largest difference": apart}


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


if __name__ == "__main__":
    sys.exit(main())
