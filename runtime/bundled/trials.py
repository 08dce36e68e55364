"""Trials: prompts of the test side with the one right answer each, near or with the text 1,500 tokens back."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from niwaki.runtime.bundled.generator import TASKS, stretch
from niwaki.runtime.bundled.sample import Sample
from niwaki.runtime.bundled.tasks_extract import extraction, plain_extraction
from niwaki.runtime.bundled.tasks_passage import passage, plain_passage
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
# Harder than what is promised, and told all the same: mails, notes, signatures and lists; up to twelve facts.
BEYOND = ("extraction, messy", "passage, long")
FAR_TASKS = ("extraction", "passage", "recall")
FAR_SENTENCES = 88

SOURCES: Mapping[str, Callable[[Words], Sample]] = {
    **TASKS,
    "extraction": plain_extraction,
    "passage": plain_passage,
    "extraction, messy": extraction,
    "passage, long": passage,
}
LAST = ("classification", "recall", "continuation")  # what comes before is shots and small talk

Check = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Trial:
    """All of `checks` (prompt with its special tokens, expected continuation) must hold."""

    task: str
    checks: tuple[Check, ...]
    far: bool = False


def trials(task: str, count: int, seed: int, far: float = 0.0) -> list[Trial]:
    """Seeded trials on names, values and sums that training never sees; the share `far` has its text far back.

    A trial is one question: for tools the call and the answer after it, for ReAct all steps of a trace.
    """
    words = Words(random.Random(f"trial {task} {seed}"), held=True)
    made: list[Trial] = []
    while len(made) < count:
        sample = SOURCES[task](words)
        away = words.chance(far)
        if away:
            longer = stretch(sample, words, FAR_SENTENCES)
            if longer is sample:
                continue
            sample = longer
        asked = questions(sample)
        # Where the text is far, the first question is asked: later turns of an extraction bring nearer texts.
        chosen = asked[-1] if task in LAST else asked[0] if away else words.pick(asked)
        made.append(Trial(task, tuple(chosen), away))
    return made


def questions(sample: Sample) -> list[list[Check]]:
    """The answers of a sample with the text before them, grouped by what was asked."""
    text = ""
    groups: list[list[Check]] = []
    is_stepwise = sample.task in ("tools", "react")
    for span in sample.spans:
        if not is_stepwise or span.text.startswith(("<|user|>", "Question:")):
            groups.append([])
        if span.answer:
            groups[-1].append((text, span.text))
        text += span.text
    return [group for group in groups if group]
