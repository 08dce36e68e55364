"""Patterns of strings: whether one is found in a text, by the engine that enforces it; and all strings but a few."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from niwaki.runtime.constraints.grammar_worker import build, byte_tokenizer, short_reason
from niwaki.runtime.constraints.schema.document import json_text, refused

MAX_TRIED_PATTERN: Final = 2000
_COUNT = re.compile(r"\{\d*,?(\d{4,})")
_lock = threading.Lock()


def matches(pattern: str, text: str, pointer: str) -> bool:
    """Whether `pattern` is found in `text`, exactly as the engine would allow it.

    Raises:
        ConstraintError: it is no pattern of the engine, or too large to try here.
    """
    with _lock:  # a matcher may be touched by one thread at a time
        place = _matcher(pattern, pointer).deep_copy()
    data = list(json_text(text).encode())
    return bool(place.try_consume_tokens(data) == len(data) and place.is_accepting())


@lru_cache(maxsize=256)
def _matcher(pattern: str, pointer: str) -> LLMatcher:
    if len(pattern) > MAX_TRIED_PATTERN or _COUNT.search(pattern):
        raise refused(pointer, "the pattern is too large to be compared with constants and names")
    schema = json.dumps({"type": "string", "pattern": pattern})
    try:
        return build(f'%llguidance {{"no_forcing": true}}\nstart: %json {schema}\n', _tokenizer())
    except ValueError as error:
        raise refused(pointer, f"the pattern cannot be enforced: {short_reason(str(error))}") from None


@lru_cache(maxsize=1)
def _tokenizer() -> LLTokenizer:
    return byte_tokenizer()


def all_but(texts: Iterable[str]) -> str:
    """A pattern of every string but these: it leaves their trie, stops inside it, or goes on behind it."""
    return f"^(?:{_all_but(sorted(set(texts)))})$"


def _all_but(texts: list[str]) -> str:
    anything = r"[\s\S]*"
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    firsts = "".join(_in_class(char) for char in by_first)
    leaves = rf"[^{firsts}]{anything}" if firsts else rf"[\s\S]{anything}"
    inside = [f"{_escaped(char)}(?:{_all_but(rest)})" for char, rest in by_first.items()]
    return "|".join([*([] if "" in texts else [""]), leaves, *inside])


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[&~" else char


def _escaped(char: str) -> str:
    return f"\\{char}" if char in r"\.+*?()|[]{}^$#&-~/" and char not in "#&~/-" else char
