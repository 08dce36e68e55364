"""A state that need not know what it writes on: reads of such values give a mark, which the text takes up when it runs.

So the body of a program runs to its end, or to the first read that it decides by, while nothing has been generated yet;
all its steps are queued by then, and the backend's callbacks run them without the author's thread. Where the backend
takes scripts, nothing runs until then either: it gets all that was queued as one, and the queues replay its answers.
"""

from __future__ import annotations

import re
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from niwaki.lang.backends import Lease
from niwaki.lang.executor import Executor
from niwaki.lang.nodes import Gen, ScopeEnd, Select, SetVariable, Text, variables_of
from niwaki.lang.origin import Origin
from niwaki.lang.run import Run
from niwaki.lang.script import NotWritable, ScriptWriter, runs_scripts
from niwaki.lang.sites import Sites
from niwaki.lang.steps import Borrow, Join, Snapshot, Step, Tell
from niwaki.lang.waiting import Question
from niwaki.runtime.api import Pending, UnsupportedByBackend

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextValue:
    """The variable's value will be a text."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A list with one text of each fork; False: None stands there, since the fork did not set it."""

    is_set: tuple[bool, ...]


Known: TypeAlias = TextValue | Gathered | None  # None: anything else


class Marks:
    """The marks of one run. No text of an author or a model can hold one: they are drawn at random."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key = ""  # drawn with the first mark: most programs read nothing that they write on
        self._told: list[Pending[object]] = []

    def mark(self, told: Pending[object]) -> str:
        with self._lock:
            self._key = self._key or secrets.token_hex(8)
            self._told.append(told)
            return f"\ue004{self._key}.{len(self._told) - 1}\ue005"

    def parts(self, text: str) -> Iterator[Text | Borrow]:
        """The text, taken apart at the marks in it."""
        end = 0
        for found in _MARK.finditer(text) if self._key and self._key in text else ():
            if found[1] != self._key:  # of another run, whose author took it out of there
                continue
            if found.start() > end:
                yield Text(text[end : found.start()])
            yield Borrow(self._told[int(found[2])])
            end = found.end()
        if end < len(text):
            yield Text(text[end:])


_MARK: Final = re.compile(r"\ue004([0-9a-f]{16})\.(\d+)\ue005")


@dataclass(slots=True)
class Shared:
    """What all states of a lazy run have in common."""

    sites: Sites
    marks: Marks = field(default_factory=Marks)
    # What forks had set by the time of their mark, which a join waits for.
    own_at: WeakKeyDictionary[Pending[Snapshot], Mapping[str, Known]] = field(default_factory=WeakKeyDictionary)
    # While there is one, nothing runs: what is submitted is queued, and written down in it. Under the lock.
    script: ScriptWriter | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    root: Callable[[], LazyExecutor | None] = lambda: None


class LazyExecutor(Executor):
    """An executor whose reads give marks where `sites` says that the value is only written on."""

    def __init__(self, run: Run, shared: Shared, *, parent: LazyExecutor | None = None) -> None:
        super().__init__(run, parent=parent)
        self._shared = shared
        if parent is None:
            shared.root = weakref.ref(self)
        # What is known of each variable's value by the time that everything submitted so far has run.
        self._known: dict[str, Known] = {} if parent is None else dict(parent._known)
        self._own: dict[str, Known] = {}  # those that were set since the fork

    def submit(self, steps: Sequence[Step], origin: Origin) -> bool:
        marks = self._shared.marks
        taken_apart: list[Step] = []
        for step in steps:
            if isinstance(step, Text):
                taken_apart += marks.parts(step.text)
                continue
            taken_apart.append(step)
            self._learn(step)
        if self._shared.script is None:
            return super().submit(taken_apart, origin)
        with self._shared.lock:  # the script and the queue must hold the same, in the same order
            return super().submit(taken_apart, origin) and self._write(taken_apart)

    def variable(self, name: str, *, outside: bool = False) -> object:
        """The value, or a mark for it where the caller's caller only writes it on."""
        kind = self._shared.sites.kind_at(sys._getframe(2))
        if kind == "end":
            self._send_script(is_over=True)
        match self._known.get(name):
            case TextValue() if kind == "text":
                return self._marked(name)
            case Gathered(is_set) if kind == "list":
                return [self._marked(name, index) if one else None for index, one in enumerate(is_set)]
        return super().variable(name, outside=outside)

    def mark(self, origin: Origin) -> Pending[Snapshot]:
        reached = super().mark(origin)
        self._shared.own_at[reached] = dict(self._own)
        return reached

    def _marked(self, name: str, index: int | None = None) -> str:
        told: Pending[object] = Pending()
        if not self.submit((Tell(name, told, index),), Origin("", 0)):
            self.raise_error()
        return self._shared.marks.mark(told)

    def _child(self) -> LazyExecutor:
        return LazyExecutor(self.run, self._shared, parent=self)

    # -- the script ---------------------------------------------------------------------------------------------------

    def write_script(self) -> None:
        """Where the backend takes scripts: from now on write down what is submitted, until somebody has to wait."""
        if runs_scripts(self.run.backend):
            self._shared.script = ScriptWriter(self.run.chat)
            self._shared.script.add(self)

    def end_body(self, ret_value: object) -> None:
        self._send_script(is_over=True)
        super().end_body(ret_value)

    def _write(self, steps: Sequence[Step]) -> bool:
        script = self._shared.script
        try:
            if script is not None:
                for step in steps:
                    script.branches[self].write(step, self)
        except NotWritable:
            self._send_script(is_over=False)
        return True

    def _send_script(self, *, is_over: bool) -> None:
        """Let the backend run what was written, and the states all that was submitted."""
        root = self._shared.root()
        with self._shared.lock:
            script = self._shared.script
            if script is not None and script.num_calls and root is not None:
                root._stand_on_script(script, is_over=is_over)
            self._shared.script = None
        if script is not None and root is not None:
            root._pump()

    def _stand_on_script(self, script: ScriptWriter, *, is_over: bool) -> None:
        backend = self.run.backend
        assert runs_scripts(backend), "a script is written for such a backend only"
        if self._error is not None:
            return
        try:
            lease = Lease(self.run.backend, backend.run_script(script.script(is_over=is_over)))
        except UnsupportedByBackend:  # the call that it cannot do says so where it stands
            return
        with self._lock:
            self._place.hold(lease)

    def _pump(self) -> None:
        if self._shared.script is None:
            super()._pump()

    def _wait_or_time_out(self, is_ready: Question) -> None:
        if self._shared.script is not None and not is_ready():
            with self._changed.released():
                self._send_script(is_over=False)
        super()._wait_or_time_out(is_ready)

    async def _when(self, is_ready: Question, read: Callable[[], T]) -> T:
        self._send_script(is_over=False)
        return await super()._when(is_ready, read)

    # -- what is known of values --------------------------------------------------------------------------------------

    def _learn(self, step: Step) -> None:
        match step:
            case Gen(name=name, options=options, type=kind, timeout=timeout, dtype=dtype):
                is_text = (kind is None or kind.parse is str) and (options.n or self.run.options.n or 1) == 1
                # What a gen says beside these may make its value something else than its text.
                is_plain = step == Gen(name, options, kind, timeout, dtype)
                self._knows(variables_of(step), TextValue() if is_text and is_plain else None)
            case Select() | ScopeEnd():
                self._knows(variables_of(step), TextValue())
            case SetVariable():
                self._knows(variables_of(step), None)
            case Join(appends=False, marks=marks, keeps_errors=keeps_errors):
                self._learn_join([self._shared.own_at[mark] for mark in marks], are_texts=not keeps_errors)

    def _knows(self, names: Sequence[str], known: Known) -> None:
        for name in names:
            self._known[name] = self._own[name] = known

    def _learn_join(self, forks: Sequence[Mapping[str, Known]], *, are_texts: bool) -> None:
        for name in dict.fromkeys(name for own in forks for name in own):
            if name not in self._known:  # a join leaves what the parent has
                is_text = are_texts and all(isinstance(own[name], TextValue) for own in forks if name in own)
                self._knows((name,), Gathered(tuple(name in own for own in forks)) if is_text else None)
