"""The secret that keeps keys' caches apart: one for a folder, whoever starts on it, and nobody else's to read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from niwaki.runtime.api import ConfigError
from niwaki.runtime.server.cache_secret import NAME, NUM_BYTES, kept_secret
from niwaki.runtime.server.config import ServerConfig


def test_a_folder_keeps_its_secret_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "pages"
    found = kept_secret(folder)
    assert len(found) == NUM_BYTES
    assert kept_secret(folder) == found != kept_secret(tmp_path / "other")
    assert (folder / NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [NAME]


def test_servers_that_start_at_once_have_one_secret(tmp_path: Path) -> None:
    found: list[bytes] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        found.append(kept_secret(tmp_path))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("content", ["", "ab" * (NUM_BYTES - 1), "not hex" * 10, "\ufffd"])
def test_a_file_that_holds_no_secret_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / NAME).write_text(content)
    with pytest.raises(ConfigError, match="holds no secret"):
        kept_secret(tmp_path)


def test_a_secret_that_can_be_guessed_is_refused_and_none_is_shown() -> None:
    with pytest.raises(ConfigError, match="cache_secret needs at least 16 bytes, got 0"):
        ServerConfig(cache_secret=b"")
    assert "guess" not in repr(ServerConfig(cache_secret=b"guess my 16 bytes"))
