"""How a layer attends: the scale of its scores, the cap on them, how far back a query sees, and its heads' sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from niwaki.kernels.operand import Operand

NO_WINDOW = 2**31 - 1  # longer than any sequence
NO_CAP = math.inf  # cap x tanh(score / cap) -> score


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """A query at position p sees the keys p - window + 1 to p, of them those from the last multiple of `chunk` on. Its
    scores are q k^T x scale, then, where there is a cap, soft_cap x tanh(score / soft_cap), as in Gemma 2 (arXiv
    2408.00118). A sink is a score more that each head's softmax counts, and that brings no value, as in GPT-OSS
    (after arXiv 2309.17453)."""

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    window: int = NO_WINDOW  # keys, the query's own included
    chunk: int = NO_WINDOW  # keys: no query sees across a multiple of it, as in Llama 4
    soft_cap: float = NO_CAP
    sinks: Operand | None = field(default=None, compare=False)  # float32 [heads]

    def __post_init__(self) -> None:
        if self.window < 1 or self.chunk < 1 or not self.soft_cap > 0 or not (self.scale is None or self.scale > 0):
            raise ValueError(f"window, chunk, soft_cap and scale must be above 0, got {self}")
        if self.sinks is not None and self.soft_cap != NO_CAP:
            raise ValueError("sinks and a soft cap do not go together: no model has both")

    @property
    def has_window(self) -> bool:
        """Whether some query may not see some earlier key."""
        return self.window != NO_WINDOW or self.chunk != NO_WINDOW

    def first_seen(self, position: int) -> int:
        """The first key that the query at `position` sees."""
        return max(position + 1 - self.window, position // self.chunk * self.chunk, 0)

    def scale_for(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


PLAIN = AttentionRule()
