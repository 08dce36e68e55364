"""What a program's results depend on beside its own source: told where it changed, and only there."""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import niwaki as nw
from niwaki.lang.batch import JournalError
from niwaki.lang.definitions import definitions_of
from niwaki.lang.program import Program
from niwaki.lang.state import State
from tests.counted_engine import make_folder, one_line, run

OTHER = """
from pydantic import BaseModel
class Item(BaseModel):
    amount: int
PROMPT = "of another file"
TEXT = "by its module"
"""
SOURCE = """
import datetime, enum, json, logging, re
from typing import Annotated, Literal
from pydantic import AfterValidator, BaseModel
import niwaki as nw
import niwaki_other
from niwaki_other import Item, PROMPT as THEIRS
HEAD = "head "
PROMPT = HEAD + "Extract {text}"
TODAY = str(datetime.datetime.now())
LABELS = ["a", "b"]
SCHEMA = json.loads('{"type": "object"}')
Label = Literal["a", "b", "c"]
PATTERN = re.compile("a+")
log = logging.getLogger("a")
seen, count = [], 0
text = "no argument"
class Inner(BaseModel):
    age: int
class Contact(BaseModel):
    inner: list[Inner]
    at: str = TODAY
class Kind(enum.Enum):
    BIG = "big"
def helper(x):
    return x + deeper(x)
def deeper(x):
    return x * 2
def checked(value):
    return value.strip()
Checked = Annotated[str, AfterValidator(checked)]
def unused():
    return 1
@nw.function
def part(s):
    s += "part"
@nw.function
def extract(s, text):
    global count
    count += 1
    seen.append(text)
    log.info("one")
    s += PROMPT.format(text=helper(text)) + TODAY + THEIRS + niwaki_other.TEXT
    s += nw.gen("contact", dtype=Contact) + nw.gen("kind", dtype=Kind) + nw.gen("label", dtype=Label)
    s += nw.gen("checked", dtype=Checked)
    s += nw.gen("items", dtype=list[Item]) + nw.select("x", choices=LABELS)
    s += nw.gen("json", json_schema=SCHEMA) + nw.gen("a", regex=PATTERN)
    part(s)
    forks = s.fork(2)
    forks += lambda i: text
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """A new module with that source. Files of another name each: Python remembers the lines of a file."""
    number = iter(range(1000))

    def loaded(source: str, other: str = OTHER) -> types.ModuleType:
        for name, code in (("niwaki_other", other), ("their_program", source)):
            path = tmp_path / f"file{next(number)}.py"
            path.write_text(code)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        return module

    return loaded


def changed(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    return sorted(name.removeprefix("definition of ") for name in {**one, **two} if one.get(name) != two.get(name))


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ('HEAD = "head "', 'HEAD = "Head "', ["HEAD"]),
        ('+ "Extract', '+ "Please extract', ["PROMPT"]),
        ('LABELS = ["a", "b"]', 'LABELS = ["a", "B"]', ["LABELS"]),
        ('{"type": "object"}', '{"type": "array"}', ["SCHEMA"]),
        ('Literal["a", "b", "c"]', 'Literal["a", "b"]', ["Label"]),
        ('compile("a+")', 'compile("a*")', ["PATTERN"]),
        ("age: int", "age: str", ["Contact"]),
        ('BIG = "big"', 'BIG = "Big"', ["Kind"]),
        ("x * 2", "x * 3", ["deeper"]),
        ('s += "part"', 's += "Part"', ["part"]),
        ("amount: int", "amount: float", ["Item"]),
        ('"of another file"', '"of a file"', ["THEIRS"]),
        ('"by its module"', '"by it"', ["niwaki_other.TEXT"]),
        ("value.strip()", "value", ["checked"]),
        ("return 1", "return 2", []),
        ('getLogger("a")', 'getLogger("b")', []),
        ("seen, count = [], 0", "seen, count = [], 0  # of all rows", []),
        ('"no argument"', '"none"', []),
    ],
)
def test_what_changed_is_told_by_its_name(
    load: Callable[..., types.ModuleType], before: str, after: str, told: list[str]
) -> None:
    assert (before in SOURCE) != (before in OTHER)
    one = definitions_of(load(SOURCE).extract.func)
    two = definitions_of(load(SOURCE.replace(before, after), OTHER.replace(before, after)).extract.func)
    assert changed(one, two) == told


def test_the_same_program_started_again_is_the_same_whatever_it_has_collected(
    load: Callable[..., types.ModuleType],
) -> None:
    first = load(SOURCE)
    one = definitions_of(first.extract.func)
    first.seen.append("a row")
    vars(first)["count"] = 7
    first.LABELS.append("late")
    assert definitions_of(first.extract.func) == one == definitions_of(load(SOURCE).extract.func)


prompt = "of this module, which a variable of a function hides"


def made_for(prompt: str) -> Program:
    @nw.function
    def ask(s: State, n: int) -> None:
        s += prompt + nw.gen("x")

    return ask


CONSTANTS = """
import niwaki as nw
ONE = "1"
TWO = ONE + "2"
THREE = "3"
@nw.function
def count(s):
    s += ONE + TWO + THREE
"""


def test_a_module_is_parsed_once_for_all_constants_and_again_where_it_has_changed(
    load: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[object] = []
    parse = ast.parse

    def counted(source: str, *options: object, **named: object) -> ast.AST:
        if "ONE = " in source:
            parsed.append(source)
        return parse(source, *options, **named)  # type: ignore[call-overload, no-any-return]  # as it was called

    monkeypatch.setattr(ast, "parse", counted)
    first = definitions_of(load(CONSTANTS).count.func)
    assert len(first) == 3
    assert len(parsed) == 1
    assert definitions_of(load(CONSTANTS).count.func) == first
    assert len(parsed) == 1
    assert changed(first, definitions_of(load(CONSTANTS.replace('"3"', '"4"')).count.func)) == ["THREE"]
    assert len(parsed) == 2


def test_a_batch_does_not_go_on_with_the_rows_of_another_prompt(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    backend = nw.ScriptedBackend(lambda prompt: "x")
    made_for("one").run_batch([(1,)], checkpoint=path, backend=backend)
    assert made_for("one").run_batch([(1,)], checkpoint=path, backend=backend) == [{"x": "x"}]
    with pytest.raises(JournalError, match=r"of another run \(other definition of prompt\)"):
        made_for("two").run_batch([(1,)], checkpoint=path, backend=backend)


def test_a_run_does_not_go_on_where_a_type_of_another_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path, monkeypatch)
    Path("in.txt").write_text("a\nb\n")
    program = "import niwaki as nw\nfrom niwaki_shapes import Shape\n\n@nw.function\ndef ask(s, text):\n"
    program += "    return Shape(name=text)\n"
    Path("program.py").write_text(program)
    shape = "from pydantic import BaseModel\n\nclass Shape(BaseModel):\n    name: str\n"
    Path("niwaki_shapes.py").write_text(shape)
    assert run("ask", "in.txt", "--limit", "1") == 0
    assert run("ask", "in.txt", "--limit", "1") == 0
    del sys.modules["niwaki_shapes"]
    # Of another length: within a second, Python would take the bytecode of the one before.
    Path("niwaki_shapes.py").write_text(shape + "    sides: int | None = None\n")
    capsys.readouterr()
    assert run("ask", "in.txt") == 1
    assert "1 row of another run (other definition of Shape)" in one_line(capsys.readouterr().err)
