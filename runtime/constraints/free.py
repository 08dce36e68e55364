"""Automata of texts that are free but for one thing: a marker that they never hold, or a byte they never begin with."""

from __future__ import annotations

import numpy as np

from niwaki.runtime.constraints.automaton import ByteDfa, from_edges

BLANKS = b" \t\r\n"
EVERY_BYTE = np.arange(256, dtype=np.uint8)


def texts_before(marker: bytes) -> ByteDfa:
    """Texts behind which `marker` comes for the first time when it is written there. None holds the beginning of a
    marker that overlaps itself: behind `a > b >` the marker `>>>` would be met one place too soon."""
    period = next((n for n in range(1, len(marker)) if marker.startswith(marker[n:])), len(marker))
    return texts_without(marker[:period])


def texts_without(marker: bytes) -> ByteDfa:
    """All texts that do not hold `marker` (Knuth, Morris and Pratt's automaton, without its last state). The empty
    marker: all texts."""
    if not marker:
        return _automaton(np.zeros((1, 256), np.int32))
    table = np.zeros((len(marker), 256), np.int32)  # state: how much of the marker the text ends with
    table[0, marker[0]] = 1
    fallback = 0
    for state in range(1, len(marker)):
        table[state] = table[fallback]
        table[state, marker[state]] = state + 1
        fallback = int(table[fallback, marker[state]])
    return _automaton(table)


def texts_not_beginning_with(byte: int) -> ByteDfa:
    """All texts whose first byte that is no blank is another one."""
    table = np.ones((2, 256), np.int32)
    table[0, list(BLANKS)] = 0
    table[0, byte] = 2
    return _automaton(table)


def _automaton(table: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> ByteDfa:
    """table[state, byte] is the next state; one beyond the table is none. Every state accepts."""
    sources = np.repeat(np.arange(len(table), dtype=np.int32), 256)
    targets = table.reshape(-1)
    kept = targets < len(table)
    labels = np.tile(EVERY_BYTE, len(table))
    dfa = from_edges(np.ones(len(table), np.bool_), sources[kept], labels[kept], targets[kept])
    assert dfa is not None, "the empty text is always accepted"
    return dfa
