"""Everything that one looks at on an NVIDIA GPU, in one run: `python -m tests.benchmarks.bench_gpu --json PATH`.

1. The kernels: right, and how fast (`niwaki.kernels.check`). 2. The bundled model: the CPU's greedy tokens. 3. Decoding
at the shapes of 0.6B, 1B and 8B models with random weights: a step through its CUDA graph and launch by launch, against
what the device's bandwidth allows (W0, W17). 4. Prefill. 5. A shared prefix: tree attention against row by row (W14).

Runs from a bare checkout with PYTHONPATH=. and needs torch, Triton, Numba, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from niwaki.kernels import check
from niwaki.runtime import bundled
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
Json = dict[str, object]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--models", default="0.6B,1B,8B", help="which shapes, by comma; none: kernels only")
    parser.add_argument("--tune", action="store_true", help="measure block sizes first")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench_gpu needs an NVIDIA GPU; torch sees none. python -m niwaki.kernels.check works without one.")
        return 1
    device = torch.device("cuda")
    kernels, is_right = check.check_all("", tunes=chosen.tune)
    print(check.table(kernels), flush=True)
    same = greedy_tokens("cuda") == greedy_tokens("cpu")
    print(f"\nThe bundled model in float32 writes the CPU's greedy tokens: {'yes' if same else 'NO'}\n", flush=True)
    bandwidth = check.measured_ceilings(device).bytes_per_second
    models: list[Json] = []
    for name in filter(None, chosen.models.split(",")):
        for line in model_lines(name, SHAPES[name], device, bandwidth):
            models.append(line)
            print(check.table([line]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": check.machine(), "kernels": kernels, "same tokens as the CPU": same, "models": models}
        chosen.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    return 0 if is_right and same else 1


def greedy_tokens(device: str, steps: int = 32) -> list[list[int]]:
    """What the bundled model writes after a few rows of tokens, all in one batch, in float32."""
    runner = Runner.load(Path(bundled.MODEL_DIR), device=device, dtype="float32", num_pages=64, page_size=PAGE)
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


def runner_of(
    config: ModelConfig, device: torch.device, num_pages: int, *, tree_attention: bool = True, cuda_graphs: bool = True
) -> Runner:
    """Random weights, drawn on the device."""
    shapes = expected_tensors(config)
    generator = torch.Generator(device).manual_seed(0)

    def read(name: str) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shapes[name], device=device)
        weights = torch.empty(shapes[name], dtype=torch.bfloat16, device=device)
        return weights.normal_(0.0, shapes[name][-1] ** -0.5, generator=generator)

    return Runner(
        config,
        read,
        device=device.type,
        num_pages=num_pages,
        page_size=PAGE,
        tree_attention=tree_attention,
        cuda_graphs=cuda_graphs,
    )


def model_lines(name: str, config: ModelConfig, device: torch.device, bandwidth: float) -> list[Json]:
    """Decoding at several batches behind 1,024 tokens, prefill, and a shared prefix."""
    batches = (1, 32, 128, 256)
    pages = batches[-1] * 66
    with_graphs = runner_of(config, device, pages)
    through_graphs = [median_step(with_graphs, separate_rows(batch, 1024)) for batch in batches]
    prompt = np.arange(4096, dtype=np.int32) % 1000
    prefill = median_step(with_graphs, [Row(prompt, 0, range(256))], repeats=5)
    del with_graphs
    without_graphs = runner_of(config, device, pages, cuda_graphs=False)
    by_launch = [median_step(without_graphs, separate_rows(batch, 1024)) for batch in batches]
    del without_graphs
    lines: list[Json] = []
    for batch, seconds, launched in zip(batches, through_graphs, by_launch, strict=True):
        share = limit_seconds(config, batch, 1024, bandwidth) / seconds
        line: Json = {"model": name, "work": f"decode, {batch} x 1024", "ms": seconds * 1e3}
        line |= {"tokens/s": batch / seconds, "of the limit": share, "ms launch by launch": launched * 1e3}
        lines.append(line)
    lines.append({"model": name, "work": "prefill, 1 x 4096", "ms": prefill * 1e3, "tokens/s": 4096 / prefill})
    pages = 256 + 128 * 17
    tree = median_step(runner_of(config, device, pages), branches(128, 4096, 256))
    flat = median_step(runner_of(config, device, pages, tree_attention=False), branches(128, 4096, 256))
    line = {"model": name, "work": "decode, 128 x (4096 shared + 256)", "ms": tree * 1e3}
    lines.append(line | {"ms row by row": flat * 1e3, "row by row / tree": flat / tree})
    return lines


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


def median_step(runner: Runner, rows: Sequence[Row], repeats: int = 20) -> float:
    """Wall seconds of a step and its result, the host's share included."""
    seconds = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        runner.forward(rows)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


if __name__ == "__main__":
    sys.exit(main())
