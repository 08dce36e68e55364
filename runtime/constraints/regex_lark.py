"""Terms of `regex_language` as terminals of a Lark grammar, in plain text or as it stands inside a JSON string."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from niwaki.runtime.constraints.regex_language import ANY_CHARACTER, Languages, Term, without
from niwaki.runtime.constraints.regex_tree import Ranges

# In JSON, RFC 8259 section 7: a quote, a backslash and what stands before the blank are escaped, each in one way here.
SHORT_ESCAPES: Final = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 0x22: '"', 0x5C: "\\"}
ESCAPED: Final[Ranges] = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
SURROGATES: Final[Ranges] = ((0xD800, 0xDFFF),)

Spelled = Callable[[Ranges], str]  # a set of characters -> a regex of what stands for one of them


def plain(ranges: Ranges) -> str:
    """One character as itself."""
    return f"[{''.join(map(_range, without(ranges, SURROGATES)))}]"


@lru_cache(maxsize=1024)
def in_json(ranges: Ranges) -> str:
    """One character as `json.dumps(..., ensure_ascii=False)` writes it inside a string."""
    ranges = without(ranges, SURROGATES)
    raw = without(ranges, ESCAPED)
    options = [f"[{''.join(map(_range, raw))}]"] if raw else []
    codes = [code for low, high in ESCAPED for code in range(low, high + 1) if any(a <= code <= b for a, b in ranges)]
    short = "".join(_literal(ord(SHORT_ESCAPES[code])) for code in codes if code in SHORT_ESCAPES)
    if short:
        options.append(rf"\\[{short}]")
    for row in (0, 1):
        digits = "".join(f"{code & 15:x}" for code in codes if code >> 4 == row and code not in SHORT_ESCAPES)
        if digits:
            options.append(rf"\\u00{row}[{digits}]")
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def terminal(languages: Languages, term: Term, spelled: Spelled) -> str:
    """The right side of a terminal that matches the texts of `term`."""
    return _Writer(languages, spelled).expression(term)


class _Writer:
    def __init__(self, languages: Languages, spelled: Spelled) -> None:
        self._languages = languages
        self._spelled = spelled

    def expression(self, term: Term) -> str:
        """Lark's own operators where there is an "and" or a "not", else one regex."""
        if term is self._languages.nothing:
            return "(/a/ & /b/)"
        if term is self._languages.empty:
            return '""'
        if term.is_plain:
            return f"/{self.regex(term)}/"
        match term.kind:
            case "all":
                return f"({' & '.join(map(self.expression, term.parts))})"
            case "not":
                anything = f"/{self._spelled(ANY_CHARACTER)}*/"
                return f"({anything} & ~{self._grouped(term.parts[0])})"
            case "any":
                return f"({' | '.join(map(self.expression, term.parts))})"
            case "sequence":
                return f"({' '.join(map(self.expression, term.parts))})"
            case _:
                high = "" if term.high is None else term.high
                return f"{self._grouped(term.parts[0])}{{{term.low},{high}}}"

    def _grouped(self, term: Term) -> str:
        return f"({self.expression(term)})"

    def regex(self, term: Term) -> str:
        match term.kind:
            case "chars":
                return self._spelled(term.ranges)
            case "sequence":
                return "".join(
                    self.regex(part) if part.kind == "sequence" else self._piece(part) for part in term.parts
                )
            case "any":
                options = [part for part in term.parts if part is not self._languages.empty]
                body = f"(?:{'|'.join(map(self.regex, options))})"
                return body if len(options) == len(term.parts) else f"{body}?"
            case _:
                high = "" if term.high is None else term.high
                bounds = {"0,": "*", "1,": "+", "0,1": "?"}.get(found := f"{term.low},{high}", f"{{{found}}}")
                return f"{self._piece(term.parts[0])}{bounds}"

    def _piece(self, term: Term) -> str:
        found = self.regex(term)
        return found if term.kind == "chars" or (term.kind == "any" and not found.endswith("?")) else f"(?:{found})"


def _range(ends: tuple[int, int]) -> str:
    low, high = ends
    return _literal(low) if low == high else f"{_literal(low)}-{_literal(high)}"


def _literal(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"
