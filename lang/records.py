"""Records read from a file: JSON lines, CSV, Parquet, or text. One bad record never costs its neighbours.

Reads as a stream, so the file may be larger than memory. Knows nothing of programs: a record is a text or an object.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from niwaki.lang.tables import parquet_columns, parquet_count, parquet_rows
from niwaki.runtime.api import ConfigError, NiwakiError

# Longer records are refused before they are decoded: no context holds them, and a file without line ends must not
# be read into memory whole.
MAX_RECORD_BYTES = 16 * 1024 * 1024

Format = Literal["jsonl", "csv", "parquet", "txt"]
_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "txt",
}
_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff")  # of UTF-16, and of UTF-32


# What else one line of JSON may be.
_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}


class RecordError(NiwakiError, ValueError):
    """One record of the input cannot be read."""


Record = str | Mapping[str, object] | RecordError


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file of records. Iterating yields each record, or the RecordError that stands for it.

    .jsonl: an object per line. .csv: the first row names the columns, and values are texts. .parquet: an object per
    row, with Python's values. .txt: a record per line or, with `separator`, the lines between lines that equal it.
    With `column` the record is that field's text alone.
    """

    path: Path
    format: Format
    separator: str | None = None
    column: str | None = None

    @classmethod
    def open(cls, path: Path, *, separator: str | None = None, column: str | None = None) -> RecordFile:
        """Raises ConfigError where the name and the options do not fit, OSError where the file cannot be read."""
        if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise ConfigError(f"{path} is no file; the input is read more than once, so store it in one first")
        if path.is_dir():
            raise ConfigError(
                f"{path}: unknown kind of input, a folder; list its files, a line each, in a .txt, and let the program "
                "read the one that it is given, as examples/letters.py does"
            )
        form = _FORMATS.get(path.suffix.lower())
        if form is None:
            hint = f"; jq -c '.[]' {path} makes the lines of a .jsonl of a list" * (path.suffix.lower() == ".json")
            raise ConfigError(f"{path}: unknown kind of input; name it {', '.join(_FORMATS)}{hint}")
        if separator is not None and form != "txt":
            raise ConfigError(f"a record separator is for .txt files, and {path.name} is not one")
        if separator is not None and not separator.strip():
            raise ConfigError("the record separator is empty")
        if column is not None and form == "txt":
            raise ConfigError(f"a column is for .jsonl, .csv and .parquet files, and {path.name} is none of them")
        if form != "parquet":
            _check_encoding(path)
        records = cls(path, form, separator, column)
        header = records.columns()  # a missing file or a folder fails here, by name
        if header is not None and column is not None and column not in header:
            raise ConfigError(f"{path} has no column {column!r}; it has {', '.join(header)}")
        return records

    @property
    def has_texts(self) -> bool:
        """Are all values texts, and not of types of their own?"""
        return self.format in ("csv", "txt") or self.column is not None

    def columns(self) -> tuple[str, ...] | None:
        """The column names of a .csv or .parquet file; None where each record has its own."""
        if self.format == "parquet":
            return parquet_columns(self.path)
        with self.path.open("rb") as file:
            return _header(self.path, _csv_rows(file)) if self.format == "csv" else None

    def digest(self) -> str:
        """The SHA-256 of the file's bytes."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def count(self) -> int:
        """How many records iteration will yield (reads the file once, where it does not say so itself)."""
        if self.format == "parquet":
            return parquet_count(self.path)
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Record]:
        if self.format == "parquet":
            for row_number, row in enumerate(parquet_rows(self.path), start=1):
                yield self._chosen(row, f"row {row_number}")
            return
        with self.path.open("rb") as file:
            for line_number, read in _csv_records(self.path, file) if self.format == "csv" else self._records(file):
                yield self._chosen(read, f"line {line_number}")

    def _chosen(self, read: Record, place: str) -> Record:
        """The record, or its column's text, or what is wrong with it and where."""
        if isinstance(read, RecordError):
            return RecordError(f"{place} of {self.path.name} {read}")
        if isinstance(read, str) or self.column is None:
            return read
        if isinstance(value := read.get(self.column), str):
            return value
        return RecordError(f"{place} of {self.path.name} has no text in {self.column!r}")

    def _records(self, file: BinaryIO) -> Iterator[tuple[int, Record]]:
        chunks = _lines(file) if self.separator is None else _chunks(file, self.separator)
        for line_number, chunk in chunks:
            try:
                text = _decoded(chunk)
                yield line_number, text if self.format == "txt" else _json_object(text)
            except RecordError as error:
                yield line_number, error


def _check_encoding(path: Path) -> None:
    """Raises ConfigError for UTF-16 and UTF-32, whose lines would be neither errors nor what they say."""
    with path.open("rb") as file:
        start = file.read(64)
    is_wide = len(start) >= 4 and any(set(start[first::2]) == {0} for first in (0, 1))
    if start.startswith(_OTHER_BOMS) or is_wide:
        raise ConfigError(
            f"{path} is in UTF-16 or UTF-32, and input is read as UTF-8: iconv -f UTF-16 -t UTF-8 {path} writes it so"
        )


# A chunk is the bytes of one record, or None where they are more than MAX_RECORD_BYTES.
_Chunk = bytes | None


def _lines(file: BinaryIO) -> Iterator[tuple[int, _Chunk]]:
    """(line number from 1, the line without its end)."""
    number = 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n"):
            _skip_to_line_end(file)
            yield number, None
        else:
            yield number, (line.removeprefix(_BOM) if number == 1 else line).rstrip(b"\r\n")


def _skip_to_line_end(file: BinaryIO) -> None:
    while (rest := file.readline(MAX_RECORD_BYTES)) and not rest.endswith(b"\n"):
        pass


def _chunks(file: BinaryIO, separator: str) -> Iterator[tuple[int, _Chunk]]:
    """(number of its first line, the lines between two separator lines). Nothing before the first or after the last
    separator is no record."""
    mark = separator.strip().encode()
    first, lines, size = 1, list[bytes](), 0
    has_seen_mark = False
    for number, line in _lines(file):
        if line is not None and line.strip() == mark:
            if has_seen_mark or size > MAX_RECORD_BYTES or any(line.strip() for line in lines):
                yield first, b"\n".join(lines) if size <= MAX_RECORD_BYTES else None
            first, lines, size, has_seen_mark = number + 1, [], 0, True
        else:
            size += MAX_RECORD_BYTES + 1 if line is None else len(line) + bool(lines)
            if size <= MAX_RECORD_BYTES and line is not None:
                lines.append(line)
    if any(line.strip() for line in lines) or size > MAX_RECORD_BYTES:
        yield first, b"\n".join(lines) if size <= MAX_RECORD_BYTES else None


def _decoded(chunk: _Chunk) -> str:
    if chunk is None:
        raise RecordError(f"is longer than {MAX_RECORD_BYTES:,} bytes")
    try:
        text = chunk.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise RecordError(f"is not valid UTF-8 at byte {error.start}") from None
    if not text:
        raise RecordError("is empty")
    return text


def _json_object(text: str) -> Mapping[str, object]:
    if text in ("{", "["):
        raise RecordError("begins JSON that goes over several lines; a record is one line, as jq -c writes it")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RecordError(f"is not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None
    except RecursionError:
        raise RecordError("is JSON nested too deeply") from None
    except RecordError:  # of `_refuse_constant`
        raise
    except ValueError:  # Python's own limit
        raise RecordError(f"has a number of more than {sys.get_int_max_str_digits()} digits") from None
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value), "a number")
        raise RecordError(
            f'is {kind} and no JSON object; write {{"text": ...}}, named as the program\'s parameters are'
        )
    return value


def _refuse_constant(name: str) -> object:
    raise RecordError(f"is not valid JSON: {name} is no JSON number")


def _csv_records(path: Path, file: BinaryIO) -> Iterator[tuple[int, Record]]:
    rows = _csv_rows(file)
    header = _header(path, rows)
    for line_number, row in rows:
        if isinstance(row, RecordError):
            yield line_number, row
        elif not row:
            yield line_number, RecordError("is empty")
        elif len(row) != len(header):
            fields = "1 field" if len(row) == 1 else f"{len(row)} fields"
            yield line_number, RecordError(f"has {fields}, and the header has {len(header)}")
        else:
            yield line_number, dict(zip(header, row, strict=True))


def _header(path: Path, rows: Iterator[tuple[int, list[str] | RecordError]]) -> tuple[str, ...]:
    _, header = next(rows, (0, None))
    if header is None:
        raise ConfigError(f"{path} is empty; its first row must name the columns")
    if isinstance(header, RecordError):
        raise ConfigError(f"the header of {path} {header}")
    if len(set(header)) != len(header) or not all(header):
        raise ConfigError(f"the header of {path} must name each column once, got {header}")
    return tuple(header)


def _csv_rows(file: BinaryIO) -> Iterator[tuple[int, list[str] | RecordError]]:
    """(number of its last line, the fields of the row). Where a quote has no end, that of its first line."""
    csv.field_size_limit(MAX_RECORD_BYTES)  # process-wide; the default refuses fields above 128 KiB
    reader = csv.reader(_csv_text(file), strict=True)
    while True:
        first_line = reader.line_num + 1
        try:
            row = next(reader)
            for value in row:
                value.encode("utf-8")
            yield reader.line_num, row
        except StopIteration:
            return
        except UnicodeEncodeError:
            yield reader.line_num, RecordError("is not valid UTF-8")
        except csv.Error as error:
            if str(error) == "unexpected end of data":
                why = "nothing closes a quote in it, so that the rest of the file is one record"
                yield first_line, RecordError(f"is not valid CSV: {error}: {why}")
            elif str(error).startswith("new-line character seen in unquoted field"):  # which advises a programmer
                why = "a carriage return outside of quotes, with no line feed behind it"
                remedy = "quote that field or, where lines end so, write them anew: tr '\\r' '\\n' < OLD > NEW"
                yield first_line, RecordError(f"has {why}; {remedy}")
            else:
                begins = f" (the record begins in line {first_line})" if first_line != reader.line_num else ""
                yield reader.line_num, RecordError(f"is not valid CSV: {error}{begins}")


def _csv_text(file: BinaryIO) -> Iterator[str]:
    """Lines with their ends (a quoted field may hold some); bytes that are no UTF-8 become lone surrogates."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_RECORD_BYTES), b""), start=1):
        yield (line.removeprefix(_BOM) if number == 1 else line).decode("utf-8", "surrogateescape")
