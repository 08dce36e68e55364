"""The formats of JSON Schema 2020-12 (validation 7.3) that are enforced, as patterns.

RFC 3339 (dates and times; no leap seconds and no year 0, which no type of Python holds), 5321 and 6531 (mailboxes),
1123 (host names), 2673 and 4291 (addresses), 3986 and 3987 (URIs and IRIs), 6570, 4122, 6901.
"""

from __future__ import annotations

from typing import Final

# -- dates and times
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DAYS = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_DURATION = rf"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|\d+W)"

# -- hosts
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST = rf"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = (
    "(?:"
    + "|".join(
        [rf"(?:{_GROUP}:){{6}}{_LAST}"]
        + [
            rf"(?:(?:{_GROUP}:){{0,{before - 1}}}{_GROUP})?::(?:{_GROUP}:){{{5 - before}}}{_LAST}"
            for before in range(1, 6)
        ]
        + [rf"::(?:{_GROUP}:){{5}}{_LAST}"]
        + [rf"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}", rf"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::"]
    )
    + ")"
)

# -- mailboxes
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]"
_WIDE = r"\xA0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF\U00010000-\U0010FFFD"
_WIDE_ATOM = _ATOM[:-1] + _WIDE + "]"
_WIDE_LABEL = rf"[A-Za-z0-9{_WIDE}](?:[A-Za-z0-9{_WIDE}-]{{0,61}}[A-Za-z0-9{_WIDE}])?"


def _mailbox(atom: str, label: str, wide: str) -> str:
    quoted = rf'"(?:[ !#-\[\]-~{wide}]|\\[ -~])*"'
    domain = rf"(?:{label}(?:\.{label})*|\[(?:{_IPV4}|IPv6:{_IPV6})\])"
    return rf"^(?:{atom}+(?:\.{atom}+)*|{quoted})@{domain}$"


# -- URIs
_PCT = "%[0-9A-Fa-f]{2}"


def _uri(wide: str, *, is_absolute: bool) -> str:
    """RFC 3986, appendix A; `wide` are the characters that IRIs have beyond it (RFC 3987, 2.2)."""
    plain = rf"A-Za-z0-9._~{wide}!$&'()*+,;=\-"
    character = rf"(?:[{plain}:@]|{_PCT})"
    segments = rf"(?:/{character}*)*"
    host = rf"(?:\[(?:{_IPV6}|[Vv][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]|(?:[{plain}]|{_PCT})*)"
    authority = rf"//(?:(?:[{plain}:]|{_PCT})*@)?{host}(?::\d*)?{segments}"
    tail = rf"(?:\?(?:{character}|[/?])*)?(?:#(?:{character}|[/?])*)?"
    rooted = rf"/(?:{character}+{segments})?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}|{rooted}|(?:{character}+{segments})?)"
    if is_absolute:
        return rf"^{absolute}{tail}$"
    relative = rf"(?:{authority}|{rooted}|(?:(?:[{plain}@]|{_PCT})+{segments})?)"
    return rf"^(?:{absolute}|{relative}){tail}$"


_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_VARIABLE = rf"(?:[A-Za-z0-9_]|{_PCT})(?:\.?(?:[A-Za-z0-9_]|{_PCT}))*(?::[1-9]\d{{0,3}}|\*)?"

FORMAT_PATTERNS: Final = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}[Tt]{_TIME}$",
    "duration": rf"^{_DURATION}$",
    "hostname": rf"^(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*$",
    "ipv4": rf"^{_IPV4}$",
    "ipv6": rf"^{_IPV6}$",
    "email": _mailbox(_ATOM, _LABEL, ""),
    "idn-email": _mailbox(_WIDE_ATOM, _WIDE_LABEL, _WIDE),
    "uuid": r"^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}$",
    "uri": _uri("", is_absolute=True),
    "uri-reference": _uri("", is_absolute=False),
    "iri": _uri(_WIDE, is_absolute=True),
    "iri-reference": _uri(_WIDE, is_absolute=False),
    "uri-template": rf"^(?:[!#$&-;=?-\[\]_a-z~{_WIDE}]|{_PCT}|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
    "json-pointer": rf"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
KNOWN_FORMATS: Final = frozenset(FORMAT_PATTERNS)
