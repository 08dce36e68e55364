"""A state that need not know what it writes on: reads of such values give a mark, which the text takes up when it runs.

So the body of a program runs to its end, or to the first read that it decides by, while nothing has been generated yet;
all its steps are queued by then, and the backend's callbacks run them without the author's thread.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

from niwaki.lang.executor import Executor
from niwaki.lang.nodes import Gen, ScopeEnd, Select, SetVariable, Text, variables_of
from niwaki.lang.origin import Origin
from niwaki.lang.run import Run
from niwaki.lang.sites import Sites
from niwaki.lang.steps import Borrow, Join, Snapshot, Step, Tell
from niwaki.runtime.api import Pending


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
        self._prefix = f"\ue004{secrets.token_hex(8)}."
        self._pattern = re.compile(re.escape(self._prefix) + r"(\d+)\ue005")
        self._told: list[Pending[object]] = []

    def mark(self, told: Pending[object]) -> str:
        self._told.append(told)
        return f"{self._prefix}{len(self._told) - 1}\ue005"

    def parts(self, text: str) -> Iterator[Text | Borrow]:
        """The text, taken apart at the marks in it."""
        end = 0
        for found in self._pattern.finditer(text) if self._prefix in text else ():
            if found.start() > end:
                yield Text(text[end : found.start()])
            yield Borrow(self._told[int(found[1])])
            end = found.end()
        if end < len(text):
            yield Text(text[end:])


@dataclass(slots=True)
class Shared:
    """What all states of a lazy run have in common."""

    sites: Sites
    marks: Marks = field(default_factory=Marks)
    # What forks had set by the time of their mark, which a join waits for.
    own_at: WeakKeyDictionary[Pending[Snapshot], Mapping[str, Known]] = field(default_factory=WeakKeyDictionary)


class LazyExecutor(Executor):
    """An executor whose reads give marks where `sites` says that the value is only written on."""

    def __init__(self, run: Run, shared: Shared, *, parent: LazyExecutor | None = None) -> None:
        super().__init__(run, parent=parent)
        self._shared = shared
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
        return super().submit(taken_apart, origin)

    def variable(self, name: str, *, outside: bool = False) -> object:
        """The value, or a mark for it where the caller's caller only writes it on."""
        kind = self._shared.sites.kind_at(sys._getframe(2))
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
            case Join(appends=False, marks=marks):
                self._learn_join([self._shared.own_at[mark] for mark in marks])

    def _knows(self, names: Sequence[str], known: Known) -> None:
        for name in names:
            self._known[name] = self._own[name] = known

    def _learn_join(self, forks: Sequence[Mapping[str, Known]]) -> None:
        for name in dict.fromkeys(name for own in forks for name in own):
            if name not in self._known:  # a join leaves what the parent has
                is_text = all(isinstance(own[name], TextValue) for own in forks if name in own)
                self._knows((name,), Gathered(tuple(name in own for own in forks)) if is_text else None)
