"""The places of numbers in the blocks and lines of layers.py, and into what pieces the work of a line is cut."""

from __future__ import annotations

import numpy as np

from niwaki.kernels.atomics import rows_at
from niwaki.kernels.jit import jit
from niwaki.kernels.linear_tiles import ROWS_AT_ONCE, blocks_of, units_of
from niwaki.kernels.packed_rows import WIDE
from niwaki.kernels.segments import Int64s
from niwaki.kernels.simd import LANES

# Of a block: who may read it, and what the step is.
STEP, INSIDE, THREADS, LINES, NUM_LINES = range(5)
TOKENS, WANTED, NUM_WANTED, POSITIONS, SLOTS, LOGITS = range(5, 11)
TABLE, TABLE_ROWS, TABLE_WIDTH = range(11, 14)
NUM_QUERIES, TOKEN, TABLE_ROW, LENGTH, FIRST_KEY = range(14, 19)  # as `DecodeQueries`
NUM_SEGMENTS, SEGMENTS, SEGMENT_TOKENS = range(19, 22)  # as `plan.FlatSegments`
NUM_LONG, LONG, MIXED, LSE = range(22, 26)  # as `plan.FlatRows`, and `Partial`
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES, NUMBERS = range(26, 32)
ROOTS = 32  # the first so many segments begin with the first key, and have no tokens in common
NUM_ASKS = 33  # as later.py makes them
START = 34  # pieces, then pieces taken, then pieces done, of each line; then where memory is asked

TOLD_BLOCK, TOLD_STEP = range(2)  # of what a helper is told

# Of a line: what it does, whether to the tokens whose logits are wanted or to all, and addresses and widths.
NORM, ADD_NORM, QK_NORM, FEW, PAIRS, TILES, PACKED, CODED, STORE = range(9)
SHARED, NESTED, OWN, GATE, SELECT, TURN, CHAIN = range(9, 16)
LINE_WIDTH = 12
BY_ROWS = (NORM, ADD_NORM, QK_NORM, TILES, PACKED, STORE, GATE)  # what a chain may have
MOST_ROWS = 3  # of a chain: of a block of rows
STRIP = 8  # of a line of TILES or PACKED: READS where x is as short as that, WRITES where what it writes is
READS, WRITES = 1, 2
GATES = 9  # of a line of PACKED: 0, or tiles of sixteen gates, behind which the ups come; it writes silu(gate) x up

EPS, OFFSET, SCALE = range(3)  # of the numbers, float64

QUERIES_OF_A_STACK = 768  # of which each has 256 bytes of sums and as much again beside them, for heads of 64
ALL = 1 << 40

# Of the matrix unit: rows that go through a chain at once, which bring the weights into the core's cache once, and rows
# for each thread below which lines are divided by outputs instead. Steps as of W1, W12 and W13 (L15) by 64, 128 and 512
# rows took 0.74 to 1.23 of the time in medians of seven rounds, with wider ranges: nothing told them apart.
MOST_PACKED, LEAST_PACKED = 256, 64

PIECES = 4  # of a line for each thread
LEAST_TOKENS, LEAST_COLUMNS = 8, 16  # in a piece; columns of few rows, which are read as vectors

# Kinds of memory.
FLOATS, DOUBLES, WORDS = np.empty(0, np.float32), np.empty(0, np.float64), np.empty(0, np.int32)


@jit()
def work_of(block: Int64s, line: Int64s) -> tuple[int, int]:
    """What a line's work is counted in, and how many of them make a piece at least."""
    kind = line[0]
    rows = block[NUM_WANTED] if line[1] else block[TOKENS]
    if kind in (FEW, PAIRS):
        return (line[6] + LEAST_COLUMNS - 1) // LEAST_COLUMNS, 1
    if kind == TILES:
        return units_of(rows, line[6], parts_of(block)), 1
    if kind == CHAIN:
        return blocks_of_chain(block, line), 1
    if kind in (PACKED, CODED):  # each piece lays the rows out anew
        blocks = blocks_of_packed(line) if kind == PACKED else (line[6] + WIDE - 1) // WIDE
        return blocks, (blocks + 2 * block[THREADS] - 1) // (2 * block[THREADS])
    if kind == SHARED:
        stacks = stacks_of_roots(block, line)
        return stacks * shares_of_heads(block, stacks), 1
    if kind == NESTED:
        return (shares_of_heads(block, 1) if block[ROOTS] < block[NUM_SEGMENTS] else 0), 1
    if kind == OWN:
        return block[NUM_QUERIES] * block[KV_HEADS], 1
    return rows, LEAST_TOKENS


@jit()
def blocks_of_packed(line: Int64s) -> int:
    """Of columns of what a line of PACKED writes."""
    return int(line[GATES] if line[GATES] else (line[6] + WIDE - 1) // WIDE)


@jit()
def blocks_of_chain(block: Int64s, line: Int64s) -> int:
    """0 where its lines are done one by one: where their products would be divided by outputs."""
    rows, threads = block[NUM_WANTED] if line[1] else block[TOKENS], block[THREADS]
    if line[MOST_ROWS] == ROWS_AT_ONCE:
        blocks = blocks_of(rows)
        return blocks if blocks >= parts_of(block) else 0
    if rows < LEAST_PACKED * threads:
        return 0
    most = threads * line[MOST_ROWS]
    return int((rows + most - 1) // most * threads)


@jit()
def row_of_chain(block: Int64s, line: Int64s, piece: int) -> int:
    """Where a block begins. None is larger than one before it, whose place a thread may write it to."""
    rows = block[NUM_WANTED] if line[1] else block[TOKENS]
    if line[MOST_ROWS] == ROWS_AT_ONCE:
        return int(min(piece * ROWS_AT_ONCE, rows))
    units, blocks = (rows + WIDE - 1) // WIDE, blocks_of_chain(block, line)
    return int(min((piece * (units // blocks) + min(piece, units % blocks)) * WIDE, rows))


@jit()
def parts_of(block: Int64s) -> int:
    """Into how many pieces a line is cut, about."""
    return 1 if block[THREADS] == 1 else PIECES * block[THREADS]


@jit()
def _stacks(block: Int64s, line: Int64s, tokens: int) -> int:
    """Into how many stacks those are divided that read the same keys: their sums should stay in the core's cache while
    the keys pass by. Those of whose tokens only some are wanted are one."""
    if line[1]:
        return 1
    return int((tokens * (block[HEADS] // block[KV_HEADS]) + QUERIES_OF_A_STACK - 1) // QUERIES_OF_A_STACK)


@jit()
def stacks_of_roots(block: Int64s, line: Int64s) -> int:
    segments = rows_at(block[SEGMENTS], block[ROOTS], 5, block)
    total = 0
    for s in range(block[ROOTS]):
        total += _stacks(block, line, segments[s, 4] - segments[s, 3])
    return total


@jit()
def stacks_of_rows(block: Int64s, line: Int64s) -> int:
    long = rows_at(block[LONG], block[NUM_LONG], 5, block)
    total = 0
    for row in range(block[NUM_LONG]):
        total += _stacks(block, line, long[row, 1])
    return total


@jit()
def place_of(block: Int64s, line: Int64s, stack: int) -> tuple[int, int, int]:
    """Of a number among `stacks_of_roots` or, where `line` is OWN, `stacks_of_rows`: the segment or row, and which of
    its tokens are this one's, from and to."""
    is_own = line[0] == OWN
    numbers = rows_at(block[LONG] if is_own else block[SEGMENTS], block[NUM_LONG] if is_own else block[ROOTS], 5, block)
    place = 0
    while True:
        tokens = numbers[place, 1] if is_own else numbers[place, 4] - numbers[place, 3]
        stacks = _stacks(block, line, tokens)
        if stack < stacks:
            size = (tokens + stacks * LANES - 1) // (stacks * LANES) * LANES
            return place, min(stack * size, tokens), min((stack + 1) * size, tokens)
        place, stack = place + 1, stack - stacks


@jit()
def shares_of_heads(block: Int64s, places: int) -> int:
    """Into how many shares heads are divided that read the same keys at so many places. Memory answers quickest when
    all heads read what lies side by side in a page, so not at all where there are places enough for every thread."""
    return 1 if places >= 2 * block[THREADS] else min(block[KV_HEADS], block[THREADS])


@jit()
def asked_with(block: Int64s, i: int, unit: int) -> tuple[int, int, int, int]:
    """The pools of the next attention behind line `i`, of TILES, and which of its pieces of later.py, first those of
    keys, are asked for with this unit of so many: as large a part as the unit is of all products between."""
    lines = block[NUM_LINES]
    table = rows_at(block[LINES], lines, LINE_WIDTH, block)
    first, last = i, i
    while first > 0 and table[first - 1, 0] != OWN:
        first -= 1
    while last < lines and table[last, 0] != OWN:
        last += 1
    if last == lines or table[last, 1]:
        return 0, 0, 0, 0
    before, total = 0, 0
    for number in range(first, last):
        if table[number, 0] == TILES:
            products = table[number, 5] * table[number, 6]
            total += products
            before += products if number < i else 0
    units, own = units_of(block[TOKENS], table[i, 6], parts_of(block)), table[i, 5] * table[i, 6]
    all_pieces = 2 * block[NUM_ASKS]
    return (
        table[last, 4], table[last, 5], all_pieces * (before * units + own * unit) // (total * units),
        all_pieces * (before * units + own * (unit + 1)) // (total * units)
    )  # fmt: skip


@jit()
def size_of_piece(block: Int64s, line: Int64s) -> int:
    units, least = work_of(block, line)
    parts = parts_of(block)
    if line[0] in (TILES, CHAIN):
        return 1
    return max(least, int((units + parts - 1) // parts))


@jit()
def cut(block: Int64s) -> None:
    """The pieces of each line, none of them taken."""
    lines = block[NUM_LINES]
    table = rows_at(block[LINES], lines, LINE_WIDTH, block)
    chained = 0  # lines behind this one that are done by a chain
    for i in range(lines):
        size = size_of_piece(block, table[i])
        units, _ = work_of(block, table[i])
        pieces = (units + size - 1) // size
        if table[i, 0] == OWN:
            stacks = stacks_of_rows(block, table[i])
            pieces += stacks * shares_of_heads(block, stacks)
        if chained > 0:
            pieces, chained = 0, chained - 1
        elif table[i, 0] == CHAIN and pieces > 0:
            chained = table[i, 2]
        block[START + i] = pieces
        block[START + lines + i] = block[START + 2 * lines + i] = 0
