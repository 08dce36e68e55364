"""Python values as compact JSON, the spelling that this project writes and reads everywhere."""

from __future__ import annotations

import json


def as_json(value: object) -> str:
    """Plain data, and what Pydantic knows how to write: models, dataclasses, dates, enums, sets and the like.

    Raises:
        TypeError, ValueError: a value in it has no JSON.
    """
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except TypeError:
        from pydantic_core import to_jsonable_python  # heavy: plain data do without it

        return json.dumps(to_jsonable_python(value), ensure_ascii=False, separators=(",", ":"))
