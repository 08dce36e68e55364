"""A saved cache warms another engine, is refused where it is another's, and is used up to its damage."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from niwaki.runtime.api import ConfigError, NiwakiError
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Runner
from niwaki.runtime.kv.cache_file import CacheWriter, Layout, SavedPath, read_cache
from tests.runtime.test_tiers import PAGE, page, prompt, run
from tests.toy import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"), sharpness=3.0)


def test_a_saved_cache_warms_another_engine(folder: Path, tmp_path: Path) -> None:
    shared = prompt(3, 48)
    asked = [shared + prompt(seed, 30) for seed in (4, 5)]
    file = tmp_path / "cache.niwaki"
    with Engine(folder, kv_tokens=1024) as engine:
        expected = [run(engine, ids)[0] for ids in asked]
        saved = engine.save_cache(file)
        assert saved == 48 + 2 * (30 + 5), "each page once; the KV of the last token was never needed"
    with Engine(folder, kv_tokens=1024) as warm:
        assert warm.load_cache(file) == saved
        warm.backend.check()
        assert [run(warm, ids) for ids in asked] == [(tokens, 77) for tokens in expected]
        assert warm.load_cache(file) == 0, "it is all there"
    with Engine(folder, kv_tokens=64) as small:
        assert small.load_cache(file) <= 64
        small.backend.check()
        run(small, asked[0][:40])


def test_loading_what_is_there_already_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """A path that ends with a page, and one of which less is there, too."""
    file = tmp_path / "cache.niwaki"
    asked = [prompt(3, 2 * PAGE - 5), prompt(4, 3 * PAGE)]  # of six new tokens the last is not written
    with Engine(folder, kv_tokens=1024) as engine:
        expected = [run(engine, ids)[0] for ids in asked]
        assert engine.save_cache(file) == 2 * PAGE + 3 * PAGE + 5
        for _ in range(2):
            assert engine.load_cache(file) == 0
            assert engine.stats()["pages_held"] == 0
            engine.backend.check()
        engine.flush_cache()
        run(engine, asked[1][:PAGE])
        assert engine.load_cache(file) > 0
        assert [run(engine, ids)[0] for ids in asked] == expected
        engine.backend.check()


def test_a_load_that_fails_holds_no_page(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    file = tmp_path / "cache.niwaki"
    with Engine(folder, kv_tokens=1024) as engine:
        run(engine, prompt(3, 40))
        engine.save_cache(file)
        engine.flush_cache()
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "write_pages", fails)
            with pytest.raises(RuntimeError, match="a bug"):
                engine.load_cache(file)
        assert engine.stats()["pages_held"] == 0
        engine.backend.check()


def test_what_continues_a_sequence_that_was_not_loaded_is_left_out(folder: Path) -> None:
    with Engine(folder, kv_tokens=1024) as engine:
        core = engine.backend._core
        pages = np.zeros((2, core._runner.kv_bytes_per_token * PAGE), np.uint8)
        saved = SavedPath("", np.array(prompt(3, 4 * PAGE), np.int32), 2, pages)
        assert engine.backend._between_steps(lambda: core.pages.load([saved])) == 0
        assert engine.stats()["pages_held"] == 0
        engine.backend.check()


def test_a_cache_that_cannot_get_its_name_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with Engine(folder, kv_tokens=256) as engine, pytest.raises(OSError, match="directory"):
        engine.save_cache(taken)
    assert list(tmp_path.iterdir()) == [taken]


def test_what_is_no_file_is_not_replaced_by_one_and_a_link_leads_to_it(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    with Engine(folder, kv_tokens=256) as engine:
        run(engine, prompt(6, 40))
        with pytest.raises(OSError, match=r"is no file, .*pipe"):
            engine.save_cache(tmp_path / "pipe")
        assert engine.save_cache(tmp_path / "link") == engine.save_cache(tmp_path / "kept") > 0
        assert (tmp_path / "link").is_symlink()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link", "pipe"]


def test_a_file_that_cannot_be_used_is_one_of_niwakis_errors_and_the_systems(folder: Path, tmp_path: Path) -> None:
    with Engine(folder, kv_tokens=256) as engine:
        for use in (engine.save_cache, engine.load_cache):
            with pytest.raises(NiwakiError, match=r"there is no folder|No such file") as caught:
                use(tmp_path / "nowhere" / "cache")
            assert isinstance(caught.value, FileNotFoundError)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "nowhere" / "cache"))
            with pytest.raises(NiwakiError, match="directory"):
                use(tmp_path)
            with pytest.raises(ConfigError, match=r"the path of a file, a str or a Path; got 5"):
                use(5)  # type: ignore[arg-type]  # that is the point


def test_a_full_disk_is_told_with_the_name_of_the_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, *more: object) -> object:
        os.close(file)
        return open("/dev/full", "wb", buffering=1 << 16)

    with Engine(folder, kv_tokens=256) as engine:
        run(engine, prompt(6, 40))
        monkeypatch.setattr(os, "fdopen", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*cache.niwaki'"):
            engine.save_cache(tmp_path / "cache.niwaki")
    assert not list(tmp_path.iterdir())


def test_a_saved_cache_of_other_weights_is_refused_and_a_damaged_one_is_used_up_to_the_damage(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "cache.niwaki"
    with Engine(folder, kv_tokens=1024) as engine:
        for seed in (6, 7):
            run(engine, prompt(seed, 40))
        saved = engine.save_cache(file)
        with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere; make it first: '.*nowhere/cache'"):
            engine.save_cache(tmp_path / "nowhere" / "cache")
        with pytest.raises(ConfigError, match="is not a saved cache"):
            engine.load_cache(folder / "config.json")
        (tmp_path / "deep").write_text("[" * 60_000)
        with pytest.raises(ConfigError, match="is not a saved cache"):
            engine.load_cache(tmp_path / "deep")
    content = file.read_bytes()
    file.write_bytes(content[:-3] + b"xyz")
    with Engine(folder, kv_tokens=1024) as engine, caplog.at_level(logging.WARNING, "niwaki.tiers"):
        assert 0 < engine.load_cache(file) < saved
        assert "is damaged behind byte" in caplog.text
        engine.backend.check()
    (tmp_path / "other").mkdir()
    other = make_model(tmp_path / "other", sharpness=3.0, seed=9)
    with (
        Engine(other, kv_tokens=1024) as engine,
        pytest.raises(ConfigError, match="by an engine of another model, dtype"),
    ):
        engine.load_cache(file)


@pytest.mark.parametrize("damage", [(b'"namespace": ""', b'"namespace": "x"'), (b'"tokens": 45', b'"tokens": 46')])
def test_a_path_of_a_saved_cache_is_taken_up_only_as_it_was_written(
    folder: Path, tmp_path: Path, damage: tuple[bytes, bytes]
) -> None:
    file = tmp_path / "cache.niwaki"
    with Engine(folder, kv_tokens=1024) as engine:
        run(engine, prompt(6, 40))
        assert engine.save_cache(file) == 45
    content = file.read_bytes()
    assert content.count(damage[0]) == 1
    file.write_bytes(content.replace(*damage))
    with Engine(folder, kv_tokens=1024) as engine:
        assert engine.load_cache(file) == 0
        assert not engine.tree(namespace="x").nodes


def test_a_saved_cache_that_says_to_hold_more_than_it_does_takes_no_memory_for_it(tmp_path: Path) -> None:
    layout, file = Layout(b"m", PAGE, 64), tmp_path / "cache.niwaki"
    with CacheWriter(file, layout) as writer:
        writer.add(SavedPath("", np.arange(PAGE, dtype=np.int32), 0, page(1).reshape(1, 64)))
    assert len(list(read_cache(file, layout))) == 1
    content = file.read_bytes()
    for zeros in (b"0" * 9, b"0" * 30):  # more than the machine has, more than a size can be
        claimed = content.replace(b'"tokens": 16', b'"tokens": 16' + zeros).replace(
            b'"pages": 1', b'"pages": 1' + zeros
        )
        file.write_bytes(claimed)
        assert list(read_cache(file, layout)) == []


def test_a_saved_cache_that_says_to_hold_less_than_nothing_is_damaged(tmp_path: Path) -> None:
    layout, file = Layout(b"m", PAGE, 64), tmp_path / "cache.niwaki"
    with CacheWriter(file, layout) as writer:
        writer.add(SavedPath("", np.arange(PAGE, dtype=np.int32), 0, page(1).reshape(1, 64)))
    claimed = file.read_bytes().replace(b'"tokens": 16', b'"tokens": -1').replace(b'"pages": 1', b'"pages": 0')
    file.write_bytes(claimed)
    assert list(read_cache(file, layout)) == []
