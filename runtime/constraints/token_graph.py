"""Which tokens lead where in a byte automaton: masks by how near to an end they lead, distances, ways to an end.

Owns nothing that changes; what is kept of it is another's (`matcher.py`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints import kernels
from niwaki.runtime.constraints.automaton import DEAD, START, ByteDfa
from niwaki.runtime.constraints.kernels import UNREACHABLE, Ints, Words
from niwaki.runtime.constraints.vocabulary import Vocabulary

MAX_VISITS: Final = 20_000_000  # trie nodes visited before measuring is given up: about 0.1 s
MAX_EDGES: Final = 4_000_000  # of the token graph


class TokenGraph:
    """The tokens of a vocabulary as edges between the states of a byte automaton.

    Raises:
        ConstraintError: no sequence of tokens makes a text that the automaton accepts, or the vocabulary lacks single
            bytes and the automaton is too large to find out.
    """

    def __init__(self, dfa: ByteDfa, vocabulary: Vocabulary) -> None:
        self.dfa = dfa
        self.vocabulary = vocabulary
        self._node_classes = dfa.byte_classes[vocabulary.node_bytes]
        self._walked = (  # what walks read of both
            self._node_classes,
            vocabulary.node_depths,
            vocabulary.node_skips,
            vocabulary.node_tokens,
            vocabulary.tokens,
            dfa.num_classes,
            dfa.row_starts,
            dfa.labels,
            dfa.targets,
        )
        exact = self._measured()
        self.is_exact = exact is not None
        if exact is None:
            if not vocabulary.has_every_byte:
                raise ConstraintError(
                    f"an automaton of {dfa.num_states} states is too large for a vocabulary without all single bytes"
                )
            exact = self._byte_distances()
        # Tokens (or, where not exact, bytes: never fewer) from each state to the nearest end.
        self.distances: Ints = exact
        if self.distances[START] == UNREACHABLE:
            raise ConstraintError("the vocabulary has no sequence of tokens for any text that the constraint allows")
        finite = self.distances[self.distances != UNREACHABLE]
        self.longest_distance = int(finite.max())

    @property
    def num_bytes(self) -> int:
        return self.dfa.num_bytes + self._node_classes.nbytes + self.distances.nbytes

    def step(self, state: int, token_id: int) -> int:
        """The state after the token, DEAD where it may not follow. Not for end tokens."""
        text = self.vocabulary.bytes_of(token_id)
        after = DEAD if text is None else int(self.dfa.run(text, state))
        return DEAD if self.distances[after] == UNREACHABLE else after

    def row(self, state: int, limit: int, with_end: bool = True) -> tuple[Words, int]:
        """The mask of the tokens that lead to a distance of at most `limit`, and how many they are; end tokens are
        set too where the text may end, but not counted."""
        dfa, vocabulary = self.dfa, self.vocabulary
        ends_here = with_end and dfa.accepting[state]
        row = vocabulary.eos_words.copy() if ends_here else np.zeros(vocabulary.num_words, np.uint32)
        count = kernels.walk_row(state, *self._walked, self.distances, limit, self._scratch(), row)
        return row, count

    def fill_subtree(self, state: int, nodes: tuple[int, int], depth: int, limit: int, row: Words) -> None:
        """`row` over the trie's nodes from and to, which stand `depth` deep, as if the text began there."""
        first, last = nodes
        depths, skips, tokens = self._walked[1:4]
        below = self._node_classes[first:last], depths[first:last] - depth, skips[first:last] - first
        walked = *below, tokens[first : last + 1], *self._walked[4:]
        kernels.walk_row(state, *walked, self.distances, limit, self._scratch(), row)

    def shortest_path(self, state: int, budget: int) -> tuple[int, ...] | None:
        """Fewest tokens from `state` to an end; None when they are more than `budget`."""
        if not self.is_exact:
            return self._searched_path(state, budget)
        if self.distances[state] > budget:
            return None
        path = []
        while self.distances[state] > 0:
            row, _ = self.row(state, int(self.distances[state]) - 1, with_end=False)
            path.append(first_bit(row))
            state = self.step(state, path[-1])
        return tuple(path)

    def _scratch(self) -> Ints:
        return np.empty(self.vocabulary.max_token_bytes + 1, np.int32)

    # -- distances

    def _measured(self) -> Ints | None:
        """Exact distances in tokens for all states, or None where the token graph is too large to look at."""
        dfa, vocabulary = self.dfa, self.vocabulary
        num_states = len(dfa.accepting)
        edge_starts = np.zeros(num_states + 1, np.int64)
        edges = np.empty(4 * num_states + 1024, np.int32)
        seen = np.full(num_states, -1, np.int32)
        state, num_edges, visits_left = START, 0, MAX_VISITS
        while True:
            state, num_edges, visits = kernels.walk_edges(
                state,
                num_states,
                self._node_classes,
                vocabulary.node_depths,
                vocabulary.node_skips,
                vocabulary.node_tokens,
                dfa.num_classes,
                dfa.row_starts,
                dfa.labels,
                dfa.targets,
                self._scratch(),
                seen,
                edge_starts,
                edges,
                num_edges,
                visits_left,
            )
            visits_left -= visits
            if state == num_states:
                return kernels.distances_to(dfa.accepting, edge_starts, edges)
            if visits_left < 0 or len(edges) > MAX_EDGES:
                return None
            edges = np.concatenate((edges, np.empty_like(edges)))

    def _byte_distances(self) -> Ints:
        dfa = self.dfa
        degrees = np.diff(dfa.row_starts)
        real = dfa.targets != DEAD  # dense rows have gaps
        sources = np.repeat(np.arange(len(degrees)), degrees)[real]
        edge_starts = np.zeros(len(degrees) + 1, np.int64)
        np.cumsum(np.bincount(sources, minlength=len(degrees)), out=edge_starts[1:])
        return kernels.distances_to(dfa.accepting, edge_starts, dfa.targets[real])

    # -- ways to an end

    def _searched_path(self, start: int, budget: int) -> tuple[int, ...] | None:
        """`shortest_path` forwards, breadth first: only as far as the end is away."""
        if self.dfa.accepting[start]:
            return ()
        token_to = np.full(len(self.dfa.accepting), -1, np.int32)
        found = np.empty(len(self.dfa.accepting), np.int32)
        came_from: dict[int, int] = {}
        token_to[start] = 0  # met already; it has no way back
        level = [start]
        visits_left = MAX_VISITS
        for _ in range(budget):
            next_level: list[int] = []
            for state in level:
                visits_left -= self._successors(state, token_to, found, next_level, came_from)
                if visits_left < 0:
                    return self._byte_path(start, budget)
            for state in next_level:
                if self.dfa.accepting[state]:
                    path = []
                    while state != start:
                        path.append(int(token_to[state]))
                        state = came_from[state]
                    return tuple(reversed(path))
            level = next_level
        return None

    def _successors(
        self, state: int, token_to: Ints, found: Ints, next_level: list[int], came_from: dict[int, int]
    ) -> int:
        """Add the states not met before that a token leads to. Returns the work it took."""
        count, visits = kernels.walk_successors(state, *self._walked, self._scratch(), token_to, found)
        for after in found[:count].tolist():
            next_level.append(after)
            came_from[after] = state
        return visits

    def _byte_path(self, state: int, budget: int) -> tuple[int, ...] | None:
        """An ending by tokens that each come nearest to the end: what is left when a search takes too long."""
        path: list[int] = []
        while self.distances[state] > 0:
            limit = int(self.distances[state]) - 1
            row, _ = self.row(state, limit, with_end=False)
            low = 0
            while low < limit:  # the nearest that any token reaches, by bisection
                middle = (low + limit) // 2
                nearer, nearer_count = self.row(state, middle, with_end=False)
                if nearer_count:
                    row, limit = nearer, middle
                else:
                    low = middle + 1
            path.append(first_bit(row))
            state = self.step(state, path[-1])
            if len(path) > budget:
                return None
        return tuple(path)


def first_bit(row: Words) -> int:
    """The lowest token of a mask that is not empty."""
    word = int(np.flatnonzero(row)[0])
    bits = int(row[word])
    return 32 * word + (bits & -bits).bit_length() - 1
