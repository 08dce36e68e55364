"""What rows share is found from their page tables alone, and read once where the cost model says so."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest

from niwaki.kernels.segments import Costs, Segments, find_segments

PAGE = 16
LONGEST_PAGED = 8
ALWAYS = Costs(paged_pair=1.0, dense_pair=0.0, key=1.0, query=0.0, segment=0.0)
NEVER = Costs(paged_pair=1.0, dense_pair=1.0, key=0.0, query=1.0, segment=1.0)


@dataclass(frozen=True)
class Batch:
    tables: list[list[int]]
    shareable: list[int]
    counts: list[int]

    def find(self, costs: Costs) -> Segments:
        table = np.zeros((len(self.tables), max(map(len, self.tables))), np.int32)
        for row, pages in enumerate(self.tables):
            table[row, : len(pages)] = pages
        return find_segments(
            table,
            np.array(self.shareable, np.int64),
            np.array(self.counts, np.int64),
            page_size=PAGE,
            longest_paged=LONGEST_PAGED,
            costs=costs,
        )


def random_batch(seed: int) -> Batch:
    """Rows that grow as branches of one another, as forks make them, on shuffled pages and in any order."""
    random = np.random.default_rng(seed)
    free = random.permutation(4000).tolist()
    paths: list[list[int]] = [[]]
    for _ in range(random.integers(1, 12)):
        trunk = paths[random.integers(len(paths))]
        paths.append([*trunk, *(free.pop() for _ in range(random.integers(1, 6)))])
    tables, shareable, counts = [], [], []
    for _ in range(random.integers(1, 20)):
        path = paths[random.integers(len(paths))]
        tables.append([*path, *(free.pop() for _ in range(random.integers(1, 4)))])
        shareable.append(int(random.integers(0, len(tables[-1]))) if random.random() < 0.2 else len(path))
        counts.append(int(random.choice([1, 1, 1, 3, 20])))
    return Batch(tables, shareable, counts)


def runs(batch: Batch, found: Segments) -> list[tuple[int, int, list[int]]]:
    """(first page, end page, rows) of every segment."""
    return [
        (int(found.first_page[i]), int(found.end_page[i]), found.rows[found.bounds[i] : found.bounds[i + 1]].tolist())
        for i in range(len(found))
    ]


@pytest.mark.parametrize("costs", [ALWAYS, NEVER, Costs(80.0, 8.0, 25.0, 130.0, 50_000.0)], ids=["all", "none", "cpu"])
def test_segments_are_equal_pages_and_cover_each_rows_head_without_a_gap(costs: Costs) -> None:
    for seed in range(150):
        batch = random_batch(seed)
        found = batch.find(costs)
        reached = [0] * len(batch.tables)
        for first, end, rows in runs(batch, found):
            assert len(rows) > 1
            assert first < end
            assert len({tuple(batch.tables[row][:end]) for row in rows}) == 1, "everything before is the same, too"
            for row in rows:
                assert first == reached[row], "ancestors come first, and nothing is left out or read twice"
                assert end <= batch.shareable[row]
                reached[row] = end
        assert found.row_end.tolist() == reached


def test_what_costs_nothing_is_shared_to_the_last_page() -> None:
    for seed in range(150):
        batch = random_batch(seed)
        found = batch.find(ALWAYS)
        read = sum(end - first for first, end, _ in runs(batch, found))
        read += sum(len(pages) - end for pages, end in zip(batch.tables, found.row_end, strict=True))
        paths = [pages[: batch.shareable[row]] for row, pages in enumerate(batch.tables)]
        distinct = {tuple(path[: depth + 1]) for path in paths for depth in range(len(path))}
        own = sum(len(pages) - len(path) for pages, path in zip(batch.tables, paths, strict=True))
        assert read == len(distinct) + own, f"seed {seed}: every node of the tree is read once"


def test_what_does_not_pay_is_not_shared() -> None:
    assert not any(len(random_batch(seed).find(NEVER)) for seed in range(50))


def test_a_short_node_is_read_with_its_children_instead() -> None:
    trunk, left, right = [7], list(range(100, 140)), list(range(200, 240))
    batch = Batch([[*trunk, *left, 1], [*trunk, *right, 2], [*trunk, *left, 3], [*trunk, *right, 4]], [41] * 4, [1] * 4)
    launches = Costs(paged_pair=1.0, dense_pair=0.0, key=0.0, query=0.0, segment=20.0 * PAGE)
    assert sorted(runs(batch, batch.find(ALWAYS))) == [(0, 1, [0, 1, 2, 3]), (1, 41, [0, 2]), (1, 41, [1, 3])]
    assert sorted(runs(batch, batch.find(launches))) == [(0, 41, [0, 2]), (0, 41, [1, 3])]


def test_long_rows_share_for_the_sake_of_gathering() -> None:
    batch = Batch([[5, 6, 1], [5, 6, 2]], [2, 2], [20, 20])
    assert runs(batch, batch.find(Costs(1.0, 1.0, key=50.0, query=1.0, segment=0.0))) == [(0, 2, [0, 1])]
    assert not len(batch.find(Costs(1.0, 1.0, key=0.0, query=1.0, segment=0.0)))


def test_long_rows_share_less_where_what_others_have_read_is_near() -> None:
    near = Costs(1.0, 1.0, key=50.0, query=1.0, segment=0.0, key_again=0.1)
    assert not len(Batch([[5, 6, 1], [5, 6, 2]], [2, 2], [20, 20]).find(near))
    short = Batch([[5, 6, 1], [5, 6, 2]], [2, 2], [3, 3])
    assert len(short.find(near)) == len(short.find(replace(near, key_again=None)))


def test_segments_are_found_without_torch() -> None:
    code = "import sys, niwaki.kernels.segments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
