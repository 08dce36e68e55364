"""Deterministic automata over bytes: from edges or from a set of texts, trimmed, packed. Knows no tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints import kernels
from niwaki.runtime.constraints.kernels import SPARSE_EDGES, Bytes, Flags, Ints, Longs
from niwaki.runtime.constraints.vocabulary import concatenated

DEAD: Final = 0
START: Final = 1
MAX_ENTRIES: Final = 8 * 1024 * 1024  # of all rows: 40 MiB
MAX_MINIMISED_STATES: Final = 1024  # above, refining partitions costs more than the states it saves
MAX_REFINEMENTS: Final = 32
SORTED_AT_ONCE: Final = 10_000


@dataclass(frozen=True, slots=True)
class ByteDfa:
    """A trimmed automaton: from every state but DEAD some bytes lead to an accepting one.

    Bytes that no state tells apart share a class. The row of state s is row_starts[s]:row_starts[s + 1]: as long as
    there are classes, it is dense (one target per class, DEAD where none); else it lists (label, target) pairs.
    """

    byte_classes: Bytes  # [256]
    num_classes: int
    row_starts: Longs  # [states + 1]
    labels: Bytes  # [entries], classes; zero in dense rows
    targets: Ints  # [entries]
    accepting: Flags  # [states]

    @property
    def num_states(self) -> int:
        """Without the dead one."""
        return len(self.accepting) - 1

    @property
    def num_bytes(self) -> int:
        return self.row_starts.nbytes + self.labels.nbytes + self.targets.nbytes + self.accepting.nbytes

    def run(self, text: bytes, state: int = START) -> int:
        """The state after `text`, DEAD where no completion is left."""
        data = np.frombuffer(text, np.uint8)
        return kernels.run_bytes(
            state, data, self.byte_classes, self.num_classes, self.row_starts, self.labels, self.targets
        )

    def accepts(self, text: bytes) -> bool:
        return bool(self.accepting[self.run(text)])


def from_edges(accepting: Flags, sources: Ints, labels: Bytes, targets: Ints) -> ByteDfa | None:
    """The automaton of an edge list, state 0 the start; None where it accepts nothing.

    Trims what is not on a path from the start to an accepting state, and merges equivalent states where there are
    few enough. No state has two edges of one label.
    """
    useful = _reached(len(accepting), targets, sources, np.flatnonzero(accepting))
    kept = useful[sources] & useful[targets]
    sources, labels, targets = sources[kept], labels[kept], targets[kept]
    useful &= _reached(len(accepting), sources, targets, np.zeros(1, np.int64))
    if not useful[0]:
        return None
    kept = useful[sources]  # and so are their targets
    sources, labels, targets = sources[kept], labels[kept], targets[kept]
    if np.count_nonzero(useful) <= MAX_MINIMISED_STATES:
        merged = _equivalence(useful, accepting, sources, labels, targets)
    else:
        merged = np.cumsum(useful) - 1
    # The start is state 0 and the first useful one; _equivalence numbers by first member, so it stays 0.
    num_states = int(merged[useful].max()) + 1
    merged_accepting = np.zeros(num_states, np.bool_)
    merged_accepting[merged[useful]] = accepting[useful]
    edges, first = np.unique(256 * merged[sources] + labels, return_index=True)  # equal ones lead to equal states
    return _packed(merged_accepting, edges // 256, edges % 256, merged[targets[first]])


def from_texts(texts: Sequence[bytes]) -> ByteDfa:
    """The automaton of a finite, non-empty set of texts: their trie, merged where it is small."""
    # In parts: one call that sorts 100,000 keeps every other thread waiting for 40 ms.
    parts = [sorted(texts[start : start + SORTED_AT_ONCE]) for start in range(0, len(texts), SORTED_AT_ONCE)]
    ordered = [text for text, _ in groupby(heapq.merge(*parts))]
    accepts_empty = not ordered[0]
    data, offsets = concatenated(ordered[accepts_empty:])
    labels, depths = np.empty(len(data), np.uint8), np.empty(len(data), np.int32)
    skips, ends = np.empty(len(data), np.int32), np.empty(len(offsets) - 1, np.int32)
    count = kernels.trie_from_sorted(data, offsets, labels, depths, skips, ends)
    accepting = np.zeros(count + 1, np.bool_)  # the root, then the nodes
    accepting[0] = accepts_empty
    accepting[ends + 1] = True
    targets = np.arange(1, count + 1, dtype=np.int32)
    parents = kernels.trie_parents(depths[:count])
    dfa = from_edges(accepting, parents, labels[:count], targets)
    assert dfa is not None, "a non-empty set of texts accepts something"
    return dfa


def _reached(num_states: int, sources: Ints, targets: Ints, start: Longs) -> Flags:
    """Which states some path of the edges leads to from `start`."""
    return kernels.reached(*_adjacency(num_states, sources, targets), start)


def _adjacency(num_states: int, sources: Ints | Longs, targets: Ints | Longs) -> tuple[Longs, Ints]:
    """Where each state's edges start, and the targets in that order."""
    order = np.argsort(sources, kind="stable")
    edge_starts = np.zeros(num_states + 1, np.int64)
    np.cumsum(np.bincount(sources, minlength=num_states), out=edge_starts[1:])
    return edge_starts, targets[order].astype(np.int32)


def _equivalence(useful: Flags, accepting: Flags, sources: Ints, labels: Bytes, targets: Ints) -> Longs:
    """For each useful state the number of its class of equivalent states, by first member (Moore's refinement).

    Starts from the bytes to the nearest end, which equivalent states share: long chains are then told apart in one
    round instead of one round each. Every state its own class where that does not settle soon.
    """
    states = np.flatnonzero(useful)
    compact = np.full(len(useful), len(states), np.int64)
    compact[states] = np.arange(len(states))
    table = np.full((len(states), 256), len(states), np.int64)  # the last: no edge
    table[compact[sources], labels] = compact[targets]
    table = table[:, np.unique(table, axis=1, return_index=True)[1]]
    edges = _adjacency(len(states), compact[sources], compact[targets])
    distances = kernels.distances_to(accepting[states], *edges)
    blocks = np.append(distances.astype(np.int64), -1)
    num_blocks = 0
    for _ in range(MAX_REFINEMENTS):
        signatures = np.concatenate((blocks[:-1, None], blocks[table]), axis=1)
        _, refined = np.unique(signatures, axis=0, return_inverse=True)
        blocks[:-1] = refined.reshape(-1)
        if int(blocks.max()) + 1 == num_blocks:
            break
        num_blocks = int(blocks.max()) + 1
    else:
        blocks[:-1] = compact[states]
    _, first_members, inverse = np.unique(blocks[:-1], return_index=True, return_inverse=True)
    rank = np.empty(len(first_members), np.int64)
    rank[np.argsort(first_members)] = np.arange(len(first_members))
    merged = np.zeros(len(useful), np.int64)
    merged[states] = rank[inverse.reshape(-1)]
    return merged


def _packed(accepting: Flags, sources: Longs, labels: Longs, targets: Longs) -> ByteDfa:
    """Rows as `ByteDfa` has them, from edges sorted by source then label; states move up by one, to leave DEAD."""
    num_states = len(accepting) + 1
    byte_classes, num_classes = _byte_classes(sources, labels, targets)
    classes = byte_classes[labels]
    keep = np.ones(len(sources), np.bool_)  # one edge of each class
    order = np.lexsort((classes, sources))
    sources, classes, targets = sources[order] + 1, classes[order], targets[order] + 1
    keep[1:] = (sources[1:] != sources[:-1]) | (classes[1:] != classes[:-1])
    sources, classes, targets = sources[keep], classes[keep], targets[keep]
    degrees = np.bincount(sources, minlength=num_states)
    # A sparse row as long as there are classes is dense already: all its classes stand in order.
    lengths = np.where(degrees > SPARSE_EDGES, num_classes, degrees)
    row_starts = np.zeros(num_states + 1, np.int64)
    np.cumsum(lengths, out=row_starts[1:])
    if row_starts[-1] > MAX_ENTRIES:
        raise ConstraintError(
            f"the constraint's automaton is too large: {row_starts[-1]} entries in {num_states - 1} states, "
            f"at most {MAX_ENTRIES}; simplify it"
        )
    first_edges = np.zeros(num_states, np.int64)
    np.cumsum(degrees[:-1], out=first_edges[1:])
    is_dense = lengths[sources] == num_classes
    within = np.where(is_dense, classes, np.arange(len(sources)) - first_edges[sources])
    entries = row_starts[sources] + within
    packed_labels = np.zeros(int(row_starts[-1]), np.uint8)
    packed_targets = np.zeros(int(row_starts[-1]), np.int32)
    packed_labels[entries] = classes
    packed_targets[entries] = targets
    return ByteDfa(byte_classes, num_classes, row_starts, packed_labels, packed_targets, np.insert(accepting, 0, False))


def _byte_classes(sources: Longs, labels: Longs, targets: Longs) -> tuple[Bytes, int]:
    """Bytes with the same edges from every state share a class; those with none share one that has no edges."""
    order = np.lexsort((sources, labels))
    by_label = np.stack((sources[order], targets[order]), axis=1)
    bounds = np.searchsorted(labels[order], np.arange(257))
    known: dict[bytes, int] = {}
    classes = [known.setdefault(by_label[bounds[b] : bounds[b + 1]].tobytes(), len(known)) for b in range(256)]
    return np.array(classes, np.uint8), len(known)
