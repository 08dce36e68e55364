"""How a layer attends: the scale of its scores, the cap on them, and how far back a query sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

NO_WINDOW = 2**31 - 1  # longer than any sequence
NO_CAP = math.inf  # cap x tanh(score / cap) -> score


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """A query at position p sees the keys p - window + 1 to p. Its scores are q k^T x scale, then, where there is a
    cap, soft_cap x tanh(score / soft_cap), as in Gemma 2 (arXiv 2408.00118)."""

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    window: int = NO_WINDOW  # keys, the query's own included
    soft_cap: float = NO_CAP

    def __post_init__(self) -> None:
        if self.window < 1 or not self.soft_cap > 0 or not (self.scale is None or self.scale > 0):
            raise ValueError(f"window, soft_cap and scale must be above 0, got {self}")

    def scale_for(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


PLAIN = AttentionRule()
