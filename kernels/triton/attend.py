"""The attention of one layer on a GPU: which kernels a plan calls for, over which memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from niwaki.kernels.rule import AttentionRule
from niwaki.kernels.triton.paged_attention import paged_attention
from niwaki.kernels.triton.plan import PARTED_SPLIT, SPLIT, DevicePlan
from niwaki.kernels.triton.tree_attention import tree_attention


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """All of a layer's attention but the batch. Operands as in `paged_attention`."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    out: torch.Tensor
    rule: AttentionRule

    def launch(self, plan: DevicePlan) -> None:
        """out[t] for the tokens of the plan's rows; others stay as they are. A plan of as many tokens as `q` has."""
        operands = self.q, self.k_pool, self.v_pool, plan.page_table
        if plan.tree is not None:
            tree_attention(*operands, plan.positions, plan.tree, self.out, self.rule)
        for rows in plan.split:
            paged_attention(*operands, plan.length, rows, self.out, self.rule, split=SPLIT)
        for rows in plan.parted:
            paged_attention(*operands, plan.length, rows, self.out, self.rule, split=PARTED_SPLIT)
        for rows in plan.whole:
            paged_attention(*operands, plan.length, rows, self.out, self.rule)
