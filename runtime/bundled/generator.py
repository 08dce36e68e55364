"""The seeded source of all training and test data: samples, and the filler that may stand between their parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from niwaki.runtime.bundled.sample import Message, Sample, Span, chat
from niwaki.runtime.bundled.tasks_agent import react, tools
from niwaki.runtime.bundled.tasks_extract import extraction
from niwaki.runtime.bundled.tasks_passage import dense_passage
from niwaki.runtime.bundled.tasks_plain import continuation, drill, misc
from niwaki.runtime.bundled.tasks_text import SMALL_TALK, classification, recall
from niwaki.runtime.bundled.words import Words, filler

TASKS: dict[str, Callable[[Words], Sample]] = {
    "extraction": extraction,
    "passage": dense_passage,
    "classification": classification,
    "tools": tools,
    "recall": recall,
    "react": react,
    "continuation": continuation,
    "misc": misc,
    "drill": drill,
}
MIX = {
    "extraction": 0.26,
    "passage": 0.26,
    "classification": 0.08,
    "tools": 0.12,
    "recall": 0.04,
    "react": 0.10,
    "continuation": 0.04,
    "misc": 0.02,
    "drill": 0.08,
}


def stream(seed: int, mix: Mapping[str, float] | None = None, held: bool = False) -> Iterator[Sample]:
    """Samples for ever; the same seed gives the same samples. `held`: names and sums of the test side."""
    words = Words(random.Random(seed), held)
    shares = dict(mix or MIX)
    while True:
        task = words.rng.choices(list(shares), list(shares.values()))[0]
        words.renew()
        yield TASKS[task](words)


def filler_turns(words: Words, sentences: int) -> str:
    """The same amount of filler as chat turns that tell nothing."""
    messages: list[Message] = []
    while sentences > 0:
        if words.chance(0.3):
            asked, reply = words.pick(SMALL_TALK)
            sentences -= 1
        else:
            count = min(sentences, words.rng.randint(2, 8))
            asked, reply = filler(words, count), "Noted."
            sentences -= count
        messages += [Message("user", asked), Message("assistant", reply)]
    return chat("", messages).text.removeprefix("<|bos|>")


def stretch(sample: Sample, words: Words, sentences: int) -> Sample:
    """The sample with `sentences` of filler at its first gap; unchanged where it has none."""
    places = [index for index, span in enumerate(sample.spans) if span.gap]
    if not places:
        return sample
    place = places[0]
    in_text = sample.spans[place].gap == "text"
    text = " " + filler(words, sentences) if in_text else filler_turns(words, sentences)
    spans = list(sample.spans)
    spans[place : place + 1] = [Span(text), replace(spans[place], gap="")]
    return Sample(sample.task, tuple(spans))
