"""Random stories for `mixed`: what is said, generated, scored and forked on a branch, alike enough to share pages."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from niwaki.runtime.api import (
    AllOf,
    Choices,
    Constraint,
    Grammar,
    JsonSchema,
    Reasoned,
    Regex,
    SamplingParams,
    StopRegex,
    Tool,
    ToolCalls,
)
from niwaki.runtime.api.calls import HERMES
from tests.toy import VOCAB_SIZE

TEXTS = (
    "the cat sat on the mat and the dog sat on the log. ",
    "the cat sat on the mat and the dog",
    "a b c 1 2 3 yes no maybe",
    "naïve café, 東京 and Zürich",
    " yes",
    "1",
    "the cat sat on the mat and the cat sat on the mat and the cat",
)
CHOICES = (" yes", " no", "cat", "at", " maybe the dog", "ürich")
TOOLS = (Tool("look", '{"type":"object","properties":{"at":{"type":"integer","maximum":99}},"required":["at"]}'),)
CONSTRAINTS: tuple[Constraint, ...] = (
    Regex(r"(yes|no|maybe)( (yes|no|maybe)){0,6}"),
    Regex(r"(ab|ba|aab| ){4,40}"),
    Regex(r"[a-c]{3}-\d{2,4}"),
    Regex(r"the cat sat on the (mat|log)( and the dog sat on the (mat|log))?"),
    Choices(("the cat", "the cat sat", "the dog", "no", "Zürich")),
    JsonSchema('{"type":"object","properties":{"name":{"enum":["cat","dog"]},"age":{"type":"integer","maximum":99},'
               '"tags":{"type":"array","items":{"type":"boolean"},"maxItems":3}},"required":["name","age"],'
               '"additionalProperties":false}'),
    JsonSchema('{"type":"array","items":{"type":"string","maxLength":5},"maxItems":3}', "free"),
    Grammar('start: item ("," item)*\nitem: /[a-z]{1,4}/ | "(" start ")"'),
    StopRegex(r"[aeiou]{2}|\d"),
    AllOf((Regex(r"[a-z ]{4,20}"), StopRegex(r"t"))),
    ToolCalls(TOOLS, HERMES),
    ToolCalls(TOOLS, HERMES, is_required=True, is_parallel=False),
    Reasoned("<think>", "</think>", 6, Choices(("yes", "no"))),
)  # fmt: skip


@dataclass(frozen=True)
class Say:
    text: str
    is_control: bool = False


@dataclass(frozen=True)
class Gen:
    text: str
    params: SamplingParams


@dataclass(frozen=True)
class Pick:
    text: str
    choices: tuple[str, ...]
    heal: bool
    unconditional: bool


@dataclass(frozen=True)
class Fork:
    """The rest is said on a twin; the first one stays where it is until the story ends."""


@dataclass(frozen=True)
class Back:
    """Back to where the last fork was made, if there was one, and on from there: a conversation that is rewound."""


@dataclass(frozen=True)
class Ids:
    """A story of its own: tokens, and what follows."""

    ids: tuple[int, ...]
    params: SamplingParams


Move = Say | Gen | Pick | Fork | Back | Ids
Story = tuple[Move, ...]


class Author:
    """Draws stories that look like each other."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.heads = [tuple(draw.randrange(5, VOCAB_SIZE) for _ in range(40)) for _ in range(2)]

    def story(self) -> Story:
        draw = self.draw
        if draw.random() < 0.4:
            ids = draw.choice(self.heads)[: draw.choice((1, 3, 4, 5, 15, 16, 17, 33, 40))]
            ids += tuple(draw.randrange(5, VOCAB_SIZE) for _ in range(draw.choice((0, 0, 1, 7))))
            return (Ids(ids, self.params(is_text=False)),)
        moves: list[Move] = [Say("<|user|>", is_control=True)] if draw.random() < 0.3 else []
        for _ in range(draw.randint(1, 3)):
            kind, text = draw.random(), draw.choice(TEXTS)
            if kind < 0.15:
                moves.append(Say(text))
            elif kind < 0.25:
                moves.append(Fork())
            elif kind < 0.3:
                moves += [Fork(), Gen(text, self.params(is_text=True)), Back(), Say(draw.choice(TEXTS))]
            elif kind < 0.45:
                choices = tuple(
                    draw.sample((" yes", " no", "cat", "at", " maybe the dog", "ürich"), draw.randint(1, 4))
                )
                moves.append(Pick(text, choices, draw.random() < 0.5, draw.random() < 0.3))
            else:
                moves.append(Gen(text, self.params(is_text=True)))
        return tuple(moves)

    def params(self, *, is_text: bool) -> SamplingParams:
        draw = self.draw
        params = SamplingParams(
            max_new_tokens=draw.choice((1, 2, 8, 17, 40, 70)),
            n=draw.choice((1, 1, 1, 1, 2, 3)),
            temperature=draw.choice((0.0, 0.0, 1.0)),
            seed=draw.randrange(3),
            priority=draw.choice((0, 0, 0, -1, 3)),
            ignore_eos=draw.random() < 0.5,
        )
        if draw.random() < 0.3:
            params = replace(params, return_logprob=True, top_logprobs_num=draw.choice((0, 2)))
            if draw.random() < 0.3:
                params = replace(params, logprob_start_len=draw.choice((0, 1)))
        if is_text and draw.random() < 0.5:
            params = replace(params, heal=True)
        if draw.random() < 0.3:
            constraint = draw.choice(CONSTRAINTS)
            return replace(params, constraint=constraint, max_new_tokens=draw.choice((12, 30)), ignore_eos=False)
        if draw.random() < 0.2:
            params = replace(params, stop=draw.choice((("t",), ("the", " a"), ("zz",))))
        if draw.random() < 0.1:
            params = replace(params, stop_regex=r"o.e|\d")
        if draw.random() < 0.15:
            params = replace(params, stop_token_ids=tuple(range(5, 15)))
        if draw.random() < 0.15:
            params = replace(params, top_k=20, top_p=0.9, min_p=0.01)
        if draw.random() < 0.15:
            params = replace(params, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1)
        if draw.random() < 0.1:
            params = replace(params, logit_bias=((7, 3.0), (9, -100.0)), min_tokens=min(3, params.max_new_tokens))
        return params
