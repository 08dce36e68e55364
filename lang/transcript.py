"""What a state has made so far: its text in pieces, variables, chat turns, and where readers of the text stand.

Owned by the state's executor, under whose lock everything here is called. Waits for nothing, knows no backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from niwaki.lang.meta import Outcome, Usage
from niwaki.runtime.api import Delta, Message, Tool, UnknownVariable


@dataclass(slots=True)
class Span:
    """Chunks [start, end) of the text. `end` is None while it grows."""

    start: int
    end: int | None = None
    dtype: object = None  # what the text is to become; None: it stays text
    fills: bool = True  # False: the value does not grow with the text


@dataclass(slots=True)
class Cursor:
    """How far somebody has read the text, or that of the variable `name`. The reader owns it, the executor moves it."""

    name: str | None
    outside: bool
    span: Span | None = None  # None until it is known where the variable begins
    start: int = 0  # the last piece was chunks [start, stop)
    stop: int = 0
    is_done: bool = False


@dataclass(slots=True)
class OpenTurn:
    role: str
    content: Span


@dataclass(frozen=True, slots=True)
class Start:
    """What every fork of a state begins with: the text as one or two chunks, and the open turn if there is one."""

    chunks: tuple[str, ...]
    turn_role: str | None


class Transcript:
    """The text, the variables and the messages of one state of `program`."""

    def __init__(self, program: str) -> None:
        self._program = program
        self.chunks: list[str] = []  # the text, in pieces as they came
        self.spans: dict[str, Span] = {}
        self.variables: dict[str, object] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.usage = Usage()
        self.messages: list[Message] = []
        self.turn: OpenTurn | None = None
        self.tail = ""  # template text that stands after the last content
        self.tools: tuple[Tool, ...] = ()  # what the first turn told of
        self._scopes: list[Span] = []
        self._deltas: dict[int, tuple[Delta, ...]] = {}  # chunk -> the deltas that it came in
        # What came from the parent.
        self._inherited_variables: frozenset[str] = frozenset()
        self._num_inherited_messages = 0

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        self.chunks.append(text)

    def write_generated(self, text: str, deltas: tuple[Delta, ...]) -> None:
        self._deltas[len(self.chunks)] = deltas
        self.chunks.append(text)

    def assign(self, name: str, value: object) -> None:
        """Set by the program: what was known of a generation of that name is no longer true."""
        self.variables[name] = value
        self.outcomes.pop(name, None)
        self.spans.pop(name, None)

    def record(self, name: str, value: object, outcome: Outcome) -> None:
        """Set by a call."""
        self.variables[name] = value
        self.outcomes[name] = outcome

    def begin_scope(self, name: str) -> None:
        self._scopes.append(Span(len(self.chunks)))
        self.spans[name] = self._scopes[-1]

    def end_scope(self, name: str) -> str:
        """The text that came inside, which is now the variable's value."""
        span = self.spans[name] = self._scopes.pop()
        span.end = len(self.chunks)
        value = self.variables[name] = "".join(self.chunks[span.start :])
        self.outcomes.pop(name, None)
        return value

    def begin_turn(self, role: str) -> None:
        self.turn = OpenTurn(role, Span(len(self.chunks)))

    def end_turn(self, turn: OpenTurn, tail: str) -> None:
        self.messages.append(Message(turn.role, "".join(self.chunks[turn.content.start :])))
        self.turn, self.tail = None, tail

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(message.role for message in self.messages)

    # -- forks --------------------------------------------------------------------------------------------------------

    def start_of_forks(self) -> Start:
        if self.turn is None:
            text = "".join(self.chunks)
            return Start((text,) if text else (), None)
        # The open turn's content so far becomes a chunk of its own, so that its start can be told.
        start = self.turn.content.start
        return Start(("".join(self.chunks[:start]), "".join(self.chunks[start:])), self.turn.role)

    def inherit(self, parent: Transcript, start: Start) -> None:
        self.chunks = list(start.chunks)
        self.variables = dict(parent.variables)
        self._inherited_variables = frozenset(self.variables)
        self.outcomes = dict(parent.outcomes)
        self.messages = list(parent.messages)
        self._num_inherited_messages = len(self.messages)
        self.tail, self.tools = parent.tail, parent.tools
        if start.turn_role is not None:
            self.turn = OpenTurn(start.turn_role, Span(1))

    def own_variables(self) -> Mapping[str, object]:
        """Those that the parent did not have."""
        return {name: value for name, value in self.variables.items() if name not in self._inherited_variables}

    @property
    def has_own_turns(self) -> bool:
        return self.turn is not None or len(self.messages) > self._num_inherited_messages

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        return "".join(self.chunks)

    def variable(self, name: str, coming: Sequence[str] = (), remedy: str = "") -> object:
        """Raises UnknownVariable: it is not set. `coming` are those that will be, `remedy` what to do."""
        if name not in self.variables:
            known = ", ".join(map(repr, dict.fromkeys((*self.variables, *coming))))
            if not known:
                known, remedy = "none", remedy or f"; append what sets it before: s += gen({name!r})"
            raise UnknownVariable(f"program {self._program} has no variable {name!r}; it has: {known}{remedy}")
        return self.variables[name]

    def growing(self) -> dict[str, tuple[object, str]]:
        """Of each variable whose value grows with its text: the type that it is to have, and the text so far."""
        spans = {name: span for name, span in self.spans.items() if span.end is None and span.fills}
        return {name: (span.dtype, "".join(self.chunks[span.start :])) for name, span in spans.items()}

    def outcome(self, name: str) -> Outcome:
        """Raises UnknownVariable: it is not set, or no call made it."""
        if name in self.outcomes:
            return self.outcomes[name]
        self.variable(name)
        raise UnknownVariable(f"variable {name!r} was not generated, so nothing is known about its making")

    def has_more(self, cursor: Cursor) -> bool:
        """Is there text behind a cursor whose start is known, or is its end reached?"""
        is_ended = cursor.span is not None and cursor.span.end is not None
        return is_ended or len(self.chunks) > cursor.stop

    def move(self, cursor: Cursor) -> str:
        """The text behind the cursor, whose span is known; the cursor stands behind it afterwards."""
        assert cursor.span is not None, "the caller found where its variable begins"
        cursor.start = cursor.stop
        cursor.stop = len(self.chunks) if cursor.span.end is None else cursor.span.end
        return "".join(self.chunks[cursor.start : cursor.stop])

    def deltas_of(self, cursor: Cursor) -> tuple[Delta, ...]:
        """What the piece that the cursor took last was made of. Text that the program wrote has none."""
        return tuple(delta for at in range(cursor.start, cursor.stop) for delta in self._deltas.get(at, ()))
