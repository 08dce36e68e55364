"""From a pattern to a byte automaton, by outlines-core, and from several to one, by interegular.

Imports the standard library and outlines-core only, interegular when it is asked for: the process that compiles starts
quickly, and never loads NumPy or torch.
"""

from __future__ import annotations

import json
import struct
from array import array
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from outlines_core import Index  # type: ignore[import-untyped]  # ships no types
from outlines_core import Vocabulary as OutlinesVocabulary

if TYPE_CHECKING:
    from interegular.fsm import FSM

HEADER = struct.Struct("<II")

# Two noncharacters that no pattern matches (see pattern.py) stand before and after the text. END: `text` matches P
# exactly when what follows BEGIN takes `text + END`; reading acceptance from this transition is exact where
# outlines-core's own final states are not. BEGIN: outlines-core also builds the states of a search that may start
# anywhere, at every byte anew, which for [a-z][a-z0-9]{0,30} are 2**30; with BEGIN a search can start only once.
BEGIN, END = "\U0010fffe", "\U0010ffff"
END_ID = 256
_TOKENS: dict[str | bytes, list[int]] = {bytes([byte]): [byte] for byte in range(256)}
_TOKENS[END.encode()] = [END_ID]
BYTES_VOCABULARY = OutlinesVocabulary(END_ID + 1, _TOKENS)


@dataclass(frozen=True, slots=True)
class Transitions:
    """A deterministic automaton over bytes as a list of edges. State 0 is the start."""

    accepting: bytes  # one byte a state: 1 where the text may end
    sources: array[int]  # "i"
    labels: bytes
    targets: array[int]  # "i"

    def to_bytes(self) -> bytes:
        parts = (HEADER.pack(len(self.accepting), len(self.labels)), self.accepting, self.labels)
        return b"".join((*parts, self.sources.tobytes(), self.targets.tobytes()))

    @classmethod
    def from_bytes(cls, body: bytes) -> Transitions:
        num_states, num_edges = HEADER.unpack_from(body)
        accepting_at = HEADER.size
        labels_at = accepting_at + num_states
        sources_at = labels_at + num_edges
        targets_at = sources_at + 4 * num_edges
        if len(body) != targets_at + 4 * num_edges:
            raise ValueError(f"an answer of {len(body)} bytes cannot hold {num_states} states, {num_edges} edges")
        return cls(
            accepting=body[accepting_at:labels_at],
            labels=body[labels_at:sources_at],
            sources=array("i", body[sources_at:targets_at]),
            targets=array("i", body[targets_at:]),
        )


def transitions_of(pattern: str) -> Transitions:
    """The byte automaton of a pattern in the Rust regex dialect. May take for ever: see `pattern.cost`.

    Raises:
        ValueError: outlines-core refuses the pattern.
    """
    index = Index(f"{BEGIN}(?:{pattern}){END}", BYTES_VOCABULARY)
    final = set(index.get_final_states())
    edges = index.get_transitions()
    start = index.get_initial_state()
    for byte in BEGIN.encode():
        start = edges[start][byte]
    number: dict[int, int] = {start: 0}
    order = list(number)
    accepting = bytearray()
    sources, labels, targets = array("i"), bytearray(), array("i")
    for state in order:  # grows while we walk: states are numbered as they are met
        row = edges.get(state, {})
        source = number[state]
        accepting.append(row.get(END_ID) in final)
        for token, target in row.items():
            if token >= END_ID:
                continue
            known = number.get(target)
            if known is None:
                known = number[target] = len(order)
                order.append(target)
            sources.append(source)
            labels.append(token)
            targets.append(known)
    return Transitions(bytes(accepting), sources, bytes(labels), targets)


# ---------------------------------------------------------------------------------------------------------------
# Several automata in one
# ---------------------------------------------------------------------------------------------------------------

# The sign of look-around i in a pattern: U+10FFFE, which no set holds, and the character FIRST_LOOK + i.
SIGN = BEGIN.encode()
FIRST_LOOK = 0x21
ANY_TEXT = r"[\x{0}-\x{10FFFD}]*"

Table = list[dict[int, int]]  # by state: byte -> next state


def automaton_of(request: str) -> Transitions:
    """The automaton of a pattern in the Rust dialect, or behind a NUL of an expression as JSON. An expression is

    - a pattern,
    - ["all", expression, ...]: what all of them take,
    - ["first", expression]: those of its texts that have no shorter one of them at their start,
    - ["look", pattern, [[is ahead, is negated, expression], ...]]: a pattern with signs of look-arounds in it.
      One that looks ahead says what the text from here on is (or is not), the others what the text up to here is.

    May take for ever.

    Raises:
        ValueError: outlines-core refuses a pattern, or the expression is none.
    """
    return _meant(json.loads(request[1:])) if request.startswith("\0") else transitions_of(request)


def _meant(expression: object) -> Transitions:
    match expression:
        case str(pattern):
            return transitions_of(pattern)
        case ["all", *parts]:
            return _of_fsm(reduce(and_, [_fsm(_meant(part)) for part in parts]))
        case ["first", part]:
            found = _meant(part)
            kept = [edge for edge, source in enumerate(found.sources) if not found.accepting[source]]
            return Transitions(
                found.accepting,
                array("i", [found.sources[edge] for edge in kept]),
                bytes(found.labels[edge] for edge in kept),
                array("i", [found.targets[edge] for edge in kept]),
            )
        case ["look", str(pattern), list(looks)]:
            around = [(bool(ahead), bool(negated), _meant(part)) for ahead, negated, part in looks]
            return _of_fsm(_Looking(transitions_of(pattern), around).fsm())
        case _:
            raise ValueError(f"not an expression: {expression!r}")


def _table(automaton: Transitions) -> Table:
    table: Table = [{} for _ in automaton.accepting]
    for source, label, target in zip(automaton.sources, automaton.labels, automaton.targets, strict=True):
        table[source][label] = target
    return table


def _classes(tables: list[Table]) -> dict[int, int]:
    """Bytes that no state of any of them tells apart have the same number."""
    signatures: dict[tuple[int | None, ...], int] = {}
    return {
        byte: signatures.setdefault(tuple(row.get(byte) for table in tables for row in table), len(signatures))
        for byte in range(256)
    }


def _fsm(automaton: Transitions) -> FSM:
    from interegular.fsm import FSM, Alphabet

    table = _table(automaton)
    alphabet = Alphabet(_classes([table]))  # type: ignore[arg-type]  # any symbols will do, not only characters
    finals = {state for state, accepts in enumerate(automaton.accepting) if accepts}
    rows = {state: {alphabet[byte]: target for byte, target in row.items()} for state, row in enumerate(table)}
    return FSM(alphabet, set(range(len(table))), 0, finals, rows)


def _of_fsm(fsm: FSM) -> Transitions:
    order = [fsm.initial, *(state for state in fsm.states if state != fsm.initial)]
    number = {state: place for place, state in enumerate(order)}
    sources, labels, targets = array("i"), bytearray(), array("i")
    for state in order:
        for key, target in fsm.map.get(state, {}).items():
            for byte in fsm.alphabet.by_transition[key]:
                sources.append(number[state])
                labels.append(byte)
                targets.append(number[target])
    accepting = bytes(state in fsm.finals for state in order)
    return Transitions(accepting, sources, bytes(labels), targets)


Due = frozenset[tuple[int, int]]  # (look-ahead, state): what the rest of the text is, or is not
Stand = tuple[int, Due]  # a state of the pattern, and what is due behind it


class _Looking:
    """A pattern's automaton followed together with those of its look-arounds.

    A look-behind reads the text from its start. A look-ahead begins to read where its sign is passed, and what it says
    is due at the end of the text. So a place is: where each look-behind stands, and the ways to stand in the pattern.
    """

    def __init__(self, pattern: Transitions, looks: list[tuple[bool, bool, Transitions]]) -> None:
        self._accepting = pattern.accepting
        self._table = _table(pattern)
        self._jumps = self._without_signs()
        self._is_negated = [negated for _, negated, _ in looks]
        self._finals = [automaton.accepting for _, _, automaton in looks]
        self._tables = [_table(automaton) for _, _, automaton in looks]
        self._behind = [number for number, (ahead, _, _) in enumerate(looks) if not ahead]
        text = transitions_of(ANY_TEXT)
        texts = _table(text)
        self._class_of = _classes([self._table, *self._tables, texts])
        self._byte_of = {number: byte for byte, number in self._class_of.items()}
        self._whole = [
            {state for state in range(len(table)) if self._takes_all(table, finals, state, texts, text.accepting)}
            for table, finals in zip(self._tables, self._finals, strict=True)
        ]

    def fsm(self) -> FSM:
        from interegular.fsm import Alphabet, OblivionError, crawl

        def follow(
            place: tuple[tuple[int, ...], frozenset[Stand]], key: int
        ) -> tuple[tuple[int, ...], frozenset[Stand]]:
            found = self._after(place, self._byte_of[key])
            if found is None:
                raise OblivionError
            return found

        def is_final(place: tuple[tuple[int, ...], frozenset[Stand]]) -> bool:
            return any(self._accepting[state] and self._is_met(due) for state, due in place[1])

        behind = (0,) * len(self._behind)
        start = (behind, self._stands({(0, frozenset())}, behind))
        alphabet = Alphabet(self._class_of)  # type: ignore[arg-type]  # as in _fsm
        found: FSM = crawl(alphabet, start, is_final, follow)  # type: ignore[no-untyped-call]  # its types are partial
        return found

    def _without_signs(self) -> list[list[tuple[int, int]]]:
        """Take the signs out of the pattern's table: by state, (look-around, next state)."""
        jumps: list[list[tuple[int, int]]] = [[] for _ in self._table]
        cut: list[tuple[int, int]] = []
        for state in range(len(self._table)):
            at: int | None = state
            for byte in SIGN:
                before, at = at, None if at is None else self._table[at].get(byte)
            if at is not None and before is not None:
                cut.append((before, SIGN[-1]))
                jumps[state] = [(byte - FIRST_LOOK, target) for byte, target in self._table[at].items()]
        for state, byte in cut:
            self._table[state].pop(byte, None)
        return jumps

    def _takes_all(self, table: Table, finals: bytes, state: int, texts: Table, text_finals: bytes) -> bool:
        """Whether every text may follow in this state."""
        seen = {(state, 0)}
        queue = list(seen)
        for at, text in queue:  # grows while we walk
            if text_finals[text] and not finals[at]:
                return False
            for byte in self._byte_of.values():
                text_after, after = texts[text].get(byte), table[at].get(byte)
                if text_after is None:
                    continue
                if after is None:
                    return False
                if (after, text_after) not in seen:
                    seen.add((after, text_after))
                    queue.append((after, text_after))
        return True

    def _after(
        self, place: tuple[tuple[int, ...], frozenset[Stand]], byte: int
    ) -> tuple[tuple[int, ...], frozenset[Stand]] | None:
        behind: list[int] = []
        for number, state in zip(self._behind, place[0], strict=True):
            after = self._tables[number][state].get(byte)
            if after is None:  # no text: the pattern does not take it either
                return None
            behind.append(after)
        moved: set[Stand] = set()
        for state, due in place[1]:
            target = self._table[state].get(byte)
            still = None if target is None else self._moved(due, byte)
            if target is not None and still is not None:
                moved.add((target, still))
        stands = self._stands(moved, tuple(behind))
        return (tuple(behind), stands) if stands else None

    def _moved(self, due: Due, byte: int) -> Due | None:
        """What is due behind the byte; None where it can no longer be met."""
        found: set[tuple[int, int]] = set()
        for number, state in due:
            target = self._tables[number][state].get(byte)
            if not self._note(number, target, found):
                return None
        return frozenset(found)

    def _note(self, number: int, state: int | None, found: set[tuple[int, int]]) -> bool:
        """Add what look-ahead `number` still asks for in `state`. False: it is not met, whatever follows."""
        if state is None or state in self._whole[number]:
            return (state is None) == self._is_negated[number]
        found.add((number, state))
        return True

    def _stands(self, stands: set[Stand], behind: tuple[int, ...]) -> frozenset[Stand]:
        """These and those that signs lead to from them, less those that ask for more than another one."""
        queue = list(stands)
        for state, due in queue:  # grows while we walk
            for number, target in self._jumps[state]:
                if number in self._behind:
                    is_met = bool(self._finals[number][behind[self._behind.index(number)]])
                    after: Due | None = due if is_met != self._is_negated[number] else None
                else:
                    asked = set(due)
                    after = frozenset(asked) if self._note(number, 0, asked) else None
                if after is not None and (target, after) not in stands:
                    stands.add((target, after))
                    queue.append((target, after))
        return frozenset(
            (state, due) for state, due in stands if not any(other == state and less < due for other, less in stands)
        )

    def _is_met(self, due: Due) -> bool:
        return all(bool(self._finals[number][state]) != self._is_negated[number] for number, state in due)
