"""What the tests of `niwaki run` share: programs that set variables and generate nothing, and an engine that is only
counted in place of the real one."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import pytest

import niwaki as nw
from niwaki.__main__ import main
from niwaki.lang.scripted import ScriptedBackend
from niwaki.runtime.api import ModelError

PROGRAM = """
import datetime, enum, time
from pathlib import Path
from pydantic import BaseModel
import niwaki as nw
from niwaki.runtime.api import CapacityError, EngineStopped

class Color(enum.Enum):
    RED = "red"

class Person(BaseModel):
    name: str
    born: datetime.date | None

@nw.function
def shout(s, text):
    if "slow" in text:
        time.sleep(0.02)
    while "held" in text and Path("hold").exists():
        time.sleep(0.02)
    if "fail" in text:
        raise ValueError("refused:\\n" + text)
    if len(text) > 100_000:
        raise CapacityError(f"{len(text)} characters do not fit")
    if "die" in text:
        raise EngineStopped("the engine died")
    s["loud"] = text.upper()

@nw.function
def typed(s, name, day="2024-02-29"):
    s["person"] = Person(name=name, born=datetime.date.fromisoformat(day))
    s["color"] = Color.RED

@nw.function
def returning(s, text):
    s["ignored"] = 1
    return Person(name=text, born=None)

@nw.function
def number(s, text):
    return float(text)

@nw.function
def listed(s, text):
    if "fail" in text:
        raise ValueError("refused:\\n" + text)
    s += text + nw.gen("words", dtype=list[str])

@nw.function
def reserved(s, text):
    s["index"] = text

@nw.function
def two(s, text, other):
    pass

@nw.function
def aged(s, name, age: int, weight: "float | None" = None, *, here: bool = False, day: "str | int" = 0) -> int:
    return [name, age, weight, here, day]

not_a_program = 3
"""


class CountedEngine:
    """Owns a backend that no program here asks for anything; refuses a model folder without weights."""

    def __init__(self, model: Path | None = None, *, deterministic: bool = False) -> None:
        if model is not None and not any(model.glob("*.safetensors")):
            raise ModelError(f"{model} has no weights")
        self.backend = ScriptedBackend({})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stats(self) -> Mapping[str, float]:
        return {"prefilled_tokens": 1000.0, "cached_tokens": 3000.0, "generated_tokens": 500.0}


def make_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the program, and the counted engine in place of the real one (which would load torch)."""
    engine = types.ModuleType("niwaki.runtime.engine")
    engine.Engine = CountedEngine  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "niwaki.runtime.engine", engine)
    monkeypatch.setitem(vars(nw), "Engine", CountedEngine)  # where the real one may have been looked up before
    monkeypatch.chdir(path)
    (path / "program.py").write_text(PROGRAM)
    return path


def run(function: str, source: str, *more: str, output: str = "out.jsonl") -> int:
    return main(["run", f"program.py:{function}", "--input", source, "--output", output, *more])


def rows(path: str = "out.jsonl") -> list[dict[str, object]]:
    found = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    assert [row["index"] for row in found] == list(range(len(found)))
    return found


def one_line(captured: str) -> str:
    [line] = captured.splitlines()
    assert line.startswith("niwaki: ")
    return line
