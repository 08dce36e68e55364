"""A KV pool of 8 bits: each key and value as whole numbers, or as e4m3, and the float32 that they are multiplied by.

    pool [pages, page_size, kv_heads, head_dim + 4], int8, or uint8 for the bits of e4m3
    scale = largest magnitude / 127, or / 448

Of a token's kv_heads x (head_dim + 4) bytes the numbers of all heads come first, then all scales, so that a head's
numbers begin where a GPU loads sixteen at once. A token keeps its scales wherever its page is copied, evicted or saved.
New keys are turned in bfloat16 and rounded as they are stored. Decode attention reads the numbers as they are
(paged_decode.py); for longer rows, and for what rows share, the pages at hand are widened to bfloat16 pools of their
own first. The kernels of GPUs read and write the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from niwaki.kernels.checks import SCALE_BYTES
from niwaki.kernels.jit import for_any_thread, jit
from niwaki.kernels.numeric import load, store
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.plan import PrefillRow, Segment
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.simd import LANES, splat, times
from niwaki.kernels.simd_memory import float_at, load_pair, put_float, store_pair
from niwaki.kernels.store_kv import rope_store_kv

TINY = np.float32(1e-12)  # a scale of zeros
KINDS = {"int8": torch.int8, "fp8": torch.uint8}  # of the engine's `kv_dtype`
LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}
FP8 = torch.float8_e4m3fn  # what the bytes of uint8 mean
E4M3 = torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()

Paged = TypeVar("Paged", PrefillRow, Segment)


def is_small(pool: torch.Tensor) -> bool:
    return pool.dtype in LARGEST


def knows_e4m3(device: torch.device) -> bool:
    """Whether its kernels can: of NVIDIA's, Ada, Hopper and later do."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def rope_store_small(
    qkv: Array, cos: Array, sin: Array, positions: Int64s, slots: Int64s, k_pool: Array, v_pool: Array
) -> None:
    """`store_kv.rope_store_kv` into pools of 8 bits; qkv bfloat16."""
    tokens, kv_heads, head_dim = len(qkv), k_pool.shape[2], k_pool.shape[3] - SCALE_BYTES
    new = np.empty((2, tokens, 1, kv_heads, head_dim), np.uint16)  # a page a token
    rope_store_kv(qkv, cos, sin, positions, np.arange(tokens), new[0], new[1])
    for rows, pool in zip(new, (k_pool, v_pool), strict=True):
        _narrowed(rows.reshape(-1), slots, kv_heads, head_dim, pool.reshape(-1), pool.dtype == np.int8)


def widened(
    k_pool: Array, v_pool: Array, rows: Sequence[PrefillRow], segments: Sequence[Segment], head_dim: int
) -> tuple[Operand, Operand, tuple[PrefillRow, ...], tuple[Segment, ...]]:
    """The pages of `rows` and `segments` as bfloat16 pools, and the same rows and segments in these."""
    pages = np.unique(np.concatenate([*(row.page_ids for row in rows), *(segment.page_ids for segment in segments)]))
    keys, values = (_wide_pages(pool, pages, head_dim) for pool in (k_pool, v_pool))
    return keys, values, _placed(rows, pages), _placed(segments, pages)


def _wide_pages(pool: Array, pages: Int32s, head_dim: int) -> Operand:
    page_size, kv_heads = pool.shape[1:3]
    wide = Operand.of(torch.empty((len(pages), page_size, kv_heads, head_dim), dtype=torch.bfloat16))
    assert wide.array is not None, "it is on the CPU"
    is_whole = pool.dtype == np.int8
    _widened(pool.reshape(-1), pages, kv_heads, page_size, head_dim, wide.array.reshape(-1), is_whole)
    return wide


def _placed(parts: Sequence[Paged], pages: Int32s) -> tuple[Paged, ...]:
    return tuple(replace(part, page_ids=np.searchsorted(pages, part.page_ids).astype(np.int32)) for part in parts)


def narrowed_torch(rows: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """What a pool of this kind keeps of keys or values [..., kv_heads, head_dim]: [..., kv_heads, head_dim + 4]."""
    scales = rows.float().abs().amax(-1, keepdim=True).clamp(min=float(TINY)) / LARGEST[kind]
    numbers = rows.float() / scales
    narrow = numbers.to(FP8).view(kind) if kind == torch.uint8 else numbers.round().to(kind)
    joined = torch.cat((narrow.flatten(-2), scales.flatten(-2).view(kind)), -1)
    return joined.view(*rows.shape[:-1], rows.shape[-1] + SCALE_BYTES)


def widened_torch(pool: torch.Tensor) -> torch.Tensor:
    """What a contiguous pool holds, float32 [pages, page_size, kv_heads, head_dim]."""
    kv_heads, size = pool.shape[2:]
    token, end = pool.flatten(2), kv_heads * (size - SCALE_BYTES)
    numbers = token[..., :end].view(FP8) if pool.dtype == torch.uint8 else token[..., :end]
    scales = token[..., end:].contiguous().view(torch.float32)
    return numbers.float().view(*pool.shape[:3], -1) * scales[..., None]


@jit()
def _narrow(rows: Array, slots: Int64s, kv_heads: int, head_dim: int, pool: Array, is_whole: bool) -> None:
    """Row by row of bfloat16 [tokens, kv_heads, head_dim] to its slot."""
    numbers, most = kv_heads * head_dim, np.float32(127.0 if is_whole else 448.0)
    for t in range(slots.shape[0]):
        token = int(slots[t]) * kv_heads * (head_dim + SCALE_BYTES)
        for head in range(kv_heads):
            source = (t * kv_heads + head) * head_dim
            place = token + head * head_dim
            largest, flaw = TINY, np.float32(0.0)
            for d in range(head_dim):
                number = load(rows[source + d])
                largest = max(largest, abs(number))
                flaw += number * np.float32(0.0)  # NaN, if one of them is no number: then the scale is none
            scale = largest / most
            for d in range(head_dim):
                number = load(rows[source + d]) / scale
                pool[place + d] = np.int8(np.rint(number)) if is_whole else _e4m3_of(number)
            put_float(pool, token + numbers + head * SCALE_BYTES, scale + flaw)


@jit()
def _e4m3_of(number: np.float32) -> np.uint8:
    """The bits of a number up to 448 in magnitude, rounded to nearest even."""
    bits = np.float32(number).view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    if abs(number) < np.float32(2.0**-6):  # in steps of 2**-9
        code = np.uint32(np.rint(abs(number) * np.float32(512.0)))
    else:  # exponents are smaller by 120 than those of float32
        last = (bits >> np.uint32(20)) & np.uint32(1)
        code = ((size + np.uint32(0x7FFFF) + last) >> np.uint32(20)) - np.uint32(120 << 3)
    return np.uint8((bits >> np.uint32(24)) & np.uint32(0x80) | code)


@jit()
def _widen(pool: Array, pages: Int32s, kv_heads: int, keys: int, head_dim: int, wide: Array, is_whole: bool) -> None:
    """wide [pages, keys, kv_heads, head_dim] = those pages of the pool, rounded to bfloat16."""
    size = kv_heads * (head_dim + SCALE_BYTES)
    whole = head_dim // (2 * LANES) * (2 * LANES)
    for i in range(pages.shape[0]):
        for key in range(keys):
            token = (int(pages[i]) * keys + key) * size
            for head in range(kv_heads):
                source = token + head * head_dim
                place = ((i * keys + key) * kv_heads + head) * head_dim
                scale = float_at(pool, token + kv_heads * head_dim + head * SCALE_BYTES)
                by = splat(scale)
                for d in range(0, whole, 2 * LANES):
                    low, high = load_pair(pool, source + d)
                    store_pair(wide, place + d, times(low, by), times(high, by))
                for d in range(whole, head_dim):
                    number = np.float32(pool[source + d]) if is_whole else E4M3[pool[source + d]]
                    wide[place + d] = store(number * scale, wide[0])


_narrowed, _widened = for_any_thread(_narrow), for_any_thread(_widen)
