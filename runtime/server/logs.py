"""What the server logs and how: a line a request and what went wrong, as text or as JSON, under the request's id.

Prompts, answers and keys are in no line above DEBUG.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

request_id: ContextVar[str] = ContextVar("niwaki_request_id", default="")

access_log = logging.getLogger("niwaki.access")

FIELDS = ("method", "path", "status", "seconds", "client")  # what an access line holds beside its text


@contextmanager
def configured(level: str, form: str, stream: TextIO | None = None) -> Iterator[None]:
    """What niwaki logs inside goes to `stream` (stderr as it is now). For the command line: a library leaves logging to
    its user, who finds it behind the block as it was, not with a stream that is closed since."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_with_request_id)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(request_id)s %(message)s")
    handler.setFormatter(_JsonFormatter() if form == "json" else text)
    logger = logging.getLogger("niwaki")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


def _with_request_id(record: logging.LogRecord) -> bool:
    record.request_id = request_id.get() or "-"
    return True


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", "-"),
        }
        said |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False, default=str)
