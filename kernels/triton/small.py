"""A pool of keys or values as kernels address it: in the type of the queries, or of 8 bits (kernels/small_kv.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from niwaki.kernels.checks import SCALE_BYTES
from niwaki.kernels.small_kv import FP8, LARGEST, is_small
from niwaki.kernels.triton.launch import check


def check_pool(
    kernel: str, name: str, pool: torch.Tensor, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """`pool` [pages, page_size, kv_heads, head_dim] is contiguous and of `dtype`, or of 8 bits with their scales."""
    size = head_dim + SCALE_BYTES if is_small(pool) else head_dim
    check(kernel, name, pool, (None, None, None, size), (dtype, *LARGEST), device, contiguous=True)
    if is_small(pool) and head_dim % 4:
        raise ValueError(f"{kernel}: a pool of 8 bits wants heads of a multiple of 4, got {head_dim}")


def numbers_of(pool: torch.Tensor) -> torch.Tensor:
    """The same memory, bytes of e4m3 as such."""
    return pool.view(FP8) if pool.dtype == torch.uint8 else pool


def scales_of(pool: torch.Tensor) -> torch.Tensor:
    """The same memory as float32, for the scales in it; where there are none, something to pass instead."""
    return pool.view(torch.float32) if is_small(pool) else pool


@triton.jit
def scale_at(kv_heads, kv_head, HEAD_DIM: tl.constexpr):
    """Where the scale of a head stands among the float32 of a token: behind the numbers of all heads."""
    return kv_heads * (HEAD_DIM // 4) + kv_head
