"""Types of generated values: each becomes a constraint that admits its JSON and a parser that reads the value back.

A small type becomes a regular expression; one that none can hold (recursion, dicts, dates, bounds on floats) goes
through the JSON schema that Pydantic has for it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import isroutine
from pathlib import PurePath
from typing import Annotated, Literal, TypeAlias, Union, get_args, get_origin

from niwaki.lang.number_patterns import float_pattern, int_pattern
from niwaki.lang.own_regex import fault_of
from niwaki.lang.pattern_size import num_states
from niwaki.lang.type_schema import schema_of
from niwaki.runtime.api import AllOf, Choices, Constraint, ConstraintError, Grammar, JsonSchema, Regex, Spacing

# Where a type sets no limit on a text or a list, neither do we: an automaton that counts characters has a state for
# each, one that does not has a few in all, and when the budget runs out the runtime closes quotes and brackets itself.
LONGEST_STRING_CHARS = 1_000  # what `max_length` may ask for: every character costs states of the automaton

# Of a type's automaton, about. Larger types are grammars: 300 values of an Enum compile in 0.05 s so, in 0.46 as a
# regex, and beyond three times as many states there would be none.
MAX_STATES = 4_000

# One character of a JSON string: itself, or an escape. Lone surrogates are no characters, so their escapes are out.
JSON_CHAR = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\/bfnrt]|\\u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))'

# A number has no closing mark, and a model that wants to write ", " after it must not be pushed into one more digit.
# So one of these may follow, with whatever its token holds beside it; it is a stop string, and cut off again.
_AFTER_NUMBER = (" ", "\n", ",", ";", ")", "]", "}")
_AFTER_NUMBER_PATTERN = r"(?:[ \n,;)\]}][ -~\n]{0,16})?"

Pattern: TypeAlias = "str | re.Pattern[str]"

# A text with nothing but such a name in it, which no grammar is: it has no colon.
_NAME_OF_A_FILE = re.compile(r"\.\w{2,5}\s*\Z")
_LETTERS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}  # of flags, as a pattern itself may say them


@dataclass(frozen=True, slots=True)
class ValueType:
    """What a typed `gen` needs: `constraint` admits exactly the texts that `parse` reads.

    `stop` ends the text of a type that has no end of its own; the stop string is never part of it.
    """

    name: str
    constraint: Constraint
    parse: Callable[[str], object]
    stop: tuple[str, ...] = ()


class _NeverExact(ConstraintError):
    """A JSON schema cannot say it either."""


def value_type(dtype: object, spacing: Spacing = "compact") -> ValueType:
    """The `ValueType` of a Python type.

    int, float, bool, str and everything composed are written as JSON (`{"name":"Ada","age":36}`, keys in the order of
    the fields; compact unless `spacing` says otherwise). Literal and Enum are written bare: `positive`, not
    `"positive"`.

    Raises:
        ConstraintError: the type, or a field of it, cannot be enforced exactly. Names the field.
    """
    name = _name(dtype)
    if isinstance(dtype, str):
        raise ConstraintError(f"dtype {dtype!r} is a text; give the type itself")
    if isinstance(dtype, Mapping):
        raise ConstraintError(f"dtype {dtype!r} is a dict; a JSON schema is given as json_schema=, fields as a class")
    if isinstance(dtype, list | tuple | set | frozenset):
        raise ConstraintError(f"dtype {dtype!r} is no type; texts to choose from are given as choices=")
    if isroutine(dtype):  # Pydantic would call it with what the model wrote
        called = getattr(dtype, "__name__", "f")
        raise ConstraintError(f"dtype {called} is a function; give it as tools=[{called}], whose value is a call of it")
    if not isinstance(dtype, type) and _has_fields(type(dtype)):
        raise ConstraintError(f"dtype {dtype!r} is an object; give its class, {type(dtype).__name__}")
    if dtype is int:
        return ValueType(name, Regex(int_pattern(None, None) + _AFTER_NUMBER_PATTERN), _read_int, _AFTER_NUMBER)
    if dtype is float:
        return ValueType(name, Regex(float_pattern(True) + _AFTER_NUMBER_PATTERN), _read_float, _AFTER_NUMBER)
    if dtype is bool:
        return ValueType(name, Choices(("true", "false")), json.loads)
    if dtype is str:
        return ValueType(name, Regex(_string_pattern(0, None)), json.loads)
    if get_origin(dtype) is Literal or _is_enum(dtype):
        return _bare_choices(dtype, name)
    if isinstance(dtype, type) and _has_fields(dtype):
        return _composed_class(dtype, name, spacing)
    return _composed(dtype, name, spacing)


def _composed(dtype: object, name: str, spacing: Spacing) -> ValueType:
    refusal: ConstraintError | None = None
    try:
        constraint: Constraint = (regex := Regex(_pattern(dtype, name, ())))
    except _NeverExact as error:
        raise ConstraintError(str(error)) from None
    except ConstraintError as error:
        refusal = error
    if refusal is None and num_states(regex.pattern) > MAX_STATES:
        refusal = ConstraintError(f"dtype {name} has no JSON schema, and is too large for a regular expression")
    if refusal is not None:  # not where it was caught: what the schema says no to would seem to come of this
        constraint = JsonSchema(schema_of(dtype, name, refusal), spacing)
    elif spacing != "compact":
        constraint = JsonSchema(schema_of(dtype, name, ConstraintError(f"dtype {name} has no JSON schema")), spacing)
    return ValueType(name, constraint, _reader(dtype))


# A program writes the same gen for each of its rows, and a model of 20 limited texts takes a millisecond to describe.
_composed_class = lru_cache(maxsize=256)(_composed)


def regex_type(pattern: Pattern | Sequence[Pattern]) -> ValueType:
    """The whole text matches `pattern`, or each of several ones; the value is the text.

    Raises:
        ConstraintError: a pattern is not a valid regular expression, at the place that the message names.
    """
    given = (pattern,) if isinstance(pattern, str) or not isinstance(pattern, Sequence) else tuple(pattern)
    if not given:
        raise ConstraintError("regex must be a string or a list of at least one, got an empty list")
    patterns = tuple(map(_checked_regex, given))
    if len(patterns) == 1:
        return ValueType(f"regex {patterns[0]!r}", Regex(patterns[0]), str)
    return ValueType(f"regexes {patterns!r}", AllOf(tuple(map(Regex, patterns))), str)


def stop_text(pattern: Pattern | None) -> str | None:
    """A `stop_regex` as text, as `re.compile` gives it too. What is no text is refused with the other options.

    Raises:
        ConstraintError: it is not a valid regular expression, at the place that the message names.
    """
    return _checked_regex(pattern, "stop_regex") if isinstance(pattern, str | re.Pattern) else pattern


def _text_of(pattern: re.Pattern[str]) -> str:
    """The flags that `re.compile` was given are written before it."""
    if pattern.flags & ~(re.UNICODE | re.DEBUG | re.IGNORECASE | re.MULTILINE | re.DOTALL):
        raise ConstraintError(f"{pattern!r} has a flag that cannot be enforced; write the pattern without it")
    letters = "".join(letter for letter, flag in _LETTERS.items() if pattern.flags & flag)
    return f"(?{letters}){pattern.pattern}" if letters else pattern.pattern


def _checked_regex(pattern: object, name: str = "regex") -> str:
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        pattern = _text_of(pattern)
    if not isinstance(pattern, str):
        raise ConstraintError(f"{name} must be a string, got {pattern!r}")
    fault = fault_of(pattern)
    if fault is not None:
        raise ConstraintError(f"{name} {pattern!r} is not valid at {fault[0]}: {fault[1]}")
    return pattern


def schema_type(schema: Mapping[str, object] | str | type, spacing: Spacing = "compact") -> ValueType:
    """The text is a value that the JSON schema (a dict, its text, or a type) admits; the value is the text.

    Raises:
        ConstraintError: it is not JSON, or no schema, or the type has none.
    """
    if isinstance(schema, str):
        try:
            read = json.loads(schema)
        except ValueError as error:
            raise ConstraintError(f"json_schema is not valid JSON: {error}") from error
        _refuse_wrapped(read)
        return ValueType("json_schema", JsonSchema(schema, spacing), str)
    if isinstance(schema, Mapping):
        _refuse_wrapped(schema)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConstraintError(f"json_schema must hold JSON values only: {error}") from error
        return ValueType("json_schema", JsonSchema(text, spacing), str)
    name = _name(schema)
    refusal = ConstraintError(f"json_schema {name} is none; give a dict, its JSON text, or a type that has one")
    return ValueType(f"json_schema {name}", JsonSchema(schema_of(schema, name, refusal), spacing), str)


def _refuse_wrapped(schema: object) -> None:
    """As a schema OpenAI's format of an answer has only words that JSON Schema does not know, and would admit anything.

    Raises:
        ConstraintError: it is one.
    """
    if not isinstance(schema, Mapping):
        return
    is_format = schema.get("type") == "json_schema"
    if is_format or ("schema" in schema and schema.keys() <= {"name", "description", "schema", "strict"}):
        where = "['json_schema']['schema']" if is_format else "['schema']"
        raise ConstraintError(f"json_schema is OpenAI's format of an answer; give what stands in its {where}")


def grammar_type(source: object) -> ValueType:
    """The text is a sentence of the grammar, in Lark's syntax, or in EBNF where its rules are written `::=`; the value
    is the text.

    Raises:
        ConstraintError: it is no text with a rule.
    """
    if isinstance(source, str) and ":" in source:
        return ValueType("grammar", Grammar(source, "ebnf" if "::=" in source else "lark"), str)
    if isinstance(source, PurePath) or _NAME_OF_A_FILE.search(str(source)):
        raise ConstraintError(f"grammar must be a text, got the name of a file: {str(source)!r}; read it: read_text()")
    raise ConstraintError(f"grammar must be text with at least one rule, as in 'start: /[0-9]+/', got {source!r}")


# ---------------------------------------------------------------------------------------------------------------
# Types that stand bare
# ---------------------------------------------------------------------------------------------------------------


def _bare_choices(dtype: object, name: str) -> ValueType:
    values = {str(_plain(value, name)): value for value in _members(dtype)}
    if len(values) < len(_members(dtype)):
        raise ConstraintError(f"dtype {name}: two of its values are written alike; make their texts differ")
    if not values:
        raise ConstraintError(f"dtype {name} has no values; give it some")
    if "" in values:
        raise ConstraintError(f"dtype {name}: an empty text cannot be generated; leave it out of the values")
    is_text = all(type(value) is str for value in values.values())  # a member of a StrEnum is a text, too
    return ValueType(name, Choices(tuple(values)), str if is_text else values.__getitem__)


def _members(dtype: object) -> tuple[object, ...]:
    return tuple(dtype) if isinstance(dtype, type) and issubclass(dtype, enum.Enum) else get_args(dtype)


def _plain(value: object, where: str) -> str | int | bool | None:
    inner = value.value if isinstance(value, enum.Enum) else value
    if inner is None or isinstance(inner, str | int):  # a bool is an int
        return inner
    raise ConstraintError(f"dtype {where}: the value {inner!r} is neither text, a whole number, a bool nor None")


def _is_enum(dtype: object) -> bool:
    return isinstance(dtype, type) and issubclass(dtype, enum.Enum)


def _read_int(text: str) -> object:
    return int(text.strip())


def _read_float(text: str) -> object:
    return float(text.strip())


def _reader(dtype: object) -> Callable[[str], object]:
    from pydantic import TypeAdapter  # heavy: only programs with composed types load it

    adapter: TypeAdapter[object] = TypeAdapter(dtype)  # type: ignore[arg-type]  # a type, known only at run time
    return adapter.validate_json


# ---------------------------------------------------------------------------------------------------------------
# Patterns of JSON
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The limits that a type's annotations set. None: no limit."""

    low: int | None = None
    high: int | None = None
    min_length: int | None = None
    max_length: int | None = None


def _pattern(dtype: object, where: str, inside: tuple[object, ...]) -> str:
    """The regex of the JSON of `dtype`. `where` names the place for errors, `inside` the classes being described."""
    base, metadata = _without_annotations(dtype)
    if metadata and (inner := _optional_inner(base)) is not None:  # Field(ge=0) on `int | None` limits the int
        return _any_of((_pattern(Annotated[(inner, *metadata)], where, inside), "null"))
    bounds = _bounds(metadata, base, where)
    if base is bool:
        return "(?:true|false)"
    if base is int:
        return f"(?:{int_pattern(bounds.low, bounds.high)})"
    if base is float:
        return float_pattern(is_signed=bounds.low is None)
    if base is str:
        return _string_field(bounds, where)
    if base is None or base is type(None):
        return "null"
    origin = get_origin(base)
    if origin is Literal or _is_enum(base):
        if origin is Literal and any(isinstance(value, enum.Enum) for value in get_args(base)):
            raise ConstraintError(f"dtype {where}: a Literal of members")  # validators take some of them
        return _any_of(_escaped(json.dumps(_plain(v, where), ensure_ascii=False)) for v in _members(base))
    if origin is Union or origin is types.UnionType:
        return _any_of(_pattern(part, where, inside) for part in get_args(base))
    if origin is list:
        return _list_pattern(base, bounds, where, inside)
    if isinstance(base, type):
        if _limits_texts(base):
            raise ConstraintError(f"dtype {where}: {base.__name__} limits its texts in its configuration")
        if getattr(base, "__pydantic_root_model__", False):  # its JSON is that of its one field, without braces
            (root,) = _model_fields(base, where).values()
            return _pattern(root, where, _within(base, where, inside))
        fields = _fields(base, where)
        if fields is not None:
            return _object_pattern(fields, where, _within(base, where, inside))
    raise ConstraintError(
        f"dtype {where}: {_name(base)} cannot be enforced; use int, float, bool, str, Literal, Enum, None, unions and "
        "lists of these, or a Pydantic model or dataclass of such fields"
    )


def _within(base: type, where: str, inside: tuple[object, ...]) -> tuple[object, ...]:
    if base in inside:
        raise ConstraintError(f"dtype {where}: {base.__name__} contains itself, which no regex can express")
    return (*inside, base)


def _without_annotations(dtype: object) -> tuple[object, tuple[object, ...]]:
    """The bare type, and what Annotated and Field say about it."""
    metadata: tuple[object, ...] = ()
    while get_origin(dtype) is Annotated:
        dtype, *extra = get_args(dtype)
        metadata = (*extra, *metadata)
    return dtype, metadata


def _optional_inner(dtype: object) -> object | None:
    """X of `X | None`; None for everything else."""
    if get_origin(dtype) not in (Union, types.UnionType):
        return None
    others = [part for part in get_args(dtype) if part is not type(None)]
    return others[0] if len(others) == 1 else None


def _bounds(metadata: Iterable[object], base: object, where: str) -> _Bounds:
    """Raises ConstraintError for a limit that a regex over the type's JSON cannot express exactly."""
    bounds = _Bounds()
    for item in metadata:
        inner = getattr(item, "metadata", None)  # a Field() holds its limits in a list
        if isinstance(inner, list):
            limits = [*inner]
        elif hasattr(item, "__iter__") and not isinstance(item, str):
            limits = [*item]  # annotated_types' Interval and Len are groups
        else:
            limits = [item]
        for limit in limits:
            bounds = _with_limit(bounds, limit, base, where)
    return bounds


def _with_limit(bounds: _Bounds, limit: object, base: object, where: str) -> _Bounds:
    kind = type(limit).__name__
    low, high = bounds.low, bounds.high
    match kind:
        case "Ge" | "Gt" if base is int:
            value = _whole(getattr(limit, kind.lower()), kind, where) + (kind == "Gt")
            return dataclasses.replace(bounds, low=value if low is None else max(low, value))
        case "Le" | "Lt" if base is int:
            value = _whole(getattr(limit, kind.lower()), kind, where) - (kind == "Lt")
            return dataclasses.replace(bounds, high=value if high is None else min(high, value))
        case "Ge" if base is float and getattr(limit, "ge", None) == 0:
            return dataclasses.replace(bounds, low=0)
        case "MinLen" if base is str or get_origin(base) is list:
            return dataclasses.replace(bounds, min_length=getattr(limit, "min_length", None))
        case "MaxLen" if base is str or get_origin(base) is list:
            return dataclasses.replace(bounds, max_length=getattr(limit, "max_length", None))
        case "Strict" | "BeforeValidator" | "AfterValidator" | "PlainValidator" | "WrapValidator" | "str":
            return bounds  # validators run on the finished value; a bare string is a comment
    raise ConstraintError(
        f"dtype {where}: {limit!r} on {_name(base)} cannot be enforced exactly; take it out and check the value"
    )


def _whole(value: object, kind: str, where: str) -> int:
    if isinstance(value, int):
        return value
    raise ConstraintError(f"dtype {where}: {kind.lower()}={value!r} on int must be a whole number")


def _string_field(bounds: _Bounds, where: str) -> str:
    low = bounds.min_length or 0
    high = bounds.max_length
    if not low <= (low if high is None else high) <= LONGEST_STRING_CHARS:
        raise ConstraintError(
            f"dtype {where}: a text of {low} to {high} characters; at most {LONGEST_STRING_CHARS} can be enforced"
        )
    return _string_pattern(low, high)


def _string_pattern(low: int, high: int | None) -> str:
    return f'"{JSON_CHAR}{_repeat(low, high)}"'


def _repeat(low: int, high: int | None) -> str:
    """The quantifier for `low` to `high` times; None: without end."""
    if high is None:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"


def _list_pattern(base: object, bounds: _Bounds, where: str, inside: tuple[object, ...]) -> str:
    (item_type,) = get_args(base) or (None,)
    if item_type is None:
        raise ConstraintError(f"dtype {where}: a list needs the type of its items, such as list[str]")
    item = _pattern(item_type, f"{where}[]", inside)
    low = bounds.min_length or 0
    high = bounds.max_length
    if not low <= (low if high is None else high) <= LONGEST_STRING_CHARS:
        raise ConstraintError(f"dtype {where}: a list of {low} to {high} items cannot be enforced")
    if high == 0:
        return r"\[\]"
    items = rf"{item}(?:,{item}){_repeat(max(low - 1, 0), None if high is None else high - 1)}"
    return rf"\[(?:{items})?\]" if low == 0 else rf"\[{items}\]"


def _object_pattern(fields: Mapping[str, object], where: str, inside: tuple[object, ...]) -> str:
    parts = [
        _escaped(json.dumps(key, ensure_ascii=False)) + ":" + _pattern(field, f"{where}, field {key!r}", inside)
        for key, field in fields.items()
    ]
    return r"\{" + ",".join(parts) + r"\}"


def _has_fields(base: type) -> bool:
    return hasattr(base, "model_fields") or dataclasses.is_dataclass(base)


def _fields(base: type, where: str) -> dict[str, object] | None:
    """JSON key -> type of a class with fields, or None where it has none that we know."""
    if hasattr(base, "model_fields"):
        return _model_fields(base, where)
    if dataclasses.is_dataclass(base):
        try:
            hints = typing.get_type_hints(base, include_extras=True)
        except NameError as error:
            raise _NeverExact(
                f"dtype {where}: {error}; a dataclass whose annotations are texts can name only what its module defines"
            ) from error
        declared = dataclasses.fields(base)
        if any(hasattr(field.default, "annotation") and hasattr(field.default, "metadata") for field in declared):
            raise ConstraintError(f"dtype {where}: a field of {base.__name__} has limits as its default")
        return {field.name: hints[field.name] for field in declared if field.init}
    return None


def _limits_texts(base: type) -> bool:
    """Whether the configuration of a model or a Pydantic dataclass does. The schema says so, too."""
    settings = getattr(base, "model_config", None) or getattr(base, "__pydantic_config__", None)
    return isinstance(settings, dict) and any(settings.get(key) for key in ("str_min_length", "str_max_length"))


def _model_fields(model: type, where: str) -> dict[str, object]:
    fields: dict[str, object] = {}
    declared: Mapping[str, object] = model.model_fields  # type: ignore[attr-defined]  # a Pydantic model, seen by its shape
    for name, field in declared.items():
        alias = getattr(field, "validation_alias", None)
        if alias is not None and not isinstance(alias, str):
            raise _NeverExact(f"dtype {where}, field {name!r}: only an alias that is one string is supported")
        metadata = tuple(getattr(field, "metadata", ()))
        annotation: object = getattr(field, "annotation", None)
        fields[alias or name] = Annotated[(annotation, *metadata)] if metadata else annotation
    return fields


def _any_of(patterns: Iterable[str]) -> str:
    return "(?:" + "|".join(patterns) + ")"


def _escaped(text: str) -> str:
    """`re.escape` would also escape what Rust's dialect does not know how to unescape."""
    return "".join("\\" + char if char in r"\.+*?()|[]{}^$" else char for char in text)


def _name(dtype: object) -> str:
    """As an author writes it, without the modules that its parts are from."""
    args, origin = get_args(dtype), get_origin(dtype)
    if not args or origin in (Annotated, Literal):
        return dtype.__name__ if isinstance(dtype, type) else str(dtype).replace("typing.", "")
    if origin in (Union, types.UnionType):
        return " | ".join("None" if arg is type(None) else _name(arg) for arg in args)
    if isinstance(origin, type):
        return f"{origin.__name__}[{', '.join('...' if arg is ... else _name(arg) for arg in args)}]"
    return str(dtype).replace("typing.", "")
