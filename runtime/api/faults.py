"""What was raised on behalf of one request: it ends that request, and no other."""

from __future__ import annotations

import logging

from niwaki.runtime.api import GenerationError, NiwakiError

log = logging.getLogger("niwaki.core")


def told(error: Exception) -> NiwakiError:
    """What whoever waits for the request is told. A bug of ours is logged as well."""
    if isinstance(error, NiwakiError):
        return error
    log.error("a request failed", exc_info=error)
    failure = GenerationError(f"the request failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
