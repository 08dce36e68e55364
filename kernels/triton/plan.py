"""One step's batch in device memory: what `AttentionPlan` holds for the CPU, laid out for the kernels.

Everything is int32 and travels in one buffer, one copy a step. Rows are sorted by how they are computed, each by its
own length alone: single tokens and short rows with their keys split, longer ones behind many keys with these in larger
parts, others without; or, where rows share pages, singles and short rows as a tree. A row of length 0 and a slot below
0 stand for nothing: they fill a batch up to the size of a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from niwaki.kernels.segments import Costs, Int32s, Int64s, Segments, find_segments
from niwaki.kernels.triton.paged_attention import MAX_SPLIT_TOKENS, RaggedRows, bounded_split
from niwaki.kernels.triton.tree_attention import Items, TreeItems

if TYPE_CHECKING:
    from niwaki.kernels.triton.attend import AttentionCall

MIN_PADDED_KEYS = 512  # shorter batches share the graph of this length
SPLIT = 512  # keys of a part: at 64 to 256 channels its result is below 2 % of the bytes that were read for it
# A row of some tokens is a block or two of queries for each kv head: too few to keep a GPU busy over long texts, as
# the next turn of a conversation has them before it. Of 128 channels what a block of 128 queries writes and reads
# again for a part of so many keys is a quarter of the bytes that it reads of them.
PARTED_SPLIT = 1024
MAX_PARTED_TOKENS = 256  # longer rows are blocks enough by themselves

# Nanoseconds on an H200 of one layer's attention, from bytes over 4.3 TB/s and operations over 400 TFLOP/s at 8 kv
# heads of 128 in bfloat16: by arithmetic, not measured.
COSTS = Costs(paged_pair=1.0, dense_pair=0.05, key=1.0, query=10.0, segment=1_000.0)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """All arrays int32, on one device."""

    num_tokens: int
    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]; below 0: nothing is stored
    page_table: torch.Tensor  # [rows, widest]
    length: torch.Tensor  # [rows] keys, the new ones included
    split: tuple[RaggedRows, ...]  # rows whose keys are split: singles, short rows
    parted: tuple[RaggedRows, ...]  # rows whose keys are cut into larger parts
    whole: tuple[RaggedRows, ...]  # long rows
    tree: TreeItems | None  # instead of `split`
    put_off: Callable[[AttentionCall], None] | None = None  # is given each attention, which then is not launched


@dataclass(frozen=True, slots=True)
class BatchShape:
    """All that decides which kernels run, on which grids, over which buffers: what a CUDA graph holds fixed."""

    num_tokens: int
    group: int
    longest: tuple[tuple[str, int], ...]  # of the kinds of rows that there are, the most keys that one sees
    num_parts: int  # of the tree; 0: there is none
    sizes: tuple[tuple[str, tuple[int, ...]], ...]  # of the arrays, by name, in the order of their buffer


def device_plan(
    starts: Int64s,
    counts: Int64s,
    page_table: Int32s,
    token_ids: Int32s,
    positions: Int64s,
    slots: Int64s,
    *,
    page_size: int,
    group: int,
    device: torch.device,
    shares: bool = True,
) -> DevicePlan:
    """The batch of rows (start, count), whose tokens stand one row behind the other. Numbers as in `AttentionPlan`,
    which has checked them. `group`: query heads of a kv head. `shares`: whether pages in common are read once."""
    arrays, shape = lay_out(
        starts, counts, page_table, token_ids, positions, slots, page_size=page_size, group=group, shares=shares
    )
    return plan_in(torch.from_numpy(packed(arrays)).to(device), shape)


def lay_out(
    starts: Int64s,
    counts: Int64s,
    page_table: Int32s,
    token_ids: Int32s,
    positions: Int64s,
    slots: Int64s,
    *,
    page_size: int,
    group: int,
    shares: bool = True,
) -> tuple[dict[str, Int32s], BatchShape]:
    """The arrays of `device_plan`, still on the host, and their shape."""
    length = starts + counts
    firsts = np.cumsum(counts) - counts
    arrays: dict[str, Int32s] = {
        "token_ids": token_ids,
        "positions": positions.astype(np.int32),
        "slots": slots.astype(np.int32),
        "table": page_table[:, : max(1, -(-int(length.max(initial=0)) // page_size))],  # what is read of it
        "length": length.astype(np.int32),
    }
    is_long = counts > MAX_SPLIT_TOKENS
    kinds = {
        "single": np.flatnonzero(counts == 1),
        "short": np.flatnonzero((counts > 1) & ~is_long),
    }
    of_long = _long_kinds(is_long, counts, length)
    kinds |= of_long
    num_parts = 0
    segments = _shared(page_table, starts, counts, page_size) if shares and len(counts) > 1 else None
    if segments is not None:
        tree, num_parts = tree_arrays(segments, starts, counts, firsts, ~is_long, page_size, group)
        arrays |= tree
        kinds = of_long
    longest = []
    for kind, rows in kinds.items():
        if len(rows):
            arrays[f"{kind}.row"] = rows.astype(np.int32)
            arrays[f"{kind}.first"] = np.concatenate(([0], np.cumsum(counts[rows]))).astype(np.int32)
            arrays[f"{kind}.token"] = _tokens_of(firsts[rows], counts[rows])
            longest.append((kind, int(length[rows].max())))
    return arrays, BatchShape(len(positions), group, tuple(longest), num_parts, sizes_of(arrays))


def _long_kinds(is_long: npt.NDArray[np.bool_], counts: Int64s, length: Int64s) -> dict[str, Int64s]:
    is_parted = is_long & (counts <= MAX_PARTED_TOKENS) & (length > PARTED_SPLIT)
    return {"parted": np.flatnonzero(is_parted), "long": np.flatnonzero(is_long & ~is_parted)}


def plan_in(buffer: torch.Tensor, shape: BatchShape) -> DevicePlan:
    """The plan over arrays that lie in `buffer`, as `packed` has put them there."""
    arrays = views(buffer, shape)
    rows = {
        kind: RaggedRows(
            arrays[f"{kind}.row"], arrays[f"{kind}.first"], arrays[f"{kind}.token"], len(arrays[f"{kind}.token"]), most
        )
        for kind, most in shape.longest
    }
    return DevicePlan(
        num_tokens=shape.num_tokens,
        token_ids=arrays["token_ids"],
        positions=arrays["positions"],
        slots=arrays["slots"],
        page_table=arrays["table"],
        length=arrays["length"],
        split=tuple(rows[kind] for kind in ("single", "short") if kind in rows),
        parted=(rows["parted"],) if "parted" in rows else (),
        whole=(rows["long"],) if "long" in rows else (),
        tree=tree_items(arrays, shape.num_parts, shape.group) if shape.num_parts else None,
    )


def padded(arrays: Mapping[str, Int32s], shape: BatchShape, rows: int) -> tuple[dict[str, Int32s], BatchShape]:
    """A batch of single tokens, filled up to `rows` rows and to powers of two elsewhere, so that few shapes occur.

    What is added stands for nothing: rows without keys, tokens without a slot, items without queries, and no parts.
    """
    assert [kind for kind, _ in shape.longest] in ([], ["single"]), "only single tokens are filled up"
    widest = _power_of_two(max(arrays["table"].shape[1], MIN_PADDED_KEYS // 16))
    filled = {
        "token_ids": _filled(arrays["token_ids"], (rows,), 0),
        "positions": _filled(arrays["positions"], (rows,), 0),
        "slots": _filled(arrays["slots"], (rows,), -1),
        "table": _filled(arrays["table"], (rows, widest), 0),
        "length": _filled(arrays["length"], (rows,), 0),
    }
    if shape.num_parts:
        for name in ("shared", "own"):
            filled[name] = _filled(arrays[name], (_power_of_two(len(arrays[name])), 5), 0)
        num_parts = _power_of_two(shape.num_parts)
        for name in ("query_token", "query_part"):
            filled[name] = _filled(arrays[name], (num_parts,), 0)
        filled["bounds"] = _filled(arrays["bounds"], (rows + 1,), int(arrays["bounds"][-1]))
        filled["merged"] = np.arange(rows, dtype=np.int32)
        return filled, BatchShape(rows, shape.group, (), num_parts, sizes_of(filled))
    filled["single.row"] = filled["single.token"] = np.arange(rows, dtype=np.int32)
    filled["single.first"] = np.arange(rows + 1, dtype=np.int32)
    longest = _power_of_two(max(shape.longest[0][1], MIN_PADDED_KEYS))
    return filled, BatchShape(rows, shape.group, (("single", longest),), 0, sizes_of(filled))


def with_tokens(arrays: Mapping[str, Int32s], shape: BatchShape, tokens: int) -> tuple[dict[str, Int32s], BatchShape]:
    """The batch with tokens of no row behind its own, up to so many: they are stored nowhere and attend to nothing."""
    filled = {
        **arrays,
        "token_ids": _filled(arrays["token_ids"], (tokens,), 0),
        "positions": _filled(arrays["positions"], (tokens,), 0),
        "slots": _filled(arrays["slots"], (tokens,), -1),
    }
    return filled, replace(shape, num_tokens=tokens, sizes=sizes_of(filled))


def _filled(array: Int32s, shape: tuple[int, ...], value: int) -> Int32s:
    filled = np.full(shape, value, np.int32)
    filled[tuple(slice(0, side) for side in array.shape)] = array
    return filled


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def sizes_of(arrays: Mapping[str, Int32s]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(int(side) for side in array.shape)) for name, array in arrays.items())


def packed(arrays: Mapping[str, Int32s]) -> Int32s:
    """One behind the other, each from a multiple of 4 on: Triton compiles wider loads for aligned addresses."""
    flat = []
    for array in arrays.values():
        flat.append(array.ravel())
        flat.append(np.zeros(-array.size % 4, np.int32))
    return np.concatenate(flat)


def views(buffer: torch.Tensor, shape: BatchShape) -> dict[str, torch.Tensor]:
    """The arrays that `packed` put into a buffer."""
    found, at = {}, 0
    for name, sides in shape.sizes:
        size = math.prod(sides)
        found[name] = buffer[at : at + size].view(sides)
        at += size + -size % 4
    return found


def _shared(table: Int32s, starts: Int64s, counts: Int64s, page_size: int) -> Segments | None:
    shareable = np.where(counts > MAX_SPLIT_TOKENS, 0, starts // page_size)
    found = find_segments(table, shareable, counts, page_size=page_size, longest_paged=MAX_SPLIT_TOKENS, costs=COSTS)
    return found if len(found) else None


# ---------------------------------------------------------------------------------------------------------------
# The batch as a tree
# ---------------------------------------------------------------------------------------------------------------


def shared_tile(group: int) -> int:
    """Tokens of an item of a node: 64 rows of a product."""
    return max(1, 64 // group)


def own_tile(group: int) -> int:
    """Tokens of an item of one row: 16 rows of a product, the fewest there are."""
    return max(1, 16 // group)


def tree_arrays(
    segments: Segments,
    starts: Int64s,
    counts: Int64s,
    firsts: Int64s,
    is_part: npt.NDArray[np.bool_],
    page_size: int,
    group: int,
) -> tuple[dict[str, Int32s], int]:
    """The arrays of `TreeItems`, and the number of parts. `is_part` [rows]: those that are computed so.

    A query's parts stand in the order of their keys.
    """
    split = bounded_split(SPLIT, int((starts + counts)[is_part].max(initial=0)), int(counts[is_part].sum()))
    below, of_all = segments.rows.astype(np.int64), np.flatnonzero(is_part)
    shared, shared_token = _items(
        below[segments.bounds[:-1]],
        segments.first_page.astype(np.int64) * page_size,
        segments.end_page.astype(np.int64) * page_size,
        _tokens_of(firsts[below], counts[below]),
        np.concatenate(([0], np.cumsum(counts[below])))[segments.bounds],
        shared_tile(group),
        split,
    )
    own, own_token = _items(
        of_all,
        segments.row_end[of_all].astype(np.int64) * page_size,
        (starts + counts)[of_all],
        _tokens_of(firsts[of_all], counts[of_all]),
        np.concatenate(([0], np.cumsum(counts[of_all]))),
        own_tile(group),
        split,
    )
    own[:, 3] += len(shared_token)
    tokens = np.concatenate((shared_token, own_token))
    # Items stand root first, so a stable sort by token leaves each token's parts in the order of their keys.
    order = np.argsort(tokens, kind="stable")
    part = np.empty(len(tokens), np.int32)
    part[order] = np.arange(len(tokens), dtype=np.int32)
    merged, sizes = np.unique(tokens, return_counts=True)
    return {
        "shared": shared,
        "own": own,
        "query_token": tokens,
        "query_part": part,
        "bounds": np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
        "merged": merged.astype(np.int32),
    }, len(tokens)


def _items(
    row: Int64s, low: Int64s, high: Int64s, tokens: Int32s, bounds: Int64s, tile: int, split: int
) -> tuple[Int32s, Int32s]:
    """Items [items, 5] for keys `low[i]` to `high[i]` of row[i] and the queries tokens[bounds[i]:bounds[i + 1]], and
    the tokens of their queries, one behind the other: keys cut at multiples of `split`, and of each part the queries
    `tile` at a time."""
    counts = np.diff(bounds)
    tiles = -(-counts // tile)
    each = np.where(low < high, -(-high // split) - low // split, 0) * tiles
    of = np.repeat(np.arange(len(row)), each)
    part, place = np.divmod(np.arange(len(of)) - np.repeat(np.cumsum(each) - each, each), tiles[of])
    begin, first = (low[of] // split + part) * split, place * tile
    size = np.minimum(counts[of] - first, tile)
    query = np.cumsum(size) - size
    items = row[of], np.maximum(begin, low[of]), np.minimum(begin + split, high[of]), query, size
    return np.stack(items, 1).astype(np.int32), tokens[_tokens_of(bounds[:-1][of] + first, size)]


def tree_items(arrays: Mapping[str, torch.Tensor], num_parts: int, group: int) -> TreeItems:
    return TreeItems(
        shared=Items(arrays["shared"], shared_tile(group)),
        own=Items(arrays["own"], own_tile(group)),
        query_token=arrays["query_token"],
        query_part=arrays["query_part"],
        bounds=arrays["bounds"],
        token=arrays["merged"],
        num_parts=num_parts,
    )


def _tokens_of(firsts: Int64s, counts: Int64s) -> Int32s:
    """The tokens of rows that begin at `firsts`, one row behind the other."""
    total = int(counts.sum())
    behind = np.repeat(np.cumsum(counts) - counts, counts)
    tokens: Int32s = (np.arange(total) - behind + np.repeat(firsts, counts)).astype(np.int32)
    return tokens
