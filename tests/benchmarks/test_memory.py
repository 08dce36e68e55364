"""The cache wastes little memory and needs little for its books: the figures of bench_memory.py, in small."""

from __future__ import annotations

from tests.benchmarks.bench_memory import PAGE, bookkeeping, waste
from tests.benchmarks.shapes import SHAPES


def test_less_than_four_percent_of_the_held_slots_are_unused() -> None:
    assert 0.01 < waste(steps=300) < 0.04


def test_the_books_of_a_full_pool_take_less_than_a_hundredth_of_its_kv() -> None:
    assert 0 < bookkeeping(num_pages=1500) < 0.01 * PAGE * SHAPES["niwaki-tiny"].kv_bytes_per_token()
