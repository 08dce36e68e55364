"""Tokens about which a constraint leaves no choice."""

from __future__ import annotations

from collections.abc import Sequence

from niwaki.runtime.api import FinishReason
from niwaki.runtime.constraints.boundaries import TAIL_TOKENS, Boundaries
from niwaki.runtime.constraints.protocol import Matcher
from niwaki.runtime.loop.counters import Counters
from niwaki.runtime.requests.request import Request
from niwaki.runtime.sampling.sampler import Sampled


def forced_tokens(matcher: Matcher, tail: Sequence[int], remaining: int, boundaries: Boundaries) -> list[int]:
    """The tokens that must come next behind those of `tail`, as the tokenizer would write them; at most so many as
    remain. The matcher has accepted them."""
    found: list[int] = []
    while len(found) < remaining:
        forced = matcher.forced_text()
        run = boundaries.tokens_of([*tail, *found][-TAIL_TOKENS:], forced) if forced.text else ()
        if not run or len(found) + len(run) > remaining:
            break
        for token_id in run:
            matcher.accept(token_id)
        if not matcher.fits(remaining - len(found) - len(run)):  # a shorter way to write it may fit
            matcher.rollback(len(run))
            break
        found += run
    return found


def force(
    request: Request, boundaries: Boundaries | None, end_ids: frozenset[int], counters: Counters
) -> FinishReason | None:
    """Add the tokens that must come next: they ride in the request's next row. Returns why the request ends, if it
    does."""
    matcher = request.matcher
    if matcher is None or boundaries is None or request.healing is not None:
        return None
    token_ids = forced_tokens(matcher, request.text_tail(), request.remaining_new, boundaries)
    if not token_ids:
        return None
    counters.forced_tokens += len(token_ids)
    counters.generated_tokens += len(token_ids)
    return request.force(token_ids, end_ids)


def take_with_forced(
    request: Request, sampled: Sampled, token_ids: Sequence[int], end_ids: frozenset[int], counters: Counters
) -> FinishReason | None:
    """Add a drawn token that does not end the text and those that it forces; the matcher has accepted them all. Returns
    why the request ends, if it does."""
    if not token_ids:
        return request.take(sampled, end_ids, is_accepted=True)
    counters.forced_tokens += len(token_ids)
    counters.generated_tokens += len(token_ids)
    # All are there before the first is shown: the matcher stands behind the last, and what the text is stopped before
    # is dropped.
    request.append(sampled.token_id)
    request.is_shorter |= sampled.is_shorter  # it is shown with the others, as a token alone
    request.logits_from = request.length - 1
    reason = request.force(token_ids, end_ids)
    return request.show(sampled, end_ids) if request.wants_logprobs else reason
