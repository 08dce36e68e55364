"""What products ask memory for: all that the next attention of single queries reads, and every piece of it once."""

from __future__ import annotations

import numpy as np
import pytest

from niwaki.kernels.later import MOST, pieces_of
from niwaki.kernels.linear_tiles import units_of
from niwaki.kernels.pair_products import ASKED
from niwaki.kernels.pieces import (
    LINE_WIDTH,
    LINES,
    NORM,
    NUM_ASKS,
    NUM_LINES,
    OWN,
    START,
    THREADS,
    TILES,
    TOKENS,
    asked_with,
    parts_of,
)
from niwaki.kernels.segments import Int32s

PAGE_SIZE, PAGE_BYTES = 16, 4096


def numbers(*values: int) -> Int32s:
    return np.array(values, np.int32)


def test_the_pieces_are_those_of_the_pages_that_single_queries_read() -> None:
    pages = np.array([[7, 3, 5], [7, 2, 0]], np.int32)
    asks = np.empty(MOST, np.int64)
    count = pieces_of(pages, numbers(0, 1), numbers(33, 32), numbers(0, 16), PAGE_SIZE, PAGE_BYTES, asks)
    expected = [page * PAGE_BYTES + piece * ASKED for page in (7, 3, 5, 2) for piece in range(PAGE_BYTES // ASKED)]
    assert asks[:count].tolist() == expected


@pytest.mark.parametrize(("length", "page_bytes"), [(16 * 1025, 4096), (40, 1000)])
def test_too_many_and_parts_of_pieces_are_not_asked_for(length: int, page_bytes: int) -> None:
    pages = np.zeros((1, 2000), np.int32)
    asks = np.empty(MOST, np.int64)
    assert pieces_of(pages, numbers(0), numbers(length), numbers(0), PAGE_SIZE, page_bytes, asks) == 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_products_before_an_attention_ask_for_each_of_its_pieces_once(threads: int) -> None:
    product = [(TILES, 384, 384), (NORM, 0, 0), (TILES, 384, 1920), (TILES, 960, 384), (NORM, 0, 0), (TILES, 384, 640)]
    lines = [product[-1], (OWN, 0, 0), *product, (OWN, 0, 0), *product[:4]]
    table = np.zeros((len(lines), LINE_WIDTH), np.int64)
    for i, (kind, inputs, outputs) in enumerate(lines):
        table[i, 0], table[i, 5], table[i, 6] = kind, inputs, outputs
    table[1, 4:6], table[8, 4:6] = (11, 12), (21, 22)  # the pools
    block = np.zeros(START + 3 * len(lines), np.int64)
    block[LINES], block[NUM_LINES], block[TOKENS], block[THREADS] = table.ctypes.data, len(lines), 32, threads
    block[NUM_ASKS] = 101
    asked: dict[tuple[int, int], list[int]] = {}
    for i, (kind, _, outputs) in enumerate(lines):
        for unit in range(units_of(32, outputs, parts_of(block)) if kind == TILES else 0):
            keys, values, first, end = asked_with(block, i, unit)
            asked.setdefault((keys, values), []).extend(range(first, end))
    assert asked == {(11, 12): list(range(202)), (21, 22): list(range(202)), (0, 0): []}
