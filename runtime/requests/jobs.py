"""What somebody waits for: a job of one or more requests, and how their answers become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from niwaki.runtime.api import Generation, Output, Pending, Score
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.scoring import SharedBeginnings


@dataclass(slots=True)
class GenerateJob:
    """n generations from one prompt. `moved` is told the tokens that stay on the branch, before the result is set:
    where one of them fails, or all are cancelled, it stands where it stood."""

    generation: Generation
    num_outputs: int
    moved: Callable[[TokenIds], None] = lambda kept: None
    outputs: dict[int, Output] = field(default_factory=dict)
    kept: TokenIds | None = None  # what stays: the prompt and the first text, once that has ended
    program: int | None = None  # whose places it takes (`loop.fairness`)


@dataclass(slots=True)
class ScoreJob:
    """Continuations, each scored in a request of its own, from token `starts[index]` on: what it shares with another
    is that one's."""

    pending: Pending[tuple[Score, ...]]
    starts: Sequence[int]
    shared: SharedBeginnings
    scores: dict[int, Score] = field(default_factory=dict)
    program: int | None = None

    def add(self, index: int, score: Score) -> None:
        self.scores[index] = score
        if len(self.scores) == len(self.starts):
            self.pending.succeed(self.shared.whole([self.scores[i] for i in range(len(self.starts))]))


Job = GenerateJob | ScoreJob
