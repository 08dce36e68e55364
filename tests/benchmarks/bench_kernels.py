"""Prints what the CPU kernels gain over plain torch, and what a step of a small model costs, weights aside and in all.

Run it as `python -m tests.benchmarks.bench_kernels [--only decode] [--json PATH]`. Ratios are of pairs run in turn; A
is ours. One thread, timed by its own CPU seconds, so that a machine that does something else gives the same ratios.
FlexAttention is compiled first, which takes a C++ compiler and half a minute.
"""

from __future__ import annotations

import argparse
import mmap
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention.flex_attention import flex_attention

from niwaki.kernels.jit import set_num_threads
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import NumbaOps, TorchOps
from niwaki.kernels.plan import AttentionPlan, DecodeQueries, FlatRows, Span, make_plan
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.models.config import ModelConfig
from niwaki.runtime.models.projection import Projection
from tests.benchmarks.harness import Comparison, compare, table, write_json
from tests.benchmarks.shapes import RANDOM, SHAPES

CPU = torch.device("cpu")
SMALL = ModelConfig(
    vocab_size=2048,
    num_layers=8,
    hidden_size=320,
    intermediate_size=960,
    num_heads=10,
    num_kv_heads=5,
    head_dim=32,
    context_length=2048,
    tie_embeddings=True,
)
# The same number of launches on almost no weights: what remains is the host's own time.
HOLLOW = replace(SMALL, vocab_size=64, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the ratios here")
    parser.add_argument("--only", choices=[*PARTS, "steps"], action="append")
    arguments = parser.parse_args()
    names = arguments.only or [*PARTS, "steps"]
    torch.set_num_threads(1)
    set_num_threads(1)
    comparisons: list[Comparison] = []
    with torch.inference_mode():
        for name in names:
            comparisons += PARTS[name]() if name in PARTS else ()
    if comparisons:
        print(table(comparisons))
    if "steps" in names:
        print_steps()
    if arguments.json:
        write_json(arguments.json, comparisons, {"cpu": platform.processor(), "threads": torch.get_num_threads()})


def print_steps() -> None:
    for name, config, dtype in (
        ("launches alone", HOLLOW, "float32"),
        ("10M weights", SMALL, "float32"),
        ("10M weights", SMALL, "bfloat16"),
    ):
        for batch in (1, 8, 32):
            print(f"decode step, {name}, {dtype}, batch {batch}: {step(config, dtype, batch):.0f} us (median)")


def times(count: int, action: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            action()

    return run


def products(rows: int, dtype: torch.dtype) -> Comparison:
    """x W^T with weights that are not in the caches of a core, as between the layers of a model."""
    weights = [Operand.of(torch.randn(1920, 320).to(dtype)) for _ in range(16)]
    x, out = Operand.of(torch.randn(rows, 320).to(dtype)), Operand.of(torch.empty(rows, 1920, dtype=dtype))

    def all_weights(ops: NumbaOps | TorchOps) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                ops.linear(x, weight, None, out)

        return times(4, run)

    return compare(
        "linear",
        f"{rows} rows, {dtype}",
        ("few-rows kernel", all_weights(NumbaOps())),
        ("torch.mm", all_weights(TorchOps())),
        aim=">= 1",
        clock=time.process_time,
    )


def decode(
    config: ModelConfig, dtype: torch.dtype, *, layers: int = 1, alternatives: bool = False
) -> Iterator[Comparison]:
    """32 queries over 500 keys each. `copying` is the memory's: the keys and values once read and once written. The
    alternatives are torch's, which gather the pages first or, for the record, find the keys side by side already. One
    layer's keys and values may stay in the third cache, where copying is quick; those of several in turn, as in a
    step, come from memory."""
    rows, keys, page_size = 32, 500, 16
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    each = -(-keys // page_size)
    pools = [as_pool(torch.randn(2, rows * each, page_size, kv_heads, head_dim).to(dtype)) for _ in range(layers)]
    pool = pools[0]
    pages = np.random.default_rng(0).permutation(rows * each).reshape(rows, each)
    plan = plan_of([Span(keys - 1, 1, row.tolist()) for row in pages], page_size, rows * each)
    q = torch.randn(rows, heads, head_dim).to(dtype)
    asked, of_layers = Operand.of(q), [[Operand.of(tensor) for tensor in both] for both in pools]
    out = Operand.of(torch.empty_like(q))
    index = torch.from_numpy(pages)
    ops = NumbaOps()

    def gathered() -> list[torch.Tensor]:
        return [tensor[index].view(rows, -1, kv_heads, head_dim)[:, :keys].transpose(1, 2) for tensor in pool]

    def sdpa(k: torch.Tensor, v: torch.Tensor) -> None:
        torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    k, v = (tensor.contiguous() for tensor in gathered())
    filled = [both[:, : rows * keys // page_size] for both in pools]  # as many as are read
    copies = [as_pool(both) for both in filled]

    def ours() -> None:
        for keys_of_layer, values in of_layers:
            ops.attend(asked, keys_of_layer, values, plan, out)

    def copying() -> None:
        for copy, both in zip(copies, filled, strict=True):
            copy.copy_(both)

    # Copied bytes are moved twice: 1.4 is 70 % of the bandwidth.
    others: dict[str, tuple[Callable[[], object], str]] = {"copying": (copying, ">= 1.4")}
    if alternatives:
        others["gather + SDPA"] = lambda: sdpa(*gathered()), ">= 2"
        others["SDPA, gathered before"] = lambda: sdpa(k, v), ""
    if alternatives and shutil.which("g++"):
        flex = torch.compile(flex_attention)
        others["FlexAttention, gathered before"] = (lambda: flex(q[:, :, None], k, v, enable_gqa=True), "")
    for name, (run, aim) in others.items():
        yield compare(
            "decode",
            f"{rows} x {keys} keys, {heads} x {kv_heads} x {head_dim}, {dtype}, layers {layers}",
            ("paged kernel", times(8, ours)),
            (name, times(8, run)),
            aim=aim,
            clock=time.process_time,
        )


def as_pool(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, in pages of 2 MB where Linux gives them, as in the engine's pool. What NumPy or
    torch give may have been used before, in small pages, and stays in these."""
    size = tensor.numel() * tensor.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def prefill(name: str, config: ModelConfig, rows: int) -> Comparison:
    """The products of one layer for a prompt, beside one large square product of as many operations."""
    heads, width = config.num_heads * config.head_dim, config.intermediate_size
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    hidden = config.hidden_size
    shapes = ((hidden, qkv), (heads, hidden), (hidden, 2 * width), (width, hidden))
    ops = NumbaOps()
    layer = []
    for inputs, outputs in shapes:
        x, weight = (torch.randn(*shape).to(torch.bfloat16) for shape in ((rows, inputs), (outputs, inputs)))
        linear = ops.packed(weight, None) or Projection(ops, Operand.of(weight), None)  # as models keep them
        layer.append((linear, Operand.of(x), Operand.of(torch.empty(rows, outputs, dtype=torch.bfloat16))))
    side = 2048
    square, product = torch.randn(side, side).to(torch.bfloat16), torch.empty(side, side, dtype=torch.bfloat16)
    size = rows * sum(inputs * outputs for inputs, outputs in shapes)
    count = max(1, round(side**3 / size))
    per_square = count * size / side**3

    def all_products() -> None:
        for linear, x, out in layer:
            linear.forward(x, out)

    compared = compare(
        "prefill",
        f"{name}, {rows} rows",
        ("a layer's products", times(4 * count, all_products)),
        ("square product", times(4, lambda: torch.mm(square, square.t(), out=product))),
        aim=">= 0.6",
        clock=time.process_time,
    )
    ratios = (compared.ratio, compared.low, compared.high)
    ratio, low, high = (value * per_square for value in ratios)  # the squares do not divide evenly
    return replace(compared, seconds_b=compared.seconds_b * per_square, ratio=ratio, low=low, high=high)


def short_rows() -> Comparison:
    """Rows of 8 new tokens behind 300 cached ones, as forced tokens make them: the decode path against the dense."""
    rows, start, count, page_size = 16, 300, 8, 16
    each = -(-(start + count) // page_size)
    spans = [Span(start, count, range(row * each, (row + 1) * each)) for row in range(rows)]
    plan = plan_of(spans, page_size, rows * each)
    dense = dense_plan(plan, spans)
    keys, values = (Operand.of(torch.randn(rows * each, page_size, 5, 32)) for _ in range(2))
    q = Operand.of(torch.randn(rows * count, 10, 32))
    out = Operand.of(torch.empty_like(q.tensor))
    ops = NumbaOps()
    return compare(
        "short rows",
        f"{rows} x {count} tokens behind {start}",
        ("as decode queries", lambda: ops.attend(q, keys, values, plan, out)),
        ("as prefill rows", lambda: ops.attend(q, keys, values, dense, out)),
        aim=">= 1",
        clock=time.process_time,
    )


def plan_of(spans: list[Span], page_size: int, num_pages: int) -> AttentionPlan:
    return make_plan(spans, page_size=page_size, num_pages=num_pages)


def dense_plan(plan: AttentionPlan, spans: list[Span]) -> AttentionPlan:
    """The same plan with every row on the prefill path."""
    none = np.empty(0, np.int32)
    numbers = [(index * span.count, span.count, span.start, index, 0) for index, span in enumerate(spans)]
    rows = FlatRows(np.array(numbers, np.int64), plan.page_table)
    return replace(plan, decode=DecodeQueries(none, none, none, none), long=rows)


def step(config: ModelConfig, dtype: str, batch: int) -> float:
    """Microseconds of one forward pass in which each of `batch` requests decodes one token behind 200."""
    pages = 200 // 16 + 1
    runner = Runner.random(config, num_pages=batch * pages, dtype=dtype)
    token = np.array([5], np.int32)
    rows = [Row(token, 200, list(range(i * pages, (i + 1) * pages))) for i in range(batch)]
    seconds = []
    for _ in range(60):
        start = time.perf_counter()
        runner.forward(rows)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[10:]) * 1e6


DTYPES = (torch.float32, torch.bfloat16)
PARTS: Mapping[str, Callable[[], list[Comparison]]] = {
    "products": lambda: [products(rows, dtype) for dtype in DTYPES for rows in (1, 4, 8, 32)],
    "decode": lambda: [
        *(one for dtype in DTYPES for one in decode(SMALL, dtype, alternatives=True)),
        *(one for config in {**SHAPES, **RANDOM}.values() for one in decode(config, torch.bfloat16)),
        *(one for config in SHAPES.values() for one in decode(config, torch.bfloat16, layers=6)),
    ],
    "prefill": lambda: [
        prefill(name, config, rows) for name, config in RANDOM.items() for rows in (64, 128, 512, 2048)
    ],
    "short-rows": lambda: [short_rows()],
}


if __name__ == "__main__":
    main()
