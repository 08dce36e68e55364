"""How `select` picks: each method is a pure function from the scores of the choices to a decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from niwaki.runtime.api import GenerationError, Score


@dataclass(frozen=True, slots=True)
class Decision:
    """The index of the chosen score, and what the method wants `get_meta_info` to tell beside it."""

    index: int
    meta: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ChoicesMethod:
    """A named way to decide. `decide` gets one score per choice, in the order of the choices."""

    name: str
    decide: Callable[[Sequence[Score]], Decision]


def mean_logprob(score: Score) -> float:
    """The mean log-probability of the choice's tokens, in nats per token.

    A token with nothing before it has no log-probability (the first token of an empty prompt) and is left out.

    Raises:
        GenerationError: no token of the choice has a log-probability, so that nothing can be compared.
    """
    known = [token.logprob for token in score.logprobs if token.logprob is not None]
    if not known:
        raise GenerationError(
            f"choice {score.text!r} has no log-probability: nothing stands before it; add text before the select"
        )
    return sum(known) / len(known)


def _decide_by_mean(scores: Sequence[Score]) -> Decision:
    means = [mean_logprob(score) for score in scores]
    best = max(range(len(means)), key=means.__getitem__)  # the first of equals
    return Decision(best, {"normalized_prompt_logprobs": means})


token_length_normalized = ChoicesMethod("token_length_normalized", _decide_by_mean)
"""argmax over the choices c of (1 / |c|) * sum over its tokens t of log p(t | prompt, the tokens of c before t)."""
