"""Records out of files: every kind, every way in which one record can be bad."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import niwaki as nw
from niwaki.lang import records
from niwaki.lang.record_types import RecordTypes
from niwaki.lang.records import Record, RecordError, RecordFile
from niwaki.runtime.api import ConfigError


def read(path: Path, content: bytes, *, separator: str | None = None, column: str | None = None) -> list[Record]:
    path.write_bytes(content)
    file = RecordFile.open(path, separator=separator, column=column)
    found = list(file)
    assert file.count() == len(found)
    return [str(record) if isinstance(record, RecordError) else record for record in found]


def test_a_text_file_has_a_record_per_line(tmp_path: Path) -> None:
    assert read(tmp_path / "in.txt", b"\xef\xbb\xbfone\r\n two \nthree") == ["one", "two", "three"]


def test_an_empty_line_is_that_records_error(tmp_path: Path) -> None:
    assert read(tmp_path / "in.txt", b"one\n\nthree\n") == ["one", "line 2 of in.txt is empty", "three"]


def test_invalid_utf8_is_that_records_error(tmp_path: Path) -> None:
    found = read(tmp_path / "in.txt", b"one\ncaf\xe9 two\nthree\n")
    assert found == ["one", "line 2 of in.txt is not valid UTF-8 at byte 3", "three"]


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    assert read(tmp_path / "in.txt", b"") == []
    assert read(tmp_path / "in.txt", b"\n \n", separator="---") == []


def test_a_separator_line_parts_records_of_several_lines(tmp_path: Path) -> None:
    found = read(
        tmp_path / "in.txt", b"---\none\n\nmore -- of --- one\n --- \r\ntwo\n---\n\n---\nfour\n---\n", separator="---"
    )
    assert found == ["one\n\nmore -- of --- one", "two", "line 8 of in.txt is empty", "four"]


def test_json_lines_are_objects_and_others_are_errors(tmp_path: Path) -> None:
    deep = b"[" * 100_000
    long = b'{"a": ' + b"1" * 5000 + b"}"
    content = b'{"a": 1}\n[1]\n{"a": NaN}\n{"a"\n\n' + deep + b"\n" + long + b'\n{"a": "\xc3\xa9"}\n'
    assert read(tmp_path / "in.jsonl", content) == [
        {"a": 1},
        'line 2 of in.jsonl is a list and no JSON object; write {"text": ...}, named as the program\'s parameters are',
        "line 3 of in.jsonl is not valid JSON: NaN is no JSON number",
        "line 4 of in.jsonl is not valid JSON: Expecting ':' delimiter at character 4",
        "line 5 of in.jsonl is empty",
        "line 6 of in.jsonl is JSON nested too deeply",
        "line 7 of in.jsonl has a number of more than 4300 digits",
        {"a": "é"},
    ]


def test_a_column_of_json_lines_is_text(tmp_path: Path) -> None:
    content = b'{"a": "x", "b": 1}\n{"b": 2}\n{"a": 3}\n'
    missing = "line {} of in.jsonl has no text in 'a'"
    assert read(tmp_path / "in.jsonl", content, column="a") == ["x", missing.format(2), missing.format(3)]


def test_csv_rows_are_named_by_the_header(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbfname,note\nAda,"two\nlines, quoted"\nBo\n\n\xff,x\nCy,y\n'
    assert read(tmp_path / "in.csv", content) == [
        {"name": "Ada", "note": "two\nlines, quoted"},
        "line 4 of in.csv has 1 field, and the header has 2",
        "line 5 of in.csv is empty",
        "line 6 of in.csv is not valid UTF-8",
        {"name": "Cy", "note": "y"},
    ]
    assert read(tmp_path / "in.csv", b"a,b\n1,2\n", column="b") == ["2"]


def test_a_csv_quote_that_never_closes_is_an_error(tmp_path: Path) -> None:
    found = read(tmp_path / "in.csv", b'a,b\n1,2\n3,"4\n')
    assert found[0] == {"a": "1", "b": "2"}
    assert "is not valid CSV: unexpected end of data" in str(found[1])


def test_a_csv_record_of_several_lines_that_is_wrong_names_its_first(tmp_path: Path) -> None:
    assert read(tmp_path / "in.csv", b'a,b\n1,"2\nx" y\n3,4\n5,"6\n7,8\n9,0\n') == [
        "line 3 of in.csv is not valid CSV: ',' expected after '\"' (the record begins in line 2)",
        {"a": "3", "b": "4"},
        "line 5 of in.csv is not valid CSV: unexpected end of data: nothing closes a quote in it, so that the rest of "
        "the file is one record",
    ]


def test_a_carriage_return_that_ends_no_line_is_told_with_what_to_do(tmp_path: Path) -> None:
    found = read(tmp_path / "in.csv", b'a,b\n1,x\ry\n3,"4\r"\n')
    assert found == [
        "line 2 of in.csv has a carriage return outside of quotes, with no line feed behind it; quote that field or, "
        "where lines end so, write them anew: tr '\\r' '\\n' < OLD > NEW",
        {"a": "3", "b": "4\r"},
    ]


def test_a_folder_is_no_input_and_how_to_read_its_files_is_said(tmp_path: Path) -> None:
    for name in ("letters", "letters.txt"):
        (tmp_path / name).mkdir()
        with pytest.raises(ConfigError, match=r"a folder; list its files, a line each, in a \.txt"):
            RecordFile.open(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a,a\n", "each column once"),
        (b"\xff\n", "not valid UTF-8"),
        (b"a,b\r1,2\r", r"the header of .* has a carriage return .* where lines end so, write them anew: tr"),
    ],
)
def test_a_csv_without_a_usable_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        RecordFile.open(path)


def test_a_record_above_the_limit_is_an_error_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 8)
    long = "is longer than 8 bytes"
    assert read(tmp_path / "in.txt", b"12345678\n123456789\n" + b"x" * 50 + b"\nok") == [
        "12345678",
        f"line 2 of in.txt {long}",
        f"line 3 of in.txt {long}",
        "ok",
    ]
    content = b"1234\n123\n---\n1234\n1234\n1234\n---\nok\n---\n" + b"y" * 20
    assert read(tmp_path / "in.txt", content, separator="---") == [
        "1234\n123",
        f"line 4 of in.txt {long}",
        "ok",
        f"line 10 of in.txt {long}",
    ]


def test_the_last_line_needs_no_end_even_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 4)
    assert read(tmp_path / "in.txt", b"1234") == ["1234"]
    assert read(tmp_path / "in.txt", b"12345") == ["line 1 of in.txt is longer than 4 bytes"]


def test_options_that_do_not_fit_the_file_are_refused(tmp_path: Path) -> None:
    for name in ("in.txt", "in.jsonl", "in.csv"):
        (tmp_path / name).write_text("a,b\n")
    with pytest.raises(ConfigError, match="unknown kind of input"):
        RecordFile.open(tmp_path / "in.pdf")
    with pytest.raises(ConfigError, match=r"separator is for \.txt"):
        RecordFile.open(tmp_path / "in.jsonl", separator="---")
    with pytest.raises(ConfigError, match="separator is empty"):
        RecordFile.open(tmp_path / "in.txt", separator=" ")
    with pytest.raises(ConfigError, match=r"column is for \.jsonl, \.csv and \.parquet"):
        RecordFile.open(tmp_path / "in.txt", column="a")
    with pytest.raises(ConfigError, match="no column 'c'; it has a, b"):
        RecordFile.open(tmp_path / "in.csv", column="c")
    with pytest.raises(FileNotFoundError):
        RecordFile.open(tmp_path / "gone.txt")


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"abc")
    assert RecordFile.open(path).digest() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.csv"])
def test_files_in_wider_encodings_are_refused_with_the_command_that_helps(
    tmp_path: Path, name: str, encoding: str
) -> None:
    (tmp_path / name).write_bytes("text\n{}\n".encode(encoding))
    with pytest.raises(ConfigError, match="iconv -f UTF-16 -t UTF-8"):
        RecordFile.open(tmp_path / name)


def test_json_over_several_lines_is_told_on_its_first(tmp_path: Path) -> None:
    first, *_ = read(tmp_path / "in.jsonl", b'{\n "a": 1\n}\n')
    assert (
        first == "line 1 of in.jsonl begins JSON that goes over several lines; a record is one line, as jq -c writes it"
    )


def test_a_list_in_a_json_file_and_a_pipe_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text("[{}]")
    with pytest.raises(ConfigError, match=r"jq -c '\.\[\]' .*in\.json"):
        RecordFile.open(tmp_path / "in.json")
    os.mkfifo(tmp_path / "in.jsonl")
    for path in (tmp_path / "in.jsonl", Path("-"), Path("/dev/stdin")):
        with pytest.raises(ConfigError, match="is no file; the input is read more than once"):
            RecordFile.open(path)


def test_a_column_that_is_named_as_an_option_sets_none() -> None:
    @nw.function
    def ticket(s: nw.State, text: str, priority: str = "low") -> None:
        s += text + priority

    @nw.function
    def anything(s: nw.State, **columns: str) -> None:
        s += str(columns)

    given = {"text": "It broke.", "priority": "high"}
    assert RecordTypes(ticket, texts=False).typed(given) == given
    for program, name in ((ticket, "seed"), (ticket, "backend"), (ticket, "options"), (anything, "priority")):
        with pytest.raises(RecordError, match=f"'{name}' is an option of a run, and no parameter of the program"):
            RecordTypes(program, texts=False).typed({"text": "It broke.", name: 3})
