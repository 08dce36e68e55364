"""Parquet in, CSV and Parquet out: typed values survive, and what has no common type is JSON text."""

from __future__ import annotations

import csv
import datetime
import json
import os
import sys
from pathlib import Path

import pytest

from niwaki.lang.records import RecordError, RecordFile
from niwaki.lang.tables import CHUNK_ROWS, check_output, write_table
from niwaki.runtime.api import ConfigError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {"index": 0, "name": 'Zoë, of "Acme"', "tags": ["a", "b"], "contact": {"city": "Porto", "age": 3}, "mixed": 1},
    {"index": 1, "name": "two\nlines", "tags": [], "contact": {"city": None, "age": None}, "mixed": "one"},
    {"index": 2, "error": {"type": "CapacityError", "message": "too long"}},
]


def lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_a_parquet_file_gives_its_rows_with_their_types(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    rows = [{"text": "a", "n": 1, "at": datetime.date(2024, 2, 29)}, {"text": None, "n": None, "at": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    records = RecordFile.open(path)
    assert records.columns() == ("text", "n", "at")
    assert records.count() == 2
    assert list(records) == rows
    first, second = RecordFile.open(path, column="text")
    assert first == "a"
    assert isinstance(second, RecordError)
    assert str(second) == "row 2 of in.parquet has no text in 'text'"


def test_an_unknown_column_and_a_separator_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}]), path)
    with pytest.raises(ConfigError, match="no column 'body'; it has text"):
        RecordFile.open(path, column="body")
    with pytest.raises(ConfigError, match=r"separator is for \.txt"):
        RecordFile.open(path, separator="---")


def test_a_file_that_is_no_parquet_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    path.write_text("text\na\n")
    with pytest.raises(ConfigError, match=r"in\.parquet cannot be read as Parquet"):
        RecordFile.open(path)


def test_without_pyarrow_parquet_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # importing it raises ImportError
    path = tmp_path / "in.parquet"
    path.write_bytes(b"")
    for refused in (lambda: RecordFile.open(path), lambda: check_output(tmp_path / "out.parquet")):
        with pytest.raises(ConfigError, match=r"pip install niwaki\[parquet\]"):
            refused()
    check_output(tmp_path / "out.csv")


def test_an_output_of_an_unknown_kind_is_refused_and_a_pipe_is_not(tmp_path: Path) -> None:
    for name in ("out.pdf", "out.json"):
        with pytest.raises(ConfigError, match=r"unknown kind of output; name it \.jsonl, \.ndjson, \.csv, \.parquet"):
            check_output(tmp_path / name)
    os.mkfifo(tmp_path / "pipe.1")
    for name in ("out.jsonl", "out", "pipe.1"):
        check_output(tmp_path / name)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(ConfigError, match="is no file, and a table is made in one"):
        check_output(tmp_path / "pipe.csv")


def test_a_link_to_a_table_stays_one(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept.csv", tmp_path / "link.csv"
    link.symlink_to(kept)
    for _ in range(2):
        write_table(lines(tmp_path / "rows.jsonl", ROWS), link, len(ROWS))
        assert link.is_symlink()
        assert kept.read_text("utf-8").startswith("index,name")


def test_csv_out_has_every_column_and_reads_back(tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    write_table(lines(tmp_path / "rows.jsonl", ROWS), output, len(ROWS))
    with output.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["index", "name", "tags", "contact", "mixed", "error"]
    assert rows[0] == ["0", 'Zoë, of "Acme"', '["a", "b"]', '{"city": "Porto", "age": 3}', "1", ""]
    assert rows[1][1] == "two\nlines"
    assert json.loads(rows[2][5]) == ROWS[2]["error"]


def test_parquet_out_keeps_types_and_writes_what_has_none_in_common_as_json(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    write_table(lines(tmp_path / "rows.jsonl", ROWS), output, len(ROWS))
    table = parquet.read_table(output)
    assert [str(kind) for kind in table.schema.types] == [
        "int64", "string", "list<element: string>", "struct<city: string, age: int64>", "string",
        "struct<type: string, message: string>",
    ]  # fmt: skip
    back = table.to_pylist()
    assert back[0]["contact"] == ROWS[0]["contact"]
    assert [row["mixed"] for row in back] == ["1", '"one"', None]
    assert back[2]["error"] == ROWS[2]["error"]


def test_types_that_only_later_rows_tell_are_found(tmp_path: Path) -> None:
    count = 2 * CHUNK_ROWS + 5
    rows: list[dict[str, object]] = [{"index": n, "x": None if n < count - 1 else 0.5, "o": {}} for n in range(count)]
    rows[0]["x"] = 3
    output = tmp_path / "out.parquet"
    write_table(lines(tmp_path / "rows.jsonl", rows), output, count)
    table = parquet.read_table(output)
    assert str(table.schema.field("x").type) == "double"
    assert table.num_rows == count
    assert table.to_pylist()[-1] == {"index": count - 1, "x": 0.5, "o": "{}"}


def test_a_number_too_large_for_a_column_is_json(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    write_table(lines(tmp_path / "rows.jsonl", [{"n": 1}, {"n": 10**30}]), output, 2)
    assert parquet.read_table(output).to_pylist() == [{"n": "1"}, {"n": str(10**30)}]
