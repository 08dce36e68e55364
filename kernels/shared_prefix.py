"""Tree attention: what several rows share is read once, their queries stacked; each row then reads the rest by itself.

The products go through torch's CPU attention, which multiplies bfloat16 on tiles where the processor has them and gives
the log of the sum of exponentials beside its output (`_scaled_dot_product_flash_attention_for_cpu`). Shared keys lie
before every query, so nothing is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.partial import Partial, stack_queries, take
from niwaki.kernels.plan import Segment, Shared
from niwaki.kernels.rule import NO_CAP, AttentionRule
from niwaki.kernels.segments import Costs, Int32s
from niwaki.kernels.tile_attention import can_tile
from niwaki.kernels.tiles import has_matrix_unit
from niwaki.kernels.vector_tiles import multiplies_pairs

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def costs_for(heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> Costs:
    """Measured on one core, 22, 23, 26, 27 and 28 November 2026; what decides is their ratios."""
    width = heads * head_dim
    bytes_of_key = kv_heads * head_dim * dtype.itemsize
    if can_tile(dtype, page_size, head_dim):
        if has_matrix_unit():  # there two rows read 512 keys by themselves about as quickly
            costs = Costs(0.065 * width, 0.0045 * width, key=0.135 * bytes_of_key, query=0.75 * width, segment=5_000.0)
            # 200 rows of 48 tokens behind 512 keys (L60): alone 121 us each, 43 ns a key of it; by what they share 92
            # and 40 for the rest, 630 ns a query of it for merging. So rows of some 35 tokens read 512 keys alone.
            return replace(costs, key_again=0.05 * bytes_of_key)
        if multiplies_pairs():  # a key's cost has half a tile of queries in it: the last tile is seldom full
            costs = Costs(0.036 * width, 0.0107 * width, key=0.083 * bytes_of_key, query=0.4 * width, segment=4_000.0)
            # 768 tokens in rows of 12, 24, 48 and 96 behind 512 keys that are near, alone: 1.004, 0.99, 0.98 and 0.98
            # of the step's time by what they share (L15; L60 1.003 with 12), behind 1,024 1.06, 1.00, 0.97 and 0.98:
            # so from a token for some 42 keys on (EPYC, Zen 4, 28 November 2026, one thread, medians of seven in turn).
            return replace(costs, key_again=0.0143 * bytes_of_key)
        return Costs(0.12 * width, 0.012 * width, key=0.14 * bytes_of_key, query=1.0 * width, segment=12_000.0)
    dense = 0.03 if dtype == torch.bfloat16 else 0.07
    return Costs(0.12 * width, dense * width, key=0.1 * bytes_of_key, query=0.5 * width, segment=50_000.0)


def can_share(shared: Shared, rule: AttentionRule) -> bool:
    """Whether under this rule every query sees all keys of its segments, with plain scores."""
    is_wide = not rule.has_window or min(rule.window, rule.chunk) >= shared.longest
    return rule.soft_cap == NO_CAP and is_wide


def shared_attention(
    q: Array, k_pool: torch.Tensor, v_pool: torch.Tensor, segments: Sequence[Segment], rule: AttentionRule
) -> Partial:
    """What the tokens of the segments get from them.

    q [tokens, heads, head_dim], elements of a head side by side; k_pool, v_pool contiguous [pages, page_size, kv_heads,
    head_dim]; of one dtype. The rule is one that `can_share` allows.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k_pool.shape[2]
    scale = rule.scale_for(head_dim)
    partial = Partial.empty(tokens, heads, head_dim)
    for segment in segments:
        pages = _in_pool(segment.page_ids)
        packed = Operand.of(k_pool.new_empty((kv_heads, len(segment.tokens) * heads // kv_heads, head_dim)))
        assert packed.array is not None, "the pool is on the CPU"
        stack_queries(q, segment.tokens, kv_heads, packed.array)
        keys, values = (_gathered(pool, pages) for pool in (k_pool, v_pool))
        part, lse = flash_attention(packed.tensor[None], keys, values, scale=scale)
        take(part, lse, segment.tokens, partial, is_first=segment.first_key == 0)
    return partial


def _in_pool(pages: Int32s) -> slice | torch.Tensor:
    """A slice needs no copy of the keys: what one request prefilled in a fresh pool lies in a row."""
    first = int(pages[0])
    if np.array_equal(pages, np.arange(first, first + len(pages), dtype=np.int32)):
        return slice(first, first + len(pages))
    return torch.from_numpy(pages.astype(np.int64))


def _gathered(pool: torch.Tensor, pages: slice | torch.Tensor) -> torch.Tensor:
    """[1, kv_heads, keys, head_dim] of the pages; a view where they lie in a row."""
    block = pool[pages] if isinstance(pages, slice) else pool.index_select(0, pages)
    return block.view(-1, *pool.shape[2:]).transpose(0, 1)[None]
