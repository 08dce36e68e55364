"""What the tests of Triton kernels share: the device (a GPU, or the interpreter on CPU tensors), seeds, tolerances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tests.no_msgspec  # noqa: F401  # before the runtime


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


triton = pytest.importorskip("triton", reason="the GPU kernels need the package triton")

is_interpreted = triton.knobs.runtime.interpret
if is_interpreted and _version(triton.__version__) < (3, 7) and _version(np.__version__) >= (2, 4):
    pytest.skip("Triton's interpreter takes NumPy 2.4 from Triton 3.7 on", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Drawn on the CPU, so that a seed means the same everywhere."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_close(got: torch.Tensor, expected: torch.Tensor, steps: float = 2.0) -> None:
    """Within `steps` roundings of its type, relative to 1 or to the value, whichever is more. The interpreter cuts
    bfloat16 off where a GPU rounds it."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    step = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(got.dtype, 2**-3)
    error = (got.float() - expected.float()).abs()
    assert not error.isnan().any()
    assert (error <= steps * step * expected.float().abs().clamp(min=1.0)).all(), float(error.max())
