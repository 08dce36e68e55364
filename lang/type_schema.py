"""The JSON schema of a type, such that whatever it admits the type's own validator takes: Pydantic's, with objects
closed, every field written, and what a schema cannot say, or no mask hold, narrowed or refused. Loads Pydantic, and
what reads schemas, when it is called."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from niwaki.runtime.api import ConstraintError

if TYPE_CHECKING:
    from pydantic.json_schema import GenerateJsonSchema
    from pydantic_core import core_schema

# What Pydantic writes into a schema where JSON Schema has no keyword for it, such as a bound on a union.
_NO_KEYWORDS: Final = frozenset("ge gt le lt multiple_of min_length max_length max_digits decimal_places".split())
_ONE_SCHEMA: Final = ("items", "additionalProperties", "propertyNames", "not")
_MANY_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS: Final = ("properties", "$defs", "patternProperties")
# Formats that Pydantic writes for types whose validators ask for more than text, and that no schema enforces.
_CHECKED_FORMATS: Final = frozenset(
    (
        *("base64", "base64url", "directory-path", "file-path", "json-string", "multi-host-uri", "name-email", "regex"),
        *("ipv4interface", "ipv4network", "ipv6interface", "ipv6network", "ulid"),
        *("ipvanyaddress", "ipvanyinterface", "ipvanynetwork"),
    )
)
_REFUSED: Final = "x-refused"  # in the place of a part that has no schema: what it is
_URL: Final = "x-url"  # a mark of ours on the schema of one
# Pydantic reads the part behind T as seconds below 2**32, and a timedelta has fewer than 10**9 days.
_TIMES: Final = r"T(?:\d{1,6}H(?:\d{1,6}M(?:\d{1,8}S)?)?|\d{1,7}M(?:\d{1,8}S)?|\d{1,9}S)"
_DURATION: Final = rf"^P(?:\d{{1,6}}Y(?:\d{{1,4}}M(?:\d{{1,4}}D)?)?|\d{{1,6}}D|\d{{1,6}}W)(?:{_TIMES})?$|^P{_TIMES}$"
_UUID: Final = "^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
_HOST: Final = r"(?:[a-z0-9]{1,20}\.){0,4}[a-z]{1,20}(?::[1-9]\d{0,3})?"  # a last label of digits would be an address
_PATH: Final = r"(?:/[A-Za-z0-9._~-]+)*/?(?:\?[A-Za-z0-9._~=&-]*)?(?:#[A-Za-z0-9._~-]*)?"
_WHOLE_KEY: Final = r"^(?:0|-?[1-9]\d{0,17})$"
_SECONDS: Final = 0.1  # of processor time to read a schema in; one that takes longer is judged where it is compiled
_DIGITS: Final = 15  # of a Decimal with so many places, at most
_LARGEST: Final = 10**15  # of a Decimal: bounds also keep exponents out, which may be too large for any number


def schema_of(dtype: object, name: str, refusal: ConstraintError) -> str:
    """The schema of a type as text. `name` is what errors call it.

    Raises:
        ConstraintError: a part of it has no schema that says all its validator asks for, or one that no mask holds or
            no value satisfies, and which; or `refusal`, where Pydantic does not know the type at all.
    """
    from pydantic import TypeAdapter  # heavy: only programs with composed types load it
    from pydantic.errors import PydanticUserError
    from pydantic_core import SchemaError

    if isinstance(dtype, str):
        raise refusal
    try:
        adapter: TypeAdapter[object] = TypeAdapter(dtype)  # type: ignore[arg-type]  # a type, known only at run time
        schema = adapter.json_schema(schema_generator=_generator())
    except (SchemaError, ImportError) as error:  # a pattern that its regexes do not know, a package that it lacks
        raise ConstraintError(
            f"dtype {name}: Pydantic has no validator for it: {str(error).split(chr(10))[-1]}"
        ) from error
    # The last three are how Pydantic stumbles over parts that are no types: a dict, an object, a Literal of nothing.
    except (PydanticUserError, NameError, TypeError, KeyError, AttributeError, AssertionError) as error:
        if isinstance(error, PydanticUserError) and error.code == "typed-dict-version":
            raise ConstraintError(
                f"dtype {name}: before Python 3.12 Pydantic reads no TypedDict but that of typing_extensions; write "
                "from typing_extensions import TypedDict"
            ) from error
        raise refusal from error
    if not schema:  # Any, object: a value of it could be anything
        raise refusal
    _close(schema, name)
    text = json.dumps(schema, ensure_ascii=False)
    _check(text, name)
    return text


@lru_cache(maxsize=1024)
def _check(schema: str, name: str) -> None:
    """Raises ConstraintError where no mask holds the schema, or no value satisfies it; names the field."""
    refusal = _refusal(schema)
    if refusal is None:
        return
    message = str(refusal)
    if message.startswith("schema at /"):
        pointer = message.removeprefix("schema at ").split(": ", 1)[0]
        where = "".join(_named(pointer.split("/")[1:]))
    else:
        root = json.loads(schema)
        where = _without_values(root, root, ())
    raise ConstraintError(f"dtype {name}{where}: {message}") from refusal


def _refusal(schema: str) -> ConstraintError | None:
    from niwaki.runtime.constraints.schema import TookTooLong, normalise  # heavy: loads what reads patterns

    with suppress(TookTooLong):
        try:
            normalise(schema, _SECONDS)
        except ConstraintError as refusal:
            return refusal
    return None


def _named(steps: list[str]) -> Iterator[str]:
    """The classes and fields that a JSON pointer leads through, as errors name them."""
    at = iter(steps)
    for step in at:
        name = next(at, "").replace("~1", "/").replace("~0", "~") if step in ("properties", "$defs") else ""
        if name:
            yield f", field {name!r}" if step == "properties" else f", {name}"


def _without_values(part: Mapping[str, object], root: Mapping[str, object], seen: tuple[str, ...]) -> str:
    """The innermost field that no value satisfies, as errors name it; "" where it is none alone."""
    definitions = root.get("$defs", {})
    reference = str(part.get("$ref", "")).removeprefix("#/$defs/")
    if reference in seen:
        return ""
    if reference and isinstance(definitions, dict):
        part, seen = definitions.get(reference, {}), (*seen, reference)
    fields = part.get("properties")
    for key, field in fields.items() if isinstance(fields, dict) else ():
        if isinstance(field, dict) and _refusal(json.dumps({**field, "$defs": definitions})) is not None:
            return f", field {key!r}" + _without_values(field, root, seen)
    return ""


def _close(schema: object, where: str) -> None:
    """In place: no keys but the fields, and a field with a default is written like the others.

    Raises:
        ConstraintError: a validator asks for more than the schema says.
    """
    if not isinstance(schema, dict):
        return
    limits = sorted(schema.keys() & _NO_KEYWORDS)
    if limits:
        raise ConstraintError(
            f"dtype {where}: the limit {limits[0]} cannot be enforced exactly; take it out and check the value"
        )
    wanted = schema.get("format")
    what = schema.get(_REFUSED, wanted if wanted in _CHECKED_FORMATS else None)
    if what is not None:
        raise ConstraintError(f"dtype {where}: {what} cannot be enforced; use a type that a JSON schema describes")
    if isinstance(wanted, str) and wanted[:4] == "uuid" and wanted[4:].isdigit():
        schema["pattern"] = _UUID.format(version=wanted[4:])
    if schema.pop(_URL, False) and "maxLength" in schema:
        schema["maxLength"] -= 1  # the validator counts the / that it writes behind a host alone
    properties = schema.get("properties")
    if schema.get("type") == "object" and isinstance(properties, dict):
        schema.setdefault("additionalProperties", False)
        required = schema.get("required", [])
        written = [key for key, field in properties.items() if key in required or "default" in field]
        if written:
            schema["required"] = written
    elif "patternProperties" in schema:
        schema.setdefault("additionalProperties", False)
    for keyword in _ONE_SCHEMA:
        _close(schema.get(keyword), where)
    for keyword in _MANY_SCHEMAS:
        for branch in schema.get(keyword, ()):
            _close(branch, where)
    for keyword in _NAMED_SCHEMAS:
        for key, inner in schema.get(keyword, {}).items():
            names = {"properties": f", field {key!r}", "$defs": f", {key}"}
            _close(inner, where + names.get(keyword, ""))


def _generator() -> type[GenerateJsonSchema]:
    """Pydantic's writer of schemas, which here says all that its validators ask for, or marks what cannot be said."""
    from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

    def refused(what: str) -> JsonSchemaValue:
        return {_REFUSED: what}

    def with_keys(written: JsonSchemaValue, keys: core_schema.CoreSchema | None) -> JsonSchemaValue:
        match keys:
            case None:
                return written
            case {"type": "int"} if not keys.keys() & _NO_KEYWORDS:
                return {**written, "propertyNames": {"pattern": _WHOLE_KEY}}
            case {"type": "literal", "expected": list(values)} if all(isinstance(one, str) for one in values):
                return written
            case {"type": "enum", "members": list(members)} if all(isinstance(one.value, str) for one in members):
                return written
            case {"type": "any" | "str" | "date" | "datetime" | "time" | "timedelta" | "uuid"}:
                return written
        return refused(f"a dict with such keys ({keys['type']})")

    class Exact(GenerateJsonSchema):
        def handle_invalid_for_json_schema(self, schema: core_schema.CoreSchema, error_info: str) -> JsonSchemaValue:
            kind = schema.get("cls", schema["type"])
            return refused(kind.__name__ if isinstance(kind, type) else str(kind))

        def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
            return with_keys(super().dict_schema(schema), schema.get("keys_schema"))

        def ordered_dict_schema(self, schema: core_schema.OrderedDictSchema) -> JsonSchemaValue:
            return with_keys(super().ordered_dict_schema(schema), schema.get("keys_schema"))

        def counter_schema(self, schema: core_schema.CounterSchema) -> JsonSchemaValue:
            return with_keys(super().counter_schema(schema), schema.get("keys_schema"))

        def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
            if schema.keys() & _NO_KEYWORDS:
                return refused("a limit on timedelta")
            return {"type": "string", "pattern": _DURATION}

        def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
            # Of a plain Enum the validator takes the member itself, which no JSON is.
            if any(isinstance(one, Enum) and not isinstance(one, str | int) for one in schema["expected"]):
                return refused("a Literal of an Enum's members (one of its own values can be: give the Enum)")
            return super().literal_schema(schema)

        def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
            if "max_length" in schema:
                return refused("max_length of bytes, which a text may pass by having fewer characters")
            is_coded = self._config.val_json_bytes != "utf8"
            return refused("bytes in base64 or hex") if is_coded else super().bytes_schema(schema)

        def date_schema(self, schema: core_schema.DateSchema) -> JsonSchemaValue:
            is_limited = schema.keys() & _NO_KEYWORDS or "now_op" in schema
            return refused("a limit on date") if is_limited else super().date_schema(schema)

        def time_schema(self, schema: core_schema.TimeSchema) -> JsonSchemaValue:
            is_limited = schema.keys() & _NO_KEYWORDS or "tz_constraint" in schema
            return refused("a limit on time") if is_limited else super().time_schema(schema)

        def datetime_schema(self, schema: core_schema.DatetimeSchema) -> JsonSchemaValue:
            # The format has a time zone always.
            is_limited = schema.keys() & _NO_KEYWORDS or "now_op" in schema or schema.get("tz_constraint") == "naive"
            return refused("a limit on datetime") if is_limited else super().datetime_schema(schema)

        def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
            if "multiple_of" in schema:
                return refused("multiple_of on Decimal")
            digits, places = schema.get("max_digits", _DIGITS), schema.get("decimal_places")
            if places is None and "max_digits" in schema:
                return refused("max_digits without decimal_places (give both)")
            if places is not None and not 0 <= places < min(digits, _DIGITS):  # 0.5 has a digit before the point
                return refused(f"decimal_places={places} of {digits} digits")
            named = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
            bounds = {named[key]: float(str(value)) for key, value in schema.items() if key in named}
            if not bounds.keys() & {"minimum", "exclusiveMinimum"}:
                bounds["minimum"] = -_LARGEST
            if not bounds.keys() & {"maximum", "exclusiveMaximum"}:
                bounds["maximum"] = _LARGEST
            if places is None:
                return {"type": "number", **bounds}
            # What has as many digits in all as a double can hold is read as it was written.
            largest = 10.0 ** (min(digits, _DIGITS) - places)
            within = {"exclusiveMinimum": -largest, "exclusiveMaximum": largest, "multipleOf": 10.0**-places}
            return {"type": "number", "allOf": [within], **bounds}

        def complex_schema(self, schema: core_schema.ComplexSchema) -> JsonSchemaValue:
            return refused("complex")

        def fraction_schema(self, schema: core_schema.FractionSchema) -> JsonSchemaValue:
            return refused("Fraction")

        def json_schema(self, schema: core_schema.JsonSchema) -> JsonSchemaValue:
            return refused("Json")

        def url_schema(self, schema: core_schema.UrlSchema) -> JsonSchemaValue:
            schemes = "|".join(schema.get("allowed_schemes") or ["https", "http"])
            limit = {"maxLength": schema["max_length"]} if "max_length" in schema else {}
            return {"type": "string", "pattern": f"^(?:{schemes})://{_HOST}{_PATH}$", _URL: True, **limit}

        def multi_host_url_schema(self, schema: core_schema.MultiHostUrlSchema) -> JsonSchemaValue:
            return refused("a URL of several hosts")

    return Exact
