"""What is told of what went wrong: to whoever waits for a request, and of a file that cannot be made."""

from __future__ import annotations

import logging
from pathlib import Path

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


def not_made(path: Path, error: FileNotFoundError) -> FileNotFoundError:
    """Why `path` could not be made: that its folder is missing, where the system's words only say that something is."""
    if path.parent.is_dir():
        return error
    return FileNotFoundError(error.errno, f"there is no folder {path.parent}; make it first", str(path))
