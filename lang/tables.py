"""Tables in files: Parquet read row by row, and the rows of a finished run written as CSV or Parquet.

Runs always write JSON lines, from which they can go on after a kill; a table is made of them at the end, in constant
memory and replaced as a whole. pyarrow is an extra, and is loaded nowhere else.
"""

from __future__ import annotations

import base64
import csv
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, Self

from niwaki.runtime.api import ConfigError, NiwakiError

if TYPE_CHECKING:
    import pyarrow as pa

LINES_SUFFIXES: Final = (".jsonl", ".ndjson")
TABLE_SUFFIXES: Final = (".csv", ".parquet")
CHUNK_ROWS: Final = 1024

Row = Mapping[str, object]


# ---------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------


def parquet_columns(path: Path) -> tuple[str, ...]:
    """The names of the columns.

    Raises:
        ConfigError: pyarrow is not installed, or the file is no Parquet.
    """
    with path.open("rb"):  # a missing file or a folder fails here, by name
        pass
    _, parquet = _pyarrow()
    return tuple(_reading(parquet, path).schema_arrow.names)


def parquet_count(path: Path) -> int:
    _, parquet = _pyarrow()
    return int(_reading(parquet, path).metadata.num_rows)


def parquet_rows(path: Path) -> Iterator[dict[str, object]]:
    """Each row with Python's values: texts, numbers, lists, dicts, dates, None."""
    _, parquet = _pyarrow()
    for batch in _reading(parquet, path).iter_batches(batch_size=CHUNK_ROWS):
        yield from batch.to_pylist()


class SentRows:
    """Rows of a Parquet file as texts and back, with every value as it was: JSON has no dates, decimals or bytes.

    Both sides make it of the same `schema`, that of the file, as `of` writes it.
    """

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._pyarrow = _pyarrow()[0]
        self._columns = self._pyarrow.ipc.read_schema(self._pyarrow.py_buffer(base64.b64decode(schema)))

    @classmethod
    def of(cls, path: Path) -> Self:
        columns = _reading(_pyarrow()[1], path).schema_arrow
        return cls(base64.b64encode(columns.serialize()).decode())

    def sent(self, row: Row) -> str:
        batch = self._pyarrow.RecordBatch.from_pylist([row], schema=self._columns)
        return base64.b64encode(batch.serialize()).decode()

    def received(self, text: str) -> Row:
        buffer = self._pyarrow.py_buffer(base64.b64decode(text))
        (row,) = self._pyarrow.ipc.read_record_batch(buffer, self._columns).to_pylist()
        assert isinstance(row, dict)
        return row


def check_output(path: Path) -> None:
    """Raises ConfigError where rows are not written under such a name, or need pyarrow and there is none."""
    if path.is_dir():
        raise ConfigError(f"the output {path} is a folder; name a file in it")
    suffix = path.suffix.lower()
    is_device = path.exists() and not path.is_file()  # what stands behind a pipe's dot says nothing
    if suffix not in ("", *LINES_SUFFIXES, *TABLE_SUFFIXES) and not is_device:
        raise ConfigError(f"{path}: unknown kind of output; name it {', '.join((*LINES_SUFFIXES, *TABLE_SUFFIXES))}")
    if suffix in TABLE_SUFFIXES and is_device:
        raise ConfigError(f"{path} is no file, and a table is made in one, at the end; name a file, or it .jsonl")
    if suffix == ".parquet":
        _pyarrow()


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    """(pyarrow, pyarrow.parquet). By name: types come from the import above, which runs for type checkers only."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            "files in .parquet need pyarrow, which is not installed: pip install niwaki[parquet]"
        ) from None


def _reading(parquet: ModuleType, path: Path) -> pa.parquet.ParquetFile:
    try:
        return parquet.ParquetFile(path)
    except ValueError as error:  # ArrowInvalid is one
        raise ConfigError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


# ---------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------


def write_table(lines: Path, output: Path, count: int) -> None:
    """Write the first `count` rows of the JSON lines at `lines` as a table, by the name of `output`.

    Columns are the keys in the order in which they first come. .csv: texts as they are, other values as JSON, None as
    an empty cell. .parquet: numbers, texts, lists and objects in their own types; a column whose values have no type in
    common is JSON text.

    Raises:
        OSError: it could not be written. What stood at `output` before is still there.
    """
    output = Path(os.path.realpath(output))  # of a link, what it leads to
    partial = output.with_name(output.name + ".partial")
    try:
        if output.suffix.lower() == ".csv":
            _write_csv(lines, partial, count)
        else:
            _write_parquet(lines, partial, count)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(output)
    except OSError as error:
        error.filename = error.filename or str(output)  # a full disk does not say of which file
        raise
    finally:
        partial.unlink(missing_ok=True)


def _rows(lines: Path, count: int) -> Iterator[dict[str, object]]:
    with lines.open("rb") as file:
        for line in islice(file, count):
            yield json.loads(line)


def _chunks(lines: Path, count: int) -> Iterator[list[dict[str, object]]]:
    rows = _rows(lines, count)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        yield chunk


def _column_names(lines: Path, count: int) -> list[str]:
    names: dict[str, None] = {}
    for row in _rows(lines, count):
        names.update(dict.fromkeys(row))
    return list(names)


def _write_csv(lines: Path, path: Path, count: int) -> None:
    names = _column_names(lines, count)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in _rows(lines, count):
            writer.writerow([_cell(row.get(name)) for name in names])


def _cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_parquet(lines: Path, path: Path, count: int) -> None:
    pyarrow, parquet = _pyarrow()
    names = _column_names(lines, count)
    types = {name: _column_type(pyarrow, name, lines, count) for name in names}
    schema = pyarrow.schema([(name, pyarrow.string() if kind is None else kind) for name, kind in types.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        for chunk in _chunks(lines, count):
            try:
                arrays = [_array(pyarrow, [row.get(name) for row in chunk], types[name]) for name in names]
            except ValueError as error:
                raise NiwakiError(
                    f"the rows do not fit in one Parquet table ({error}); they stand in {lines}"
                ) from None
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _array(pyarrow: ModuleType, values: Sequence[object], kind: pa.DataType | None) -> pa.Array:
    if kind is None:
        texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
        return pyarrow.array(texts, pyarrow.string())
    return pyarrow.array(values, kind)


def _column_type(pyarrow: ModuleType, name: str, lines: Path, count: int) -> pa.DataType | None:
    """The type that all values of the column have in common; None where there is none."""
    schemas = []
    for chunk in _chunks(lines, count):
        try:
            kind = pyarrow.array([row.get(name) for row in chunk]).type
        except (ValueError, TypeError, OverflowError):  # Arrow's own errors are ValueErrors and TypeErrors
            return None
        schemas.append(pyarrow.schema([(name, kind)]))
        try:
            schemas = [pyarrow.unify_schemas(schemas, promote_options="permissive")]
        except (ValueError, TypeError):
            return None
    kind = schemas[0].field(0).type
    return None if _has_empty_struct(pyarrow, kind) else kind


def _has_empty_struct(pyarrow: ModuleType, kind: pa.DataType) -> bool:
    """Parquet has no objects without fields."""
    if pyarrow.types.is_struct(kind):
        return kind.num_fields == 0 or any(
            _has_empty_struct(pyarrow, kind.field(i).type) for i in range(kind.num_fields)
        )
    return bool(pyarrow.types.is_list(kind)) and _has_empty_struct(pyarrow, kind.value_type)
