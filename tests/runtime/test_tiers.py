"""Pages that left the pool come back from memory, from disk and from a saved cache, and are what they were."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niwaki.runtime.api import ConfigError, GenerationError, Segment
from niwaki.runtime.engine import Engine
from niwaki.runtime.forward.runner import Runner
from niwaki.runtime.kv import page_keys
from niwaki.runtime.kv.page_keys import KEPT_TEXTS, PageKeys
from niwaki.runtime.kv.tiers import FIRST_READ, HEADER, LOOKED_AT, Bytes, DiskStore, MemoryStore, Tiers
from tests.toy import VOCAB_SIZE, make_model

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
PAGE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"), sharpness=3.0)


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, VOCAB_SIZE) for _ in range(length)]


def run(engine: Engine, ids: list[int]) -> tuple[list[int], int]:
    """The new tokens, and how many of the prompt were not computed."""
    result: Any = engine.generate(input_ids=ids, sampling_params=GREEDY)
    return list(result["output_ids"]), int(result["meta_info"]["cached_tokens"])


def page(value: int, size: int = 64) -> Bytes:
    return np.full(size, value, np.uint8)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick the toy is beside this disk."""
    monkeypatch.setattr(Tiers, "computed", lambda *_: None)


@pytest.mark.usefixtures("reading_pays")
@pytest.mark.parametrize("tier", ["memory", "disk", "both"])
def test_what_the_pool_had_no_room_for_comes_back_and_is_the_same(folder: Path, tmp_path: Path, tier: str) -> None:
    first, second = prompt(1, 100), prompt(2, 110)
    with Engine(folder, kv_tokens=1024) as ample:
        expected = run(ample, first)[0]
    options: dict[str, object] = {}
    if tier != "disk":
        options["host_cache_bytes"] = 1 << 24 if tier == "memory" else 1  # one byte: all goes on to the disk
    if tier != "memory":
        options["disk_cache_dir"] = tmp_path / "pages"
    with Engine(folder, kv_tokens=128, **options) as engine:
        assert run(engine, first) == (expected, 0)
        run(engine, second)  # takes all room
        assert run(engine, first) == (expected, 96), "six full pages of the prompt were fetched"
        assert engine.stats()["tier_restored_tokens"] == 96
        shown = {node.tier for node in engine.tree().nodes}
        assert shown == {"pool", "memory" if tier == "memory" else "disk"}, "the tree shows what left, too"
        engine.backend.check()
    if tier != "memory":
        with Engine(folder, kv_tokens=256, disk_cache_dir=tmp_path / "pages") as later:
            assert run(later, first)[1] >= PAGE, "another process finds on disk what was evicted before"


@pytest.mark.usefixtures("reading_pays")
def test_a_last_page_that_is_full_is_fetched_too_and_one_token_computed(folder: Path, tmp_path: Path) -> None:
    first, second = prompt(1, 96), prompt(2, 110)
    with Engine(folder, kv_tokens=128, host_cache_bytes=1 << 24) as engine:
        expected = run(engine, first)[0]
        run(engine, second)
        assert run(engine, first) == (expected, 95)
        assert engine.stats()["tier_restored_tokens"] == 95
        engine.backend.check()


@pytest.mark.usefixtures("reading_pays")
def test_random_traffic_through_a_small_pool_and_its_tiers_gives_the_tokens_of_a_cold_engine(
    folder: Path, tmp_path: Path
) -> None:
    draw = random.Random(7)
    heads = [prompt(seed, 48) for seed in range(4)]
    asked = [draw.choice(heads) + prompt(draw.randrange(12), draw.randint(1, 60)) for _ in range(40)]
    with Engine(folder, kv_tokens=4096, enable_prefix_cache=False) as cold:
        expected = [run(cold, ids)[0] for ids in asked]
    with Engine(folder, kv_tokens=160, host_cache_bytes=8 * PAGE * 1024, disk_cache_dir=tmp_path) as engine:
        assert [run(engine, ids)[0] for ids in asked] == expected
        assert engine.stats()["tier_restored_tokens"] > 0
        engine.backend.check()


def test_neither_namespaces_nor_models_meet_in_a_tier() -> None:
    ids = np.arange(32, dtype=np.int32)
    keys, others = PageKeys(b"m", PAGE), PageKeys(b"n", PAGE)
    assert not set(keys.of("a", ids)) & set(keys.of("b", ids))
    assert not set(keys.of("", ids)) & set(others.of("", ids))
    assert keys.of("", ids)[:1] == keys.of("", ids[:20])


def test_keys_that_are_remembered_are_those_that_are_made_anew() -> None:
    draw = random.Random(3)
    keys = PageKeys(b"m", 2)
    for _ in range(3000):
        ids = np.array([draw.randrange(2) for _ in range(draw.randrange(14))], np.int32)
        namespace = draw.choice("ab")
        made = keys.of(namespace, ids)
        assert made == PageKeys(b"m", 2).of(namespace, ids)
        assert len(made) == len(ids) // 2
        made.clear()  # they are the caller's
        assert len(keys._known) <= KEPT_TEXTS


def test_a_text_that_leaves_page_by_page_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    whole = page_keys.hashed

    def counted(content: bytes) -> bytes:
        hashed.append(content)
        return whole(content)

    monkeypatch.setattr(page_keys, "hashed", counted)
    keys, ids = PageKeys(b"m", PAGE), np.arange(20 * PAGE, dtype=np.int32)
    for count in range(20, 0, -1):
        keys.of("", ids[: count * PAGE])
    assert len(hashed) == 1 + 20, "one of model and namespace"


def test_the_memory_store_keeps_its_size_and_hands_on_the_least_used() -> None:
    store = MemoryStore(200)
    assert [store.put(key(n), page(n)) for n in range(3)] == [[], [], []]
    assert store.get(key(0)) is not None
    ((gone, content),) = store.put(key(3), page(3))
    assert (gone, content[0]) == (key(1), 1)
    assert store.counts() == {"pages": 3, "bytes": 192, "hits": 1}


def test_the_memory_store_copies_a_page_once_and_keeps_what_it_has() -> None:
    store, content = MemoryStore(130), page(0)
    store.put(key(0), content)
    content[:] = 9  # the memory is somebody else's by now
    store.put(key(1), page(1))
    assert store.put(key(0), page(5)) == [], "it is there"
    assert [gone for gone, _ in store.put(key(2), page(2))] == [key(1)], "and used last"
    kept = store.get(key(0))
    assert kept is not None
    assert kept.tolist() == page(0).tolist()
    assert store.counts()["bytes"] == 128


def test_a_torn_or_foreign_file_counts_as_missing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 1 << 20)
    for number in range(3):
        store.put(key(number), page(number))
    torn, other = (tmp_path / f"{key(number).hex()}.page" for number in (0, 1))
    torn.write_bytes(torn.read_bytes()[:-1])
    other.write_bytes((tmp_path / f"{key(2).hex()}.page").read_bytes())
    (tmp_path / "notes.page").write_text("not ours")
    with caplog.at_level(logging.WARNING, "niwaki.tiers"):
        again = DiskStore(tmp_path, 1 << 20)
        assert again.get(key(0)) is None
        assert again.get(key(1)) is None
    found = again.get(key(2))
    assert found is not None
    assert found.tolist() == page(2).tolist()
    assert len(caplog.records) == 1
    assert again.counts()["faults"] == 2
    assert not torn.exists()


def test_pages_of_any_size_come_back_from_a_file(tmp_path: Path) -> None:
    store, draw = DiskStore(tmp_path, 1 << 30), np.random.default_rng(0)
    sizes = (1, 7, 8, 65, FIRST_READ - HEADER.size, FIRST_READ - HEADER.size + 1, 5 * FIRST_READ, 64)
    pages = [draw.integers(0, 256, size, np.uint8) for size in sizes]
    for number, content in enumerate(pages):
        store.put(key(number), content)
    for number, content in enumerate(pages):
        found = store.get(key(number))
        assert found is not None
        assert found.tolist() == content.tolist()


def test_a_full_disk_ends_writing_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 1 << 20)
    store.put(key(0), page(0))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "niwaki.tiers"):
        patch.setattr(os, "replace", full)
        store.put(key(1), page(1))
        store.put(key(2), page(2))
    assert store.get(key(0)) is not None
    assert store.get(key(1)) is None
    assert [record.message for record in caplog.records] == [
        f"cannot write to {tmp_path}: [Errno 28] No space left on device; no more pages go there "
        "(told once; the count goes on)"
    ]
    assert [path.suffix for path in tmp_path.iterdir()] == [".page"]


def test_a_page_that_cannot_be_deleted_ends_writing_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 3 * 120)
    for number in range(3):
        store.put(key(number), page(number))
    for number in range(2):  # somebody has put folders in their place
        (tmp_path / f"{key(number).hex()}.page").unlink()
        (tmp_path / f"{key(number).hex()}.page").mkdir()
    with caplog.at_level(logging.WARNING, "niwaki.tiers"):
        store.put(key(3), page(3))
        assert store.get(key(1)) is None
    assert store.get(key(2)) is not None
    assert len(caplog.records) == 1
    assert store.counts()["faults"] == 3, "a page not deleted; one not read, and not deleted"


def test_a_page_that_another_process_has_just_deleted_is_not_there(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1 << 20)
    store.put(key(0), page(0))
    (tmp_path / f"{key(1).hex()}.page").symlink_to(tmp_path / "gone")  # listed, and not found
    again = DiskStore(tmp_path, 1 << 20)
    assert again.counts()["pages"] == 1
    assert again.get(key(1)) is None


def test_engines_that_share_a_folder_find_each_others_pages_and_keep_its_size_together(tmp_path: Path) -> None:
    size = HEADER.size + page(0).nbytes
    stores = [DiskStore(tmp_path, 100 * size) for _ in range(2)]
    for number in range(600):
        stores[number % 2].put(key(number), page(number % 256))
        # A page that is there while the folder is gone through is seen. So those of two rounds may not be.
        assert len(list(tmp_path.iterdir())) <= 100 + 2 * (120 // LOOKED_AT + 3)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size * len(list(tmp_path.iterdir()))
    for store in stores:
        for number in range(590, 600):
            found = store.get(key(number))
            assert store.holds(key(number))
            assert found is not None
            assert found.tolist() == page(number % 256).tolist()
        assert store.counts()["faults"] == 0


def test_a_page_that_another_engine_deleted_is_no_fault(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, 1 << 20), DiskStore(tmp_path, 1 << 20)
    store.put(key(0), page(0))
    assert other.get(key(0)) is not None
    other.clear()
    assert store.get(key(0)) is None
    assert store.counts() == {"pages": 0, "bytes": 0, "hits": 0, "faults": 0}


def test_a_page_that_another_engine_deleted_is_written_again_and_counts_once(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, 1 << 20), DiskStore(tmp_path, 1 << 20)
    store.put(key(0), page(0))
    other.clear()
    assert not store.holds(key(0))
    store.put(key(0), page(0))
    assert other.get(key(0)) is not None
    assert store.counts()["bytes"] == HEADER.size + page(0).nbytes
    assert store.counts()["pages"] == 1


def test_a_page_that_leaves_the_pool_again_counts_as_used(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 2 * (HEADER.size + page(0).nbytes))
    for number in (0, 1, 0, 2):
        store.put(key(number), page(number))
    assert [store.holds(key(number)) for number in range(3)] == [True, False, True]


def test_clearing_a_shared_folder_deletes_the_pages_of_all_engines_and_nothing_else(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, 1 << 20), DiskStore(tmp_path, 1 << 20)
    for number in range(2 * LOOKED_AT):
        other.put(key(number), page(number))
    names = ("notes.page", "ab.page", ".page", f"{'AB' * 16}.page", "readme.txt")
    for name in names:
        (tmp_path / name).write_text("not ours")
    store.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert store.counts() == {"pages": 0, "bytes": 0, "hits": 0, "faults": 0}


class Broken(MemoryStore):
    """A store whose other end is gone: what is named in `raising` does not answer."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.raising: set[str] = set()

    def get(self, key: bytes) -> Bytes | None:
        self._answer("get")
        return super().get(key)

    def put(self, key: bytes, page: Bytes) -> list[tuple[bytes, Bytes]]:
        self._answer("put")
        return super().put(key, page)

    def holds(self, key: bytes) -> bool:
        self._answer("holds")
        return super().holds(key)

    def touch(self, key: bytes) -> bool:
        self._answer("touch")
        return super().touch(key)

    def clear(self) -> None:
        self._answer("clear")
        super().clear()

    def _answer(self, name: str) -> None:
        if name in self.raising:
            raise ConnectionError(f"nobody answers to {name}")


@pytest.mark.usefixtures("reading_pays")
def test_a_store_that_raises_costs_computing_again_one_warning_and_a_count(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = prompt(1, 100), prompt(2, 110)
    with Engine(folder, kv_tokens=128, host_cache_bytes=1 << 24) as engine:
        broken = Broken()
        tiers = engine.backend._core.pages._tiers
        assert tiers is not None
        tiers._stores = (broken,)
        expected = [run(engine, ids)[0] for ids in (first, second)]
        assert run(engine, first) == (expected[0], 96)
        with caplog.at_level(logging.WARNING, "niwaki.tiers"):
            broken.raising = {"get", "put", "holds", "touch", "clear"}
            for _ in range(3):
                for ids, tokens in ((second, expected[1]), (first, expected[0])):
                    found, num_cached = run(engine, ids)
                    assert found == tokens
                    assert num_cached <= PAGE, "but for one page the pool has room for the other alone"
            assert engine.tree().nodes
            branch = engine.backend.open()
            engine.backend.append(branch, [Segment("a")])
            engine.backend.demote(branch)
            engine.flush_cache()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "nobody answers" in caplog.records[0].getMessage()
        faults = engine.stats()["tier_faults"]
        assert faults >= 3 * 2 * 2 + 1, "a lookup and a page for each prompt, and the flush"
        broken.raising = set()
        run(engine, second)
        run(engine, first)
        assert run(engine, second) == (expected[1], 96), "who answers again is asked again"
        assert engine.stats()["tier_faults"] == faults
        engine.backend.check()


@pytest.mark.usefixtures("reading_pays")
def test_a_page_of_another_size_costs_computing_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Shortened(MemoryStore):
        def get(self, key: bytes) -> Bytes | None:
            page = super().get(key)
            return None if page is None else page[: next(sizes)]

    sizes = iter(range(1, 1000))
    first, second = prompt(1, 100), prompt(2, 110)
    with Engine(folder, kv_tokens=128, host_cache_bytes=1 << 24) as engine:
        tiers = engine.backend._core.pages._tiers
        assert tiers is not None
        tiers._stores = (Shortened(1 << 24),)
        expected = run(engine, first)
        run(engine, second)
        assert run(engine, first) == expected
        assert engine.stats()["tier_faults"] == 1
        engine.backend.check()


@pytest.mark.usefixtures("reading_pays")
@pytest.mark.parametrize(("owner", "name"), [(MemoryStore, "put"), (MemoryStore, "get"), (Runner, "copy_pages")])
def test_a_store_that_raises_costs_no_page_of_the_pool(
    folder: Path, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prompt(1, 100), prompt(2, 110)
    with Engine(folder, kv_tokens=128, host_cache_bytes=1 << 24) as engine:
        expected = run(engine, first)[0]
        whole, broken = getattr(owner, name), list[str]()

        def once(*args: object) -> object:
            if not broken:
                broken.append(name)
                raise RuntimeError("a bug")
            return whole(*args)

        monkeypatch.setattr(owner, name, once)
        for ids in (first[:-3] + second[:3], second, first):
            with contextlib.suppress(GenerationError):
                run(engine, ids)
        assert broken
        assert run(engine, first)[0] == expected
        engine.backend.check()
        assert engine.stats()["pages_held"] == 0


def test_the_disk_store_keeps_its_size(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 3 * 120)
    for number in range(5):
        store.put(key(number), page(number))
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= 360
    assert store.get(key(4)) is not None
    assert store.get(key(0)) is None


@pytest.mark.parametrize("name", ["memory", "disk"])
def test_a_page_that_is_in_the_first_store_is_not_read_from_the_pool_again(name: str, tmp_path: Path) -> None:
    size = HEADER.size + page(0).nbytes
    store = MemoryStore(4 * 64) if name == "memory" else DiskStore(tmp_path, 4 * size)
    tiers = Tiers([store], b"m", PAGE)
    asked: list[list[int]] = []

    def read(places: Sequence[int]) -> Bytes:
        asked.append(list(places))
        return np.stack([page(place) for place in places])

    ids, other = np.arange(3 * PAGE, dtype=np.int32), np.arange(7, 7 + 2 * PAGE, dtype=np.int32)
    tiers.keep("", ids[: 2 * PAGE], 0, 2, read)
    tiers.keep("", ids, 0, 3, read)
    tiers.keep("", ids, 1, 2, read)
    assert asked == [[0, 1], [2]]
    tiers.keep("", ids, 0, 1, read)  # the first of them counts as used: it is the second that leaves for others
    tiers.keep("", other, 0, 2, read)
    assert [tiers.first_missing("", ids, 0), tiers.first_missing("", other, 0)] == [1, 2]


def test_a_store_that_is_slower_than_computing_is_left_alone() -> None:
    tiers = Tiers([MemoryStore(1 << 20)], b"m", PAGE)
    ids = np.arange(32, dtype=np.int32)
    tiers.keep("", ids, 0, 2, lambda places: np.stack([page(1 + place) for place in places]))
    assert [content[0] for content in tiers.find("", ids, 0)] == [1, 2]
    tiers.computed(1_000_000, 1e-9)  # a model that costs nothing
    assert list(tiers.find("", ids, 0)) == []
    found = [len(list(tiers.find("", ids, 0))) for _ in range(Tiers.RETRY)]
    assert sorted(found)[-2:] == [0, 2], "tried again now and then"


def test_one_page_that_took_long_does_not_make_a_store_slow_and_some_in_a_row_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took = [1e-5] * 4 + [5.0] + [1e-5] * 7 + [5.0] * 12  # seconds, page by page
    clock = iter(itertools.accumulate((seconds for each in took for seconds in (each, 1e-5)), initial=0.0))
    monkeypatch.setattr("niwaki.runtime.kv.tiers.time.perf_counter", lambda: next(clock))
    tiers = Tiers([MemoryStore(1 << 20)], b"m", PAGE)
    ids = np.arange(4 * PAGE, dtype=np.int32)
    tiers.keep("", ids, 0, 4, lambda places: np.stack([page(place) for place in places]))
    tiers.computed(1, 1e-5)  # 160 us a page: reading pays
    found = [len(list(tiers.find("", ids, 0))) for _ in range(6)]
    assert found == [4, 4, 4, 4, 1, 0], "the second looks at one that took long, the last three at no others"


def test_what_a_killed_process_left_half_written_is_deleted_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: None)  # as if killed before it had its name
        DiskStore(tmp_path, 1 << 20).put(key(1), page(1))
    (left,) = tmp_path.iterdir()
    DiskStore(tmp_path, 1 << 20)
    assert left.exists(), "it may be another process's that is writing now"
    other = tmp_path / "notes.new"
    other.write_text("not ours")
    for path in (left, other):
        os.utime(path, (0, 0))
    DiskStore(tmp_path, 1 << 20)
    assert list(tmp_path.iterdir()) == [other]


def test_a_size_for_files_without_a_folder_for_them_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="disk_cache_bytes=4096 bounds the files in disk_cache_dir, which is not"):
        Engine(folder, kv_tokens=256, disk_cache_bytes=4096)


@pytest.mark.usefixtures("reading_pays")
def test_pages_that_were_read_and_not_written_to_the_pool_are_not_counted_as_restored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    first, second = prompt(1, 100), prompt(2, 110)
    with Engine(folder, kv_tokens=128, host_cache_bytes=1 << 24) as engine:
        expected = run(engine, first)
        run(engine, second)
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "write_pages", fails)
            assert run(engine, first) == expected, "computed again"
        assert engine.stats()["tier_restored_tokens"] == 0
        assert engine.stats()["tier_faults"] == 1
        run(engine, second)
        run(engine, first)
        assert engine.stats()["tier_restored_tokens"] > 0


@pytest.mark.parametrize("wrong", [5, "", b"pages"])
def test_a_disk_tier_needs_the_path_of_a_folder(folder: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match="disk_cache_dir must be the path of a folder"):
        Engine(folder, kv_tokens=256, disk_cache_dir=wrong)


def test_a_folder_whose_name_holds_a_nul_is_told_in_one_line(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk_cache_dir .* cannot be used: .*null"):
        Engine(folder, kv_tokens=256, disk_cache_dir="\0")


@pytest.mark.parametrize("option", [{"host_cache_bytes": 1 << 20}, {"disk_cache_dir": "pages"}])
def test_tiers_without_a_prefix_cache_are_refused(folder: Path, option: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_cache=False"):
        Engine(folder, kv_tokens=256, enable_prefix_cache=False, **option)
