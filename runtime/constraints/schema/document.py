"""A schema's text, read behind walls of size and depth, and JSON values compared as JSON Schema compares them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from json.encoder import encode_basestring
from typing import Final, NoReturn, TypeAlias

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.schema.scopes import plain

MAX_SCHEMA_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 64
MAX_NUMBER_DIGITS: Final = 300

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_TO_BRACKET = re.compile(r'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{}])', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")  # two of them may be one character
_COUNT = re.compile(r"\d{2,9}(?=[,}])")
MUCH: Final = 200
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_sorted = json.JSONEncoder(sort_keys=True).encode


class TookTooLong(Exception):
    """A limit of time was reached: it says as much about the machine as about what was asked. `place`: the pointer of
    the part of a schema that was worked on, where that is known."""

    def __init__(self, place: str | None = None) -> None:
        super().__init__(place)
        self.place = place


def nothing() -> None:
    """Where nobody else's work goes first."""


class Watch:
    """Ends what takes this thread more than some seconds of processor time. `place`: what is worked on, for whoever
    knows to tell."""

    def __init__(self, seconds: float, wait_for_pause: Callable[[], None] = nothing) -> None:
        """`wait_for_pause`: called at each check, that others' work goes first."""
        self._wait_for_pause = wait_for_pause
        self._end = time.thread_time() + seconds
        # Before this a thread cannot have used so much. To read a thread's own time is a call of the system, which took
        # as long as much of what it is asked beside.
        self._earliest = time.monotonic() + seconds
        self.place: str | None = None

    def check(self) -> None:
        """Raises TookTooLong once the time is over."""
        self._wait_for_pause()
        if time.monotonic() >= self._earliest:
            self.expect(0)

    def expect(self, seconds: float) -> None:
        """Before what may take so long and is not watched itself. Raises TookTooLong where less is left."""
        now = time.monotonic()
        if now + seconds < self._earliest:
            return
        left = self._end - time.thread_time()
        if left < seconds:
            raise TookTooLong(self.place)
        self._earliest = now + left


def refused(pointer: str, reason: str) -> ConstraintError:
    """The error for a keyword at a JSON pointer into the schema, or at a place in a scope."""
    pointer = plain(pointer) if pointer[:1] == "~" else pointer
    return ConstraintError(f"schema at {pointer or 'its root'}: {reason}")


def read_schema(text: str) -> Json:
    """The schema as plain values: an object or a boolean.

    Raises:
        ConstraintError: too large, too deep, not JSON, or not a schema.
    """
    if not isinstance(text, str):
        raise ConstraintError(f"a JSON schema must be given as text, got {type(text).__name__}")
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_SCHEMA_BYTES:
        raise ConstraintError(f"a JSON schema of {size} bytes is too large: at most {MAX_SCHEMA_BYTES}")
    try:
        schema: Json = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_constant, parse_int=_whole, parse_float=_finite
        )
    except RecursionError:
        _check_depth(text)
        raise
    except json.JSONDecodeError as error:
        _check_depth(text)
        raise ConstraintError(f"the JSON schema is not valid JSON at {error.pos}: {error.msg}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(schema):
        _check_depth(text)
    if not isinstance(schema, dict | bool):
        raise ConstraintError(f"a JSON schema must be an object or a boolean, got {type(schema).__name__}")
    if _holds_surrogate(text, schema):
        raise ConstraintError("the JSON schema holds a lone surrogate, which is not text")
    return schema


def _is_too_deep(value: Json) -> bool:
    """What was read is walked in a fifth of the time in which the brackets of its text are."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def _check_depth(text: str) -> None:
    """Raises ConstraintError where the brackets of a text are nested too deeply, with the place."""
    depth = place = 0
    while match := _TO_BRACKET.match(text, place):
        place = match.end()
        depth += 1 if match[1] in "[{" else -1
        if depth > MAX_DEPTH:
            raise ConstraintError(f"a JSON schema may be nested {MAX_DEPTH} levels deep, at {place - 1} it is deeper")


def json_text(value: Json) -> str:
    """The value as compact JSON, which is how generated text is written."""
    return encode_basestring(value) if isinstance(value, str) else _compact(value)


def identity(value: Json) -> str:
    """Equal for values that JSON Schema holds equal (section 4.2.2): 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, str):
        return f'"{value}'  # most constants are text; nothing else begins with a quote
    return _sorted(_canonical(value))


def as_fraction(value: float) -> Fraction:
    """The number that a JSON text of the value says."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


class AsDouble(Fraction):
    """A whole number by its digits that is written as `1e23` is, and that readers take for another one."""


def as_bound(value: float) -> Fraction:
    """As `as_fraction`, an `AsDouble` where it is one."""
    number = as_fraction(value)
    return AsDouble(number) if isinstance(value, float) and value.is_integer() and int(value) != number else number


def most_counted(schema: Json) -> str | None:
    """The pointer of the keyword that asks for the most by a count, a step or alternatives: of what takes long it is
    mostly the reason. None where none asks for much."""
    most, found = MUCH, None
    stack: list[tuple[str, str, Json]] = [("", "", schema)]
    while stack:
        pointer, key, value = stack.pop()
        size = _counted(key, value)
        if size > most:
            most, found = size, pointer
        if isinstance(value, dict):
            stack += [(f"{pointer}/{escaped(name)}", name, inner) for name, inner in value.items()]
            if key == "patternProperties":
                size, heaviest = max((_counted("pattern", name), name) for name in ("", *value))
                most, found = (size, f"{pointer}/{escaped(heaviest)}") if size > most else (most, found)
        elif isinstance(value, list):
            stack += [(f"{pointer}/{index}", "", inner) for index, inner in enumerate(value)]
    return found


def _counted(key: str, value: Json) -> int:
    if key == "pattern" and isinstance(value, str):
        return math.prod(min(int(count), MAX_SCHEMA_BYTES) for count in _COUNT.findall(value)) + len(value)
    if key == "multipleOf" and isinstance(value, int | float):
        return as_fraction(value).numerator
    if isinstance(value, int) and key[:3] in ("min", "max") and key not in ("minimum", "maximum"):
        return value
    return len(value) if isinstance(value, list | dict) and key not in ("properties", "$defs", "definitions") else 0


def escaped(token: str) -> str:
    """One token of a JSON pointer."""
    return token.replace("~", "~0").replace("/", "~1") if "/" in token or "~" in token else token


def unescaped(token: str) -> str:
    return token.replace("~1", "/").replace("~0", "~")


def _canonical(value: Json) -> Json:
    if isinstance(value, float) and value.is_integer() and int(value) == as_fraction(value):
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value


def canonical(value: Json) -> Json:
    """Whole numbers as integers: 1.0 is written 1, but 1e23 as it stands, since readers take it for a little less."""
    return _canonical(value)


def _unique(pairs: Sequence[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConstraintError(f"the JSON schema has the key {repeated!r} twice in one object")
    return found


def _constant(text: str) -> NoReturn:
    raise ConstraintError(f"the JSON schema holds {text}, which is no JSON number")


def _whole(text: str) -> int:
    if len(text) > MAX_NUMBER_DIGITS:
        raise ConstraintError(f"the JSON schema holds a number of {len(text)} digits, at most {MAX_NUMBER_DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ConstraintError(f"the JSON schema holds the number {text[:40]}, which is out of range")
    return value


def _holds_surrogate(text: str, schema: Json) -> bool:
    if not text.isascii() and _SURROGATE.search(text):
        return True
    return "\\u" in text and _SURROGATE_ESCAPE.search(text) is not None and _has_surrogate(schema)


def _has_surrogate(schema: Json) -> bool:
    stack: list[Json] = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, str) and _SURROGATE.search(value):
            return True
        if isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, Mapping):
            stack.extend(value)
            stack.extend(value.values())
    return False
