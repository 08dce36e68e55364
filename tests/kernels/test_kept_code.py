"""What several processes that compile at once leave on the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from niwaki.kernels import order
from niwaki.kernels.kept_code import CodeByTypes

ROOT = Path(__file__).parents[2]
# Without a home, a package that cannot be written, and what `jit` makes there.
HOMELESS = """
import os, pwd
def no_entry(uid): raise KeyError(uid)
pwd.getpwuid = no_entry
from niwaki.kernels.jit import jit
from unwritable.twice import twice
print(jit()(twice)(2))
"""
FLOAT, DOUBLE = ("float32",), ("float64",)


def files(path: Path, source: int) -> Any:
    return CodeByTypes(str(path), "f", source)  # type: ignore[no-untyped-call]  # Numba has no types


def test_two_that_compile_for_different_types_at_once_are_not_taken_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second looks at the index before the first has written it, and writes all before the first its code."""
    one, other = (files(tmp_path, 1) for _ in range(2))
    save_data = one._save_data

    def save_behind_the_other(name: str, data: object) -> None:
        other.save(DOUBLE, "of doubles")
        save_data(name, data)

    monkeypatch.setattr(one, "_save_data", save_behind_the_other)
    monkeypatch.setattr(other, "_load_index", dict)
    one.save(FLOAT, "of floats")
    monkeypatch.undo()
    assert one.load(DOUBLE) in ("of doubles", None), "its own, or compiled again"
    assert one.load(FLOAT) == "of floats"


def test_code_is_found_again_and_written_anew_for_another_source(tmp_path: Path) -> None:
    files(tmp_path, 1).save(FLOAT, "old")
    assert files(tmp_path, 1).load(FLOAT) == "old"
    changed = files(tmp_path, 2)
    assert changed.load(FLOAT) is None
    changed.save(FLOAT, "new")
    assert changed.load(FLOAT) == "new"


def test_kernels_are_kept_so() -> None:
    assert type(order.stable_order._cache._cache_file) is CodeByTypes  # type: ignore[attr-defined]


@pytest.mark.parametrize("caches", [None, "", "~/.cache"])
def test_without_a_home_nothing_is_kept_in_the_working_directory(tmp_path: Path, caches: str | None) -> None:
    """Numba would keep it in a folder named "~", and run what it finds in one."""
    package = tmp_path / "unwritable"
    package.mkdir()
    (package / "twice.py").write_text("def twice(number):\n    return number * 2\n")
    (package / "__pycache__").write_text("a file: no folder can be made here")
    kept = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")
    }
    if caches is not None:
        kept["XDG_CACHE_HOME"] = caches
    environment = {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "4\n", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["unwritable"]


def test_where_no_folder_can_be_written_all_kernels_are_there_and_kept_nowhere() -> None:
    """As for a user without a home beside a package that is root's."""
    code = (
        "from numba.core.caching import CacheImpl\n"
        "CacheImpl._locator_classes = []\n"
        "import niwaki.runtime.engine\n"
        "from niwaki.runtime.constraints.kernels import trie_from_sorted\n"
        "print(trie_from_sorted.stats.cache_path)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "None\n", done.stderr
