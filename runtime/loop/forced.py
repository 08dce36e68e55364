"""Tokens about which a constraint leaves no choice."""

from __future__ import annotations

from niwaki.runtime.api import FinishReason
from niwaki.runtime.constraints.boundaries import Boundaries
from niwaki.runtime.loop.counters import Counters
from niwaki.runtime.requests.request import Request


def force(
    request: Request, boundaries: Boundaries | None, end_ids: frozenset[int], counters: Counters
) -> FinishReason | None:
    """Add the tokens that must come next, as the tokenizer would write them: they ride in the request's next row.
    Returns why the request ends, if it does."""
    matcher = request.matcher
    if matcher is None or boundaries is None or request.healing is not None:
        return None
    reason = None
    while reason is None and request.remaining_new:
        forced = matcher.forced_text()
        token_ids = boundaries.tokens_of(request.text_tail(), forced) if forced.text else ()
        if not token_ids or len(token_ids) > request.remaining_new:
            break
        for token_id in token_ids:
            matcher.accept(token_id)
        if not matcher.fits(request.remaining_new - len(token_ids)):  # a shorter way to write it may fit
            matcher.rollback(len(token_ids))
            break
        counters.forced_tokens += len(token_ids)
        counters.generated_tokens += len(token_ids)
        reason = request.force(token_ids, end_ids)
    return reason
