"""Word boundaries and looks behind in the patterns of schemas: what is taken matches by every dialect's words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary

VOCABULARY = Vocabulary([*(bytes([b]) for b in range(256)), None], {256})
URL = r"^https?:\/\/(www\.)?[-a-zA-Z0-9@:%._\+~#=]{1,256}\.[a-zA-Z0-9()]{1,6}\b([-a-zA-Z0-9()@:%_\+.~#?&//=]*)$"
TEXTS = [
    "", "foo", "a foo", "xfoo", "foo-", "éfoo", "foo é", "fooé", "http://a.b", "https://www.ab.com/x?y=1", "https://ab.c()",
    "https://ab.c(", "http://a.()", "a b", "a-b c", "no", "a no b", "know", "no way", "a.b", "ab", "ab,cd", "-1", "1-1",
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    yield compiler
    compiler.close()


def takes(matcher: Matcher, value: object) -> bool:
    try:
        for byte in json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode():
            matcher.accept(byte)
    except ConstraintError:
        return False
    return matcher.can_end


def found(pattern: str, text: str) -> bool:
    """By ASCII's words and by Unicode's."""
    return bool(re.search(pattern, text)) and bool(re.search(pattern, text, re.ASCII))


@pytest.mark.parametrize("pattern", [r"\bfoo\b", URL, r"^\w+\b.\b\w+$", r"(?:^|(?<=-))1", r"^(?:a|b(?<!x))"])
def test_a_pattern_is_found_in_just_what_every_dialect_finds_it_in(pattern: str, compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(JsonSchema(json.dumps({"type": "string", "pattern": pattern})))
    for text in TEXTS:
        assert takes(compiled.matcher(), text) == found(pattern, text), text


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "not": {"pattern": r"\bno\b"}}, "/not/pattern"),
        ({"type": "object", "patternProperties": {r"\bid": {}}}, r"/patternProperties/\\bid"),
        ({"type": "object", "not": {"propertyNames": {"pattern": r"a\B"}}}, "/not/propertyNames/pattern"),
        ({"type": "string", "pattern": r"^(?!.*\bno\b)"}, "/pattern"),
    ],
    ids=str,
)
def test_where_no_boundary_is_asked_for_dialects_differ_and_it_is_refused(
    schema: dict[str, object], place: str, compiler: ConstraintCompiler
) -> None:
    """A text such as "éno" has a boundary of ASCII's words and none of Unicode's."""
    with pytest.raises(ConstraintError, match=f"schema at {place}: "):
        compiler.compile(JsonSchema(json.dumps(schema)))


def test_a_backslash_before_a_b_is_no_boundary(compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(JsonSchema(json.dumps({"type": "string", "not": {"pattern": r"\\b"}})))
    assert takes(compiled.matcher(), "b")
    assert not takes(compiled.matcher(), "\\b")
