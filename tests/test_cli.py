"""`niwaki run`: what comes out, and what goes wrong in one line.

The programs here set variables and generate nothing, so an engine that is only counted stands in for the real one.
Kills and the like are in test_cli_processes.py; the demo itself, on the real engine, is in test_examples.py.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
import time
import types
from datetime import date
from pathlib import Path

import pytest

import niwaki as nw
from niwaki import run_command
from niwaki.__main__ import _let_go, main
from niwaki.lang.program_file import load_program, parameters_of
from niwaki.lang.records import RecordFile
from tests.counted_engine import PROGRAM, CountedEngine, make_folder, one_line, rows, run
from tests.lang.shortening import Shortening

# What a program may say of its parameters; each run tells what came.
TYPED = """
from __future__ import annotations
import enum
from datetime import date
from typing import TYPE_CHECKING
import niwaki as nw
from pydantic import BaseModel

class Boss(BaseModel):
    name: str

class Color(enum.Enum):
    RED = "red"

class Odd:
    pass

@nw.function
def kinds(s, text: str, age: int, day: date, boss: Boss, tags: tuple[str, ...], color: Color, later: Odd = None,
          note: str = None) -> list:
    return [type(one).__name__ for one in (text, age, day, boss, tags, color)] + [later]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


# -- what comes out -------------------------------------------------------------------------------------------------


def test_each_record_becomes_one_line_in_input_order(folder: Path) -> None:
    texts = [f"text {index} {'slow' if index % 5 == 0 else ''}".strip() for index in range(60)]
    Path("in.txt").write_text("\n".join(texts))
    assert run("shout", "in.txt", "--concurrency", "8") == 0
    assert [row["loud"] for row in rows()] == [text.upper() for text in texts]


def test_the_report_tells_records_time_and_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("a\nb\nfail\n")
    assert run("shout", "in.txt") == 0
    report = capsys.readouterr().out
    assert "3 records in " in report
    assert "1 of them with an error (the first is record 2: ValueError: refused: fail" in report
    assert "1,000 prefilled, 3,000 cached, 500 generated; cache hit rate 75.0%" in report


def test_the_report_of_one_record_counts_no_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("fail\n")
    assert run("shout", "in.txt") == 1
    report = capsys.readouterr().out
    assert report.startswith("1 record in ")
    assert " a second), with an error (record 0: ValueError: refused: fail" in report


def test_the_report_names_the_first_rows_that_a_budget_shortened_and_how_to_find_all(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.counted_engine.ScriptedBackend", lambda _: Shortening(lambda prompt: prompt[-7:]))
    monkeypatch.setattr("niwaki.lang.calling._lines_told", set())
    texts = ['  ["cut"]' if index % 2 else '["whole"]' for index in range(16)]
    Path("in.txt").write_text("\n".join([*texts, "fail"]))
    assert run("listed", "in.txt", "--limit", "2", output="my out.jsonl") == 0
    assert (
        "max_tokens shortened values of 1 record (1): they are valid, and may not be whole" in capsys.readouterr().out
    )
    assert run("listed", "in.txt", output="my out.jsonl") == 0
    report = capsys.readouterr().out
    assert "max_tokens shortened values of 7 records (3, 5, 7, 9, 11 and 2 more): they are valid" in report
    (find,) = re.findall("grep .*", report)
    found = subprocess.run(shlex.split(find), capture_output=True, text=True, check=True).stdout.splitlines()
    assert [json.loads(line) for line in found] == [row for row in rows("my out.jsonl") if "shortened" in row]
    assert [json.loads(line)["index"] for line in found] == list(range(1, 16, 2)), "those of both runs"
    assert json.loads(found[0]) == {"index": 1, "shortened": ["words"], "words": ["cut"]}


def test_a_table_has_a_column_of_what_was_shortened(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.counted_engine.ScriptedBackend", lambda _: Shortening(lambda prompt: prompt[-7:]))
    monkeypatch.setattr("niwaki.lang.calling._lines_told", set())
    Path("in.txt").write_text('["cut"]\n["abc"]\n')
    assert run("listed", "in.txt", output="out.csv") == 0
    assert '(0): they are valid, and may not be whole; the column "shortened" names them' in capsys.readouterr().out
    with Path("out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["shortened"] for row in table] == ['["words"]', ""]
    assert run("listed", "in.txt", output="out.jsonl") == 0
    Path("in.txt").write_text('["abc"]\n')
    capsys.readouterr()
    assert run("listed", "in.txt", output="other.jsonl") == 0
    assert "shortened" not in capsys.readouterr().out + Path("other.jsonl").read_text()


def test_typed_values_are_written_as_json(folder: Path) -> None:
    Path("in.jsonl").write_text('{"name": "Zoë"}\n{"name": "Bo", "day": "2001-01-31"}\n')
    assert run("typed", "in.jsonl") == 0
    assert rows() == [
        {"index": 0, "person": {"name": "Zoë", "born": "2024-02-29"}, "color": "red"},
        {"index": 1, "person": {"name": "Bo", "born": "2001-01-31"}, "color": "red"},
    ]


def test_a_returned_model_gives_its_fields_and_a_returned_number_its_value(folder: Path) -> None:
    Path("in.txt").write_text("1.5\nnan\n")
    assert run("returning", "in.txt") == 0
    assert rows()[0] == {"index": 0, "name": "1.5", "born": None}
    assert run("number", "in.txt", output="numbers.jsonl") == 0
    first, second = rows("numbers.jsonl")
    assert first == {"index": 0, "value": 1.5}
    assert "error" in second  # JSON has no NaN


def test_csv_columns_are_parameters_and_one_may_be_picked(folder: Path) -> None:
    Path("in.csv").write_text('name,day\n"Ann, the first",2020-05-01\n')
    assert run("typed", "in.csv") == 0
    assert rows()[0]["person"] == {"name": "Ann, the first", "born": "2020-05-01"}
    assert run("shout", "in.csv", "--column", "name", output="picked.jsonl") == 0
    assert rows("picked.jsonl") == [{"index": 0, "loud": "ANN, THE FIRST"}]


def test_texts_are_the_numbers_and_bools_that_the_program_takes(folder: Path) -> None:
    Path("in.csv").write_text("name,age,weight,here,day\n7,30,1e2,true,5\n8,-4,,0,\nBo,old,1,no,5\nAl,1.5,1,yes,5\n")
    assert run("aged", "in.csv") == 0
    first, second, *refused = rows()
    assert (first["value"], second["value"]) == (["7", 30, 100.0, True, "5"], ["8", -4, None, False, ""])
    told = [row["error"] for row in refused]
    assert [error["type"] for error in told if isinstance(error, dict)] == ["RecordError"] * 2
    assert "'age' is 'old': Input should be a valid integer" in str(told[0])
    Path("in.jsonl").write_text('{"name": "Bo", "age": "3"}\n')
    assert run("aged", "in.jsonl", output="json.jsonl") == 1, "JSON has types of its own"
    assert rows("json.jsonl")[0]["error"] == {
        "type": "RecordError",
        "message": "'age' is '3': Input should be a valid integer",
    }


def test_json_values_are_of_the_types_that_the_program_says(folder: Path) -> None:
    Path("typed.py").write_text(TYPED)
    good = {"text": "hi", "age": 3.0, "day": "2024-02-29", "boss": {"name": "Ann"}, "tags": ["x"], "color": "red"}
    more: list[dict[str, object]] = [
        {}, {"note": None}, {"text": 5}, {"text": None}, {"age": "3"}, {"age": 3.5}, {"age": True}, {"day": "soon"},
        {"boss": {"name": 7}}, {"boss": {}}, {"tags": ["x", 1]}, {"color": "blue"}, {"later": [1, "any"]},
        {"tags": ["x" * 100] + [2]}, {"tags": "x" * 100},
    ]  # fmt: skip
    Path("in.jsonl").write_text("".join(json.dumps(good | one) + "\n" for one in more))
    assert main(["run", "typed.py:kinds", "--input", "in.jsonl", "--output", "out.jsonl"]) == 0
    told = [row.get("value") or row["error"]["message"] for row in rows()]  # type: ignore[index]
    kinds = ["str", "int", "date", "Boss", "tuple", "Color"]
    assert told == [
        [*kinds, None],
        [*kinds, None],
        "'text' is 5: Input should be a valid string",
        "'text' is None: Input should be a valid string",
        "'age' is '3': Input should be a valid integer",
        "'age' is 3.5: Input should be a valid integer",
        "'age' is True: Input should be a valid integer",
        "'day' is 'soon': Input should be a valid date in the format YYYY-MM-DD, input is too short",
        "'boss.name' is 7: Input should be a valid string",
        "'boss.name' is missing",
        "'tags.1' is 1: Input should be a valid string",
        "'color' is 'blue': Input should be 'red'",
        [*kinds, [1, "any"]],
        "'tags.1' is 2: Input should be a valid string",
        f"'tags' is '{'x' * 56}...: Input should be a valid array",
    ]


def test_workers_elsewhere_give_values_their_types(folder: Path) -> None:
    """As on Ray, without one: a line is what goes there."""
    Path("typed.py").write_text(TYPED)
    program = load_program(Path("typed.py"), "kinds")
    Path("in.jsonl").touch()
    to_parameters = parameters_of(program, RecordFile.open(Path("in.jsonl")))
    record = {"text": "hi", "age": 3, "day": date(2024, 2, 29), "boss": {"name": "Ann"}, "tags": ["x"], "color": "red"}
    assert json.loads(run_command._sent(record, to_parameters)) == {"arguments": record | {"day": "2024-02-29"}}
    assert "error" in json.loads(run_command._sent({"text": b"\xff"}, to_parameters)), "one row's own"
    worker = run_command.RowWorker("typed.py", "kinds", None, 2, texts=False, deterministic=False)
    sent = [run_command._sent(one, to_parameters) for one in (record, record | {"age": "old"})]
    first, second = map(json.loads, worker.run(sent))
    assert first["row"]["value"][:3] == ["str", "int", "date"]
    assert second["error"]["message"] == "'age' is 'old': Input should be a valid integer"


def test_a_trace_draws_the_first_records_on_one_page(folder: Path) -> None:
    (folder / "many.txt").write_text("".join(f"text {n}\n" for n in range(15)))
    assert run("shout", "many.txt", "--trace", "trace.html") == 0
    page = (folder / "trace.html").read_text("utf-8")
    assert page.count("<h1>shout</h1>") == 10
    assert all(f"TEXT {n}&#x27;" in page for n in range(10))


@pytest.mark.parametrize("trace", ["trace.txt", "nowhere/trace.html", "."])
def test_a_trace_that_cannot_be_written_is_refused_before_any_work(folder: Path, trace: str) -> None:
    (folder / "in.txt").write_text("a\n")
    assert run("shout", "in.txt", "--trace", trace) == 1
    assert not (folder / "out.jsonl").exists()


def test_a_csv_output_is_made_of_the_rows_when_they_are_done(folder: Path) -> None:
    (folder / "in.csv").write_text("text\nhi\nfail\nyo\n")
    assert run("shout", "in.csv", output="out.csv") == 0
    with (folder / "out.csv").open(newline="") as file:
        header, *table = csv.reader(file)
    assert header == ["index", "loud", "error"]
    assert [row[:2] for row in table] == [["0", "HI"], ["1", ""], ["2", "YO"]]
    assert json.loads(table[1][2])["type"] == "ValueError"
    assert [row["index"] for row in rows("out.csv.rows.jsonl")] == [0, 1, 2]
    (folder / "out.csv").unlink()
    assert run("shout", "in.csv", output="out.csv") == 0, "no row is run again, and the table is back"
    assert (folder / "out.csv").exists()


def test_a_limit_stops_early_and_the_rest_continues_without_it(folder: Path) -> None:
    Path("in.txt").write_text("a\nb\nc\nd\n")
    assert run("shout", "in.txt", "--limit", "2") == 0
    assert len(rows()) == 2
    assert run("shout", "in.txt") == 0
    assert [row["loud"] for row in rows()] == ["A", "B", "C", "D"]


def test_a_finished_run_has_nothing_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("a\nb\n")
    assert run("shout", "in.txt") == 0
    before = Path("out.jsonl").stat()
    capsys.readouterr()
    assert run("shout", "in.txt") == 0
    assert "nothing to do: out.jsonl has all 2 records" in capsys.readouterr().out
    assert Path("out.jsonl").stat().st_mtime_ns == before.st_mtime_ns


def test_an_empty_input_gives_an_empty_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("a\n")
    assert run("shout", "in.txt") == 0
    Path("in.txt").write_text("")
    assert run("shout", "in.txt", "--restart") == 0
    assert rows() == []
    assert "nothing to do: in.txt holds no record\n" in capsys.readouterr().out


# -- records that fail ----------------------------------------------------------------------------------------------


def test_a_bad_record_is_an_error_line_and_the_others_go_on(folder: Path) -> None:
    Path("in.txt").write_bytes(b"one\n\ncaf\xe9\n" + b"x" * 1_000_000 + b"\nplease fail\nlast\n")
    assert run("shout", "in.txt") == 0
    found = rows()
    assert (found[0]["loud"], found[5]["loud"]) == ("ONE", "LAST")
    errors = [row["error"] for row in found[1:5]]
    assert errors[0] == {"type": "RecordError", "message": "line 2 of in.txt is empty"}
    assert errors[1] == {"type": "RecordError", "message": "line 3 of in.txt is not valid UTF-8 at byte 3"}
    raised = 'raise CapacityError(f"{len(text)} characters do not fit")'
    assert errors[2] == raised_in_shout("CapacityError", "1000000 characters do not fit", raised)
    assert errors[3] == raised_in_shout("ValueError", "refused: please fail", 'raise ValueError("refused:\\n" + text)')


def raised_in_shout(kind: str, message: str, code: str) -> dict[str, str]:
    line = [each.strip() for each in PROGRAM.splitlines()].index(code) + 1
    return {"type": kind, "message": f"{message} (in program shout, program.py:{line}: {code})"}


def test_a_half_line_of_json_is_told_with_its_place(folder: Path) -> None:
    Path("in.jsonl").write_text('{"name": "a"}\n{"name": "b\n')
    assert run("typed", "in.jsonl") == 0
    message = "line 2 of in.jsonl is not valid JSON: Unterminated string starting at character 9"
    assert rows()[1]["error"] == {"type": "RecordError", "message": message}


def test_strict_turns_a_failed_record_into_a_failed_run(folder: Path) -> None:
    Path("in.txt").write_text("a\nfail\n")
    assert run("shout", "in.txt", "--strict") == 1
    assert len(rows()) == 2


def test_a_run_in_which_every_record_failed_has_failed(folder: Path) -> None:
    Path("in.txt").write_text("fail\nfail\n")
    assert run("shout", "in.txt") == 1


def test_a_variable_that_the_output_line_needs_is_an_error(folder: Path) -> None:
    Path("in.txt").write_text("a\n")
    assert run("reserved", "in.txt") == 1
    assert "has its own 'index'" in json.dumps(rows()[0]["error"])


def test_a_value_that_is_no_json_is_told_by_its_name(folder: Path) -> None:
    Path("in.txt").write_text("1\nnan\n")
    assert run("number", "in.txt") == 0
    assert rows()[1]["error"] == {"type": "ValueError", "message": "'value' is no JSON that others read: nan"}


def test_json_lines_with_a_strange_key_fail_alone(folder: Path) -> None:
    Path("in.jsonl").write_text('{"name": "a"}\n{"nam": "b"}\n{"name": "c"}\n')
    assert run("typed", "in.jsonl") == 0
    first, second, third = rows()
    assert "person" in first
    assert "person" in third
    assert "nam" in json.dumps(second["error"])


# -- runs that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["program.py:shout", "--input", "gone.txt"], 1, "niwaki: gone.txt: No such file or directory"),
        (["program.py:shout", "--input", "."], 1, "unknown kind of input"),
        (["program.py:shout", "--input", "in.pdf"], 1, "unknown kind of input"),
        (["program.py:missing", "--input", "in.txt"], 1, "missing is not defined in program.py; programs there: shout"),
        (["program.py:not_a_program", "--input", "in.txt"], 1, "not_a_program is not a program"),
        (["program.py:two", "--input", "in.txt"], 1, "must have one parameter for the text"),
        (
            ["program.py:shout", "--input", "in.csv"],
            1,
            "in.csv has a column 'name', and program shout(s, text) has no such parameter; rename it",
        ),
        (
            ["program.py:aged", "--input", "one.csv"],
            1,
            "and program aged(s, name, age, weight=None, *, here=False, day=0)",
        ),
        (["program.py:shout", "--input", "parted.csv"], 1, "the fields of a .csv stand between commas"),
        (
            ["program.py:two", "--input", "one.csv"],
            1,
            "one.csv has no column 'other', which program two(s, text, other) needs; it has text",
        ),
        (["gone.py:shout", "--input", "in.txt"], 1, "no program file gone.py"),
        (["program:shout", "--input", "in.txt"], 1, "no program file program; did you mean program.py:shout?"),
        ([".:shout", "--input", "in.txt"], 1, "no program file ."),
        (["broken.py:shout", "--input", "in.txt"], 1, "broken.py does not import: ZeroDivisionError: division by zero"),
        (["syntax.py:shout", "--input", "in.txt"], 1, "syntax.py does not import: SyntaxError"),
        (["exits.py:shout", "--input", "in.txt"], 1, "exits.py does not import: SystemExit: 7"),
        (["program.py:shout", "--input", "in.txt", "--model", "nowhere"], 1, "model folder nowhere does not exist"),
        (
            ["program.py:shout", "--input", "in.txt", "--model", "Qwen/Qwen3-0.6B"],
            1,
            "hf download Qwen/Qwen3-0.6B --local-dir",
        ),
        (["program.py:shout", "--input", "in.txt", "--model", "half"], 1, "half has no weights"),
        (
            ["program.py:shout", "--input", "in.txt", "--output", "no/folder/out.jsonl"],
            1,
            "niwaki: no/folder/out.jsonl: there is no folder no/",
        ),
        (
            ["program.py:shout", "--input", "in.txt", "--output", "out.pdf"],
            1,
            "out.pdf: unknown kind of output; name it",
        ),
        (["program.py", "--input", "in.txt"], 2, "'program.py' is not FILE.py:FUNCTION"),
    ],
)
def test_a_run_that_cannot_start_says_why_in_one_line_and_leaves_no_output(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    Path("in.txt").write_text("a\n")
    Path("in.csv").write_text("name\nAda\n")
    Path("parted.csv").write_text("name;city\nAda;London\n")
    Path("one.csv").write_text("text\nx\n")
    Path("in.pdf").write_text("a")
    Path("broken.py").write_text("x = 1\ny = x / 0\n")
    Path("syntax.py").write_text("def f(:\n")
    Path("exits.py").write_text("raise SystemExit(7)\n")
    Path("half").mkdir()
    Path("half/config.json").write_text("{}")
    if "--output" not in arguments:
        arguments = [*arguments, "--output", "out.jsonl"]
    try:
        got = main(["run", *arguments])
    except SystemExit as stop:
        got = int(str(stop.code))
    assert got == code
    assert says in one_line(capsys.readouterr().err)
    assert not Path(arguments[arguments.index("--output") + 1]).exists()


@pytest.mark.parametrize("output", [".", "/", "sub"])
def test_an_output_that_is_a_folder_is_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    Path("in.txt").write_text("a\n")
    Path("sub").mkdir()
    assert main(["run", "program.py:shout", "--input", "in.txt", "--output", output]) == 1
    assert f"the output {output} is a folder; name a file in it" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--prot", "3"], "niwaki serve: error: unrecognized arguments: --prot 3; did you mean --port?"),
        (["serve", "--served-model-name=x"], "did you mean --model-name?"),
        (["run", "p.py:f", "--input", "a", "--output", "b", "--concurency", "2"], "did you mean --concurrency?"),
        (["serve", "--lora", "x"], "niwaki serve: error: unrecognized arguments: --lora x\n"),
        (["tree", "--zzz"], "niwaki tree: error: unrecognized arguments: --zzz\n"),
    ],
)
def test_a_wrong_option_is_told_by_its_command_with_the_one_that_is_like_it(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["run", "p.py:f", "--input", "a.txt"],
        ["run", "p.py:f", "--input", "a", "--output", "b", "--limit", "0"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: niwaki" in capsys.readouterr().err


def test_a_failed_start_leaves_an_earlier_output_alone(folder: Path) -> None:
    Path("in.txt").write_text("a\nb\n")
    assert run("shout", "in.txt", "--limit", "1") == 0
    before = Path("out.jsonl").read_bytes()
    assert run("shout", "in.txt", "--model", "nowhere", "--restart") == 1
    assert run("missing", "in.txt", "--restart") == 1
    assert Path("out.jsonl").read_bytes() == before


def test_a_changed_input_program_or_reading_is_refused_until_restart(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.txt").write_text("a\n---\nb\n")
    assert run("shout", "in.txt", "--limit", "1") == 0
    capsys.readouterr()
    assert run("shout", "in.txt", "--record-separator", "---") == 1
    assert "of another run (other reading of the input): delete it (niwaki run --restart does)" in one_line(
        capsys.readouterr().err
    )
    Path("in.txt").write_text("a\nb\nc\n")
    assert run("shout", "in.txt") == 1
    assert "holds 1 row of another run (other input): delete it" in one_line(capsys.readouterr().err)
    Path("program.py").write_text(PROGRAM.replace("upper", "lower"))
    assert run("shout", "in.txt") == 1
    assert "(other input and program)" in one_line(capsys.readouterr().err)
    assert run("shout", "in.txt", "--restart") == 0
    assert [row["loud"] for row in rows()] == ["a", "b", "c"]


def test_a_deterministic_run_is_one_of_the_engine_and_does_not_go_on_with_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    class Noted(CountedEngine):
        def __init__(self, model: Path | None = None, *, deterministic: bool = False) -> None:
            super().__init__(model)
            asked.append(deterministic)

    monkeypatch.setitem(vars(nw), "Engine", Noted)
    Path("in.txt").write_text("a\nb\n")
    assert run("shout", "in.txt", "--deterministic", "--limit", "1") == 0
    capsys.readouterr()
    assert run("shout", "in.txt") == 1
    assert "holds 1 row of another run (other mode of the engine)" in one_line(capsys.readouterr().err)
    assert run("shout", "in.txt", "--deterministic") == 0
    assert (asked, [row["loud"] for row in rows()]) == ([True, True], ["A", "B"])


def test_a_model_of_other_weights_does_not_go_on_with_the_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.txt").write_text("a\nb\n")
    for model in ("one", "two", "copy of one"):
        Path(model).mkdir()
        Path(model, "config.json").write_text("{}")
        Path(model, "model.safetensors").write_text(model.removeprefix("copy of "))
    assert run("shout", "in.txt", "--limit", "1", "--model", "one") == 0
    capsys.readouterr()
    assert run("shout", "in.txt", "--model", "two") == 1
    assert "holds 1 row of another run (other model): delete it" in one_line(capsys.readouterr().err)
    assert run("shout", "in.txt", "--model", "copy of one") == 0
    assert [row["loud"] for row in rows()] == ["A", "B"]


def test_the_process_of_the_command_alone_is_told_how_to_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_end: list[object] = []
    monkeypatch.setattr("atexit.register", at_the_end.append)
    Path("word.txt").write_text("[a-z]+")
    assert main(["constraint", "show", "word.txt"]) == 0
    assert at_the_end == []
    monkeypatch.setattr("sys.argv", ["niwaki", "constraint", "show", "word.txt"])
    assert main() == 0
    assert at_the_end == [_let_go]


def test_the_input_and_the_program_are_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("a\n")
    Path("link.txt").symlink_to("in.txt")
    for output in ("in.txt", "link.txt", "program.py"):
        assert run("shout", "in.txt", "--restart", output=output) == 1
        assert "name another file" in one_line(capsys.readouterr().err)
    assert Path("in.txt").read_text() == "a\n"
    assert Path("program.py").read_text() == PROGRAM


def test_a_dead_engine_stops_the_run_and_keeps_what_was_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.txt").write_text("a\nb\ndie\nc\n")
    assert run("shout", "in.txt", "--concurrency", "1") == 1
    assert "the engine died" in one_line(capsys.readouterr().err)
    assert [row["loud"] for row in rows()] == ["A", "B"]  # the third is no error line: a restart runs it again


def test_control_c_while_the_table_is_made_says_how_to_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(journal: Path, output: Path, count: int) -> None:
        raise KeyboardInterrupt

    Path("in.txt").write_text("a\nb\n")
    with monkeypatch.context() as until:
        until.setattr(run_command, "write_table", interrupted)
        assert run("shout", "in.txt", output="out.csv") == 130
    told = one_line(capsys.readouterr().err)
    assert told.endswith("interrupted; 2 rows stand in out.csv.rows.jsonl; give the same command again to continue")
    assert run("shout", "in.txt", output="out.csv") == 0
    assert len(Path("out.csv").read_text().splitlines()) == 3


def test_a_full_device_fails_the_run_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("a\nb\n")
    assert run("shout", "in.txt", output="/dev/full") == 1
    assert "No space left on device: /dev/full; 0 rows were written" in one_line(capsys.readouterr().err)


def test_progress_is_plain_lines_where_there_is_no_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(step=3)
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)), perf_counter=time.perf_counter)
    monkeypatch.setattr("niwaki.lang.report.time", clock)  # and nobody else's: servers of other tests still run
    Path("in.txt").write_text("a\nb\nc\nd\n")
    assert run("shout", "in.txt", "--concurrency", "1") == 0
    shown = capsys.readouterr().err.splitlines()
    assert shown
    assert all("/4 records, " in line and "75% cached" in line for line in shown)


def test_progress_is_a_bar_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    Path("in.txt").write_text("a\nb\nc\nd\n")
    assert run("shout", "in.txt", "--limit", "1") == 0
    assert run("shout", "in.txt") == 0
    last = screen.getvalue().split("\r")[-1]
    assert "4/4" in last, "those that stood there already count"
    assert "75% cached" in last
