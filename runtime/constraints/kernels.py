"""The loops over bytes, compiled by Numba: building tries, walking the vocabulary's trie beside an automaton.

Plain arrays in, plain arrays out; nothing here keeps state. An automaton's rows come in two shapes (see `ByteDfa`):
a dense row has one target for every byte class, a sparse row lists up to SPARSE_EDGES (class, target) pairs. State 0
is the dead state in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from niwaki.kernels.jit import jit as compiled

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]

SPARSE_EDGES = 8  # longest sparse row: up to here a linear search beats a dense row's cache misses
UNREACHABLE = np.iinfo(np.int32).max  # distance of a state from which no text can be completed

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compiled without the GIL while it runs; once per machine, where a folder can be written."""
    return cast(F, compiled(nogil=True, fastmath=frozenset())(function))


@jit
def trie_from_sorted(
    data: Bytes, offsets: Longs, node_bytes: Bytes, node_depths: Ints, node_skips: Ints, string_nodes: Ints
) -> int:
    """The trie of sorted, distinct, non-empty byte strings in depth-first order; returns its number of nodes.

    String i is data[offsets[i]:offsets[i + 1]]. The output arrays hold at least one entry per byte of data. Node n
    stands for the byte node_bytes[n] at depth node_depths[n] (0 for a first byte); its subtree ends before
    node_skips[n]; string i ends at node string_nodes[i].
    """
    count = 0
    longest = 0
    for i in range(len(offsets) - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    path = np.zeros(longest + 1, np.int32)  # the open node at each depth
    open_depth = 0
    for i in range(len(offsets) - 1):
        start, end = offsets[i], offsets[i + 1]
        shared = 0
        if i > 0:
            before, limit = offsets[i - 1], min(offsets[i] - offsets[i - 1], end - start)
            while shared < limit and data[before + shared] == data[start + shared]:
                shared += 1
        for depth in range(shared, open_depth):
            node_skips[path[depth]] = count
        for depth in range(shared, end - start):
            node_bytes[count] = data[start + depth]
            node_depths[count] = depth
            path[depth] = count
            count += 1
        open_depth = end - start
        string_nodes[i] = path[open_depth - 1]
    for depth in range(open_depth):
        node_skips[path[depth]] = count
    return count


@jit
def trie_parents(node_depths: Ints) -> Ints:
    """For the nodes of a trie in depth-first order, 1 + the number of the parent; 0 for those below the root."""
    parents = np.zeros(len(node_depths), np.int32)
    path = np.zeros(len(node_depths) + 2, np.int32)
    for node in range(len(node_depths)):
        depth = node_depths[node]
        parents[node] = path[depth]
        path[depth + 1] = node + 1
    return parents


@jit
def reached(edge_starts: Longs, edges: Ints, start: Longs) -> Flags:
    """Which states some path leads to from `start`; the edges of s are edges[edge_starts[s]:edge_starts[s + 1]]."""
    num_states = len(edge_starts) - 1
    seen = np.zeros(num_states, np.bool_)
    stack = np.empty(num_states, np.int32)
    height = 0
    for state in start:
        seen[state] = True
        stack[height] = state
        height += 1
    while height > 0:
        height -= 1
        state = stack[height]
        for i in range(edge_starts[state], edge_starts[state + 1]):
            if not seen[edges[i]]:
                seen[edges[i]] = True
                stack[height] = edges[i]
                height += 1
    return seen


@jit
def step(state: int, byte_class: int, num_classes: int, row_starts: Longs, labels: Bytes, targets: Ints) -> int:
    """The state after one byte of that class; 0 where the text could not be completed any more."""
    start = row_starts[state]
    length = row_starts[state + 1] - start
    if length == num_classes:
        return int(targets[start + byte_class])
    for edge in range(start, start + length):
        if labels[edge] == byte_class:
            return int(targets[edge])
    return 0


@jit
def run_bytes(
    state: int, text: Bytes, byte_classes: Bytes, num_classes: int, row_starts: Longs, labels: Bytes, targets: Ints
) -> int:
    """The state after all bytes of text, or 0."""
    for byte in text:
        state = step(state, byte_classes[byte], num_classes, row_starts, labels, targets)
        if state == 0:
            return 0
    return state


@jit
def forced_bytes(
    state: int,
    byte_classes: Bytes,
    num_classes: int,
    row_starts: Longs,
    labels: Bytes,
    targets: Ints,
    accepting: Flags,
    text: Bytes,
) -> tuple[int, int]:
    """Write into `text` the bytes that every way from `state` begins with, as far as they fit; returns how many, and
    the state behind them."""
    members = np.zeros(num_classes, np.int32)
    byte_of = np.zeros(num_classes, np.uint8)
    for byte in range(256):
        members[byte_classes[byte]] += 1
        byte_of[byte_classes[byte]] = byte
    length = 0
    while length < len(text) and not accepting[state]:
        start = row_starts[state]
        is_dense = row_starts[state + 1] - start == num_classes
        ways, only, after = 0, 0, 0
        for edge in range(start, row_starts[state + 1]):
            if targets[edge] != 0:
                only = edge - start if is_dense else int(labels[edge])
                ways += members[only]
                after = targets[edge]
        if ways != 1:
            break
        text[length] = byte_of[only]
        length += 1
        state = after
    return length, state


@jit
def fewest_tokens(
    text: Bytes,
    node_bytes: Bytes,
    node_skips: Ints,
    node_tokens: Longs,
    tokens: Ints,
    firsts: Ints,
    ends: Ints,
    counts: Ints,
) -> None:
    """For each place of `text`: the first of the fewest tokens that write the rest, where it ends, how many they are.

    counts has one entry more than text, 0 at the end. The trie holds every single byte, so that there always is a way.
    """
    roots = np.full(256, -1, np.int64)
    node = 0
    while node < len(node_bytes):
        roots[node_bytes[node]] = node
        node = node_skips[node]
    for start in range(len(text) - 1, -1, -1):
        counts[start] = len(text) + 1
        node, at = roots[text[start]], start + 1
        while node >= 0:
            if node_tokens[node] < node_tokens[node + 1] and counts[at] + 1 < counts[start]:
                counts[start] = counts[at] + 1
                firsts[start], ends[start] = tokens[node_tokens[node]], at
            child, limit = node + 1, node_skips[node]
            node = -1
            while at < len(text) and child < limit:
                if node_bytes[child] == text[at]:
                    node = child
                    break
                child = node_skips[child]
            at += 1


@jit
def written_within(
    text: Bytes,
    roots: Ints,
    node_bytes: Bytes,
    node_skips: Ints,
    node_tokens: Longs,
    tokens: Ints,
    rows: Words,
    is_whole: Flags,
) -> None:
    """For each of the first places of `text`, as many as there are rows: a mask of the tokens that write what follows
    there and no more. `is_whole`: no token writes the rest of the text and more.

    `roots`: the node of each first byte, -1 where there is none. The rows are empty before.
    """
    for start in range(len(rows)):
        node, at = roots[text[start]], start + 1
        is_whole[start] = True
        while node >= 0:
            for i in range(node_tokens[node], node_tokens[node + 1]):
                rows[start, tokens[i] >> 5] |= np.uint32(1) << np.uint32(tokens[i] & 31)
            child, limit = node + 1, node_skips[node]
            if at == len(text):
                is_whole[start] = child == limit
                break
            node = -1
            while child < limit:
                if node_bytes[child] == text[at]:
                    node = child
                    break
                child = node_skips[child]
            at += 1


@jit
def token_path(firsts: Ints, ends: Ints, start: int, limit: int) -> Ints:
    """The tokens of `fewest_tokens` from `start` on, at most `limit` of them."""
    path = np.empty(min(limit, len(firsts) - start), np.int32)
    count = 0
    while start < len(firsts) and count < limit:
        path[count] = firsts[start]
        start = ends[start]
        count += 1
    return path[:count]


@jit
def walk_row(
    state: int,
    node_classes: Bytes,
    node_depths: Ints,
    node_skips: Ints,
    node_tokens: Longs,
    tokens: Ints,
    num_classes: int,
    row_starts: Longs,
    labels: Bytes,
    targets: Ints,
    distances: Ints,
    limit: int,
    path: Ints,
    row: Words,
) -> int:
    """Set in `row` the bit of every token that leads from `state` to a state with distances[...] <= limit.

    node_classes holds the byte class of each trie node's byte; tokens node_tokens[n]:node_tokens[n + 1] end at node
    n; path is scratch of the trie's depth + 1. Returns the number of bits set.
    """
    path[0] = state
    node, count, end = 0, 0, len(node_depths)
    while node < end:
        depth = node_depths[node]
        after = step(path[depth], node_classes[node], num_classes, row_starts, labels, targets)
        if after == 0:
            node = node_skips[node]
            continue
        path[depth + 1] = after
        if distances[after] <= limit:
            for i in range(node_tokens[node], node_tokens[node + 1]):
                token = tokens[i]
                row[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
                count += 1
        node += 1
    return count


@jit
def walk_edges(
    first_state: int,
    num_states: int,
    node_classes: Bytes,
    node_depths: Ints,
    node_skips: Ints,
    node_tokens: Longs,
    num_classes: int,
    row_starts: Longs,
    labels: Bytes,
    targets: Ints,
    path: Ints,
    seen: Ints,
    edge_starts: Longs,
    edges: Ints,
    num_edges: int,
    max_visits: int,
) -> tuple[int, int, int]:
    """Which states one token leads to, for the states from first_state on: the token graph, without the tokens.

    seen is scratch, one entry per state, below first_state everywhere at first call (-1). Fills
    edges[edge_starts[s]:edge_starts[s + 1]] with the distinct successors of s. Stops before a state for which fewer
    than num_states entries are left in edges, or when max_visits trie nodes were visited. Returns (next state to do,
    edges so far, trie nodes visited).
    """
    visits = 0
    state = first_state
    end = len(node_depths)
    while state < num_states:
        if len(edges) - num_edges < num_states or visits > max_visits:
            break
        path[0] = state
        node = 0
        while node < end:
            visits += 1
            depth = node_depths[node]
            after = step(path[depth], node_classes[node], num_classes, row_starts, labels, targets)
            if after == 0:
                node = node_skips[node]
                continue
            path[depth + 1] = after
            if node_tokens[node] < node_tokens[node + 1] and seen[after] != state:
                seen[after] = state
                edges[num_edges] = after
                num_edges += 1
            node += 1
        state += 1
        edge_starts[state] = num_edges
    return state, num_edges, visits


@jit
def distances_to(accepting: Flags, edge_starts: Longs, edges: Ints) -> Ints:
    """For each state the fewest edges to an accepting state (0 where it accepts itself), or UNREACHABLE."""
    num_states = len(accepting)
    incoming = np.zeros(num_states + 1, np.int64)
    for target in edges[: edge_starts[num_states]]:
        incoming[target + 1] += 1
    for state in range(num_states):
        incoming[state + 1] += incoming[state]
    sources = np.empty(edge_starts[num_states], np.int32)
    filled = incoming.copy()
    for state in range(num_states):
        for edge in range(edge_starts[state], edge_starts[state + 1]):
            sources[filled[edges[edge]]] = state
            filled[edges[edge]] += 1
    distances = np.full(num_states, UNREACHABLE, np.int32)
    queue = np.empty(num_states, np.int32)
    head, tail = 0, 0
    for state in range(num_states):
        if accepting[state]:
            distances[state] = 0
            queue[tail] = state
            tail += 1
    while head < tail:
        state = queue[head]
        head += 1
        for i in range(incoming[state], incoming[state + 1]):
            source = sources[i]
            if distances[source] == UNREACHABLE:
                distances[source] = distances[state] + 1
                queue[tail] = source
                tail += 1
    return distances


@jit
def walk_successors(
    state: int,
    node_classes: Bytes,
    node_depths: Ints,
    node_skips: Ints,
    node_tokens: Longs,
    tokens: Ints,
    num_classes: int,
    row_starts: Longs,
    labels: Bytes,
    targets: Ints,
    path: Ints,
    token_to: Ints,
    found: Ints,
) -> tuple[int, int]:
    """The distinct states that one token leads to from `state`, in found[:n], and such a token in token_to[state].

    token_to holds -1 for every state not met before; those met before are not found again. Returns (n, trie nodes
    visited).
    """
    path[0] = state
    node, count, visits = 0, 0, 0
    end = len(node_depths)
    while node < end:
        visits += 1
        depth = node_depths[node]
        after = step(path[depth], node_classes[node], num_classes, row_starts, labels, targets)
        if after == 0:
            node = node_skips[node]
            continue
        path[depth + 1] = after
        if node_tokens[node] < node_tokens[node + 1] and token_to[after] < 0:
            token_to[after] = tokens[node_tokens[node]]
            found[count] = after
            count += 1
        node += 1
    return count, visits
