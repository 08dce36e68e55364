"""All layers of a step in one native call, in which as many threads join as have time.

A step of a small model is a hundred kernels of some microseconds each. Called one by one they cost as much again in
Python, and no second thread can help: it would have to be woken for each, or pass the interpreter's lock to and fro.

Here the kernels are a table, a line each, and every thread that is let in goes down the same lines. The work of a line
is cut into pieces. Who is free takes the next one, by counting a number up, and goes on to the next line when the last
piece is done. Nobody waits for a thread that has not come: who comes late finds the pieces taken, who never comes is
not missed. No piece reads what another of its line writes, so no result depends on who did what.

Between two layers' attention every line goes from row to row. So where rows are many, a CHAIN of those lines is one
line: a piece of it is a block of rows, which goes through them all. What one writes is then in the core's own cache
when the next reads it, and the threads wait for each other once. What only the chain reads a thread writes again and
again to one place, the rows of the first block that it took.

What the threads of one step share is a *block*: numbers at the places that pieces.py names, then for each line how many
pieces it has, how many are taken, and how many done. Addresses are not checked; models/stack.py writes the lines.
"""

from __future__ import annotations

import numpy as np

from niwaki.kernels.atomics import blocks_at, count, pages_at, read, row_at, rows_at, seen, tell, wait_for
from niwaki.kernels.calls import call_at
from niwaki.kernels.coded_line import KERNEL, OUT
from niwaki.kernels.few_pairs import columns_by_pairs
from niwaki.kernels.jit import jit
from niwaki.kernels.later import ASKS_LATER, pieces_of
from niwaki.kernels.linear import columns_of as columns_of_few
from niwaki.kernels.linear import widened
from niwaki.kernels.linear_tiles import ROWS_AT_ONCE, columns_of, lay_pairs, ranges_of, units_of
from niwaki.kernels.operand import Array
from niwaki.kernels.packed import columns_of as packed_columns_of
from niwaki.kernels.packed_rows import WIDE
from niwaki.kernels.paged_decode import NO_SINKS, decode_items
from niwaki.kernels.partial import Float32s
from niwaki.kernels.pieces import (
    ADD_NORM,
    ALL,
    CHAIN,
    CODED,
    DOUBLES,
    EPS,
    FEW,
    FIRST_KEY,
    FLOATS,
    GATE,
    GATES,
    HEAD_DIM,
    HEADS,
    INSIDE,
    KV_HEADS,
    LEAST_COLUMNS,
    LENGTH,
    LINE_WIDTH,
    LINES,
    LOGITS,
    LONG,
    LSE,
    MIXED,
    NESTED,
    NORM,
    NUM_ASKS,
    NUM_LINES,
    NUM_LONG,
    NUM_PAGES,
    NUM_QUERIES,
    NUM_SEGMENTS,
    NUM_WANTED,
    NUMBERS,
    OFFSET,
    OWN,
    PACKED,
    PAGE_SIZE,
    PAIRS,
    POSITIONS,
    QK_NORM,
    READS,
    ROOTS,
    SCALE,
    SEGMENT_TOKENS,
    SEGMENTS,
    SELECT,
    SHARED,
    SLOTS,
    START,
    STEP,
    STORE,
    STRIP,
    TABLE,
    TABLE_ROW,
    TABLE_ROWS,
    TABLE_WIDTH,
    THREADS,
    TILES,
    TOKEN,
    TOKENS,
    TOLD_BLOCK,
    TOLD_STEP,
    TURN,
    WANTED,
    WORDS,
    WRITES,
    asked_with,
    blocks_of_packed,
    cut,
    parts_of,
    place_of,
    row_of_chain,
    shares_of_heads,
    size_of_piece,
    stacks_of_roots,
    stacks_of_rows,
)
from niwaki.kernels.rms_norm import add_rms_norm_rows, qk_norm_rows, rms_norm_rows
from niwaki.kernels.rule import NO_CAP, NO_WINDOW
from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.silu_mul import silu_mul_rows
from niwaki.kernels.store_kv import rope_store_rows, turn_rows
from niwaki.kernels.tile_attention import attend_heads
from niwaki.kernels.tiles import ROWS, WHOLE, has_matrix_unit

# A single token, of a long row whose last one alone is wanted, goes as one that decodes: a stack of it takes as long as
# of sixteen queries. Keys near, of 1,000 and 4,000: 0.43 and 0.46 of the time (niwaki-tiny), 0.68 and 0.79 (L15), 0.41
# and 0.79 (L60); out of memory 0.8 to 1.2. Two tokens take 0.8 to 1.4 (EPYC, Zen 4, 28 November 2026, one thread beside
# other work). Nobody timed it by a matrix unit.
ONE_ALONE = not has_matrix_unit()


@jit()
def begin(
    block: Int64s, step: int, threads: int, table: Int64s, positions: Int64s, slots: Int64s, pages: Int32s,
    wanted: Int64s, num_wanted: int, logits: Array, token: Int32s, table_row: Int32s, length: Int32s,
    first_key: Int32s, segments: Int64s, segment_tokens: Int32s, long: Int64s, mixed: Float32s, lse: Float32s,
) -> None:  # fmt: skip
    """Write a step to its block, for those who look for number `step`. The arrays must live until `end`."""
    block[THREADS] = threads
    block[LINES], block[NUM_LINES] = table.ctypes.data, table.shape[0]
    block[TOKENS], block[POSITIONS], block[SLOTS] = positions.shape[0], positions.ctypes.data, slots.ctypes.data
    block[WANTED], block[NUM_WANTED], block[LOGITS] = wanted.ctypes.data, num_wanted, logits.ctypes.data
    block[TABLE], block[TABLE_ROWS], block[TABLE_WIDTH] = pages.ctypes.data, pages.shape[0], pages.shape[1]
    block[NUM_QUERIES], block[TOKEN], block[TABLE_ROW] = token.shape[0], token.ctypes.data, table_row.ctypes.data
    block[LENGTH], block[FIRST_KEY] = length.ctypes.data, first_key.ctypes.data
    block[NUM_SEGMENTS], block[SEGMENTS], block[SEGMENT_TOKENS] = (
        segments.shape[0], segments.ctypes.data, segment_tokens.ctypes.data
    )  # fmt: skip
    roots = 0
    while roots < segments.shape[0] and segments[roots, 1] == 0:
        roots += 1
    block[ROOTS] = roots
    block[NUM_LONG], block[LONG] = long.shape[0], long.ctypes.data
    block[MIXED], block[LSE] = mixed.ctypes.data, lse.ctypes.data
    block[NUM_ASKS] = 0
    if ASKS_LATER and ROWS < positions.shape[0] <= ROWS_AT_ONCE:
        page_bytes = block[PAGE_SIZE] * block[KV_HEADS] * block[HEAD_DIM] * 2
        block[NUM_ASKS] = pieces_of(
            pages, table_row, length, first_key, block[PAGE_SIZE], page_bytes, block[START + 3 * table.shape[0] :]
        )  # fmt: skip
    cut(block)
    tell(block, STEP, step)


@jit()
def end(block: Int64s) -> None:
    """Nobody may begin to help any more. Who is inside finds all pieces taken, and reads the block alone."""
    tell(block, STEP, 0)


@jit()
def is_free(block: Int64s) -> bool:
    """Whether nobody reads the block of a step that has ended."""
    return seen(block, INSIDE) == 0


@jit(nogil=True)
def work(event: int, block: Int64s, like: Array) -> None:
    """Do what is left of the step in `block`, and return when all of it is done. Or, where there is an event (>= 0: a
    descriptor, from which 8 bytes can be read when it has come), help each time with the step that `block` then tells
    of. TOLD_BLOCK: the address of a block as long, 0 to end; TOLD_STEP: the number. `like`: an empty array of bfloat16,
    as uint16.

    One function for both: it is long, and this way compiled once.
    """
    come = np.zeros(1, np.int64)
    while event < 0 or read(event, come.ctypes.data, 8) == 8:
        place, step = block.ctypes.data, block[STEP]
        if event >= 0:
            place, step = seen(block, TOLD_BLOCK), seen(block, TOLD_STEP)
            if place == 0:
                break
        shared = row_at(place, block.shape[0], come)
        count(shared, INSIDE, 1)
        if seen(shared, STEP) == step:
            lines = shared[NUM_LINES]
            for i in range(lines):
                if seen(shared, START + lines + i) < shared[START + i]:
                    _help(shared, i, like)
                wait_for(shared, START + 2 * lines + i, shared[START + i])
        count(shared, INSIDE, -1)
        if event < 0:
            break


@jit(inline=True)
def _help(block: Int64s, i: int, like: Array) -> None:
    """Take pieces of line `i` until there are none."""
    lines, pieces = block[NUM_LINES], block[START + i]
    piece = count(block, START + lines + i, 1)
    if piece >= pieces:
        return
    head = row_at(block[LINES] + i * LINE_WIDTH * 8, LINE_WIDTH, block)
    chained, behind = (head[2], 1) if head[0] == CHAIN else (1, 0)
    size, strip = size_of_piece(block, head), piece
    rows = block[NUM_WANTED] if head[1] else block[TOKENS]
    strip_row = row_of_chain(block, head, strip) if behind else 0
    wide = np.empty((0, 0), np.float32)
    laid, laid_block = np.empty(0, np.float32), -1
    if head[0] == FEW:
        wide = widened(rows_at(head[2], rows, head[5], like))
    while piece < pieces:
        row, end_row = 0, rows
        if behind:
            row, end_row = row_of_chain(block, head, piece), row_of_chain(block, head, piece + 1)
        for number in range(chained):
            line = row_at(block[LINES] + (i + behind + number) * LINE_WIDTH * 8, LINE_WIDTH, block)
            kind, first, last = line[0], piece * size, (piece + 1) * size
            if kind == TILES:
                ranges = ranges_of(rows, line[6], parts_of(block))
                x, out = line[2], line[4]
                if behind:
                    laid_block = -1
                    shift = (strip_row - row) * 2
                    x += shift * line[5] if line[STRIP] & READS else 0
                    out += shift * line[6] if line[STRIP] & WRITES else 0
                for unit in range(first, min(last, units_of(rows, line[6], parts_of(block)))):
                    if unit // ranges != laid_block:
                        laid_block = unit // ranges
                        top = laid_block * ROWS_AT_ONCE
                        laid = lay_pairs(rows_at(x + top * line[5] * 2, min(rows - top, ROWS_AT_ONCE), line[5], like))
                    keys, values, ask, end_ask = 0, 0, 0, 0
                    if block[NUM_ASKS] and not line[1]:
                        keys, values, ask, end_ask = asked_with(block, i + behind + number, unit)
                    _tiles(
                        block, line, rows, x, out, laid, laid_block, unit % ranges, ranges, keys, values, ask, end_ask,
                        like
                    )  # fmt: skip
            elif kind == CODED:
                out = line[OUT] if line[OUT] else block[LOGITS]
                call_at(line[KERNEL], line.ctypes.data, rows, out, first, last)
            elif kind == PACKED and behind:
                _packed(
                    line, line[2] + (strip_row if line[STRIP] & READS else row) * line[5] * 2,
                    line[4] + (strip_row if line[STRIP] & WRITES else row) * line[6] * 2, end_row - row, 0, ALL, like
                )  # fmt: skip
            elif kind == PACKED:
                _packed(line, line[2], line[4] if line[4] else block[LOGITS], rows, first, last, like)
            elif kind in (FEW, PAIRS):
                _columns(block, line, rows, wide, first, last, like)
            elif kind in (SHARED, NESTED):
                places = stacks_of_roots(block, line) if kind == SHARED else 1
                shares, heads = shares_of_heads(block, places), block[KV_HEADS]
                for unit in range(first, min(last, places * shares)):
                    share, begin_at, end_at, token, end_token = unit % shares, block[ROOTS], block[NUM_SEGMENTS], 0, ALL
                    if kind == SHARED:
                        begin_at, token, end_token = place_of(block, line, unit // shares)
                        end_at = begin_at + 1
                    _read_shared(
                        block, line, begin_at, end_at, token, end_token, heads * share // shares,
                        heads * (share + 1) // shares, like
                    )  # fmt: skip
            elif kind == OWN:
                _read_own(block, line, piece, size, like)
            elif behind:
                _rows(block, line, row, end_row, strip_row if kind == GATE else row, like)
            else:
                _rows(block, line, first, min(last, rows), first, like)
        count(block, START + 2 * lines + i, 1)
        piece = count(block, START + lines + i, 1)


@jit(inline=True)
def _tiles(
    block: Int64s, line: Int64s, rows: int, x: int, place: int, laid: Float32s, laid_block: int, number: int,
    ranges: int, keys: int, values: int, ask: int, end_ask: int, like: Array,
) -> None:  # fmt: skip
    """As `_columns`, of x and to the place that are given, and what is asked for meanwhile."""
    outputs, asks = line[6], START + 3 * block[NUM_LINES]
    out = rows_at(place if place else block[LOGITS], rows, outputs, like)
    bias = row_at(line[7], outputs if line[7] else 0, like)
    columns_of(
        laid, rows_at(x, rows, line[5], like), rows_at(line[3], outputs, line[5], like), bias, out, laid_block,
        number, ranges, block[asks : asks + block[NUM_ASKS]], keys, values, ask, end_ask
    )  # fmt: skip


@jit(inline=True)
def _packed(line: Int64s, x: int, out: int, rows: int, first: int, last: int, like: Array) -> None:
    """As `_columns`, of so many rows of x and to the place that are given."""
    inputs, outputs = line[5], line[6]
    blocks = blocks_of_packed(line)  # each of two tiles of outputs, and as many weights and biases
    packed_columns_of(
        rows_at(x, rows, inputs, like),
        row_at(line[3], blocks * ((inputs + WIDE - 1) // WIDE) * WIDE * WIDE, like),
        row_at(line[7], blocks * WIDE, FLOATS), rows_at(out, rows, outputs, like), line[GATES], WHOLE, first,
        min(last, blocks)
    )  # fmt: skip


@jit(inline=True)
def _columns(block: Int64s, line: Int64s, rows: int, wide: Float32s, first: int, last: int, like: Array) -> None:
    """x, weight, bias or 0, out or 0 for the logits, inputs, outputs."""
    kind, inputs, outputs = line[0], line[5], line[6]
    out = rows_at(line[4] if line[4] else block[LOGITS], rows, outputs, like)
    weight = rows_at(line[3], outputs, inputs, like)
    bias = row_at(line[7], outputs if line[7] else 0, like)
    begin_at, end_at = first * LEAST_COLUMNS, min(last * LEAST_COLUMNS, outputs)
    if kind == PAIRS:
        columns_by_pairs(rows_at(line[2], rows, inputs, like), weight, bias, out, begin_at, end_at)
    else:
        columns_of_few(wide, weight, bias, out, begin_at, end_at)


@jit(inline=True)
def _rows(block: Int64s, line: Int64s, first: int, last: int, strip: int, like: Array) -> None:
    """What is done to each token by itself. `strip`: where the rows of what is not kept begin."""
    kind, rows = line[0], last - first
    numbers = row_at(block[NUMBERS], 3, DOUBLES)
    eps, offset = np.float32(numbers[EPS]), numbers[OFFSET]
    if kind == NORM:  # x, weight, out, width
        width = line[5]
        at = first * width * 2
        x, out = rows_at(line[2] + at, rows, width, like), rows_at(line[4] + at, rows, width, like)
        rms_norm_rows(x, row_at(line[3], width, like), eps, offset, out)
    elif kind == ADD_NORM:  # x, weight, out, width, delta
        width = line[5]
        at = first * width * 2
        x, out = rows_at(line[2] + at, rows, width, like), rows_at(line[4] + at, rows, width, like)
        add_rms_norm_rows(
            x, rows_at(line[6] + at, rows, width, like), row_at(line[3], width, like), eps, offset, out
        )  # fmt: skip
    elif kind == QK_NORM:  # qkv, its width, weights of queries and keys, their lengths
        qkv = rows_at(line[2] + first * line[3] * 2, rows, line[3], like)
        q_width, k_width = block[HEADS] * block[HEAD_DIM], block[KV_HEADS] * block[HEAD_DIM]
        q_weight, k_weight = row_at(line[4], line[6], like), row_at(line[5], line[7], like)
        qk_norm_rows(qkv, q_weight, k_weight, q_width, k_width, eps, offset)
    elif kind == STORE:  # qkv, its width, cosines, sines, positions in them, half of the channels that turn, pools
        cos, sin = rows_at(line[4], line[6], line[7], FLOATS), rows_at(line[5], line[6], line[7], FLOATS)
        rope_store_rows(
            rows_at(line[2] + first * line[3] * 2, rows, line[3], like), cos, sin,
            row_at(block[POSITIONS] + first * 8, rows, block), row_at(block[SLOTS] + first * 8, rows, block),
            _pages(block, line[8], like), _pages(block, line[9], like)
        )  # fmt: skip
    elif kind == TURN:  # queries of the wanted tokens, width, cosines, sines, positions in them, half, qkv, its width
        cos, sin = rows_at(line[4], line[6], line[7], FLOATS), rows_at(line[5], line[6], line[7], FLOATS)
        turn_rows(
            rows_at(line[2] + first * line[3] * 2, rows, line[3], like), block[HEAD_DIM], cos, sin,
            row_at(block[POSITIONS], block[TOKENS], block), row_at(block[WANTED] + first * 8, rows, block),
            rows_at(line[8], block[TOKENS], line[9], like)
        )  # fmt: skip
    elif kind == GATE:  # gates and ups, out, width of out
        width = line[4]
        gate_up = rows_at(line[2] + strip * 2 * width * 2, rows, 2 * width, like)
        silu_mul_rows(gate_up, rows_at(line[3] + strip * width * 2, rows, width, like))
    elif kind == SELECT:  # residual stream, of the wanted ones, width; the same of the heads
        wanted = row_at(block[WANTED], block[NUM_WANTED], block)
        for pair in range(2):
            width = line[4 + 3 * pair]
            source = rows_at(line[2 + 3 * pair], block[TOKENS], width, like)
            target = rows_at(line[3 + 3 * pair], block[NUM_WANTED], width, like)
            for row in range(first, last):
                for i in range(width):
                    target[row, i] = source[wanted[row], i]


@jit()
def _pages(block: Int64s, address: int, like: Array) -> Array:
    return pages_at(address, block[NUM_PAGES], block[PAGE_SIZE], block[KV_HEADS], block[HEAD_DIM], like)


@jit()
def _wanted(block: Int64s, tokens: Int32s) -> Int32s:
    """Those of the tokens whose logits are wanted."""
    wanted = row_at(block[WANTED], block[NUM_WANTED], block)
    found = np.empty(tokens.shape[0], np.int32)
    count = 0
    for token in tokens:
        low, high = 0, wanted.shape[0]
        while low < high:
            middle = (low + high) // 2
            if wanted[middle] < token:
                low = middle + 1
            else:
                high = middle
        if low < wanted.shape[0] and wanted[low] == token:
            found[count] = token
            count += 1
    return found[:count]


@jit(inline=True)
def _read_shared(
    block: Int64s, line: Int64s, first: int, last: int, token: int, end_token: int, first_head: int, last_head: int,
    like: Array,
) -> None:  # fmt: skip
    """qkv, its width, pools, out: these heads of segments `first` to `last`, ancestors first, and of each of them its
    tokens from number `token` to `end_token`."""
    tokens, heads, head_dim = block[TOKENS], block[HEADS], block[HEAD_DIM]
    keys, values = _pages(block, line[4], like), _pages(block, line[5], like)
    q = blocks_at(line[2], tokens, line[3] // head_dim, head_dim, like)[:, :heads]
    out = blocks_at(line[6], tokens, heads, head_dim, like)
    mixed, lse = blocks_at(block[MIXED], tokens, heads, head_dim, FLOATS), rows_at(block[LSE], tokens, heads, FLOATS)
    scale = row_at(block[NUMBERS], 3, DOUBLES)[SCALE]
    is_shared, whole = (
        line[0] != OWN,
        int(np.int64(NO_WINDOW)),
    )  # no literals: for each the kernel would be compiled anew
    segments = rows_at(block[SEGMENTS], block[NUM_SEGMENTS], 5, block)
    for s in range(first, last):
        row, first_page, end_page = segments[s, 0], segments[s, 1], segments[s, 2]
        begin, end = segments[s, 3] + token, min(segments[s, 4], segments[s, 3] + end_token)
        pages = row_at(block[TABLE] + (row * block[TABLE_WIDTH] + first_page) * 4, end_page - first_page, WORDS)
        queries = row_at(block[SEGMENT_TOKENS] + begin * 4, end - begin, WORDS)
        if line[1]:
            queries = _wanted(block, queries)
        if not queries.shape[0]:
            continue
        ends = np.empty(queries.shape[0], np.int32)
        for i in range(queries.shape[0]):
            ends[i] = end_page * block[PAGE_SIZE]
        attend_heads(
            q, keys, values, pages, queries, ends, first_page * block[PAGE_SIZE], mixed, lse, NO_SINKS, out, is_shared,
            scale, whole, whole, NO_CAP, WHOLE, first_head, last_head
        )  # fmt: skip


@jit(inline=True)
def _read_own(block: Int64s, line: Int64s, piece: int, size: int, like: Array) -> None:
    """qkv, its width, pools, out: heads of a long row, or some queries of the others."""
    tokens, heads, kv_heads, head_dim = block[TOKENS], block[HEADS], block[KV_HEADS], block[HEAD_DIM]
    keys, values = _pages(block, line[4], like), _pages(block, line[5], like)
    q = blocks_at(line[2], tokens, line[3] // head_dim, head_dim, like)[:, :heads]
    out = blocks_at(line[6], tokens, heads, head_dim, like)
    got = tokens if block[NUM_SEGMENTS] else 0
    mixed, lse = blocks_at(block[MIXED], got, heads, head_dim, FLOATS), rows_at(block[LSE], got, heads, FLOATS)
    scale = row_at(block[NUMBERS], 3, DOUBLES)[SCALE]
    is_shared, whole = line[0] != OWN, int(np.int64(NO_WINDOW))
    stacks = stacks_of_rows(block, line)
    shares = shares_of_heads(block, stacks)
    in_long_rows = stacks * shares
    table = rows_at(block[TABLE], block[TABLE_ROWS], block[TABLE_WIDTH], WORDS)
    if piece < in_long_rows:
        place, token, end_token = place_of(block, line, piece // shares)
        number = rows_at(block[LONG], block[NUM_LONG], 5, block)[place]
        first, rows, start, row, first_key = (
            number[0] + token,
            end_token - token,
            number[2] + token,
            number[3],
            number[4],
        )
        share = piece % shares
        first_page = first_key // block[PAGE_SIZE]
        num_pages = (start + rows + block[PAGE_SIZE] - 1) // block[PAGE_SIZE] - first_page
        pages = row_at(block[TABLE] + (row * block[TABLE_WIDTH] + first_page) * 4, num_pages, WORDS)
        queries = np.empty(rows, np.int32)
        for i in range(rows):
            queries[i] = first + i
        if line[1]:
            queries = _wanted(block, queries)
        if not queries.shape[0]:
            return
        ends = np.empty(queries.shape[0], np.int32)
        for i in range(queries.shape[0]):
            ends[i] = queries[i] + start + 1 - first
        first_head, last_head = kv_heads * share // shares, kv_heads * (share + 1) // shares
        if ONE_ALONE and queries.shape[0] == 1:
            where = np.empty((2, 1), np.int32)
            where[0, 0], where[1, 0] = row, first_key
            decode_items(
                q, keys, values, table, queries, where[0], ends, where[1], mixed, lse, NO_SINKS, out, scale, whole,
                whole, NO_CAP, first_head, last_head
            )  # fmt: skip
            return
        attend_heads(
            q, keys, values, pages, queries, ends, first_key, mixed, lse, NO_SINKS, out, is_shared,
            scale, whole, whole, NO_CAP, WHOLE, first_head, last_head
        )  # fmt: skip
        return
    queries = block[NUM_QUERIES]
    first_item = (piece - in_long_rows) * size
    decode_items(
        q, keys, values, table, row_at(block[TOKEN], queries, WORDS), row_at(block[TABLE_ROW], queries, WORDS),
        row_at(block[LENGTH], queries, WORDS), row_at(block[FIRST_KEY], queries, WORDS), mixed, lse, NO_SINKS, out,
        scale, whole, whole, NO_CAP, first_item, min(first_item + size, queries * kv_heads)
    )  # fmt: skip
