"""`niwaki constraint show`: what a schema or a regex in a file allows, every refusal, and the drawing."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from niwaki.__main__ import main

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]+$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2},
        "age": {"type": "integer", "minimum": 18},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def printed(capsys: pytest.CaptureFixture[str], path: Path, text: str, *options: str) -> tuple[int, str, str]:
    path.write_text(text, "utf-8")
    code = main(["constraint", "show", str(path), *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_control_c_ends_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("niwaki.runtime.constraints.show.show", interrupted)
    assert printed(capsys, tmp_path / "a.txt", "a") == (130, "", "niwaki: interrupted\n")


def test_a_schema_is_shown_with_its_normal_form_and_valid_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = printed(capsys, tmp_path / "person.json", json.dumps(SCHEMA))
    assert code == 0
    body, _, rest = out.partition("Shortest instance: ")
    assert json.loads(body.partition("\n")[2])["properties"]["age"] == {"type": "integer", "minimum": 18}
    shortest, fuller = rest.splitlines()[0], rest.splitlines()[1].partition("{")
    validator = Draft202012Validator(SCHEMA)
    assert validator.is_valid(json.loads(shortest))
    assert validator.is_valid(full := json.loads("{" + fuller[2]))
    assert full.keys() == {"name", "tags", "age"}
    assert "rules" in rest.splitlines()[2]


def test_every_refused_keyword_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"properties": {"a": {"type": "text"}, "b": {"$ref": "other.json"}, "c": {"minLength": -1}}}
    code, out, _ = printed(capsys, tmp_path / "bad.json", json.dumps(schema))
    assert code == 1
    for pointer in ("/properties/a/type", "/properties/b/$ref", "/properties/c/minLength"):
        assert f"schema at {pointer}: " in out


def test_a_regex_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "regex.svg"
    code, out, _ = printed(capsys, tmp_path / "date.txt", "(red|blue)[0-9]{2}\n", "--svg", str(picture))
    assert code == 0
    assert "Shortest text: 'red00'" in out
    assert "Automaton over characters: 9 states, 9 edges" in out
    labels = [
        element.text for element in ET.fromstring(picture.read_text("utf-8")).iter() if element.tag.endswith("text")
    ]
    assert labels.count("0-9") == 2
    assert {"r", "b", "0", "8"} <= set(labels)
    code, out, _ = printed(capsys, tmp_path / "few.txt", "yes|no")
    assert "All 2 texts: 'no', 'yes'" in out
    code, out, _ = printed(capsys, tmp_path / "one.txt", "yes")
    assert "Its only text: 'yes'" in out
    code, out, _ = printed(capsys, tmp_path / "letter.txt", "y")
    assert "Automaton over characters: 2 states, 1 edge\n" in out


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("x.txt", ".{0,100000}x", "too large: about 700002 states"),
        ("x.txt", "(a|b)*a(a|b){20}", "too complex to compile within 1 s"),
        ("x.txt", "a(?=b)c", "matches no text"),
        (
            "x.json",
            '{"type": "integer", "multipleOf": 123456788999987}',
            "multipleOf 123456788999987 cannot be enforced exactly",
        ),
    ],
)
def test_what_an_engine_refuses_is_not_shown_as_enforced(
    name: str, text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = printed(capsys, tmp_path / name, text)
    assert code == 1
    assert "that is refused" in out
    assert reason in out


@pytest.mark.parametrize(
    "regex",
    [
        "(a|b)*abb",
        "(a|b)?abb(c[0-9])*x{0,3}",
        "(ab?){9}",
        "(?:ab|c){1,3}[0-9]?-x*",
        "(red|green|blue)( [a-z]+){1,3}[.]",
    ],
)
def test_no_two_signs_of_a_drawing_lie_on_each_other_or_outside(
    regex: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Edges back and over several states lead further out; edges that cross have their signs beside the crossing."""
    picture = tmp_path / "regex.svg"
    printed(capsys, tmp_path / "regex.txt", regex, "--svg", str(picture))
    root = ET.fromstring(picture.read_text("utf-8"))
    x, y, width, height = map(float, root.attrib["viewBox"].split())
    places = [(float(e.attrib["x"]), float(e.attrib["y"])) for e in root.iter() if e.tag.endswith("text")]
    for number, (left, base) in enumerate(places):
        assert x + 8 < left < x + width - 8
        assert y + 12 < base < y + height
        for other_left, other_base in places[:number]:
            assert abs(left - other_left) > 8 or abs(base - other_base) > 8
    rings = [(float(e.attrib["cx"]), float(e.attrib["cy"])) for e in root.iter() if e.tag.endswith("circle")]
    for e in root.iter():
        if e.tag.endswith("path") and "Q" in e.attrib["d"]:
            ends = [tuple(map(float, point.split())) for point in re.split("[MQ]", e.attrib["d"])[1:]]
            (x, y), (a, b, u, v) = ends
            for step in (number / 20 for number in range(1, 20)):
                p, q, r = (1 - step) ** 2, 2 * step * (1 - step), step**2
                at = p * x + q * a + r * u, p * y + q * b + r * v
                assert all(math.dist(at, ring) > 21 for ring in rings), "through a state"


@pytest.mark.parametrize(
    ("text", "code", "lines"),
    [
        ('root ::= "yes" | "no"', 0, ["A grammar in EBNF, enforced."]),
        ("# a list\nroot ::= item+\nitem ::= [0-9]", 0, ["A grammar in EBNF, enforced."]),
        (
            "root ::= foo",
            1,
            ["A grammar in EBNF that is refused:", "  the ebnf grammar is not valid in line 1: there is no rule 'foo'"],
        ),
        ('start: NUM ("," NUM)*\nNUM: /[0-9]+/', 0, ["A grammar in Lark's syntax, enforced."]),
        (
            "start: foo",
            1,
            [
                "A grammar in Lark's syntax that is refused:",
                '  the grammar cannot be enforced: in line 1 at 8: unknown name: "foo"',
            ],
        ),
    ],
)
def test_a_grammar_is_compiled_and_no_line_of_it_is_taken_for_a_regex(
    text: str, code: int, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, _ = printed(capsys, tmp_path / "g.txt", text)
    assert (found, out.splitlines()) == (code, lines)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.json", '{"type": ', "is neither a JSON schema"),
        ("x.json", "[1, 2]", "a schema is an object or a boolean"),
        ("x.txt", "one\ntwo", "is neither a JSON schema"),
        ("x.txt", "", "is neither a JSON schema"),
    ],
)
def test_a_file_that_is_neither_is_an_error(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = printed(capsys, tmp_path / name, text)
    assert code == 1
    assert message in err


def test_what_cannot_be_read_or_drawn_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "raw").write_bytes(b"\xff\xfe")
    assert main(["constraint", "show", str(tmp_path / "raw")]) == 1
    assert main(["constraint", "show", str(tmp_path / "none")]) == 1
    code, _, err = printed(capsys, tmp_path / "s.json", json.dumps(SCHEMA), "--svg", str(tmp_path / "s.svg"))
    assert code == 1
    assert "no small automaton" in err
    assert not (tmp_path / "s.svg").exists()
