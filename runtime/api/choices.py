"""How `select` picks: each method is a pure function from the scores of the choices to a decision.

Plain data and the standard library. A server that runs whole programs decides by the same functions.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from niwaki.runtime.api import GenerationError, ProgramError, SamplingParams, Score


@dataclass(frozen=True, slots=True)
class Decision:
    """The index of the chosen score, and what the method wants `get_meta_info` to tell beside it. `drawn`: all that
    were drawn, where choices were; the first of them is `index`."""

    index: int
    meta: Mapping[str, object]
    drawn: tuple[int, ...] = ()


@runtime_checkable
class ChoicesMethod(Protocol):
    """What `select(choices_method=...)` takes: any object with these two members.

    `decide` gets one score per choice, in the order of the choices, each with the log-probabilities of its tokens
    given the text before. Where `needs_unconditional` is True it also gets the scores of the same choices with no
    text before them, which costs one more score call; elsewhere that argument is empty.
    """

    @property
    def needs_unconditional(self) -> bool: ...

    def decide(self, scores: Sequence[Score], unconditional: Sequence[Score] = (), /) -> Decision: ...


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


# ---------------------------------------------------------------------------------------------------------------
# The four methods
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TokenLengthNormalized:
    needs_unconditional: bool = False

    def decide(self, scores: Sequence[Score], unconditional: Sequence[Score] = (), /) -> Decision:
        means = [mean_logprob(score) for score in scores]
        return Decision(_first_best(means), {"normalized_prompt_logprobs": means})


@dataclass(frozen=True, slots=True)
class _GreedyTokenSelection:
    needs_unconditional: bool = False

    def decide(self, scores: Sequence[Score], unconditional: Sequence[Score] = (), /) -> Decision:
        means = [mean_logprob(score) for score in scores]
        # Choices that begin with the same tokens stand side by side until they part. Their scores come from different
        # rows of a batch, where the last bits may differ, so the comparison takes the one value of the shared token.
        trie = _Trie.of(scores)
        rows = [[0.0 if value is None else value for value in trie.logprobs_of(score)] for score in scores]
        width = max(len(row) for row in rows)
        matrix = [row + [mean] * (width - len(row)) for row, mean in zip(rows, means, strict=True)]
        left = list(range(len(matrix)))
        for column in range(width):
            best = max(matrix[i][column] for i in left)
            left = [i for i in left if matrix[i][column] == best]
            if len(left) == 1:
                break
        return Decision(left[0], {"normalized_prompt_logprobs": means, "greedy_logprob_matrix": matrix})


@dataclass(frozen=True, slots=True)
class _UnconditionalLikelihoodNormalized:
    needs_unconditional: bool = True

    def decide(self, scores: Sequence[Score], unconditional: Sequence[Score] = (), /) -> Decision:
        gains = []
        for score, alone in zip(scores, unconditional, strict=True):
            # A model without a begin-of-text token says nothing of a first token: it counts as certain, as published.
            offsets = [token.logprob or 0.0 for token in alone.logprobs]
            pairs = zip(score.logprobs, offsets, strict=True)
            known = [token.logprob - offset for token, offset in pairs if token.logprob is not None]
            if not known:
                mean_logprob(score)  # says what is missing
            gains.append(sum(known) / len(known))
        return Decision(
            _first_best(gains),
            {
                "normalized_unconditional_prompt_logprobs": gains,
                "unconditional_token_logprobs": [
                    [(token.logprob, token.token_id, token.text) for token in alone.logprobs] for alone in unconditional
                ],
            },
        )


@dataclass(frozen=True, slots=True)
class _Exact:
    needs_unconditional: bool = False

    def decide(self, scores: Sequence[Score], unconditional: Sequence[Score] = (), /) -> Decision:
        logprobs = choice_logprobs(scores)
        return Decision(_first_best(logprobs), {"choice_logprobs": logprobs})


token_length_normalized: ChoicesMethod = _TokenLengthNormalized()
"""argmax over the choices c of (1 / |c|) * sum over its tokens t of log p(t | prompt, the tokens of c before t)."""

greedy_token_selection: ChoicesMethod = _GreedyTokenSelection()
"""Compare the choices token by token and keep those whose token is likeliest, until one is left.

A choice that has no more tokens is compared by the mean of those it had. The first of equals wins.
"""

unconditional_likelihood_normalized: ChoicesMethod = _UnconditionalLikelihoodNormalized()
"""argmax over c of (1 / |c|) * sum over t of (log p(t | prompt, before t) - log p(t | before t)).

The second term is the same choice with no prompt: it takes away what a choice owes to being common anywhere.
"""

exact: ChoicesMethod = _Exact()
"""argmax over c of the probability that the text is c, given that it is one of the choices (`choice_logprobs`)."""

METHODS: Mapping[str, ChoicesMethod] = {
    "token_length_normalized": token_length_normalized,
    "greedy_token_selection": greedy_token_selection,
    "unconditional_likelihood_normalized": unconditional_likelihood_normalized,
    "exact": exact,
}


def method_of(given: object) -> ChoicesMethod:
    """The method itself, or the one of that name.

    Raises:
        ProgramError: it is neither.
    """
    if isinstance(given, str) and given in METHODS:
        return METHODS[given]
    if isinstance(given, ChoicesMethod) and not isinstance(given, type):
        return given
    raise ProgramError(
        f"choices_method must be a ChoicesMethod or the name of one ({', '.join(METHODS)}), got {given!r}"
    )


def decided(
    method: ChoicesMethod, scores: Sequence[Score], unconditional: Sequence[Score], params: SamplingParams | None
) -> Decision:
    """What the method picks; with `params`, draws from the probabilities of `exact` instead, `params.n` of them."""
    decision = method.decide(scores, unconditional)
    if params is None:
        return decision
    drawn = draws(choice_logprobs(scores), params, scores[0].seed)
    return replace(decision, index=drawn[0], drawn=drawn)


def draws(logprobs: Sequence[float], params: SamplingParams, seed: int | None) -> tuple[int, ...]:
    """`params.n` indexes, drawn with p ** (1 / temperature) from what top_k, then top_p, then min_p leave.

    Each is a function of its seed: that of the params, else `seed`, else any; one more for each further draw. At
    temperature 0 all are the most probable one.
    """
    if params.is_greedy:
        return (_first_best(logprobs),) * params.n
    order = sorted(range(len(logprobs)), key=lambda index: -logprobs[index])
    order = order[: params.top_k] if params.top_k > 0 else order
    highest = logprobs[order[0]]
    weights = [math.exp((logprobs[index] - highest) / params.temperature) for index in order]
    aim = params.top_p * sum(weights)
    sums = list(itertools.accumulate(weights))
    num_left = 1 + sum(before < aim for before in sums[:-1])
    num_left = max(1, sum(weight >= params.min_p for weight in weights[:num_left]))
    first = params.seed if params.seed is not None else random.getrandbits(62) if seed is None else seed
    spots = (random.Random(first + index).random() * sums[num_left - 1] for index in range(params.n))
    return tuple(order[bisect.bisect(sums, spot, 0, num_left - 1)] for spot in spots)


def _first_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)  # max keeps the first of equals


# ---------------------------------------------------------------------------------------------------------------
# The probability of each choice, given that the text is one of them
# ---------------------------------------------------------------------------------------------------------------

# Rounding may bring the probabilities of what follows a finished choice to a sum of one; its end keeps this much, so
# that its logarithm is a number.
SMALLEST_END = 1e-12


def choice_logprobs(scores: Sequence[Score]) -> list[float]:
    """The log-probability of each choice under the constraint that the text is one of them. They sum to one as p.

    The tokens of the choices form a trie. At each node the model's probabilities are masked to what the trie allows
    and renormalised: p(t | node) / sum of p over the node's children. Where a choice ends and longer ones go on from
    there, ending has the probability of all that the longer ones do not take: 1 - sum of p over the node's children.
    Each choice counts in one tokenization, that in which it was scored.

    Raises:
        GenerationError: a first token without a log-probability, or two choices of the same tokens.
    """
    return _Trie.of(scores).choice_logprobs(scores)


@dataclass(slots=True)
class _TrieNode:
    children: dict[int, _TrieNode] = field(default_factory=dict)
    logprob: float | None = None  # of this node's token, given those above
    is_end: bool = False
    _log_sum: float | None = None

    def log_sum(self) -> float:
        """log of the sum of the children's probabilities. Kept: a thousand choices ask the root for it."""
        if self._log_sum is None:
            values = [child.logprob for child in self.children.values() if child.logprob is not None]
            self._log_sum = _log_sum_exp(values) if values else 0.0
        return self._log_sum


class _Trie:
    """The tokens of all choices, each shared beginning once."""

    def __init__(self, root: _TrieNode) -> None:
        self._root = root

    @classmethod
    def of(cls, scores: Sequence[Score]) -> _Trie:
        root = _TrieNode()
        for score in scores:
            node = root
            for token in score.logprobs:
                known = node.children.get(token.token_id)
                if known is None:
                    known = node.children[token.token_id] = _TrieNode(logprob=token.logprob)
                elif known.logprob is not None and token.logprob is not None:
                    known.logprob = max(known.logprob, token.logprob)
                node = known
            if node.is_end:
                raise GenerationError(
                    f"choice {score.text!r} and another one are the same tokens to this model; leave one out"
                )
            node.is_end = True
        return cls(root)

    def logprobs_of(self, score: Score) -> list[float | None]:
        return [node.logprob for _, node in self._path(score)]

    def choice_logprobs(self, scores: Sequence[Score]) -> list[float]:
        result = []
        for score in scores:
            total = 0.0
            last = self._root
            for parent, node in self._path(score):
                if node.logprob is None:
                    raise GenerationError(
                        f"choice {score.text!r} has no probability: nothing stands before it; "
                        "add text before the select"
                    )
                # An end takes what the children leave, so at such a node the probabilities sum to one as they are.
                mass = parent.log_sum()
                total += node.logprob - (max(0.0, mass) if parent.is_end else mass)
                last = node
            if last.children:
                total += math.log(max(SMALLEST_END, -math.expm1(min(0.0, last.log_sum()))))
            result.append(total)
        return _normalised(result)

    def _path(self, score: Score) -> Iterator[tuple[_TrieNode, _TrieNode]]:
        """(parent, node) for each token of the choice."""
        parent = self._root
        for token in score.logprobs:
            node = parent.children[token.token_id]
            yield parent, node
            parent = node


def _log_sum_exp(values: Sequence[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))


def _normalised(logprobs: list[float]) -> list[float]:
    """Take away what rounding (and SMALLEST_END) added, so that the probabilities sum to one."""
    total = _log_sum_exp(logprobs)
    return [value - total for value in logprobs]
