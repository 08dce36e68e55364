"""The workers of `niwaki run --ray`, without a Ray: what goes there and comes back, and what runs at once."""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest

from niwaki import run_command
from niwaki.lang.program_file import load_program, parameters_of
from niwaki.lang.records import RecordFile
from niwaki.lang.tables import SentRows
from tests.counted_engine import CountedEngine, make_folder

PROGRAM = """
import threading
import niwaki as nw

running, most, lock = 0, 0, threading.Lock()
enough = threading.Event()

@nw.function
def kinds(s, **columns):
    return {name: [type(value).__name__, str(value)] for name, value in columns.items()}

@nw.function
def counted(s, n):
    global running, most
    with lock:
        running += 1
        most = max(most, running)
        if running == 3:
            enough.set()
    enough.wait(30)
    with lock:
        running -= 1
    return {"n": n, "most": most}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_folder(tmp_path, monkeypatch)
    (folder / "work.py").write_text(PROGRAM)
    return folder


def test_values_of_a_parquet_file_reach_a_worker_as_they_are(folder: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {
        "day": date(2024, 2, 29),
        "at": datetime(2024, 2, 29, 12, tzinfo=timezone(timedelta(hours=1))),
        "price": Decimal("1.50"),
        "photo": b"\xff\x00",
        "size": 3,
        "share": float("nan"),
        "tags": ["a", None],
        "inner": {"when": date(2020, 1, 1), "raw": b"\xfe"},
        "gap": None,
    }
    second = dict.fromkeys(row) | {"gap": "text"}
    parquet.write_table(pyarrow.Table.from_pylist([row, second]), "in.parquet")
    records = RecordFile.open(Path("in.parquet"))
    to_parameters = parameters_of(load_program(Path("work.py"), "kinds"), records)
    table = SentRows.of(records.path)
    sent = [run_command._sent(record, to_parameters, table) for record in records]
    worker = run_command.RowWorker("work.py", "kinds", None, 2, texts=False, deterministic=False, table=table.schema)
    told = [json.loads(line)["row"] for line in worker.run(sent)]
    here = [{name: [type(value).__name__, str(value)] for name, value in record.items()} for record in records]  # type: ignore[union-attr]  # rows, no errors
    assert told == here
    assert told[0]["day"] == ["date", "2024-02-29"]
    assert told[0]["photo"][0] == "bytes"


def test_batches_that_a_worker_has_at_once_share_its_places_and_are_counted_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one fills the places that the last rows of one leave, and no more."""
    lock, told = threading.Lock(), Counter[str]()

    def stats(self: CountedEngine) -> dict[str, float]:
        with lock:
            told["generated_tokens"] += 100
            return {"generated_tokens": float(told["generated_tokens"])}

    monkeypatch.setattr(CountedEngine, "stats", stats)
    worker = run_command.RowWorker("work.py", "counted", None, 3, texts=False, deterministic=False)
    batches = [[json.dumps({"arguments": {"n": 10 * batch + n}}) for n in range(8)] for batch in range(2)]
    with ThreadPoolExecutor(2) as pool:
        results = [[json.loads(line) for line in lines] for lines in pool.map(worker.run, batches)]
    assert [line["row"]["n"] for lines in results for line in lines] == [*range(8), *range(10, 18)]
    assert max(line["row"]["most"] for lines in results for line in lines) == 3
    used = [lines[-1]["used"]["generated_tokens"] for lines in results]
    assert sum(used) == told["generated_tokens"]
