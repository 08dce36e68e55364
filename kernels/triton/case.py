"""A case of the check: a kernel on one size of inputs, beside its reference and its peers.

A case knows the bytes that it must move and the operations that it must do, each input read once; the check turns them
and the time into shares of what the device can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

PAGE = 16
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """`run` and `reference` give the same tensor, `run` in the type of the kernel."""

    name: str
    shape: str
    run: Run
    reference: Run
    tolerance: float  # of |out - reference| / |reference|
    num_bytes: float = 0.0
    operations: float = 0.0
    peers: Mapping[str, Run] = field(default_factory=dict)
    seen_as: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.double  # what is compared of either


Maker = Callable[[], Case]


@dataclass(frozen=True, slots=True)
class Size:
    """How large the cases are. `real` is an 8B Llama at a large batch."""

    rows: int
    keys: int
    prompt: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    experts: int
    per_token: int
    own_keys: int  # behind the shared ones, in the tree


TINY = Size(2, 40, 20, 4, 2, 16, 48, 40, 203, 4, 2, 5)
COMPILED = Size(4, 1024, 64, 32, 8, 128, 4096, 1024, 128_256, 8, 2, 32)  # real widths, few rows: nothing runs
REAL = Size(128, 4096, 4096, 32, 8, 128, 4096, 14_336, 128_256, 64, 8, 256)

# (query heads, kv heads, head size): Llama 8B, 1B; Qwen3 0.6B; Gemma.
HEADS = ((32, 8, 128), (32, 8, 64), (16, 8, 128), (8, 4, 256))


def tolerance_of(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


def randn(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)
