"""Trials: prompts of the test side with the one right answer each, near or with the text 1,500 tokens back."""

from __future__ import annotations

import random
from dataclasses import dataclass

from niwaki.runtime.bundled.generator import TASKS, stretch
from niwaki.runtime.bundled.sample import Sample
from niwaki.runtime.bundled.words import Words

# Tasks with the least score that the model is held to.
TRIALS = {
    "extraction": 0.95,
    "passage": 0.95,
    "classification": 0.97,
    "tools": 0.95,
    "recall": 0.95,
    "react": 0.90,
    "continuation": 0.85,
}
FAR_TASKS = ("extraction", "passage", "recall")
FAR_SENTENCES = 88
STEPWISE = ("tools", "react")  # every answer of a sample counts, not only the last


@dataclass(frozen=True, slots=True)
class Trial:
    """All of `checks` (prompt with its special tokens, expected continuation) must hold."""

    task: str
    checks: tuple[tuple[str, str], ...]
    far: bool = False


def trials(task: str, count: int, seed: int, far: float = 0.0) -> list[Trial]:
    """Seeded trials on names, values and sums that training never sees; the share `far` has its text far back."""
    words = Words(random.Random(f"trial {task} {seed}"), held=True)
    made: list[Trial] = []
    while len(made) < count:
        sample = TASKS[task](words)
        away = words.chance(far)
        if away:
            longer = stretch(sample, words, FAR_SENTENCES)
            if longer is sample:
                continue
            sample = longer
        made.append(Trial(task, _checks(sample), away))
    return made


def _checks(sample: Sample) -> tuple[tuple[str, str], ...]:
    text, checks = "", []
    for span in sample.spans:
        if span.answer:
            checks.append((text, span.text))
        text += span.text
    return tuple(checks if sample.task in STEPWISE else checks[-1:])
