"""What the tests of kernels share: seeded inputs, plans on shuffled pages, and how near a kernel is to its twin."""

from __future__ import annotations

import numpy as np
import torch

from niwaki.kernels.plan import AttentionPlan, Span, make_plan

DTYPES = [torch.float32, torch.bfloat16]


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within float32's rounding of a sum, or one step of bfloat16."""
    tolerance = 1e-5 if got.dtype == torch.float32 else 2**-7
    return torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance / 10)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plan_of(spans: list[tuple[int, int]], page_size: int, num_pages: int, seed: int = 0) -> AttentionPlan:
    """A plan of (start, count) rows on shuffled pages."""
    free = [int(page) for page in np.random.default_rng(seed).permutation(num_pages)]
    rows = []
    for start, count in spans:
        needed = -(-(start + count) // page_size)
        rows.append(Span(start, count, [free.pop() for _ in range(needed)]))
    return make_plan(rows, page_size=page_size, num_pages=num_pages)
