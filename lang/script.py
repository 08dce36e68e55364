"""Writing a program down as a script while its body runs, before anything was sent.

A backend that takes scripts runs all of it by itself; the executors then replay the same steps over its answers, so
that what a state is does not depend on who ran it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeGuard, TypeVar, assert_never

from niwaki.lang.chat import ChatTemplate
from niwaki.lang.nodes import Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, SetVariable, Text
from niwaki.lang.steps import Borrow, Flush, Fork, Join, Mark, Snapshot, Step, Tell
from niwaki.runtime.api import Branch, NiwakiError, Pending, SamplingParams
from niwaki.runtime.api.choices import METHODS
from niwaki.runtime.api.script import Choose, Generate, Op, Part, Say, Script, Split

MAX_BRANCHES = 256  # of one script: no server takes more at once
MAX_OPS = 4096


class RunsScripts(Protocol):
    """What a backend has beside `Backend` where it can run a whole program by itself."""

    def run_script(self, script: Script) -> Branch:
        """Start it, and give its first branch. What is then asked of that branch and its forks must be what stands in
        the script, in the same order; it is answered out of the script's results. What is asked behind that is done
        as on any branch."""
        ...


def runs_scripts(backend: object) -> TypeGuard[RunsScripts]:
    """As `isinstance` would say, which takes 10 us to: every row of a batch asks."""
    return hasattr(backend, "run_script")


class NotWritable(Exception):
    """The step cannot stand in a script: the interpreter has to go on from here."""


class Calls(Protocol):
    """What the state knows of its calls before they are made."""

    def params_of(self, node: Gen) -> SamplingParams:
        """Raises NiwakiError: the gen cannot be sent as it is."""
        ...

    def as_select(self, node: Gen) -> Select | None: ...

    def draws_of(self, node: Select) -> SamplingParams | None: ...

    def heals(self, node: Select) -> bool: ...


Value: TypeAlias = tuple[Part, ...] | list[tuple[Part, ...] | None] | None  # a text, one of each fork, anything else


@dataclass(frozen=True, slots=True)
class _Made:
    """What a fork had made by the time of its mark."""

    values: Mapping[str, Value]
    parts: tuple[Part, ...]
    has_turns: bool


class ScriptWriter:
    """One script in the making, by the states of one run; one thread at a time."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.branches: dict[object, BranchWriter] = {}  # of each state
        self.num_calls = 0
        self.num_ops = 0
        self.told: dict[Pending[object], tuple[Part, ...]] = {}
        self.marked: dict[Pending[Snapshot], _Made] = {}

    def add(self, state: object, parent: BranchWriter | None = None) -> BranchWriter:
        """The branch of another state, which starts where its parent is."""
        self.branches[state] = branch = BranchWriter(self, len(self.branches), parent)
        return branch

    def script(self, *, is_over: bool) -> Script:
        branches = tuple(branch.ops(is_over=is_over) for branch in self.branches.values())
        return Script(branches, is_over)


class BranchWriter:
    """What one state was given so far."""

    def __init__(self, script: ScriptWriter, number: int, parent: BranchWriter | None) -> None:
        self._script = script
        self.number = number
        self._ops: list[Op] = []
        self._said: list[Part] = []  # behind the last op, one text of one kind
        self._is_control = False
        self._parts: list[Part] = []  # all text since the fork
        self._scopes: list[int] = []
        self._values: dict[str, Value] = {} if parent is None else dict(parent._values)
        self._inherited = frozenset(self._values)
        self._roles: tuple[str, ...] = () if parent is None else parent._roles
        self._tail: str = "" if parent is None else parent._tail
        self._has_turns = False

    def write(self, step: Step, calls: Calls) -> None:
        """Note one step.

        Raises:
            NotWritable: it cannot stand in a script. Nothing of it was noted.
        """
        if self._script.num_ops >= MAX_OPS:
            raise NotWritable
        self._script.num_ops += 1
        match step:
            case Text(text=text):
                self._say((text,))
            case Gen():
                self._write_gen(step, calls)
            case Select():
                self._write_select(step, calls)
            case RoleBegin():
                self._begin_turn(step)
            case RoleEnd(role=role):
                self._end_turn(role)
            case ScopeBegin():
                self._scopes.append(len(self._parts))
            case ScopeEnd(name=name):
                if not self._scopes:
                    raise NotWritable
                self._values[name] = tuple(self._parts[self._scopes.pop() :])
            case SetVariable(name=name):
                self._values[name] = None
            case Fork(children=children):
                self._fork(children)
            case Mark(reached=reached):
                own = {name: value for name, value in self._values.items() if name not in self._inherited}
                self._script.marked[reached] = _Made(own, tuple(self._parts), self._has_turns)
            case Join(keeps_errors=True):  # there nobody goes on behind a failure
                raise NotWritable
            case Join():
                self._join(step)
            case Tell():
                self._tell(step)
            case Borrow(told=told):
                self._say(_known(self._script.told.get(told)))
            case Flush():
                raise NotWritable
            case _:
                assert_never(step)

    def ops(self, *, is_over: bool) -> tuple[Op, ...]:
        """Where more may come, up to the last call or fork: the text behind it goes with what comes."""
        if is_over:
            self._put()
            return tuple(self._ops)
        num = next((n for n in range(len(self._ops), 0, -1) if not isinstance(self._ops[n - 1], Say)), 0)
        return tuple(self._ops[:num])

    # -- text -------------------------------------------------------------------------------------------------------

    def _say(self, parts: Sequence[Part], *, control: bool = False) -> None:
        if not parts:
            return
        if self._said and control != self._is_control:
            self._put()
        self._is_control = control
        self._said += parts
        self._parts += parts

    def _put(self, *ops: Op) -> None:
        """What was said is one text, however many pieces it came in, as it is where a state sends it."""
        if self._said:
            self._ops.append(Say(tuple(self._said), self._is_control))
            self._said = []
        self._ops += ops

    def _begin_turn(self, node: RoleBegin) -> None:
        if node.tools:
            raise NotWritable
        template = self._script.template
        try:
            text = template.opening(self._roles, node.role, self._tail, generates=node.generates)
        except NiwakiError as error:  # the interpreter raises it where it belongs
            raise NotWritable from error
        self._say((text,) if text else (), control=True)
        self._has_turns = True

    def _end_turn(self, role: str) -> None:
        try:
            self._tail = self._script.template.closing(self._roles, role)
        except NiwakiError as error:
            raise NotWritable from error
        self._roles += (role,)
        self._say((self._tail,) if self._tail else (), control=True)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _write_gen(self, node: Gen, calls: Calls) -> None:
        if node.ask is not None:  # what its text means depends on what stands before
            raise NotWritable
        select = calls.as_select(node)
        if select is not None:
            self._write_select(select, calls)
            return
        try:
            params = calls.params_of(node)
        except NiwakiError as error:
            raise NotWritable from error
        call = self._new_call(node.name)
        self._put(Generate(call, params))
        self._parts.append(call)

    def _write_select(self, node: Select, calls: Calls) -> None:
        names = [name for name, method in METHODS.items() if method is node.method]
        if not names:
            raise NotWritable
        try:
            params = calls.draws_of(node)
        except NiwakiError as error:
            raise NotWritable from error
        call = self._new_call(node.name)
        self._put(Choose(call, node.choices, names[0], calls.heals(node), params))
        self._say((call,))

    def _new_call(self, name: str | None) -> int:
        call = self._script.num_calls
        self._script.num_calls += 1
        if name is not None:
            self._values[name] = (call,)
        return call

    # -- forks and values -------------------------------------------------------------------------------------------

    def _fork(self, children: Sequence[object]) -> None:
        if len(self._script.branches) + len(children) > MAX_BRANCHES:
            raise NotWritable
        self._put(*(Split(self._script.add(child, self).number) for child in children))

    def _join(self, step: Join) -> None:
        forks = [_known(self._script.marked.get(mark)) for mark in step.marks]
        if step.appends:
            if any(fork.has_turns for fork in forks):
                raise NotWritable
            for fork in forks:
                self._say(fork.parts)
            return
        for name in dict.fromkeys(name for fork in forks for name in fork.values):
            if name not in self._values:
                found = [fork.values.get(name) for fork in forks]
                self._values[name] = [value if isinstance(value, tuple) else None for value in found]

    def _tell(self, step: Tell) -> None:
        value = self._values.get(step.name)
        if isinstance(value, list) and step.index is not None:
            value = value[step.index]
        if not isinstance(value, tuple):
            raise NotWritable
        self._script.told[step.told] = value


T = TypeVar("T")


def _known(found: T | None) -> T:
    if found is None:
        raise NotWritable
    return found
