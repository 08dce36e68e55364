"""The formats of JSON Schema 2020-12 (validation 7.3) that are enforced: by the engine, or by a pattern of our own."""

from __future__ import annotations

from typing import Final

ENGINE_FORMATS: Final = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()  # llguidance's own
)
_PCT = "%[0-9A-Fa-f]{2}"
_SEGMENT = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PCT})*"
_TAIL = rf"(?:\?(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_PCT})*)?(?:#(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_PCT})*)?"
_FIRST = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_PCT})+"  # of a relative path: no colon
_AUTHORITY = rf"//(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PCT})*"

# Formats that the engine lacks, as patterns (RFC 3986, RFC 6901, the relative JSON pointer draft).
FORMAT_PATTERNS: Final = {
    "uri-reference": (
        rf"^(?:(?:[A-Za-z][A-Za-z0-9+.-]*:)?{_AUTHORITY}(?:/{_SEGMENT})*"
        rf"|(?:[A-Za-z][A-Za-z0-9+.-]*:)?/(?:{_FIRST.replace('=@', '=:@')}(?:/{_SEGMENT})*)?"
        rf"|(?:{_FIRST}(?:/{_SEGMENT})*)?|[A-Za-z][A-Za-z0-9+.-]*:{_SEGMENT}(?:/{_SEGMENT})*){_TAIL}$"
    ),
    "json-pointer": r"^(?:/(?:[^/~]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~]|~[01])*)*)$",
}
KNOWN_FORMATS: Final = ENGINE_FORMATS | frozenset(FORMAT_PATTERNS)
