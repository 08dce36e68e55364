"""Operations whose every row depends on that row alone: not on its neighbours, their number, or the number of threads.

What stands in the way is the choice of kernels by shape. The product on the CPU's matrix unit (packed.py) orders the
sums of every row alike. A general one orders them by the number of rows; so rows go through it in tiles of TILE, on one
thread, the last tile filled up. Measured (torch 2.13, AVX-512 and AMX, float32 and bfloat16, four weights): in a tile
of one shape a row comes out bit for bit the same at every place and beside any neighbours, while a second thread
changes float32 sums over 960 inputs. Attention takes each query by itself, in blocks of keys at fixed positions; so
long rows take the path of short ones, and nothing is read once for several.
"""

from __future__ import annotations

import numpy as np
import torch

from niwaki.kernels.linear import linear_torch
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import NumbaOps, array_of
from niwaki.kernels.paged_decode import paged_decode_attention
from niwaki.kernels.plan import AttentionPlan, DecodeQueries
from niwaki.kernels.rule import PLAIN, AttentionRule

# Rows of a product. Small ones waste less on a batch of few rows, large ones read the weights less often for a prompt:
# 512 rows x [1536, 384] in bfloat16 take 0.69 ms at once, and 3.4, 2.0 and 1.2 ms in tiles of 16, 32 and 64.
TILE = 32


class FixedOps(NumbaOps):
    """The CPU kernels, bit for bit the same for a row whatever else is in the batch."""

    def linear(self, x: Operand, weight: Operand, bias: Operand | None, out: Operand) -> None:
        rows, added = x.tensor, None if bias is None else bias.tensor
        # Copied, so that a tile also lies in memory as every other one does.
        tile = rows.new_zeros((TILE, rows.shape[1]))
        product = rows.new_empty((TILE, out.tensor.shape[1]))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for first in range(0, len(rows), TILE):
                part = rows[first : first + TILE]
                tile[: len(part)] = part
                linear_torch(tile, weight.tensor, added, product)
                out.tensor[first : first + TILE] = product[: len(part)]
        finally:
            torch.set_num_threads(threads)

    def attend(
        self,
        q: Operand,
        k_pool: Operand,
        v_pool: Operand,
        plan: AttentionPlan,
        out: Operand,
        rule: AttentionRule = PLAIN,
    ) -> None:
        arrays = array_of(q), array_of(k_pool), array_of(v_pool)
        if len(plan.decode.token):
            paged_decode_attention(*arrays, plan.page_table, plan.decode, array_of(out), rule)
        for row in plan.prefill:
            every = np.arange(row.count, dtype=np.int32)
            none = np.zeros(row.count, np.int32)
            queries = DecodeQueries(row.first + every, none, row.start + 1 + every, none)
            paged_decode_attention(*arrays, row.page_ids[None], queries, array_of(out), rule)
