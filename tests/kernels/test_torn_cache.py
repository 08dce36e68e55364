"""What a crash has torn of the compiled kernels on the disk is compiled again."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = """
from niwaki.kernels.jit import jit


@jit()
def twice(number: int) -> int:
    return 2 * number
"""


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("niwaki_torn", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"\0" * 64, None])
def test_a_torn_file_is_compiled_again(
    kind: str, content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "torn.py"
    file.write_text(SOURCE)
    assert loaded(file).twice(2) == 4
    (kept,) = (tmp_path / "__pycache__").glob(f"*.{kind}")
    kept.write_bytes(kept.read_bytes()[:-20] if content is None else content)
    with caplog.at_level(logging.WARNING, logger="niwaki.kernels"):
        assert loaded(file).twice(2) == 4
    assert "twice is compiled again" in caplog.text
    caplog.clear()
    again = loaded(file)
    assert again.twice(2) == 4
    assert sum(again.twice.stats.cache_hits.values()) == 1
    assert not caplog.records
